"""Reads what a run does: events, metrics, status and logs."""
