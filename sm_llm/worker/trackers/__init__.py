"""Experiment trackers, fed from the event log."""
