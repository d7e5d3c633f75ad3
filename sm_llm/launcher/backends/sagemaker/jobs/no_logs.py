"""A training job without a log stream: prints where its logs are read, and ends a wait that would have no end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sm_llm.errors import SubmitError
from sm_llm.launcher.backends.sagemaker.account import NoSuchJob, describe
from sm_llm.launcher.backends.sagemaker.jobs.cloudwatch import GROUP
from sm_llm.terminal import echo, quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.launcher.aws_account import AwsAccount

PATIENCE_SECONDS = 30.0
"""A container's first line is in CloudWatch a few seconds after it was printed."""


@dataclass
class NoStream:
    """The look for the logs of one job, as long as there are none."""

    account: AwsAccount
    job: str
    run_uri: str
    clock: Callable[[], float] = time.monotonic
    _printed: str = field(default="", init=False)
    _training_since: float | None = field(default=None, init=False)

    def note(self) -> None:
        """Print where logs are read, whenever the job's status changes.

        Raises ``SubmitError`` once the job's containers have run for ``PATIENCE_SECONDS`` without a stream.
        """
        try:
            status = str(describe(self.account, self.job)["SecondaryStatus"])
        except NoSuchJob:
            status = "not created yet"
        where = f"log group {GROUP} of {self.account.region}, streams {self.job}/…"
        line = f"no log stream yet in {where} The job is {status}"
        if line != self._printed:
            echo(line, err=True)
            self._printed = line
        # Before its containers run a job prints nothing, so nothing is missing yet.
        if status != "Training":
            self._training_since = None
            return
        now = self.clock()
        self._training_since = now if self._training_since is None else self._training_since
        if now - self._training_since >= PATIENCE_SECONDS:
            raise SubmitError(
                f"training job {self.job} has run for {PATIENCE_SECONDS:.0f} s without a log stream in {where} Its "
                "role needs logs:CreateLogGroup, logs:CreateLogStream and logs:PutLogEvents; a private network "
                f"needs an endpoint for CloudWatch Logs. Its events are in the storage: "
                f"sm-llm status {quoted(self.run_uri)}"
            )
