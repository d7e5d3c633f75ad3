"""The console that tables, live lines and closing words are written to."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.segment import Segment

from sm_llm.terminal import CleanStream, clean

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TextIO

    from rich.console import ConsoleOptions, RenderableType


class CleanConsole(Console):
    """rich's console; text keeps the styles that it was given here and loses all control sequences of its own.

    No text is markup: a name such as ``[bold]`` is shown as it is.
    """

    def __init__(self, stream: TextIO, width: int | None) -> None:
        super().__init__(file=stream, width=width, markup=False, emoji=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            # A link is a control sequence (OSC 8) that rich would write around the text because of its style.
            # Control segments are rich's own: moving the cursor of the live line.
            if control is None and text:
                yield Segment(clean(text), style.update_link(None) if style and style.link else style)
            else:
                yield Segment(text, style, control)


def console(*, stderr: bool = False) -> Console:
    """Where tables and words go: standard output or standard error, as they are now."""
    stream = sys.stderr if stderr else sys.stdout
    # The console cleans each text itself; the stream would remove rich's own colours as well.
    stream = stream.raw if isinstance(stream, CleanStream) else stream
    # Piped output is for programs and logs: long lines stay whole there, unless COLUMNS sets the width.
    return CleanConsole(stream, None if stream.isatty() or "COLUMNS" in os.environ else 200)
