"""Reads, checks, changes and writes Hugging Face model configs in one form that no transformers version misreads."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, SpecError
from sm_llm.models import rope
from sm_llm.models.families.table import family
from sm_llm.models.presets import preset as find_preset

if TYPE_CHECKING:
    from sm_llm.models.families.family import Config, Family


# Python refuses to read integers of more than 4,300 digits, in words that are for programmers.
_MOST_DIGITS = 1_000
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w-]*")


def read_config(path_or_id: str | Path, *, where: str = "task.model.path") -> dict[str, Any]:
    """The config as it is written, from a folder, a JSON file or a hub id (``org/name``; the local cache comes first
    when the hub cannot be reached). Raises ``SpecError`` at ``where``, also when offline or refused by the hub.
    """
    path = Path(path_or_id).expanduser()
    # What is there on this machine comes before a hub id of the same spelling.
    if path.is_dir():
        return _parse(path / "config.json", where)
    if path.is_file():
        return _parse(path, where)
    if _HUB_ID.fullmatch(str(path_or_id)):
        return _parse(_download(str(path_or_id), where), where)
    raise _error(
        "model-config-not-found",
        where,
        "there is no such folder or file",
        str(path_or_id),
        "Give a folder with config.json or a hub id.",
    )


def _parse(path: Path, where: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte order mark. Save it as UTF-8 without one")
        config = json.loads(text, object_pairs_hook=_without_repeats, parse_int=_int)
    except FileNotFoundError:
        raise _error(
            "model-folder-without-config",
            where,
            "the folder holds no config.json",
            str(path.parent),
            "It must be a Hugging Face model folder.",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _error("model-config-not-json-text", where, f"cannot be read as JSON: {error}", str(path)) from None
    if not isinstance(config, dict):
        raise _error("model-config-not-an-object", where, "holds no JSON object", str(path))
    return config


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:  # only the last would count
            raise ValueError(f"{name} is given twice. Keep one")
        seen.add(name)
    return dict(pairs)


def _int(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it holds a number of {len(digits):,} digits")
    return int(digits)


def _download(name: str, where: str) -> Path:
    """The hub's copy, or the cached one when the hub does not answer."""
    from sm_llm.reachable import connects

    try:
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError:
        remedy = "pip install huggingface_hub, or give a local folder"
        raise _error(
            "hub-client-missing", where, "is not a folder here, and huggingface_hub is not installed", name, remedy
        ) from None
    remedy = "Give a local folder, or run once with a connection (HF_HUB_OFFLINE unset) to fill the cache."
    problem = "is not a folder here, not in the hub's cache, and the hub cannot be reached"
    try:
        if not constants.HF_HUB_OFFLINE and not connects(constants.ENDPOINT):
            kept = try_to_load_from_cache(name, "config.json")
            if isinstance(kept, str):
                return Path(kept)
            raise _error("hub-not-reached", where, problem, name, remedy)
        # The order below matters: GatedRepoError is a RepositoryNotFoundError, and LocalEntryNotFoundError an
        # EntryNotFoundError.
        return Path(hf_hub_download(name, "config.json"))
    except HFValidationError:
        raise _error("hub-name-invalid", where, "is neither a folder here nor a hub id", name) from None
    except GatedRepoError:
        page = f"https://huggingface.co/{name}"
        licence = f"Accept its licence at {page} and set HF_TOKEN to a token that may read it."
        raise _error("hub-model-gated", where, "the hub refuses access to this gated model", name, licence) from None
    except RepositoryNotFoundError:
        token = "Check the name; for a private model set HF_TOKEN."
        raise _error(
            "hub-model-not-found", where, "is neither a folder here nor a model on the hub", name, token
        ) from None
    except LocalEntryNotFoundError:
        raise _error("hub-not-reached", where, problem, name, remedy) from None
    except EntryNotFoundError:
        raise _error("hub-model-without-config", where, "this model on the hub has no config.json", name) from None
    except OSError as error:
        raise _error("hub-not-readable", where, f"the hub could not be read: {error}", name) from None


