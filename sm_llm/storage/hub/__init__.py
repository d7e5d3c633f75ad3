"""The Hugging Face hub as a source."""
