"""The CreateTrainingJob request as a value, and what the service would refuse of it."""
