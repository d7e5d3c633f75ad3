"""Text to packed rows."""
