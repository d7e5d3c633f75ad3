"""Objects of the SageMaker Python SDK 2 that send what ``launch`` would."""
