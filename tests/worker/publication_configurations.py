"""Saves and restores on two processes, against S3 through a proxy; ``torchrun … FOLDER ENDPOINT BUCKET [NAME …]``.

Every process runs every configuration in turn. Rank 0 spoils requests and writes results.json.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).parent))

from worker_jobs import events, job_environment, job_file, train_task

from sm_llm.errors import CheckpointError, StorageError
from sm_llm.spec.training import CheckpointSpec
from sm_llm.storage.publication import publish as publication
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store
from sm_llm.worker.checkpoint import save_writer, staging
from sm_llm.worker.checkpoint.checkpoint import Checkpointer
from sm_llm.worker.checkpoint.checkpoint_restore import Fetcher
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.device import CpuDevice
from sm_llm.worker.process_info import ProcessInfo
from sm_llm.worker.publishing import publisher
from sm_llm.worker.runtime.collectives import ControlGroup
from sm_llm.worker.transfer import agent_process
from sm_llm.worker.transfer.local_copies import LocalCopies
from tests.fixtures.fault_proxy import FaultProxy, Rule, running_proxy

DATA = "(PUT|POST) .*/data/"
FAST = {"retries": {"mode": "standard", "total_max_attempts": 2}, "read_timeout": 8, "connect_timeout": 2}


class Bench:
    """One run in S3, seen from this process; two processes are two nodes, or one (``nodes=1``)."""

    def __init__(
        self, root: Root, name: str, *, nodes: int = 2, attempt: int = 1, size: int = 1000, **spec: Any
    ) -> None:
        self.root, self.name, self.attempt = root, name, attempt
        run = root.folder / name
        dist.barrier()
        environ = job_environment(job_file(train_task(), run, root.world, attempt))
        dist.barrier()
        context = WorkerContext.read(environ)
        local = context.process.rank if nodes == 1 else 0
        self.process = ProcessInfo(
            rank=context.process.rank,
            world_size=root.world,
            local_rank=local,
            local_world_size=root.world // nodes,
            node=0 if nodes == 1 else context.process.rank,
            node_count=nodes,
        )
        container = replace(context.container, base=context.container.base.with_name(f"node-{self.process.node}"))
        self.context = replace(context, process=self.process, container=container)
        self.store = S3Store(root.bucket, name, S3Options(endpoint_url=root.endpoint), FAST)
        self.spec = CheckpointSpec(**spec)
        self.checkpointer = Checkpointer(self.context, self.store, self.spec, root.control, CpuDevice())
        local_part = torch.arange(size, dtype=torch.float32) + 1000 * context.process.rank
        self.state = {"w": DTensor.from_local(local_part, root.mesh, [Shard(0)]), "count": torch.zeros(3)}
        self.blocked: list[float] = []
        self.most_folders = 0

    def save(self, step: int, **how: Any) -> None:
        self.state["count"].fill_(step)
        self.blocked.append(self.checkpointer.save(step, self.state, {"random": step}, {"job": {}}, **how))
        self.most_folders = max(self.most_folders, len(self.folders()))

    def folders(self) -> list[str]:
        saving = self.context.copies.saving
        return [path.name for path in saving.iterdir()] if saving.is_dir() else []

    def written(self) -> None:
        """Wait until the newest save is on disk."""
        self.checkpointer._writes[-1].result(30)

    def restore(self, _: str = "") -> tuple[int | None, list[str]]:
        """The step that is restored, and the files this node then has."""
        restored = publication.restore(
            self.store,
            self.context.copies.folder,
            run_id=self.name,
            leader=self.process.is_leader,
            fetches=self.process.is_node_leader,
            gather=self.root.control.gather,
            bring=Fetcher(self.context, self.store),
        )
        if restored is None:
            return None, []
        return restored.commit.step, sorted(path.name for path in restored.folder.iterdir())

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events(self.root.folder / self.name, kind)

    def close(self) -> None:
        self.checkpointer.__exit__(None)
        self.context.close()

    def note(self, **facts: Any) -> None:
        """What this process saw, for the tests."""
        found = {"blocked": max(self.blocked, default=0.0), "most_folders": self.most_folders, **facts}
        gathered = self.root.control.gather(found)
        if self.process.is_leader:
            reported = {kind: self.events(kind) for kind in ("checkpoint_published", "publication_late", "notice")}
            kept = [(it.step, it.valid) for it in publication.list_checkpoints(self.store)]
            self.root.results[self.name] = {"ranks": gathered, "events": reported, "checkpoints": kept}


class Root:
    """What the configurations share."""

    def __init__(self, folder: Path, bucket: str, proxy: FaultProxy | None) -> None:
        self.folder, self.bucket, self.proxy = folder, bucket, proxy
        self.world = dist.get_world_size()
        self.control = ControlGroup()
        self.endpoint: str = self.control.broadcast(proxy.endpoint if proxy else "")
        self.mesh = init_device_mesh("cpu", (self.world,))
        self.results: dict[str, Any] = {}

    def spoil(self, *rules: Rule) -> None:
        """All processes: from here on these requests go wrong, and are counted anew."""
        dist.barrier()
        if self.proxy:
            self.proxy.set(*rules)
        dist.barrier()

    def count(self, match: str) -> int:
        dist.barrier()
        return self.control.broadcast(self.proxy.count(match) if self.proxy else 0)

    def until(self, match: str, count: int = 1) -> None:
        while self.count(match) < count:
            time.sleep(0.05)


def plain(root: Root) -> None:
    bench = Bench(root, "plain")
    for step in (1, 2, 3):
        bench.save(step)
        bench.checkpointer.finish()
    bench.close()
    bench.note(left=bench.folders(), agent=bench.context.agent.pid)


def slow(root: Root) -> None:
    """The store hangs in the first publication; four saves come meanwhile."""
    bench = Bench(root, "slow", keep_last=9)
    root.spoil(Rule(DATA, "hold", count=2))
    for step in range(1, 6):
        bench.save(step)
        bench.written()
        if step == 1:
            root.until(DATA)
    meanwhile = len(bench.events("checkpoint_published"))
    root.spoil()
    bench.checkpointer.finish()
    bench.close()
    bench.note(left=bench.folders(), meanwhile=meanwhile)


def overlapping(root: Root) -> None:
    """A disk that takes nothing while saves come: with memory for two copies, for one, and where a write fails."""
    disk, written = threading.Event(), save_writer.ShardWriter.write_data

    def write_data(writer: Any, plan: Any, planner: Any) -> Any:
        disk.wait(60)
        if planner.state_dict["count"][0] == 7:
            raise OSError(errno.EIO, "the disk is broken")
        return written(writer, plan, planner)

    save_writer.ShardWriter.write_data = write_data  # type: ignore[method-assign]
    facts: dict[str, Any] = {}
    memory = staging.available_memory
    for name, free in (("two", memory), ("one", lambda: 0)):
        staging.available_memory = free
        bench = Bench(root, f"overlapping-{name}", keep_last=9, max_blocking_seconds=0.5)
        disk.clear()
        for step in (1, 2, 3):
            bench.save(step)
        disk.set()
        bench.checkpointer.finish()
        bench.save(4)
        bench.checkpointer.finish()
        bench.close()
        facts[name] = {"blocked": bench.blocked, "notices": [it["message"] for it in bench.events("notice")]}
        bench.note(left=bench.folders())
    staging.available_memory = memory
    for name in ("disk", "process"):
        facts[f"error_{name}"] = _failed(root, disk, f"overlapping-{name}", alone=name == "process")
    save_writer.ShardWriter.write_data = written  # type: ignore[method-assign]
    bench = Bench(root, "overlapping")
    bench.save(1)
    bench.close()
    bench.note(**facts)


def _failed(root: Root, disk: threading.Event, name: str, *, alone: bool) -> str:
    """Two saves, the first of which fails on all processes (step 7), or in one of them ``alone``."""
    bench = Bench(root, name, keep_last=9)
    make_room = LocalCopies.make_room

    def fail_once(copies: LocalCopies) -> None:
        LocalCopies.make_room = make_room  # type: ignore[method-assign]
        disk.wait(60)
        raise OSError(errno.EIO, "one process cannot write")

    if alone and bench.process.is_leader:
        LocalCopies.make_room = fail_once  # type: ignore[method-assign]
    disk.clear()
    error = ""
    for step in (8, 9) if alone else (7, 8):
        bench.save(step)
    disk.set()
    try:
        bench.checkpointer.finish()
    except CheckpointError as raised:
        error = str(raised)
        bench.checkpointer.__exit__(CheckpointError)
    bench.context.close()
    bench.note()
    return error


def outage(root: Root) -> None:
    """The store accepts nothing for a while, then does."""
    publisher.FIRST_PAUSE_SECONDS = 0.3
    bench = Bench(root, "outage", keep_last=9)
    bench.save(1)
    bench.checkpointer.finish()
    root.spoil(Rule(DATA, "expired", count=10**6))
    for step in (2, 3, 4):
        bench.save(step)
        bench.written()
        root.until(DATA, step)
    while not root.control.broadcast(bool(bench.events("publication_late"))):
        time.sleep(0.05)
    alarm = bench.checkpointer.alarm
    root.spoil()
    bench.checkpointer.finish()
    bench.close()
    bench.note(alarm=alarm, alarm_after=bench.checkpointer.alarm, left=bench.folders())


def unpublished(root: Root) -> None:
    """The store accepts nothing for longer than is allowed."""
    publisher.FIRST_PAUSE_SECONDS = 0.3
    bench = Bench(root, "unpublished", max_unpublished_seconds=1.0)
    root.spoil(Rule(DATA, "expired", count=10**6))
    error, step = "", 0
    while not error and step < 1500:  # minutes, on a busy machine
        step += 1
        try:
            bench.save(step)
        except StorageError as caught:
            error = str(caught)
        time.sleep(0.1)
    root.spoil()
    bench.checkpointer.__exit__(StorageError)
    bench.context.close()
    bench.note(error=error)


def killed_agent(root: Root) -> None:
    """Node 1's agent is killed while it uploads."""
    bench = Bench(root, "killed_agent")
    root.spoil(Rule(DATA, "hold", count=2))
    bench.save(1)
    root.until(DATA)
    if root.control.rank == 1:
        while bench.context.agent.pid is None:
            time.sleep(0.01)
        os.kill(bench.context.agent.pid, signal.SIGKILL)
    root.spoil()
    bench.checkpointer.finish()
    bench.close()
    bench.note()


