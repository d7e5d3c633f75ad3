"""Where one of several classes may stand: issues are those of the class that was meant, and name a key's own class."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.loading.load import load

SCRIPT: dict[str, Any] = {"name": "own", "task": {"kind": "script", "entry": "train.py"}, "storage": "s3://bucket/runs"}
MANAGED = {**SCRIPT, "backend": {"name": "sagemaker"}, "compute": {"instance_type": "ml.g5.xlarge"}}


def faults(source: Any, *overrides: str, **fields: Any) -> dict[str, Issue]:
    with pytest.raises(SpecError) as caught:
        load(source, overrides, fields)
    return {fault.path: fault for fault in caught.value.issues}


@pytest.mark.parametrize(
    ("source", "override", "owner"),
    [
        (SCRIPT, "backend.spot=true", "backend.name: sagemaker; here it is local"),
        (MANAGED, "backend.contract=sagemaker", "backend.name: local; here it is sagemaker"),
        (SCRIPT, "task.seq_length=8", "task.kind: prepare; here it is script"),
    ],
)
def test_a_key_of_another_class_states_whose_it_is(source: dict[str, Any], override: str, owner: str) -> None:
    ((path, fault),) = faults(source, override).items()
    assert path == override.partition("=")[0]
    assert owner in fault.remedy


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"file_system_id": "FS-1", "directory_path": "x"}, {"file_system_id": "form", "directory_path": "form"}),
        ({"file_system_id": "fs-12345678", "path": "/x"}, {"directory_path": "missing", "path": "unknown key"}),
        (
            {"file_system_id": "fs-12345678", "directory_path": "/x", "file_system_type": "efs"},
            {"file_system_type": "Did you mean EFS"},
        ),
        ({"uri": "s3://bucket/x", "mode": "fastfile"}, {"mode": "Did you mean FastFile"}),
        ({"uri": "s3://bucket/x", "mod": "File"}, {"mod": "Did you mean inputs.data.mode"}),
    ],
)
def test_an_input_is_checked_as_what_its_keys_make_it(given: dict[str, str], expected: dict[str, str]) -> None:
    found = faults(SCRIPT, inputs={"data": given})
    assert set(found) == {f"inputs.data.{name}" for name in expected}
    for name, words in expected.items():
        assert words in str(found[f"inputs.data.{name}"])


def test_what_no_key_distinguishes_is_reported_as_a_whole() -> None:
    assert list(faults(SCRIPT, inputs={"data": {"place": "s3://bucket/x"}})) == ["inputs.data"]


def test_a_faulty_alternative_hides_no_other_fault() -> None:
    found = faults(SCRIPT, storage="x://y", inputs={"data": {"file_system_id": "FS-1", "directory_path": "/x"}})
    assert set(found) == {"storage", "inputs.data.file_system_id"}


def test_a_mapping_whose_entries_are_commented_out_is_empty(tmp_path: Any) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: own\ntask: {kind: script, entry: train.py}\ninputs:\nenvironment:\n")
    assert load(file).spec.environment == {}


def test_a_secret_is_kept_where_a_job_of_that_backend_can_read_it() -> None:
    assert "secrets.HF_TOKEN=env:HF_TOKEN" in faults(SCRIPT, "environment.HF_TOKEN=x")["environment.HF_TOKEN"].remedy
    assert "secrets.HF_TOKEN=ssm:HF_TOKEN" in faults(MANAGED, "environment.HF_TOKEN=x")["environment.HF_TOKEN"].remedy
