"""Reads back what a conversion wrote: checksums of the way back, and the logits of the sharded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.convert.files.views import chunks, whole
from sm_llm.convert.hf_source import open_hf
from sm_llm.convert.layout import decoder
from sm_llm.convert.mapping_rules import EMBEDDING, HEAD
from sm_llm.convert.nxd_source import find_shards, open_shards
from sm_llm.convert.report import read_manifest
from sm_llm.convert.simulate import difference
from sm_llm.convert.to_hf import Joined
from sm_llm.convert.work import MANIFEST, checksum
from sm_llm.errors import ConversionError
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sm_llm.convert.conversion_jobs import ConversionJob
    from sm_llm.convert.files.views import View
    from sm_llm.convert.nxd_source import Shards

TOLERANCE = 1e-5
"""Of logits computed in float64, relative to the largest one; sound shards differ by about 1e-14."""
_SHOWN = 4


def verify_nxd(job: ConversionJob, target: Path) -> dict[str, Any]:
    """Join the shards that were written again and compare them with the source. Raises ``ConversionError``."""
    assert job.hf is not None
    shards = open_shards(find_shards(target), decoder(job.config).buffers)
    joined = Joined(job.plan, shards)
    recorded = _manifest(target)["tensors"]
    try:
        wrong = [name for name in job.plan.shapes if checksum(joined.chunks(name)) != recorded[name]["crc64"]]
    except ConversionError as error:
        raise ConversionError(f"{error.issues[0].message if error.issues else error}. Convert again") from None
    _raise_for([*wrong, *_padding(job, target)], "from the source when the shards are joined again")
    equal = f"{counted(len(recorded), 'tensor')} joined again equal the source"
    return {"checksums": equal, **_logits(job, job.hf, shards)}


def _padding(job: ConversionJob, target: Path) -> list[str]:
    """Tensors with rows of padding, which no source has, that are not as they were written."""
    if job.plan.padded_vocabulary == job.plan.vocabulary:
        return []
    files = _manifest(target)["files"]
    return [
        f"{name} in {unit.file}"
        for unit in job.units
        if unit.file and unit.read is not None
        for name, pieces in unit.read().items()
        if name in (EMBEDDING, HEAD) and checksum(pieces) != files[unit.file]["tensors"][name]
    ]


def verify_hf(job: ConversionJob, target: Path) -> dict[str, Any]:
    """Read the Hugging Face folder that was written and compare it with the shards. Raises ``ConversionError``."""
    views = open_hf(target).views
    recorded = _manifest(target)["tensors"]
    wrong = [name for name, view in views.items() if checksum(chunks([whole(view)], 0)) != recorded[name]["crc64"]]
    _raise_for(wrong, "from the shards when they are read again")
    found: dict[str, Any] = {"checksums": f"{counted(len(recorded), 'tensor')} equal the joined shards"}
    if job.shards is None:
        return found  # no rank computes with the shards of a distributed checkpoint
    if (changed := _changed(job, recorded)) is not None:
        same = len(recorded) - len(changed)
        found["source"] = f"{same} of {counted(len(recorded), 'tensor')} as in the model that the shards were made from"
    return {**found, **_logits(job, views, job.shards)}


def origin_notes(job: ConversionJob, tensors: Mapping[str, Any]) -> list[str]:
    """A warning for shards of which some are those of their manifest and some are not; a training changes all."""
    changed = _changed(job, tensors) if job.to == "hf" else None
    if not changed or len(changed) == len(tensors):
        return []
    shown = f"{', '.join(changed[:_SHOWN])}{' …' if len(changed) > _SHOWN else ''}"
    return [
        f"warning: {len(changed)} of {counted(len(tensors), 'tensor')} are not those that the shards were made from "
        f"({shown}), and the rest are: a training that left some unchanged, shards of another checkpoint among these, "
        "exchanged ranks, or damage"
    ]


def _changed(job: ConversionJob, tensors: Mapping[str, Any]) -> list[str] | None:
    """Tensors that differ from what the manifest beside the shards recorded of the source; None without a record."""
    before = (job.recorded or {}).get("tensors")
    if not isinstance(before, dict):
        return None
    return [name for name, it in tensors.items() if before.get(name) != it]


def _logits(job: ConversionJob, views: Mapping[str, View], shards: Shards) -> dict[str, Any]:
    activation = job.config["hidden_act"]
    if activation != "silu":
        return {"logits": f"not computed: the check knows silu, not {activation}"}
    found = difference(job.plan, job.config, views, shards)
    # Not ``found > TOLERANCE``: a difference of NaN must fail, too.
    if not found <= TOLERANCE:
        raise ConversionError(f"the logits of the shards differ from the model's by {found:.2g} of the largest one")
    return {"logits": f"of the shards and of the model differ by {found:.1e} at most"}


def _manifest(target: Path) -> dict[str, Any]:
    found = read_manifest(target / MANIFEST)
    assert found is not None
    return found


def _raise_for(wrong: list[str], problem: str) -> None:
    if wrong:
        differ = "1 tensor differs" if len(wrong) == 1 else f"{len(wrong)} tensors differ"
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ConversionError(f"{differ} {problem}: {', '.join(wrong[:_SHOWN])}{more}. Convert again")
