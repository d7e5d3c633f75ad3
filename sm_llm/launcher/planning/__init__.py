"""What is decided before anything is started."""
