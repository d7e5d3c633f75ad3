"""Brings what a job reads to its node."""
