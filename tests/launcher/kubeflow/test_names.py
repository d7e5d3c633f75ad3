"""Names in a cluster: valid, stable, and different for different runs."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm_llm.launcher.backends.kubeflow.manifest_check import manifest_issues
from sm_llm.launcher.backends.kubeflow.names import MOST_CHARACTERS, native_id, object_name, split_native
from tests.launcher.kubeflow.conftest import TINY, job_of, render

DNS_1035 = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@given(st.text(min_size=1, max_size=200))
def test_every_run_has_a_valid_name_and_always_the_same(run_id: str) -> None:
    name = object_name(run_id)
    assert DNS_1035.fullmatch(name)
    assert len(f"{name}-worker-99999") <= 63
    assert object_name(run_id) == name


@given(st.lists(st.text(min_size=1, max_size=80), min_size=2, max_size=20, unique=True))
def test_different_runs_have_different_names(run_ids: list[str]) -> None:
    assert len({object_name(it) for it in run_ids}) == len(run_ids)


def test_DL21_two_long_names_that_begin_alike() -> None:
    """kubeflow/trainer#1101: a long name left the job stuck without a state."""
    begin = "llama-2-70b-continued-pretraining-on-the-whole-of-our-corpus"
    assert len(begin) == 60
    first, second = object_name(f"{begin}-a-20261128-040000-ab12"), object_name(f"{begin}-b-20261128-040000-ab12")
    assert first != second
    assert first[:30] == second[:30] == begin[:30]
    assert len(first) <= MOST_CHARACTERS


@pytest.mark.parametrize(
    "name",
    ["a", "7b", "Llama", "x" * 63],
)
def test_the_manifest_of_every_name_passes_the_check(name: str) -> None:
    run_id = f"{name}-20261128-040000-ab12"
    submission = render(TINY, run_id=run_id)
    assert [manifest_issues(it) for it in submission.request["manifests"]] == [[], []]
    assert job_of(submission)["metadata"]["annotations"]["sm-llm/run"] == f"s3://bucket/runs/{run_id}"


def test_native_ids_survive_contexts_with_slashes() -> None:
    arn = "arn:aws:eks:us-west-2:123456789012:cluster/research"
    assert split_native(native_id(arn, "team", "tiny-1")) == (arn, "team", "tiny-1")
    for text in ("", "a", "a/b", "/a/b", "c/A/b", "c/a/", "c/a/../b"):
        assert split_native(text) is None, text
