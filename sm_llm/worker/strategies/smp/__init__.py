"""The strategy ``smp``: SageMaker's model parallel library v2."""
