"""Every place inside a run's folder, in one object, for launcher, worker and every store.

::

    <storage>/<run-id>/
      run.json                         the run record (launcher)
      job.json                         the job of the newest attempt (launcher -> worker)
      lock                             held (shared) by every process of a local run while it lives
      lock.starting                    held by a launcher while it decides and starts an attempt
      requests/attempt-<n>.json        what a platform was sent, as it was sent (launcher)
      stop                             exists while somebody asks the run to stop from another machine
      events/attempt-<n>-<writer>.jsonl
      logs/attempt-<n>/node-<i>.log    everything the node's processes printed
      ckpt/step-<8 digits>/<save_id>/{data/…, part-<node>.json}
      ckpt/commits/step-<8 digits>.json
      final/<save_id>/{data/…, part-<node>.json}
      ckpt/commits/final.json
      settings/<GPU and processes>.json  what was chosen for settings that are ``auto``
      compiled/<digest>/rank-<i>.json, rank-<i>-<hash>.bin  what torch.compile has made, for later attempts
      result/published.json            in S3, where the result is; in a folder ``result`` is a link to it
      profiles/attempt-<n>/step-<8 digits>-rank-<5 digits>.json.gz
      plot.png
      local/attempt-<n>/node-<i>/      the container contract (SAGEMAKER_BASE_DIR) of a local node

In S3, events and logs are kept in segments (``runs.replication.log_segments``); the locks and ``local`` lie in a folder
of the machine that runs an attempt (``runs.s3_run_store``), and ``alive`` is stored anew while it does
(``runs.heartbeat``).
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.storage.uri import fill, parse

if TYPE_CHECKING:
    from sm_llm.spec.job import JobSpec, WorkflowSpec

RUN_RECORD = "run.json"
JOB_FILE = "job.json"
CONTAINER_BASE = "/opt/ml"
"""Where SageMaker's container contract lies in a container."""
STOP_FILE = "stop"
STEPS = "steps"
"""The folder, in a workflow's, of its steps' own."""
_OF_ATTEMPT = re.compile(r"(?:events|logs|local)/attempt-([0-9]{1,9})[-/]")
# Only these names are copied from S3 into a folder of this machine: others in the storage may be anybody's.
_GROWING = re.compile(
    r"events/attempt-[0-9]{1,9}-[A-Za-z0-9-]{1,64}\.jsonl|logs/attempt-[0-9]{1,9}/[A-Za-z0-9_-][\w.-]{0,99}"
)


def graphs_prefix(digest: str, local_rank: int) -> str:
    """Begins the keys of graphs that were compiled from what has this ``digest``, below the run's folder."""
    return f"compiled/{digest}/rank-{local_rank}-"


def settings_key(hardware: str) -> str:
    """What was chosen for settings that are ``auto`` on GPUs that ``hardware`` describes, below the run's folder."""
    return f"settings/{hardware}.json"


@dataclass(frozen=True)
class RunPaths:
    """Keys relative to the run's folder are plain strings with "/"; local paths are ``Path``."""

    root: Path

    @staticmethod
    def attempt_of(name: str) -> int | None:
        """The attempt that a file belongs to, by its path below the run's folder."""
        match = _OF_ATTEMPT.match(name)
        return int(match[1]) if match else None

    @staticmethod
    def request_key(attempt: int) -> str:
        """What a platform was sent for an attempt, below the run's folder."""
        return f"requests/attempt-{attempt}.json"

    @staticmethod
    def is_growing(name: str) -> bool:
        """Whether ``name``, relative to the run's folder, is that of an event log or a log file."""
        return _GROWING.fullmatch(name) is not None

    @property
    def record(self) -> Path:
        return self.root / RUN_RECORD

    @property
    def job_file(self) -> Path:
        return self.root / JOB_FILE

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def starting_lock(self) -> Path:
        return self.root / "lock.starting"

    @property
    def stop_file(self) -> Path:
        """Asks a run to stop after its current step, from any machine that sees the run's folder."""
        return self.root / STOP_FILE

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def plot(self) -> Path:
        return self.root / "plot.png"

    def event_file(self, attempt: int, writer: str) -> Path:
        """``writer`` is ``rank0``, ``node<i>-watchdog`` or ``launcher``."""
        return self.events / f"attempt-{attempt}-{writer}.jsonl"

    def logs(self, attempt: int) -> Path:
        return self.root / "logs" / f"attempt-{attempt}"

    def node_log(self, attempt: int, node: int) -> Path:
        return self.logs(attempt) / f"node-{node}.log"

    def attempt_dir(self, attempt: int) -> Path:
        return self.root / "local" / f"attempt-{attempt}"

    def node_dir(self, attempt: int, node: int) -> Path:
        """The container contract of one local node; the worker's ``SAGEMAKER_BASE_DIR``."""
        return self.attempt_dir(attempt) / f"node-{node}"

    def copies(self, node: int) -> Path:
        """Checkpoints that a local node keeps on this machine for the next attempt."""
        return self.root / "copies" / f"node-{node}"


@dataclass(frozen=True)
class ContainerPaths:
    """The SageMaker container contract below one base folder (``/opt/ml`` there, a node folder locally)."""

    base: Path

    @property
    def config(self) -> Path:
        return self.base / "input" / "config"

    @property
    def resource_config(self) -> Path:
        return self.config / "resourceconfig.json"

    @property
    def input_data_config(self) -> Path:
        return self.config / "inputdataconfig.json"

    @property
    def hyperparameters(self) -> Path:
        return self.config / "hyperparameters.json"

    def channel(self, name: str) -> Path:
        """The files of an input; where it could not be linked into the container's folder, they are where they lie."""
        pointer = self.channel_pointer(name)
        return Path(pointer.read_text(encoding="utf-8")) if pointer.is_file() else self.base / "input" / "data" / name

    def channel_pointer(self, name: str) -> Path:
        """A text file with the path of an input, in place of a link."""
        return self.base / "input" / "data" / f"{name}.path"

    @property
    def model(self) -> Path:
        return self.base / "model"

    @property
    def output_data(self) -> Path:
        return self.base / "output" / "data"

    @property
    def failure(self) -> Path:
        return self.base / "output" / "failure"

    @property
    def stopped(self) -> Path:
        """``runs.stopped.StopRecord``, once a process of this node has stopped because it was asked to."""
        return self.base / "output" / "stopped"

    @property
    def code(self) -> Path:
        return self.base / "code"

    @property
    def scratch(self) -> Path:
        """Large temporary files of this node: staged inputs, local checkpoints, caches."""
        return self.base / "scratch"


def step_run_id(run_id: str, step: str) -> str:
    """The id of the run of a workflow's step that lies below the workflow's own."""
    return f"{run_id}-{step}"


def generate_run_id(name: str, at: float | None = None, tail: str | None = None) -> str:
    """``<name>-<UTC date>-<time>-<4 hex digits>``: sorts by time, unique without asking anyone."""
    # UTC, so that ids from machines in several time zones sort by time.
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(time.time() if at is None else at))
    return f"{name}-{moment}-{tail or secrets.token_hex(2)}"


def storage_root(spec: JobSpec | WorkflowSpec) -> str:
    """The address below which the runs of a specification are kept, in full."""
    return parse(fill(spec.storage, run_name=spec.name)).uri
