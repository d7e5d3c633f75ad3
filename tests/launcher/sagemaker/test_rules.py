"""What SDK, botocore and moto accept and the service refuses, or worse runs: found before anything is uploaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import SpecError
from sm_llm.launcher.planner import plan, plan_loaded
from sm_llm.spec.loading.load import load
from sm_llm.spec.machines.hardware import INSTANCES
from tests.launcher.sagemaker.conftest import SCRIPT, TINY, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sm_llm.errors import Issue

    Faults = Callable[..., list[Issue]]

SMP = ("task.parallelism.strategy=smp", "compute.instance_type=ml.p4d.24xlarge")
NXD = ("task.parallelism.strategy=nxd", "compute.instance_type=ml.trn1.32xlarge")
LLAMA_3 = ("task.model.preset=llama-3-8b", *NXD)

REFUSED: list[tuple[str, tuple[str, ...], str, str]] = [
    ("an unknown smp key", (*SMP, "task.parallelism.bogus_degree=-3"), "task.parallelism.bogus_degree", "unknown key"),
    ("a misspelt strategy", ("task.parallelism.strategy=fsdpp",), "task.parallelism.strategy", "choose fsdp"),
    ("SMP on G5", (SMP[0], "compute.instance_type=ml.g5.2xlarge"), "compute.instance_type", "P4d, P4de and P5"),
    *(
        (f"SMP's {number} for a version", (*SMP, f"backend.image_version={number}"), "backend.image_version", "Known: ")
        for number in ("2.5.0", "2.7.0", "2.8.0")
    ),
    (
        "wait below run",
        ("backend.spot=true", "backend.max_run_seconds=9", "backend.max_wait_seconds=8"),
        "backend.max_wait_seconds",
        "Use at least 9",
    ),
    ("wait without spot", ("backend.max_wait_seconds=3600",), "backend.max_wait_seconds", "spot capacity only"),
    (
        "a warm pool of spot",
        ("backend.spot=true", "backend.keep_alive_period_in_seconds=60"),
        "backend.keep_alive_period_in_seconds",
        "cannot be of spot",
    ),
    (
        "a warm pool of 27 hours",
        ("backend.keep_alive_period_in_seconds=99999",),
        "backend.keep_alive_period_in_seconds",
        "at most 21,600",
    ),
    ("a run of 60 days", ("backend.max_run_seconds=5184000",), "backend.max_run_seconds", "28 days"),
    ("no nodes", ("compute.instance_count=0",), "compute.instance_count", "at least 1"),
    ("a type without ml.", ("compute.instance_type=p5.48xlarge",), "compute.instance_type", "begin with ml."),
    ("no type", ("compute.instance_type=null",), "compute.instance_type", "no instance type"),
    ("a role that is no ARN", ("backend.role=SageMakerRole",), "backend.role", "form arn:aws"),
    ("no role", ("backend.role=null",), "backend.role", "no IAM role"),
    ("an empty role", ("backend.role=''",), "backend.role", "no IAM role"),
    ("no region", ("backend.region=null",), "backend.region", "no AWS region"),
    ("31 retries", ("backend.max_retry_attempts=31",), "backend.max_retry_attempts", "at most 30"),
    ("subnets alone", ("backend.vpc.subnets=[subnet-1]",), "backend.vpc.security_group_ids", "both, or neither"),
    ("a key for NVMe", ("backend.volume_kms_key_id=alias/x",), "backend.volume_kms_key_id", "NVMe"),
    ("AWS's own tags", ("backend.tags.aws:cost=1",), "backend.tags.aws:cost", "AWS's own"),
    ("a tag with a comma", ("backend.tags={'a,b': '1'}",), "backend.tags.a,b", "form"),
    ("built without an image", ("backend.image=built",), "backend.image_uri", "needs the address"),
    ("SMP where there is none", (*SMP, "backend.region=eu-south-1"), "backend.region", "not known to be published"),
    ("a storage folder", ("storage=./runs",), "storage", "keeps its run in S3"),
    ("secrets of this machine", ("secrets.HF_TOKEN=env:HF_TOKEN",), "secrets.HF_TOKEN", "no such place"),
    ("fp8 on A100", (*SMP, "task.parallelism.fp8=true"), "task.parallelism.fp8", "no fp8"),
    ("smddp on P5", (SMP[0], "task.parallelism.collectives=smddp"), "task.parallelism.collectives", "P4d and P4de"),
    (
        "offload without checkpoints",
        (*SMP, "task.parallelism.sm_activation_offloading=true", "task.parallelism.activation_checkpointing=none"),
        "task.parallelism.sm_activation_offloading",
        "checkpointed",
    ),
    (
        "TP across nodes",
        (*SMP, "task.parallelism.tensor_parallel_degree=16"),
        "task.parallelism.tensor_parallel_degree",
        "cross nodes",
    ),
    (
        "a shard degree that does not fit",
        (*SMP, "task.parallelism.hybrid_shard_degree=3"),
        "task.parallelism.hybrid_shard_degree",
        "does not divide the world size of 16",
    ),
    (
        "more CP than shards",
        (*SMP, "task.parallelism.hybrid_shard_degree=2", "task.parallelism.context_parallel_degree=4"),
        "task.parallelism.context_parallel_degree",
        "hybrid_shard_degree = 2",
    ),
    (
        "experts of a dense model",
        (*SMP, "task.parallelism.expert_parallel_degree=2"),
        "task.parallelism.expert_parallel_degree",
        "It has for mixtral",
    ),
    (
        "experts with TP",
        (*SMP, "task.parallelism.expert_parallel_degree=2", "task.parallelism.tensor_parallel_degree=2"),
        "task.parallelism.expert_parallel_degree",
        "together with tensor",
    ),
    ("nxd on GPUs", (NXD[0],), "compute.instance_type", "Trainium only"),
    (
        "a training plan on spot",
        ("backend.spot=true", "backend.training_plan_arn=arn:aws:sagemaker:us-west-2:123456789012:training-plan/p"),
        "backend.spot",
        "reserved",
    ),
    (
        "a copied head that is not needed",
        (*LLAMA_3, "task.parallelism.kv_size_multiplier=2"),
        "task.parallelism.kv_size_multiplier",
        "nothing is copied",
    ),
    (
        "copies that do not add up",
        (*LLAMA_3, "task.parallelism.tensor_parallel_degree=32", "task.parallelism.kv_size_multiplier=2"),
        "task.parallelism.kv_size_multiplier",
        "Use 4",
    ),
    (
        "T of 24 heads",
        (*LLAMA_3, "task.parallelism.tensor_parallel_degree=64"),
        "task.parallelism.tensor_parallel_degree",
        "leaves",
    ),
    ("micro-batches on Trainium", (*LLAMA_3, "task.micro_batch_size=2"), "task.micro_batch_size", "one sequence"),
]


@pytest.mark.parametrize(("overrides", "path", "words"), [it[1:] for it in REFUSED], ids=[it[0] for it in REFUSED])
def test_a_wrong_value_is_refused_by_its_field(
    overrides: tuple[str, ...], path: str, words: str, faults: Faults
) -> None:
    found = [fault for fault in faults(TINY, *overrides) if fault.path == path]
    assert found, f"nothing about {path}"
    assert words in " ".join(map(str, found))


def test_all_faults_come_at_once(faults: Faults) -> None:
    found = faults(
        TINY, SMP[0], "compute.instance_type=ml.g5.2xlarge", "backend.spot=true", "backend.max_retry_attempts=99",
        "backend.keep_alive_period_in_seconds=99999", "backend.max_wait_seconds=1", "environment.LONG=" + "x" * 513,
    )  # fmt: skip
    assert {fault.path for fault in found} >= {
        "compute.instance_type", "backend.max_retry_attempts", "backend.keep_alive_period_in_seconds",
        "backend.max_wait_seconds", "environment.LONG",
    }  # fmt: skip


def test_a_good_job_has_no_faults_and_no_warnings() -> None:
    plan = plan_of(TINY)
    reported = [it.partition(":")[0] for it in plan.warnings]  # of random tokens, and of when the image's patches end
    assert set(reported) <= {"task.data.format", "backend.image_version"}
    assert plan.facts["image"].startswith("763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:")


def test_a_fault_states_where_the_value_was_written() -> None:
    loaded = load(TINY, ["backend.max_retry_attempts=31"], environ={})
    with pytest.raises(Exception, match=r"backend.max_retry_attempts \(override\)"):
        plan_loaded(loaded)


@pytest.mark.parametrize(("value", "is_refused"), [("x" * 512, False), ("x" * 513, True)])
def test_HP10_a_long_variable_is_named_with_its_length(value: str, is_refused: bool, faults: Faults) -> None:
    found = faults(TINY, environment={"LONG": value})
    assert bool(found) == is_refused
    assert all("513 characters" in str(fault) and fault.path == "environment.LONG" for fault in found)


def test_HP08_a_job_of_any_size_needs_no_long_hyperparameters(faults: Faults) -> None:
    """Everything the user gives is in job.json."""
    assert faults({**SCRIPT, "task": {**SCRIPT["task"], "args": ["--x", "y" * 100_000]}}) == []
    too_many = {f"V{number}": "1" for number in range(101)}
    (fault,) = faults(TINY, environment=too_many)
    assert (fault.path, "at most 100" in fault.message) == ("environment", True)


@pytest.mark.parametrize(
    ("spot", "wait", "wrong"), [(True, 7200, False), (True, 60, True), (False, 7200, True), (True, None, False)]
)
def test_CK20_waiting_belongs_to_spot_and_covers_the_run(
    spot: bool, wait: int | None, wrong: bool, faults: Faults
) -> None:
    backend = {"spot": spot, "max_wait_seconds": wait, "max_run_seconds": 3600}
    assert [it.path for it in faults(TINY, backend=backend)] == (["backend.max_wait_seconds"] if wrong else [])


def test_CK17_spot_continues_from_checkpoints_in_the_storage() -> None:
    plan = plan_of(TINY, "backend.spot=true")
    assert any("newest checkpoint in s3://bucket/runs" in warning for warning in plan.warnings)
    assert "waiting included" in plan.facts["time limit"]


def test_CK36_results_cannot_be_put_where_sagemaker_makes_an_archive(faults: Faults) -> None:
    task = {**SCRIPT["task"], "output_folder": "/opt/ml/model", "checkpoint_folder": "../model"}
    assert {it.path for it in faults({**SCRIPT, "task": task})} == {"task.output_folder", "task.checkpoint_folder"}


def test_DL08_more_processes_than_accelerators(faults: Faults) -> None:
    overrides = (
        "compute.instance_type=ml.p3.8xlarge",
        "compute.processes_per_instance=8",
        "backend.max_run_seconds=600",
    )
    (fault,) = faults(TINY, *overrides)
    assert "8 processes for the 4 accelerators" in fault.message
    assert fault.remedy == "Use 4"


def test_DL36_smp_on_trainium_names_what_runs_there(faults: Faults) -> None:
    found = faults(TINY, "compute.instance_type=ml.trn1.32xlarge", SMP[0])
    assert any("nxd" in fault.remedy for fault in found if fault.path == "compute.instance_type")


def test_SR20_smp_needs_an_image_that_holds_it(faults: Faults) -> None:
    plain = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.8.0-gpu-py312"
    (fault,) = faults(TINY, *SMP, f"backend.image_uri={plain}")
    assert fault.path == "backend.image_uri"
    assert "smdistributed-modelparallel" in fault.remedy
    own = plain.replace("763104351884", "123456789012")
    assert faults(TINY, *SMP, f"backend.image_uri={own}", "backend.image=built") == []


def test_DL01_an_unknown_type_is_warned_of_and_needs_the_number_of_processes(faults: Faults) -> None:
    (fault,) = faults(TINY, "compute.instance_type=ml.p99.48xlarge", "backend.max_run_seconds=600")
    assert fault.path == "compute.instance_type"
    assert "give compute.processes_per_instance" in fault.remedy
    plan = plan_of(
        TINY, "compute.instance_type=ml.p99.48xlarge", "compute.processes_per_instance=8", "backend.max_run_seconds=600"
    )
    assert any("not in our table" in warning for warning in plan.warnings)
    assert any("botocore does not know ml.p99.48xlarge" in warning for warning in plan.warnings)


@pytest.mark.parametrize("task", ["prepare", "fetch", "convert", "script"])
def test_who_cannot_report_the_time_is_asked_for_it(task: str, faults: Faults) -> None:
    tasks: dict[str, Any] = {
        "prepare": {"kind": "prepare", "sources": ["s3://bucket/text"], "seq_length": 128},
        "fetch": {"kind": "fetch", "source": "hf://org/name@main"},
        "convert": {"kind": "convert", "source": "s3://bucket/weights", "to": "nxd"},
        "script": {"kind": "script", "entry": "train.py"},
    }
    job = {**TINY, "task": tasks[task], "compute": {"instance_type": "ml.m5.4xlarge"}}
    assert [it.path for it in faults(job)] == ["backend.max_run_seconds"]
    assert faults(job, "backend.max_run_seconds=60") == []


def test_a_time_limit_is_derived_from_the_work_with_room() -> None:
    plan = plan_of(TINY, "task.model.preset=llama-2-7b", "task.data.seq_length=4096", "task.max_steps=1000")
    assert "FLOP/s x 20% MFU" in plan.facts["time limit"]


def test_sources_on_this_machine_are_refused(tmp_path: Path, faults: Faults) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    found = faults(TINY, f"task.tokenizer={tmp_path}")
    assert any(it.path == "task.tokenizer" and "sm-llm sync" in it.remedy for it in found)


def test_a_file_system_needs_its_network(faults: Faults) -> None:
    inputs = {"data": {"file_system_id": "fs-0123456789abcdef0", "directory_path": "/fsx"}}
    (fault,) = faults(SCRIPT, inputs=inputs)
    assert fault.path == "inputs.data"
    network = {"subnets": ["subnet-1"], "security_group_ids": ["sg-1"]}
    assert faults(SCRIPT, inputs=inputs, backend={"vpc": network}) == []


def test_a_pipe_is_refused_with_the_reason(faults: Faults) -> None:
    (fault,) = faults(TINY, inputs={"data": {"uri": "s3://bucket/data", "mode": "Pipe"}})
    assert (fault.path, "only once" in fault.message) == ("inputs.data.mode", True)


def test_groups_are_nodes_of_the_same_job(faults: Faults) -> None:
    groups = [
        {"name": "a", "instance_type": "ml.p5.48xlarge", "instance_count": 1},
        {"name": "a", "instance_type": "ml.g5.xlarge", "instance_count": 2},
    ]
    found = faults(TINY, backend={"instance_groups": groups})
    assert [it.path for it in found] == [
        "backend.instance_groups", "backend.instance_groups", "backend.instance_groups.1.instance_type",
    ]  # fmt: skip
    even = [{**group, "name": f"g{n}", "instance_type": "ml.p5.48xlarge"} for n, group in enumerate(groups)]
    assert faults(TINY, "compute.instance_count=3", backend={"instance_groups": even}) == []


@pytest.mark.parametrize("overrides", [(), ("task.optim.warmup_stepz=1",), ("backend.contract=sagemaker",)])
def test_DL31_DL11_an_unknown_override_is_an_error_with_the_nearest_key(
    overrides: tuple[str, ...], faults: Faults
) -> None:
    found = faults(TINY, *overrides)
    assert len(found) == len(overrides)
    assert all("unknown key" in it.message for it in found)


def test_every_type_of_the_table_is_one_of_the_service() -> None:
    from sm_llm.launcher.backends.sagemaker.request.limits import known_values

    assert {row.name for row in INSTANCES} <= set(known_values("TrainingInstanceType"))


MANY = (
    *SMP, "name=my_run", "task.parallelism.tensor_parallel_degree=16", "backend.max_retry_attempts=31",
    "backend.keep_alive_period_in_seconds=99999", "backend.max_run_seconds=5184000", "task.optim.min_learning_rate=1",
)  # fmt: skip


def test_faults_of_the_specification_hide_none_of_the_plan() -> None:
    """Names, arithmetic, the service's limits and our own rules: all in one error."""
    with pytest.raises(SpecError) as caught:
        plan(TINY, *MANY)
    assert {fault.path for fault in caught.value.issues} == {
        "name", "task.parallelism.tensor_parallel_degree", "backend.max_retry_attempts",
        "backend.keep_alive_period_in_seconds", "backend.max_run_seconds", "task.optim.min_learning_rate",
    }  # fmt: skip
    assert len(caught.value.issues) == 6


