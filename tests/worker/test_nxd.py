"""Strategy nxd on the contract double of neuronx-distributed: losses, checkpoints, published models, calls.

What XLA, its compiler and NeuronCores do is not shown here.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from conftest import launch
from nxd_configurations import LAYOUTS, LEAN, MAX_NORM, SHORT, STEPS, TIED, UNTIED, WIDE_LAYOUTS
from plain_loop import plain_losses
from worker_jobs import events, exact_steps, losses, result_folder, train_task

from sm_llm.convert.api import convert
from sm_llm.spec.tasks import TrainTask

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import World

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def nxd2(worlds_root: Path, forks: dict[str, str]) -> World:
    return launch(worlds_root, 2, {}, environ=forks, script="nxd_configurations.py", name="nxd-2")


@pytest.fixture(scope="session")
def nxd4(worlds_root: Path, nxd2: World, forks: dict[str, str]) -> World:
    return launch(worlds_root, 4, {}, environ=forks, script="nxd_configurations.py", name="nxd-4")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return plain_losses(train_task(model=UNTIED, **SHORT, **LEAN), tmp_path_factory.mktemp("plain") / "model")


def difference(run: Path, expected: dict[int, float]) -> float:
    found = losses(run)
    assert found.keys() == expected.keys()
    return max(abs(found[step] - expected[step]) for step in found)


def calls(world: World, name: str) -> list[tuple[str, dict[str, str]]]:
    return [(call, options) for call, options in world.results["calls"][name]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_of_two_processes_are_those_of_the_plain_model(name: str, plain: dict[int, float], nxd2: World) -> None:
    assert difference(nxd2.run(name), plain) < 1e-5


@pytest.mark.parametrize("name", [*WIDE_LAYOUTS, "heads-trn2"])
def test_losses_with_copied_heads_and_stages_are_those_of_the_plain_model(
    name: str, plain: dict[int, float], nxd4: World
) -> None:
    """Gradients are clipped in every step, so their norm counts each copied head once."""
    assert min(event["grad_norm"] for event in events(nxd4.run(name), "step")) > MAX_NORM
    assert difference(nxd4.run(name), plain) < 1e-5


@pytest.mark.parametrize("name", WIDE_LAYOUTS)
def test_CV13_gradient_norms_count_copied_heads_once(name: str, nxd2: World, nxd4: World) -> None:
    """AdamW hardly changes with the scale of gradients, so that losses alone would not show a wrong norm."""
    wanted = [event["grad_norm"] for event in events(nxd2.run("data"), "step")]
    assert [event["grad_norm"] for event in events(nxd4.run(name), "step")] == pytest.approx(wanted, rel=1e-4)


def test_losses_in_bf16_with_fp32_masters_are_near_those_of_the_plain_model(
    plain: dict[int, float], nxd4: World
) -> None:
    assert difference(nxd4.run("bf16"), plain) < 2e-2


def test_losses_of_a_tied_model_are_those_of_the_plain_model(nxd2: World, tmp_path: Path) -> None:
    assert (
        difference(nxd2.run("tied"), plain_losses(train_task(model=TIED, **SHORT, **LEAN), tmp_path / "model")) < 1e-5
    )


def test_a_broken_run_continues_bit_for_bit_at_its_place_in_the_data(nxd2: World, nxd4: World) -> None:
    for world, broken, whole in (
        (nxd2, "broken", "tensor"),
        (nxd2, "broken-copied", "copied"),
        (nxd4, "broken", "bf16"),
    ):
        assert exact_steps(world.run(broken)) == exact_steps(world.run(whole))
        assert [event["step"] for event in events(world.run(broken), "start_chosen")] == [0, 3]
        assert events(world.run(broken), "state_verified"), "the hash of what every process restored was compared"
        samples = world.results["samples"]
        assert samples[broken] == samples[whole]
        assert ("load_checkpoint", {"tag": "step_3"}) in calls(world, broken)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_checkpoint_of_a_broken_run_becomes_what_the_run_would_have_published(
    processes: int, nxd2: World, nxd4: World, tmp_path: Path
) -> None:
    """Of a run of three steps, which has the same weights; in bf16 with fp32 masters, and in fp32."""
    world = {2: nxd2, 4: nxd4}[processes]
    report = convert(f"{world.run('left')}@3", tmp_path / "model", to="hf", verify=True)
    assert "logits" in report.verified
    assert published_tensors(tmp_path / "model") == published_tensors(result_folder(world.run("three")))
    assert validation_loss(tmp_path / "model") == pytest.approx(validation_loss(result_folder(world.run("three"))))


@pytest.mark.parametrize("name", [*LAYOUTS, "tied", *WIDE_LAYOUTS, "heads-trn2", "bf16"])
def test_a_checkpoint_of_every_layout_becomes_what_was_published_at_its_step(
    name: str, nxd2: World, nxd4: World, tmp_path: Path
) -> None:
    world = nxd2 if name in (*LAYOUTS, "tied") else nxd4
    convert(str(world.run(name)), tmp_path / "model", to="hf")
    assert published_tensors(tmp_path / "model") == published_tensors(result_folder(world.run(name)))


def published_tensors(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Name -> format, shape and bytes of every tensor; a bf16 tensor has no numpy form."""
    body = (folder / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(body[:8], "little")
    found = {name: it for name, it in json.loads(body[8:length]).items() if name != "__metadata__"}
    spans = {name: it["data_offsets"] for name, it in found.items()}
    return {
        name: (it["dtype"], it["shape"], body[length + spans[name][0] : length + spans[name][1]])
        for name, it in found.items()
    }


def test_a_program_in_a_checkpoint_is_not_run(nxd2: World) -> None:
    """NxD itself opens these files with an unrestricted unpickler."""
    messages = [it["message"] for it in events(nxd2.run("hostile"), "failed") if it["attempt"] == 2]
    assert any("does not fit this job's model" in it for it in messages)
    assert not (nxd2.run("hostile") / "RAN").exists()


def test_other_degrees_are_refused_before_a_model_is_built(nxd2: World) -> None:
    [message] = {it["message"] for it in events(nxd2.run("left"), "failed") if it["attempt"] == 2}
    assert "tensor_parallel_degree 2 -> 1" in message
    assert "start.pretrained" in message
    assert not [call for call, _ in calls(nxd2, "left") if call == "initialize_parallel_model"]


@pytest.mark.parametrize("name", ["tensor", "data", "tied"])
def test_CV07_transformers_computes_the_last_validation_loss_from_what_was_published(name: str, nxd2: World) -> None:
    assert validation_loss(result_folder(nxd2.run(name))) == pytest.approx(reported_loss(nxd2.run(name)), abs=1e-5)


@pytest.mark.parametrize("name", ["heads", "heads-trn2", "heads-linear", "pipeline"])
def test_CV09_CV13_copied_heads_and_stages_come_together_in_what_was_published(name: str, nxd4: World) -> None:
    assert validation_loss(result_folder(nxd4.run(name))) == pytest.approx(reported_loss(nxd4.run(name)), abs=1e-5)


def reported_loss(run: Path) -> float:
    [found] = events(run, "validation")
    return float(found["validation_loss"])


@torch.no_grad()
def validation_loss(folder: Path) -> float:
    """Mean token loss of a published model over the job's validation rows, by transformers."""
    from transformers import AutoModelForCausalLM

    from sm_llm.data.loader import open_source
    from sm_llm.data.source import Source

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert (list(info["missing_keys"]), list(info["unexpected_keys"])) == ([], [])
    fields = TrainTask.model_validate(train_task(), strict=False)
    source = open_source(fields.data, "validation", int(model.config.vocab_size), fields.seed)
    assert isinstance(source, Source)
    assert source.count is not None
    ids = torch.from_numpy(source.rows(np.arange(source.count)).input_ids)
    return float(model(input_ids=ids, labels=ids).loss)


def test_training_starts_from_published_weights(nxd2: World) -> None:
    assert losses(nxd2.run("pretrained"))[1] < losses(nxd2.run("tensor"))[1] - 0.05
    [start] = events(nxd2.run("pretrained"), "start_chosen")
    assert (start["source"], bool(start["digest"])) == ("pretrained", True)


def test_training_starts_from_shards_of_other_degrees_as_from_the_weights_they_were_cut_from(nxd2: World) -> None:
    assert exact_steps(nxd2.run("from-shards")) == exact_steps(nxd2.run("pretrained"))


def test_a_prompt_is_continued_with_batches_of_one_shape(nxd2: World) -> None:
    [sample] = events(nxd2.run("sampled"), "sample")
    assert sample["text"]


def test_the_library_is_called_in_its_order_with_what_the_job_asks_for(nxd4: World) -> None:
    names = [call for call, _ in calls(nxd4, "pipeline")]
    wanted = [
        "initialize_model_parallel",
        "neuronx_distributed_config",
        "initialize_parallel_model",
        "NxDPPModel",
        "initialize_parallel_optimizer",
    ]
    assert [name for name in names if name in wanted] == wanted
    given = dict(calls(nxd4, "pipeline"))
    assert given["initialize_model_parallel"] == {"tensor": "2", "pipeline": "2", "data": "1"}
    assert given["NxDPPModel"] == {"num_microbatches": "4", "zero1": "True"}
    config = given["neuronx_distributed_config"]
    assert config["sequence_parallel"] == "True"
    assert "'zero_one_enabled': True" in config["optimizer_config"]
    assert "CoreAttention" in config["activation_checkpoint_config"]
    assert dict(calls(nxd4, "bf16"))["initialize_parallel_optimizer"]["use_master_weights"] == "True"


def test_graphs_are_cut_once_a_micro_batch_and_once_an_update(nxd2: World) -> None:
    """Four micro-batches a step, ten validation rows; a graph that grows with the step would be compiled anew."""
    cuts = [call for call, _ in calls(nxd2, "tensor") if call == "mark_step"]
    assert len(cuts) >= STEPS * (4 + 1) + 10


def test_a_process_without_the_sdk_states_which_image_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from sm_llm.errors import RunFailed
    from sm_llm.worker.process_info import ProcessInfo
    from sm_llm.worker.strategies.table import find_device

    with pytest.raises(RunFailed, match=r"pytorch-training-neuronx:2\.9\.0-neuronx-py312-sdk2\.28\.0-ubuntu24\.04"):
        find_device("nxd", ProcessInfo())


@pytest.mark.parametrize(("pipeline", "location"), [(False, "meta"), (True, "cpu")])
def test_rows_of_a_pipeline_stay_on_the_host(pipeline: bool, location: str) -> None:
    """NxD's pipeline raises for rows on a device. On the double the device is the host, so another one stands in."""
    from sm_llm.data.source import Batch
    from sm_llm.worker.strategies.nxd.strategy import NxdStrategy

    of_engine = {"_is_pipeline": pipeline, "_rows": 2, "_task": SimpleNamespace(micro_batch=1)}
    engine: Any = SimpleNamespace(device=SimpleNamespace(torch_device=torch.device("meta")), **of_engine)
    rows = np.zeros((2, 4), np.int64)
    found = NxdStrategy._inputs(engine, [Batch(rows, rows)], torch.tensor(0.5))
    assert {name: it.device.type for name, it in found.items()} == dict.fromkeys(found, location)


def test_losses_do_not_change_with_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from sm_llm.worker.strategies.nxd import library
    from sm_llm.worker.strategies.nxd.model import CoreAttention, FlashAttention

    seen: dict[str, Any] = {}

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.update(options)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    symbols = {"nki_flash_attn_func": kernel, "get_platform_target": lambda: "trn2"}
    monkeypatch.setattr(library, "symbol", lambda module, name: symbols[name])
    heads = torch.randn(3, 2, 4, 8, 16)
    assert torch.allclose(FlashAttention()(*heads), CoreAttention()(*heads), atol=1e-6)
    assert seen == {"transpose_nki_inputs": False, "lnc": 2}, "the layout that is passed, and how many cores are one"
