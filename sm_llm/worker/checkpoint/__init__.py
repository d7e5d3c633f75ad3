"""Saves training state and continues from it."""
