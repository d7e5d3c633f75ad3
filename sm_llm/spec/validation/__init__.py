"""Faults of a specification, all at once."""
