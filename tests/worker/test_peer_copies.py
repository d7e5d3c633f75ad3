"""Collectives by copy engines: what stands in their way, whom they wait for, and that bf16 gradients add up in fp32."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import launch
from peer_memory import PeerMemory

from sm_llm.errors import RunFailed
from sm_llm.spec.parallelism.base import Layout
from sm_llm.worker.device import CpuDevice
from sm_llm.worker.strategies.fsdp import peer_copies
from sm_llm.worker.strategies.fsdp import strategy as strategy_module
from sm_llm.worker.strategies.fsdp.peer_copies import (
    PeerBuffers,
    PeerCollectives,
    PeerGather,
    PeerSum,
    Sharing,
    largest_group,
)
from sm_llm.worker.strategies.fsdp.reduction import GradientReduction
from sm_llm.worker.strategies.fsdp.strategy import FsdpStrategy

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
SIZE = 16


class Group:
    """Two processes, of which this is the first."""

    group_name = "two"

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


class Peer:
    """Stands for torch's symmetric memory with one other process, whose memory holds ``theirs``."""

    def __init__(self, theirs: torch.Tensor) -> None:
        self.theirs = theirs
        self.calls: list[Any] = []
        self.timeouts: list[int] = []

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.calls.append("empty")
        return torch.zeros(size, dtype=dtype, device=device)

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> Peer:
        return self

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self.calls.append(channel)
        self.timeouts.append(timeout_ms)

    def get_remote_tensor(self, peer: int, sizes: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        self.calls.append(f"rank {peer}")
        found = torch.zeros(sizes, dtype=dtype)
        found.view(self.theirs.dtype)[: self.theirs.numel()] = self.theirs
        return found


def peer(monkeypatch: pytest.MonkeyPatch, *theirs: float, dtype: torch.dtype = torch.float32) -> Peer:
    found = Peer(torch.tensor(theirs, dtype=dtype))
    monkeypatch.setattr(peer_copies, "symmetric", found)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: found.calls.append("synchronize"))
    return found


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Sharing:
    """Two processes on one node that agree, with devices that read one another's memory."""
    # Set first, so that what is made of it is undone.
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "")
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda found, own: found.__setitem__(0, own))
    device = Mock(torch_device=CPU, copy_obstacle=Mock(return_value=""))
    return Sharing(device, Layout(1, 2, 1, 1), 2, Group(), SIZE)  # type: ignore[arg-type]


def made(sharing: Sharing, *, is_asked_for: bool = False, sums: bool = True) -> PeerCollectives:
    return PeerCollectives(sharing, is_asked_for=is_asked_for, sums=sums)


@pytest.mark.parametrize("is_asked_for", [True, False])
@pytest.mark.parametrize("sums", [True, False])
def test_devices_that_read_one_another_use_their_copy_engines(
    monkeypatch: pytest.MonkeyPatch, sharing: Sharing, is_asked_for: bool, sums: bool
) -> None:
    # What the other has for this process is its rank plus this one's: 1 + 0. As a gathered part it is its rank, 1.
    found = peer(monkeypatch, 1.0, 1.0)
    collectives = made(sharing, is_asked_for=is_asked_for, sums=sums)
    assert collectives.reason == ""
    assert (collectives.gather is None, collectives.sum is None) == (False, not sums)
    sharing.device.copy_obstacle.assert_called_once_with(2, is_asked_for=is_asked_for)  # type: ignore[attr-defined]
    waits = [0, "rank 1", 0, *([1, "rank 1", 1] if sums else [])]
    assert found.calls == ["empty", "empty", "synchronize"] * (2 if sums else 1) + waits * 2, "each buffer is tried"
    assert set(found.timeouts) == {60_000}, "a trial ends also if another process never comes"
    assert all(it.buffers.timeout == 0 for it in (collectives.gather, collectives.sum) if it is not None)
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


@pytest.mark.parametrize(
    ("layout", "node_size"), [(Layout(1, 4, 1, 1), 2), (Layout(1, 2, 1, 2), 2), (Layout(4, 6, 1, 1), 8)]
)
def test_a_copy_that_reaches_another_node_is_not_shared(sharing: Sharing, layout: Layout, node_size: int) -> None:
    """Six of eight begin on one node and end on the next one."""
    found = made(replace(sharing, layout=layout, node_size=node_size))
    assert found.reason == "parameters are sharded over several nodes"
    assert found.gather is found.sum is None


def test_copies_on_several_nodes_are_shared_within_each(monkeypatch: pytest.MonkeyPatch, sharing: Sharing) -> None:
    peer(monkeypatch, 1.0, 1.0)
    assert made(replace(sharing, layout=Layout(4, 4, 1, 2), node_size=8)).reason == ""


