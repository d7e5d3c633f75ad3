"""The verb ``convert``: checks everything first, then streams, then writes the manifest and verifies."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.convert.conversion_jobs import ConversionJob, Given, job_to_hf, job_to_nxd
from sm_llm.convert.hf_source import SOURCE, local_folder
from sm_llm.convert.remote import checkpoint_of, staging_of
from sm_llm.convert.report import (
    ConversionReport,
    Progress,
    degrees_json,
    digest_of,
    manifest_json,
    read_manifest,
)
from sm_llm.convert.to_hf import index_json
from sm_llm.convert.verify import origin_notes, verify_hf, verify_nxd
from sm_llm.convert.work import DESTINATION, MANIFEST, SHARDS, Journal, run_units, write_whole
from sm_llm.errors import ConversionError, ConversionRefused, Issue
from sm_llm.models.safetensors_folder import INDEX_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.convert.work import Result
    from sm_llm.storage.s3.s3_options import S3Options

MOST_WORKERS = 64


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str,
    tensor_parallel_degree: int | None = None,
    pipeline_parallel_degree: int | None = None,
    virtual_pipeline_degree: int | None = None,
    kv_size_multiplier: int | None = None,
    qkv: str | None = None,
    layout: str | None = None,
    xser: bool | None = None,
    config: str | Path | None = None,
    verify: bool = False,
    workers: int | None = None,
    scratch: str | Path | None = None,
    options: S3Options | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a Hugging Face folder to shards of neuronx-distributed (``to="nxd"``), or shards to a folder (``"hf"``).

    To nxd, ``tensor_parallel_degree`` is required; the others default to 1 stage, derived copies of key/value heads,
    ``qkv="fused"``, ``layout="trn1"`` and ``xser=True``. To hf, the manifest beside the shards gives them all; without
    one, options do. ``config`` is a config.json (or its folder) for shards that have none beside them. ``workers``
    threads write at once (default: two per CPU, at most 8). Memory is a few MiB per worker, whatever the model's size.
    ``verify`` reads back what was written: every tensor's checksum, and the logits of the sharded model.

    Each of ``source``, ``destination`` and ``config`` is a folder here or in S3, which ``options`` reach; ``source`` to
    hf may be a run, ``RUN@STEP`` or ``RUN`` for its newest checkpoint. What is in S3 has a copy below ``scratch``
    (default: the machine's temporary files) until the conversion is complete, except for safetensors that are read: of
    these only the matrices that are cut into columns.

    An interrupted conversion is continued by the same call. Raises ``ConversionRefused`` before anything is written
    if source, degrees, destination or disk do not fit; ``ConversionError`` for damaged or contradictory weights,
    ``StorageError`` where S3 does not answer.
    """
    began = time.monotonic()
    if to not in ("nxd", "hf"):
        raise ConversionRefused([Issue("conversion-target-unknown", "to (--to)", "must be nxd or hf", to)])
    _check_switches(**{"xser (--xser)": xser, "verify (--verify)": verify})
    checkpoint = checkpoint_of(str(source), options) if to == "hf" else None
    origin = str(source) if checkpoint is None else checkpoint.location
    locations = origin, str(destination), None if config is None else str(config)
    staging = staging_of(*locations, scratch, options, checkpoint)
    here = locations if staging is None else staging.fetch(streams=to == "nxd")
    given = Given(
        tensor_parallel_degree, pipeline_parallel_degree, virtual_pipeline_degree, kv_size_multiplier, qkv, layout,
        xser, None if here[2] is None else Path(here[2]).expanduser(), {} if staging is None else staging.streamed,
    )  # fmt: skip
    folder, target, count = local_folder(here[0], SOURCE), _target(here[1]), _workers(workers)
    try:
        report = _convert_here(folder, target, to, given, count, verify=verify, progress=progress)
    except OSError as error:
        raise ConversionError(f"{error}. Check the permissions and the disk; the same command continues") from error
    if staging is not None:
        staging.deliver()
        report = replace(report, source=locations[0], destination=locations[1])
    if checkpoint is not None:
        report = replace(report, notes=(f"the checkpoint of {source} is {origin}", *report.notes))
    return replace(report, seconds=time.monotonic() - began)


