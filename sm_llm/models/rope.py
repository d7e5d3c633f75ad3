"""Rotary position embeddings in a config: two spellings on disk, one form here.

transformers 4 writes ``rope_theta`` beside ``rope_scaling``; transformers 5 writes ``rope_parameters`` that holds both.
Each silently falls back to theta 10000 without scaling when it meets the other's spelling alone. The form used here is
``{"rope_type": …, "rope_theta": …, …}`` with the keys of transformers 5.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from sm_llm.errors import Issue

Config = Mapping[str, Any]
SPELLINGS = ("rope_theta", "rope_scaling", "rope_parameters")
_LENGTH = "original_max_position_embeddings"
# Scaling types of transformers: the keys each one needs and the ones it takes.
_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset({_LENGTH})),
    "yarn": (
        frozenset({"factor"}),
        frozenset({_LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
    "longrope": (frozenset({"short_factor", "long_factor"}), frozenset({_LENGTH, "factor", "attention_factor"})),
    "llama3": (frozenset({"factor", "low_freq_factor", "high_freq_factor"}), frozenset({_LENGTH})),
}
_NEW_IN_YARN = ("mscale", "mscale_all_dim", "truncate")
_WITH_LENGTH = ("llama3", "yarn", "longrope")


def canonical(config: Config, default_theta: float, max_positions: int) -> dict[str, Any]:
    """``rope_parameters`` of a config in either spelling; call after ``issues`` came back empty.

    ``max_positions`` (tokens) stands in for an absent original_max_position_embeddings, as in transformers 5.
    """
    scaling = _scaling(config)
    kind = str(scaling.pop("rope_type", "default"))
    found = {"rope_type": kind, "rope_theta": float(_theta(config, default_theta))}
    if kind in _WITH_LENGTH and scaling.get(_LENGTH) is None:
        scaling[_LENGTH] = max_positions
    return {**found, **{key: _tidy(key, value) for key, value in sorted(scaling.items()) if value is not None}}


def legacy(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` as transformers 4.44 reads them."""
    scaling = {key: copy.deepcopy(value) for key, value in parameters.items() if key != "rope_theta"}
    scaled = parameters["rope_type"] != "default"
    return {"rope_theta": parameters["rope_theta"], "rope_scaling": scaling if scaled else None}


def differs_in_444(parameters: Mapping[str, Any], max_positions: int) -> bool:
    """Whether transformers 4.44 makes other angles of the same scaling: it reads yarn's original length from
    max_position_embeddings and has no mscale or truncate; its longrope takes its factor from elsewhere."""
    kind = parameters["rope_type"]
    other_length = parameters.get(_LENGTH) != max_positions or not parameters.keys().isdisjoint(_NEW_IN_YARN)
    return kind == "longrope" or (kind == "yarn" and other_length)


def override(config: Config, overrides: Config, default_theta: float) -> dict[str, Any]:
    """``rope_parameters`` with ``overrides`` in any spelling laid over the config's.

    A new map replaces the scaling, or changes single values of it if it names no ``rope_type``; theta stays unless
    it is given.
    """
    scaling, theta = _scaling(config), _theta(config, default_theta)
    for name in ("rope_parameters", "rope_scaling"):
        if name in overrides:
            given = overrides[name] or {}
            theta, given = given.get("rope_theta", theta), _without_theta(given)
            keeps = overrides[name] is not None and "rope_type" not in given
            scaling = {**scaling, **given} if keeps else given
    own_theta = overrides.get("rope_theta")
    return {**scaling, "rope_theta": theta if own_theta is None else own_theta}


