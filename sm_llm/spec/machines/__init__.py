"""The machines of a job: instance types, accelerators and this machine."""
