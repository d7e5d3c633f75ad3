"""Environments and images that jobs on a cluster build, with stand-ins for enroot and the AWS CLI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import PlanError, SubmitError
from sm_llm.launcher.backends.slurm.cluster import Cluster
from sm_llm.launcher.backends.slurm.setup import doctor, environment_check, environments, image_import
from sm_llm.launcher.backends.slurm.setup.environments import Profile
from sm_llm.launcher.backends.slurm.setup.setup_job import SetupJob, run_job
from sm_llm.launcher.tools import clusters
from sm_llm.spec.backends.slurm import SlurmOptions
from sm_llm.spec.machines.neuron_releases import RELEASES
from tests.fixtures.slurm import NODES
from tests.fixtures.wheels import wheel
from tests.launcher.slurm.test_jobs import Submits, listed
from tests.launcher.slurm.test_script import HOSTILE

if TYPE_CHECKING:
    from tests.fixtures.slurm import SlurmCluster

REGISTRY = "111122223333.dkr.ecr.us-west-2.amazonaws.com"
FIRST, SECOND = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
STAND_INS = Path(__file__).parents[2] / "fixtures" / "enroot_standins"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the image's digest, in which the stand-ins note their calls; they come first in PATH."""
    registry = tmp_path / "registry"
    registry.mkdir()
    (registry / "digest").write_text(FIRST)
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("enroot", "aws"):
        # A job gets PATH alone of the environment that submits it, so the folder is written into the program.
        text = (STAND_INS / name).read_text().replace("@REGISTRY@", str(registry))
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return registry


def imported(folder: Path, tag: str = "1.0", **environ: str) -> subprocess.CompletedProcess[str]:
    """The body of the import, without a cluster."""
    (folder / "node's disk").mkdir(exist_ok=True)
    target, disk = str(folder / "shared" / "team_train_1.0.sqsh"), str(folder / "node's disk")
    arguments = [REGISTRY, "111122223333", "us-west-2", "team/train", tag, target, disk]
    environ = {**os.environ, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", **environ}
    argv = ["bash", "-c", image_import.IMPORT, "import", *arguments]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=300, check=False)


def test_an_image_is_imported_once_for_each_digest(programs: Path, tmp_path: Path) -> None:
    done = imported(tmp_path)
    assert done.stdout.splitlines()[-1] == f"imported {FIRST}", done.stderr
    file = tmp_path / "shared" / "team_train_1.0.sqsh"
    assert file.read_text() == f"docker://{REGISTRY}#team/train:1.0 {FIRST}\n"
    assert imported(tmp_path).stdout == f"current {FIRST}\n"
    (programs / "digest").write_text(SECOND)
    assert imported(tmp_path).stdout.splitlines()[-1] == f"imported {SECOND}"
    assert file.read_text().endswith(f"{SECOND}\n")
    assert (programs / "imports").read_text().count("\n") == 2
    assert sorted(it.name for it in file.parent.iterdir()) == [file.name, f"{file.name}.digest"]
    assert list((tmp_path / "node's disk").iterdir()) == []


def test_an_import_that_fails_leaves_what_was_there(programs: Path, tmp_path: Path) -> None:
    imported(tmp_path)
    (programs / "digest").write_text(SECOND)
    (programs / "fails").touch()
    assert imported(tmp_path).returncode != 0
    file = tmp_path / "shared" / "team_train_1.0.sqsh"
    assert file.read_text().endswith(f"{FIRST}\n")
    assert imported(tmp_path, tag="2.0").stdout == f"{REGISTRY} has no team/train:2.0\n"
    bare = imported(tmp_path, PATH="/usr/bin:/bin")
    assert (bare.returncode, bare.stdout) == (1, "enroot is not installed on n1\n")


@pytest.mark.parametrize("image", ["train:1", "docker.io/train:1", f"{REGISTRY}/train", f"{REGISTRY}/train@sha256:0"])
def test_only_a_tag_in_ECR_is_imported(image: str) -> None:
    with pytest.raises(PlanError, match=r"image: (is not an image in ECR|has no repository and tag)"):
        clusters.import_image("slurm", image, backend={"shared_folder": "/fsx"})


def test_what_an_environment_lacks_is_named() -> None:
    found = {"torch": "2.11.0+cu130", "numpy": "2.0"}
    texts = ["# a comment\ntorch==2.11.0\n", "numpy==2.4.6\nPyYAML==6.0.4  # used\n"]
    faults = environment_check.pin_problems(texts, found)
    assert faults == ["numpy is 2.0, not 2.4.6", "PyYAML is missing, not 6.0.4"]
    assert environment_check.import_problems(["json", "no_such_module"]) == [
        "import no_such_module: ModuleNotFoundError: No module named 'no_such_module'"
    ]
    assert environment_check.digest({"a": "1", "b": "2"}) == environment_check.digest({"b": "2", "a": "1"})


