"""Issues of a specification, all at once."""
