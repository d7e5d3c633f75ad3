"""Checking a tree against its specification class, and describing in plain words what does not fit."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from sm_llm.errors import Issue
from sm_llm.spec.base import SpecModel
from sm_llm.spec.schema import (
    block_for,
    blocks,
    child,
    constant,
    default_block,
    describe,
    dotted_paths,
    knows,
    members,
    tag,
    tag_values,
)
from sm_llm.spec.validation.runner import at_new_paths
from sm_llm.terminal import exact, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pydantic_core import ErrorDetails

    from sm_llm.spec.tree import Path, Tree

Spec = TypeVar("Spec", bound=SpecModel)

# JSON files, numpy and torch hold whole numbers in 64 bits with a sign.
_COUNTABLE = 2**63
# Keys at least this similar (``SequenceMatcher.ratio``) are one key with a typing error.
_MISSPELT = 0.8
_LIMITS = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "is too short: it needs at least {min_length}",
    "too_long": "must have at most {max_length} entries and has {actual_length}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "finite_number": "must be finite",
}
_BOUNDS = ("gt", "ge", "lt", "le", "min_length", "max_length", "actual_length")


def validate(kind: type[Spec], tree: Tree) -> tuple[Spec | None, list[Issue]]:
    """The specification of a tree, and every issue in it.

    Where something is wrong, the specification is that of the tree without the faulty parts (so that further
    checks can still read the rest), or None if too little is left. ``tree`` is changed: numbers typed without
    quotes become text where text is wanted, ``1e6`` a whole number where one is wanted, and a block with nothing in
    it the block's defaults; a block without the key that chooses one of several becomes the one that is the default.
    """
    # Without its tag, pydantic would refuse a block as a whole.
    _choose(kind, tree, ())
    unusable = [*_take_too_large(kind, tree), *_take_no_text(tree)]
    spec, locations = _attempt(kind, tree)
    # Only what does not fit is read in another way; what fits stays as it was typed.
    if repairs := [(path, value) for path, _ in locations if (value := _repair(kind, tree, path)) is not None]:
        for path, value in repairs:
            tree.replace(path, value)
        spec, locations = _attempt(kind, tree)
    found = [_issue(kind, tree, path, detail) for path, detail in locations]
    for path, _ in locations:
        tree.remove(path)
    return spec or _rest(kind, tree), [*unusable, *at_new_paths(found, unusable)]


def _take_too_large(kind: type[Spec], tree: Tree) -> list[Issue]:
    """Take out every whole number that no computer counts to: arithmetic with it has no end, or no float holds it."""
    issues = []
    for path, value in _leaves(tree.value, ()):
        is_large = isinstance(value, int) and abs(value) >= _COUNTABLE
        if is_large and int in members(annotation_at(kind, tree, path)):
            problem = f"must be less than 2**63 ({_COUNTABLE:,})"
            issues.append(Issue("number-beyond-int64", ".".join(path), problem, value, origin=tree.origin(path)))
            tree.remove(path)
    return issues


def _take_no_text(tree: Tree) -> list[Issue]:
    """Take out every text that no file of the run, variable, path or command can hold."""
    issues = []
    for path, value in _leaves(tree.value, ()):
        texts = [*path, value] if isinstance(value, str) else path
        if any("\0" in it for it in texts):
            # In C the end of a text, and so in paths, variables and arguments.
            found = Issue("text-holds-nul", ".".join(path), "holds a NUL character", value, "Leave it out")
        # Python reads a byte of a command line that is not UTF-8 as half of a surrogate pair; YAML may write one.
        elif not all(map(_is_unicode, texts)):
            problem = "holds a byte that is not UTF-8, or half of a surrogate pair"
            found = Issue("text-not-unicode", ".".join(path), problem, value, "Write it in UTF-8")
        else:
            continue
        issues.append(replace(found, origin=tree.origin(path)))
        # Of a list nothing can be taken out: the numbers of the items behind it would change.
        tree.remove(
            next(path[:end] for end in range(len(path), 0, -1) if not isinstance(tree.get(path[: end - 1]), list))
        )
    return issues


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _leaves(value: Any, path: Path) -> list[tuple[Path, Any]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, str(key)))]
    if isinstance(value, list):
        return [leaf for index, item in enumerate(value) for leaf in _leaves(item, (*path, str(index)))]
    return [(path, value)]


def _rest(kind: type[Spec], tree: Tree) -> Spec | None:
    """The specification of a tree without its faulty parts, nor the blocks that cannot be without those."""
    spec, locations = _attempt(kind, tree)
    for path, _ in locations:
        # What still fails lacks a field that it must have, so the block around it has to go.
        tree.remove(path[:-1] or path)
    return _attempt(kind, tree)[0] if locations else spec


def nearest(kind: type[SpecModel], tree: Tree, path: Path) -> str:
    """A remedy for an unknown key: whose it is, what was meant, or the keys that are known there."""
    holder = annotation_at(kind, tree, path[:-1])
    if other := _of_another(holder, tree, path):
        return other
    block = block_for(holder, tree.get(path[:-1]))
    names = [".".join(it) for it in meant(kind, tree, path)]
    if not names and block is None:
        names = closest(".".join(path), sorted({".".join(it) for it in dotted_paths(kind, tree.value)}))
    if names:
        return f"Did you mean {' or '.join(names)}?"
    if text := _of_another_by_other_name(kind, tree, path[-1]):
        return text
    return f"Known keys here: {', '.join(block.model_fields)}" if block else ""


def meant(kind: type[SpecModel], tree: Tree, path: Path) -> list[Path]:
    """What an unknown key stands for: the key that chooses a class there, a field by its name in other tools, a
    misspelt key beside it, the same key elsewhere, or else the most similar one beside it."""
    from difflib import SequenceMatcher

    from sm_llm.spec.validation.other_names import choosing_key

    holder = annotation_at(kind, tree, path[:-1])
    block = block_for(holder, tree.get(path[:-1]))
    if choosing := choosing_key(holder, block, path[-1]):
        return [(*path[:-1], choosing)]
    # Near ones first, and short ones before long ones: a step's own, then the workflow's, then those of other steps.
    others = (it for it in dotted_paths(kind, tree.value) if it != path)
    known = sorted(others, key=lambda it: len(it) - 2 * _in_common(it, path))
    whole = _with_end(known, path) if len(path) > 1 else []
    # Several keys at the end of the path are better evidence than its last key alone.
    if found := whole or _by_other_name(kind, tree.value, known, path):
        return found
    beside = [(*path[:-1], close) for close in closest(path[-1], block.model_fields if block else ())]
    # A key beside it that is nearly the same counts before the same key elsewhere, a distant one after it.
    misspelt = bool(beside) and SequenceMatcher(None, beside[0][-1], path[-1]).ratio() >= _MISSPELT
    return beside if misspelt else _with_end(known, path[-1:]) or beside


def _in_common(one: Path, other: Path) -> int:
    """How many keys two paths begin with alike."""
    return sum(1 for _ in takewhile(lambda keys: keys[0] == keys[1], zip(one, other, strict=False)))


def _with_end(known: Sequence[Path], end: Path) -> list[Path]:
    """Up to three of the paths that end so."""
    return [it for it in known if it[-len(end) :] == end][:3]


def _by_other_name(kind: type[SpecModel], whole: Any, known: Sequence[Path], path: Path) -> list[Path]:
    """What a key or a block above it is called here: ``lr``, ``env.A``."""
    from sm_llm.spec.validation.other_names import other_field

    for at in reversed(range(len(path))):
        if knows(kind, whole, path[: at + 1]):
            break  # what lies above is called right
        end = tuple((other_field(path[at]) or "").split("."))
        found = [(*it, *path[at + 1 :]) for it in _with_end(known, end)]
        if found := [it for it in found if knows(kind, whole, it)]:
            return found
    return []


def _of_another_by_other_name(kind: type[SpecModel], tree: Tree, key: str) -> str:
    """The same for a key by its name in other tools: ``use_spot_instances`` of a local job."""
    from sm_llm.spec.validation.other_names import other_field

    end = tuple((other_field(key) or "").split("."))
    for candidate in (end, ("task", *end)):
        for stop in range(2, len(candidate) + 1):
            if text := _of_another(annotation_at(kind, tree, candidate[: stop - 1]), tree, candidate[:stop]):
                return f"Did you mean {'.'.join(candidate)}? {text}"
    return ""


def _of_another(annotation: Any, tree: Tree, path: Path) -> str:
    """The message for a key of another class that may stand there: ``backend.spot`` of a local job."""
    key = tag(annotation)
    if key is None:
        return _of_one_of_two(annotation, tree, path)
    owners = [value for value, block in tag_values(annotation).items() if path[-1] in block.model_fields]
    if not owners:
        return ""
    where = ".".join((*path[:-1], key))
    here = tree.get((*path[:-1], key))
    return f"It belongs to {where}: {' or '.join(owners)}{f'; here it is {here}' if here else ''}"


def _of_one_of_two(annotation: Any, tree: Tree, path: Path) -> str:
    """The message for keys of two classes that their keys alone distinguish: ``start.pretrained`` and
    ``start.checkpoint``."""
    own, given = path[-1], tree.get(path[:-1])
    holders = [it for it in blocks(annotation) if own in it.model_fields]
    others = [it for it in blocks(annotation) if own not in it.model_fields]
    required = [name for it in others for name, field in it.model_fields.items() if field.is_required()]
    beside = next((name for name in required if isinstance(given, dict) and name in given), None)
    if not holders or beside is None:
        return ""
    holder = ".".join(path[:-1])
    return f"{holder} has one of the two, {beside} or {own}: leave one out"


def annotation_at(kind: type[SpecModel], tree: Tree, path: Path) -> Any:
    """The annotation of the place ``path``."""
    annotation: Any = kind
    for end, key in enumerate(path):
        annotation = child(annotation, tree.get(path[:end]), key)
    return annotation


def _choose(annotation: Any, tree: Tree, path: Path) -> None:
    """Write ``strategy: fsdp`` or ``name: local`` into mappings that leave it out, below ``path``."""
    value = tree.get(path)
    if not isinstance(value, dict):
        return
    block = block_for(annotation, value)
    for key, item in list(value.items()):
        field = block.model_fields.get(str(key)) if block else None
        inner = child(annotation, value, str(key))
        name, usual = tag(inner), default_block(field) if field else None
        if name and usual and isinstance(item, dict) and name not in item:
            item[name] = constant(usual, name)
        _choose(inner, tree, (*path, str(key)))


def _attempt(kind: type[Spec], tree: Tree) -> tuple[Spec | None, list[tuple[Path, ErrorDetails]]]:
    """The specification, or path and first error of every faulty place."""
    try:
        return kind.model_validate(tree.value), []
    except ValidationError as error:
        locations: dict[Path, ErrorDetails] = {}
        for detail in error.errors(include_url=False):
            path = _path(kind, tree, detail["loc"])
            if path is not None:
                # Every alternative of a union reports the same place; the first report is shown.
                locations.setdefault(path, detail)
        return None, list(locations.items())


def _path(kind: type[SpecModel], tree: Tree, location: tuple[int | str, ...]) -> Path | None:
    """Pydantic's location without the names of union members, which are not part of what the user wrote.

    Errors inside a pair of numbers, or inside one of several untagged alternatives, are those of the whole value; but
    where its keys show which alternative is meant, they are its own, and those of the others are None.
    """
    annotation: Any = kind
    path: Path = ()
    labelled = False
    for item in location:
        # Behind a union, pydantic's location names the member that it tried.
        if labelled:
            meant = block_for(annotation, tree.get(path))
            if tag(annotation) is None and meant is None:
                return path
            if tag(annotation) is None and meant is not None and item != meant.__name__:
                return None
            labelled = False
            continue
        # A pair of numbers, such as betas, is one value to a user.
        if get_origin(annotation) is tuple:
            return path
        annotation = child(annotation, tree.get(path), str(item))
        path = (*path, str(item))
        labelled = len(members(annotation)) > 1
    return path


def _repair(kind: type[SpecModel], tree: Tree, path: Path) -> Any:
    """A better reading of what was typed without quotes, or None."""
    value, text = tree.get(path), tree.texts.get(path)
    annotation = annotation_at(kind, tree, path)
    wanted = members(annotation)
    if text == "" and value is None:  # what is below it is all commented out
        if block_for(annotation, {}) or any(get_origin(kind) is dict for kind in wanted):
            return {}
        if any(get_origin(kind) is list for kind in wanted):
            return []
    if isinstance(value, list) and any(get_origin(kind) is list and get_args(kind) == (str,) for kind in wanted):
        # Entries of a list of text as they were typed: an unquoted 010 is not the number 10.
        spelt = [it if isinstance(it, str) else tree.texts.get((*path, str(index))) for index, it in enumerate(value)]
        # Without the typed text of every entry the list stays as it is, and its type is reported.
        return None if None in spelt or spelt == value else spelt
    if text is None or value is None:
        return None
    if not isinstance(value, str) and any(map(_is_text, wanted)) and not _is_of_another_type(kind, tree, path):
        return text
    if isinstance(value, float) and int in wanted and value.is_integer() and abs(value) < _COUNTABLE:
        return int(value)
    return None


def _is_of_another_type(kind: type[SpecModel], tree: Tree, path: Path) -> bool:
    """Whether what stands where text is wanted was hardly meant as text: a list, a mapping in braces, or the flag of a
    field. Entries of lists and mappings, such as arguments and variables, are characters whatever they look like."""
    value = tree.get(path)
    if isinstance(value, list | dict):
        # "Name: x" is a mapping to YAML as well, and a sentence to whoever typed it.
        return tree.texts[path].lstrip().startswith(("[", "{", "- "))
    block = block_for(annotation_at(kind, tree, path[:-1]), tree.get(path[:-1]))
    return isinstance(value, bool) and block is not None and path[-1] in block.model_fields


def _is_text(kind: Any) -> bool:
    return kind is str or (get_origin(kind) is Annotated and kind.__origin__ is str)


def _issue(kind: type[SpecModel], tree: Tree, path: Path, detail: ErrorDetails) -> Issue:
    annotation = annotation_at(kind, tree, path)
    code = detail["type"]
    # pydantic names the block, but its tag is what is wrong.
    if code in ("union_tag_not_found", "union_tag_invalid"):
        path = (*path, tag(annotation) or "")
    dotted, origin, seen = ".".join(path), tree.origin(path), tree.get(path)
    match code:
        case "extra_forbidden":
            return Issue("key-unknown", dotted, "unknown key", seen, nearest(kind, tree, path), origin)
        case "missing" if seen is None:
            return Issue("value-missing", dotted, f"missing; expected {_expected(annotation)}", origin=origin)
        case "union_tag_not_found":
            return Issue(
                "choice-missing", dotted, f"missing; choose {' or '.join(tag_values(annotation))}", origin=origin
            )
        case "union_tag_invalid":
            choices = list(tag_values(annotation))
            return Issue(
                "choice-unknown", dotted, f"choose {' or '.join(choices)}", seen, did_you_mean(seen, choices), origin
            )
        case "string_pattern_mismatch":
            pattern = detail.get("ctx", {}).get("pattern", "")
            return Issue("value-form-invalid", dotted, f"does not have the form {pattern}", seen, origin=origin)
        case "value_error":
            message = str(detail.get("ctx", {}).get("error", detail["msg"]))
            return Issue("value-form-invalid", dotted, message, seen, origin=origin)
        case limit if limit in _LIMITS:
            bounds = {name: exact(bound) for name, bound in detail.get("ctx", {}).items() if name in _BOUNDS}
            return Issue("value-out-of-range", dotted, _LIMITS[limit].format(**bounds), seen, origin=origin)
    if isinstance(seen, str) and seen in tag_values(annotation):
        remedy = f"Write {dotted}.{tag(annotation)}={seen}"
    else:
        remedy = _as_text(dotted, annotation, tree.texts.get(path)) or _remedy(annotation, seen)
    return Issue("value-type-invalid", dotted, f"expected {_expected(annotation)}", seen, remedy, origin)


def _as_text(dotted: str, annotation: Any, typed: str | None) -> str:
    """How to write what was typed so that it is text, where text may stand."""
    if not typed or not any(map(_is_text, members(annotation))):
        return ""
    # A text in JSON's quotes is the same text in YAML.
    literal = json.dumps(typed, ensure_ascii=False)
    return f"If text is meant, quote it: {literal} (in a shell: {quoted(f'{dotted}={literal}')})"


def _expected(annotation: Any) -> str:
    if tags := tag_values(annotation):
        return f"a mapping with {tag(annotation)}: {' | '.join(tags)}"
    return describe(annotation)


def _remedy(annotation: Any, seen: Any) -> str:
    kinds = members(annotation)
    if isinstance(seen, dict) and (fields := [name for kind in blocks(annotation) for name in kind.model_fields]):
        return next((text for key in seen if key not in fields and (text := did_you_mean(str(key), fields))), "")
    if any(map(_is_text, kinds)) and isinstance(seen, int | float):
        return f'Write "{seen}"'
    # What begins so and is text nevertheless was not valid YAML.
    if isinstance(seen, str) and seen.startswith(("[", "{")):
        return "Check its brackets and quotes, and that it gives no key twice"
    if isinstance(seen, str) and any(get_origin(kind) is list for kind in kinds):
        # Words that YAML would read as something else are put in JSON's quotes, which YAML has as well.
        words = (
            it if re.fullmatch(r"[\w./+=-]+", it) else json.dumps(it, ensure_ascii=False) for it in _words_of(seen)
        )
        return f"Write [{', '.join(words)}]"
    return did_you_mean(seen, [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)])


def _words_of(text: str) -> list[str]:
    """The entries that a text meant for a list probably has: words, as a shell takes them apart."""
    try:
        return shlex.split(text) or [text]
    except ValueError:  # a quote without its end
        return [text]


def did_you_mean(seen: Any, choices: Iterable[str]) -> str:
    """``Did you mean X?`` for the choice nearest to a value, or nothing if none is near."""
    return f"Did you mean {close[0]}?" if (close := closest(seen, choices)) else ""


def closest(seen: Any, choices: Iterable[str]) -> list[str]:
    """The choice nearest to a value, whatever the case of either; none if none is near."""
    from difflib import get_close_matches

    if not isinstance(seen, str):
        return []
    lower = {choice.lower(): choice for choice in map(str, choices)}
    return [lower[it] for it in get_close_matches(seen.lower(), list(lower), n=1)]
