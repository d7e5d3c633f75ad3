"""What runs on the nodes of every cluster before the processes of a task: checks, and the worker's folders."""
