"""How files that grow reach S3, and come back as a local copy."""
