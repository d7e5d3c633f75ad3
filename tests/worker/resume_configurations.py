"""Runs that are broken, poisoned, tampered with or changed, and continued: part of ``run_configurations``."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from worker_jobs import MODEL, train_task

from sm_llm.storage.folder import FolderStore
from sm_llm.storage.publication import publish as publication
from sm_llm.storage.publication.find import commit_keys
from sm_llm.storage.publication.manifest import CommitManifest, decode, encode
from sm_llm.worker import main as main_module
from sm_llm.worker.checkpoint import start_resolver as start_module
from sm_llm.worker.strategies import passes
from sm_llm.worker.tasks import train as train_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OTHER_JOBS: dict[str, dict[str, Any]] = {
    "layers": {"model": {"preset": "tiny", "config": {**MODEL, "num_hidden_layers": 1}}},
    "heads": {"model": {"preset": "tiny", "config": {**MODEL, "num_attention_heads": 2}}},
    "shuffle": {"data": {"shuffle": False}},
}
"""What a checkpoint cannot be continued by."""
TAMPERINGS = ("truncated", "missing", "altered", "swapped")


@contextmanager
def poison(steps: dict[int, str], times: int = 1000) -> Iterator[None]:
    """On the last rank, make the ``loss`` or its ``gradient`` infinite at these steps, so many times each."""
    original_step, original_loss = train_module.Trainer.take_step, passes.forward_loss
    current, done = [0], dict.fromkeys(steps, 0)

    def take_step(training: Any, step: int, batches: Any) -> None:
        current[0] = step
        original_step(training, step, batches)

    def forward_loss(*arguments: Any) -> Any:
        loss = original_loss(*arguments)
        step = current[0]
        if step not in steps or done[step] >= times or dist.get_rank() != dist.get_world_size() - 1:
            return loss
        done[step] += 1
        if steps[step] == "loss":
            return loss + float("inf")  # with finite gradients
        loss = loss.clone()
        loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    train_module.Trainer.take_step, passes.forward_loss = take_step, forward_loss  # type: ignore[method-assign]
    try:
        yield
    finally:
        train_module.Trainer.take_step = original_step  # type: ignore[method-assign]
        passes.forward_loss = original_loss


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def copy_of_half(harness: Any, location: str, change: Callable[[Path], None] = lambda run: None) -> str:
    """The run that stopped before step 7, with checkpoints 3 and 6, once more (a run keeps its name)."""
    name = f"{location}/half"
    if dist.get_rank() == 0:
        shutil.copytree(harness.folder / "half", harness.folder / name)
        change(harness.folder / name)
    dist.barrier()
    return name


def data_files(run: Path, step: int) -> list[Path]:
    """The tensors of one checkpoint."""
    commit = json.loads((run / "ckpt" / "commits" / f"step-{step:08d}.json").read_text())
    return sorted((run / "ckpt" / f"step-{step:08d}" / commit["save"]["save_id"]).rglob("*.distcp"))


def tamper(run: Path, step: int, how: str) -> None:
    """Break one file of the checkpoint of ``step``."""
    file = data_files(run, step)[-1]
    body = bytearray(file.read_bytes())
    if how == "truncated":
        file.write_bytes(body[:-1])
    elif how == "missing":
        file.unlink()
    elif how == "altered":
        body[len(body) // 2] ^= 1
        file.write_bytes(body)
    else:  # another checkpoint's file of the same name and size
        shutil.copy(data_files(run, 3 if step == 6 else 6)[-1], file)


def forget_identity(run: Path) -> None:
    """Make the checkpoints of a run those of an earlier release, which recorded no identity."""
    store = FolderStore(run)
    for _, key in commit_keys(store):
        body = store.get(key)
        assert body is not None
        commit = decode(body, CommitManifest)
        meta = {name: it for name, it in commit.meta.items() if name != "identity"}
        (run / key).write_bytes(encode(commit.model_copy(update={"meta": meta})))


def of_world(harness: Any) -> None:
    """What the world size of ``harness`` runs."""
    three_legs(harness)
    {1: one, 2: two}.get(harness.world, lambda _: None)(harness)


def three_legs(harness: Any) -> None:
    verified = train_task(checkpoint={"every_steps": 3, "verify_state": True})
    harness.run("legs", verified, break_at=5)  # mid-epoch: an epoch has 6 steps
    harness.run("legs", verified, attempt=2, break_at=10)
    harness.run("legs", verified, attempt=3)


def one(harness: Any) -> None:
    """On a single process: what happens to files and to requests."""

    def tampered(run: Path, how: str) -> None:
        tamper(run, 6, how)
        # The node's own copy is as it was: a restart that finds it reads nothing of what was altered.
        shutil.rmtree(run / "copies")

    for how in TAMPERINGS:
        harness.run(copy_of_half(harness, how, lambda run, how=how: tampered(run, how)), train_task(), attempt=2)

    def ruin(run: Path) -> None:
        tamper(run, 6, "missing")
        tamper(run, 3, "altered")

    harness.run(copy_of_half(harness, "ruined", ruin), train_task(), attempt=2, fails=True)
    harness.run("ruined/half", train_task(start="scratch"), attempt=3)
    harness.run(copy_of_half(harness, "wanted-3"), train_task(), attempt=2, resume=3)
    harness.run(copy_of_half(harness, "wanted-4"), train_task(), attempt=2, resume=4, fails=True)
    harness.run("wanted-none", train_task(), resume="newest", fails=True)
    if dist.get_rank() == 0:
        shutil.copytree(harness.folder / "half", harness.folder / "stranger", ignore=shutil.ignore_patterns("events"))
    harness.run("stranger", train_task(), attempt=2)
    emptied = copy_of_half(harness, "emptied", lambda run: shutil.rmtree(run / "ckpt"))
    harness.run(emptied, train_task(), attempt=2, fails=True)
    harness.run(emptied, train_task(start="scratch"), attempt=3)
    requests(harness)


def requests(harness: Any) -> None:
    longer: dict[str, Any] = {"max_steps": 13}
    harness.run(copy_of_half(harness, "longer"), train_task(**longer), attempt=2, fails=True)
    harness.run(copy_of_half(harness, "kept"), train_task(**longer, optim={"schedule_steps": 10}), attempt=2)
    harness.run(copy_of_half(harness, "new"), train_task(**longer, optim={"schedule_steps": 13}), attempt=2)
    harness.run(copy_of_half(harness, "batch"), train_task(global_batch_size=4), attempt=2, fails=True)
    for name, change in OTHER_JOBS.items():
        harness.run(copy_of_half(harness, name), train_task(**change), attempt=2, fails=True)
    if dist.get_rank() == 0:
        forget_identity(harness.folder / copy_of_half(harness, "old"))
    dist.barrier()
    harness.run("old/half", train_task(), attempt=2)
    pipeline(harness)
    half = {"checkpoint": str(harness.folder / "half")}
    harness.run("branch-refused", train_task(seed=5, start=half), fails=True)
    harness.run("branch", train_task(seed=5, start={**half, "allow_other_data": True}))
    harness.run(
        "branch-model", train_task(start={**half, "allow_other_data": True}, **OTHER_JOBS["layers"]), fails=True
    )
    verified = train_task(checkpoint={"every_steps": 3, "verify_state": True})
    harness.run("doubted", verified, break_at=5)
    with replaced(start_module, "state_hash", lambda *_: "another"):
        harness.run("doubted", verified, attempt=2, fails=True)


def pipeline(harness: Any) -> None:
    """Jobs of a pipeline, which no launcher starts, one after the other in the same run."""
    with replaced(main_module, "keep_record", lambda context, _: setattr(context, "replaced_job", "us/pipelines-1")):
        harness.run(copy_of_half(harness, "retried"), train_task(), attempt=2)
        harness.run(copy_of_half(harness, "reseeded"), train_task(seed=3), attempt=2)
        harness.run("reseeded/half", train_task(seed=3), attempt=3)


def two(harness: Any) -> None:
    """On two processes: only one of them sees what is wrong."""
    with poison({5: "gradient"}):
        harness.run("nan-stop", train_task(), fails=True)
    harness.run("nan-stop", train_task(), attempt=2)
    skip = train_task(not_finite={"policy": "skip", "limit": 3})
    with poison({5: "loss", 8: "gradient"}):
        harness.run("nan-skip", skip)
        harness.run("nan-skip-broken", skip, break_at=7)
        harness.run("nan-skip-broken", skip, attempt=2)
    with poison({5: "loss", 6: "gradient", 7: "loss"}):
        harness.run("nan-limit", skip, fails=True)
    rollback = train_task(not_finite={"policy": "rollback"}, checkpoint={"every_steps": 3, "verify_state": True})
    with poison({8: "gradient"}, times=1):
        harness.run("nan-back", rollback)
    with poison({8: "gradient"}):
        harness.run("nan-back-again", rollback)
        harness.run("nan-8", skip)
    with poison({2: "loss"}):
        harness.run("nan-nowhere", rollback, fails=True)
    restore = publication.restore

    def find(*arguments: Any, **options: Any) -> Any:
        """As restored, but not to be seen by all: each process takes part in what they decide together."""
        found = restore(*arguments, **options)
        return None if dist.get_rank() else found

    with replaced(start_module.publication, "restore", find):
        harness.run(copy_of_half(harness, "torn"), train_task(), attempt=2, fails=True)
