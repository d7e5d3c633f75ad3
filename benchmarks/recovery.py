"""Recovery from the loss of a node, and restores from the nodes' own disks, beside the plain ways.

    python benchmarks/recovery.py kills [--kills 10]
    python benchmarks/recovery.py restore [--rate 50e6] [--state 500e6] [--rounds 3]

``kills`` needs root and Debian's Slurm (tests/fixtures/slurm.py). On a cluster of virtual nodes two train a tiny Llama:
with ``sm-llm``, and with sbatch, torchrun and DCP as one would write them (``plain_recovery.py``). A node gets
SIGKILL, and the time until the next completed step is measured with its parts, the same for both, while the processes
of the other are stopped.
``restore`` times what a restart brings of a checkpoint of ``state`` bytes from a SeaweedFS that gives ``rate`` bytes
per second in all: both nodes from the store, both from their own disks, and one that was replaced. Only ratios mean
something: all of it shares one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import sm_llm  # noqa: E402
from sm_llm.runs.events.events import read_events  # noqa: E402
from sm_llm.storage.engines.auto import EngineTransfer  # noqa: E402
from sm_llm.storage.publication import publish as publication  # noqa: E402
from sm_llm.storage.s3.s3_options import S3Options  # noqa: E402
from sm_llm.storage.s3_store import S3Store  # noqa: E402
from sm_llm.worker.transfer.local_copies import LocalCopies  # noqa: E402
from tests.fixtures.s3_server import KEY, SECRET, running_server  # noqa: E402
from tests.fixtures.slurm import SlurmCluster, started_cluster  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.storage.publication.publish import CommitManifest, FileEntry

EVERY = 3
"""Steps between two checkpoints."""
PARTS = ("detection", "requeue", "start", "restore", "first step")
"""From the kill until Slurm queues the job again, starts it, the checkpoint is chosen, it is loaded, a step is done."""
SECONDS = 900.0


class Ours:
    """A training of ours that nobody ends."""

    def __init__(self, folder: Path) -> None:
        (folder / "scratch").mkdir()
        self.run = sm_llm.launch(
            {
                "name": "ours",
                "task": {
                    "kind": "train",
                    "model": {"preset": "tiny", "config": {"vocab_size": 300, "num_hidden_layers": 2}},
                    "data": {"format": "synthetic", "seq_length": 128, "rows": 2_000_000},
                    "max_steps": 900_000,
                    "checkpoint": {"every_steps": EVERY},
                    "validation": {"every_steps": 900_000},
                    "logging": {"every_steps": 1},
                    "watchdog": {"enabled": False},  # a job whose processes are stopped for minutes gives no sign
                },
                "compute": {"instance_count": 2, "processes_per_instance": 1},
                "backend": {
                    "name": "slurm",
                    "shared_folder": str(folder),
                    "virtual_environment": sys.prefix,
                    "scratch_folder": str(folder / "scratch"),
                    "stop_seconds": 3.0,
                    "max_requeues": 1000,
                },
                "storage": str(folder / "runs"),
                "environment": {"OMP_NUM_THREADS": "1"},
            }
        )
        self.job_id = self.run.attempts[-1].native_id.rpartition("/")[2]

    def steps(self) -> list[float]:
        """When each step was completed."""
        return [it["time"] for it in read_events(self.run.events) if it["kind"] == "step"]

    def restore(self, after: float) -> tuple[float, float] | None:
        """When the first restore since ``after`` began and ended; None until a step is completed behind it."""
        for it in read_events(self.run.events):
            if it["kind"] == "recovered" and it["time"] > after:
                restored = it["time"] - it["first_step_seconds"]
                return restored - it["restore_seconds"], restored
        return None


class Plain:
    """The same by hand."""

    def __init__(self, folder: Path, cluster: SlurmCluster) -> None:
        self.log = folder / "steps.jsonl"
        script = folder / "plain.sh"
        script.write_text(
            "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive --requeue --open-mode=append\n"
            f"#SBATCH --output={folder}/log\n"
            "export OMP_NUM_THREADS=1 SLURM_RESTART_COUNT=${SLURM_RESTART_COUNT:-0}\n"
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
            f"srun --kill-on-bad-exit=1 bash -c 'exec {sys.executable} -m torch.distributed.run --nnodes=2 "
            "--nproc-per-node=1 --node-rank=$SLURM_NODEID --rdzv-backend=static "
            "--rdzv-id=$SLURM_JOB_ID-$SLURM_RESTART_COUNT --master-addr=$1 "
            "--master-port=$((30000 + SLURM_JOB_ID % 20000)) "
            f'{Path(__file__).with_name("plain_recovery.py")} {folder} {EVERY}\' step "$head"\n'
        )
        self.job_id = cluster.run("sbatch", "--parsable", str(script)).strip()

    def steps(self) -> list[float]:
        """When each step was completed."""
        return [it["time"] for it in self._lines() if "step" in it]

    def restore(self, after: float) -> tuple[float, float] | None:
        """When the first restore since ``after`` began and ended; None until it has."""
        found = {it["mark"]: it["time"] for it in self._lines() if "mark" in it and it["time"] > after}
        return (found["started"], found["restored"]) if "restored" in found else None

    def _lines(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]


def recovery(cluster: SlurmCluster, way: Ours | Plain, number: int) -> dict[str, float]:
    """Kill one of the job's nodes, in turns the first and the last; seconds of each part until the next step."""
    done = len(way.steps())
    cluster.await_state(lambda: len(way.steps()) >= done + 3 * EVERY, SECONDS)
    node = cluster.nodes_of(way.job_id)[-(number % 2)]
    before = restarts(cluster, way.job_id)
    cluster.kill(node)
    killed = time.time()
    cluster.await_state(lambda: restarts(cluster, way.job_id) > before, SECONDS)
    requeued = time.time()  # nothing of the earlier start is completed from here on
    cluster.await_state(lambda: way.steps()[-1:] > [requeued] and way.restore(requeued) is not None, SECONDS)
    first = next(it for it in way.steps() if it > requeued)
    cluster.start(node)
    restore = way.restore(requeued)
    assert restore is not None
    listed = cluster.run("squeue", "-h", "-t", "all", "-j", way.job_id, "-o", "%V %S").split()
    queued, began = (datetime.fromisoformat(it).timestamp() for it in listed)  # whole seconds
    times = (killed, queued, began, *restore, first)
    return {name: end - begin for name, begin, end in zip(PARTS, times, times[1:], strict=False)}


