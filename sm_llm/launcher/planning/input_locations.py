"""Inputs and storage in S3, and checkpoints to start from, before a job is started: a mistyped address is reported."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, PlanError, StorageError
from sm_llm.launcher.planning.local_paths import local_folder
from sm_llm.launcher.planning.source_contents import lacking, no_folder, wanted_at, wrong_content
from sm_llm.optional import missing
from sm_llm.runs.run_paths import RUN_RECORD, storage_root
from sm_llm.runs.s3_run_store import CONFIG
from sm_llm.spec.inputs import S3Input, input_location
from sm_llm.spec.references import sources
from sm_llm.storage.publication.find import commit_keys
from sm_llm.storage.publication.result import NotPublished, result_address
from sm_llm.storage.s3.s3_client import code_of, connect
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.uri import is_s3, open_store, parse, run_and_step
from sm_llm.terminal import echo, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.planning.source_contents import SourceKind
    from sm_llm.spec.job import JobSpec

START = "task.start."
_CHECKPOINT = f"{START}checkpoint"
_WHEELS = "backend.wheelhouse"
_SHOWN = 8
# Bytes; a longer one is left to the service.
_LARGEST_MANIFEST = 2**24
# Objects of one answer of S3.
_LISTED = 1000


def assert_inputs_exist(plans: Sequence[Plan], *, has_begun: bool = False) -> None:
    """Raise one ``PlanError`` for every input in S3 that is not there, and every checkpoint to start from.

    A run that ``has_begun`` continues from its own checkpoint. What cannot be checked from here is reported on standard
    error and left to the job: its role may have access.
    """
    probe = _Probe()
    issues = [
        issue
        for plan in plans
        for path, location in _locations(plan.job)
        if not (has_begun and path.startswith(START))
        for issue in probe.issues(plan, path, location)
    ]
    _finish(probe.notes, issues)


def check_locations(plans: Sequence[Plan]) -> None:
    """For ``sm-llm plan``: the same, and whether the storage is there. What is not checked goes to standard error."""
    probe = _Probe()
    storages = [(plan, "storage", storage_root(plan.job)) for plan in plans]
    locations = [*storages, *((plan, *it) for plan in plans for it in _locations(plan.job))]
    in_s3 = [it for it in locations if is_s3(it[2])]
    reason = _no_access(plans[0]) if in_s3 else ""
    if reason:
        unchecked = dict.fromkeys(f"{path}={location}" for _, path, location in in_s3)
        probe.notes.append(f"not checked ({reason}): {', '.join(unchecked)}")
    # Without credentials only places on this machine are checked; a storage folder is made when a run begins.
    checked = [it for it in locations if (not reason if is_s3(it[2]) else it[1] != "storage")]
    _finish(probe.notes, [issue for it in checked for issue in probe.issues(*it)])


def assert_starts_exist(plans: Sequence[Plan]) -> None:
    """Raise one ``PlanError`` for checkpoints to start from on this machine that are not there."""
    probe = _Probe()
    locations = [
        (plan, *it) for plan in plans for it in _locations(plan.job) if it[0] == _CHECKPOINT and not is_s3(it[1])
    ]
    _finish(probe.notes, [issue for it in locations for issue in probe.issues(*it)])


def _no_access(plan: Plan) -> str:
    """Why nothing in S3 can be asked from here; empty if it can."""
    if (lack := missing("boto3", "botocore")) is not None:
        return lack.rstrip(".")
    from botocore.exceptions import BotoCoreError

    try:
        session, _ = connect(S3Options(**plan.job.storage_options.model_dump()), CONFIG)
        return "" if session.get_credentials() is not None else "there are no AWS credentials here"
    except (StorageError, BotoCoreError) as error:
        return str(error)


def _finish(notes: Sequence[str], issues: Sequence[Issue]) -> None:
    for note in notes:
        echo(note, err=True)
    if issues:
        raise PlanError(issues)


class _Probe:
    """One check of the places of all plans of a launch. A place, and a bucket that is not there, is reported once."""

    def __init__(self) -> None:
        # What could not be checked, and why.
        self.notes: list[str] = []
        self._reported: list[str] = []
        # Whether the store did not answer at all: every further request would wait as long.
        self._is_cut_off = False

    def issues(self, plan: Plan, path: str, location: str) -> Iterator[Issue]:
        """What is wrong with ``location``, if anything."""
        # Compared with a closing slash, because s3://bucket/ab does not lie below s3://bucket/a.
        is_reported = any(f"{location}/".startswith(f"{it.rstrip('/')}/") for it in self._reported)
        if is_reported or (self._is_cut_off and is_s3(location)):
            return
        # The storage is a field of the whole workflow, not of a step.
        prefix = f"steps.{plan.step}." if plan.step and path != "storage" else ""
        try:
            options, wanted = plan.job.storage_options.model_dump(), wanted_at(plan.job).get(path)
            issue = _issue(path, location, options, wanted, is_manifest=path in _manifests(plan.job))
        except StorageError as error:
            # Only a missing bucket is certain. Every other error may be a right that this user lacks and the job's role
            # has.
            if code_of(error.__cause__) != "NoSuchBucket":
                self._reported.append(location)
                self._is_cut_off = is_s3(location) and not code_of(error.__cause__)
                known = "" if path == "storage" else ". The job checks it"
                self.notes.append(f"{prefix}{path}: cannot be checked from here: {error}{known}")
                return
            self._reported.append(f"s3://{parse(location).bucket}")
            issue = Issue(
                "bucket-not-found",
                path,
                "is not there: the bucket does not exist",
                location,
                "Create it first, or check its name",
            )
        if issue is not None:
            self._reported.append(location)
            yield replace(issue, path=f"{prefix}{path}", origin=plan.origins.get(path, ""))


def _locations(job: JobSpec) -> Iterator[tuple[str, str]]:
    """Path and address of everything that can be searched for; named inputs first."""
    named = {f"inputs.{name}": input_location(value) for name, value in job.inputs.items()}
    others = {f"backend.{name}": location for name, location in job.backend.read_locations.items()}
    listed = _manifests(job).values()
    for path, location in {**named, **sources(job), **others}.items():
        if path not in named and any(location.startswith(it) for it in listed):
            continue  # what the objects of a manifest are is known to SageMaker alone
        if is_s3(location) or (path == _CHECKPOINT and local_folder(location) is not None):
            yield path, location


def _manifests(job: JobSpec) -> dict[str, str]:
    """Path and address of the inputs that are manifests."""
    return {
        f"inputs.{name}": it.uri
        for name, it in job.inputs.items()
        if isinstance(it, S3Input) and it.data_type == "ManifestFile"
    }


def _manifest_issue(path: str, location: str, options: dict[str, Any]) -> Issue | None:
    """A manifest that is not there, or not one: SageMaker would read what it lists, and reports this in minutes."""
    remedy = "Give the address of a JSON list: first {'prefix': 's3://bucket/folder/'}, then names below it"
    parsed = parse(location)
    folder, _, name = parsed.prefix.rpartition("/")
    store = open_store(replace(parsed, prefix=folder).uri, options, CONFIG)
    held = store.head(name) if name and not location.endswith("/") else None
    if held is None:
        problem = "is not there: a manifest is one object, not a prefix"
        return Issue("manifest-not-found", path, problem, location, remedy)
    if held.size > _LARGEST_MANIFEST:
        return None
    try:
        found = json.loads(store.get(name) or b"")
    except ValueError:
        found = None
    is_list = isinstance(found, list) and len(found) > 1 and all(isinstance(it, str) for it in found[1:])
    first = found[0] if is_list else None
    if not isinstance(first, dict) or set(first) != {"prefix"} or not is_s3(str(first["prefix"])):
        return Issue("manifest-invalid", path, "is not a manifest of SageMaker", location, remedy)
    return None


def _issue(
    path: str, location: str, options: dict[str, Any], wanted: SourceKind | None, *, is_manifest: bool
) -> Issue | None:
    if is_manifest:
        return _manifest_issue(path, location, options)
    if path == _CHECKPOINT:
        return _checkpoint_issue(location, options)
    if path == "storage":
        open_store(location, options, CONFIG).holds()  # nothing needs to lie there yet
        return None
    try:
        if _exists(location, options):
            return _content_issue(path, location, options, wanted)
    except NotPublished:
        return Issue(
            "result-not-published",
            path,
            "is the result of a run that has not published it",
            location,
            "Wait for the run to complete",
        )
    return Issue(
        "input-not-found",
        path,
        "is not there: no object has this name, and none lies below it",
        location,
        "Check the address",
    )


def _content_issue(path: str, location: str, options: dict[str, Any], wanted: SourceKind | None) -> Issue | None:
    """A place that is there and holds something else than what is read from it."""
    if wanted is not None:
        store = open_store(result_address(location, options), options, CONFIG)
        files, is_all = store.first(_LISTED)
        problem = lacking(wanted, [(it.key, it.size) for it in files])
        # Of a longer listing, only that all named files are missing is certain: each of them is asked for.
        if not is_all:
            missing_files = [name for name in wanted.names if store.head(name) is None]
            problem = f"has no {' and no '.join(missing_files)}" if missing_files else ""
        if files and problem:
            return wrong_content(path, location, wanted, problem)
        if not files and not wanted.is_file:
            return no_folder(path, location, wanted, "an object", f"Give {wanted.what}")
    if path == _WHEELS and not any(it.key.endswith(".whl") for it in open_store(location, options, CONFIG).list("")):
        remedy = "Fill it with: sm-llm image wheelhouse LINE PREFIX"
        return Issue("wheelhouse-without-wheels", path, "holds no wheel", location, remedy)
    return None


def _exists(uri: str, options: dict[str, Any]) -> bool:
    parsed = parse(result_address(uri, options))
    if open_store(parsed.uri, options, CONFIG).holds():
        return True
    # An address may name one object, below which S3 lists nothing.
    folder, _, name = parsed.prefix.rpartition("/")
    return bool(name) and open_store(replace(parsed, prefix=folder).uri, options, CONFIG).head(name) is not None


def _checkpoint_issue(location: str, options: dict[str, Any]) -> Issue | None:
    run, step = run_and_step(location)
    parsed = parse(run)
    if parsed.path is not None and not parsed.path.is_dir():
        problem = "is a file, where a run's folder is wanted" if parsed.path.exists() else "is not there"
        return Issue(
            "start-checkpoint-not-found", _CHECKPOINT, problem, location, "Check the path; give RUN or RUN@STEP"
        )
    store = open_store(parsed.uri, options, CONFIG)
    steps = [slot.step for slot, _ in commit_keys(store)]
    if not steps:
        if store.head(RUN_RECORD) is not None:
            remedy = f"Give another run, RUN or RUN@STEP. What this one has: sm-llm status {quoted(run)}"
            return Issue("start-run-without-checkpoint", _CHECKPOINT, "has no checkpoint", location, remedy)
        remedy = "Give the folder or address of a run, RUN or RUN@STEP; sm-llm ls STORAGE lists runs"
        return Issue(
            "start-not-a-run", _CHECKPOINT, f"is not a run: it has no checkpoint and no {RUN_RECORD}", location, remedy
        )
    if step is None or step in steps:
        return None
    shown = ", ".join(map(str, steps[-_SHOWN:]))
    return Issue(
        "start-step-not-found",
        _CHECKPOINT,
        f"has no checkpoint of step {step}",
        location,
        f"It has those of steps {shown}",
    )
