"""YAML without its traps: scalars, lines, and a lossless way back."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sm_llm.errors import SpecError
from sm_llm.spec.comparison.leaves import Difference
from sm_llm.spec.field_classes import FieldClass
from sm_llm.spec.loading.overrides import parse_overrides, texts
from sm_llm.spec.loading.yaml_text import from_typed, from_yaml, to_typed, to_yaml
from tests.fixtures.sampling import number

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=20)
)
KEYS = st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-3E+2", -300.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("010", 10),
        ("0x1f", 31),
        ("1_000_000", 1_000_000),
        ("no", "no"),
        ("off", "off"),
        ("Yes", "Yes"),
        ("true", True),
        ("False", False),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("null", None),
        ("", None),
        ("'1'", "1"),
        ("-", [None]),
        ("1.2.3", "1.2.3"),
        ("1e", "1e"),
    ],
)
def test_a_scalar_means_what_it_looks_like(text: str, value: object) -> None:
    read = from_yaml(f"key: {text}" if text != "-" else "key:\n-", "job.yaml").value["key"]
    assert read == value
    assert type(read) is type(value)


def test_infinity_and_nan_are_read() -> None:
    value = from_yaml("[.inf, -.INF, .nan]", "x").value
    assert value[:2] == [math.inf, -math.inf]
    assert math.isnan(value[2])


def test_every_value_remembers_its_line_and_plain_scalars_their_spelling() -> None:
    tree = from_yaml('name: 007\ntask:\n  seed: 3\n  list:\n    - a\n    - "b"\n', "job.yaml")
    assert tree.origins[("name",)] == "job.yaml:1"
    assert tree.origins[("task", "seed")] == "job.yaml:3"
    assert tree.origins[("task", "list", "1")] == "job.yaml:6"
    assert tree.texts[("name",)] == "007"
    assert ("task", "list", "1") not in tree.texts


def test_merge_keys_and_anchors_work_and_own_keys_win() -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc:\n  x: 9\n  <<: [*a, *b]\nd: *b\n"
    value = from_yaml(text, "x").value
    assert value["c"] == {"x": 9, "y": 2, "z": 4}
    assert value["d"] == {"y": 3, "z": 4}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", "a (x.yaml:3): given twice, first in line 1"),
        ("a: [1\nb: 2", "x.yaml:2: not valid YAML"),
        ("a: !!python/name:os.system x", "not supported"),
        ("a: !!python/object:os.x {}", "not supported"),
        ("a: &me [*me]", "refers to itself"),
        ("a: {{name}}", "quote a value that starts with a brace"),
        ("--- a\n--- b", "x.yaml:2: not valid YAML"),
        ("a: !!int hello", "not supported"),
    ],
)
def test_a_faulty_file_is_refused_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_yaml(text, "x.yaml")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "text", ["Item #1", "it's", "@x", "[a", "a\nb", " padded ", "", "&anchor x", "# all", "%TAG x", '"half', "--- x"]
)
def test_unquoted_override_text_is_kept_to_the_character(text: str) -> None:
    assert from_typed(text, "override").value == text


@settings(max_examples=number(60, whole=300))
@given(VALUES)
def test_what_is_written_is_read_back(value: object) -> None:
    text = to_yaml(value)
    assert from_typed(text, "o").value == value
    assert from_yaml(f"key: {text}", "f").value == {"key": value}
    assert same(yaml.safe_load(f"key: {text}")["key"], value), "other programs read YAML 1.1"


AMBIGUOUS = st.sampled_from(
    ["no", "On", "~", "null", "None", "True", "1e-4", "1_0", "0x1f", "2024-01-01", "1:30", "...", ".", "<<", "=", "- a",
     ".inf", "{a: 1}", "[1]", '"q"', "'q'", "a: b", "a #b", " a", "a\n", "!!int 1", "&a", "*a", "{}", "1.", "0o7", "y"]
)  # fmt: skip
ANY = st.recursive(
    SCALARS | AMBIGUOUS | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | AMBIGUOUS, inner, max_size=4),
)


def same(first: object, second: object) -> bool:
    """Equal in value and type; NaN is itself."""
    return repr(first) == repr(second)


@settings(max_examples=number(100, whole=500))
@given(ANY)
def test_what_is_printed_to_be_typed_means_the_same_value(value: object) -> None:
    assert same(from_typed(to_typed(value), "o").value, value)
    assert same(from_yaml(f"key: {to_yaml(value)}", "f").value["key"], value)
    assert same(yaml.safe_load(f"key: {to_yaml(value)}")["key"], value)


@settings(max_examples=number(100, whole=500))
@given(ANY)
def test_changes_of_a_record_and_of_a_printed_command_can_be_typed_again(value: object) -> None:
    recorded = [*texts([{"task.x": value}], {"task.y": value})]
    parsed, faults = parse_overrides(recorded)
    assert faults == []
    assert [(path, repr(tree.value)) for path, tree in parsed] == [(("task", it), repr(value)) for it in "xy"]
    difference = Difference(FieldClass.SCHEDULE, "task.x", value, value)
    shown = str(difference).removeprefix("task.x: ").partition(" -> ")[0]
    assert shown.endswith("…") or " -> " in to_typed(value) or same(from_typed(shown, "o").value, value)


@settings(max_examples=number(60, whole=200))
@given(st.text(max_size=30))
def test_quoted_text_is_text(value: str) -> None:
    read = from_typed(to_yaml(value), "o").value
    assert type(read) is str
    assert read == value


@pytest.mark.parametrize(
    "text",
    [
        "a: &a " + "x" * 100_000 + "\nb: [" + ", ".join(["*a"] * 5000) + "]\n",
        "a: &a {" + "k" * 1000 + ": 1}\nb: [" + ", ".join(["*a"] * 4000) + "]\n",
    ],
    ids=["texts", "keys"],
)
def test_f08_characters_of_aliases_count(text: str) -> None:
    with pytest.raises(SpecError, match="holds more than 1,000,000 characters"):
        from_yaml(text, "x.yaml")


def test_f08_a_path_of_an_override_has_levels_like_a_value() -> None:
    deep = "task." + "a." * 3000 + "b"
    for change in (f"{deep}=1", {deep: 1}):
        parsed, (fault,) = parse_overrides([change])
        assert (parsed, fault.message, len(fault.path) < 80) == ([], "names more than 64 levels", True)
    with pytest.raises(SpecError, match="holds more than 1,000,000 characters"):
        to_typed({"a": ["x" * 600_000] * 2})
