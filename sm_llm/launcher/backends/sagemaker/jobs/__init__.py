"""Training jobs that are started, watched and stopped."""
