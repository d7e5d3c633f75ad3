"""The transfer agent: the same results from another process, which may crash, be stopped or lose its owner."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from worker_jobs import search_path

from sm_llm.errors import CheckpointError, StorageError
from sm_llm.storage.publication.publish import commit, fetch, new_save, upload_part, write_part
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store
from sm_llm.storage.uri import open_store
from sm_llm.worker.transfer import agent_process
from sm_llm.worker.transfer.agent_process import NICENESS
from sm_llm.worker.transfer.transfer_agent import TransferAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration

MIB = 1 << 20


def await_true(true: Callable[[], object], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def agent() -> Iterator[TransferAgent]:
    agent = TransferAgent()
    yield agent
    agent.end()


@pytest.fixture
def store(bucket: str, fault_proxy: Any) -> S3Store:
    return S3Store(bucket, "run", S3Options(endpoint_url=fault_proxy.endpoint))


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """One file of three parts and a small one."""
    folder = tmp_path / "sealed"
    folder.mkdir()
    (folder / "large").write_bytes(os.urandom(20 * MIB))
    (folder / "small").write_bytes(b"small")
    return folder


def save() -> Any:
    return new_save("run", 1, world_size=1, node_count=1)


def open_uploads(s3_server: Any, bucket: str) -> list[Any]:
    found: list[Any] = s3_server.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    return found


def test_a_call_runs_in_a_process_of_low_priority_and_returns_or_raises_the_same(
    agent: TransferAgent, store: S3Store, sealed: Path, tmp_path: Path
) -> None:
    moved: list[int] = []
    ours = save()
    part = agent.call(upload_part, store, ours, sealed, 0, progress=moved.append)
    assert [it.path for it in part.files] == ["large", "small"]
    assert sum(moved) == 20 * MIB + 5
    assert agent.pid not in (None, os.getpid())
    assert agent.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, agent.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    write_part(store, part)
    found = commit(store, ours).commit
    assert found is not None
    agent.call(fetch, store, found, tmp_path / "out")
    assert (tmp_path / "out" / "large").read_bytes() == (sealed / "large").read_bytes()
    store.delete([f"{ours.data_prefix}small"])
    with pytest.raises(CheckpointError, match="small"):
        agent.call(fetch, store, found, tmp_path / "again")


def test_a_folder_needs_no_agent(agent: TransferAgent, sealed: Path, tmp_path: Path) -> None:
    agent.call(upload_part, open_store(tmp_path / "run"), save(), sealed, 0)
    assert agent.pid is None


def test_an_agent_that_crashes_is_started_again_once(
    agent: TransferAgent, store: S3Store, sealed: Path, fault_proxy: Any, rule: Any
) -> None:
    fault_proxy.set(rule("PUT .*/data/small", "hold"))
    kill_when_busy(agent, lambda: fault_proxy.count("PUT .*/data/small"))
    assert len(agent.call(upload_part, store, save(), sealed, 0).files) == 2
    fault_proxy.set(rule("PUT .*/data/small", "hold", count=2))
    kill_when_busy(agent, lambda: fault_proxy.count("PUT .*/data/small"), times=2)
    with pytest.raises(StorageError, match="ended twice with exit code -9"):
        agent.call(upload_part, store, save(), sealed, 0)
    fault_proxy.set()
    assert len(agent.call(upload_part, store, save(), sealed, 0).files) == 2


def kill_when_busy(agent: TransferAgent, requests: Callable[[], int], times: int = 1) -> None:
    def kill() -> None:
        killed = None
        for number in range(times):
            await_true(lambda number=number, killed=killed: requests() > number and agent.pid not in (None, killed))
            killed = agent.pid
            assert killed is not None
            os.kill(killed, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def test_I10_an_agent_that_is_reported_to_end_aborts_its_upload(
    agent: TransferAgent, store: S3Store, sealed: Path, fault_proxy: Any, rule: Any, s3_server: Any, bucket: str
) -> None:
    fault_proxy.set(rule("PUT .*partNumber=2", "hold", count=9))

    def end() -> None:
        await_true(lambda: fault_proxy.count("PUT .*partNumber=2"))
        agent.end()

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(StorageError, match="asked to end"):
        agent.call(upload_part, store, save(), sealed, 0)
    await_true(lambda: agent.pid is None or agent._process is None or agent._process.poll() is not None)
    assert open_uploads(s3_server, bucket) == []


def test_an_end_in_the_moment_of_a_start_finds_the_process(
    agent: TransferAgent, store: S3Store, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, ends = agent._start, threading.Thread(target=agent.end)

    def interrupted() -> Any:
        ends.start()
        await_true(lambda: agent._ended)
        return start()

    monkeypatch.setattr(agent, "_start", interrupted)
    with pytest.raises(StorageError, match="asked to end"):
        agent.call(upload_part, store, save(), sealed, 0)
    ends.join(120)
    assert not ends.is_alive()


OWNER = """
import signal
import sys
from pathlib import Path
from sm_llm.storage.publication.publish import new_save, upload_part
from sm_llm.storage.s3_store import S3Store
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.worker.transfer import agent_process
from sm_llm.worker.transfer.transfer_agent import TransferAgent
bucket, endpoint, sealed = sys.argv[1:]
agent_process.working_seconds = lambda grace: 0.5
agent_process.abort_seconds = lambda grace: 120.0
store = S3Store(bucket, "run", S3Options(endpoint_url=endpoint))
agent = TransferAgent()
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
agent.is_stopping = lambda: bool(signals)
start = agent._start
agent._start = lambda: (start(), print(agent.pid, flush=True))[0]
try:
    agent.call(upload_part, store, new_save("run", 1, world_size=1, node_count=1), Path(sealed), 0)
