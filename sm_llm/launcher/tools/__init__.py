"""Tools beside runs: the proof of exact resume, a shell, sync."""
