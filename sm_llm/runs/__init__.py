"""What a run is on disk and in S3: its record, its places, its states, and how it is read and changed."""
