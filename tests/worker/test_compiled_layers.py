"""``precision.compile``: one graph per decoder layer with every way of checkpointing, alone and under FSDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from compiled_layers import SPLIT, WAYS, every_way
from conftest import launch, own_start

from sm_llm.runs.events.events import LayersCompiled
from sm_llm.spec.parallelism.fsdp import FsdpSpec
from sm_llm.worker.process_info import ProcessInfo
from sm_llm.worker.strategies import compiled
from sm_llm.worker.strategies.compiled import CompiledLayers
from sm_llm.worker.strategies.fsdp.memory import computed_part, wrap_layer
from sm_llm.worker.training.compile_report import warning

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

Results = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module", params=["alone", "fsdp"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("compiled")
    if request.param == "alone":
        return every_way(WAYS, ProcessInfo(), folder)
    return launch(folder, 2, {}, script="compiled_layers.py").results


@pytest.fixture(scope="module")
def split_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two processes share each matrix."""
    environ = {**own_start(), "SPLIT": "1"}
    return launch(tmp_path_factory.mktemp("split"), 2, {}, script="compiled_layers.py", environ=environ).results


@pytest.mark.parametrize("way", WAYS)
def test_every_layer_is_one_compiled_graph(results: Results, way: str) -> None:
    report = LayersCompiled(**results[way]["compiled"]["report"])
    assert (report.layers, report.eager, report.broken, report.graph_breaks) == (2, [], [], {})
    assert report.graphs == (2 if way == "every_nth" else 1), "layers of one kind share their graph"
    assert warning(report) is None
    assert results[way]["eager"]["report"] is None


@pytest.mark.parametrize("way", WAYS)
def test_compiling_changes_no_number_and_no_name(results: Results, way: str) -> None:
    eager, found = (results[way][it] for it in ("eager", "compiled"))
    assert found["numbers"] == pytest.approx(eager["numbers"], rel=1e-5)
    assert found["names"] == eager["names"] == results["none"]["eager"]["names"], "old checkpoints must load"


@pytest.mark.parametrize("way", SPLIT)
def test_compiled_layers_whose_matrices_are_split_pass_gradients_to_what_lies_before_them(
    split_results: Results, way: str
) -> None:
    """Losses of the second step and both norms hang on the token table, which is before the first compiled layer."""
    eager, found = (split_results[way][it] for it in ("eager", "compiled"))
    assert found["numbers"] == pytest.approx(eager["numbers"], rel=1e-5)
    report = LayersCompiled(**found["report"])
    assert (report.eager, report.broken) == ([], [])


@pytest.mark.parametrize(
    ("way", "message"),
    [("torch-alone", ".DeviceMesh"), ("tensor-full", ".DeviceMesh"), ("tensor-budget", "ScriptObject")],
)
def test_torch_cannot_compile_what_is_refused_with_split_matrices(
    split_results: Results, way: str, message: str
) -> None:
    """A DeviceMesh is among what the backward pass would need; once this fails, the refusal can go."""
    assert message in str(split_results[way]["error"])


class Whole(torch.nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * 3


class Broken(torch.nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values * 2
        torch._dynamo.graph_break()
        return values + 1


class Skipped(torch.nn.Module):
    @torch.compiler.disable
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * 2


def test_layers_that_run_eagerly_or_in_pieces_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = CompiledLayers()
    modules: dict[str, torch.nn.Module] = {"layers.0": Broken(), "layers.1": Skipped(), "layers.2": Whole()}
    for name, module in modules.items():
        layers.compile(module, name)
        module(torch.ones(2))
    report = layers.report()
    assert report is not None
    assert (report.layers, report.eager, report.broken) == (3, ["layers.1"], ["layers.0"])
    assert report.graph_breaks
    text = warning(report)
    assert text is not None
    assert "1 (layers.1) run eagerly" in text
    assert "1 (layers.0) run as several graphs" in text
    assert next(iter(report.graph_breaks)) in text


def test_a_compiled_layer_offloads_its_inputs_and_keeps_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.autograd.graph import save_on_cpu

    moved: list[int] = []

    class Spy(save_on_cpu):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (moved.append(tensor.numel()), pack(tensor))[1]

    monkeypatch.setattr("sm_llm.worker.strategies.fsdp.memory.save_on_cpu", Spy)
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    spec = FsdpSpec(activation_checkpointing="full", offload_activations=True)
    layer = wrap_layer(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)), 0, spec, keep_rng=False)
    CompiledLayers().compile(computed_part(layer), "layer")
    layer(torch.ones(3, 8, requires_grad=True)).sum().backward()
    assert moved == [24], "its input alone"


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            values = torch.sigmoid(part(values))
        return values


def inductors_partitioner(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend that divides forward from backward as inductor does, and compiles neither."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_autograd(fw_compiler=nop, partition_fn=min_cut_rematerialization_partition)(graph, inputs)


def saved_bytes(budget: float | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """What a compiled layer keeps for its backward pass."""
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: inductors_partitioner)
    torch._dynamo.reset()
    layer = Deep()
    CompiledLayers(budget).compile(layer, "layer")
    sizes: dict[int, int] = {}
    values = torch.ones(512, 64, requires_grad=True)

    layer(values).sum().backward()  # compiled where no hook is set: hooks become a part of the graph

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(values).sum().backward()
    return sum(sizes.values())


def test_a_memory_budget_bounds_what_a_compiled_layer_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [saved_bytes(budget, monkeypatch) for budget in (None, 0.6, 0.2)]
    assert kept == sorted(set(kept), reverse=True)
    assert saved_bytes(None, monkeypatch) == kept[0], "a budget is that of its own job"


def test_a_training_reports_what_was_compiled_and_warns_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from worker_jobs import events, job_environment, job_file, train_task

    from sm_llm.worker.main import main
    from sm_llm.worker.strategies.fsdp import strategy as fsdp

    def computed_eagerly(layer: torch.nn.Module) -> torch.nn.Module:
        layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign]
        return layer

    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(fsdp, "computed_part", computed_eagerly)
    torch._dynamo.reset()
    job = job_file(train_task(precision={"compute": "fp32", "compile": True}, max_steps=2), tmp_path / "run", 1)
    assert main("train", job_environment(job)) == 0
    (found,) = events(tmp_path / "run", "layers_compiled")
    assert found["eager"] == ["model.layers.0", "model.layers.1"]
    notices = [(it["level"], it["message"]) for it in events(tmp_path / "run", "notice")]
    assert ("info", "draws the initial weights") in notices
    (text,) = [text for level, text in notices if level == "warning" and "precision.compile" in text]
    assert "of 2 layers 2 (model.layers.0, model.layers.1) run eagerly" in text
