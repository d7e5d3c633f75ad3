"""Pretrained weights against the config beside them: every file, name, shape and format, before anything starts."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sm_llm.errors import PlanError, SpecError
from sm_llm.launcher.planner import plan
from sm_llm.models.config import both_spellings, model_config, normalise
from sm_llm.models.families.table import family
from sm_llm.models.safetensors_folder import StoredTensor
from sm_llm.models.weights_check import CheckedWeights, check_weights, not_finite

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Arrays = dict[str, Any]

BASE = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
QUERY = "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def arrays(**changes: Any) -> Arrays:
    config = normalise({**BASE, **changes})
    random = np.random.default_rng(7)
    shapes = {name: tensor.shape for name, tensor in family(config).tensors(config).items()}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder: Path, values: Arrays, shards: int = 0, **changes: Any) -> Path:
    """A model folder; ``shards`` files with an index, or one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(both_spellings({**BASE, **changes})))
    if not shards:
        save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    locations = {name: files[number % shards] for number, name in enumerate(values)}
    for file in files:
        save_file({name: values[name] for name, location in locations.items() if location == file}, folder / file)
    total = sum(value.nbytes for value in values.values())
    write_index(folder, locations, total)
    return folder


def write_index(folder: Path, locations: dict[str, str], total: Any = None) -> None:
    metadata = {} if total is None else {"total_size": total}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": locations}))


def index(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return content


def checked(folder: Path) -> CheckedWeights:
    return check_weights(folder, model_config(preset=None, path=None, pretrained=str(folder), overrides={}))


def message(folder: Path) -> str:
    """What a plan reports of the folder as ``start.pretrained``: it must be refused, at that field."""
    task = {
        "kind": "train",
        "start": {"pretrained": str(folder)},
        "data": {"format": "synthetic", "seq_length": 16, "rows": 50},
        "max_steps": 2,
    }
    with pytest.raises(PlanError) as caught:
        plan({"name": "x", "task": task})
    found = [fault for fault in caught.value.issues if fault.path == "task.start.pretrained"]
    assert found
    assert all(fault.remedy.count(", or ") + fault.remedy.count("; or ") >= 1 for fault in found), "two ways out"
    return "\n".join(map(str, found))


@pytest.mark.parametrize("shards", [0, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_sound_weights_are_taken(shards: int, tied: bool, tmp_path: Path) -> None:
    folder = write(tmp_path / "w", arrays(tie_word_embeddings=tied), shards, tie_word_embeddings=tied)
    found = checked(folder)
    assert (found.issues, found.unread) == ((), ())
    assert len(found.tensors) == 21 - tied


def test_the_links_of_the_hubs_cache_are_taken(tmp_path: Path) -> None:
    folder = write(tmp_path / "snapshots" / "abc", arrays(), 2)
    for number, file in enumerate(sorted(folder.glob("*.safetensors"))):
        blob = tmp_path / "blobs" / str(number)
        blob.parent.mkdir(exist_ok=True)
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, file.parent))
    assert checked(folder).issues == ()


def test_F4_a_tied_config_with_another_head_is_refused(tmp_path: Path) -> None:
    values = arrays()
    folder = write(tmp_path / "w", values, tie_word_embeddings=True)
    text = message(folder)
    assert "lm_head.weight, which differs from model.embed_tokens.weight" in text
    assert "tie_word_embeddings: false" in text
    assert "remove lm_head.weight" in text
    alone = {name: it for name, it in values.items() if name != "model.embed_tokens.weight"}
    text = message(write(tmp_path / "head", alone, tie_word_embeddings=True))
    assert "lm_head.weight, and no model.embed_tokens.weight" in text
    values["lm_head.weight"] = values["model.embed_tokens.weight"].copy()
    assert checked(write(tmp_path / "copy", values, tie_word_embeddings=True)).issues == ()


def test_F4_an_untied_config_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "w", arrays(tie_word_embeddings=True), tie_word_embeddings=False)
    assert "lacks lm_head.weight" in message(folder)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [(np.int8, "I8"), (np.uint8, "U8"), (np.bool_, "BOOL"), (np.int64, "I64")],
)
def test_F9_integers_are_refused(values: Any, dtype: str, tmp_path: Path) -> None:
    weights = arrays()
    weights[UP] = (weights[UP] * 100).astype(values)
    text = message(write(tmp_path / "w", weights))
    assert f"{tmp_path}/w/model.safetensors: {UP} is stored as {dtype}" in text