def restarts(cluster: SlurmCluster, job_id: str) -> int:
    """How often Slurm has started the job again."""
    return int(cluster.run("squeue", "-h", "-t", "all", "-j", job_id, "-O", "RestartCnt").strip())


@contextmanager
def paused(cluster: SlurmCluster, way: Ours | Plain) -> Iterator[None]:
    """The processes of a job do not run meanwhile: they would take processor time from the other's recovery."""
    cluster.run("scancel", "--signal=STOP", way.job_id)
    try:
        yield
    finally:
        cluster.run("scancel", "--signal=CONT", way.job_id)


def kills(count: int) -> None:
    """Pairs of kills, the first of each pair in turns ours and plain."""
    found: dict[str, list[dict[str, float]]] = {"ours": [], "plain": []}
    loads: list[float] = []
    # Two nodes for each, and two that may take a lost one's place.
    with tempfile.TemporaryDirectory() as root, started_cluster(folder_of(root, "cluster"), 6) as cluster:
        os.environ["SLURM_CONF"] = str(cluster.configuration)
        ways = {"ours": Ours(folder_of(root, "ours")), "plain": Plain(folder_of(root, "plain"), cluster)}
        for way in ways.values():
            cluster.await_state(lambda way=way: len(way.steps()) > EVERY, SECONDS)  # type: ignore[misc]
        for number in range(count):
            for name in ("ours", "plain") if number % 2 == 0 else ("plain", "ours"):
                [other] = [it for it in ways if it != name]
                with paused(cluster, ways[other]):
                    found[name].append(recovery(cluster, ways[name], number))
                loads.append(os.getloadavg()[0])
                shown = ", ".join(f"{part} {seconds:.1f}" for part, seconds in found[name][-1].items())
                print(f"{name}: {sum(found[name][-1].values()):.1f} s ({shown}), load {loads[-1]:.0f}", flush=True)
    seconds = {name: [sum(it.values()) for it in rows] for name, rows in found.items()}
    pairs = [ours / plain for ours, plain in zip(seconds["ours"], seconds["plain"], strict=True)]
    report = {
        "ratio of medians": statistics.median(seconds["ours"]) / statistics.median(seconds["plain"]),
        "median of the pairs' ratios": statistics.median(pairs),
        "medians of the parts": {
            name: {part: statistics.median(it[part] for it in rows) for part in PARTS} for name, rows in found.items()
        },
        "load": [min(loads), statistics.median(loads), max(loads)],
        "seconds": seconds,
        "parts": found,
    }
    print(json.dumps(report, indent=2))


