"""The SageMaker backend."""
