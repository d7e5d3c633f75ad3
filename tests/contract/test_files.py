"""job.json, the places in a run's folder, states and entrypoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from sm_llm.contract.job_file import JobFile, entrypoint_source
from sm_llm.runs.run_paths import ContainerPaths, RunPaths
from sm_llm.runs.run_states import EXIT_CODES, USAGE_EXIT_CODE, RunState
from sm_llm.spec.job import JobSpec
from sm_llm.spec.tasks import TASK_KINDS

SPEC = {"name": "tiny", "task": {"kind": "prepare", "sources": ["builtin:python-docs"], "seq_length": 64}}


def test_job_json_reads_back_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    spec = JobSpec.model_validate(SPEC)
    job = JobFile(run_id="tiny-1", attempt=2, run_uri="/runs/tiny-1", spec=spec, spec_digest="ab", channels={"a": "/x"})
    path = tmp_path / "run" / "job.json"
    job.write(path)
    assert JobFile.read(path) == job
    path.write_text(path.read_text().replace('"attempt"', '"atempt"'))
    with pytest.raises(ValidationError, match="atempt"):
        JobFile.read(path)


def test_every_place_of_a_run_is_its_own() -> None:
    paths = RunPaths(Path("/runs/tiny-1"))
    locations = [
        paths.record,
        paths.job_file,
        paths.lock,
        paths.starting_lock,
        paths.plot,
        paths.event_file(1, "rank0"),
        paths.event_file(1, "launcher"),
        paths.event_file(2, "rank0"),
        paths.node_log(1, 0),
        paths.node_log(1, 1),
        paths.node_dir(1, 0),
        paths.node_dir(1, 1),
    ]
    assert len(set(locations)) == len(locations)
    assert all(it.is_relative_to(paths.root) for it in locations)


def test_the_container_contract_is_sagemakers() -> None:
    paths = ContainerPaths(Path("/opt/ml"))
    assert str(paths.resource_config) == "/opt/ml/input/config/resourceconfig.json"
    assert str(paths.input_data_config) == "/opt/ml/input/config/inputdataconfig.json"
    assert str(paths.hyperparameters) == "/opt/ml/input/config/hyperparameters.json"
    assert str(paths.channel("train")) == "/opt/ml/input/data/train"
    assert str(paths.failure) == "/opt/ml/output/failure"
    assert str(paths.model) == "/opt/ml/model"


def test_every_final_state_has_its_own_exit_code_and_those_with_a_result_have_0() -> None:
    final = {it for it in RunState if it.is_final}
    assert EXIT_CODES.keys() == final
    assert [state for state, code in EXIT_CODES.items() if code == 0] == [it for it in RunState if it.is_completed]
    codes = [0, *filter(None, EXIT_CODES.values()), USAGE_EXIT_CODE]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("kind", TASK_KINDS)
def test_entrypoints_are_guarded_programs(kind: str) -> None:
    source = entrypoint_source(kind)
    compile(source, f"{kind}.py", "exec")
    assert 'if __name__ == "__main__":' in source
    assert f'program("{kind}")' in source
    with pytest.raises(ValueError, match="no task kind"):
        entrypoint_source("dance")