def folder_of(root: str, name: str) -> Path:
    """A fresh folder."""
    folder = Path(root) / name
    folder.mkdir()
    return folder


class Nodes:
    """Two nodes, each with its part of one committed checkpoint on a disk of its own."""

    def __init__(self, store: S3Store, root: Path, state: int) -> None:
        self.store = store
        self.copies = [LocalCopies(root / f"node-{node}") for node in range(2)]
        save = publication.new_save("run", 7, world_size=2, node_count=2)
        for node, copies in enumerate(self.copies):
            sealed = copies.sealed(save.save_id)
            sealed.mkdir(parents=True)
            (sealed / f"__{node}_0.distcp").write_bytes(os.urandom(state // 2))
            publication.write_part(store, publication.upload_part(store, save, sealed, node))
            copies.keep(sealed, save.save_id)
        commit = publication.commit(store, save).commit
        assert commit is not None
        self.commit: CommitManifest = commit

    def restore(self, rate: float, lost: tuple[int, ...]) -> float:
        """Seconds until both have their parts, where the disks of the nodes in ``lost`` are empty."""
        for node in lost:
            self.copies[node].forget()
        began = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda node: self._fetch(node, rate / max(1, len(lost))), range(2)))
        return time.perf_counter() - began

    def _fetch(self, node: int, rate: float) -> None:
        def is_own(entry: FileEntry) -> bool:
            return entry.path.startswith(f"__{node}_")

        # No marker: all that lies on the disk is read and compared.
        folder = self.copies[node].folder / self.commit.save_id
        transfer = EngineTransfer(max_bandwidth=int(rate))
        publication.fetch(self.store, self.commit, folder, select=is_own, transfer=transfer)


def restore(rate: float, state: int, rounds: int) -> None:
    """Three kinds of restarts in turns."""
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
    kinds: dict[str, tuple[int, ...]] = {"from the store": (0, 1), "same nodes": (), "one node replaced": (1,)}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as root, running_server(folder_of(root, "server")) as server:
        server.client.create_bucket(Bucket="bucket")
        nodes = Nodes(S3Store("bucket", "run", S3Options(endpoint_url=server.endpoint)), Path(root), state)
        for _ in range(rounds):
            for name, lost in kinds.items():
                seconds[name].append(nodes.restore(rate, lost))
                print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)
    whole = statistics.median(seconds["from the store"])
    ratios = {name: statistics.median(values) / whole for name, values in seconds.items()}
    print(json.dumps({"ratios": ratios, "seconds": seconds}, indent=2))


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    killing = parts.add_parser("kills")
    killing.add_argument("--kills", type=int, default=10)
    restoring = parts.add_parser("restore")
    restoring.add_argument("--rate", type=float, default=50e6)
    restoring.add_argument("--state", type=float, default=500e6)
    restoring.add_argument("--rounds", type=int, default=3)
    reported = parser.parse_args()
    if reported.part == "kills":
        kills(reported.kills)
    else:
        restore(reported.rate, int(reported.state), reported.rounds)


if __name__ == "__main__":
    main()
