"""Checks against other programs, run by hand: none of them belongs to the suite."""