except Exception as error:
    print(error)
"""
"""What is left of the grace time is generous: how fast an upload is broken off depends on the machine."""


@pytest.fixture
def uploading(store: S3Store, sealed: Path, fault_proxy: Any, rule: Any) -> Iterator[tuple[Any, int]]:
    """A process in a session of its own, and its agent, which is kept inside an upload of several parts."""
    fault_proxy.set(rule("PUT .*partNumber=2", "hold", count=9))
    argv = [sys.executable, "-c", OWNER, store.bucket, store.options.endpoint_url or "", str(sealed)]
    environ = {**os.environ, "PYTHONPATH": search_path()}
    owner = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert owner.stdout is not None
    try:
        agent = int(owner.stdout.readline())
        await_true(lambda: fault_proxy.count("PUT .*partNumber=2"))
        yield owner, agent
    finally:
        with suppress(ProcessLookupError):
            os.killpg(owner.pid, signal.SIGKILL)
        owner.communicate()


def ended(agent: int) -> bool:
    return not Path(f"/proc/{agent}/exe").exists()


@pytest.mark.parametrize("how", ["owner-killed", "group-terminated"])
def test_I10_an_agent_outlives_neither_its_owner_nor_the_grace_time_and_leaves_no_parts(
    how: str, uploading: tuple[Any, int], fault_proxy: Any, s3_server: Any, bucket: str
) -> None:
    owner, agent = uploading
    assert open_uploads(s3_server, bucket)
    if how == "owner-killed":
        owner.kill()
    else:
        os.killpg(owner.pid, signal.SIGTERM)
    await_true(lambda: ended(agent))
    output = owner.stdout.read()
    assert open_uploads(s3_server, bucket) == []
    assert fault_proxy.count("POST .*uploads") == 1, "no other agent began the upload again"
    if how == "group-terminated":
        assert "the transfer agent is gone: it was asked to end" in output


def test_I10_parts_that_a_SIGKILL_left_go_with_the_next_start(
    uploading: tuple[Any, int], store: S3Store, fault_proxy: Any, s3_server: Any, bucket: str
) -> None:
    from sm_llm.worker.checkpoint.start_resolver import StartResolver
    from sm_llm.worker.process_info import ProcessInfo

    owner, agent = uploading
    os.killpg(owner.pid, signal.SIGKILL)
    await_true(lambda: ended(agent))
    fault_proxy.set()
    assert len(open_uploads(s3_server, bucket)) == 1, "nobody was left to abort it"
    notices: list[str] = []
    context: Any = SimpleNamespace(process=ProcessInfo(), notice=lambda *reported: notices.append(str(reported)))
    StartResolver(context, cast("Any", None), store, cast("Any", None), cast("Any", None))._abort_stale_uploads()
    assert (open_uploads(s3_server, bucket), notices) == ([], [])


def test_an_agent_without_an_owner_ends_though_its_signal_came_before_it_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(agent_process.os, "kill", lambda _, number: sent.append(number))
    ours, theirs = Pipe()
    requests: queue.SimpleQueue[object] = queue.SimpleQueue()
    ours.send(("function", (), {}))
    ours.close()
    agent_process._listen(theirs, requests)
    assert sent == [signal.SIGALRM]
    assert list(iter(requests.get_nowait, None)) == [("function", (), {})], "None ends the main thread's loop"


def test_an_agent_that_ends_by_SIGTERM_is_replaced_if_its_owner_continues(
    agent: TransferAgent, store: S3Store, sealed: Path, fault_proxy: Any, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "working_seconds", lambda grace: 0.1)
    fault_proxy.set(rule("PUT .*/data/small", "hold"))
    ended: list[int | None] = []

    def terminate() -> None:
        await_true(lambda: fault_proxy.count("PUT .*/data/small"))
        ended.append(agent.pid)
        os.kill(agent.pid or 0, signal.SIGTERM)

    threading.Thread(target=terminate, daemon=True).start()
    assert len(agent.call(upload_part, store, save(), sealed, 0).files) == 2
    assert ended != [agent.pid]


def test_credentials_are_those_of_the_environment_when_it_starts(
    agent: TransferAgent, store: S3Store, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageError, match=r"SignatureDoesNotMatch|access denied"):
        agent.call(upload_part, store, save(), sealed, 0)
