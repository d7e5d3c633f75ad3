"""Images, launch parameters, names, metric definitions, the SDK's defaults and the states of the service."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, date, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import Issue, PlanError
from sm_llm.launcher.backends.sagemaker.jobs.states import SECONDARY, billable_seconds, native_state, used_seconds
from sm_llm.launcher.backends.sagemaker.request.distribution import distribution
from sm_llm.launcher.backends.sagemaker.request.limits import known_values, limit_issues
from sm_llm.launcher.backends.sagemaker.request.request import METRICS, job_name, metric_definitions, normalised
from sm_llm.launcher.backends.sagemaker.request.settings import read_sdk_defaults
from sm_llm.launcher.images import images
from sm_llm.runs.run_states import RunState
from sm_llm.spec.loading.load import load
from sm_llm.spec.machines.hardware import INSTANCES
from tests.launcher.sagemaker.conftest import ROLE, TINY, plan_of, render

if TYPE_CHECKING:
    from sm_llm.spec.job import JobSpec


def job(*overrides: str, **fields: Any) -> JobSpec:
    spec = load(TINY, overrides, fields, environ={}).spec
    assert not hasattr(spec, "steps")
    return spec  # type: ignore[return-value]


NXD = ("task.parallelism.strategy=nxd", "task.parallelism.flash_attention=false")
"""For rows that are too short for the flash kernel."""


@pytest.mark.parametrize("version", ["2.8", "2.14", "2.7.0", "9"])
def test_SR18_only_images_of_the_table_and_near_ones_named(version: str) -> None:
    fault = images.choose(job(), version)
    assert isinstance(fault, Issue)
    assert "Known: " in fault.remedy


def test_an_image_has_the_torch_that_our_training_needs() -> None:
    fault = images.choose(job(), "2.9.0")
    assert isinstance(fault, Issue)
    assert "needs 2.10" in fault.message
    row = images.choose(job(task={"kind": "script", "entry": "x.py"}), "2.9.0")
    assert isinstance(row, images.Image)


@pytest.mark.parametrize(
    ("overrides", "address"),
    [
        ((), "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.10.0-gpu-py313"),
        (
            ("backend.region=cn-north-1", "backend.role=arn:aws-cn:iam::123456789012:role/x"),
            "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch-training:",
        ),
        (("backend.region=af-south-1",), "626614931356.dkr.ecr.af-south-1.amazonaws.com/pytorch-training:"),
        (
            ("backend.image_uri=123456789012.dkr.ecr.us-west-2.amazonaws.com/own:1",),
            "123456789012.dkr.ecr.us-west-2.amazonaws.com/own:1",
        ),
        (
            (*NXD, "compute.instance_type=ml.trn1.32xlarge", "task.model.preset=llama-3-8b"),
            "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.28.0",
        ),
    ],
)
def test_the_image_follows_job_and_region(overrides: tuple[str, ...], address: str) -> None:
    assert plan_of(TINY, *overrides).facts["image"].startswith(address)


def test_the_end_of_patches_is_reported() -> None:
    row = next(it for it in images.IMAGES if it.version == "2.9.0")
    (ended,) = images.patch_warnings(row, date(2026, 11, 28))
    assert "no security patches since 2026-10-15" in ended.message
    (soon,) = images.patch_warnings(row, date(2026, 9, 1))
    assert "patches until" in soon.message
    assert list(images.patch_warnings(row, date(2026, 1, 1))) == []


def test_accounts_and_regions_are_those_that_the_sdk_knows() -> None:
    """The SDK's own tables are the oracle, read as files: importing it takes seconds."""
    found = find_spec("sagemaker")
    assert found is not None
    tables = Path(found.origin or "").parent / "image_uri_config"

    def registries(framework: str) -> dict[str, str]:
        config = json.loads((tables / f"{framework}.json").read_text())
        versions: dict[str, Any] = config["training"]["versions"]
        return dict(versions["2.8.0"]["registries"])

    assert registries("pytorch") == images.DLC_ACCOUNTS
    smp = registries("pytorch-smp")
    assert set(smp) == set(images.SMP_REGIONS)
    assert set(smp.values()) == {"658645717510"}


