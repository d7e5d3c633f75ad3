"""Checks of a user's program that runs in software which we do not know: an image or environment of the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sm_llm.launcher.planning.program_checks import module_warnings, program_issues, source_issues
from sm_llm.launcher.planning.removed_modules import import_warnings
from sm_llm.spec.tasks import ScriptTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.errors import Issue
    from sm_llm.launcher.planning.source_tree import SourceTree
    from sm_llm.spec.job import JobSpec
    from sm_llm.spec.validation.runner import Checker


class ProgramRequest(Protocol):
    """What a cluster's backend asks about."""

    @property
    def job(self) -> JobSpec:
        """The job."""

    @property
    def program(self) -> SourceTree | None:
        """The files of the user's program, where they are on this machine."""


def check_program(asked: ProgramRequest) -> Iterator[Issue]:
    """The user's program: its entry, requirements and files."""
    yield from (*source_issues(asked.job), *program_issues(asked.job, asked.program, None))


def check_imports(asked: ProgramRequest) -> Iterator[Issue]:
    """Modules that the program imports and that are not there."""
    task, program = asked.job.task, asked.program
    if program is not None and isinstance(task, ScriptTask):
        yield from (*import_warnings(program.files, None, task.entry), *module_warnings(task.entry, program))


PROGRAM_CHECKERS: tuple[Checker[ProgramRequest], ...] = (check_program, check_imports)
"""Run behind the backend's own, whatever the cluster."""
