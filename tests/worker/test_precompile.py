"""The precompile task and the compile cache, with contract doubles of NxD and ``neuron_parallel_compile``."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nodes import Nodes
from nxd_configurations import NXD, UNTIED
from worker_jobs import MODEL, events, job_environment, job_file, result_folder, train_task

from sm_llm.contract.compile_cache import DESCRIPTION, graphs, part_of
from sm_llm.contract.failure import Failure
from sm_llm.errors import RunFailed
from sm_llm.spec.tasks import TrainTask
from sm_llm.storage.uri import open_store
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.inputs.graph_cache import open_cache
from sm_llm.worker.main import main

if TYPE_CHECKING:
    from sm_llm.worker.inputs.graph_cache import CompileCache
    from tests.fixtures.s3_server import S3Server

DOUBLE = Path(__file__).parents[1] / "fixtures" / "nxd_double"
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CONFIG = {**MODEL, "model_type": "llama"}
TRAINING = train_task(
    model=UNTIED,
    micro_batch_size=1,
    global_batch_size=4,
    parallelism={**NXD},
    max_steps=4,
    validation={"every_steps": 4},
)


@pytest.fixture
def neuron(forks: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A node with the doubles on its paths; returns the shared cache."""
    for name, value in forks.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([forks["PYTHONPATH"], str(DOUBLE)]))
    monkeypatch.setenv("PATH", os.pathsep.join([str(DOUBLE / "bin"), os.environ["PATH"]]))
    monkeypatch.syspath_prepend(str(DOUBLE))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "")
    monkeypatch.setenv("NEURON_CC_FLAGS", "--model-type transformer --retry_failed_compilation")
    return tmp_path / "cache"


def precompile(run: Path, cache: str, attempt: int = 1, **training: Any) -> int:
    task = {"kind": "precompile", "training": {**TRAINING, **training}, "extract_steps": 2}
    os.environ["NEURON_COMPILE_CACHE_URL"] = cache  # restored with the fixture's other variables
    return main("precompile", job_environment(job_file(task, run, 2, attempt)))


def cached(cache: Path) -> dict[str, str]:
    return {it.graph: it.state for it in graphs(open_store(cache))}


def test_graphs_are_extracted_compiled_and_counted(neuron: Path, tmp_path: Path) -> None:
    assert precompile(tmp_path / "run", str(neuron)) == 0
    assert set(cached(neuron).values()) == {"compiled"}
    [event] = events(tmp_path / "run", "graphs_compiled")
    assert (event["held"], event["failed"], event["hit_rate"]) == (0, 0, 0.0)
    assert event["compiled"] == len(cached(neuron)) >= 3, "micro-batch, update, validation"
    counts = json.loads((result_folder(tmp_path / "run") / "precompile.json").read_text())
    assert counts == {"nodes": [{"graphs": event["compiled"], "compiled": event["compiled"], "failed": 0}]}
    assert not events(tmp_path / "run", "step"), "numbers of the extraction are invalid"
    # A second job finds all of them; a failed graph and a stale lock of another one are gone first.
    [part] = [it for it in neuron.iterdir() if it.is_dir()]
    broken = part / "neuronxcc-2.23.6484.0+3b612583" / "MODULE_0+aa"
    broken.mkdir()
    (broken / "model.log").write_text("failed")
    lock = broken.with_name("MODULE_1+aa") / "model.lock"
    lock.parent.mkdir()
    lock.write_text("")
    os.utime(lock, (1, 1))
    assert precompile(tmp_path / "again", str(neuron)) == 0
    [event] = events(tmp_path / "again", "graphs_compiled")
    assert (event["compiled"], event["hit_rate"]) == (0, 1.0)
    assert not broken.joinpath("model.log").exists()
    assert not lock.exists()
    notices = " ".join(it["message"] for it in events(tmp_path / "again", "notice"))
    assert "deleted 1 graph that failed and 1 stale lock" in notices


