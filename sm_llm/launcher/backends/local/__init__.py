"""The local backend: this machine, without docker or AWS."""
