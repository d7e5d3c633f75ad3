"""Our Dockerfiles: a lint of our own, the base of the table, and the base's packages left alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sm_llm.errors import PlanError, SubmitError
from sm_llm.launcher.images import image_build
from sm_llm.launcher.images.images import rows, uri

ROOT = Path(__file__).parent.parent
KINDS = sorted(path.parent.name for path in (ROOT / "docker").glob("*/Dockerfile"))
INSTRUCTIONS = {"ARG", "FROM", "COPY", "RUN", "ENV", "LABEL", "ENTRYPOINT"}
OWNED = {
    "fsdp": {"torch", "flash-attn", "transformer-engine", "triton", "deepspeed"},
    "smp": {"torch", "flash-attn", "transformer-engine", "transformers", "datasets", "megatron-core", "safetensors"},
    "neuron": {"torch", "torch-xla", "torch-neuronx", "neuronx-distributed", "neuronx-cc"},
    "byo": set(),
}  # fmt: skip
"""Packages that belong to the base."""


def instructions(kind: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", " ", (ROOT / "docker" / kind / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines]


def wanted(path: Path) -> set[str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {re.split(r"[<>=!~\[ ]", line)[0].lower().replace("_", "-") for line in lines}


def test_the_kinds_are_those_of_the_command() -> None:
    assert sorted(image_build.STACK_OF_KIND) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_dockerfile_is_sound(kind: str) -> None:
    found = instructions(kind)
    assert [name for name, _ in found[:2]] == ["ARG", "FROM"]
    assert {name for name, _ in found} <= INSTRUCTIONS
    base = found[0][1].removeprefix("BASE=")
    assert ":" in base.rpartition("/")[2]
    assert not base.endswith(":latest")
    for name, text in found:
        if name == "RUN" and "pip install" in text:
            assert "--no-cache-dir" in text
            assert "--constraint" in text
            assert "python -c" in text  # what was installed is tried at once
            assert "rm -rf /tmp/sm_llm" in text
        if name == "RUN" and "apt-get install" in text:
            assert "--no-install-recommends" in text
            assert "rm -rf /var/lib/apt/lists/*" in text
        if name == "COPY":
            for source in text.split()[:-1]:
                assert (ROOT / source).is_file(), source
        assert not re.search(r"curl|wget|https?://|sudo|--trusted-host", text)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byo"])
def test_the_base_is_the_tables_and_its_entrypoint_stays(kind: str) -> None:
    found = instructions(kind)
    line = image_build.STACK_OF_KIND[kind]
    assert found[0][1] == f"BASE={uri(rows(line)[0], 'us-east-1')}"  # type: ignore[arg-type]
    assert not [text for name, text in found if name == "ENTRYPOINT"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_base_is_asked_for(kind: str) -> None:
    assert not wanted(ROOT / "docker" / kind / "requirements.txt") & OWNED[kind]


def pip_step(kind: str) -> tuple[list[Path], set[str]]:
    """Of the image's pip step: the files with what is wanted, and the packages whose releases are held."""
    found = instructions(kind)
    (step,) = (text for name, text in found if name == "RUN" and "pip install" in text)
    locations = {}
    for *sources, target in (text.split() for name, text in found if name == "COPY"):
        for source in sources:
            locations[target + Path(source).name if target.endswith("/") else target] = ROOT / source
    held = re.search(r"freeze\.py (?P<names>[^>]*)>", step)
    assert held is not None
    return [locations[name] for name in re.findall(r"--requirement (\S+)", step)], set(held["names"].split())


@pytest.mark.parametrize("kind", KINDS)
def test_a_pip_step_holds_every_package_of_the_base(kind: str) -> None:
    files, held = pip_step(kind)
    assert ROOT / "docker" / kind / "requirements.txt" in files
    assert held == {"--all"} or held >= {"torch", "numpy"} | OWNED[kind]


BROUGHT = {"smp": ("transformers==4.44.2", "datasets==2.19.2", "numpy==1.26.4")}
"""What the image holds and our packages must live with, where its releases are known (docs/smp.md)."""


@pytest.mark.integration
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byo"])  # whose toolkit pip builds for minutes
def test_a_pip_step_can_be_done_beside_what_the_base_holds(kind: str, tmp_path: Path) -> None:
    """Resolved by pip, by the index's own words, for the Python of the image; nothing is installed."""
    files, _ = pip_step(kind)
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed"]
    command += ["--report", str(tmp_path / "report.json"), *BROUGHT.get(kind, ())]
    python = rows(image_build.STACK_OF_KIND[kind])[0].python
    command += ["--only-binary=:all:", "--python-version", python, "--target", str(tmp_path / "none")]
    command += ["--platform=manylinux_2_28_x86_64", "--platform=manylinux2014_x86_64"]
    subprocess.run([*command, *(f"--requirement={path}" for path in files)], check=True)
    chosen = {it["metadata"]["name"].lower(): it["metadata"]["version"] for it in _report(tmp_path)}
    assert set(chosen) >= {"pydantic", "pyarrow", "boto3"}
    pinned = dict(text.split("==") for text in BROUGHT.get(kind, ()))
    assert {name: version for name, version in chosen.items() if name in OWNED[kind] - {"safetensors"}} == {
        name: version for name, version in pinned.items() if name in OWNED[kind]
    }