def test_a_graph_that_does_not_compile_ends_the_job_with_its_reason(
    neuron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself ends with exit code 0 then."""
    monkeypatch.setenv("NXD_DOUBLE_FAILS", "update")
    assert precompile(tmp_path / "run", str(neuron)) == 1
    [message] = {it["message"] for it in events(tmp_path / "run", "failed")}
    assert "1 of 3 graphs did not compile: node 0 1 of 3 (MODULE_" in message
    assert "too many instructions" in message
    assert "tensor_parallel_degree" in message
    assert sorted(cached(neuron).values()) == ["compiled", "compiled", "failed"]
    assert not (tmp_path / "run" / "ckpt").exists(), "nothing was published"


def test_a_training_that_fails_under_the_compiler_is_named(neuron: Path, tmp_path: Path) -> None:
    assert precompile(tmp_path / "run", str(neuron), start={"checkpoint": str(tmp_path / "absent")}) == 1
    [message] = {it["message"] for it in events(tmp_path / "run", "failed")}
    # Either process may be the first.
    assert re.match(r"the training failed while its graphs were extracted: rank [01]: ", message)
    assert "absent" in message


WAITS = "sm_llm.worker.supervision.compile_progress"
EAGER = f"import {WAITS} as progress; progress.POLL_SECONDS = progress.REPORT_SECONDS = 0.2"
"""Progress at once, so that no test waits for it."""


def on_node(node: int, code: str) -> str:
    return f"import os\nif os.environ['GROUP_RANK'] == '{node}': {code}\n"


def nodes(run: Path, cache: str, before: str = "", **task: Any) -> Nodes:
    """The precompile task on two simulated nodes of one process each, which train one model together."""
    training = {**TRAINING, "parallelism": {**NXD, "tensor_parallel_degree": 1}}
    os.environ["NEURON_COMPILE_CACHE_URL"] = cache
    whole = {"kind": "precompile", "training": training, "extract_steps": 2, **task}
    return Nodes(run, before=f"{EAGER}\n{before}", whole_task=whole)


@pytest.fixture
def shared(neuron: Path, bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cache in S3, of which each node has its copy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    return f"s3://{bucket}/neuron-compile-cache"


def test_all_nodes_compile_and_their_counts_and_hit_rates_are_reported(shared: str, tmp_path: Path) -> None:
    with nodes(tmp_path / "run", shared) as job:
        job.ended()
    counts = json.loads((result_folder(tmp_path / "run") / "precompile.json").read_text())["nodes"]
    assert [it["failed"] for it in counts] == [0, 0], job.log()
    assert [it["graphs"] for it in counts] == [3, 3]
    [event] = job.events("graphs_compiled")
    assert (event["held"], event["compiled"], event["hit_rate"]) == (0, 6, 0.0)
    assert event["nodes"] == [[0, 3, 0], [0, 3, 0]]
    assert job.events("progress")[-1]["detail"] or job.events("progress")[-1]["done"] == 6
    # The second job finds all graphs on both nodes.
    with nodes(tmp_path / "again", shared) as again:
        again.ended()
    [event] = again.events("graphs_compiled")
    assert (event["nodes"], event["hit_rate"]) == ([[3, 0, 0], [3, 0, 0]], 1.0), again.log()
    assert "compiled graphs on 2 nodes: 6 from the cache (100%)" in again.log()


def test_graphs_that_fail_on_one_node_fail_the_step_and_both_nodes_keep_what_compiled(
    shared: str, tmp_path: Path
) -> None:
    with nodes(tmp_path / "run", shared, on_node(1, "os.environ['NXD_DOUBLE_FAILS'] = 'update'")) as job:
        job.ended()
    assert {process.returncode for process in job.torchruns} == {1}
    [message] = {it.message for it in job.failures()}
    assert "1 of 6 graphs did not compile: node 1 1 of 3 (MODULE_" in message, job.log()
    assert "too many instructions" in message
    [event] = job.events("graphs_compiled")
    assert event["nodes"] == [[0, 3, 0], [0, 2, 1]]
    assert not (tmp_path / "run" / "ckpt").exists(), "nothing was published"
    assert sum(it.is_whole for it in graphs(open_store(shared))) == 3


SOON = """
import os
def poll(self, known=progress.CompileProgress.poll):
    if len(self._states) == 3 and os.environ["GROUP_RANK"] == "1":
        self._stall_seconds = 3.0
    known(self)
progress.CompileProgress.poll = poll
"""
"""The limit of the second node counts once all graphs are extracted: a busy machine may need long until then."""


def test_a_compiler_that_hangs_on_one_node_is_named_with_its_graphs(shared: str, tmp_path: Path) -> None:
    hangs = on_node(1, "os.environ['NXD_DOUBLE_HANGS'] = 'evaluate'")
    with nodes(tmp_path / "run", shared, f"{hangs}{SOON}") as job:
        job.ended()
    [message] = {it.message for it in job.failures()}
    assert "the compiler on node 1 stalled: nothing new for" in message, job.log()
    assert re.search(r"[1-3] graphs? not compiled \(MODULE_", message)
    assert "task.stall_seconds" in message
    assert any(re.search(r"node 1: [0-2] of [0-3]", it["detail"]) for it in job.events("progress"))


def test_a_request_to_stop_reaches_every_node_and_the_graphs_are_kept(shared: str, tmp_path: Path) -> None:
    hangs = on_node(1, "os.environ['NXD_DOUBLE_HANGS'] = 'update'")
    with nodes(tmp_path / "run", shared, hangs) as job:
        # The first node has finished by then and waits for the second one.
        job.until(lambda: any(it["done"] >= 3 for it in job.events("progress")))
        job.paths.stop_file.write_text("{}")
        job.ended()
    assert [it is not None for it in job.stops()] == [True, True], job.log()
    assert sum(it.is_whole for it in graphs(open_store(shared))) == 3


def test_a_node_that_is_gone_ends_the_job(shared: str, tmp_path: Path) -> None:
    hangs = "os.environ['NXD_DOUBLE_HANGS'] = 'update'"
    training = {**TRAINING, "parallelism": {**NXD, "tensor_parallel_degree": 1}, "watchdog": {"stall_seconds": 5.0}}
    with nodes(tmp_path / "run", shared, f"import os\n{hangs}", training=training) as job:
        job.until(lambda: job.events("progress") and len(job.workers(1)) == 1)
        os.kill(job.workers(1)[0], signal.SIGSTOP)
        job.until(lambda: job.torchruns[0].poll() is not None)
    failure = Failure.from_text(job.container(0).failure.read_text())
    assert "rank 1 does not answer" in failure.message, job.log()


def opened(run: Path, cache: str, monkeypatch: pytest.MonkeyPatch, flags: str = "-O1") -> CompileCache:
    """The cache of the training as a process of its job opens it, here without any training."""
    context = WorkerContext.read(job_environment(job_file(TRAINING, run, 1)))
    environ = {"NEURON_COMPILE_CACHE_URL": cache, "NEURON_CC_FLAGS": flags}
    found = open_cache(context, context.job.spec.task, CONFIG, environ)  # type: ignore[arg-type]
    assert found is not None
    assert environ["NEURON_COMPILE_CACHE_URL"] == str(found.folder)
    return found


def compile_into(folder: Path, graph: str, *, whole: bool = True) -> None:
    module = folder / "neuronxcc-2.23.6484.0+3b612583" / graph
    module.mkdir(parents=True)
    for name in ("model.hlo_module.pb", "model.neff", *(["model.done"] if whole else [])):
        (module / name).write_text(name)


def test_NX01_a_cache_in_s3_comes_to_the_node_and_goes_back(
    tmp_path: Path, s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    address = f"s3://{bucket}/neuron-compile-cache"
    first = opened(tmp_path / "one", address, monkeypatch)
    compile_into(first.folder, "MODULE_1+aa")
    compile_into(first.folder, "MODULE_2+aa", whole=False)
    (first.folder / "neuronxcc-2.23.6484.0+3b612583" / "MODULE_1+aa" / "model.neff.lock").write_text("")
    first.save()
    keys = [it["Key"] for it in s3_server.client.list_objects_v2(Bucket=bucket)["Contents"]]
    names = sorted(key.rpartition("MODULE_")[2] for key in keys if "MODULE_" in key)
    assert names == ["1+aa/model.done", "1+aa/model.hlo_module.pb", "1+aa/model.neff"]
    second = opened(tmp_path / "two", address, monkeypatch)  # another node: its own folders
    assert second.folder != first.folder
    assert cached(second.folder) == {"MODULE_1+aa": "compiled"}
    compile_into(second.folder, "MODULE_3+aa")
    second.report(lambda value: [value])
    [event] = events(tmp_path / "two", "graphs_compiled")
    assert (event["held"], event["compiled"], event["hit_rate"]) == (1, 1, 0.5)
    second.save()
    assert cached(opened(tmp_path / "three", address, monkeypatch).folder).keys() == {"MODULE_1+aa", "MODULE_3+aa"}


def test_NX02_graphs_of_other_flags_are_not_taken_and_the_difference_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_into(opened(tmp_path / "one", str(tmp_path / "cache"), monkeypatch).folder, "MODULE_1+aa")
    other = opened(tmp_path / "two", str(tmp_path / "cache"), monkeypatch, flags="-O2")
    assert cached(other.folder) == {}
    notices = " ".join(it["message"] for it in events(tmp_path / "two", "notice"))
    assert "NEURON_CC_FLAGS -O1 -> -O2" in notices
    assert len([it for it in (tmp_path / "cache").iterdir() if (it / DESCRIPTION).exists()]) == 2
    with pytest.raises(RunFailed, match="--cache_dir"):
        opened(tmp_path / "three", str(tmp_path / "cache"), monkeypatch, flags="--cache_dir=/tmp/x")


def test_what_a_graph_follows_from_names_its_part_and_nothing_else_does() -> None:
    def name(environ: dict[str, str] | None = None, sdk: str = "2.28.0", **changes: Any) -> str:
        training = TrainTask.model_validate({**TRAINING, **changes}, strict=False)
        job = job_file(TRAINING, Path("run"), 2).spec
        return part_of(job, training, CONFIG, sdk, environ or {}).name

    own = name()
    assert own.startswith("sdk-2.28.0-")
    same: list[dict[str, Any]] = [
        {"max_steps": 9},
        {"optim": {**TRAINING["optim"], "learning_rate": 1e-5}},
        {"parallelism": {**NXD, "compile_cache": "/fsx/cache"}},
        {"seed": 3},
    ]
    assert {name(**it) for it in same} == {own}
    other: list[dict[str, Any]] = [
        {"environ": {"NEURON_CC_FLAGS": "-O1"}},
        {"sdk": "2.30.0"},
        {"parallelism": {**NXD, "fuse_qkv": False}},
        {"global_batch_size": 8},
        {"precision": {"compute": "bf16"}},
        {"optim": {**TRAINING["optim"], "weight_decay": 0.5}},
        {"data": {**TRAINING["data"], "seq_length": 64}},
    ]
    assert len({own, *(name(**it) for it in other)}) == len(other) + 1
    # Training settles it on its device, and precompile has none.
    assert name(precision={"compute": "auto"}) == name(precision={"compute": "bf16"})
