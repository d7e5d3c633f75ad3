"""What runs on each node of a Slurm job, around torchrun; only the standard library is used here."""
