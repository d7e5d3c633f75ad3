"""Jobs that check a Slurm cluster, and build what other jobs run in: environments and container images."""
