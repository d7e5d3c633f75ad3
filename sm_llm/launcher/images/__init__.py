"""The container images that jobs run in: the table, building and locks."""