def _report(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "report.json").read_text())["install"]
    return found


def test_constraints_hold_what_is_installed() -> None:
    script = [sys.executable, str(ROOT / "docker" / "freeze.py")]
    named = subprocess.run([*script, "PyYAML", "nothing"], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"PyYAML==[\d.]+\n", named)
    everything = subprocess.run([*script, "--all"], capture_output=True, text=True, check=True).stdout
    assert named in everything


@dataclass
class Docker:
    """In docker's place: keeps the arguments that it was given."""

    calls: list[tuple[list[str], str | None]]
    code: int = 0

    def __call__(self, argv: list[str], *, cwd: Path, input: str | None, text: bool, check: bool) -> Any:
        self.calls.append((argv, input))
        return SimpleNamespace(returncode=self.code)


IMAGE = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/sagemaker-sm-llm:1"


class Ecr:
    """A contract double of ECR."""

    class exceptions:
        class RepositoryNotFoundException(Exception):
            pass

    def __init__(self) -> None:
        self.made: list[str] = []

    def client(self, service: str) -> Any:
        assert service == "ecr"
        return self

    def get_authorization_token(self, registryIds: list[str]) -> Any:
        assert registryIds == ["111122223333"]
        return {"authorizationData": [{"authorizationToken": "QVdTOnNlY3JldA=="}]}

    def describe_repositories(self, **_: Any) -> Any:
        raise self.exceptions.RepositoryNotFoundException

    def create_repository(self, repositoryName: str) -> None:
        self.made.append(repositoryName)

    def describe_images(self, **_: Any) -> Any:
        return {"imageDetails": [{"imageDigest": "sha256:abc"}]}


def test_build_login_and_push() -> None:
    docker, ecr = Docker([]), Ecr()
    argv = image_build.build("smp", IMAGE, "eu-west-1", run=docker)
    assert argv[:4] == ["docker", "build", "--file", "docker/smp/Dockerfile"]
    assert any(word.startswith("BASE=658645717510.dkr.ecr.eu-west-1") for word in argv)
    image_build.login(IMAGE, connect=lambda region: ecr, run=docker)
    argv, password = docker.calls[-1]
    assert "secret" not in " ".join(argv)
    assert password == "secret"
    built = image_build.push(IMAGE, connect=lambda region: ecr, run=docker)
    assert (built.digest, ecr.made) == ("sha256:abc", ["sagemaker-sm-llm"])
    for name, is_covered in ((IMAGE, True), (IMAGE.replace("sagemaker-", ""), False)):
        assert image_build.covered_by_sagemaker_policy(name) is is_covered
        # Nodes of clusters have no such policy of AWS's: what they need is stated for any name.
        resource = image_build.pull_policy(name)["Statement"][0]["Resource"]
        assert resource.endswith(f"repository/{'sagemaker-' if is_covered else ''}sm-llm")


def test_what_cannot_be_built_is_reported() -> None:
    with pytest.raises(PlanError, match="there is no such image"):
        image_build.build_command("gpu", "x", "us-east-1")
    with pytest.raises(PlanError, match="is not an image in ECR"):
        image_build.push("docker.io/x:1")
    with pytest.raises(SubmitError, match="exit code 2"):
        image_build.build("fsdp", "x", "us-east-1", run=Docker([], code=2))


@pytest.mark.parametrize(
    ("address", "is_known"),
    [
        ("111122223333.dkr.ecr-fips.us-east-1.amazonaws.com/x:1", True),
        ("111122223333.dkr.ecr.cn-north-1.amazonaws.com.cn/x:1", True),
        ("111122223333.dkr.ecr.us-iso-east-1.c2s.ic.gov/x:1", True),
        ("111122223333.dkr.ecr.us-east-1.example.com/x:1", False),
        ("111122223333.dkr.ecr.cn-north-1.amazonaws.com/x:1", False),
    ],
)
def test_registries_of_every_partition_are_known(address: str, is_known: bool) -> None:
    if is_known:
        assert image_build.registry_of(address)["account"] == "111122223333"
        return
    with pytest.raises(PlanError, match="is not an image in ECR"):
        image_build.registry_of(address)