def _error(code: str, where: str, problem: str, seen: str, remedy: str = "") -> SpecError:
    return SpecError([Issue(code, where, problem, seen, remedy)])


WHERE = "task.model.config"
_DTYPES = ("dtype", "torch_dtype")
_FLOATS = ("float32", "bfloat16", "float16", "float64")
# Facts about the folder a config came from, not about the model.
_FORGOTTEN = frozenset({"_name_or_path", "transformers_version", "auto_map", "_attn_implementation"})
_GENERAL = """
add_cross_attention attn_implementation bad_words_ids begin_suppress_tokens chunk_size_feed_forward classifier_dropout
cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
forced_eos_token_id gradient_checkpointing id2label is_decoder is_encoder_decoder label2id length_penalty max_length
min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
output_hidden_states output_scores prefix problem_type pruned_heads remove_invalid_values repetition_penalty
return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
tie_encoder_decoder tokenizer_class top_k top_p torchscript typical_p use_bfloat16 use_cache architectures
"""
GENERAL_FIELDS = frozenset(_GENERAL.split())
"""What transformers may write into any config, mostly attributes of ``PretrainedConfig``: no wish of a user's."""
_KNOWN_IN_444 = ("gpt_neox", "llama", "mistral", "mixtral", "qwen2")
_SAFE = frozenset({*rope.SPELLINGS, *_DTYPES})


