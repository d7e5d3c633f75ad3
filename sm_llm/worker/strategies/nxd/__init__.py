"""The strategy ``nxd``: neuronx-distributed on Trainium."""