def hurried(root: Root) -> None:
    """A stop while uploads of several parts hang: they are broken off."""
    bench = Bench(root, "hurried", size=5 << 20)
    root.spoil(Rule("PUT .*partNumber=2", "hold", count=10**6))
    bench.save(1)
    for node in range(2):
        root.until(f"PUT .*/__{node}_.*partNumber=2")
    bench.checkpointer.hurry(0.5)
    done = bench.checkpointer.finish()
    bench.checkpointer.__exit__(KeyboardInterrupt)
    bench.context.close()
    root.spoil()
    uploads = bench.store.client.list_multipart_uploads(Bucket=root.bucket).get("Uploads", [])
    bench.note(done=done, uploads=[it["Key"] for it in uploads])


def zombie(root: Root) -> None:
    """While an attempt's commit hangs, another save of the same step is committed."""
    bench = Bench(root, "zombie")
    root.spoil(Rule("PUT .*/commits/step-00000005", "hold"))
    bench.save(5)
    root.until("PUT .*/commits/step-00000005")
    other = publication.new_save("zombie", 5, world_size=1, node_count=1)
    if bench.process.is_leader:
        sealed = root.folder / "other"
        sealed.mkdir()
        (sealed / "x").write_text("x")
        publication.write_part(bench.store, publication.upload_part(bench.store, other, sealed, 0))
        assert publication.commit(bench.store, other).won
    root.spoil()
    bench.checkpointer.finish()
    bench.close()
    saves = {it.key.split("/")[2] for it in bench.store.list("ckpt/step-00000005/")}
    bench.note(saves=sorted(saves), other=root.control.broadcast(other.save_id))