def model_config(
    *, preset: str | None, path: str | None, pretrained: str | None, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The canonical config of a model as a job describes it; plan and worker both come through here.

    ``path`` (folder, file or hub id) or ``preset`` names the architecture, else the ``pretrained`` weights' own config
    does. Where there are pretrained weights, only safe ``overrides`` are taken, and a config from elsewhere must
    compute what the one beside the weights computes. Raises ``SpecError``.
    """
    if path is not None:
        config = read_config(path)
    elif preset is not None:
        config = find_preset(preset).config
    elif pretrained is not None:
        config = read_config(pretrained, where="task.start.pretrained")
    else:
        raise SpecError(
            [Issue("model-unnamed", "task.model", "names no model", remedy="Give preset, path or start.pretrained.")]
        )
    found = override(config, overrides, pretrained=pretrained is not None)
    named = "task.model.path" if path is not None else "task.model.preset" if preset is not None else None
    # Weights elsewhere are compared by the worker, which comes through here with a local folder.
    if named is not None and pretrained is not None and (Path(pretrained).expanduser() / "config.json").is_file():
        # With the same overrides, so that only what the two configs state themselves can differ.
        own = override(read_config(pretrained, where="task.start.pretrained"), overrides, pretrained=True)
        if issues := list(_other_function(named, found, own, pretrained)):
            raise SpecError(issues)
    return found


def _other_function(named: str, config: Config, own: Config, folder: str) -> Iterator[Issue]:
    """Fields that no tensor shows (heads, rotary positions, norms) and in which a config is not that of the weights."""
    kind = family(own)
    compared = {"model_type", "rope_parameters", *(name for name, it in kind.fields.items() if not it.safe)}
    # Weights that are loaded were drawn before: the range of initial values does not count.
    for name in sorted(compared - {"initializer_range"}):
        if config.get(name) != own.get(name):
            problem = f"has {name} {config.get(name)!r}, but the config.json beside the weights in {folder} has"
            remedy = f"Leave {named} out, so that the weights' own config counts, or correct that config.json"
            yield Issue("model-field-contradicts", named, f"{problem} {own.get(name)!r}", remedy=remedy)


def normalise(config: Config) -> dict[str, Any]:
    """The canonical form: every field of the family with defaults filled in, each under one name.

    Rotary positions are ``rope_parameters`` (with ``rope_type`` and ``rope_theta``), the number format is ``dtype``.
    Fields the family does not know are kept. Raises ``SpecError`` with every issue. Idempotent.
    """
    kind = family(config)
    config = kind.one_spelling(config)
    issues = [*kind.field_issues(config), *rope.issues(config), *_identity_issues(kind, config)]
    if issues:
        raise _spec_error(issues)
    spelt_twice = {*rope.SPELLINGS, *_DTYPES}
    extras = {
        name: value for name, value in config.items() if name not in spelt_twice | _FORGOTTEN | kind.fields.keys()
    }
    fields = kind.canonical_fields(config)
    found = {**copy.deepcopy({**extras, **fields}), "architectures": [kind.architecture]}
    found["rope_parameters"] = rope.canonical(config, kind.default_rope_theta, kind.max_position_embeddings(fields))
    if dtype := _dtype(config):
        found["dtype"] = dtype
    # Checks over several fields need the defaults of all of them.
    if issues := kind.check(found):
        raise _spec_error(issues)
    # Sorted: equal models give equal files, in whatever order their fields were written.
    return dict(sorted(found.items()))


def both_spellings(config: Config) -> dict[str, Any]:
    """The canonical config plus the fields transformers 4 reads: for ``config.json`` and for ``AutoConfig``.

    ``rope_theta``, ``rope_scaling`` and ``torch_dtype`` repeat ``rope_parameters`` and ``dtype``, so that
    transformers 4.44 and 5.x build the same function, except where ``misread_by_transformers_444`` returns a reason.
    """
    found = normalise(config)
    found.update(rope.legacy(found["rope_parameters"]))
    if "dtype" in found:
        found["torch_dtype"] = found["dtype"]
    found.update(family(found).both_spellings(found))
    return dict(sorted(found.items()))


def misread_by_transformers_444(config: Config) -> list[str]:
    """What transformers 4.44 cannot express of this config, one sentence each; empty for all presets."""
    found = normalise(config)
    kind, rotary = found["model_type"], found["rope_parameters"]
    scaling = rotary["rope_type"]
    if kind not in _KNOWN_IN_444:
        return [f"transformers 4.44 knows no {kind} models"]
    reasons = []
    if scaling != "default" and kind != "llama":
        reasons.append(f"transformers 4.44 ignores the {scaling} rope scaling of {kind} models")
    elif rope.differs_in_444(rotary, found["max_position_embeddings"]):
        reasons.append(f"transformers 4.44 computes {scaling} rope scaling differently")
    # A canonical config has the field only where it is not the width divided by the heads.
    if "head_dim" in found and kind not in ("mistral", "mixtral"):
        reasons.append(f"transformers 4.44 knows no head_dim in {kind} models and cannot load the weights")
    if kind == "mixtral" and found.get("sliding_window") is not None:
        reasons.append("transformers 4.44 keeps to the window of mixtral models with flash attention only")
    return reasons


def override(config: Config, overrides: Mapping[str, Any], pretrained: bool) -> dict[str, Any]:
    """The canonical config with single fields changed (either spelling of the rotary and number-format fields).

    From scratch any field of the family may change; with ``pretrained`` weights only those no weight depends on
    (``Family.fields`` marks them safe). ``rope_scaling`` without a ``rope_type`` changes single values of the present
    scaling. Raises ``SpecError`` for unknown fields, with the nearest name, for unsafe and for wrong ones.
    """
    kind = family(config)
    issues = [f for name in overrides if (f := _override_issue(kind, config, name, overrides[name], pretrained))]
    if issues:
        raise _spec_error(issues)
    merged = {**config, **overrides}
    # Every spelling that the config has is removed, so that none contradicts the one that is given.
    if not overrides.keys().isdisjoint(rope.SPELLINGS):
        for name in rope.SPELLINGS:
            merged.pop(name, None)
        merged["rope_parameters"] = rope.override(config, overrides, kind.default_rope_theta)
    if not overrides.keys().isdisjoint(_DTYPES):
        for name in _DTYPES:
            merged.pop(name, None)
        merged.update({name: overrides[name] for name in _DTYPES if name in overrides})
    found = normalise(merged)
    if issues := list(_token_issues(found, overrides)):
        raise _spec_error(issues)
    return found


def _token_issues(config: Config, overrides: Mapping[str, Any]) -> Iterator[Issue]:
    """Token ids that are given and that the vocabulary does not have; a preset's own may outlive a smaller one."""
    vocab = int(config["vocab_size"])
    for name in [it for it in overrides if it.endswith("_token_id")]:
        ids = config[name] if isinstance(config[name], list) else [config[name]]
        if any(it is not None and it >= vocab for it in ids):
            yield Issue("token-id-beyond-vocabulary", name, f"must be null or below vocab_size ({vocab})", config[name])


def _override_issue(kind: Family, config: Config, name: str, value: Any, pretrained: bool) -> Issue | None:
    known = {*kind.fields, *_SAFE, "architectures"}
    if name not in known:
        near = difflib.get_close_matches(name, sorted(known), n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"Fields: {', '.join(sorted(known))}."
        return Issue("model-field-unknown", name, f"is not a config field of {kind.model_type} models", value, remedy)
    if issue := _value_issue(kind, name, value):
        return issue
    is_safe = name in _SAFE or (name in kind.fields and kind.fields[name].safe)
    # With pretrained weights, the value that the config has already changes nothing.
    if not pretrained or is_safe or (name in kind.fields and kind.value(config, name) == value):
        return None
    allowed = sorted({*_SAFE, *(field for field, facts in kind.fields.items() if facts.safe)})
    return Issue(
        "model-field-fixed-by-weights",
        name,
        "cannot change with pretrained weights",
        value,
        f"These can: {', '.join(allowed)}.",
    )


def unknown_fields(config: Config) -> Iterator[str]:
    """Fields of a canonical ``config`` that neither its family nor every config of transformers has, and that ask for
    something.
    """
    known = family(config).fields.keys() | GENERAL_FIELDS | _SAFE | _FORGOTTEN
    for name, value in config.items():
        if name not in known and not name.startswith("_") and value not in (None, False, [], {}):
            yield name


def _value_issue(kind: Family, name: str, value: Any) -> Issue | None:
    if name in ("rope_parameters", "rope_scaling") and not _is_map(value):
        return Issue("model-field-not-a-map", name, "must be a map or null", value)
    return kind.fields[name].issue(name, value) if name in kind.fields else None


def _identity_issues(kind: Family, config: Config) -> list[Issue]:
    issues = []
    classes = config.get("architectures")
    # A classifier or a reward model of the same family has other tensors.
    if classes and kind.architecture not in classes:
        issues.append(
            Issue(
                "architecture-unsupported",
                "architectures",
                f"must name the language model {kind.architecture}",
                classes,
            )
        )
    if config.get("quantization_config"):
        method = config["quantization_config"]
        issues.append(
            Issue(
                "quantized-weights-unsupported",
                "quantization_config",
                "quantised weights cannot be trained",
                method,
                "Use the original.",
            )
        )
    if (dtype := _dtype(config)) is not None and dtype not in _FLOATS:
        issues.append(Issue("model-dtype-unsupported", "dtype", f"must be one of {', '.join(_FLOATS)}", dtype))
    spelt = {_plain_dtype(config[name]) for name in _DTYPES if config.get(name) is not None}
    if len(spelt) > 1:
        issues.append(
            Issue("model-dtype-contradicts", "dtype", "contradicts torch_dtype", sorted(spelt), "Keep one of them.")
        )
    return issues


def _dtype(config: Config) -> str | None:
    """The number format without torch's prefix, or None if the config does not have it."""
    return next((_plain_dtype(config[name]) for name in _DTYPES if config.get(name) is not None), None)


def _plain_dtype(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _is_map(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _spec_error(issues: Iterable[Issue]) -> SpecError:
    return SpecError([replace(issue, path=f"{WHERE}.{issue.path}") for issue in issues])
