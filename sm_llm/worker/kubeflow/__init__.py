"""What runs in each pod of a Kubernetes job, around the processes of the task."""
