"""The process that moves files beside the one that trains."""
