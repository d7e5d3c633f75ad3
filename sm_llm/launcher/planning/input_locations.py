"""Inputs and storage in S3, and checkpoints to start from, before a job is started: a mistyped address is reported."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, StorageError
from sm_llm.launcher.planning.local_paths import local_folder
from sm_llm.launcher.planning.source_contents import lacking, no_folder, wanted_at, wrong_content
from sm_llm.optional import missing
from sm_llm.runs.run_folders import is_run_folder
from sm_llm.runs.run_paths import RUN_RECORD, storage_root
from sm_llm.runs.s3_run_store import CONFIG
from sm_llm.spec.inputs import S3Input, input_location
from sm_llm.spec.references import sources
from sm_llm.spec.validation.runner import refuse, run
from sm_llm.storage.publication.find import commit_keys
from sm_llm.storage.publication.result import POINTER, RESULT, NotPublished, result_address
from sm_llm.storage.s3.s3_client import code_of, connect
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.uri import is_s3, join, open_store, parse, run_and_step
from sm_llm.terminal import echo, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.planning.source_contents import SourceKind
    from sm_llm.spec.job import JobSpec
    from sm_llm.spec.validation.runner import Checker

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
    found = [it for it in _all_of(plans) if not (has_begun and it.path.startswith(START))]
    _refuse(Addresses(found))


def refuse_locations(plans: Sequence[Plan]) -> bool:
    """For ``sm-llm plan``: the same, and whether the storage is there. What is not checked goes to standard error.

    Returns whether the storage answers.
    """
    locations = [*(Address(plan, "storage", storage_root(plan.job)) for plan in plans), *_all_of(plans)]
    in_s3 = [it for it in locations if is_s3(it.address)]
    reason = _no_access(plans[0]) if in_s3 else ""
    # Without credentials only places on this machine are checked; a storage folder is made when a run begins.
    asked = Addresses([it for it in locations if (not reason if is_s3(it.address) else it.path != "storage")])
    if reason:
        unchecked = dict.fromkeys(f"{it.path}={it.address}" for it in in_s3)
        asked.notes.append(f"not checked ({reason}): {', '.join(unchecked)}")
    _refuse(asked)
    return not reason and not any(note.startswith("storage:") for note in asked.notes)


def assert_starts_exist(plans: Sequence[Plan]) -> None:
    """Raise one ``PlanError`` for checkpoints to start from on this machine that are not there."""
    _refuse(Addresses([it for it in _all_of(plans) if it.path == _CHECKPOINT and not is_s3(it.address)]))


def _refuse(asked: Addresses) -> None:
    try:
        refuse(run(LOCATION_CHECKERS, asked))
    finally:
        echo(*asked.notes, err=True)


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


@dataclass(frozen=True)
class Address:
    """What a field of a plan's job names: a folder or an object in S3, or a run on this machine."""

    plan: Plan
    path: str
    address: str

    @property
    def options(self) -> dict[str, Any]:
        """How S3 is reached."""
        return self.plan.job.storage_options.model_dump()

    @property
    def is_manifest(self) -> bool:
        """Whether it is an input that lists others."""
        return self.path in _manifests(self.plan.job)


