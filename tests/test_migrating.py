"""docs/migrating.md: every flag of the AWS examples has a row, every field it names exists, every test too."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sm_llm.spec.job import JobSpec
from tests.fixtures.expected_warnings import is_expected

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "migrating.md").read_text()
FLAGS = [
    "train_batch_size",
    "max_steps",
    "max_training_steps",
    "epochs",
    "seed",
    "same_seed",
    "bf16",
    "fp8",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "grad_clip",
    "weight_decay",
    "beta1",
    "beta2",
    "lr",
    "lr_decay_style",
    "lr_decay_iters",
    "min_lr",
    "warmup",
    "plateau",
    "activation_checkpointing",
    "offload_activations",
    "activation_loading_horizon",
    "patch_neox_rope",
    "delayed_param",
    "enable_memory_profiling",
    "clean_cache",
    "logging_freq",
    "logging_freq_for_avg",
    "log_reduced_training_loss",
    "tensorboard_dir",
    "num_kept_checkpoints",
    "checkpoint_freq",
    "checkpoint_dir",
    "resume_from_checkpoint",
    "checkpoint_type",
    "model_dir",
    "save_final_model",
    "dataset_type",
    "data_num_workers",
    "data_type",
    "use_synthetic_data",
    "zipped_data",
    "training_dir",
    "test_dir",
    "hf_pretrained_model_name_or_dir",
    "max_context_width",
    "vocab_size",
    "hidden_width",
    "num_layers",
    "num_heads",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "summary_first_pdrop",
    "initializer_range",
    "model_type",
    "rotary_pct",
    "rotary_emb_base",
    "use_smp_flash_attn",
    "llama_intermediate_size",
    "intermediate_size",
    "sliding_window",
    "num_key_value_heads",
    "num_experts_per_tok",
    "num_local_experts",
    "use_smp_implementation",
    "tensor_parallel_degree",
    "rope_scaling_type",
    "rope_scaling_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_original_max_position_embeddings",
    "moe",
    "moe_load_balancing",
    "global_token_shuffle",
    "moe_all_to_all_dispatcher",
    "cp_comm_type",
    "moe_fp8_checkpoint_attn",
    "moe_fp8_checkpoint_moe",
    "limit_all_gathers",
    "forward_prefetch",
    "sharding_strategy",
    "use_orig_params",
    "shard_degree",
    "backward_fetch_policy",
    "auto_wrap_policy",
    "validation_freq",
    "validation_batches",
    "preserve_np_state",
    "fast_validation",
    "val_batch_size",
    "distributed_backend",
    "nccl_test_log",
    "profile_nsys",
    "framework",
    "cpu_offload",
    "tokenizer",
    "dataset",
    "dataset_config_name",
]
"""Of ``arguments.py`` of awsome-distributed-training (17.SM-modelparallelv2, 10.FSDP) and amazon-sagemaker-examples."""
ROWS = re.findall(r"^\| (`.*?) \| (.*) \|$", PAGE.partition("## Commands")[0], re.MULTILINE)
COMMANDS = re.findall(r"`(sm-llm [^`]+)`", PAGE.partition("## Commands")[2].partition("## Weaknesses")[0])


def test_every_flag_has_exactly_one_row() -> None:
    named = [flag for flags, _ in ROWS for flag in re.findall(r"`([a-z0-9_]+)`", flags)]
    assert sorted(set(FLAGS) - set(named)) == []
    assert sorted({flag for flag in named if named.count(flag) > 1}) == []


def test_every_row_names_a_field_or_states_why_not() -> None:
    silent = [flags for flags, ours in ROWS if "`" not in ours and "nothing" not in ours and ours != "the same"]
    assert [row for row in silent if not row.startswith(("`init", "`num_"))] == []


def fields(schema: dict[str, Any], path: list[str], root: dict[str, Any]) -> bool:
    """Whether a dotted path leads somewhere in a JSON schema, through any branch."""
    if not path:
        return True
    if "$ref" in schema:
        return fields(root["$defs"][schema["$ref"].rpartition("/")[2]], path, root)
    branches = [*schema.get("anyOf", []), *schema.get("oneOf", [])]
    if any(fields(branch, path, root) for branch in branches):
        return True
    found = schema.get("properties", {}).get(path[0])
    return found is not None and fields(found, path[1:], root)


@cache
def job_schema() -> dict[str, Any]:
    return JobSpec.model_json_schema()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(task\.[a-z_.]+)`", PAGE))))
def test_every_field_it_names_exists(path: str) -> None:
    where = path.split(".")
    assert fields(job_schema(), where[:3] if where[:3] == ["task", "model", "config"] else where, job_schema())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command: str) -> None:
    import typer

    from sm_llm.cli.app import app

    words = shlex.split(command)[1:]
    group = typer.main.get_command(app)
    name, verb, rest = group.resolve_command(group.make_context("sm-llm", [], resilient_parsing=True), words)
    assert verb is not None
    assert name is not None
    verb.make_context(name, rest)


@pytest.mark.parametrize("command", [it for it in COMMANDS if it.split()[1] in ("fit", "plan")])
def test_what_a_command_would_submit_is_rendered_without_a_warning(command: str) -> None:
    from sm_llm.launcher.api import preview

    plans, found = preview(*shlex.split(command)[2:])
    assert [it for plan in plans for it in plan.warnings if not is_expected(it)] == []
    assert len(found) == len(plans)
    # A script of Slurm, or manifests of Kubernetes.
    assert all(it.request.get("script", "").startswith("#!/bin/bash\n") or it.request["manifests"] for it in found)


def test_every_weakness_is_answered_by_a_test_that_exists() -> None:
    weaknesses = re.findall(r"^\| (\d+) \| (.*)$", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in weaknesses] == list(range(1, 27))
    for number, text in weaknesses:
        named = re.findall(r"`([a-z/_]+\.py)(?:::(\w+))?`", text)
        assert named, f"weakness {number} names no test"
        for file, name in named:
            tree = ast.parse((ROOT / "tests" / file).read_text())
            tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert not name or name in tests, f"{number}: {file}::{name}"
