"""What ends a job in order: failures, hangs, limits of time, requests to stop."""
