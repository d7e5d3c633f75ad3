"""The tasks: one module per kind."""