def test_what_stands_in_the_way_is_the_reason(monkeypatch: pytest.MonkeyPatch, sharing: Sharing) -> None:
    sharing.device.copy_obstacle.return_value = "GPU 0 cannot read GPU 1"  # type: ignore[attr-defined]
    assert made(sharing).reason == "GPU 0 cannot read GPU 1"
    assert made(replace(sharing, device=CpuDevice())).reason == "there is no GPU"
    monkeypatch.setattr(peer_copies, "FSDPModule", object)
    assert "takes no other collectives" in made(sharing).reason


def test_one_process_with_a_reason_counts_for_all(monkeypatch: pytest.MonkeyPatch, sharing: Sharing) -> None:
    def gather(found: list[Any], own: str) -> None:
        found[:] = [own, "GPU 1 cannot"]

    memory = peer(monkeypatch, 1.0, 1.0)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert made(sharing).reason == "GPU 1 cannot"
    assert memory.calls == [], "nobody waits for a process that will not come"


@pytest.mark.parametrize(
    ("call", "calls"),
    [("empty", 0), ("rendezvous", 6), ("get_remote_tensor", 7)],
)
def test_memory_that_cannot_be_shared_is_named(
    monkeypatch: pytest.MonkeyPatch, sharing: Sharing, call: str, calls: int
) -> None:
    memory = peer(monkeypatch, 1.0, 1.0)
    monkeypatch.setattr(memory, call, Mock(side_effect=RuntimeError("CUDA driver error: out of memory\nmore")))
    found = made(sharing)
    assert found.reason == "torch's symmetric memory: RuntimeError: CUDA driver error: out of memory"
    assert found.gather is found.sum is None
    assert len(memory.calls) == calls


@pytest.mark.parametrize("theirs", [(1.0, 7.0), (7.0, 1.0)])
def test_a_trial_compares_what_was_copied(
    monkeypatch: pytest.MonkeyPatch, sharing: Sharing, theirs: tuple[float, float]
) -> None:
    peer(monkeypatch, *theirs)
    found = made(sharing)
    assert found.reason.startswith("wrong numbers were copied to rank 0: [0.0,")
    assert found.gather is None


@pytest.mark.integration
def test_a_process_that_finds_a_fault_leaves_no_other_waiting(tmp_path: Path) -> None:
    world = launch(tmp_path, 2, {}, script="faulty_peer.py")
    first, second = world.results["reasons"]
    assert first.startswith("wrong numbers were copied to rank 0: [0.0,")
    assert first == second


@pytest.mark.parametrize(
    ("wanted", "kind", "fields", "reason"),
    [
        ("auto", "cuda", {}, "GPU 0 cannot read GPU 1"),
        (True, "cpu", {}, "GPU 0 cannot read GPU 1"),
        ("auto", "cuda", {"deterministic": True}, "deterministic: a later attempt"),
        ("auto", "cuda", {"reshard_after_forward": 2}, "reshard_after_forward: parameters"),
        (False, "cuda", {}, ""),
        ("auto", "cuda", {"offload_optimizer": True}, ""),
    ],
)
def test_a_library_serves_where_copies_are_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, sharing: Sharing, wanted: Any, kind: str, fields: dict[str, Any], reason: str
) -> None:
    strategy = choosing(monkeypatch, sharing, wanted, kind, fields)
    found = strategy._peers([[torch.nn.Linear(2, 2)]], Mock(shard=sharing.group))
    assert found is None or found.gather is found.sum is None
    chosen = strategy.collectives()
    assert chosen is not None
    assert chosen.collectives == ("nccl" if kind == "cuda" else "gloo")
    assert chosen.reason.startswith(reason)
    assert bool(chosen.reason) is bool(reason)


@pytest.mark.parametrize(("fields", "reason"), [({}, "GPU 0 cannot"), ({"reshard_after_forward": 2}, "reshard_after")])
def test_copies_that_are_asked_for_in_vain_end_the_run(
    monkeypatch: pytest.MonkeyPatch, sharing: Sharing, fields: dict[str, Any], reason: str
) -> None:
    strategy = choosing(monkeypatch, sharing, True, "cuda", fields)
    with pytest.raises(RunFailed, match=rf"task.parallelism.copy_engine_collectives: {reason}.*Leave it out"):
        strategy._peers([[torch.nn.Linear(2, 2)]], Mock(shard=sharing.group))


def choosing(
    monkeypatch: pytest.MonkeyPatch, sharing: Sharing, wanted: Any, kind: str, fields: dict[str, Any]
) -> FsdpStrategy:
    """A strategy just before it shards, on devices that do not read one another's memory."""
    monkeypatch.setattr(dist, "get_backend", lambda _: "cpu:gloo,cuda:nccl")
    given = {"deterministic": False, "reshard_after_forward": True, "offload_optimizer": False, **fields}
    strategy = object.__new__(FsdpStrategy)
    strategy.layout, strategy._compute = sharing.layout, torch.bfloat16
    strategy.device = Mock(type=kind, torch_device=CPU, copy_obstacle=lambda *_, **__: "GPU 0 cannot read GPU 1")
    strategy._process = Mock(local_world_size=2)
    strategy._task = Mock(deterministic=given.pop("deterministic"), precision=Mock(reduce="fp32"))
    strategy._spec = Mock(copy_engine_collectives=wanted, **given)
    return strategy


