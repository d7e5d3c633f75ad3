"""The causes of failures: recognised from what torch, the system and scripts really print."""

from __future__ import annotations

import errno

import pytest

from sm_llm.contract.failure import Cause, Failure, cause_in, cause_of, last_error_line, message_of
from sm_llm.errors import CheckpointError, DataError, RunFailed, StorageError


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", Cause.DEVICE_MEMORY),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", Cause.HOST_MEMORY),
        ("OSError: [Errno 28] No space left on device: '/x'", Cause.DISK_FULL),
        ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", Cause.DISK_FULL),
        ("OSError: [Errno 122] Disk quota exceeded", Cause.DISK_FULL),
        (
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)",
            Cause.COLLECTIVE_TIMEOUT,
        ),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation to complete", Cause.COLLECTIVE_TIMEOUT),
        ("step 7: the loss or a gradient is not finite", Cause.NOT_FINITE),
        ("ImportError: libnccl.so.2: undefined symbol: ncclCommSplit", Cause.LIBRARY),
        ("OSError: libcudart.so.12: cannot open shared object file", Cause.LIBRARY),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1", Cause.LOST_PEER),
        ("torch.distributed.DistBackendError: NCCL error: ncclRemoteError: remote process exited", Cause.LOST_PEER),
        ("ValueError: something else", Cause.OTHER),
    ],
)
def test_causes_are_recognised(text: str, cause: Cause) -> None:
    assert cause_in(text) is cause


def raised(error: Exception, source: BaseException | None = None) -> Exception:
    try:
        raise error from source
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError(), Cause.HOST_MEMORY),
        (OSError(errno.ENOSPC, "No space left on device"), Cause.DISK_FULL),
        (raised(CheckpointError("not written"), OSError(errno.ENOSPC, "No space left on device")), Cause.DISK_FULL),
        (DataError("rows.jsonl line 3: no text"), Cause.DATA),
        (raised(RuntimeError("worker"), DataError("rows.jsonl line 3: no text")), Cause.DATA),
        (StorageError("cannot be read"), Cause.OTHER),
    ],
)
def test_an_exception_is_judged_by_all_it_was_raised_from(error: Exception, cause: Cause) -> None:
    assert cause_of(error) is cause


def test_a_message_is_one_line_and_names_types_that_do_not_explain_themselves() -> None:
    assert message_of(ValueError("a\n  b")) == "ValueError: a b"
    assert message_of(RunFailed("world size\nis wrong")) == "world size is wrong"
    assert message_of(KeyError()) == "KeyError:"
    assert len(message_of(ValueError("x" * 5000))) == 600


@pytest.mark.parametrize("cause", Cause)
def test_the_text_of_a_failure_is_read_back(cause: Cause) -> None:
    failure = Failure(
        cause, "torch.X: went wrong", 3, 1, "host", 12, "Traceback (most recent call last):\n  File x\nX\n"
    )
    read = Failure.from_text(failure.to_text())
    assert (read.rank, read.headline) == (3, failure.headline)
    assert read.cause is cause
    assert Failure.from_json(failure.to_json()) == failure


def test_a_cause_is_not_reported_twice() -> None:
    assert Failure(Cause.STALLED, "stalled after step 4: x").headline == "stalled after step 4: x"
    assert Failure(Cause.DATA, "rows.jsonl line 3").headline == "data error: rows.jsonl line 3"


def test_a_scripts_own_words_stay() -> None:
    failure = Failure.from_text("my own reason\nin two lines\n")
    assert (failure.rank, failure.headline) == (None, "my own reason in two lines")


@pytest.mark.parametrize("frame", ["Framework Error: ", "ExecuteUserScriptError:"])
def test_LM04_what_the_toolkit_puts_in_front_of_a_traceback_is_not_a_reason(frame: str) -> None:
    reported = f"{frame}\nTraceback (most recent call last):\n  File x\nFileNotFoundError: no such file\n\nno such file"
    assert Failure.from_text(reported).message == "FileNotFoundError: no such file"


def test_OB09_the_last_exception_line_comes_with_the_rank_in_front_of_it() -> None:
    lines = [
        "[rank5]: Traceback (most recent call last):",
        "[rank5]: ValueError: bad row",
        "[rank 2] torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "rank      : 5 (local_rank: 1)",
    ]
    assert last_error_line(lines) == ("ValueError: bad row", 5)
    assert last_error_line(["ValueError: plain"]) == ("ValueError: plain", None)
    assert last_error_line(["all is well"]) is None
