"""A commit or a process's own file that somebody else wrote is refused in words, and the step before is restored."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import CheckpointError
from sm_llm.storage.publication.manifest import CommitManifest, FileEntry
from sm_llm.storage.publication.publish import new_save
from sm_llm.worker.checkpoint import start_resolver as module
from sm_llm.worker.checkpoint.checkpoint_restore import check_meta, layout, rank_file, wanted_by_node

if TYPE_CHECKING:
    from pathlib import Path

FILES = (FileEntry(path="a", size=1, crc64nvme="0" * 16),)


def commit(**meta: Any) -> CommitManifest:
    save = new_save("run", 4, world_size=2, node_count=1)
    return CommitManifest(save=save, nonce="0" * 32, time=1.0, files=FILES, meta=meta)


def context(rank: int = 0) -> Any:
    spec = SimpleNamespace(model_dump=lambda mode: {"task": {"parallelism": {}}})
    process = SimpleNamespace(rank=rank, local_rank=rank, world_size=2, local_world_size=2, is_node_leader=rank == 0)
    return SimpleNamespace(job=SimpleNamespace(spec=spec), process=process, notice=lambda *_: None)


@pytest.mark.parametrize("reads", [[], [["a"]], "ab", [["a"], None], [["a"], [1]], {"0": ["a"]}, [["a"], [{}]]])
def test_what_each_process_reads_has_its_form_or_the_commit_is_refused(reads: Any) -> None:
    with pytest.raises(CheckpointError, match="step 4: its commit does not name the files"):
        wanted_by_node(context(), commit(reads=reads, layout=layout(context())))


def test_what_each_process_reads_is_fetched() -> None:
    wanted = wanted_by_node(context(), commit(reads=[["a"], ["b"]], layout=layout(context())))
    assert wanted is not None
    assert {"a", "b", ".metadata"} <= wanted.paths


@pytest.mark.parametrize(
    "meta",
    [
        {"job": 1}, {"layout": [1]}, {"layout": {"parallelism": "x"}}, {"plateau": "x"}, {"identity": 1},
        {"identity": {"data": [1]}},
    ],
)  # fmt: skip
def test_meta_of_another_form_is_refused(meta: Any) -> None:
    with pytest.raises(CheckpointError, match="must be a mapping"):
        check_meta(commit(**meta))
    check_meta(commit(job={"world_size": 2}, layout={"parallelism": {}}, plateau=None))


BODIES = [
    "", "{", "[" * 100_000, "[]", "1", "{}", '{"random": {}}', '{"random": {"python": 1}, "stream": null}',
    '{"random": {"python": [3, [1], null], "numpy": [], "torch": ""}, "stream": null}',
    '{"random": {"python": [3, [99999999999999999999], null]}, "stream": null}',
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_what_a_process_saved_for_itself_is_checked(tmp_path: Path, body: str) -> None:
    (tmp_path / rank_file(0)).write_text(body)
    start = module.Start("checkpoint", 4, "s3://bkt/run", "d", commit(job={}), tmp_path)
    own = SimpleNamespace(layout=SimpleNamespace(degrees=lambda: {"world_size": 2}))
    with pytest.raises(CheckpointError, match="s3://bkt/run: "):
        module._load_private(context(), start, own)  # type: ignore[arg-type]


def test_a_file_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "x").write_text(json.dumps({}))
    start = module.Start("checkpoint", 4, "s3://bkt/run", "d", commit(job={"world_size": 4}), tmp_path)
    own = SimpleNamespace(layout=SimpleNamespace(degrees=lambda: {"world_size": 2}))
    with pytest.raises(CheckpointError, match=r"rank-00000\.json cannot be read"):
        module._load_private(context(), start, own)  # type: ignore[arg-type]
