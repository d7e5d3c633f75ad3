"""What a conversion will do, checked whole before anything is written: in each direction, from options and manifest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sm_llm.convert.dcp_source import METADATA, DcpTensors
from sm_llm.convert.files.views import FORMATS
from sm_llm.convert.hf_source import SOURCE, files_beside, open_hf, read_model_config
from sm_llm.convert.layout import LAYOUT, MULTIPLIER, PIPELINE, QKV, TENSOR, VIRTUAL, NxdDegrees, decoder, resolve
from sm_llm.convert.mapping_rules import ShardPlan, parts_by_source, primary_and_copies
from sm_llm.convert.nxd_source import find_shards, open_shards, rank_issues
from sm_llm.convert.report import Coverage, degrees_json
from sm_llm.convert.to_hf import Joined, hf_units
from sm_llm.convert.to_nxd import mixed_formats, nxd_units
from sm_llm.convert.work import MANIFEST, check_space
from sm_llm.errors import ConversionRefused, Issue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sm_llm.convert.files.streamed_file import StreamedFile
    from sm_llm.convert.files.views import View
    from sm_llm.convert.layout import Qkv
    from sm_llm.convert.nxd_source import NxdSource, Shards
    from sm_llm.convert.work import Unit

CONFIG = "config (--config)"
# What the query weight is called in each form.
_FORMS: dict[Qkv, str] = {
    "fused": ".self_attn.qkv_proj.weight_qkv",
    "linear": ".self_attn.qkv_proj.weight_q",
    "coalesced": ".self_attn.qkv_proj.weight",
    "split": ".self_attn.q_proj.weight",
}


@dataclass(frozen=True)
class Given:
    """What the caller gave; None where nothing was given."""

    tensor: int | None = None
    pipeline: int | None = None
    virtual: int | None = None
    kv_multiplier: int | None = None
    qkv: str | None = None
    layout: str | None = None
    xser: bool | None = None
    config: Path | None = None
    streamed: Mapping[Path, StreamedFile] = field(default_factory=dict)
    """Files of the source whose bytes are in S3."""


@dataclass(frozen=True)
class ConversionJob:
    """A conversion that was checked: what is written from what.

    ``hf`` or ``shards`` is the source. ``beside`` are files to copy, ``files`` those that are read; ``recorded`` is the
    manifest of the source, if it has one.
    """

    to: str
    plan: ShardPlan
    config: Mapping[str, Any]
    units: Sequence[Unit]
    beside: Mapping[str, Path]
    files: Sequence[Path]
    coverage: Coverage
    dtypes: Mapping[str, str]
    xser: bool
    hf: Mapping[str, View] | None = None
    shards: Shards | None = None
    recorded: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    is_dcp: bool = False
    streamed: Mapping[Path, StreamedFile] = field(default_factory=dict)


def job_to_nxd(folder: Path, target: Path, given: Given) -> ConversionJob:
    """Shards of the Hugging Face model in ``folder``. Raises ``ConversionRefused`` with every issue."""
    if given.config is not None:
        remedy = "The config.json in the folder of the weights counts"
        raise ConversionRefused(
            [Issue("config-without-effect", CONFIG, "has no effect with --to nxd", str(given.config), remedy)]
        )
    if given.tensor is None:
        raise ConversionRefused(
            [Issue("tensor-degree-required", TENSOR, "is required with --to nxd", remedy="Give for example --tp 8")]
        )
    source = open_hf(folder, given.streamed)
    degrees = resolve(
        source.config,
        tensor=given.tensor,
        pipeline=1 if given.pipeline is None else given.pipeline,
        virtual=1 if given.virtual is None else given.virtual,
        kv_multiplier=given.kv_multiplier,
        qkv=given.qkv or "fused",
        layout=given.layout or "trn1",
    )
    plan = ShardPlan(source.config, degrees)
    # What NxD joins into one tensor has one number format.
    if issues := mixed_formats(plan, source.views):
        raise ConversionRefused(issues)
    # Of what is streamed, columns are cut from a copy.
    columns = {piece.source for it in plan.rank(0, plan.everything()) if it.axis == 1 for piece in it.pieces}
    check_space(folder, sum(view.size for name, view in source.views.items() if name in columns and view.streamed))
    # Without the option, None, shards are xser.
    is_xser = given.xser is not False
    return ConversionJob(
        "nxd",
        plan,
        source.config,
        nxd_units(plan, source.views, target, xser=is_xser),
        files_beside([folder]),
        source.files,
        Coverage(len(plan.shapes), _copied(plan), source.unread),
        {name: view.dtype for name, view in source.views.items()},
        is_xser,
        hf=source.views,
        notes=tuple(_notes(degrees)),
        streamed=given.streamed,
    )


def job_to_hf(folder: Path, target: Path, given: Given) -> ConversionJob:
    """The Hugging Face model of the shards, or of the distributed checkpoint, in ``folder``.

    Raises ``ConversionRefused`` with every issue.
    """
    if given.xser is not None:
        raise ConversionRefused(
            [Issue("xser-without-effect", "xser (--xser)", "has no effect with --to hf", given.xser, "Leave it out")]
        )
    if (folder / METADATA).is_file():
        return _job_of_dcp(folder, target, given)
    opened = open_model(folder, given)
    found, config, plan, joined, shards = opened.found, opened.config, opened.plan, opened.joined, opened.shards
    # ``config.json`` last: the config that was given counts, whatever the name of its file.
    beside = {**files_beside([opened.config_file.parent, found.root]), "config.json": opened.config_file}
    dtypes = {name: joined.dtype(name) for name in plan.shapes}
    return ConversionJob(
        "hf",
        plan,
        config,
        hf_units(plan, joined, target),
        beside,
        sorted({view.file for held in shards.views.values() for view in held.values()}),
        Coverage(len(plan.shapes), joined.copied()),
        dtypes,
        shards.is_xser,
        shards=shards,
        recorded=found.manifest,
        notes=(*_notes(plan.degrees), *assumed_layout(found, plan.degrees, given), *_format_notes(config, dtypes)),
    )


@dataclass(frozen=True)
class ShardedModel:
    """A folder of shards that was checked: config, degrees and every tensor of every rank."""

    found: NxdSource
    config_file: Path
    config: dict[str, Any]
    plan: ShardPlan
    joined: Joined
    shards: Shards


def open_model(folder: Path, given: Given | None = None) -> ShardedModel:
    """The model whose shards are in ``folder``. Raises ``ConversionRefused`` with every issue."""
    given = given or Given()
    found = find_shards(folder)
    at = _config_file(found.root, given.config)
    config = read_model_config(at)
    _check_manifest(found, config, given)
    degrees = _degrees(found, config, given)
    if issues := rank_issues(found, degrees.tensor, degrees.pipeline):
        raise ConversionRefused(issues)
    shards = open_shards(found, decoder(config).buffers)
    # The form of query, key and value shows in the names of the tensors, so it is known only once the shards are open.
    plan = ShardPlan(config, _with_form(found, degrees, shards, given))
    joined = Joined(plan, shards, has_manifest=found.manifest is not None)
    return ShardedModel(found, at, config, plan, joined, shards)


def _notes(degrees: NxdDegrees) -> list[str]:
    if degrees.layout == "trn2" and degrees.kv_multiplier == 1:
        return ["layout trn2: no key/value head is copied, so it equals trn1"]
    return []


def assumed_layout(found: NxdSource, degrees: NxdDegrees, given: Given) -> list[str]:
    """A note where nothing states the order of heads of shards in which it matters."""
    if found.manifest is not None or given.layout is not None or degrees.kv_multiplier == 1:
        return []
    return [
        f"layout {degrees.layout} is assumed, since the shards have no manifest and key/value heads are copied: shards "
        "that NxD's own converter wrote for trn2 look the same and are another model"
    ]


def _copied(plan: ShardPlan) -> tuple[str, ...]:
    """Sources of which several ranks hold the same part."""
    parts = parts_by_source({tp: plan.rank(tp, plan.everything()) for tp in range(plan.degrees.tensor)})
    return tuple(name for name in plan.shapes if primary_and_copies(parts[name])[1])


def _job_of_dcp(folder: Path, target: Path, given: Given) -> ConversionJob:
    for path, value in _options(given).items():
        if value is not None:
            problem = "has no effect: a distributed checkpoint of torch knows its own shards"
            raise ConversionRefused([Issue("layout-option-without-effect", path, problem, value, "Leave it out")])
    at = _config_file(folder, given.config)
    config = read_model_config(at)
    # One rank: a distributed checkpoint holds whole tensors, whatever they were cut into.
    plan = ShardPlan(config, NxdDegrees(1))
    tensors = DcpTensors(folder, plan, decoder(config).buffers)
    dtypes = {name: tensors.dtype(name) for name in plan.shapes}
    return ConversionJob(
        "hf",
        plan,
        config,
        hf_units(plan, tensors, target),
        {**files_beside([at.parent, folder]), "config.json": at},
        [folder / METADATA, *tensors.files],
        Coverage(len(plan.shapes), unread=tensors.unread),
        dtypes,
        False,
        is_dcp=True,
        notes=tuple(_format_notes(config, dtypes)),
    )


def _options(given: Given) -> dict[str, Any]:
    """Options of degrees by the names that errors use."""
    return {
        TENSOR: given.tensor,
        PIPELINE: given.pipeline,
        VIRTUAL: given.virtual,
        MULTIPLIER: given.kv_multiplier,
        QKV: given.qkv,
        LAYOUT: given.layout,
    }


def _format_notes(config: Mapping[str, Any], dtypes: Mapping[str, str]) -> list[str]:
    """Where the config names another number format than that of the weights."""
    stored = sorted({FORMATS[it].dtype for it in dtypes.values()})
    named = config.get("dtype")
    if named is None or stored == [named]:
        return []
    return [
        f"weights are stored as {', '.join(stored)}, as they were; loaders that follow config.json make {named} of them"
    ]


def _config_file(root: Path, given: Path | None) -> Path:
    if given is not None:
        path = given / "config.json" if given.is_dir() else given
        if not path.is_file():
            raise ConversionRefused(
                [Issue("config-not-found", CONFIG, "must be a config.json or a folder with one", str(given))]
            )
        return path
    path = root / "config.json"
    if not path.is_file():
        problem = f"{root} has no config.json, which names heads, widths and layers"
        raise ConversionRefused(
            [Issue("source-without-config", SOURCE, problem, remedy="Give the model's own with --config")]
        )
    return path


def _check_manifest(found: NxdSource, config: Mapping[str, Any], given: Given) -> None:
    """Options and config must match the manifest."""
    # Without one the shards are NxD's own, and options must state what file names and shapes do not show.
    recorded = found.manifest
    if recorded is None:
        return
    where = found.root / MANIFEST
    issues = []
    if recorded.get("to") != "nxd":
        issues.append(Issue("shards-manifest-invalid", SOURCE, f"{where} is not the manifest of shards"))
    if recorded.get("model_type") != config["model_type"]:
        problem = (
            f"{where} was written for a {recorded.get('model_type')} model, the config is of {config['model_type']}"
        )
        issues.append(Issue("shards-of-another-family", SOURCE, problem, remedy="Give the config of these shards"))
    # Options and the manifest's names of them are in the same order.
    for (path, value), name in zip(_options(given).items(), degrees_json(NxdDegrees(1)), strict=True):
        if value is not None and value != recorded.get(name):
            problem = f"contradicts {where}, which has {recorded.get(name)}"
            issues.append(Issue("layout-option-contradicts-manifest", path, problem, value, "Leave it out"))
    if issues:
        raise ConversionRefused(issues)


def _degrees(found: NxdSource, config: Mapping[str, Any], given: Given) -> NxdDegrees:
    """Degrees by the manifest, else by options, else as file names and config show them."""
    if found.manifest is not None:
        names = {"tensor_parallel_degree": "tensor", "pipeline_parallel_degree": "pipeline"}
        names |= {"virtual_pipeline_degree": "virtual", "kv_size_multiplier": "kv_multiplier"}
        values = {names.get(it, it): found.manifest.get(it) for it in degrees_json(NxdDegrees(1))}
        return resolve(config, **values)  # type: ignore[arg-type]
    if given.virtual is not None:
        problem = "has no effect here: names of layers are global"
        raise ConversionRefused(
            [Issue("virtual-degree-without-effect", VIRTUAL, problem, given.virtual, "Leave it out")]
        )
    return resolve(
        config,
        tensor=found.tensor if given.tensor is None else given.tensor,
        pipeline=found.pipeline if given.pipeline is None else given.pipeline,
        kv_multiplier=given.kv_multiplier,
        # The form shows in the names of the tensors, which are read later.
        qkv="linear",
        layout=given.layout or "trn1",
    )


def _with_form(found: NxdSource, degrees: NxdDegrees, shards: Shards, given: Given) -> NxdDegrees:
    """The degrees with the form of query, key and value that the names show."""
    shown = [form for form, outcome in _FORMS.items() if any(name.endswith(outcome) for name in shards.stages)]
    if len(shown) != 1:
        problem = f"holds query weights in {len(shown)} forms ({', '.join(shown) or 'none known'})"
        remedy = f"Each layer must have one of {', '.join(f'*{it}' for it in _FORMS.values())}"
        raise ConversionRefused([Issue("query-form-ambiguous", SOURCE, problem, remedy=remedy)])
    (form,) = shown
    # The names decide; a manifest or an option can only agree or be refused.
    expected = degrees.qkv if found.manifest is not None else given.qkv
    if expected not in (None, form):
        problem = f"the tensors of {found.root} are {form}"
        raise ConversionRefused([Issue("query-form-contradicts-shards", QKV, problem, expected, "Leave it out")])
    return replace(degrees, qkv=form)
