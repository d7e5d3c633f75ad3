"""Finds this process's job: job.json, changed by the hyperparameters that the container was started with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.hyperparameters import RUN_HYPERPARAMETER, TUNING_METRIC, applied, read_hyperparameters
from sm_llm.contract.job_file import JOB_CHANNEL, JOB_ENVIRONMENT, JobFile
from sm_llm.errors import RunFailed
from sm_llm.runs.run_paths import CONTAINER_BASE, JOB_FILE
from sm_llm.spec.loading.yaml_text import from_typed
from sm_llm.storage.uri import flattened, join

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm_llm.runs.run_paths import ContainerPaths

# The container's folder, also inside a word: ``--model_dir=/opt/ml/model``.
_LOCATION = re.compile(rf"(?<![\w./-]){CONTAINER_BASE}(?=/|$)")
TRAINING_JOB = "TRAINING_JOB_NAME"
"""SageMaker's variable with the name of the training job."""


def read_job(container: ContainerPaths, argv: Sequence[str], environ: Mapping[str, str]) -> tuple[JobFile, list[str]]:
    """The job as it will run, and the overrides that made it differ from job.json.

    Raises ``RunFailed`` where there is no job.json, ``SpecError`` for hyperparameters that do not fit it.
    """
    named = environ.get(JOB_ENVIRONMENT)
    # The variable wins: a launcher on this machine, or Slurm, mounts no channels.
    path = Path(named) if named else container.channel(JOB_CHANNEL) / JOB_FILE
    if not path.is_file():
        raise RunFailed(f"{path} is not there: a launcher mounts job.json as channel {JOB_CHANNEL!r}, "
                        f"or names it in {JOB_ENVIRONMENT}")  # fmt: skip
    given = read_hyperparameters(container.hyperparameters, argv, environ)
    job, changes = applied(JobFile.read(path), given)
    return _in_own_run(_at_base(job, container.base), given, environ), changes


def _at_base(job: JobFile, base: Path) -> JobFile:
    """The job with its places where this container has them: an emulated one is not at /opt/ml."""
    if str(base) == CONTAINER_BASE:
        return job
    # The job was written for a container at /opt/ml, whichever base an emulated one has.
    task = _moved(job.spec.task.model_dump(), str(base))
    spec = job.spec.model_copy(update={"task": type(job.spec.task).model_validate(task)})
    return job.model_copy(update={"spec": spec})


def _moved(value: Any, base: str) -> Any:
    if isinstance(value, dict):
        return {key: _moved(item, base) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, base) for item in value)
    # A function, since a backslash in a replacement text would be an escape.
    return _LOCATION.sub(lambda _: base, value) if isinstance(value, str) else value


def _in_own_run(job: JobFile, given: Mapping[str, str], environ: Mapping[str, str]) -> JobFile:
    """The job with the run that only the platform could name: a pipeline's variables, or a trial of a tuning job."""
    if (text := given.get(RUN_HYPERPARAMETER)) is not None:
        uri = flattened(str(from_typed(text, RUN_HYPERPARAMETER).value))
        job = job.model_copy(update={"run_uri": uri, "run_id": uri.rpartition("/")[2]})
    # All trials of a tuning job have the same job.json; each needs a run of its own.
    if TUNING_METRIC in given and (trial := environ.get(TRAINING_JOB)):
        job = job.model_copy(update={"run_uri": join(job.run_uri, "trials", trial), "run_id": trial})
    return job
