"""Opens a folder of NxD shards: which file is which rank, in each of NxD's namings, and where each tensor is in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.convert.files.torch_file import Reference, read_torch_file
from sm_llm.convert.files.views import View
from sm_llm.convert.hf_source import SOURCE, clean_names
from sm_llm.convert.report import read_manifest
from sm_llm.convert.work import MANIFEST, SHARDS
from sm_llm.errors import ConversionError, ConversionRefused, Issue
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

Rank = tuple[int, int]
"""Tensor-parallel and pipeline rank."""

# What NxD's releases call the file (or, the last one, the folder) of a rank.
_NAMINGS = {
    "dp_rank_DD_tp_rank_TT_pp_rank_PP.pt": re.compile(
        r"dp_rank_(?P<dp>\d+)_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt"
    ),
    "dp_rank_DD_ep_rank_EE_tp_rank_TT_pp_rank_PP.pt": re.compile(
        r"dp_rank_(?P<dp>\d+)_ep_rank_(?P<ep>\d+)_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt"
    ),
    "tp_rank_TT_pp_rank_PP": re.compile(r"tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)"),
}
_OLD_FILE = "checkpoint.pt"
_SHOWN = 6
_KEEP_ONE = "Keep the files of one checkpoint, and move the others to a folder of their own"


@dataclass(frozen=True)
class NxdSource:
    """The files of all ranks. ``tensor`` and ``pipeline`` are the degrees that the file names show."""

    root: Path
    """The folder that holds ``model/``, the manifest and the config, if there are any."""
    files: Mapping[Rank, Path]
    manifest: Mapping[str, Any] | None
    tensor: int
    pipeline: int


@dataclass(frozen=True)
class Shards:
    """Name -> tensor of every rank, and which pipeline rank holds a name."""

    views: Mapping[Rank, Mapping[str, View]]
    stages: Mapping[str, int]
    is_xser: bool


def find_shards(folder: Path) -> NxdSource:
    """The shards in ``folder`` or its ``model/``.

    Raises ``ConversionRefused`` for several checkpoints, an incomplete one, mixed namings and missing ranks.
    """
    model = folder / SHARDS if (folder / SHARDS).is_dir() else folder
    found = dict(_rank_files(model))
    if not found:
        tags = _tags(folder)
        if len(tags) != 1:
            raise ConversionRefused([_nothing(folder, tags)])
        # The data of a run's checkpoint: one tag, beside the files of the run's processes.
        model = folder / tags[0] / SHARDS
        found = dict(_rank_files(model))
    root = model.parent if model.name == SHARDS else model
    _check_marker(root)
    if len(found) > 1:
        shown = "; ".join(f"{naming} ({counted(len(ranks), 'file')})" for naming, ranks in found.items())
        problem = f"{model} holds shards of several namings: {shown}"
        raise ConversionRefused([Issue("shards-naming-ambiguous", SOURCE, problem, remedy=_KEEP_ONE)])
    (ranks,) = found.values()
    try:
        manifest = read_manifest(root / MANIFEST)
    except ValueError as error:
        problem = f"{root / MANIFEST} cannot be read: {error}"
        raise ConversionRefused(
            [Issue("shards-manifest-unreadable", SOURCE, problem, remedy="Remove it and give the degrees as options")]
        ) from None
    # The highest numbers; ``rank_issues`` finds those that are missing below them.
    tensor, pipeline = (1 + max(it[index] for it in ranks) for index in (0, 1))
    return NxdSource(root, ranks, manifest, tensor, pipeline)


def rank_issues(source: NxdSource, tensor: int, pipeline: int) -> list[Issue]:
    """Whether the files are those of ``tensor`` x ``pipeline`` ranks, no fewer and no more."""
    wanted = {(tp, pp) for pp in range(pipeline) for tp in range(tensor)}
    missing, extra = sorted(wanted - source.files.keys()), sorted(source.files.keys() - wanted)
    issues = []
    if missing:
        are = "is" if len(missing) == 1 else "are"
        problem = f"{len(missing)} of {counted(len(wanted), 'rank')} {are} missing: {_ranks(missing)}"
        issues.append(
            Issue(
                "shards-ranks-missing",
                SOURCE,
                problem,
                remedy="Copy the whole checkpoint, or give the degrees it was saved with",
            )
        )
    if extra:
        problem = f"holds ranks beyond tp {tensor} x pp {pipeline}: {_ranks(extra)}"
        issues.append(
            Issue("shards-ranks-beyond-degrees", SOURCE, problem, remedy="Give the degrees it was saved with")
        )
    return issues


def open_shards(source: NxdSource, buffers: str) -> Shards:
    """The tensors of every rank; names that match ``buffers`` are left out.

    Raises ``ConversionRefused`` where ranks of a stage differ in their names, or ``ConversionError`` for a bad file.
    """
    views: dict[Rank, dict[str, View]] = {}
    issues: list[Issue] = []
    kinds = set()
    # By stage, then by rank: each rank is compared with the one before it in its stage.
    for (tp, pp), path in sorted(source.files.items(), key=lambda it: (it[0][1], it[0][0])):
        held, kind = read_rank(path)
        cleaned, collisions = clean_names(held, str(path))
        views[tp, pp] = {name: it for name, it in cleaned.items() if not re.search(buffers, name)}
        kinds.add(kind)
        issues += collisions
        if tp and (tp - 1, pp) in views and views[tp, pp].keys() != views[tp - 1, pp].keys():
            apart = sorted(views[tp, pp].keys() ^ views[tp - 1, pp].keys())
            issues.append(
                Issue(
                    "shards-ranks-differ",
                    SOURCE,
                    f"{path.name} and the rank before it differ in {', '.join(apart[:_SHOWN])}",
                )
            )
    if len(kinds) > 1:
        issues.append(
            Issue(
                "shards-xser-mixed",
                SOURCE,
                "some ranks are xser and some hold their tensors: two checkpoints are mixed",
            )
        )
    stages: dict[str, int] = {}
    for (_, pp), names in views.items():
        if twice := sorted(name for name in names if stages.setdefault(name, pp) != pp):
            first, more = stages[twice[0]], f" and {len(twice) - 1} more" if len(twice) > 1 else ""
            problem = f"{twice[0]}{more} lies in pp ranks {first} and {pp}: files of two checkpoints are mixed"
            issues.append(Issue("shards-stages-overlap", SOURCE, problem, remedy=_KEEP_ONE))
            break
    if issues:
        raise ConversionRefused(issues)
    return Shards(views, stages, "xser" in kinds)


def _rank_files(model: Path) -> Iterator[tuple[str, dict[Rank, Path]]]:
    """Naming -> rank -> file. Numbers order the ranks, never the text of their names."""
    entries = sorted(model.iterdir()) if model.is_dir() else []
    for naming, pattern in _NAMINGS.items():
        ranks: dict[Rank, Path] = {}
        for path in entries:
            if (match := pattern.fullmatch(path.name)) is None:
                continue
            numbers = {name: int(value) for name, value in match.groupdict().items()}
            if numbers.get("dp", 0) or numbers.get("ep", 0):
                kind = "data" if numbers.get("dp", 0) else "expert"
                problem = f"{path} is of {kind}-parallel rank {numbers.get('dp') or numbers.get('ep')}"
                remedy = "Weights are saved by data-parallel rank 0 alone; experts have no conversion"
                raise ConversionRefused([Issue("shards-rank-kind-unsupported", SOURCE, problem, remedy=remedy)])
            rank = numbers["tp"], numbers["pp"]
            if rank in ranks:
                problem = f"{ranks[rank].name} and {path.name} are the same rank"
                raise ConversionRefused(
                    [Issue("shards-rank-repeated", SOURCE, problem, remedy="Remove the one that is not meant")]
                )
            # In the old naming a folder has the rank's name.
            ranks[rank] = path / _OLD_FILE if path.is_dir() else path
        if ranks:
            yield naming, ranks


def _tags(folder: Path) -> list[str]:
    """Checkpoints in ``folder``, by the names of their folders."""
    return sorted(it.name for it in folder.iterdir() if (it / SHARDS).is_dir() and any(_rank_files(it / SHARDS)))


def _nothing(folder: Path, tags: Sequence[str]) -> Issue:
    """Why a folder holds no shards: several checkpoints, one that is being chosen by the user, or other files."""
    if tags:
        done = [it for it in tags if (folder / it / "done").is_file()]
        # By number: step_10 comes after step_9.
        steps = sorted((int(match[1]), it) for it in done if (match := re.fullmatch(r"step_(\d+)", it)))
        newest = f"; the latest complete one is {steps[-1][1]}" if steps else ""
        problem = f"{folder} holds {len(tags)} checkpoints: {', '.join(tags[:_SHOWN])}{newest}"
        return Issue(
            "several-shard-checkpoints",
            SOURCE,
            problem,
            remedy=f"Name one of them, such as {folder / (steps[-1][1] if steps else tags[0])}",
        )
    found = ", ".join(sorted(it.name for it in folder.iterdir())[:_SHOWN]) or "nothing"
    problem = f"{folder} holds no shards ({found})"
    return Issue("shards-not-found", SOURCE, problem, remedy=f"Expected in it or its model/: {', '.join(_NAMINGS)}")


def _check_marker(root: Path) -> None:
    """NxD writes ``checkpoint`` first and ``done`` last; shards of a converter have neither."""
    if (root / "checkpoint").exists() and not (root / "done").exists():
        problem = f"{root} is an incomplete checkpoint: it has the marker checkpoint and no done"
        raise ConversionRefused([Issue("shards-incomplete", SOURCE, problem, remedy="Name a complete checkpoint")])


def read_rank(path: Path) -> tuple[dict[str, View], str]:
    """The tensors of one rank, and whether they are ``xser`` or ``inline``. Raises ``ConversionError``."""
    if not path.is_file():
        raise ConversionError(f"{path}: is missing")
    state = read_torch_file(path)
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]
    if not isinstance(state, dict) or not state:
        raise ConversionError(f"{path}: holds no state dict")
    kinds = {type(it) for it in state.values()}
    if kinds == {View}:
        return {str(name): it for name, it in state.items()}, "inline"
    if kinds == {Reference}:
        # A folder of the old naming has its tensors beside the file of that name.
        folder = path.with_name(f"{path.name}.tensors")
        return {str(name): _referenced(folder / f"tensor_{it.tid}.pt", name) for name, it in state.items()}, "xser"
    others = [str(name) for name, it in state.items() if not isinstance(it, View | Reference)]
    raise ConversionError(
        f"{path}: holds {', '.join(others[:_SHOWN]) or 'a mixture of tensors and references'}, no weights"
    )


def _referenced(path: Path, name: object) -> View:
    if not path.is_file():
        problem = f"{path}: is missing, and it is {name} of its rank"
        remedy = "Copy the whole checkpoint; one saved with avoid_saving_lower_precision_weights holds no weights"
        raise ConversionError(f"{problem}. {remedy}")
    found = read_torch_file(path)
    if not isinstance(found, View):
        raise ConversionError(f"{path}: must hold one tensor of weights, {name}")
    return found


def _ranks(ranks: Iterable[Rank]) -> str:
    shown = [f"tp {tp} pp {pp}" for tp, pp in ranks]
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
