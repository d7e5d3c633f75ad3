"""How two specifications differ, and what a difference changes."""