def test_the_steps_of_a_workflow_report_all_their_faults_together() -> None:
    flow = {key: TINY[key] for key in ("storage", "backend", "compute")} | {"name": "flow"}
    step = {"task": {**TINY["task"], "max_epochs": 1}}
    with pytest.raises(SpecError) as caught:
        plan({**flow, "steps": {"a": step, "b": {"task": TINY["task"]}}}, "backend.max_retry_attempts=31")
    found = [fault.path for fault in caught.value.issues]
    assert found == ["steps.a.task.max_steps", "backend.max_retry_attempts"]  # what they share, once


@pytest.mark.parametrize("missing", ["backend.role", "backend.region", "compute.instance_type"])
def test_what_is_missing_hides_no_broken_limit(missing: str, faults: Faults) -> None:
    found = [fault.path for fault in faults(TINY, f"{missing}=null", "backend.max_retry_attempts=31")]
    assert {missing, "backend.max_retry_attempts"} <= set(found)
    assert len(found) == len(set(found))


def test_a_fault_that_makes_the_plan_impossible_is_reported_alone() -> None:
    """What refers to nothing has no plan; there is no other error in its place."""
    data = {"format": "rows", "train": "steps.none.output", "seq_length": 64}
    with pytest.raises(SpecError, match="a job alone has no steps"):
        plan({**TINY, "task": {**TINY["task"], "data": data}})


