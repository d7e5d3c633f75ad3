"""Scripts that were written for SageMaker, under its own toolkit on this machine: folders, arguments and channels."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from sm_llm.launcher import api
from sm_llm.launcher.display.summary import print_summary
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from sm_llm.launcher.run import Run

pytestmark = pytest.mark.integration

ORDINARY = """
import argparse, json, os
p = argparse.ArgumentParser()
p.add_argument("--epochs", type=int, default=1)
p.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
p.add_argument("--output-data-dir", default=os.environ["SM_OUTPUT_DATA_DIR"])
a = p.parse_args()
seen = {name: os.environ.get(name) for name in os.environ if name.startswith("SM_")}
seen["files"] = sorted(os.listdir(os.environ.get("SM_CHANNEL_TRAINING", ".")))
json.dump(seen, open(os.path.join(a.output_data_dir, "seen.json"), "w"))
open(os.path.join(a.model_dir, "model.bin"), "w").write("weights")
base = os.environ["SAGEMAKER_BASE_DIR"]
open(os.path.join(base, "model", "hard-coded.bin"), "w").write("weights")
open(os.path.join(os.environ["SM_OUTPUT_DIR"], "metrics.json"), "w").write("{}")
os.makedirs(os.path.join(base, "output", "intermediate"), exist_ok=True)
open(os.path.join(base, "output", "intermediate", "part.txt"), "w").write("part")
folder = os.path.join(base, "checkpoints", "checkpoint-5")
os.makedirs(folder)
open(os.path.join(folder, "state"), "w").write("5")
"""


@pytest.fixture(params=["sagemaker", "local"])
def contract(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ran(tmp_path: Path, contract: str, program: str, **task: Any) -> Run:
    source, data = tmp_path / "src", tmp_path / "data"
    source.mkdir()
    data.mkdir()
    (source / "train.py").write_text(program)
    (data / "rows.txt").write_text("here")
    run = api.launch(
        {
            "name": "ordinary",
            "task": {"kind": "script", "source": str(source), "entry": "train.py", **task},
            "inputs": {"training": str(data)},
            "storage": str(tmp_path / "runs"),
            "backend": {"name": "local", "contract": contract},
            "compute": {"processes_per_instance": 1},
        }
    )
    assert run.wait() is RunState.COMPLETED
    return run


def test_f04_f07_an_ordinary_script_finds_its_arguments_and_inputs_and_its_model_is_published(
    tmp_path: Path, contract: str
) -> None:
    run = ran(tmp_path, contract, ORDINARY, args={"epochs": 2})
    result = Path(str(run.result))
    assert (result / "model.bin").read_text() == "weights"
    assert (result / "hard-coded.bin").read_text() == "weights"
    assert (result / "metrics.json").read_text() == "{}"
    assert (result / "intermediate" / "part.txt").read_text() == "part"
    assert {it.name for it in result.iterdir()} == {
        "data", "hard-coded.bin", "intermediate", "metrics.json", "model.bin", "sm_llm.json",
    }  # fmt: skip
    seen = json.loads((result / "data" / "seen.json").read_text())
    assert json.loads(seen["SM_HPS"]) == {"epochs": 2}
    assert seen["SM_HP_EPOCHS"] == "2"
    assert json.loads(seen["SM_USER_ARGS"]) == ["--epochs", "2"]
    assert json.loads(seen["SM_CHANNELS"])[-1] == "training"
    assert seen["files"] == ["rows.txt"]
    assert [it.step for it in run.checkpoints() if it.valid] == [5]
    console = Console(file=io.StringIO(), width=200)
    print_summary(run, console, None)
    assert "load_from_disk" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_f07_a_local_input_is_a_channel_of_the_request(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    spec = {
        "name": "channel",
        "task": {"kind": "script", "entry": "-m json.tool"},
        "inputs": {"training": str(tmp_path / "data")},
        "storage": str(tmp_path / "runs"),
        "backend": {"name": "local", "contract": "sagemaker"},
    }
    (submission,) = api.launch(spec, dry_run=True)
    names = [it["ChannelName"] for it in submission.request["training_job"]["InputDataConfig"]]
    assert names == ["training", "job"]


def test_C10_an_empty_result_is_reported(tmp_path: Path, contract: str) -> None:
    run = ran(tmp_path, contract, "print('nothing')\n")
    assert any("left no file in output/" in line for line in run.logs())
