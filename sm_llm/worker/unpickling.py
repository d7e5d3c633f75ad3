"""An unpickler of known names that leaves everything it refers to as it was."""

from __future__ import annotations

import enum
import pickle
from abc import ABC, abstractmethod
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from sm_llm.convert.files.torch_file import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

_Before = tuple[Any, dict[str, Any]]


class CarefulUnpickler(pickle.Unpickler, ABC):
    """Base of unpicklers that know some names alone; ``known`` decides which.

    A pickle can do more than make objects: its BUILD sets attributes of whatever it has named, classes and members of
    enumerations too, for the whole process. Functions and paths are therefore given as ``Frozen``. Of classes what was
    set is undone, and the pickle refused.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._before: dict[int, _Before] = {}

    @abstractmethod
    def known(self, module: str, name: str) -> Any:
        """What a name stands for. Raises ``pickle.UnpicklingError`` for one that no such pickle holds."""

    def find_class(self, module: str, name: str) -> Any:
        found = self.known(module, name)
        if not isinstance(found, type):
            # Even a harmless function is an object of the process: BUILD could set attributes on it.
            return Frozen(found) if callable(found) else found
        if issubclass(found, PurePath):
            return Frozen(PurePath)
        for it in _kept(found):
            # Kept at the first mention: a later one could already see what the pickle has changed.
            self._before.setdefault(id(it), (it, dict(vars(it))))
        return found

    def load(self) -> Any:
        """The object. Raises what unpickling raises, and ``pickle.UnpicklingError`` for one that changes a class."""
        try:
            value = super().load()
        finally:
            # Also after an error: the process must not keep what half a pickle has changed.
            changed = [f"{it!r}" for it, before in self._before.values() if _restored(it, before)]
        if changed:
            raise pickle.UnpicklingError(f"it changes {changed[0]}")
        return value


def _kept(kind: type) -> Iterator[Any]:
    """A class, and the objects that exist once and that it gives out."""
    yield kind
    if issubclass(kind, enum.Enum):
        # Members are shared by the whole process, like the class itself.
        yield from kind


def _restored(it: Any, before: dict[str, Any]) -> bool:
    """Whether attributes of ``it`` were set; then they are again as they were before."""
    # Past the metaclass: that of enumerations refuses to set members.
    setter, remover = (type.__setattr__, type.__delattr__) if isinstance(it, type) else (_set, _remove)
    now = dict(vars(it))
    changed = [name for name in now if name not in before or now[name] is not before[name]]
    for name in changed:
        setter(it, name, before[name]) if name in before else remover(it, name)
    for name in before.keys() - now.keys():
        setter(it, name, before[name])
    return bool(changed or before.keys() - now.keys())


def _set(it: Any, name: str, value: Any) -> None:
    vars(it)[name] = value


def _remove(it: Any, name: str) -> None:
    del vars(it)[name]