REGISTRY = "111122223333.dkr.ecr.us-west-2.amazonaws.com"


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("docker.io/library/x:1", "images of ECR only"),
        ("x:1", "images of ECR only"),
        (f"{REGISTRY}/x@sha256:abc", "the digest 'sha256:abc' must be sha256: and 64 digits"),
        (f"{REGISTRY}/X:1", "the repository 'X' must be of lower-case letters"),
        (f"{REGISTRY}/x:a+b", "the tag 'a+b' must be of at most 128"),
        (f"{REGISTRY}/x:{'a' * 129}", "the tag"),
        (f"{REGISTRY}/", "the repository ''"),
    ],
)
def test_D13_an_image_is_refused_for_the_part_that_is_wrong(uri: str, words: str, faults: Faults) -> None:
    (fault,) = [it for it in faults(TINY, f"backend.image_uri={uri}", "backend.image=built") if "image_uri" in it.path]
    assert words in fault.message


@pytest.mark.parametrize("name", ["local", "local_gpu"])
def test_C8_the_local_mode_of_the_sdk_names_ours(name: str, faults: Faults) -> None:
    (fault,) = [it for it in faults(TINY, f"compute.instance_type={name}") if it.path == "compute.instance_type"]
    assert "backend.name=local backend.contract=sagemaker" in fault.remedy


@pytest.mark.parametrize(
    ("base", "begins"), [("a_b", "a-b"), ("x" * 100, "x" * 40), ("my base", "my-base"), ("fine", None), ("a-b-1", None)]
)
def test_C8_a_job_name_that_comes_out_otherwise_is_warned_of(base: str, begins: str | None) -> None:
    (it,) = plan(TINY, f"backend.base_job_name={base}")
    about_names = [text for text in it.warnings if "backend.base_job_name" in text]
    assert [text.endswith(f"begin with {begins}") for text in about_names] == ([] if begins is None else [True])


def test_C8_an_empty_job_name_is_refused(faults: Faults) -> None:
    assert [it.path for it in faults(TINY, "backend.base_job_name=''")] == ["backend.base_job_name"]
