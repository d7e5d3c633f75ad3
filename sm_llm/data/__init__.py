"""Text to packed rows, and packed rows to batches; numpy and pyarrow only, no torch."""