def restored(root: Root) -> None:
    """Two nodes save; two nodes, one, and two again restore."""
    bench = Bench(root, "restored")
    bench.save(7)
    bench.checkpointer.finish()
    bench.close()
    root.spoil()
    facts: dict[str, Any] = {}
    for name, nodes, attempt in (("kept", 2, 2), ("same", 2, 3), ("warm", 2, 3), ("merged", 1, 4)):
        again = Bench(root, "restored", nodes=nodes, attempt=attempt)
        if name == "same":  # another node in its place
            again.context.copies.forget()
        root.control.barrier()
        root.spoil()
        step, files = again.restore()
        facts[name] = (step, files, root.count("GET .*/data/.*distcp"), root.count("GET .*/data/"))
        again.close()
    bench.note(**facts)


def split(root: Root) -> None:
    """One node saves, two restore; a bit turns on the way to one of them."""
    bench = Bench(root, "split", nodes=1)
    bench.save(3)
    bench.checkpointer.finish()
    bench.close()
    again = Bench(root, "split", attempt=2)
    again.context.copies.forget()  # two other nodes
    root.control.barrier()
    root.spoil(Rule("GET .*distcp", "flip"))
    step, files = again.restore()
    count = root.count("GET .*distcp")
    again.close()
    bench.note(step=step, files=files, gets=count)


def storm(root: Root) -> None:
    """503 to everything, until two publications have failed."""
    publisher.FIRST_PAUSE_SECONDS = 0.3
    bench = Bench(root, "storm", keep_last=9)
    bench.save(1)
    bench.checkpointer.finish()
    root.spoil(Rule("(GET|PUT|POST|HEAD|DELETE) ", "503", count=10**9))
    step = 1
    while root.control.broadcast(len(bench.events("publication_late"))) < 2:
        step += 1
        bench.save(step)
        bench.written()
        time.sleep(0.2)
    root.spoil()
    bench.save(step + 1, required=True, waits=True)
    bench.close()
    bench.note(last=step + 1)


CONFIGURATIONS = (plain, slow, overlapping, outage, unpublished, killed_agent, hurried, zombie, restored, split, storm)


def run_all(folder: Path, endpoint: str, bucket: str, names: list[str]) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    agent_process.ABORT_SECONDS = 120.0  # how fast uploads are broken off depends on the machine
    with running_proxy(endpoint, folder / f"requests-{dist.get_rank()}.log") as proxy:
        root = Root(folder, bucket, proxy if dist.get_rank() == 0 else None)
        for configuration in [globals()[name] for name in names] or CONFIGURATIONS:
            began = time.monotonic()
            configuration(root)
            root.spoil()
            if root.proxy:
                print(f"{configuration.__name__}: {time.monotonic() - began:.1f} s", flush=True)
        if root.proxy:
            (folder / "results.json").write_text(json.dumps(root.results))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
