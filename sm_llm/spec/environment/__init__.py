"""Environment variables and secrets of a job."""
