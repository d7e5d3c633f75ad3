"""Which lines of a job's logs are wanted: what verbs ask and backends answer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from sm_llm.contract.job_file import rank_prefix
from sm_llm.errors import UsageError
from sm_llm.terminal import counted


@dataclass(frozen=True)
class LogFilter:
    """Which lines are wanted: the last ``tail`` of every node, one node, one rank, those that match ``pattern``."""

    tail: int | None = None
    node: int | None = None
    rank: int | None = None
    pattern: re.Pattern[str] = field(default_factory=lambda: re.compile(""))
    raw: bool = False
    """Lines as they were written, with their line endings; bytes that are not UTF-8 as Python escapes them."""
    prefix: str = ""
    """What the lines of ``rank`` begin with in its node's log."""
    labels: bool = False
    """Lines say which node wrote them, even while there is one log alone."""

    def on(self, node_count: int, processes_per_node: int) -> LogFilter:
        """This filter for a job of that size. Raises ``UsageError`` for a node or rank that it does not have."""
        if self.node is not None and self.node >= node_count:
            raise UsageError(f"there is no node {self.node}: the run has {node_count}, counted from 0")
        if self.rank is None:
            return replace(self, labels=node_count > 1 and self.node is None)
        if self.rank >= node_count * processes_per_node:
            raise UsageError(
                f"there is no rank {self.rank}: the run has {counted(node_count * processes_per_node, 'process')}"
            )
        prefix = rank_prefix(self.rank) if processes_per_node > 1 else ""
        return replace(self, node=self.rank // processes_per_node, prefix=prefix)

    def take(self, line: str) -> str | None:
        """The line as it is shown, or None if it is not wanted."""
        if not line.startswith(self.prefix):
            return None
        line = line.removeprefix(self.prefix)
        return line if self.pattern.search(line) else None

    def text(self, written: bytes) -> str | None:
        """``take`` of a line as it was written."""
        if self.raw:
            return self.take(written.decode("utf-8", "surrogateescape"))
        return self.take(written.decode("utf-8", "replace").rstrip("\r\n"))
