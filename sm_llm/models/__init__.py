"""Model families: from a Hugging Face config alone to tensors, counts, FLOPs and initial weights, without torch."""
