"""The class of every field of a specification: what another value of it changes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FieldClass(StrEnum):
    """What another value of a field changes."""

    MODEL = "model"
    """The function that is trained. A checkpoint of another model cannot be continued."""
    ORDER = "data order"
    """Which samples are seen, and in which order."""
    SCHEDULE = "schedule"
    """How long training lasts, the course of the learning rate, and the validation that it may follow."""
    OPTIMISER = "optimiser"
    """How a gradient changes the weights."""
    PRECISION = "precision"
    """Number formats and kernels: the same function, rounded in another way."""
    PLACEMENT = "placement"
    """Machines, images and the spread over processes: the same function, summed in another order."""
    START = "start"
    """Where a run begins. A checkpoint of the run takes its place."""
    WORK = "work"
    """What a task that does not train makes."""
    RUN = "run"
    """What a run is called and where it is kept, from its launch on."""
    FREE = "free"
    """Nothing in the result: reports, retention, storage, limits, names."""


@dataclass(frozen=True)
class Declared:
    """The class of a field, as its type declares it."""

    field_class: FieldClass
    is_resolved: bool = False
    """Whether what the value leads to is compared with a checkpoint in place of the value: the config of a model's
    folder, the content of a data folder, the steps that follow from epochs."""


MODEL = Declared(FieldClass.MODEL, is_resolved=True)
ORDER = Declared(FieldClass.ORDER)
DATA = Declared(FieldClass.ORDER, is_resolved=True)
"""A place that samples are read from."""
BATCH = DATA
"""What the number of samples of a step is derived from."""
SCHEDULE = Declared(FieldClass.SCHEDULE)
VALIDATION = Declared(FieldClass.SCHEDULE, is_resolved=True)
"""A place that validation rows are read from."""
LENGTH = Declared(FieldClass.SCHEDULE, is_resolved=True)
"""What numbers of steps are derived from."""
OPTIMISER = Declared(FieldClass.OPTIMISER)
PRECISION = Declared(FieldClass.PRECISION)
PLACEMENT = Declared(FieldClass.PLACEMENT)
START = Declared(FieldClass.START)
WORK = Declared(FieldClass.WORK)
RUN = Declared(FieldClass.RUN)
FREE = Declared(FieldClass.FREE)
