"""How a model is spread over processes, and the arithmetic of all degrees."""