def _convert_here(
    folder: Path, target: Path, to: str, given: Given, workers: int, *, verify: bool, progress: Progress | None
) -> ConversionReport:
    job = (job_to_nxd if to == "nxd" else job_to_hf)(folder, target, given)
    report = _run(job, folder, target, workers, progress)
    # Also where nothing was written: a destination that is complete already is verified as it is.
    if verify:
        report = replace(report, verified=(verify_nxd if to == "nxd" else verify_hf)(job, target))
    return report


def _target(destination: str | Path) -> Path:
    if "://" in str(destination):
        problem, remedy = "must be a folder here or in S3", "Name a folder, or s3://bucket/prefix"
        raise ConversionRefused([Issue("destination-not-local", DESTINATION, problem, str(destination), remedy)])
    return Path(destination).expanduser().absolute()


def _check_switches(**switches: Any) -> None:
    """Refuse what is neither true nor false, and None: ``xser="no"`` would count as true."""
    problem = "must be True or False"
    wrong = [it for it in switches.items() if not isinstance(it[1], bool | None)]
    if wrong:
        raise ConversionRefused([Issue("switch-not-a-flag", path, problem, value) for path, value in wrong])


def _workers(workers: int | None) -> int:
    if workers is None:
        return min(8, 2 * (os.cpu_count() or 1))  # while one waits for the disk, another computes
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= MOST_WORKERS:
        raise ConversionRefused(
            [
                Issue(
                    "workers-out-of-range",
                    "workers (--workers)",
                    f"must be a whole number from 1 to {MOST_WORKERS}",
                    workers,
                )
            ]
        )
    return workers


def _identity(job: ConversionJob, folder: Path, to: str) -> dict[str, Any]:
    """What makes two conversions the same: the files read, as they are now, and every setting."""
    files: list[list[str | int]] = []
    for path in job.files:
        if path in job.streamed:
            files.append([os.path.relpath(path, folder), *job.streamed[path].identity])
            continue
        stat = path.stat()
        # Not by content: reading all weights once more would take as long as the conversion.
        files.append([os.path.relpath(path, folder), stat.st_size, stat.st_mtime_ns])
    settings = {**degrees_json(job.plan.degrees), "xser": job.xser, "config": dict(job.config)}
    return {"to": to, "source": str(folder.absolute()), "files": files, **settings}


def _run(job: ConversionJob, folder: Path, target: Path, workers: int, progress: Progress | None) -> ConversionReport:
    journal = Journal(target, _identity(job, folder, job.to))
    # Before the journal is opened: it refuses a folder that holds files and no journal, as a complete one does.
    if (found := _complete(job, target, journal)) is not None:
        sizes = {unit: it["bytes"] for unit, it in found["files"].items()}
        return _report(job, folder, target, sizes, found["digest"], reused=len(sizes), is_unchanged=True)
    with journal.open():
        if job.to == "nxd":
            (target / SHARDS).mkdir(exist_ok=True)
        results, before = run_units(job.units, journal, workers=workers, progress=progress)
        # Units without a file only took checksums of the source.
        files = {unit.file: results[unit.name] for unit in job.units if unit.file}
        tensors = _tensors(job, results if job.to == "nxd" else files)
        sizes = {file: it["bytes"] for file, it in files.items()}
        reused = sum(1 for it in before if it in files)
        report = _report(job, folder, target, sizes, digest_of(tensors), reused=reused, is_unchanged=False)
        report = replace(report, notes=(*report.notes, *origin_notes(job, tensors)))
        _finish(job, target, report, journal.digest, tensors, files)
        # After the manifest: a crash between the two leaves the journal, and the same call continues.
        journal.complete()
    return report


