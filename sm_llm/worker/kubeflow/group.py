"""The pods of one start of a job: they begin together, and end together once one of them is lost.

Pods are restarted one by one, at times of their own. One that comes back while the others still run would join what is
left of the earlier start; and where the others hang in a collective, each would wait for its own time limit
(kubeflow/trainer#2000). So the first pod waits for all, names a rendezvous that no earlier start had, and every
connection stays open: its end is the end of a pod.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_POLL_SECONDS = 0.5
_REPORT_SECONDS = 60.0
_LONGEST_LINE = 4_096
# Ours is one packet. Whoever sends a byte now and then would hold the first pod, which has other pods to hear.
_LINE_SECONDS = 5.0


@dataclass(frozen=True)
class GroupStart:
    """What all pods of one start know."""

    rendezvous: str
    port: int
    """Of torchrun's store, in the first pod."""
    secret: str
    """Signs what the processes leave in the store."""
    members: tuple[int, ...]
    """The pods that take part, in the order of their ranks."""

    @classmethod
    def new(cls, members: Sequence[int]) -> GroupStart:
        """Another than any before, on a port that is free in this pod."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return cls(secrets.token_hex(8), probe.getsockname()[1], secrets.token_hex(16), tuple(members))


class _Line:
    """A connection that carries JSON texts, one per line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    @property
    def has_more(self) -> bool:
        """Whether a value has arrived already, together with the one before."""
        return b"\n" in self._rest

    def send(self, value: Any) -> None:
        self.connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> Any:
        """The next value, which has begun to arrive; None at the end of the connection, or for what is not ours."""
        until = time.monotonic() + _LINE_SECONDS
        try:
            while b"\n" not in self._rest:
                new = self.connection.recv(_LONGEST_LINE)
                if not new or len(self._rest) > _LONGEST_LINE or time.monotonic() > until:
                    return None
                self._rest += new
            line, _, self._rest = self._rest.partition(b"\n")
            return json.loads(line)
        except (OSError, ValueError, RecursionError):  # the last for text that is nested too deep
            return None


