"""Publishes checkpoints and results while a job runs."""