@dataclass
class Addresses:
    """The locations of all plans of a launch, asked once. One, and a bucket that is not there, is reported once."""

    locations: Sequence[Address]
    notes: list[str] = field(default_factory=list)
    """What could not be checked, and why."""
    _reported: list[str] = field(default_factory=list)
    _is_cut_off: bool = False
    """Whether the store did not answer at all: every further request would wait as long."""

    def issues(self, wanted: Callable[[Address], bool], check: Callable[[Address], Issue | None]) -> Iterator[Issue]:
        """What ``check`` finds at the ``wanted`` locations."""
        for it in filter(wanted, self.locations):
            yield from self._issues(it, check)

    def _issues(self, it: Address, check: Callable[[Address], Issue | None]) -> Iterator[Issue]:
        # Compared with a closing slash, because s3://bucket/ab does not lie below s3://bucket/a.
        is_reported = any(f"{it.address}/".startswith(f"{known.rstrip('/')}/") for known in self._reported)
        if is_reported or (self._is_cut_off and is_s3(it.address)):
            return
        # The storage is a field of the whole workflow, not of a step.
        prefix = f"steps.{it.plan.step}." if it.plan.step and it.path != "storage" else ""
        try:
            issue = check(it)
        except StorageError as error:
            # Only a missing bucket is certain. Every other error may be a right that this user lacks and the job's role
            # has.
            if code_of(error.__cause__) != "NoSuchBucket":
                self._reported.append(it.address)
                self._is_cut_off = is_s3(it.address) and not code_of(error.__cause__)
                known = "" if it.path == "storage" else ". The job checks it"
                self.notes.append(f"{prefix}{it.path}: cannot be checked from here: {error}{known}")
                return
            self._reported.append(f"s3://{parse(it.address).bucket}")
            issue = Issue(
                "bucket-not-found",
                it.path,
                "is not there: the bucket does not exist",
                it.address,
                "Create it first, or check its name",
            )
        if issue is not None:
            self._reported.append(it.address)
            if issue.code == "start-checkpoint-not-found" and (meant := _run_of_name(it.plan.job, it.address)):
                issue = replace(issue, remedy=f"Write the folder of the run: {_CHECKPOINT}={quoted(meant)}")
            yield replace(issue, path=f"{prefix}{it.path}", origin=it.plan.origins.get(it.path, ""))


def check_storage(asked: Addresses) -> Iterator[Issue]:
    """A storage whose bucket is not there; nothing needs to lie in it yet."""
    yield from asked.issues(lambda it: it.path == "storage", _storage_issue)


def check_manifests(asked: Addresses) -> Iterator[Issue]:
    """Manifests that are not there, or are none."""
    yield from asked.issues(lambda it: it.is_manifest, _manifest_issue)


def check_checkpoints(asked: Addresses) -> Iterator[Issue]:
    """Runs and steps to start from that are not there."""
    yield from asked.issues(lambda it: it.path == _CHECKPOINT, _checkpoint_issue)


def check_inputs(asked: Addresses) -> Iterator[Issue]:
    """Inputs and sources that are not there, or hold something else than what is read from them."""
    others = ("storage", _CHECKPOINT)
    yield from asked.issues(lambda it: it.path not in others and not it.is_manifest, _input_issue)


# The storage first: what lies in a bucket that is not there is not reported beside it.
LOCATION_CHECKERS: tuple[Checker[Addresses], ...] = (
    check_storage,
    check_manifests,
    check_checkpoints,
    check_inputs,
)


def _all_of(plans: Sequence[Plan]) -> list[Address]:
    return [Address(plan, *it) for plan in plans for it in _locations(plan.job)]


def _run_of_name(job: JobSpec, location: str) -> str | None:
    """The folder of the run in the job's storage whose name or id was given in place of an address."""
    name, step = run_and_step(location)
    root = storage_root(job)
    folder = local_folder(root)
    if "/" in name or folder is None or not folder.is_dir():
        return None
    # A run's id begins with its name and ends with its time, so the last one is the newest.
    found = sorted(it.name for it in folder.iterdir() if f"{it.name}-".startswith(f"{name}-") and is_run_folder(it))
    return f"{join(root, found[-1])}{'' if step is None else f'@{step}'}" if found else None


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


def _storage_issue(it: Address) -> None:
    open_store(it.address, it.options, CONFIG).holds()  # raises where there is no such bucket


def _manifest_issue(it: Address) -> Issue | None:
    """A manifest that is not there, or not one: SageMaker would read what it lists, and reports this in minutes."""
    remedy = "Give the address of a JSON list: first {'prefix': 's3://bucket/folder/'}, then names below it"
    parsed = parse(it.address)
    folder, _, name = parsed.prefix.rpartition("/")
    store = open_store(replace(parsed, prefix=folder).uri, it.options, CONFIG)
    held = store.head(name) if name and not it.address.endswith("/") else None
    if held is None:
        problem = "is not there: a manifest is one object, not a prefix"
        return Issue("manifest-not-found", it.path, problem, it.address, remedy)
    if held.size > _LARGEST_MANIFEST:
        return None
    try:
        found = json.loads(store.get(name) or b"")
    except ValueError:
        found = None
    is_list = isinstance(found, list) and len(found) > 1 and all(isinstance(name, str) for name in found[1:])
    first = found[0] if is_list else None
    if not isinstance(first, dict) or set(first) != {"prefix"} or not is_s3(str(first["prefix"])):
        return Issue("manifest-invalid", it.path, "is not a manifest of SageMaker", it.address, remedy)
    return None


