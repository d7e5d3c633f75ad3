"""The parts of the script task: the user's program, its platform and what it publishes."""
