"""S3: its client, its store and conditional writes."""
