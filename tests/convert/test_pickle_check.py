"""Pickles that would end, hang or fill their reader are refused before they are read."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sm_llm.contract.dcp_metadata import METADATA_MODULE
from sm_llm.convert.dcp_source import METADATA, DcpTensors
from sm_llm.convert.files.pickle_check import MOST_IN_A_KEY, require_harmless
from sm_llm.errors import ConversionError
from tests.fixtures.sampling import number

if TYPE_CHECKING:
    from pathlib import Path


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


INDEX = name(METADATA_MODULE, "MetadataIndex")
DEEP = b")" + b"\x85" * 300_000
"""A tuple in a tuple in a tuple …"""
WIDE = b")" + b"".join(b"q%cj%b" % (at, at.to_bytes(4, "little")) + b"\x86" for at in range(60))
"""A tuple that holds another twice, which holds another twice …"""
LATER = (
    b"]"
    + b"".join(INDEX + b")\x81r" + (300 + at).to_bytes(4, "little") + b"a" for at in range(60))
    + b"".join(
        b"j%bj%b\x86r%b0" % (*((300 + at).to_bytes(4, "little"),) * 2, (400 + at).to_bytes(4, "little"))
        for at in range(60)
    )
    + b"".join(
        b"j%b}%bj%bsb0" % ((300 + at).to_bytes(4, "little"), text("fqn"), (399 + at).to_bytes(4, "little"))
        for at in range(1, 60)
    )
    + b"}j%bNs" % (459).to_bytes(4, "little")
)
"""Objects that hold one another twice, by what is set when they already are parts of keys."""
HARMFUL = {
    "a deep key": b"}" + DEEP + b"Ns",
    "a deep key among others": b"}(" + text("a") + b"N" + DEEP + b"Nu",
    "a deep member of a set": b"(" + DEEP + b"\x91",
    "a deep member of a growing set": b"\x8f(" + DEEP + b"\x90",
    "a wide key": b"}" + WIDE + b"Ns",
    "a key that widens later": LATER,
    "deep pairs of a mapping that is called": name("collections", "OrderedDict") + b"](" + DEEP + b"N\x86e\x85R",
    "a deep size": name("torch", "Size") + DEEP + b"\x85R",
    "a place in the memo": b"Nr\xff\xff\xff\x7f",
    "bytes beyond the end": b"\x8e" + (1 << 40).to_bytes(8, "little") + b"abc",
    "a text beyond the end": b"X\xff\xff\xff\x7fabc",
    "a number beyond the end": b"\x8b\xff\xff\xff\x7fabc",
    "an array of bytes": b"\x96" + (1 << 40).to_bytes(8, "little") + b"abc",
    "a line that never ends": b"c" + b"a" * 100_000,
    "an extension": b"\x82\x01",
    "a persistent name": b"Pabc\n",
    "a copy of the top": b"}2",
    "a mark too few": b"}u",
    "one value too few": b"s",
    "values below a mark": b"N(0",
    "nothing": b"",
}


@pytest.mark.parametrize("case", HARMFUL)
def test_s06_what_would_harm_its_reader_is_refused(case: str) -> None:
    with pytest.raises(pickle.UnpicklingError):
        require_harmless(b"\x80\x04" + HARMFUL[case] + b".")


@pytest.mark.parametrize("case", HARMFUL)
def test_s06_a_checkpoint_to_convert_is_refused_in_words(case: str, tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(b"\x80\x04" + HARMFUL[case] + b".")
    with pytest.raises(ConversionError, match="is not the metadata of a checkpoint"):
        DcpTensors(tmp_path, cast("Any", None), "the metadata are read first")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner, inner, inner)
        | st.dictionaries(st.text() | st.tuples(st.integers()), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
    ),
)


@example({str(at): [at] for at in range(3000)}, 4)
@example([10**700, -(10**70), "x" * 70_000, b"x" * 70_000, {*range(3)}, frozenset({(1, 2)})], 4)
@given(PLAIN, st.integers(2, 4))
def test_what_python_writes_of_plain_values_is_harmless(value: Any, protocol: int) -> None:
    require_harmless(pickle.dumps(value, protocol))


@settings(max_examples=number(300, whole=3000))
@given(st.data())
def test_s06_a_damaged_pickle_is_refused_or_harmless(data: st.DataObject) -> None:
    """Whatever passes is read here, in this very process."""
    body = bytearray(pickle.dumps([{(1, "a"): [2, 3.0]}, OrderedDict(b="c"), ("d",) * 5], data.draw(st.integers(2, 4))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(
            st.sampled_from([ord(it.code) for it in pickletools.opcodes]) | st.integers(0, 255)
        )
    try:
        require_harmless(bytes(body))
    except pickle.UnpicklingError:
        return
    with suppress(Exception):  # what counts is that this process goes on
        hash(repr(_Nothing(body).load()))


class _Nothing(pickle.Unpickler):
    """Knows one class."""

    def __init__(self, body: bytes | bytearray) -> None:
        super().__init__(io.BytesIO(bytes(body)))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name}")


def test_keys_may_hold_as_many_values_as_is_stated() -> None:
    require_harmless(pickle.dumps({tuple(range(MOST_IN_A_KEY - 1)): 1}))
    with pytest.raises(pickle.UnpicklingError, match="more than 1,000 values"):
        require_harmless(pickle.dumps({tuple(range(MOST_IN_A_KEY)): 1}))