def issues(config: Config) -> list[Issue]:
    """What is wrong with a config's rotary fields, in whichever spelling they are; paths are bare field names."""
    found = [
        Issue("rope-field-not-a-map", name, "must be a map or null", config[name])
        for name in SPELLINGS[1:]
        if not _is_map(config.get(name))
    ]
    if found:
        return found
    # Both fields are maps or null from here on.
    thetas = {float(t) for t in _thetas(config) if _is_number(t)}
    if wrong := [theta for theta in _thetas(config) if not _is_number(theta) or not theta > 0]:
        found.append(Issue("rope-theta-not-positive", "rope_theta", "must be a finite positive number", wrong[0]))
    if len(thetas) > 1:
        found.append(
            Issue(
                "rope-theta-contradicts",
                "rope_theta",
                "differs between its two spellings",
                sorted(thetas),
                "Keep one of them.",
            )
        )
    if config.get("rope_scaling") and config.get("rope_parameters"):
        both = [_without_theta(config[name]) for name in SPELLINGS[1:]]
        if both[0] != both[1]:
            found.append(
                Issue(
                    "rope-scaling-contradicts",
                    "rope_scaling",
                    "contradicts rope_parameters",
                    config["rope_scaling"],
                    "Keep one of them.",
                )
            )
    # The two spellings agree, so one of them stands for both.
    return found or _scaling_issues(_scaling(config))


def _scaling_issues(scaling: Mapping[str, Any]) -> list[Issue]:
    kind = scaling.get("rope_type", "default")
    if kind not in _KEYS:
        return [
            Issue(
                "rope-type-unknown",
                "rope_scaling.rope_type",
                "is not a known type",
                kind,
                f"Known: {', '.join(_KEYS)}.",
            )
        ]
    required, optional = _KEYS[kind]
    # A value of null counts as absent.
    keys = {key for key, value in scaling.items() if value is not None} - {"rope_type"}
    allowed = ", ".join(sorted(required | optional)) or "nothing else"
    found = [
        Issue("rope-scaling-field-missing", f"rope_scaling.{key}", f"is missing for rope_type {kind}")
        for key in sorted(required - keys)
    ]
    # Nor is a key without a value known, such as "factor:2.0", whose space was forgotten.
    unknown = set(scaling) - {"rope_type", *(key for pair in _KEYS.values() for part in pair for key in part)}
    for key in sorted(keys | unknown):
        if key not in required | optional:
            remedy = f"It takes {allowed}."
            found.append(
                Issue(
                    "rope-scaling-field-unknown",
                    f"rope_scaling.{key}",
                    f"is unknown for rope_type {kind}",
                    scaling[key],
                    remedy,
                )
            )
        elif problem := _value_problem(key, scaling[key]):
            found.append(Issue("rope-scaling-field-invalid", f"rope_scaling.{key}", problem, scaling[key]))
    return found


def _value_problem(key: str, value: Any) -> str:
    if key == "truncate":
        return "" if isinstance(value, bool) else "must be true or false"
    if key in ("short_factor", "long_factor"):
        return "" if isinstance(value, list) and all(map(_is_number, value)) else "must be a list of finite numbers"
    if not _is_number(value):
        return "must be a finite number"
    return "must be at least 1" if key in ("factor", _LENGTH) and value < 1 else ""


def _scaling(config: Config) -> dict[str, Any]:
    """The scaling alone, ``rope_type`` under its new name; the fields agree or only one is there."""
    return _without_theta(config.get("rope_scaling") or config.get("rope_parameters") or {})


def _without_theta(scaling: Mapping[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy({key: value for key, value in scaling.items() if key not in ("rope_theta", "type")})
    # Older configs call it ``type``; ``rope_type`` counts where both are there.
    if "type" in scaling:
        found.setdefault("rope_type", scaling["type"])
    return found


def _thetas(config: Config) -> list[Any]:
    maps = [config.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    return [theta for theta in (*(m.get("rope_theta") for m in maps), config.get("rope_theta")) if theta is not None]


def _theta(config: Config, default: float) -> float:
    return next(iter(_thetas(config)), default)


def _tidy(key: str, value: Any) -> Any:
    """Floats as floats: transformers 4.44 warns about an integer factor."""
    if isinstance(value, list):
        return [float(entry) for entry in value]
    # Before the numbers, because bool is a subclass of int.
    if isinstance(value, bool):
        return value
    return int(value) if key == _LENGTH else float(value)


def _is_map(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _is_number(value: Any) -> bool:
    """Whether a model can compute with it: JSON as Python reads it has NaN, Infinity and integers of any length."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return (isinstance(value, float) and math.isfinite(value)) or (is_int and abs(value) < 2**63)
