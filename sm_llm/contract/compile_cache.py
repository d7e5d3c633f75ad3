"""The cache of graphs that Neuron has compiled: what is in it, and which jobs share a part of it.

Each job's part is a folder named by the SDK and a digest of what its graphs follow from. In it Neuron keeps each graph
at ``neuronxcc-<version>/MODULE_<graph>+<flags>/``: the graph (``model.hlo_module.pb``), what the compiler made of it
(``model.neff``, ``model.done``), or why it failed (``model.log``). Files named ``….lock`` belong to a process that
compiles; one that was killed leaves them behind, and others wait for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from sm_llm.errors import StorageError
from sm_llm.spec.tasks import plainest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.spec.job import JobSpec
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.storage.base import Store, StoredObject

State = Literal["compiled", "failed", "not compiled"]
CACHE_URL = "NEURON_COMPILE_CACHE_URL"
"""Neuron's variable with the cache's folder or address."""
DESCRIPTION = "part.json"
"""File of a part with what its graphs follow from."""
_PART = r"(?:(?P<part>sdk-[^/]+)/)?"
# A cache of Neuron's own, without our parts, is read as well.
_ENTRY = re.compile(rf"{_PART}(?P<compiler>neuronxcc-[^/]+)/(?P<graph>MODULE_[^/]+)/[^/]+(?:/.*)?")
_LOCK = re.compile(rf"{_PART}neuronxcc-[^/]+/(?:.*/)?[^/]+\.lock")
# Variables that change graphs or what the compiler makes of them.
_FLAGS = re.compile(r"NEURON_CC_FLAGS|NEURON_FUSE_SOFTMAX|NEURON_LOGICAL_NC_CONFIG|XLA_[A-Z0-9_]+")
_TASK_FIELDS = ("parallelism", "micro_batch_size", "global_batch_size", "precision")
_OPTIMISER_FIELDS = ("betas", "eps", "weight_decay", "decay_embeddings", "max_grad_norm")
STALE_MINUTES = 60.0
"""A lock older than this is taken for one of a process that is gone: the compiler renews none."""


@dataclass(frozen=True)
class CachedGraph:
    """One graph of one compiler and set of flags. ``size`` in bytes; ``part`` is empty outside of any job's part."""

    compiler: str
    graph: str
    state: State
    size: int
    files: tuple[str, ...]
    part: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @property
    def is_whole(self) -> bool:
        """Whether every file that Neuron reads is there: ``model.done`` is stored last."""
        names = {it.rpartition("/")[2] for it in self.files}
        return {"model.neff", "model.done"} <= names


@dataclass(frozen=True)
class CachePart:
    """What the graphs of a job follow from; jobs that agree in all of it share their compiled graphs."""

    sdk: str
    values: Mapping[str, Any]
    """Dotted name -> value: flags, model, shapes, degrees and constants of the optimiser."""

    @property
    def name(self) -> str:
        """The folder of this part."""
        text = json.dumps([self.sdk, dict(self.values)], sort_keys=True)
        return f"sdk-{self.sdk}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def to_json(self) -> str:
        """The text of ``part.json``."""
        return json.dumps({"sdk": self.sdk, "values": dict(self.values)}, indent=2, sort_keys=True) + "\n"

    def differences(self, text: bytes) -> list[str]:
        """How another part, by its ``part.json``, differs: ``name there -> here``. Empty for a text that is none."""
        try:
            other = json.loads(text)
            held = {"sdk": other["sdk"], **other["values"]}
        except (ValueError, KeyError, TypeError, RecursionError):
            return []
        own = {"sdk": self.sdk, **json.loads(json.dumps(dict(self.values)))}
        names = sorted(held.keys() | own.keys())
        return [f"{it} {held.get(it)} -> {own.get(it)}" for it in names if held.get(it) != own.get(it)]


def part_of(
    job: JobSpec, training: TrainTask, config: Mapping[str, Any], sdk: str, environ: Mapping[str, str]
) -> CachePart:
    """The part of the cache that ``training``, as a part of ``job``, has; ``config`` is its model's.

    Numbers that are no constants of a graph do not count: learning rates, the length of training, the data.
    """
    fields = plainest(training).model_dump(mode="json")
    # Where graphs are kept does not change them.
    fields["parallelism"].pop("compile_cache", None)
    values: dict[str, Any] = {name: text for name, text in environ.items() if _FLAGS.fullmatch(name)}
    values |= {f"model.{name}": value for name, value in config.items() if name not in ("_name_or_path", "dtype")}
    for name in _TASK_FIELDS:
        values |= _flat(f"task.{name}", fields[name])
    if values["task.precision.compute"] == "auto":
        values["task.precision.compute"] = "bf16"  # which every NeuronCore computes
    values |= {f"task.optim.{name}": fields["optim"][name] for name in _OPTIMISER_FIELDS}
    values["task.data.seq_length"] = training.data.seq_length
    # Processes of one data-parallel group exchange gradients inside a graph, so their number is in it.
    values |= {"compute.instance_count": job.compute.instance_count, "compute.processes": job.compute.processes}
    return CachePart(sdk, values)


def _flat(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {name: it for key, item in value.items() for name, it in _flat(f"{path}.{key}", item).items()}


def graphs(store: Store) -> list[CachedGraph]:
    """Every graph below a store's root, by part, compiler and name."""
    held: dict[tuple[str, str, str], list[StoredObject]] = {}
    for it in store.list(""):
        if match := _ENTRY.fullmatch(it.key):
            held.setdefault((match["part"] or "", match["compiler"], match["graph"]), []).append(it)
    return [
        CachedGraph(compiler, graph, _state(files), sum(it.size for it in files), tuple(it.key for it in files), part)
        for (part, compiler, graph), files in sorted(held.items())
    ]


def stale_locks(store: Store, older_than_minutes: float = STALE_MINUTES) -> list[StoredObject]:
    """Locks that are older than so many minutes, by the storage's clock."""
    locks = [it for it in store.list("") if _LOCK.fullmatch(it.key)]
    limit = _now(store) - 60 * older_than_minutes if locks else 0.0
    # A lock without a date may be one that a compiler holds.
    return [it for it in locks if it.modified is not None and it.modified <= limit]


def _now(store: Store) -> float:
    """The time by the storage's clock, in seconds since the epoch: that of an object which is written for it.

    This machine's may run ahead, and then locks of compilers that still run would count as old.
    """
    key = f"clock-{secrets.token_hex(8)}"
    store.put_if_absent(key, b"")
    try:
        written = [it.modified for it in store.list(key)]
    finally:
        store.delete([key])
    if written and written[0] is not None:
        return written[0]
    raise StorageError(f"{store.uri}: its clock cannot be read, so the age of locks is not known")


def _state(files: list[StoredObject]) -> State:
    names = {it.key.rpartition("/")[2] for it in files}
    if "model.neff" in names:
        return "compiled"
    return "failed" if "model.log" in names else "not compiled"
