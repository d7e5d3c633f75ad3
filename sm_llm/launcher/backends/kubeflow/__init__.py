"""The Kubernetes backend: PyTorchJobs of Kubeflow's training operator, or HyperPodPyTorchJobs of HyperPod's."""
