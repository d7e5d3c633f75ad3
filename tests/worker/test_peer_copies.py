"""Collectives by copy engines: what they refuse, and that bf16 gradients are added up unrounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from peer_memory import PeerMemory

from sm_llm.errors import RunFailed
from sm_llm.spec.parallelism.base import Layout
from sm_llm.worker.strategies.fsdp import peer_copies
from sm_llm.worker.strategies.fsdp.peer_copies import PeerBuffers, PeerGather, PeerSum, why_not
from sm_llm.worker.strategies.fsdp.reduction import GradientReduction

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")
TWO = Layout(1, 2, 1, 1)


class Group:
    """Two processes, of which this is the first."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(peer_copies, "symmetric", PeerMemory(tmp_path))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A device that reads the others' memory, and processes that agree."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda found, own: found.__setitem__(0, own))
    monkeypatch.setattr(peer_copies, "_failure", lambda *_: "")
    return Mock(copy_obstacle=Mock(return_value=""))


def reason(gpu: Mock, wanted: bool | str = "auto", layout: Layout = TWO) -> str:
    return why_not(wanted, gpu, layout, 2, Group())  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", ["auto", True])
def test_devices_that_read_one_another_use_their_copy_engines(gpu: Mock, wanted: bool | str) -> None:
    assert reason(gpu, wanted) == ""
    gpu.copy_obstacle.assert_called_once_with(2, is_asked_for=wanted is True)
    gpu.copy_obstacle.return_value = "GPU 0 cannot read the memory of GPU 1"
    assert reason(gpu, wanted) == "GPU 0 cannot read the memory of GPU 1"


def test_shards_over_several_nodes_and_older_torch_are_named(gpu: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(gpu, layout=Layout(1, 4, 1, 1)) == "parameters are sharded over several nodes"
    assert reason(gpu, layout=Layout(1, 2, 1, 2)) == "parameters are sharded over several nodes"
    assert reason(gpu, layout=Layout(2, 2, 1, 1)) == "", "copies may be on different nodes"
    monkeypatch.setattr(peer_copies, "FSDPModule", object)
    assert "takes no other collectives" in reason(gpu)


def test_one_process_with_a_reason_counts_for_all(gpu: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(found: list[Any], own: str) -> None:
        found[:] = [own, "GPU 1 cannot"]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert reason(gpu) == "GPU 1 cannot"


class Broken(PeerMemory):
    def rendezvous(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        raise RuntimeError("pidfd_getfd: Operation not permitted\nmore")


def test_memory_that_cannot_be_shared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_copies, "symmetric", Broken(tmp_path))
    found = peer_copies._failure(CPU, Group())  # type: ignore[arg-type]
    assert found == "torch's symmetric memory: pidfd_getfd: Operation not permitted"


@pytest.mark.parametrize(("other", "named"), [(1, ""), (7, "wrong numbers were copied: [0, 7]")])
def test_a_trial_compares_what_was_copied(monkeypatch: pytest.MonkeyPatch, other: int, named: str) -> None:
    def others(*_: Any) -> Iterator[tuple[int, torch.Tensor]]:
        yield 1, torch.tensor([0, other], dtype=torch.int32)

    monkeypatch.setattr(PeerBuffers, "others", others)
    assert peer_copies._failure(CPU, Group()) == named  # type: ignore[arg-type]


def test_two_buffers_take_turns_and_grow() -> None:
    gather = PeerGather(CPU)
    first = gather.allocate((4,), dtype=torch.bfloat16, device=CPU)
    second = gather.allocate((8,), dtype=torch.bfloat16, device=CPU)
    addresses = first.data_ptr(), second.data_ptr()
    assert len(set(addresses)) == 2
    del first, second
    assert gather.allocate((2, 2), dtype=torch.bfloat16, device=CPU).data_ptr() == addresses[0]
    assert gather.allocate((3,), dtype=torch.float32, device=CPU).data_ptr() == addresses[1]
    assert gather.allocate((3,), dtype=torch.float32, device=CPU).shape == (3,), "more than the first buffer held"


def test_memory_that_is_still_in_use_is_not_given_again() -> None:
    gather = PeerGather(CPU)
    kept = [
        gather.allocate((4,), dtype=torch.bfloat16, device=CPU)[1:],
        gather.allocate((4,), dtype=torch.bfloat16, device=CPU),
    ]
    with pytest.raises(RunFailed, match=r"more than two gathered groups.*copy_engine_collectives to false"):
        gather.allocate((4,), dtype=torch.bfloat16, device=CPU)
    assert len(kept) == 2


@pytest.mark.parametrize(("op", "divided_by"), [(dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 2)])
def test_what_travels_is_bf16_and_the_sum_is_not_rounded(
    monkeypatch: pytest.MonkeyPatch, op: Any, divided_by: int
) -> None:
    own, other = torch.tensor([1.0, 256.0]), torch.tensor([2**-9, 1.0])
    sent: list[torch.dtype] = []

    def others(_: Any, tensor: torch.Tensor, __: Any) -> Iterator[tuple[int, torch.Tensor]]:
        sent.append(tensor.dtype)
        yield 1, torch.cat([other, torch.zeros(2)]).bfloat16()

    monkeypatch.setattr(PeerBuffers, "others", others)
    reduction = GradientReduction(CPU, peers=PeerSum(CPU), shares_memory=False)
    for _ in range(2):  # memory is asked for in pairs, again and again
        given = reduction.allocate((4,), dtype=torch.bfloat16, device=CPU)
        result = reduction.allocate((2,), dtype=torch.bfloat16, device=CPU)
        given.copy_(torch.cat([own, torch.zeros(2)]))
        reduction(result, given, Group(), op)  # type: ignore[arg-type]
        assert result.tolist() == ((own + other) / divided_by).tolist(), "257 and 1 + 2**-9 are no numbers of bf16"
    assert sent == [torch.bfloat16] * 2
    assert not torch.equal(own + other, (own + other).bfloat16().float())
