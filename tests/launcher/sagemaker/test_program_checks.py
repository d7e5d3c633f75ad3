"""Programs, as a plan sees them: arguments, folders, inputs and files without effect, or not the meant one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import PlanError, SpecError
from sm_llm.runs.run_paths import ContainerPaths
from sm_llm.worker.job_reader import _moved
from sm_llm.worker.script.script_platform import astray
from tests.launcher.sagemaker.conftest import ROLE, SCRIPT, TINY, plan_of

if TYPE_CHECKING:
    from pathlib import Path

LOCAL = {"backend": {"name": "local"}, "compute": {}}


def planned(program: Path | None = None, *overrides: str, inputs: Any = None, backend: Any = None, **task: Any) -> Any:
    """The plan of a script job with fields of its task; its program is in a folder where one is given."""
    source = {} if program is None else {"source": str(program)}
    spec = {**SCRIPT, "task": {**SCRIPT["task"], **source, **task}, "inputs": inputs or {}, **(backend or {})}
    if backend:
        spec["storage"] = "runs"
    return plan_of(spec, *overrides)


def faults(*args: Any, **task: Any) -> list[str]:
    with pytest.raises((PlanError, SpecError)) as caught:
        planned(*args, **task)
    return [str(it) for it in caught.value.issues]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    return folder


@pytest.mark.parametrize(
    ("args", "where", "words"),
    [
        (["--x", "{inputs.nope}"], "task.args.1", "Did you mean inputs.nodata?"),
        (["a{ouptut}b"], "task.args.0", "Did you mean output?"),
        ({"x": "{Output}"}, "task.args.x", "Did you mean output?"),
        ({"x": ["{checkpoint}"]}, "task.args.x.0", "Did you mean checkpoints?"),
        ({"x": {"y": "{scrach}/b"}}, "task.args.x.y", "Did you mean scratch?"),
    ],
)
def test_S12_24_a_mistyped_folder_in_arguments_is_refused_with_the_nearest_name(
    args: Any, where: str, words: str
) -> None:
    style = {"args_style": "file"} if isinstance(args, dict) else {}
    (found,) = faults(args=args, inputs={"data": "s3://data-bucket/x", "nodata": "s3://data-bucket/y"}, **style)
    assert where in found
    assert words in found


def test_S12_24_other_words_in_braces_reach_the_program_and_are_warned_of() -> None:
    args = ["{output}/{epoch}", "{inputs.my.data}", '{"a": 1}', "{0}", "{}"]
    found = planned(args=args, inputs={"my.data": "s3://data-bucket/x"}).warnings
    (warning,) = [it for it in found if "task.args" in it]
    assert "task.args.0: {epoch} reaches the program as it is" in warning


@pytest.mark.parametrize("backend", [{}, LOCAL])
@pytest.mark.parametrize("name", ["../../x", "a/b", "a b", "", ".", "-", "x" * 65, "a\nb", "ä"])
def test_the_name_of_an_input_is_that_of_a_folder_and_of_a_channel(
    name: str, backend: dict[str, Any], tmp_path: Path
) -> None:
    location = str(tmp_path) if backend else "s3://data-bucket/x"
    of = {"backend": backend, "entry": "-m json.tool"}
    (found,) = (it for it in faults(inputs={name: location}, **of) if "an input's name has" in it)
    assert planned(inputs={found.rpartition("Try ")[2]: location}, **of)


@pytest.mark.parametrize("pair", [("a-b", "a_b"), ("a", "A"), ("x.1", "x-1")])
@pytest.mark.parametrize("backend", [{}, LOCAL])
def test_S12_14_two_inputs_under_one_variable_are_refused(
    pair: tuple[str, str], backend: dict[str, Any], tmp_path: Path
) -> None:
    location = str(tmp_path) if backend else "s3://data-bucket/x"
    found = faults(inputs=dict.fromkeys(pair, location), backend=backend, entry="-m json.tool")
    assert any(f"inputs.{pair[1]}" in it and f"where it finds {pair[0]}" in it for it in found)


@pytest.mark.parametrize(
    ("task", "where", "words"),
    [
        ({"args": ["a"], "args_style": "flags"}, "task.args_style", "args is a list"),
        ({"args": {"--epochs": 1}}, "task.args.--epochs", "Write epochs"),
        ({"args": {"-e": 1}, "args_style": "flags"}, "task.args.-e", "Write e"),
        ({"checkpoint_folder": "output/ckpt"}, "task.checkpoint_folder", "lies in the output folder"),
        ({"checkpoint_folder": "./output/./ckpt/"}, "task.checkpoint_folder", "lies in the output folder"),
        ({"checkpoint_folder": "./output/"}, "task.checkpoint_folder", "is the output folder too"),
        ({"output_folder": "checkpoints/best"}, "task.output_folder", "lies in the checkpoint folder"),
        (
            {"parallelism": {"strategy": "fsdp", "tensor_parallel_degree": 8}},
            "task.parallelism.tensor_parallel_degree",
            "has no effect on a program",
        ),
    ],
)
def test_S12_25_settings_of_a_program_without_effect_are_refused(
    task: dict[str, Any], where: str, words: str, program: Path
) -> None:
    (found,) = faults(program, **task)
    assert where in found
    assert words in found


def test_S12_25_what_looks_alike_and_works_is_accepted(program: Path) -> None:
    for task in (
        {"args": {"+a": 1, "--b": 2}, "args_style": "key=value"},
        {"args": ["--epochs", "1"]},
        {"parallelism": {"strategy": "fsdp"}},
        {"checkpoint_folder": "output-checkpoints"},
    ):
        planned(program, **task)


def test_S12_25_arguments_with_one_variable_and_modules_from_nowhere_are_warned_of(program: Path) -> None:
    found = planned(program, args={"epochs": 1, "EPOCHS": 2}).warnings
    assert any("task.args.epochs: SM_HP_EPOCHS holds the value of EPOCHS" in it for it in found)

    def reported(entry: str) -> bool:
        return any("the image must hold it" in it for it in planned(program, entry=entry).warnings)

    assert reported("-m nope.x")
    assert not reported("-m train")
    assert not reported("-m torch.distributed.run")
    assert not reported("-m runpy")
    (program / "requirements.txt").write_text("nope\n")
    assert not reported("-m nope.x")


def test_S12_36_files_that_do_not_parse_are_warned_of_with_their_line(program: Path) -> None:
    (program / "train.py").write_text("import os\n\ndef f(:\n")
    (program / "other.py").write_text("print 'x'\n")
    found = planned(program).warnings
    assert any("task.entry: train.py does not start" in it and "line 3" in it for it in found)
    assert any("task.source" in it and "other.py line 1" in it for it in found)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("x @ file:///tmp/x.whl", "names a file of this machine"),
        ("file:///tmp/x.whl", "names a file of this machine"),
        ("/tmp/x.whl", "names a file of this machine"),
        ("numpy==1.0\nnumpy==2.0", "line 2 asks for another version of numpy than line 1"),
        ("numpy>=2\nNumPy == 1.5", "line 2 asks for another version"),
        ("numpy==1.5\nnumpy>=2", "line 2 asks for another version"),
    ],
)
def test_S12_20_requirements_that_pip_would_refuse_are_refused(lines: str, words: str, program: Path) -> None:
    (program / "requirements.txt").write_text(lines + "\n")
    assert any(words in it for it in faults(program))


def test_S12_20_requirements_that_pip_reads_are_accepted(program: Path) -> None:
    lines = "numpy>=1.26\nnumpy==2.0\neinops==1.*\neinops==1.2\na==1; python_version < '3'\na==2\n"
    (program / "requirements.txt").write_bytes(lines.encode("utf-8-sig"))
    found = planned(program)
    assert "numpy>=1.26" in found.settings["installs"]
    own = {**SCRIPT["backend"], "image_uri": "111122223333.dkr.ecr.us-west-2.amazonaws.com/x:1"}
    (program / "requirements.txt").write_text("/wheels/x.whl\n")  # in one's own image, perhaps
    plan_of({**SCRIPT, "task": {**SCRIPT["task"], "source": str(program)}, "backend": own})


@pytest.mark.parametrize("contract", ["local", "sagemaker"])
def test_S12_15_fixed_folders_of_sagemaker_are_warned_of_on_this_machine(contract: str, program: Path) -> None:
    (program / "train.py").write_text(
        "import os\nout = os.environ.get('SM_MODEL_DIR', '/opt/ml/model')\nopen('/opt/ml/output/data/d.bin', 'w')\n"
    )
    (program / "usual.py").write_text("out = os.environ.get('SM_MODEL_DIR', '/opt/ml/model')\n")
    backend = {"backend": {"name": "local", "contract": contract}, "compute": {}}
    backend |= {"environment": {"OUT": "/opt/ml/model"}}
    found = [it for it in planned(program, args=["/opt/ml/model"], backend=backend).warnings if "/opt/ml" in it]
    assert [it.partition(" ")[0] for it in found] == ["environment.OUT:", "task.source/train.py:"]
    assert "SM_MODEL_DIR" in found[0]
    assert "SM_OUTPUT_DATA_DIR" in found[1]
    assert not [it for it in planned(program).warnings if "/opt/ml" in it]  # there they are the job's


def test_S12_15_fixed_folders_in_arguments_are_led_to_the_jobs_own() -> None:
    args = ["/opt/ml/model", "--dir=/opt/ml/output/data", "s3://b/opt/ml/x", "/data/opt/ml/x", "/opt/ml", "/opt/mlx"]
    moved = ["/n/model", "--dir=/n/output/data", "s3://b/opt/ml/x", "/data/opt/ml/x", "/n", "/opt/mlx"]
    assert _moved({"args": args}, "/n") == {"args": moved}


def test_S12_15_what_a_program_wrote_to_the_fixed_folders_is_warned_of(tmp_path: Path) -> None:
    platform, base = tmp_path / "opt-ml", tmp_path / "node-0"
    for name in ("model", "checkpoints/checkpoint-1"):
        (platform / name).mkdir(parents=True)
        (platform / name / "a.bin").write_text("x")
    before = (platform / "model" / "a.bin").stat().st_mtime
    found = astray(ContainerPaths(base), before, platform)
    assert [it.partition(" of this machine")[0] for it in found] == [
        f"1 file was written to {platform / name}" for name in ("model", "checkpoints")
    ]
    assert not astray(ContainerPaths(base), before + 60, platform)
    assert not astray(ContainerPaths(platform), before, platform)


def test_S12_34_paid_accelerators_that_compute_nothing_are_warned_of(program: Path) -> None:
    def reported(*overrides: str, source: Any = TINY) -> list[str]:
        return [it for it in plan_of(source, *overrides).warnings if "paid for" in it]

    one = "compute.processes_per_instance=1"
    assert "the other 7 are paid for and not used. Leave it out" in reported(one)[0]
    assert not reported("task.model.config.num_attention_heads=8")
    script = {**SCRIPT, "task": {**SCRIPT["task"], "source": str(program)}}
    assert "unless the program itself uses several" in reported(one, source=script)[0]
    assert not reported(source=script)
    (program / "run.sh").write_text("true\n")
    assert not reported(one, "task.entry=run.sh", source=script)
    task = {"kind": "prepare", "sources": ["s3://data-bucket/x"], "seq_length": 8}
    prepare = {**SCRIPT, "task": task}
    assert "prepare computes on the CPU: the 8 GPUs" in reported(source=prepare)[0]
    assert not reported("compute.instance_type=ml.m5.4xlarge", source=prepare)


@pytest.mark.parametrize(
    ("storage", "meant"),
    [
        ("s3://bucket/runs/../x", "Write s3://bucket/x"),
        ("s3://bucket//runs", "Write s3://bucket/runs"),
        ("s3://bucket/./runs/", "Write s3://bucket/runs"),
        ("s3://bucket/..", "Write s3://bucket"),
    ],
)
def test_S12_27_addresses_that_s3_takes_literally_are_refused(storage: str, meant: str) -> None:
    for where, override in {"storage": f"storage={storage}", "inputs.x": f"inputs={{x: '{storage}'}}"}.items():
        (found,) = faults(None, override)
        assert where in found
        assert "empty folder, '.' or '..'" in found
        assert meant in found
    planned(None, "storage=s3://bucket/runs..x/.hidden/")


def test_S12_35_S12_6_settings_without_effect_and_tags_without_version_are_warned_of(program: Path) -> None:
    def reported(registry: str, source: Any = TINY, **backend: Any) -> str:
        uri = f"{registry}.us-west-2.amazonaws.com/pytorch-training"
        own = {"name": "sagemaker", "role": ROLE, "region": "us-west-2", "max_run_seconds": 3600}
        return "\n".join(plan_of({**source, "backend": {**own, "image_uri": uri, **backend}}).warnings)

    own, stock = "111122223333.dkr.ecr", "763104351884.dkr.ecr"
    built = {"image": "built", "wheelhouse": "s3://bucket/wheels"}
    effect = "backend.wheelhouse: s3://bucket/wheels has no effect"
    assert effect in reported(own, **built)
    assert effect not in reported(own, wheelhouse="s3://bucket/wheels")
    (program / "requirements.txt").write_text("einops\n")
    script = {**SCRIPT, "task": {**SCRIPT["task"], "source": str(program)}}
    assert effect not in reported(own, script, **built)
    for tag, is_stated in {"latest": True, "gpu": True, "2.10.0-gpu-py313-cu130-ubuntu22.04-sagemaker": False}.items():
        uri = f"{stock}.us-west-2.amazonaws.com/pytorch-training:{tag}"
        assert ("the tag names no version" in reported(stock, image_uri=uri)) is is_stated
    digest = f"{stock}.us-west-2.amazonaws.com/pytorch-training@sha256:{'0' * 64}"
    assert "the tag names no version" not in reported(stock, image_uri=digest)


def test_S12_6i_ids_of_a_network_are_hexadecimal() -> None:
    network = "backend.vpc={subnets: [subnet-ZZZ], security_group_ids: [sg-0a1b]}"
    (found,) = faults(None, network)
    assert "backend.vpc.subnets" in found
    assert "hexadecimal" in found


@pytest.mark.parametrize(
    ("override", "where", "words"),
    [
        ("storage=s3://sagemaker-eu-west-1-123456789012/x", "storage: ", "the bucket is in eu-west-1"),
        ("backend.bucket=sagemaker-us-west-2-111122223333", "backend.bucket: ", "of account 111122223333"),
        ("inputs={x: 's3://sagemaker-eu-west-1-111122223333/x'}", "inputs.x: ", "the bucket is in eu-west-1"),
        ("environment.AWS_ENDPOINT_URL_S3=http://localhost:9000", "environment.AWS_ENDPOINT_URL_S3: ", "this machine"),
        ("environment.HTTPS_PROXY=http://127.0.0.1:3128", "environment.HTTPS_PROXY: ", "this machine"),
    ],
)
def test_D13_places_of_another_region_account_or_machine_are_warned_of(override: str, where: str, words: str) -> None:
    found = planned(None, override).warnings
    assert any(it.startswith(where) and words in it for it in found), found
    own = planned(None, "storage=s3://sagemaker-us-west-2-123456789012/x").warnings
    assert not any("the bucket is" in it for it in own)


@pytest.mark.parametrize("name", ["output_kms_key_id", "volume_kms_key_id"])
def test_D13_an_empty_key_is_refused(name: str) -> None:
    (found,) = faults(None, f"backend.{name}=''")
    assert f"backend.{name}" in found
