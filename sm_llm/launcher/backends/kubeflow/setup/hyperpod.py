"""What HyperPod knows of the cluster behind a context of EKS."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_EKS = re.compile(r"arn:aws[a-z-]*:eks:(?P<region>[a-z0-9-]+):[0-9]{12}:cluster/[\w-]+")
"""As ``aws eks update-kubeconfig`` names contexts."""


def region_of(context: str) -> str | None:
    """The region of a context that is named by a cluster of EKS; None for another name."""
    match = _EKS.fullmatch(context)
    return match["region"] if match else None


def hyperpod_cluster(client: Any, eks_arn: str) -> Mapping[str, Any] | None:
    """HyperPod's description of the cluster whose nodes are in ``eks_arn``; None where there is none.

    ``client`` is boto3's of SageMaker. Raises its errors.
    """
    for page in client.get_paginator("list_clusters").paginate():
        for row in page["ClusterSummaries"]:
            found: Mapping[str, Any] = client.describe_cluster(ClusterName=row["ClusterName"])
            # Clusters of Slurm have no such key (aws/sagemaker-hyperpod-cli#264).
            eks = (found.get("Orchestrator") or {}).get("Eks") or {}
            if eks.get("ClusterArn") == eks_arn:
                return found
    return None
