"""What every process of a job has: its place, messages, signals, failures and the watchdog."""