def _input_issue(it: Address) -> Issue | None:
    try:
        if _exists(it.address, it.options):
            return _unmounted(it) or _content_issue(it, wanted_at(it.plan.job).get(it.path))
    except NotPublished:
        problem = "is the result of a run that has not published it"
        return Issue("result-not-published", it.path, problem, it.address, "Wait for the run to complete")
    problem = "is not there: no object has this name, and none lies below it"
    return Issue("input-not-found", it.path, problem, it.address, "Check the address")


def _unmounted(it: Address) -> Issue | None:
    """A channel of a part of a result that has no pointer: it resolves, but where it is mounted S3 has no object."""
    if not (it.path.startswith("inputs.") and it.plan.job.backend.mounts_inputs):
        return None
    if result_address(it.address, it.options) == it.address or open_store(it.address, it.options, CONFIG).holds():
        return None
    problem = f"has no object that SageMaker could mount: only folders of a result, down to a depth, have a {POINTER}"
    whole = f"{it.address.rpartition(f'/{RESULT}/')[0]}/{RESULT}"
    return Issue("result-part-not-mountable", it.path, problem, it.address, f"Give the whole result: {it.path}={whole}")


def _content_issue(it: Address, wanted: SourceKind | None) -> Issue | None:
    """A location that is there and holds something else than what is read from it."""
    if wanted is not None:
        store = open_store(result_address(it.address, it.options), it.options, CONFIG)
        files, is_all = store.first(_LISTED)
        problem = lacking(wanted, [(file.key, file.size) for file in files])
        # Of a longer listing, only that all named files are missing is certain: each of them is asked for.
        if not is_all:
            missing_files = [name for name in wanted.names if store.head(name) is None]
            problem = f"has no {' and no '.join(missing_files)}" if missing_files else ""
        if files and problem:
            return wrong_content(it.path, it.address, wanted, problem)
        if not files and not wanted.is_file:
            return no_folder(it.path, it.address, wanted, "an object", f"Give {wanted.what}")
    if it.path == _WHEELS:
        listed = open_store(it.address, it.options, CONFIG).list("")
        if not any(file.key.endswith(".whl") for file in listed):
            remedy = "Fill it with: sm-llm image wheelhouse STACK PREFIX"
            return Issue("wheelhouse-without-wheels", it.path, "holds no wheel", it.address, remedy)
    return None


def _exists(uri: str, options: dict[str, Any]) -> bool:
    parsed = parse(result_address(uri, options))
    if open_store(parsed.uri, options, CONFIG).holds():
        return True
    # An address may name one object, below which S3 lists nothing.
    folder, _, name = parsed.prefix.rpartition("/")
    return bool(name) and open_store(replace(parsed, prefix=folder).uri, options, CONFIG).head(name) is not None


def _checkpoint_issue(it: Address) -> Issue | None:
    address, step = run_and_step(it.address)
    parsed = parse(address)
    if parsed.path is not None and not parsed.path.is_dir():
        problem = "is a file, where a run's folder is wanted" if parsed.path.exists() else "is not there"
        remedy = "Check the path; give RUN or RUN@STEP"
        return Issue("start-checkpoint-not-found", _CHECKPOINT, problem, it.address, remedy)
    store = open_store(parsed.uri, it.options, CONFIG)
    steps = [slot.step for slot, _ in commit_keys(store)]
    if not steps:
        if store.head(RUN_RECORD) is not None:
            remedy = f"Give another run, RUN or RUN@STEP. What this one has: sm-llm status {quoted(address)}"
            return Issue("start-run-without-checkpoint", _CHECKPOINT, "has no checkpoint", it.address, remedy)
        remedy = "Give the folder or address of a run, RUN or RUN@STEP; sm-llm ls STORAGE lists runs"
        problem = f"is not a run: it has no checkpoint and no {RUN_RECORD}"
        return Issue("start-not-a-run", _CHECKPOINT, problem, it.address, remedy)
    if step is None or step in steps:
        return None
    shown = ", ".join(map(str, steps[-_SHOWN:]))
    problem, remedy = f"has no checkpoint of step {step}", f"It has those of steps {shown}"
    return Issue("start-step-not-found", _CHECKPOINT, problem, it.address, remedy)
