"""Logs of training jobs: every host's stream is copied from CloudWatch to a node log, which is read like any other."""

from __future__ import annotations

import os
import re
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO

from sm_llm.launcher.aws_account import AwsAccount, aws_errors
from sm_llm.owned import make_folders, opener

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

GROUP = "/aws/sagemaker/TrainingJobs"
# A stream is named JOB/algo-N-TIME; a host that starts again has a further one.
_HOST = re.compile(r"/algo-(\d+)(?:-|$)")


@dataclass
class CloudWatchCache:
    """Copies the streams of one job to ``<folder>/node-<i>.log``; host algo-1, which runs rank 0, is node 0.

    Each mirror puts files of its own in the place of what was copied before: who reads that, or writes it, is not
    disturbed.
    """

    account: AwsAccount
    job: str
    folder: Path
    _tokens: dict[str, str] = field(default_factory=dict)
    _logs: dict[int, BinaryIO] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        # A reader of the lines may stop half-way, so the files are closed with this object.
        weakref.finalize(self, self._open.close)
        make_folders(self.folder)
        for earlier in self.folder.glob("node-*.log"):  # maybe of another job of the same attempt
            earlier.unlink(missing_ok=True)

    @property
    def has_streams(self) -> bool:
        """Whether any host has logged so far."""
        return bool(self._logs)

    def pull(self) -> None:
        """Append what is new of every host.

        Raises ``SubmitError`` if CloudWatch does not answer, ``Expired`` if the credentials have expired.
        """
        with (
            aws_errors(f"cannot read the logs of {self.job}"),
            TemporaryDirectory(prefix=".new-", dir=self.folder) as new,
        ):
            for stream in self._streams():
                log = self._log(node_of(stream), Path(new))
                log.writelines(f"{line}\n".encode() for line in self._new_lines(stream))
                log.flush()
            # The open files keep their descriptors under the new names, so later pulls append to them.
            for path in Path(new).iterdir():
                path.replace(self.folder / path.name)

    def _log(self, node: int, new: Path) -> BinaryIO:
        if node not in self._logs:
            descriptor = opener(new / f"node-{node}.log", os.O_WRONLY | os.O_CREAT)
            self._logs[node] = self._open.enter_context(os.fdopen(descriptor, "wb"))
        return self._logs[node]

    def _streams(self) -> list[str]:
        client = self.account.client("logs")
        pages = client.get_paginator("describe_log_streams").paginate(
            # With the slash, or a job whose name begins with this one's would be among them.
            logGroupName=GROUP,
            logStreamNamePrefix=f"{self.job}/",
        )
        try:
            names = [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
        except client.exceptions.ResourceNotFoundException:
            return []  # nobody in this account has logged yet
        return sorted((name for name in names if _HOST.search(name)), key=lambda name: (node_of(name), name))

    def _new_lines(self, stream: str) -> Iterator[str]:
        """All that was there when the look began; a page may be empty though more follow."""
        client = self.account.client("logs")
        ends: float | None = None
        while True:
            asked: dict[str, Any] = {"logGroupName": GROUP, "logStreamName": stream, "startFromHead": True}
            token = self._tokens.get(stream)
            page = client.get_log_events(**asked, **({"nextToken": token} if token else {}))
            self._tokens[stream] = page["nextForwardToken"]
            yield from (event["message"].rstrip("\n") for event in page["events"])
            ends = ends or _answered(page) + 1.0  # the answer's date has no fractions
            # A repeated token is the end of the stream. A host that logs faster than it is read never reaches it, so
            # lines that the service received after this pull began are left for the next one.
            if page["nextForwardToken"] == token or _ingested(page) > ends:
                return


def _answered(page: Mapping[str, Any]) -> float:
    """When the service answered, by its own clock; seconds since the epoch."""
    return parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()


def _ingested(page: Mapping[str, Any]) -> float:
    """When the service received the page's last line, by its own clock; seconds since the epoch."""
    return page["events"][-1].get("ingestionTime", 0) / 1000 if page["events"] else 0.0


def node_of(stream: str) -> int:
    """The node of a stream: ``job/algo-3-1700000000`` is of node 2."""
    match = _HOST.search(stream)
    assert match is not None
    return int(match[1]) - 1
