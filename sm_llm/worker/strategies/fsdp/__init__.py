"""The strategy ``fsdp``: native PyTorch FSDP2 on Hugging Face models."""