def test_locks_of_environments_pin_everything() -> None:
    for name, profile in environments.profiles().items():
        lines = [it for it in f"{profile.base}\n{profile.packages}".splitlines() if it and not it.startswith("#")]
        pinned = [environment_check.canonical(it.partition("==")[0]) for it in lines if "==" in it]
        assert len(pinned) == len(lines), name
        assert len(set(pinned)) == len(pinned), f"{name}: a package is pinned twice"
    # Of one SDK: its framework names the PyTorch that it is built against.
    neuron = environments.profiles()["neuron"].base.splitlines()
    assert {f"torch=={RELEASES[0].torch}", f"torch-xla=={RELEASES[0].torch}"} < set(neuron)
    assert any(it.startswith("libneuronxla==") for it in neuron)
    with pytest.raises(PlanError, match="--profile: there is no such profile"):
        clusters.create_environment("slurm", "smp", backend={"shared_folder": "/fsx"})


@pytest.mark.parametrize("ok", [True, False])
def test_folders_of_setup_jobs_go_when_they_are_done_or_old(ok: bool, tmp_path: Path) -> None:
    setup = tmp_path / "a b" / "setup"
    for name, age in (("old", 9), ("new", 1), ("kept.txt", 9)):
        (setup / name).parent.mkdir(parents=True, exist_ok=True)
        (setup / name).touch() if "." in name else (setup / name).mkdir()
        os.utime(setup / name, (time.time() - age * 86_400,) * 2)

    login = Submits(listed("COMPLETED" if ok else "FAILED"))
    shared = SlurmOptions(shared_folder=str(tmp_path / "a b"))
    end = run_job(SetupJob("sm-llm-test", "", []), shared, Cluster(login), lambda text: None, wait_seconds=1)
    assert end.ok is ok
    left = {it.name for it in setup.iterdir()}
    own = {it for it in left if it.startswith("sm-llm-test-")}
    assert left - own == {"new", "kept.txt"}
    assert len(own) == (0 if ok else 1), "the log of a job that failed stays"


BODIES = {"check": doctor.NODES, "build": environments.BUILD, "nodes": environments.CHECK, "image": image_import.IMPORT}


@pytest.mark.parametrize("body", BODIES)
def test_arguments_of_a_setup_job_stay_values(body: str, tmp_path: Path) -> None:
    printed = SetupJob("sm-llm-test", "printf '%s\\0' \"$@\"\n", [HOSTILE, "a\nb", ""])
    text = printed.text(SlurmOptions(shared_folder="/fsx", partition="p5"), "/fsx/é %j")
    done = subprocess.run(["bash", "-c", text], capture_output=True, timeout=300, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [HOSTILE, "a\nb", ""]
    assert '#SBATCH --output="/fsx/é %%j/job.log"' in text
    if shutil.which("shellcheck") is None:
        return
    (tmp_path / "job.sh").write_text(SetupJob("sm-llm-test", BODIES[body], [HOSTILE] * 8).text(
        SlurmOptions(shared_folder="/fsx"), "/fsx"
    ))  # fmt: skip
    checked = subprocess.run(["shellcheck", str(tmp_path / "job.sh")], capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_an_environment_and_an_image_on_a_cluster(
    slurm: SlurmCluster, tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "tinybase", "2.0", needs="tinystock")
    wheel(wheels, "tinystock", "1.0")
    wheel(wheels, "tinystock", "1.1")
    tiny = Profile("tinybase==2.0\n", "tinystock==1.0\n", ("tinybase", "tinystock"))
    monkeypatch.setattr(environments, "profiles", lambda: {"tiny": tiny})
    reported: list[str] = []
    given: Any = {"shared_folder": str(tmp_path), "scratch_folder": str(tmp_path)}

    def create() -> str:
        return clusters.create_environment(
            "slurm", "tiny", backend=given, python=sys.executable, wheels=str(wheels), tell=reported.append
        )

    location = create()
    assert f"it is the same on {NODES} nodes, digest" in reported[-1]
    python = f"{location}/bin/python"
    shown = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, timeout=300
    )
    assert {"tinybase==2.0", "tinystock==1.0"} <= set(shown.stdout.split())
    marker = Path(location) / "complete"
    built = marker.stat().st_mtime_ns
    # The same locks are the same environment, which is checked again.
    monkeypatch.setattr(environments, "profiles", lambda: {"tiny": replace(tiny, modules=("tinybase", "absent"))})
    with pytest.raises(SubmitError, match=r"node[1-5]: import absent: ModuleNotFoundError"):
        create()
    assert marker.stat().st_mtime_ns == built, "it is not built again"

    found = clusters.import_image("slurm", f"{REGISTRY}/team/train:1.0", backend=given)
    assert (found.path, found.digest, found.is_new) == (f"{tmp_path}/images/team_train_1.0.sqsh", FIRST, True)
    assert not clusters.import_image("slurm", f"{REGISTRY}/team/train:1.0", backend=given).is_new
    with pytest.raises(SubmitError, match=r"could not be imported: .*has no team/train:2\.0"):
        clusters.import_image("slurm", f"{REGISTRY}/team/train:2.0", backend=given)
