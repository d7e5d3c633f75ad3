"""The model families: from a config to tensors, counts and FLOPs, one module per family."""
