"""Pipelines: one definition with and without the SDK, byte-identical, with outputs that a cache hit leaves in place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sm_llm.contract.hyperparameters import overrides
from sm_llm.contract.job_file import JobFile
from sm_llm.errors import PlanError, SpecError, StorageError, SubmitError
from sm_llm.launcher.backends.sagemaker.pipelines import pipeline_operations as pipelines
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_definition import render
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import Register, definition
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_values import VALUE_CHECKERS, GivenValues, job_in
from sm_llm.launcher.backends.sagemaker.sdk import pipeline_sdk
from sm_llm.launcher.planner import plan_workflow
from sm_llm.spec.job import WorkflowSpec
from sm_llm.spec.loading.load import load
from sm_llm.spec.validation.runner import run

ROLE = "arn:aws:iam::111122223333:role/train"
BUCKET = "sm-llm-tests"
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.29.0-lmi11.0.0-cu124"
VARIABLES = {
    "Rate": "steps.train.task.optim.learning_rate",
    "Steps": "steps.train.task.max_steps",
    "Text": "steps.prepare.task.text_field",
    "Exact": "steps.train.task.deterministic",
}


def workflow(**train: Any) -> dict[str, Any]:
    cpu = {"instance_type": "ml.m5.2xlarge"}
    return {
        "name": "flow",
        "backend": {"name": "sagemaker", "role": ROLE, "region": "us-east-1", "max_run_seconds": 3600},
        "storage": f"s3://{BUCKET}/runs",
        "compute": {"instance_type": "ml.p4d.24xlarge", "instance_count": 2},
        "steps": {
            "fetch": {"task": {"kind": "fetch", "source": "hf://org/name@main"}, "compute": cpu},
            "prepare": {
                "task": {"kind": "prepare", "sources": [f"s3://{BUCKET}/text/"], "seq_length": 512},
                "compute": cpu,
                "after": ["fetch"],
            },
            "train": {
                "task": {
                    "kind": "train",
                    "model": {"preset": "tiny", "config": {"vocab_size": 32000}},
                    "data": {"format": "rows", "train": "steps.prepare.output/train", "seq_length": 512},
                    "tokenizer": "steps.prepare.output/tokenizer",
                    "max_steps": 100,
                    "optim": {"learning_rate": 1e-3},
                    **train,
                }
            },
        },
    }


def steps(found: Any) -> dict[str, Any]:
    return {step["Name"]: step for step in found.to_json()["Steps"]}


@pytest.fixture(autouse=True)
def _account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def test_PL03_equal_workflows_give_byte_identical_definitions() -> None:
    first, second = (json.dumps(definition(workflow(), variables=VARIABLES).to_json()) for _ in range(2))
    assert first == second
    assert "TrainingJobName" not in first
    assert "sagemaker_job_name" not in first


def test_PL01_variables_of_every_type_are_references() -> None:
    found = definition(workflow(), variables=VARIABLES).to_json()
    assert {it["Name"]: it["Type"] for it in found["Parameters"]} == {
        "Exact": "Boolean", "Rate": "Float", "Steps": "Integer", "Text": "String"
    }  # fmt: skip
    train = steps(definition(workflow(), variables=VARIABLES))["train"]["Arguments"]["HyperParameters"]
    assert train["task.max_steps"] == {"Std:Join": {"On": "", "Values": [{"Get": "Parameters.Steps"}]}}
    assert overrides(dict.fromkeys(train, "1"))  # the worker takes them for overrides


def test_an_output_lies_under_its_steps_digest_and_what_follows_reads_it_there() -> None:
    found = steps(definition(workflow()))
    assert found["train"]["DependsOn"] == ["prepare"]
    assert found["prepare"]["DependsOn"] == ["fetch"]
    uploads = definition(workflow()).steps
    job = json.loads(next(body for uri, body in uploads[2].uploads.items() if uri.endswith("job.json")))
    run = uploads[1].job.run_uri  # type: ignore[union-attr]
    assert job["spec"]["task"]["data"]["train"] == f"{run}/result/train"
    assert run.startswith(f"s3://{BUCKET}/runs/pipelines/flow/prepare-")


def test_a_change_moves_the_step_and_those_after_it_and_no_others() -> None:
    base = {it.name: it.job.run_uri for it in definition(workflow()).steps if it.job}
    again = {it.name: it.job.run_uri for it in definition(workflow(max_steps=50)).steps if it.job}
    assert {name for name in base if base[name] != again[name]} == {"train"}
    changed = workflow()
    changed["steps"]["prepare"]["task"]["seq_length"] = 512
    changed["steps"]["prepare"]["task"]["seed"] = 1
    moved = {it.name: it.job.run_uri for it in definition(changed).steps if it.job}
    assert {name for name in base if base[name] != moved[name]} == {"prepare", "train"}


def test_the_values_of_variables_are_part_of_the_address_downstream_too() -> None:
    found = steps(definition(workflow(), variables={"Text": VARIABLES["Text"]}))
    prepare = found["prepare"]["Arguments"]["HyperParameters"]["sm_llm_run"]
    train = found["train"]["Arguments"]["HyperParameters"]
    address = prepare["Std:Join"]
    assert address["On"] == "/"
    assert address["Values"][1] == {"Get": "Parameters.Text"}
    data = train["task.data.train"]["Std:Join"]["Values"]
    assert data == [*address["Values"], "result", "train"]
    assert train["sm_llm_run"]["Std:Join"]["Values"][1] == {"Get": "Parameters.Text"}
    assert "sm_llm_run" not in found["fetch"]["Arguments"]["HyperParameters"]


def test_a_result_is_registered_uncompressed() -> None:
    """The save that a step will publish is known to nobody yet, so a step of our own asks for it."""
    found = definition(workflow(), variables=VARIABLES, register=Register("train", "models", IMAGE))
    step = steps(found)["register"]
    assert step["DependsOn"] == ["train"]
    assert step["Arguments"]["ResourceConfig"]["InstanceType"] == "ml.m5.large"
    sent = step["Arguments"]["HyperParameters"]
    assert json.loads(sent["sagemaker_program"]) == "register.py"
    trained = steps(found)["train"]["Arguments"]["HyperParameters"]["sm_llm_run"]["Std:Join"]["Values"]
    assert sent["task.model"]["Std:Join"]["Values"] == [*trained, "result"]
    assert found.steps[3].job.spec.task.group == "models"  # type: ignore[union-attr]
    plain = definition(workflow(), register=Register("train", "models", IMAGE)).steps
    assert plain[3].job.spec.task.model == f"{plain[2].job.run_uri}/result"  # type: ignore[union-attr]


def test_a_workflow_may_register_by_itself_but_not_twice() -> None:
    task = {"kind": "register", "model": "steps.train.output", "group": "models", "image_uri": IMAGE}
    flow = workflow()
    flow["steps"]["register"] = {"task": task, "compute": {"instance_type": "ml.m5.large"}}
    register = Register("train", "models", IMAGE)
    assert definition(flow).to_json() == definition(workflow(), register=register).to_json()
    with pytest.raises(PlanError, match="registers already"):
        definition(flow, register=register)
    with pytest.raises(PlanError, match="no such step"):
        definition(workflow(), register=Register("trian", "models", IMAGE))


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"X": "task.no_such_field"}, "names no field"),
        ({"X": "steps.other.task.max_steps"}, "names no field"),
        ({"X": "steps.train.task.max_tokens"}, "has no default"),
        ({"X": "steps.train.compute.instance_count"}, "names no field"),
        ({"X": "steps.trian.task.max_steps"}, r"no such step .* Did you mean steps\.train\?"),
        ({"X": "steps.train.task.max_step"}, "no such field .* Did you mean max_steps"),
        ({"My Var!": "steps.train.task.max_steps"}, "letters, digits, hyphens and underscores"),
        ({"A": "steps.train.task.max_steps", "B": "steps.train.task.max_steps"}, "changes what A changes"),
    ],
)
def test_variables_that_cannot_be_are_reported(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        definition(workflow(), variables=variables)


def test_what_all_steps_share_is_reported_once_and_by_the_name_that_the_user_gave() -> None:
    flow = {**workflow(), "storage": "./runs"}
    flow["backend"] = {**flow["backend"], "role": "train", "max_run_seconds": None}
    with pytest.raises(PlanError) as caught:
        definition(flow)
    found = {fault.path: fault for fault in caught.value.issues}
    assert set(found) == {"storage", "backend.role", "backend.max_run_seconds"}
    assert len(caught.value.issues) == 3
    assert found["backend.max_run_seconds"].message.endswith("(step fetch, prepare)")


def test_HP08_variables_that_make_too_many_hyperparameters_or_too_long_ones_are_reported() -> None:
    many = {f"V{number}": f"steps.train.environment.V{number}" for number in range(96)}
    flow = workflow()
    flow["steps"]["train"]["environment"] = dict.fromkeys(many, "1")
    with pytest.raises(PlanError, match=r"step train would get 10\d hyperparameters; the service takes 100"):
        definition(flow, variables=many)
    flow = workflow()
    flow["steps"]["prepare"]["task"]["text_field"] = "t" * 2501
    with pytest.raises(PlanError, match=r"variables.Text: has 2,501 characters; a hyperparameter takes 2,500"):
        definition(flow, variables={"Text": VARIABLES["Text"]})


def test_a_workflow_of_this_machine_is_not_a_pipeline() -> None:
    local = {**workflow(), "backend": {"name": "local"}, "compute": {}}
    for step in local["steps"].values():
        step.pop("compute", None)
    with pytest.raises(PlanError, match="a pipeline runs on SageMaker"):
        definition(local)


@pytest.mark.integration
@pytest.mark.parametrize("variables", [{}, VARIABLES], ids=["plain", "variables"])
def test_the_sdk_makes_the_same_definition(variables: dict[str, str]) -> None:
    from sm_llm.launcher.backends.sagemaker.sdk.pipeline_sdk import pipeline_of

    found = definition(workflow(), variables=variables, register=Register("train", "models", IMAGE))
    built = json.loads(pipeline_of(found).definition())
    ours = found.to_json()
    for step in [*built["Steps"], *ours["Steps"]]:
        if "InputDataConfig" in step["Arguments"]:
            step["Arguments"]["InputDataConfig"].sort(key=lambda it: it["ChannelName"])
    assert built == ours


def load_workflow(flow: dict[str, Any]) -> WorkflowSpec:
    spec = load(flow).spec
    assert isinstance(spec, WorkflowSpec)
    return spec


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ({"kind": "convert", "source": "s3://sm-llm-tests/weights", "to": "nxd"}, "ml.m5.2xlarge"),
        ({"kind": "convert", "source": "s3://sm-llm-tests/shards", "to": "hf"}, "ml.m5.2xlarge"),
        ({"kind": "fetch", "source": "hf://org/name@main"}, "ml.m5.2xlarge"),
        ({"kind": "script", "entry": "train.py"}, "ml.p4d.24xlarge"),
        ({"kind": "register", "model": "s3://sm-llm-tests/r", "group": "g", "image_uri": IMAGE}, "ml.m5.large"),
    ],
    ids=["to nxd", "to hf", "fetch", "script", "register"],
)
def test_every_kind_of_task_is_a_step(task: dict[str, Any], kind: str) -> None:
    flow = {**workflow(), "steps": {"one": {"task": task, "compute": {"instance_type": kind, "instance_count": 1}}}}
    spec = load_workflow(flow)
    (step,) = render(spec, plans=plan_workflow(spec)).to_json()["Steps"]
    assert step["Type"] == "Training"
    assert json.loads(step["Arguments"]["HyperParameters"]["sagemaker_program"]) == f"{task['kind']}.py"
    assert step["Arguments"]["ResourceConfig"]["InstanceType"] == kind


def test_precompile_is_a_step_before_training_on_trainium() -> None:
    trainium = {"instance_type": "ml.trn1.32xlarge", "instance_count": 4}
    task = {
        **workflow()["steps"]["train"]["task"],
        "model": {"preset": "llama-3-8b"},
        "data": {"format": "synthetic", "seq_length": 8192},
        "parallelism": {"strategy": "nxd", "tensor_parallel_degree": 32},
    }
    del task["tokenizer"]
    first = {"task": {"kind": "precompile", "training": task}, "compute": trainium}
    flow = {
        **workflow(),
        "steps": {"precompile": first, "train": {"task": task, "compute": trainium, "after": ["precompile"]}},
    }
    spec = load_workflow(flow)
    found = steps(render(spec, plans=plan_workflow(spec)))
    variables = [found[name]["Arguments"]["Environment"] for name in ("precompile", "train")]
    assert len({it["NEURON_COMPILE_CACHE_URL"] for it in variables}) == 1
    counts = [found[name]["Arguments"]["ResourceConfig"]["InstanceCount"] for name in ("precompile", "train")]
    assert counts == [4, 4]
    # Its worker starts the training's processes below neuron_parallel_compile, once per node.
    parameters = found["precompile"]["Arguments"]["HyperParameters"]
    assert "sagemaker_torch_distributed_enabled" not in parameters
    assert found["train"]["DependsOn"] == ["precompile"]


class Client:
    """A contract double of SageMaker's pipeline calls: what was sent is kept."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def update_pipeline(self, **body: Any) -> dict[str, str]:
        from botocore.exceptions import ClientError

        error = {"Code": "ResourceNotFound", "Message": "Pipeline flow does not exist."}
        raise ClientError({"Error": error}, "UpdatePipeline")

    def create_pipeline(self, **body: Any) -> dict[str, str]:
        self.sent.append(("create", body))
        return {"PipelineArn": "arn:pipeline"}

    def describe_pipeline(self, **body: Any) -> dict[str, str]:
        from botocore.exceptions import ClientError

        stored = [it for name, it in self.sent if name == "create" and it["PipelineName"] == body["PipelineName"]]
        if not stored:
            error = {"Code": "ResourceNotFound", "Message": f"Pipeline {body['PipelineName']} does not exist."}
            raise ClientError({"Error": error}, "DescribePipeline")
        return {"PipelineDefinition": stored[-1]["PipelineDefinition"]}

    def start_pipeline_execution(self, **body: Any) -> dict[str, str]:
        self.sent.append(("start", body))
        return {"PipelineExecutionArn": EXECUTION}

    def describe_pipeline_execution(self, **body: Any) -> dict[str, str]:
        return {"PipelineExecutionStatus": "Executing"}

    def get_paginator(self, name: str) -> Any:
        class Pages:
            def paginate(self, **_: Any) -> list[dict[str, Any]]:
                done = {"StepName": "fetch", "StepStatus": "Succeeded", "CacheHitResult": {"SourcePipelineExecutionArn": "arn:e"}}  # fmt: skip  # noqa: E501
                runs = {"StepName": "train", "StepStatus": "Executing", "Metadata": {"TrainingJob": {"Arn": "arn:t/x"}}}
                return [{"PipelineExecutionSteps": [done, runs]}]

        return Pages()

    def stop_pipeline_execution(self, **body: Any) -> None:
        self.sent.append(("stop", body))