@dataclass
class Group:
    """The pods of a job as one of them, ``pod``, sees them. ``log`` prints a line."""

    job: str
    """Names the attempt: a pod of another one is turned away."""
    pod: int
    pods: int
    address: tuple[str, int]
    """Where the first pod listens."""
    log: Callable[[str], None]
    sizes: tuple[int, ...] = ()
    """With how many pods a start may begin where not all are there; empty where all are needed."""
    wait_seconds: float = 0.0
    """So long those that are there wait for the others."""
    is_orderly: bool = False
    """Whether the start is over by a pod that joins or is being ended: the processes can still save."""
    _members: tuple[int, ...] = ()
    _stopped: set[int] = field(default_factory=set)
    _peers: dict[int, _Line] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _listener: socket.socket | None = None
    _lost: str = ""

    def start(self, is_over: Callable[[], bool]) -> GroupStart | None:
        """Wait until all pods are there; None where ``is_over`` comes first.

        There is no limit: pods may wait for nodes as long as the cluster has none.
        """
        return self._gather(is_over) if self.pod == 0 else self._join(is_over)

    def _gather(self, is_over: Callable[[], bool]) -> GroupStart | None:
        # Kept open after the start: a pod that knocks again has lost its own.
        self._listener = socket.create_server(("", self.address[1]), backlog=max(128, self.pods))
        reported = begun = time.monotonic()
        while (size := self._size(time.monotonic() - begun)) is None:
            if is_over():
                return None
            self._accept()
            self._forget_lost()
            if time.monotonic() - reported > _REPORT_SECONDS:
                absent = [it for it in range(1, self.pods) if it not in self._peers]
                self.log(f"waits for {len(absent)} of {self.pods} pods: {', '.join(map(str, absent[:20]))}")
                reported = time.monotonic()
        start = GroupStart.new(sorted((0, *self._peers))[:size])
        self._members = start.members
        # The others stay connected, and wait for a start that they are needed for.
        self._notify(vars(start))
        return start

    def _size(self, waited: float) -> int | None:
        """With how many pods to begin; None while more have to come."""
        present = len(self._peers) + 1
        if present == self.pods:
            return self.pods
        return self._largest(present) if waited >= self.wait_seconds else None

    def _largest(self, present: int) -> int | None:
        """The largest number of pods that a start may have; None where none is as small."""
        return max((it for it in (*self.sizes, self.pods) if it <= present), default=None)

    def _notify(self, note: Any) -> None:
        """Send a note to the other members that this pod is connected with."""
        for pod, peer in self._peers.items():
            if pod in self._members:
                with suppress(OSError):  # found lost at the next look
                    peer.send(note)

    def _visitor(self, seconds: float) -> tuple[int, _Line] | None:
        """A pod of this job that has come, waited for ``seconds``."""
        assert self._listener is not None
        self._listener.settimeout(seconds)
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return None
        connection.settimeout(_POLL_SECONDS)
        peer = _Line(connection)
        hello = peer.receive()
        pod = hello.get("pod") if isinstance(hello, dict) and hello.get("job") == self.job else None
        if not isinstance(pod, int) or not 0 < pod < self.pods:
            connection.close()
            return None
        return pod, peer

    def _accept(self) -> None:
        """Take in a pod that has come. One that comes again has been started again, and takes its own place."""
        if (found := self._visitor(_POLL_SECONDS)) is None:
            return
        pod, peer = found
        if (before := self._peers.pop(pod, None)) is not None:
            before.connection.close()
        self._peers[pod] = peer

    def _forget_lost(self) -> None:
        for pod, peer in self._readable():
            if peer.receive() is None:
                peer.connection.close()
                del self._peers[pod]

    def _join(self, is_over: Callable[[], bool]) -> GroupStart | None:
        reported = time.monotonic()
        while not is_over():
            with suppress(OSError):  # a name of a fresh cluster may not resolve yet, and the first pod may not listen
                connection = socket.create_connection(self.address, timeout=_POLL_SECONDS * 10)
                if (start := self._await_start(_Line(connection), is_over)) is not None:
                    return start
            if time.monotonic() - reported > _REPORT_SECONDS:
                self.log(f"waits for the first pod, {self.address[0]}")
                reported = time.monotonic()
            time.sleep(_POLL_SECONDS)
        return None

    def _await_start(self, first: _Line, is_over: Callable[[], bool]) -> GroupStart | None:
        first.send({"job": self.job, "pod": self.pod})
        self._peers = {0: first}
        while not is_over():
            if self._readable(_POLL_SECONDS):
                found = first.receive()
                if not isinstance(found, dict):
                    break  # the first pod has ended, or runs an earlier start that it has to leave
                start = GroupStart(**{**found, "members": tuple(found["members"])})
                self._members = start.members
                return start
        first.connection.close()
        self._peers = {}
        return None

    def lost(self) -> str:
        """Why this start is over, in words, once a pod of it is lost; empty until then. Does not wait."""
        if self._lost:
            return self._lost
        for pod, peer in self._readable():
            note = peer.receive()
            if pod in self._members:
                self._read(pod, note)
            if note is None:
                peer.connection.close()
                del self._peers[pod]
        if self._listener is not None and not self._lost:
            self._greet()
        return self._lost

    def _read(self, pod: int, note: Any) -> None:
        if note is None and pod not in self._done:
            self._lost = f"pod {pod} is lost"
        elif isinstance(note, dict) and "again" in note:
            self._end_orderly(str(note["again"]))
        elif isinstance(note, dict) and note.get("stopped"):
            self._stopped.add(pod)
        elif isinstance(note, dict) and note.get("code") == 0:
            # Its connection closes next, which is no loss any more.
            self._done.add(pod)
        elif note is not None:
            self._lost = f"pod {pod} has failed"

    def _end_orderly(self, why: str) -> None:
        self._lost, self.is_orderly = why, True
        if self.pod == 0:
            # The pods are connected with the first alone, which passes it on.
            self._notify({"again": why})

    def announce_end(self) -> None:
        """Report that this pod is being ended from outside: the others save what there is, and start again."""
        why = f"pod {self.pod} is being ended"
        if self.pod == 0:
            self._end_orderly(why)
        else:
            self._notify({"again": why})

    def _greet(self) -> None:
        """Answer a pod that asks for a start while one is under way."""
        if (found := self._visitor(0)) is None:
            return
        pod, peer = found
        if pod in self._members:
            peer.connection.close()
            self._lost = "a pod has been started again"
        # One that no allowed number of pods has a place for waits.
        elif (self._largest(len({*self._peers, pod}) + 1) or 0) <= len(self._members):
            self._peers[pod] = peer
        else:
            peer.connection.close()
            self._end_orderly(f"pod {pod} joins")

    def have_stopped(self, seconds: float) -> bool:
        """Whether all pods have stopped as the run was asked to, once the processes of this one have.

        Processes stop all together, also where only one pod is being ended: then the run has to continue.
        """
        self._notify({"stopped": True})
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.lost():
            others = set(self._members) - {self.pod}
            # The first pod decides, once all have reported.
            if self.pod == 0 and others <= self._stopped | self._done:
                self._notify({"code": 0})
                return True
            if self.pod != 0 and 0 in self._done:
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _readable(self, seconds: float = 0) -> list[tuple[int, _Line]]:
        if not self._peers:
            return []
        # What has been read together with an earlier value makes no connection readable.
        if found := [(pod, peer) for pod, peer in self._peers.items() if peer.has_more]:
            return found
        with selectors.DefaultSelector() as selector:
            for pod, peer in self._peers.items():
                selector.register(peer.connection, selectors.EVENT_READ, pod)
            return [(key.data, self._peers[key.data]) for key, _ in selector.select(seconds)]

    def await_others(self, seconds: float) -> None:
        """Wait until the others have ended, in order or not: the first pod's success is that of the job."""
        deadline = time.monotonic() + seconds
        while set(self._peers) & set(self._members) and time.monotonic() < deadline and not self.lost():
            time.sleep(_POLL_SECONDS)

    def close(self, code: int) -> None:
        """Report to the others how this pod has ended, and leave."""
        for peer in self._peers.values():
            with suppress(OSError):
                peer.send({"code": code})
            peer.connection.close()
        if self._listener is not None:
            self._listener.close()