def test_F9_eight_bit_floats_are_refused(tmp_path: Path) -> None:
    weights = arrays()
    weights[UP] = weights[UP].astype(np.uint8)
    file = write(tmp_path / "w", weights) / "model.safetensors"
    body = file.read_bytes()
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    header[UP]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body[8 + length :])
    assert f"{UP} is stored as F8_E4M3" in message(file.parent)


def test_F9_tensors_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    text = message(write(tmp_path / "w", {**arrays(), "model.layers.0.self_attn.q_proj.bias": np.ones(48, np.float32)}))
    assert "w/model.safetensors holds model.layers.0.self_attn.q_proj.bias" in text


def test_F9_more_layers_than_the_config_are_named(tmp_path: Path) -> None:
    text = message(write(tmp_path / "w", arrays(), num_hidden_layers=1))
    assert "the config has 1 layers, the weights have 2" in text


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"num_hidden_layers": 3}, "the config has 3 layers, the weights have 2"),
        ({"vocab_size": 320}, "model.embed_tokens.weight has shape [300, 48], the config makes it [320, 48]"),
        ({"hidden_size": 64}, "model.embed_tokens.weight has shape [300, 48], the config makes it [300, 64]"),
        ({"num_key_value_heads": 4}, "self_attn.k_proj.weight has shape [24, 48], the config makes it [48, 48]"),
        ({"intermediate_size": 64}, "mlp.up_proj.weight has shape [96, 48], the config makes it [64, 48]"),
        ({"attention_bias": True}, "lacks model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_a_config_of_another_model_is_refused(changes: dict[str, Any], reported: str, tmp_path: Path) -> None:
    assert reported in message(write(tmp_path / "w", arrays(), **changes))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def _append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0" * 8)


def _huge_header(file: Path) -> None:
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])


def _no_header(file: Path) -> None:
    file.write_bytes(b"abc")


def _not_json(file: Path) -> None:
    file.write_bytes((20).to_bytes(8, "little") + b"x" * 400)


def _nested(file: Path) -> None:
    text = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    file.write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (_cut, "is truncated"),
        (_append, "has 8 trailing bytes"),
        (_huge_header, "is not a whole safetensors file"),
        (_no_header, "is not a whole safetensors file"),
        (_not_json, "has a damaged header"),
        (_nested, "has a damaged header (it is nested too deeply)"),
    ],
)
@pytest.mark.parametrize("shards", [0, 2])
def test_F10_damaged_files_are_named(
    damage: Callable[[Path], None], reported: str, shards: int, tmp_path: Path
) -> None:
    folder = write(tmp_path / "w", arrays(), shards)
    file = sorted(folder.glob("*.safetensors"))[-1]
    damage(file)
    assert f"{file} {reported}" in message(folder)


def test_F10_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "w", arrays(), 3)
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    assert f"{gone} is missing, but model.safetensors.index.json names it" in message(folder)


def test_a_tensor_in_another_shard_than_the_index_states_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "w", arrays(), 2)
    locations = index(folder)["weight_map"]
    first, second = sorted(set(locations.values()))
    write_index(folder, {**locations, QUERY: first if locations[QUERY] == second else second})
    assert f"does not hold {QUERY}" in message(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "w", arrays(), 2)
    locations = index(folder)["weight_map"]
    other = next(file for file in sorted(set(locations.values())) if file != locations[QUERY])
    save_file({**load_file(folder / other), QUERY: np.zeros((48, 48), np.float32)}, folder / other)
    assert f"{QUERY} is in several files" in message(folder)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/elsewhere.safetensors", "a/../../b.safetensors"])
def test_an_index_that_leads_out_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "w", arrays(), 2)
    write_index(folder, {**index(folder)["weight_map"], QUERY: name})
    save_file({QUERY: np.zeros((48, 48), np.float32)}, tmp_path / "elsewhere.safetensors")
    assert "names files outside of its folder" in message(folder)


@pytest.mark.parametrize("total", [17, 200_000, 10**9, "many", True])
def test_an_index_with_a_wrong_total_is_refused(total: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "w", arrays(), 2)
    write_index(folder, index(folder)["weight_map"], total)
    assert "total_size" in message(folder)


@pytest.mark.parametrize("beyond", [0, 700, 300 * 48 * 4])
def test_a_total_of_another_format_of_the_same_weights_is_taken(beyond: int, tmp_path: Path) -> None:
    """Buffers of other sizes, or a tied head counted beside its embedding, as published indexes have them."""
    folder = write(tmp_path / "w", arrays(tie_word_embeddings=True), 2, tie_word_embeddings=True)
    content = index(folder)
    write_index(folder, content["weight_map"], content["metadata"]["total_size"] + beyond)
    assert checked(folder).issues == ()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "w", arrays(), 2)
    (folder / "model.safetensors.index.json").write_text(text)
    assert "is not a usable index" in message(folder)


