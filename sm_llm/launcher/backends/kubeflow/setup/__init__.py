"""The cluster itself: its nodes, and checks before the first job."""
