"""Whether a model fits the degrees of the strategies smp and nxd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.errors import SpecError
from sm_llm.models.parallel_nxd import nxd_issues
from sm_llm.models.parallel_smp import smp_issues
from sm_llm.spec.parallelism.nxd import NxdSpec
from sm_llm.spec.parallelism.smp import SmpSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.spec.tasks import TrainTask


def check_strategy(config: Mapping[str, Any], task: TrainTask) -> None:
    """Raise ``SpecError`` with every degree that a canonical ``config`` does not allow."""
    spec = task.parallelism
    issues = []
    if isinstance(spec, SmpSpec):
        issues = smp_issues(
            config,
            tensor=spec.tensor_parallel_degree,
            context=spec.context_parallel_degree,
            expert=spec.expert_parallel_degree,
            fp8=spec.fp8,
        )
    elif isinstance(spec, NxdSpec):
        issues = nxd_issues(
            config,
            tensor=spec.tensor_parallel_degree,
            pipeline=spec.pipeline_parallel_degree,
            virtual=spec.virtual_pipeline_degree,
            multiplier=spec.kv_size_multiplier,
        )
    if issues:
        raise SpecError(issues)