def test_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "w", arrays(), 2)
    save_file(arrays(), folder / "model.safetensors")
    assert "two sets of weights" in message(folder)
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert checked(folder).issues == ()  # beside the index under another name: published models have it


def test_tensors_that_the_index_leaves_out_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "w", {**arrays(), "left.over": np.ones(3, np.float32)}, 2)
    locations = index(folder)["weight_map"]
    locations.pop("left.over")
    write_index(folder, locations)
    assert "holds left.over" in message(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_is_refused(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "w", arrays())
    (folder / name).write_text("{}")
    assert f"{folder / name} is an adapter" in message(folder)


def test_names_under_another_prefix_are_explained(tmp_path: Path) -> None:
    folder = write(tmp_path / "w", {f"module.{name}": value for name, value in arrays().items()})
    assert "module.model.embed_tokens.weight may be model.embed_tokens.weight under another prefix" in message(folder)


def test_buffers_of_older_files_are_accepted_and_named(tmp_path: Path) -> None:
    extra = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32) for layer in range(2)}
    found = checked(write(tmp_path / "w", {**arrays(), **extra}))
    assert (found.issues, found.unread) == ((), tuple(extra))
    config = normalise(NEOX)
    values: Arrays = {n: np.zeros(t.shape, np.float32) for n, t in family(config).tensors(config).items()}
    mask = np.tril(np.ones((1, 1, 8, 8), np.bool_))
    values |= {"gpt_neox.layers.0.attention.bias": mask, "gpt_neox.layers.0.attention.masked_bias": np.float32(-1e9)}
    (tmp_path / "neox").mkdir()
    save_file({name: np.asarray(value) for name, value in values.items()}, tmp_path / "neox" / "model.safetensors")
    found = check_weights(tmp_path / "neox", config)
    assert found.issues == ()
    assert set(found.unread) == {"gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.masked_bias"}


@pytest.mark.parametrize("changes", [{"num_attention_heads": 8, "num_key_value_heads": 4}, {"rope_theta": 5e5}])
def test_a_config_from_elsewhere_must_compute_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    """Heads and rotary positions show in no tensor: only the config beside the weights has them."""
    weights, other = write(tmp_path / "w", arrays()), tmp_path / "other.json"
    other.write_text(json.dumps({**BASE, **changes}))
    with pytest.raises(SpecError, match=r"task\.model\.path: has (num_|rope_).* beside the weights"):
        model_config(preset=None, path=str(other), pretrained=str(weights), overrides={})
    other.write_text(json.dumps({**BASE, "max_position_embeddings": 512, "initializer_range": 0.1}))
    found = model_config(preset=None, path=str(other), pretrained=str(weights), overrides={})
    assert found["max_position_embeddings"] == 512


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["<f4", "<f2", "<f8"])
def test_12f_values_that_are_not_finite_are_refused_by_the_plan(tmp_path: Path, value: float, kind: str) -> None:
    values = {name: it.astype(kind) for name, it in arrays().items()}
    values[UP][3, 5] = value
    folder = write(tmp_path / "weights", values)
    spec = {
        "name": "tuned",
        "task": {
            "kind": "train",
            "data": {"format": "synthetic", "seq_length": 8, "rows": 8},
            "max_steps": 2,
            "start": {"pretrained": str(folder)},
        },
    }
    with pytest.raises(PlanError, match=f"{UP}: values that are NaN or infinite"):
        plan(spec)
    values[UP][3, 5] = np.finfo(kind).max
    assert plan({**spec, "task": {**spec["task"], "start": {"pretrained": str(write(folder, values))}}})  # type: ignore[dict-item]


def test_12f_bits_of_bf16_that_are_not_finite_are_known(tmp_path: Path) -> None:
    file = tmp_path / "bits"
    for bits, is_wrong in ((0x7F80, True), (0xFFC0, True), (0x7F7F, False), (0x0001, False)):
        file.write_bytes(np.array([0x3F80, bits], dtype="<u2").tobytes())
        tensor = StoredTensor(file, "BF16", (2,), 0, 4)
        assert bool(list(not_finite({"x": tensor}, 4))) is is_wrong
        assert not list(not_finite({"x": tensor}, 3)), "larger ones are left to the worker"
