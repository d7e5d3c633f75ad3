"""Tensors in files: as memory-mapped views, and in the zip format of torch, read and written without torch."""
