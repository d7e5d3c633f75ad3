"""What a conversion did: for the terminal, for programs, and as the manifest beside the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from sm_llm.convert.layout import NxdDegrees

Progress = Callable[[int, int], None]
"""Gets bytes done and bytes in all."""
_FORMAT = "sm_llm conversion"
_VERSION = 1


@dataclass(frozen=True)
class Coverage:
    """What became of the source's tensors; anything missing or left over would have been refused.

    ``used`` counts tensors that were cut or copied, each exactly once; ``copied`` those that several ranks hold whole
    or in part; ``unread`` buffers that the model computes itself.
    """

    used: int
    copied: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConversionReport:
    """The outcome of ``convert``."""

    source: str
    destination: str
    to: str
    model_type: str
    degrees: NxdDegrees
    xser: bool
    dtypes: tuple[str, ...]
    vocabulary: int
    padded_vocabulary: int
    is_tied: bool
    files: int
    size: int
    seconds: float
    digest: str
    coverage: Coverage
    reused: int = 0
    is_unchanged: bool = False
    notes: tuple[str, ...] = ()
    is_dcp: bool = False
    """The source is a checkpoint of torch.distributed.checkpoint: degrees say nothing."""
    verified: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        # Through JSON, which makes lists of tuples: callers compare this with what ``--json`` prints.
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    def lines(self) -> Iterator[str]:
        """The report in words."""
        it = self.degrees
        degrees = (
            f"tp {it.tensor}, pp {it.pipeline}, virtual pp {it.virtual}, kv multiplier {it.kv_multiplier}, "
            f"qkv {it.qkv}, layout {it.layout}, {'xser' if self.xser else 'tensors inside .pt files'}"
        )
        shards = "a distributed checkpoint of torch" if self.is_dcp else degrees
        yield f"{self.model_type}, {', '.join(self.dtypes)}: {shards}"
        cover = self.coverage
        yield f"tensors: {cover.used} used, {len(cover.copied)} of them held by several ranks, none missing, none extra"
        if cover.unread:
            yield f"not read, since the model computes them: {', '.join(cover.unread[:4])} ({len(cover.unread)})"
        if self.padded_vocabulary != self.vocabulary:
            did = "padded with zero rows to" if self.to == "nxd" else "trimmed from"
            yield f"vocabulary: {self.vocabulary} rows {did} {self.padded_vocabulary} (a multiple of {it.tensor})"
        if self.is_tied:
            yield "the output head is the embedding" + (", stored under both names" if self.to == "nxd" else "")
        yield from self.notes
        yield from (f"verified: {name}: {value}" for name, value in self.verified.items())
        if self.is_unchanged:
            yield f"unchanged: {self.destination} holds this conversion already"
            return
        reused = f", {self.reused} of them from before" if self.reused else ""
        speed = f", {self.size / 2**20 / self.seconds:.0f} MiB/s" if self.seconds > 0 else ""
        files = counted(self.files, "file")
        yield f"wrote {files}{reused}, {self.size / 2**20:.1f} MiB{speed} -> {self.destination}"


def degrees_json(degrees: NxdDegrees) -> dict[str, Any]:
    """Degrees by the names of a ``convert`` task."""
    return {
        "tensor_parallel_degree": degrees.tensor,
        "pipeline_parallel_degree": degrees.pipeline,
        "virtual_pipeline_degree": degrees.virtual,
        "kv_size_multiplier": degrees.kv_multiplier,
        "qkv": degrees.qkv,
        "layout": degrees.layout,
    }


def digest_of(tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """One digest of a model: SHA-256 over name, format, shape and checksum of every tensor, sorted by name."""
    # Of the tensors and not of the files: the same model cut for other degrees has the same digest.
    lines = [f"{name} {it['dtype']} {list(it['shape'])} {it['crc64']}" for name, it in sorted(tensors.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def manifest_json(
    report: ConversionReport, identity: str, tensors: Mapping[str, Any], files: Mapping[str, Any], version: str
) -> str:
    """The manifest: what was converted how, and checksums of every source tensor and every tensor in every file."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "sm_llm": version,
        "identity": identity,
        "to": report.to,
        "model_type": report.model_type,
        **degrees_json(report.degrees),
        "xser": report.xser,
        "dtypes": report.dtypes,
        "vocabulary": report.vocabulary,
        "padded_vocabulary": report.padded_vocabulary,
        "tied": report.is_tied,
        "digest": report.digest,
        "tensors": tensors,
        "files": files,
    }
    return json.dumps(content, indent=1) + "\n"


def trained_manifest(model_type: str, degrees: NxdDegrees) -> str:
    """The manifest of shards that a training saved: how they are cut, and nothing of a source."""
    content = {"format": _FORMAT, "version": _VERSION, "to": "nxd", "model_type": model_type, **degrees_json(degrees)}
    return json.dumps(content, indent=1) + "\n"


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest at ``path``; None if there is none. Raises ``ValueError`` for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    # json raises RecursionError for text that is nested too deep, which is not a ValueError.
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != _VERSION:
        raise ValueError(f"it is not a manifest of version {_VERSION}")
    return content
