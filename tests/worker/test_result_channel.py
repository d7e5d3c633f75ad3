"""A channel that brings the pointer to a result brings the result, be it the SDK's artifacts or the stable address."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from worker_jobs import job_environment, job_file, result_folder, search_path

from sm_llm.runs.run_paths import ContainerPaths, RunPaths
from sm_llm.spec.inputs import S3Input
from sm_llm.storage.publication.result import POINTER
from sm_llm.worker.main import main

if TYPE_CHECKING:
    from pathlib import Path

FIRST = "import os\nopen(os.path.join(os.environ['SM_MODEL_DIR'], 'model.bin'), 'w').write('weights')\n"
SECOND = (
    "import os\nfolder = os.environ['SM_CHANNEL_MODEL']\nout = os.environ['SM_MODEL_DIR']\n"
    "open(os.path.join(out, 'seen'), 'w').write(open(os.path.join(folder, 'model.bin')).read())\n"
)
ARTIFACTS = "s3://bucket/runs/first/sagemaker/job/output/model/"


def script(tmp_path: Path, name: str, program: str, **changes: Any) -> tuple[Path, ContainerPaths, Any]:
    source, run = tmp_path / f"{name}-src", tmp_path / name
    source.mkdir()
    (source / "train.py").write_text(program)
    task = {"kind": "script", "entry": "train.py", "source": str(source)}
    job = job_file(task, run, 1)
    channels = changes.pop("channels", {})
    job = job.model_copy(update={"spec": job.spec.model_copy(update=changes), "channels": channels})
    return run, ContainerPaths(RunPaths(run).node_dir(1, 0)), job


def test_C12_the_model_artifacts_of_a_step_are_its_result_in_the_next(tmp_path: Path) -> None:
    first, container, job = script(tmp_path, "first", FIRST)
    assert main("script", {**job_environment(job), "PYTHONPATH": search_path()}) == 0
    pointer = container.model / POINTER
    assert [it.name for it in container.model.iterdir()] == [POINTER]
    second, container, job = script(
        tmp_path, "second", SECOND, inputs={"model": S3Input(uri=ARTIFACTS)}, channels={"model": ARTIFACTS}
    )
    environ = {**job_environment(job), "PYTHONPATH": search_path()}
    channel = container.channel("model")
    channel.mkdir(parents=True)
    shutil.copy(pointer, channel)  # what SageMaker mounts: all that the first job left in its model folder
    assert main("script", environ) == 0
    assert (result_folder(second) / "seen").read_text() == "weights"
    assert (result_folder(first) / "model.bin").is_file()
