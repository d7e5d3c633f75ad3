"""Copies between folders and S3, compared and verified."""
