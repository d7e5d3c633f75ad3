"""The result of a training: gathered, exported, with a sample, published."""
