"""The event log of a run: its kinds and how they are written and read."""