def _complete(job: ConversionJob, target: Path, journal: Journal) -> dict[str, Any] | None:
    """The manifest of this very conversion, if it is complete; ``ConversionRefused`` if it was and is damaged."""
    try:
        found = read_manifest(target / MANIFEST)
    except ValueError:
        # A file of this name that is no manifest of ours: the journal refuses the folder as not empty.
        return None
    if found is None or found.get("identity") != journal.digest:
        return None
    if not (damaged := _damaged(job, target, found)):
        return found
    # The same call writes what is damaged again as long as the journal is there.
    if journal.is_there:
        return None
    names = f"{', '.join(damaged[:4])}{' …' if len(damaged) > 4 else ''}"
    problem = f"{target} holds this conversion, but {names} of it is missing or damaged"
    raise ConversionRefused(
        [Issue("destination-damaged", DESTINATION, problem, remedy="Remove this folder and convert again")]
    )


def _damaged(job: ConversionJob, target: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Files of a complete conversion that are missing or cut off. Their structure is read, and not their weights."""
    units = [unit for unit in job.units if unit.file]
    files = manifest.get("files")
    is_whole = (
        isinstance(manifest.get("digest"), str)
        and isinstance(manifest.get("tensors"), dict)
        and isinstance(files, dict)
        and files.keys() == {unit.file for unit in units}
        and all(isinstance(it, dict) and isinstance(it.get("bytes"), int) for it in files.values())
    )
    if not is_whole:
        return [MANIFEST]
    beside = [*job.beside, *([INDEX_FILE] if job.to == "hf" and len(units) > 1 else [])]
    return [
        *(unit.file for unit in units if not unit.is_readable()),
        *(name for name in beside if not (target / name).is_file()),
    ]


def _tensors(job: ConversionJob, results: Mapping[str, Result]) -> dict[str, Any]:
    """Source tensor -> format, shape and checksum. Units of sources and of Hugging Face files know them."""
    sums: dict[str, str] = {}
    for name, it in results.items():
        if job.to == "hf" or name.startswith("source "):
            sums.update(it["tensors"])
    shapes = job.plan.shapes
    return {name: {"dtype": job.dtypes[name], "shape": list(shapes[name]), "crc64": sums[name]} for name in shapes}


def _report(
    job: ConversionJob,
    folder: Path,
    target: Path,
    sizes: Mapping[str, int],
    digest: str,
    *,
    reused: int,
    is_unchanged: bool,
) -> ConversionReport:
    plan = job.plan
    return ConversionReport(
        source=str(folder),
        destination=str(target),
        to=job.to,
        model_type=str(job.config["model_type"]),
        degrees=plan.degrees,
        xser=job.xser,
        dtypes=tuple(sorted(set(job.dtypes.values()))),
        vocabulary=plan.vocabulary,
        padded_vocabulary=plan.padded_vocabulary,
        is_tied=plan.is_tied,
        files=len(sizes),
        size=sum(sizes.values()),
        seconds=0.0,
        digest=digest,
        coverage=job.coverage,
        reused=reused,
        is_unchanged=is_unchanged,
        notes=job.notes,
        is_dcp=job.is_dcp,
    )


def _finish(
    job: ConversionJob,
    target: Path,
    report: ConversionReport,
    identity: str,
    tensors: Mapping[str, Any],
    files: Mapping[str, Result],
) -> None:
    """The files beside the weights, and the manifest last: with it the conversion is complete."""
    version = vars(sys.modules["sm_llm"])["__version__"]  # importing it here would be a circle
    for name, path in job.beside.items():
        shutil.copyfile(path, target / name)
    if job.to == "hf" and (index := index_json(files)) is not None:
        write_whole(target / INDEX_FILE, index.encode())
    entries = {name: {"bytes": it["bytes"], "tensors": it["tensors"]} for name, it in files.items()}
    write_whole(target / MANIFEST, manifest_json(report, identity, tensors, entries, version).encode())
