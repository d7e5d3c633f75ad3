"""Refuses pickles that would end, hang or fill the process that reads them, before they are read.

An unpickler that calls nothing can still be harmed: tuples that hold one another a million times overflow the stack
when they become keys of a mapping, a few that hold each other twice are hashed for ever, and one number makes it
reserve 32 GiB. Format: ``Lib/pickletools.py`` of CPython.
"""

from __future__ import annotations

import pickle
import pickletools

MOST_BYTES = 1 << 28
"""Of one pickle: the metadata of a million shards has fewer."""
MOST_IN_A_KEY = 1000
"""Values in a key of a mapping, a member of a set or the arguments of a call, counted as often as they are met."""
# Of larger values no exact count is kept.
_ENDLESS = MOST_IN_A_KEY + 1
# Kind of an argument -> its bytes; below 0: those of a length, which follows the opcode, before so many bytes.
_SIZES = {
    "uint1": 1, "uint2": 2, "int4": 4, "uint4": 4, "uint8": 8, "float8": 8,
    "string1": -1, "bytes1": -1, "unicodestring1": -1, "long1": -1,
    "string4": -4, "bytes4": -4, "unicodestring4": -4, "long4": -4, "bytes8": -8, "unicodestring8": -8,
}  # fmt: skip
_ATOMS = (
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING", "SHORT_BINSTRING",
    "EMPTY_TUPLE", "GLOBAL",
)  # fmt: skip
_EMPTY = ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET")
# Makes one value of so many; None: of all since the last mark.
_MADE_OF = {
    "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "REDUCE": 2, "NEWOBJ": 2, "NEWOBJ_EX": 3, "BINPERSID": 1, "STACK_GLOBAL": 2,
    "TUPLE": None, "LIST": None, "DICT": None, "FROZENSET": None,
}  # fmt: skip
# Adds so many values to the one below them.
_ADDED = {"APPEND": 1, "SETITEM": 2, "BUILD": 1, "APPENDS": None, "SETITEMS": None, "ADDITEMS": None}
# Hashes every first of so many of its values, or may do so.
_HASHED = {
    "SETITEM": 2, "SETITEMS": 2, "DICT": 2, "ADDITEMS": 1, "FROZENSET": 1, "REDUCE": 1, "NEWOBJ": 1, "NEWOBJ_EX": 1,
}  # fmt: skip
_OTHERS = ("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "MARK", "POP", "PROTO", "FRAME", "STOP")
_KNOWN = {*_ATOMS, *_EMPTY, *_MADE_OF, *_ADDED, *_OTHERS}
_OPCODES = {ord(it.code): it for it in pickletools.opcodes}
_NAMES = {code: it.name for code, it in _OPCODES.items() if it.name in _KNOWN}
_LINES = 9
_WIDTHS = {code: 0 if it.arg is None else _SIZES.get(it.arg.name, _LINES) for code, it in _OPCODES.items()}


class _Value:
    """How many values a value holds, itself included, and whether another one holds it."""

    __slots__ = ("count", "is_held")

    def __init__(self) -> None:
        self.count = 1
        self.is_held = False


_ATOM = _Value()
# One value stands for all atoms; marked as held, so that no opcode may add to it.
_ATOM.is_held = True


class _Machine:
    """Follows a pickle without making its values."""

    def __init__(self) -> None:
        self.stack: list[_Value] = []
        self.marks: list[int] = []
        self.memo: dict[int, _Value] = {}

    def step(self, name: str, number: int) -> None:
        """Every opcode but those of atoms and ``MEMOIZE``."""
        stack = self.stack
        if name in _MADE_OF:
            values = self._pop(_MADE_OF[name])
            stack.append(_Value())
            _fill(name, stack[-1], values)
        elif name in _ADDED:
            values = self._pop(_ADDED[name])
            # A value that grows after it was counted would make the counts of its holders wrong.
            if stack[-1].is_held:
                raise pickle.UnpicklingError("it changes a value that another one holds")
            _fill(name, stack[-1], values)
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[number])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[number] = stack[-1]
        elif name in _EMPTY:
            stack.append(_Value())
        elif name == "POP":
            self._pop(1)

    def _pop(self, count: int | None) -> list[_Value]:
        begin = self.marks.pop() if count is None else len(self.stack) - count
        # Nothing may reach below the newest mark: CPython would then read what does not belong to this value.
        if begin < (self.marks[-1] if self.marks else 0):
            raise IndexError("too few values")
        values = self.stack[begin:]
        del self.stack[begin:]
        return values


def _fill(name: str, target: _Value, values: list[_Value]) -> None:
    count, every = target.count, _HASHED.get(name)
    for it in values:
        count += it.count
        it.is_held = True
    if every and count > MOST_IN_A_KEY and any(it.count > MOST_IN_A_KEY for it in values[::every]):
        raise pickle.UnpicklingError(f"a key or an argument holds more than {MOST_IN_A_KEY:,} values")
    target.count = min(_ENDLESS, count)


def require_harmless(body: bytes) -> None:
    """Raise ``pickle.UnpicklingError`` for a pickle that is not whole, or that a reader could not bear.

    What it refers to and calls is the reader's concern: see the unpicklers of this package.
    """
    machine, at, size, code = _Machine(), 0, len(body), -1
    if size > MOST_BYTES:
        raise pickle.UnpicklingError(f"it has more than {MOST_BYTES:,} bytes")
    stack, memo, atoms, memoize = machine.stack, machine.memo, _codes(*_ATOMS), ord(pickle.MEMOIZE)
    stop, put, number = ord(pickle.STOP), ord(pickle.LONG_BINPUT), 0
    try:
        while code != stop:
            code = body[at]
            at += 1
            if code == memoize:  # every second one
                memo[len(memo)] = stack[-1]
                continue
            if width := _WIDTHS[code]:
                number, at = _argument(width, body, at)
                # A number this large makes CPython's reader allocate a memo of so many entries.
                if at > size or (code == put and number > size):
                    raise pickle.UnpicklingError(f"a {_OPCODES[code].name} of it is larger than all of it")
            if code in atoms:
                stack.append(_ATOM)
            elif (name := _NAMES.get(code)) is not None:
                machine.step(name, number)
            else:
                raise pickle.UnpicklingError(f"it holds a {_OPCODES[code].name}, which no checkpoint needs")
        if not stack:
            raise IndexError("no value")
    except (IndexError, KeyError, ValueError) as error:
        raise pickle.UnpicklingError(f"it is not a whole pickle ({error!r} at byte {at:,} of {size:,})") from None


def _codes(*names: str) -> frozenset[int]:
    return frozenset(code for code, name in _NAMES.items() if name in names)


def _argument(width: int, body: bytes, at: int) -> tuple[int, int]:
    """The number in an opcode's argument, and where the next opcode begins."""
    if width == 1:
        return body[at], at + 1
    if width == _LINES:  # two of them; of opcodes with one, none is known here
        return 0, body.index(b"\n", body.index(b"\n", at) + 1) + 1
    end = at + abs(width)
    number = int.from_bytes(body[at:end], "little")
    return number, end + number if width < 0 else end
