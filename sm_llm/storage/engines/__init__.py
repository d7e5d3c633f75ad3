"""Engines that move bytes between S3 and local disk; whether the right bytes arrived is judged elsewhere."""
