"""Every number of a specification has an upper bound, so that nonsense is refused where it is written."""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any

import annotated_types
import pytest

import sm_llm.spec
from sm_llm.errors import SpecError
from sm_llm.spec.base import SpecModel
from sm_llm.spec.loading.load import load
from sm_llm.spec.schema import members

OF_THE_SERVICE = {
    "keep_alive_period_in_seconds", "max_retry_attempts", "max_run_seconds", "max_wait_seconds",
}  # fmt: skip
"""Bounded by the service's own limits (``launcher.backends.sagemaker.request.limits`` and ``rules``)."""
OF_THE_LAYOUT = {("FsdpSpec", "hybrid_shard_degree"), ("FsdpSpec", "reshard_after_forward")}
"""Bounded by the number of processes (``spec.parallelism.fsdp``)."""


def blocks(kind: type[SpecModel]) -> list[type[SpecModel]]:
    return [it for sub in kind.__subclasses__() for it in (sub, *blocks(sub))]


def test_D13_every_number_has_an_upper_bound() -> None:
    for module in pkgutil.iter_modules(sm_llm.spec.__path__):
        importlib.import_module(f"sm_llm.spec.{module.name}")
    unbounded = [
        (kind.__name__, name)
        for kind in blocks(SpecModel)
        if kind.__module__.startswith("sm_llm.")
        for name, field in kind.model_fields.items()
        if {int, float} & set(members(field.annotation))
        and not any(isinstance(it, annotated_types.Le | annotated_types.Lt) for it in field.metadata)
        and name not in OF_THE_SERVICE
        and (kind.__name__, name) not in OF_THE_LAYOUT
    ]
    assert unbounded == []


JOB: dict[str, Any] = {
    "name": "x",
    "task": {
        "kind": "train", "model": {"preset": "tiny"}, "data": {"format": "synthetic", "seq_length": 16}, "max_steps": 5,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "override",
    [
        "task.optim.learning_rate=1e9", "task.optim.weight_decay=1e6", "task.optim.eps=10", "task.max_steps=1e18",
        "task.data.seq_length=1e15", "task.micro_batch_size=1000000000000", "task.watchdog.stall_seconds=1e12",
        "backend.threads_per_process=1e9", "task.data.rows=1e18", "backend.stop_seconds=1e9",
    ],
)  # fmt: skip
def test_D13_a_number_beyond_its_meaning_is_refused(override: str) -> None:
    with pytest.raises(SpecError, match="must be at most"):
        load(JOB, [override], environ={})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"vpc": {"subnets": ["s"] * 17, "security_group_ids": ["g"]}},
            "subnets: must have at most 16 entries and has 17",
        ),
        ({"base_job_name": ""}, "base_job_name: must have at least 1 characters"),
    ],
)
def test_the_number_of_entries_or_characters_is_named_where_it_is_wrong(changes: dict[str, Any], words: str) -> None:
    task = {"kind": "script", "entry": "-m x"}
    with pytest.raises(SpecError) as caught:
        load({"name": "x", "task": task, "storage": "s3://b/x", "backend": {"name": "sagemaker", **changes}})
    assert words in re.sub(r" \(.*?\):", ":", str(caught.value))
