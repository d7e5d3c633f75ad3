"""Publishing and restoring in the worker against S3: two processes, one launch, a proxy that spoils requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nodes import Nodes
from worker_jobs import MODEL, search_path

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1000)]  # the first test waits for the whole launch


def launch(folder: Path, endpoint: str, bucket: str) -> dict[str, Any]:
    script = Path(__file__).with_name("publication_configurations.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--log-dir={folder / 'torchrun'}", str(script)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()}
    done = subprocess.run(
        [*command, str(folder), endpoint, bucket], env=environ, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    print(done.stdout)
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


@pytest.fixture(scope="module")
def results(s3_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    from tests.fixtures.s3_server import KEY, SECRET

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.delenv("AWS_PROFILE", raising=False)
        s3_server.client.create_bucket(Bucket="publication")
        yield launch(tmp_path_factory.mktemp("publication"), s3_server.endpoint, "publication")


def published(result: dict[str, Any]) -> list[int]:
    return [event["step"] for event in result["events"]["checkpoint_published"]]


def own_files(rank: int) -> list[str]:
    """What one of two processes reads of a checkpoint; the shared tensors are where DCP chose to put them."""
    return sorted([".metadata", f"__{rank}_0.distcp", "__1_whole_0.distcp", f"rank-{rank:05d}.json"])


def test_saves_are_published_by_agents_and_leave_nothing_behind(results: dict[str, Any]) -> None:
    plain = results["plain"]
    assert plain["checkpoints"] == [[1, True], [2, True], [3, True]]
    assert published(plain) == [1, 2, 3]
    for rank in plain["ranks"]:
        assert rank["left"] == []


def test_I8_a_hanging_store_blocks_no_step_and_the_newest_save_takes_the_place_of_one_that_waits(
    results: dict[str, Any],
) -> None:
    slow = results["slow"]
    assert all(rank["meanwhile"] == 0 for rank in slow["ranks"]), "five saves while the store held the first"
    assert published(slow) == [1, 5]
    assert [event["superseded"] for event in slow["events"]["checkpoint_published"]] == [0, 3]
    assert not slow["events"]["publication_late"], "it is slow, but within what is usual"


def test_a_save_waits_for_no_other_that_is_being_written_while_there_is_memory_for_both(
    results: dict[str, Any],
) -> None:
    result = results["overlapping"]
    for rank in result["ranks"]:
        first, second, third, _ = rank["two"]["blocked"]
        assert max(first, second) < 0.5 <= third
        first, second, third, _ = rank["one"]["blocked"]
        assert first < 0.5 <= min(second, third)
    skipped = "checkpoint of step {} skipped: an earlier one is still being written"
    assert result["ranks"][0]["two"]["notices"] == [skipped.format(3)]
    assert result["ranks"][0]["one"]["notices"] == [skipped.format(2), skipped.format(3)]
    assert published(results["overlapping-two"])[-1] == published(results["overlapping-one"])[-1] == 4
    assert [2, True] in results["overlapping-two"]["checkpoints"]
    assert all(rank["left"] == [] for name in ("two", "one") for rank in results[f"overlapping-{name}"]["ranks"])


def test_after_a_save_that_failed_no_other_is_written_and_nothing_half_is_published(results: dict[str, Any]) -> None:
    """A process that fails alone must not take the next save while the others wait in this one."""
    result = results["overlapping"]
    for rank in result["ranks"]:
        assert "the disk is broken" in rank["error_disk"]
        assert "one process cannot write" in rank["error_process"]
    for name in ("disk", "process"):
        assert results[f"overlapping-{name}"]["checkpoints"] == []


def test_I11_scratch_holds_three_saves_at_most_and_none_in_the_end(results: dict[str, Any]) -> None:
    assert all(rank["most_folders"] <= 3 for rank in results["slow"]["ranks"])
    assert max(rank["most_folders"] for rank in results["slow"]["ranks"]) >= 2
    assert all(rank["left"] == [] for name in ("slow", "outage") for rank in results[name]["ranks"])


def test_CK01_a_store_that_stops_accepting_raises_an_alarm_and_later_saves_try_again(results: dict[str, Any]) -> None:
    outage = results["outage"]
    alarms = outage["events"]["publication_late"]
    assert {alarm["step"] for alarm in alarms} == {1}
    assert all(alarm["age_seconds"] > 0 for alarm in alarms)
    assert "ExpiredToken" in alarms[0]["reason"]
    assert outage["ranks"][0]["alarm"].startswith("last published step 1, ")
    assert outage["ranks"][0]["alarm_after"] == ""
    assert published(outage)[-1] == 4
    assert [4, True] in outage["checkpoints"]


def test_CK01_a_store_that_accepts_nothing_for_too_long_fails_the_job_on_all_processes(results: dict[str, Any]) -> None:
    unpublished = results["unpublished"]
    errors = {rank["error"] for rank in unpublished["ranks"]}
    assert len(errors) == 1
    assert "ExpiredToken" in errors.pop()
    assert unpublished["checkpoints"] == []


def test_a_killed_agent_is_replaced_and_the_save_published(results: dict[str, Any]) -> None:
    assert results["killed_agent"]["checkpoints"] == [[1, True]]
    assert not results["killed_agent"]["events"]["publication_late"]


def test_I10_a_stop_in_an_upload_ends_it_and_leaves_no_parts(results: dict[str, Any]) -> None:
    hurried = results["hurried"]
    for rank in hurried["ranks"]:
        assert not rank["done"]
        assert rank["uploads"] == []
    assert hurried["checkpoints"] == []


def test_an_attempt_whose_step_another_has_committed_drops_its_save(results: dict[str, Any]) -> None:
    zombie = results["zombie"]
    assert zombie["ranks"][0]["saves"] == [zombie["ranks"][0]["other"]]
    assert any("committed first by another save" in event["message"] for event in zombie["events"]["notice"])


def test_a_restart_on_the_same_nodes_reads_what_they_have_kept_and_fetches_only_what_others_wrote(
    results: dict[str, Any],
) -> None:
    first, second = results["restored"]["ranks"]
    assert first["kept"] == [7, own_files(0), 1, 2], "the shared tensors, which rank 1 wrote, and the metadata"
    assert second["kept"][:2] == [7, own_files(1)]


def test_each_node_fetches_the_files_of_its_processes_and_a_warm_restart_none(results: dict[str, Any]) -> None:
    first, second = results["restored"]["ranks"]
    assert first["same"][:2] == [7, own_files(0)]
    assert second["same"][:2] == [7, own_files(1)]
    assert first["same"][2:] == [4, 8], "each node its own tensors and what is shared: nothing else, nothing twice"
    assert first["warm"] == [7, own_files(0), 0, 0]


def test_another_number_of_nodes_restores(results: dict[str, Any]) -> None:
    whole = sorted({*own_files(0), *own_files(1)})
    assert results["restored"]["ranks"][0]["merged"][:2] == [7, whole]
    split = results["split"]["ranks"]
    assert [(rank["step"], rank["files"]) for rank in split] == [(3, own_files(0)), (3, own_files(1))]
    assert split[0]["gets"] > 4, "what arrived wrong was fetched again"


def test_a_storm_of_503_is_survived(results: dict[str, Any]) -> None:
    storm = results["storm"]
    assert storm["checkpoints"][-1] == [storm["ranks"][0]["last"], True]
    assert published(storm)[0] == 1
    assert published(storm)[-1] == storm["ranks"][0]["last"]
    assert len(storm["events"]["publication_late"]) >= 2


INTO_S3 = """
from sm_llm.storage.s3_store import S3Store
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.worker.transfer import agent_process
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.runtime.stop import StopRequests
agent_process.ABORT_SECONDS = 120.0
WorkerContext.store = property(lambda self: S3Store({bucket!r}, "run", S3Options(endpoint_url={endpoint!r})))
StopRequests.seconds_left = lambda self, grace: None if self.signalled_at is None else 4.0
"""
"""What is left of the grace time when the stop is decided; breaking an upload off may then take the machine's time."""


def test_I10_a_job_that_is_stopped_in_an_upload_reports_it_and_leaves_no_parts(
    tmp_path: Path, s3_server: Any, bucket: str, fault_proxy: Any, rule: Any
) -> None:
    large = {"preset": "tiny", "config": {**MODEL, "vocab_size": 65_536}}
    before = INTO_S3.format(bucket=bucket, endpoint=fault_proxy.endpoint)
    task = {"model": large, "checkpoint": {"every_steps": 3}, "validation": {"every_steps": 4000}}
    fault_proxy.set(rule("PUT .*partNumber=2", "hold", count=10**6))
    with Nodes(tmp_path / "run", before=before, stop_seconds=600.0, **task) as job:
        for node in range(2):
            job.until(lambda node=node: fault_proxy.count(f"PUT .*/__{node}_.*partNumber=2"))
        for process in job.torchruns:
            process.send_signal(signal.SIGTERM)
        job.ended()
        stops = job.stops()
    assert all(record is not None and record.checkpoint is None for record in stops), job.log()
    assert not s3_server.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    assert not any(job.container(node).failure.exists() for node in range(2)), job.log()
