"""Atomic publication of checkpoints and results (docs/publication.md)."""
