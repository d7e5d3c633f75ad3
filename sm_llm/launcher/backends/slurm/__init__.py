"""The Slurm backend: one readable sbatch script per attempt, run through the cluster's own commands."""