@pytest.mark.parametrize("row", INSTANCES, ids=lambda row: row.name)
def test_DL01_DL02_efa_is_named_where_there_is_a_card_and_nowhere_else(row: Any) -> None:
    strategy = (*NXD, "task.parallelism.tensor_parallel_degree=2") if row.is_neuron else ()
    several = job(f"compute.instance_type={row.name}", *strategy, "compute.instance_count=64")
    alone = job(f"compute.instance_type={row.name}", *strategy, "compute.instance_count=16")
    assert ("FI_PROVIDER" in distribution(several).environment) == (row.efa_cards > 0)
    # Of current plugins' switches the only one that GPUs need, by AWS's EFA sheet.
    switches = {it for it in distribution(several).environment if it.startswith("FI_EFA_")}
    neuron = {"FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE"}
    assert switches == (set() if not row.efa_cards else neuron if row.is_neuron else {"FI_EFA_USE_HUGE_PAGE"})
    single = alone.model_copy(update={"compute": alone.compute.model_copy(update={"instance_count": 1})})
    assert "FI_PROVIDER" not in distribution(single).environment
    assert not {"NCCL_PROTO", "RDMAV_FORK_SAFE"} & set(distribution(several).environment)


@pytest.mark.parametrize("given", ["1", "2"])
def test_graphs_are_compiled_for_the_logical_cores_that_the_runtime_shows(given: str) -> None:
    trn2 = (*NXD, "compute.instance_type=ml.trn2.48xlarge")
    for changes, cores in ((), "2"), ((f"environment.NEURON_LOGICAL_NC_CONFIG='{given}'",), given):
        variables = distribution(job(*trn2, *changes)).environment
        assert variables["NEURON_LOGICAL_NC_CONFIG"] == cores
        assert variables["NEURON_CC_FLAGS"].endswith(f" --logical-nc-config={cores}")
    variables = distribution(job(*NXD, "compute.instance_type=ml.trn1.32xlarge")).environment
    assert "NEURON_LOGICAL_NC_CONFIG" not in variables
    assert "logical" not in variables["NEURON_CC_FLAGS"]


def test_SF07_the_number_of_processes_is_reported_where_it_is_not_the_accelerators() -> None:
    key = "sagemaker_mpi_num_of_processes_per_host"
    assert key not in distribution(job()).hyperparameters
    assert distribution(job("compute.processes_per_instance=4")).hyperparameters[key] == 4
    assert (
        distribution(job("compute.instance_type=ml.m5.xlarge", "compute.processes_per_instance=2")).hyperparameters[key]
        == 2
    )


def test_a_shell_script_starts_its_own_processes() -> None:
    assert distribution(job(task={"kind": "script", "entry": "run.sh"})).estimator is None
    assert distribution(job(task={"kind": "script", "entry": "-m pkg.train"})).estimator is not None


@pytest.mark.parametrize("length", [*range(40, 64), 80])
def test_DL35_a_long_name_is_cut_before_its_end_and_stays_unique(length: int) -> None:
    base = "b" * length
    names = {job_name(f"{base}-20261128-040000-{tail}", attempt) for tail in ("aaaa", "bbbb") for attempt in (1, 10)}
    assert len(names) == 4
    assert max(map(len, names)) <= 63
    assert all(name.startswith("b" * 20) for name in names)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("my_base_run", "my-base-run"),
        ("has_underscore and space", "has-underscore-and-space"),
        ("--a", "a"),
        ("_", "job"),
    ],
)
def test_DL34_names_are_normalised(given: str, name: str) -> None:
    assert normalised(given) == name
    request = {"TrainingJobName": job_name("x-20261128-040000-ab12", 1, given)}
    assert "TrainingJobName" not in {fault.path for fault in limit_issues(request)}


@pytest.mark.parametrize(
    ("text", "number"),
    [("7E-5", 7e-05), ("1e-4", 1e-4), ("1.2E+3", 1200.0), ("-3e-2", -0.03), (".5", 0.5), ("12.", 12.0), ("2.5", 2.5)],
)
def test_OB01_exponents_are_read_whole(text: str, number: float) -> None:
    found = re.search(METRICS["train:loss"], f"step 1/2 | Loss: {text} | 5 tokens/s/device")
    assert found is not None
    assert float(found[1]) == number


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_OB03_what_is_not_a_number_is_captured_as_such(text: str) -> None:
    found = re.search(METRICS["train:loss"], f"Loss: {text} |")
    assert found is not None
    assert found[1] == text


@pytest.mark.parametrize("text", ["1,234.5", "warm", "1.2.3"])
def test_OB03_no_part_of_something_else_is_taken_for_a_number(text: str) -> None:
    assert re.search(METRICS["train:loss"], f"Loss: {text} |") is None


