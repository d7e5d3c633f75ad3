"""Which models each strategy can train, with which of its degrees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.models.parallel import parallel_issues
from sm_llm.models.parallel_nxd import nxd_issues
from sm_llm.models.parallel_smp import smp_issues

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sm_llm.errors import Issue
    from sm_llm.models.families.family import Config


def _fsdp(config: Config, options: Mapping[str, Any]) -> list[Issue]:
    return parallel_issues(config, tensor=options["tensor_parallel_degree"], context=options["context_parallel_degree"])


def _smp(config: Config, options: Mapping[str, Any]) -> list[Issue]:
    return smp_issues(
        config,
        tensor=options["tensor_parallel_degree"],
        context=options["context_parallel_degree"],
        expert=options["expert_parallel_degree"],
        fp8=options["fp8"],
    )


def _nxd(config: Config, options: Mapping[str, Any]) -> list[Issue]:
    return nxd_issues(
        config,
        tensor=options["tensor_parallel_degree"],
        pipeline=options["pipeline_parallel_degree"],
        virtual=options["virtual_pipeline_degree"],
        multiplier=options["kv_size_multiplier"],
    )


_RULES: Mapping[str, Callable[[Config, Mapping[str, Any]], list[Issue]]] = {"fsdp": _fsdp, "smp": _smp, "nxd": _nxd}
"""Strategy -> its rules; one without a row trains every family."""


def model_issues(config: Config, strategy: str, options: Mapping[str, Any]) -> list[Issue]:
    """Why a strategy with these ``options`` (the fields of its class) cannot train a canonical ``config``."""
    rules = _RULES.get(strategy)
    return [] if rules is None else rules(config, options)
