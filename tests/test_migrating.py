"""docs/migrating.md: every flag of the AWS examples has a row, every field it names exists, every test too."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from sm_llm.spec.job import JobSpec
from tests.fixtures.expected_warnings import is_expected
from tests.launcher.slurm.test_jobs import listed
from tests.launcher.slurm.test_nodes import Doctored, found

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
ON_SLURM = re.findall(
    r"^\| (.*?) \| (.*) \|$", PAGE.partition("## Commands on Slurm")[2].partition("## Commands on Kub")[0], re.MULTILINE
)
THEIRS = {
    "17.SM-modelparallelv2": (
        "policy for ECR", "docker_build.sh", "cuDNN", "sbatch launch_training_enroot.sh", "--training_dir",
        "--zipped_data 1",
        "--resume_from_checkpoint", "--finetune 1", "--pretrained_model_name", "--pretrained_checkpoint_file",
        "--finetune_checkpoint_load_dir",
    ),
    "10.FSDP": ("0.create_conda_env.sh", "sbatch 1.distributed-training.sbatch", "--checkpoint_dir", "--auto-resume=1"),
    "llama3 on HyperPod": (
        "python3.8 -m venv", "pip install torch-neuronx", "pip install -r requirements.txt", "git clone", "cp",
        "sed -i", "huggingface-cli login", "huggingface-cli download", "get_dataset.py", "save-llama3-70B-model.py",
        "convert_checkpoints.py", "wc -l", "--pretrained_weight_dir", "sbatch --auto-resume=True",
        "run_llama3_70B_tp_pp.sh", "tail -f",
    ),
    "llama2 on ParallelCluster": (
        "neuronx_distributed", "submit_ckpt_download_convert_job.sh", "submit_precompilation_job.sh",
        "submit_training_job.sh", "submit_convert_to_full.sh", "dp_steps_per_epoch.py", "neuron_compile_cache",
        "--load_pretrained_checkpoint", "--pretrained_checkpoint_dir", "--checkpoint_freq", "--num_kept_checkpoint",
        "--logging_interval", "TP_DEGREE", "GBS", "MBS", "TOTAL_STEPS", "LR", "WARMUP_STEPS", "SEQ_LEN", "sinfo",
        "scontrol show nodes", "squeue", "scancel",
    ),
}  # fmt: skip
"""What the READMEs of the examples let one type on Slurm, or set in their scripts."""
OURS = (
    "doctor", "image import", "image build", "image push", "env create --profile fsdp", "env create --profile neuron",
    "fit", "plan", "resume", "branch", "convert", "metrics", "logs -f", "status", "nodes", "stop",
)  # fmt: skip
"""Verbs that stand for them."""


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


@pytest.mark.parametrize("readme", THEIRS)
def test_every_command_of_the_readmes_on_slurm_has_a_row(readme: str) -> None:
    there = "\n".join(cell for cell, _ in ON_SLURM)
    assert [it for it in THEIRS[readme] if it not in there] == []


def test_every_verb_that_stands_for_one_is_named_on_slurm() -> None:
    here = "\n".join(cell for _, cell in ON_SLURM)
    assert [it for it in OURS if f"`sm-llm {it}" not in here] == []


def test_doctor_prints_the_policy_that_its_row_promises() -> None:
    """The policy for ECR, with the very options of the row."""
    [command] = [it for it in COMMANDS if it.startswith("sm-llm doctor --backend slurm")]
    given = dict(it.removeprefix("backend.").split("=", 1) for it in shlex.split(command)[4:])
    checks = found(Doctored(listed("RUNNING")), virtual_environment=None, **given)
    policy = checks["image in ECR"].policy
    assert policy is not None
    assert "658645717510:repository/smdistributed-modelparallel" in policy["Statement"][0]["Resource"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command: str) -> None:
    import typer

    from sm_llm.cli.app import app

    words = shlex.split(command)[1:]
    verb = typer.main.get_command(app)
    name = "sm-llm"
    # ``image import`` is a verb of a group.
    while isinstance(verb, click.Group):
        found_name, found_verb, words = verb.resolve_command(verb.make_context(name, [], resilient_parsing=True), words)
        assert found_name is not None
        assert found_verb is not None
        name, verb = found_name, found_verb
    verb.make_context(name, words)


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
