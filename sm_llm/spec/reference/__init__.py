"""The specification explained: its schema, its fields and a template."""
