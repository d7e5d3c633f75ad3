"""How a client that follows a run treats a store or a platform that does not answer for a while: the run continues."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import QueryError

if TYPE_CHECKING:
    from sm_llm.errors import StorageError
    from sm_llm.runs.run_store import RunStore

PATIENCE_SECONDS = 900.0
"""What has not answered for so long is an error of the following, too."""


@dataclass
class RetryPolicy:
    """Of one follower of a run. A folder does not come back by itself, so its errors are never borne."""

    run_store: RunStore
    _since: float | None = None
    _who: str = "the run's storage"

    def bear(self, issue: StorageError | QueryError) -> str | None:
        """The line to print when trouble begins, None while it lasts. Raises the issue when it has lasted too long."""
        now = time.monotonic()
        comes_back = self.run_store.is_remote or isinstance(issue, QueryError)
        if not comes_back or (self._since is not None and now - self._since > PATIENCE_SECONDS):
            raise issue
        if self._since is not None:
            return None
        self._since = now
        self._who = "the platform" if isinstance(issue, QueryError) else "the run's storage"
        minutes = round(PATIENCE_SECONDS / 60)
        return f"{issue}. The run continues unobserved; retrying for {minutes} minutes"

    def settle(self) -> str | None:
        """A read has succeeded: the line that reports the end of trouble, if there was any."""
        was, self._since = self._since, None
        return None if was is None else f"{self._who} answers again"