def test_the_definitions_read_the_line_that_the_worker_prints() -> None:

    from sm_llm.runs.events.events import Step
    from sm_llm.worker.device import CpuDevice
    from sm_llm.worker.training.step_metrics import Costs, ThroughputMeter

    meter = ThroughputMeter(Costs(4096, 1e9, "6N", 989e12, 1), CpuDevice(), 0, iter([0.0, 0.001]).__next__)
    line = meter.line(Step(5, 7.25, 0.5, 3e-4, 4096), meter.read(5, 0.25), 10)
    found = {name: match[1] for name, regex in METRICS.items() if (match := re.search(regex, line))}
    assert set(found) == set(METRICS) - {"validation:loss"}
    assert float(found["train:loss"]) == 7.25
    assert float(found["train:tokens_per_second_per_device"]) == 20_480_000
    assert float(found["train:learning_rate"]) == 3e-4
    assert float(found["train:data_wait_seconds"]) == 0.25


def test_the_definitions_keep_the_limits_of_the_service() -> None:
    definitions = metric_definitions()
    assert len(definitions) <= 40
    assert all(len(it["Regex"]) <= 500 and re.compile(it["Regex"]).groups == 1 for it in definitions)


SDK_CONFIG = f"""
SchemaVersion: "1.0"
SageMaker:
  TrainingJob:
    RoleArn: {ROLE}
    VpcConfig:
      Subnets: [subnet-9]
      SecurityGroupIds: [sg-9]
    EnableInterContainerTrafficEncryption: true
    OutputDataConfig: {{KmsKeyId: alias/out}}
    Environment: {{HTTPS_PROXY: "http://proxy:1", NCCL_DEBUG: WARN}}
    Tags:
      - {{Key: cost-centre, Value: "42"}}
      - {{Key: team, Value: everybody}}
"""


def test_the_sdks_defaults_are_merged_and_their_origin_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "admin.yaml"
    file.write_text(SDK_CONFIG)
    monkeypatch.setenv("SAGEMAKER_ADMIN_CONFIG_OVERRIDE", str(file))
    overrides = ("backend.role=null", "backend.tags.team=nlp", "environment.NCCL_DEBUG=INFO")
    request = render(TINY, *overrides).request
    assert request["RoleArn"] == ROLE
    assert request["VpcConfig"] == {"Subnets": ["subnet-9"], "SecurityGroupIds": ["sg-9"]}
    assert request["EnableInterContainerTrafficEncryption"] is True
    assert request["OutputDataConfig"]["KmsKeyId"] == "alias/out"
    merged = {"HTTPS_PROXY": "http://proxy:1", "NCCL_DEBUG": "INFO", "FI_PROVIDER": "efa"}
    assert request["Environment"].items() >= merged.items()
    tags = {tag["Key"]: tag["Value"] for tag in request["Tags"]}
    assert (tags["cost-centre"], tags["team"]) == ("42", "nlp")
    facts = plan_of(TINY, *overrides).facts
    assert facts["role from"] == f"SageMaker SDK defaults {file}"


def test_a_users_sdk_defaults_win_over_the_administrators(tmp_path: Path) -> None:
    for name, group in (("admin", "a"), ("user", "b")):
        (tmp_path / f"{name}.yaml").write_text(
            f"SageMaker: {{TrainingJob: {{VpcConfig: {{Subnets: [subnet-{group}]}}}}}}"
        )
    environ = {
        "SAGEMAKER_ADMIN_CONFIG_OVERRIDE": str(tmp_path / "admin.yaml"),
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(tmp_path / "user.yaml"),
    }
    assert read_sdk_defaults(environ).get("VpcConfig.Subnets") == ["subnet-b"]


def test_sdk_defaults_that_cannot_be_kept_or_read_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Any
) -> None:
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(tmp_path / "missing.yaml"))
    (fault,) = faults(TINY)
    assert "cannot be read" in fault.message
    isolated = tmp_path / "isolated.yaml"
    isolated.write_text("SageMaker: {TrainingJob: {EnableNetworkIsolation: true}}")
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(isolated))
    (fault,) = faults(TINY)
    assert (fault.path, fault.origin) == ("EnableNetworkIsolation", f"SageMaker SDK defaults {isolated}")
    with pytest.raises(PlanError):
        read_sdk_defaults({"SAGEMAKER_USER_CONFIG_OVERRIDE": str(tmp_path / "missing.yaml")})


