"""SageMaker Pipelines from workflows."""
