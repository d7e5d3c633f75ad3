"""Logs of training jobs: every host's stream is copied from CloudWatch to a node log, which is read like any other."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sm_llm.launcher.sagemaker.account import Account, told

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GROUP = "/aws/sagemaker/TrainingJobs"
_HOST = re.compile(r"/algo-(\d+)(?:-|$)")
_PAGES_A_LOOK = 50
"""A look is bounded: 50 pages are up to half a million lines of one host."""


@dataclass
class LogMirror:
    """Copies the streams of one job to ``<folder>/node-<i>.log``; host algo-1, which runs rank 0, is node 0."""

    account: Account
    job: str
    folder: Path
    _tokens: dict[str, str] = field(default_factory=dict)

    def pull(self) -> int:
        """Append what is new of every host; returns the number of lines.

        Raises ``SubmitError`` if CloudWatch does not answer, ``Expired`` if the credentials have expired.
        """
        with told(f"cannot read the logs of {self.job}"):
            return sum(self._pull_stream(stream) for stream in self._streams())

    def _streams(self) -> list[str]:
        client = self.account.client("logs")
        pages = client.get_paginator("describe_log_streams").paginate(
            logGroupName=GROUP, logStreamNamePrefix=f"{self.job}/"
        )
        try:
            names = [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
        except client.exceptions.ResourceNotFoundException:
            return []  # nobody in this account has logged yet
        return sorted((name for name in names if _HOST.search(name)), key=lambda name: (node_of(name), name))

    def _pull_stream(self, stream: str) -> int:
        is_new = stream not in self._tokens
        lines = list(self._new_lines(stream))
        if lines or is_new:
            log = self.folder / f"node-{node_of(stream)}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            # What an earlier look of another process has copied is copied anew.
            with log.open("wb" if is_new and not self._is_restart(stream) else "ab") as output:
                output.writelines(f"{line}\n".encode() for line in lines)
        return len(lines)

    def _is_restart(self, stream: str) -> bool:
        """Whether another stream of the same host was read before: SageMaker started the job again."""
        return any(node_of(known) == node_of(stream) for known in self._tokens if known != stream)

    def _new_lines(self, stream: str) -> Iterator[str]:
        client = self.account.client("logs")
        for _ in range(_PAGES_A_LOOK):
            asked: dict[str, Any] = {"logGroupName": GROUP, "logStreamName": stream, "startFromHead": True}
            token = self._tokens.get(stream)
            page = client.get_log_events(**asked, **({"nextToken": token} if token else {}))
            self._tokens[stream] = page["nextForwardToken"]
            yield from (event["message"].rstrip("\n") for event in page["events"])
            if page["nextForwardToken"] == token or not page["events"]:
                return


def node_of(stream: str) -> int:
    """The node of a stream: ``job/algo-3-1700000000`` is of node 2."""
    match = _HOST.search(stream)
    assert match is not None
    return int(match[1]) - 1