@pytest.mark.parametrize(
    ("values", "path", "words"),
    [
        ("{RoleArn: 5}", "RoleArn", "must be text"),
        ("{VpcConfig: {Subnets: subnet-a, SecurityGroupIds: [sg-a]}}", "VpcConfig.Subnets", "a list of texts"),
        ("{Environment: [A]}", "Environment", "a mapping"),
        ("{Tags: {team: x}}", "Tags", "Key and Value"),
        ("{EnableNetworkIsolation: 'no'}", "EnableNetworkIsolation", "true or false"),
    ],
)
def test_sdk_defaults_of_another_shape_are_reported_and_never_taken_apart(
    values: str, path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Any
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"SageMaker: {{TrainingJob: {values}}}")
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(file))
    (fault,) = faults(TINY)
    assert (fault.path, fault.origin) == (f"SageMaker.TrainingJob.{path}", str(file))
    assert words in fault.message


def test_a_fault_of_an_sdk_default_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Any) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("SageMaker: {TrainingJob: {RoleArn: Admin, VpcConfig: {Subnets: [subnet-a]}, Tags: null}}")
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(file))
    found = faults(TINY, "backend.role=null")
    assert {fault.path for fault in found} == {"backend.role", "backend.vpc.security_group_ids"}
    assert f"{file}" in next(it.origin for it in found if it.path == "backend.vpc.security_group_ids")


def test_every_state_of_the_service_has_one_of_ours() -> None:
    assert set(known_values("SecondaryStatus")) == set(SECONDARY)


@pytest.mark.parametrize(
    ("raw", "state", "words"),
    [
        ({"SecondaryStatus": "Starting"}, RunState.PENDING, "waiting for capacity"),
        ({"SecondaryStatus": "Downloading"}, RunState.PENDING, "input channels"),
        ({"SecondaryStatus": "Training"}, RunState.RUNNING, ""),
        ({"SecondaryStatus": "Interrupted"}, RunState.RESTARTING, "spot"),
        ({"SecondaryStatus": "MaxRuntimeExceeded"}, RunState.INTERRUPTED, "max_run_seconds"),
        ({"SecondaryStatus": "MaxWaitTimeExceeded"}, RunState.INTERRUPTED, "max_wait_seconds"),
        ({"SecondaryStatus": "Stopped"}, RunState.STOPPED, "on request"),
        (
            {"SecondaryStatus": "Failed", "FailureReason": "CapacityError: Unable to provision"},
            RunState.FAILED,
            "capacity: ",
        ),
        (
            {"SecondaryStatus": "Failed", "FailureReason": "AlgorithmError: ExecuteUserScriptError:\nrank 5: boom"},
            RunState.FAILED,
            "rank 5: boom",
        ),
        ({"SecondaryStatus": "Failed", "FailureReason": "InternalServerError: x"}, RunState.FAILED, "SageMaker: "),
        ({"SecondaryStatus": "Novel", "TrainingJobStatus": "InProgress"}, RunState.UNKNOWN, "InProgress / Novel"),
    ],
)
def test_states_are_distinguished(raw: dict[str, Any], state: RunState, words: str) -> None:
    reported = native_state(raw, time.time())
    assert reported.state is state
    assert words in reported.detail


def test_a_job_stuck_in_stopping_gives_the_text_for_a_support_case() -> None:
    since = datetime(2026, 11, 28, tzinfo=UTC)
    raw = {
        "SecondaryStatus": "Stopping",
        "TrainingJobArn": "arn:aws:sagemaker:us-west-2:123456789012:training-job/x",
        "SecondaryStatusTransitions": [{"Status": "Stopping", "StartTime": since}],
        "ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 2},
    }
    assert native_state(raw, since.timestamp() + 60).detail == "stopping for 1m00s"
    stuck = native_state(raw, since.timestamp() + 7200)
    assert stuck.state is RunState.RUNNING
    assert "Open a support case" in stuck.detail
    assert "2 x ml.p5.48xlarge" in stuck.detail


def test_OB13_what_is_billed_is_unknown_without_an_end_time_and_no_crash() -> None:
    begun = datetime(2026, 11, 28, tzinfo=UTC)
    running = {"TrainingJobStatus": "InProgress", "TrainingStartTime": begun, "ResourceConfig": {"InstanceCount": 2}}
    assert (billable_seconds(running), used_seconds(running)) == (None, None)
    ended = {**running, "TrainingEndTime": datetime(2026, 11, 28, 1, tzinfo=UTC), "BillableTimeInSeconds": 1080}
    assert (billable_seconds(ended), used_seconds(ended)) == (2160, 7200)
    assert used_seconds({**ended, "TrainingTimeInSeconds": 3000}) == 6000
    never = {"TrainingJobStatus": "Failed", "ResourceConfig": {"InstanceCount": 2}}
    assert (billable_seconds(never), used_seconds(never)) == (None, None)