def test_memory_that_another_stream_writes_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduced gradients may lie in memory of the stream that computes (``share_gradient_memory``)."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    for name in ("ask_for_determinism", "start_process_group"):
        monkeypatch.setattr(strategy_module, name, Mock(return_value=False))
    strategy = object.__new__(FsdpStrategy)
    strategy._in_float8, strategy.device, strategy._spec = False, CpuDevice(), Mock(offload_optimizer=False)
    strategy._process, strategy._task = Mock(world_size=1), Mock(deterministic=False)
    strategy.setup()
    assert torch.utils.deterministic.fill_uninitialized_memory
    strategy._task = Mock(deterministic=True)
    strategy.setup()
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_two_buffers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    peer(monkeypatch)
    gather = PeerGather(CPU, SIZE)
    first = gather.allocate((4,), dtype=torch.bfloat16, device=CPU)
    second = gather.allocate((8,), dtype=torch.bfloat16, device=CPU)
    addresses = first.data_ptr(), second.data_ptr()
    assert len(set(addresses)) == 2
    del first, second
    third = gather.allocate((2, 2), dtype=torch.float32, device=CPU)
    assert (third.data_ptr(), third.shape) == (addresses[0], (2, 2))


def test_memory_that_is_still_in_use_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    peer(monkeypatch)
    gather = PeerGather(CPU, SIZE)
    kept = gather.allocate((4,), dtype=torch.bfloat16, device=CPU)[1:]
    gather.allocate((4,), dtype=torch.bfloat16, device=CPU)
    with pytest.raises(RunFailed, match=r"more than two groups.*copy_engine_collectives to false"):
        gather.allocate((4,), dtype=torch.bfloat16, device=CPU)
    assert kept.shape == (3,)


def test_what_others_have_is_read_between_two_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = peer(monkeypatch, 0.0, 3.0, dtype=torch.bfloat16)
    buffers = PeerBuffers(CPU, 5, SIZE)
    own = buffers.take((2,), torch.bfloat16)
    ((rank, theirs),) = buffers.others(own, Group())  # type: ignore[arg-type]
    assert (rank, theirs.tolist()) == (1, [0.0, 3.0])
    assert memory.calls[3:] == [5, "rank 1", 5]


@pytest.mark.parametrize(("op", "divided_by"), [(dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 2)])
def test_what_travels_is_bf16_and_the_sum_is_not_rounded(
    monkeypatch: pytest.MonkeyPatch, op: Any, divided_by: int
) -> None:
    own, other = torch.tensor([1.0, 256.0]), torch.tensor([2**-9, 1.0])
    peer(monkeypatch, *other.tolist(), dtype=torch.bfloat16)
    reduction = GradientReduction(CPU, peers=PeerSum(CPU, SIZE), shares_memory=False)
    for _ in range(2):  # memory is asked for in pairs, again and again
        given = reduction.allocate((4,), dtype=torch.bfloat16, device=CPU)
        result = reduction.allocate((2,), dtype=torch.bfloat16, device=CPU)
        given.copy_(torch.cat([own, torch.zeros(2)]))
        reduction(result, given, Group(), op)  # type: ignore[arg-type]
        assert result.tolist() == ((own + other) / divided_by).tolist(), "257 and 1 + 2**-9 are no numbers of bf16"
        del given
    assert not torch.equal(own + other, (own + other).bfloat16().float())


def test_buffers_hold_the_largest_group_and_its_padding() -> None:
    table, layer = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 5)
    model = torch.nn.Sequential(table, layer, torch.nn.Linear(4, 7, bias=False))
    model[2].weight = table.weight  # with the table, which comes first
    groups = [[table], [layer], [model]]
    assert largest_group(groups, 2) >= 8 * 4, "7 rows for 2 processes are 8"
    assert largest_group(groups[1:2], 2) >= 6 * 4 + 6
    assert largest_group(groups, 2) < 2 * 8 * 4


def test_the_double_refuses_what_torch_would_not_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that jobs over several processes, which use it, show a copy that does not wait."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "barrier", lambda _: None)
    memory = PeerMemory(tmp_path)
    tensor = memory.empty(4, dtype=torch.uint8, device=CPU)
    shared = memory.rendezvous(tensor, Group())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="before the barrier"):
        shared.get_remote_tensor(1, tensor.shape, tensor.dtype)
    shared.barrier(0)
    with pytest.raises(AssertionError, match="two streams"):
        shared.barrier(1)
    with pytest.raises(AssertionError, match="another allocator"):
        memory.rendezvous(torch.zeros(4), Group())  # type: ignore[arg-type]