def job_files(flow: Any, variables: dict[str, str], cache_days: int | None = 30) -> Any:
    """Reads the job files that a pipeline stores, from its definition in place of S3."""
    stored = definition(flow, variables=variables, cache_days=cache_days).steps
    found = {uri: body for step in stored for uri, body in step.uploads.items()}
    return lambda folder: JobFile.model_validate_json(found[f"{folder}job.json"])


EXECUTION = "arn:aws:sagemaker:us-east-1:111122223333:pipeline/flow/execution/abc"


class Connect:
    def __init__(self, client: Client) -> None:
        self._client = client

    def __call__(self, region: str) -> Any:
        assert region == "us-east-1"
        return self

    def client(self, service: str) -> Client:
        assert service == "sagemaker"
        return self._client


def test_a_pipeline_is_stored_started_watched_and_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    connect = Connect(client)
    stored: list[Any] = []
    monkeypatch.setattr(pipelines, "store_files", stored.append)
    monkeypatch.setattr(pipelines, "job_in", job_files(workflow(), VARIABLES))
    assert pipelines.upsert(workflow(), variables=VARIABLES, connect=connect) == "arn:pipeline"
    assert json.loads(client.sent[0][1]["PipelineDefinition"]) == definition(workflow(), variables=VARIABLES).to_json()
    assert len(stored) == 1
    assert pipelines.start("flow", {"Rate": 1e-3, "Text": "body"}, connect=connect) == EXECUTION
    assert client.sent[1][1]["PipelineParameters"] == [
        {"Name": "Rate", "Value": "0.001"}, {"Name": "Text", "Value": "body"}
    ]  # fmt: skip
    state, found = pipelines.status(EXECUTION, connect=connect)
    assert state == "Executing"
    assert (found[0].cached_from, found[1].job_arn) == ("arn:e", "arn:t/x")
    pipelines.stop(EXECUTION, connect=connect)
    assert client.sent[-1] == ("stop", {"PipelineExecutionArn": EXECUTION})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"Stpes": 5}, ("values.Stpes: the pipeline has no such variable", "Did you mean Steps?")),
        ({"Steps": "many"}, ("values.Steps: must be a whole number",)),
        ({"Steps": 1.5}, ("values.Steps: must be a whole number",)),
        ({"Rate": "fast"}, ("values.Rate: must be a number",)),
        ({"Exact": "perhaps"}, ("values.Exact: must be true or false",)),
        ({"Steps": 0}, ("values.Steps: task.max_steps: must be at least 1",)),
        ({"Rate": 1e9}, ("values.Rate: task.optim.learning_rate: must be at most 1",)),
        ({"Rate": 1e-3, "Floor": 1e-2}, ("values.Floor: task.optim.min_learning_rate: the floor is above",)),
        ({"Plan": "cosin"}, ("values.Plan: task.optim.schedule", "cosine")),
    ],
)
def test_C8_values_that_a_pipeline_cannot_take_are_refused_before_it_starts(
    values: dict[str, Any], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client()
    flow = workflow(optim={"learning_rate": 1e-3, "min_learning_rate": 1e-5, "schedule": "linear"})
    optim = "steps.train.task.optim"
    variables = {**VARIABLES, "Floor": f"{optim}.min_learning_rate", "Plan": f"{optim}.schedule"}
    monkeypatch.setattr(pipelines, "store_files", lambda _: None)
    monkeypatch.setattr(pipelines, "job_in", job_files(flow, variables))
    pipelines.upsert(flow, variables=variables, connect=Connect(client))
    with pytest.raises(PlanError) as caught:
        pipelines.start("flow", values, connect=Connect(client))
    for word in words:
        assert word in str(caught.value)
    assert [name for name, _ in client.sent] == ["create"]
    pipelines.start("flow", {"Steps": 5, "Rate": "2e-3", "Exact": True, "Floor": 1e-3}, connect=Connect(client))
    assert [name for name, _ in client.sent] == ["create", "start"]


@pytest.mark.parametrize("cache_days", [30, None])
def test_C8_values_are_checked_against_what_other_steps_publish_with_them(
    cache_days: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step alone took them; ``prepare`` was paid for, and ``train`` failed on its rows."""
    client, variables = Client(), {
        "Vocab": "steps.prepare.task.train_tokenizer.vocab_size",
        "Length": "steps.train.task.data.seq_length",
        "Rows": "steps.prepare.task.seq_length",
    }  # fmt: skip
    monkeypatch.setattr(pipelines, "store_files", lambda _: None)
    monkeypatch.setattr(pipelines, "job_in", job_files(workflow(), variables, cache_days))
    pipelines.upsert(workflow(), variables=variables, cache_days=cache_days, connect=Connect(client))
    for values, words in (
        ({"Vocab": 64_000}, ("values.Vocab: task.", "vocabulary of 64000, more than the model's 32000")),
        ({"Length": 256}, ("values.Length: task.data.seq_length", "512 tokens each")),
        ({"Rows": 256}, ("values.Rows: task.data.seq_length", "256 tokens each")),
        ({"Rows": 256, "Vocab": 64_000}, ("256 tokens each", "vocabulary of 64000")),
    ):
        with pytest.raises(PlanError) as caught:
            pipelines.start("flow", values, connect=Connect(client))
        for word in words:
            assert word in str(caught.value)
    pipelines.start("flow", {"Rows": 256, "Length": 256, "Vocab": 16_000}, connect=Connect(client))
    assert [name for name, _ in client.sent] == ["create", "start"]


def test_C8_values_for_a_pipeline_that_is_not_there_are_refused() -> None:
    with pytest.raises(SubmitError, match=r"flow was not started.*does not exist"):
        pipelines.start("flow", {"Steps": 5}, connect=Connect(Client()))


def test_C8_a_step_of_somebody_else_or_a_file_out_of_reach_leaves_the_check_to_the_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any) -> Any:
        raise StorageError("access denied")

    read = {"Get": "Parameters.N"}
    other = {"HyperParameters": {"n": read}, "InputDataConfig": []}
    branch = {
        "Type": "Condition",
        "Arguments": {"IfSteps": [{"Type": "Training", "Arguments": other}], "ElseSteps": []},
    }
    shown = {"Parameters": [{"Name": "N", "Type": "Integer"}], "Steps": [branch, {"Type": "Fail", "Arguments": {}}]}
    assert run(VALUE_CHECKERS, GivenValues(shown, {"N": 5}, refuse)) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sm_llm.storage.uri.open_store", refuse)
        assert job_in("s3://bucket/job/") is None
    assert "values are not checked: access denied" in capsys.readouterr().err


@pytest.mark.integration
def test_C8_a_session_that_is_not_for_the_pipeline_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3
    import sagemaker
    from sagemaker.workflow.pipeline_context import PipelineSession

    stored: list[Any] = []
    monkeypatch.setattr(pipeline_sdk, "store_files", stored.append)
    there = boto3.session.Session(region_name="eu-west-1")
    with pytest.raises(PlanError, match=r"sagemaker_session: sends requests to eu-west-1.*us-east-1"):
        pipeline_sdk.build_pipeline(workflow(), sagemaker_session=PipelineSession(there))
    here = boto3.session.Session(region_name="us-east-1")
    with pytest.raises(PlanError, match="must be a PipelineSession"):
        pipeline_sdk.build_pipeline(workflow(), sagemaker_session=sagemaker.Session(here))
    assert not stored


@pytest.mark.parametrize("path", ["steps.train.task.kind", "steps.fetch.task.source"])
def test_C8_a_variable_of_what_is_settled_at_launch_is_refused_by_the_rule_of_the_worker(path: str) -> None:
    with pytest.raises(PlanError, match="is settled once a job has been started"):
        definition(workflow(), variables={"V": path})


def test_C8_a_variable_of_what_the_request_starts_the_processes_with_is_refused() -> None:
    smp = {"parallelism": {"strategy": "smp", "tensor_parallel_degree": 2}}
    for field in ("tensor_parallel_degree", "sm_activation_offloading", "strategy"):
        with pytest.raises(PlanError, match="settled at launch: the request"):
            definition(workflow(**smp), variables={"V": f"steps.train.task.parallelism.{field}"})
    with pytest.raises(PlanError, match="settled at launch: the request"):
        definition(workflow(**smp), variables={"V": "steps.train.task.seed"})
    fine = {"A": "steps.train.task.parallelism.activation_checkpointing", "B": "steps.train.task.max_steps"}
    assert definition(workflow(**smp), variables=fine).variables
    seeded = {"parallelism": {**smp["parallelism"], "random_seed": 7}}
    assert definition(workflow(**seeded), variables={"V": "steps.train.task.seed"}).variables


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cache_days": True}, "cache_days: must be a whole number of days"),
        ({"cache_days": 1.5}, "cache_days: must be a whole number of days"),
        ({"cache_days": "30"}, "cache_days: must be a whole number of days"),
        ({"cache_days": 10**9}, "cache_days: must be a whole number of days"),
        ({"variables": ["a"]}, "variables: must be a mapping"),
        ({"variables": {"N": {"a": 1}}}, "variables: must be a mapping"),
        ({"register": {"step": "train"}}, "register: is not a Register"),
        ({"register": Register("train", "g g", IMAGE)}, "register.group: "),
        ({"register": Register("train", "g", "x")}, "task.image_uri: "),
    ],
)
def test_S12_17_S12_19_arguments_of_another_kind_are_refused_in_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        definition(workflow(), **given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_S12_18_a_name_of_jobs_without_effect_is_refused() -> None:
    with pytest.raises(PlanError, match=r"backend\.base_job_name.*has no effect"):
        definition(workflow(), "backend.base_job_name=zz")


def test_S12_33_what_is_not_a_workflow_and_no_mapping_of_values_is_refused() -> None:
    with pytest.raises(SpecError, match=r"cannot be read.*PipelineDefinition"):
        pipelines.upsert(definition(workflow()))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="values: must be a mapping"):
        pipelines.start("flow", ["S=5"], region="us-east-1")  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "words"), [("", "is empty"), ("a*b", "tag of a job"), ("..", "'.' or '..'")])
def test_S12_28_variables_of_which_no_address_can_be_made_are_refused(value: str, words: str) -> None:
    variables = {"Text": "steps.prepare.task.text_field"}
    found = definition(workflow(), variables=variables).to_json()
    (issue,) = run(VALUE_CHECKERS, GivenValues(found, {"Text": value}, lambda _: None))
    assert issue.path == "values.Text"
    assert words in str(issue)
    assert run(VALUE_CHECKERS, GivenValues(found, {"Text": "body"}, lambda _: None)) == []
    (issue,) = run(VALUE_CHECKERS, GivenValues(found, {"Text": "x" * 250}, lambda _: None))
    assert "takes 256" in str(issue)
    if value:
        with pytest.raises(PlanError, match=r"variables\.Text"):
            definition(workflow(), f"steps.prepare.task.text_field='{value}'", variables=variables)
