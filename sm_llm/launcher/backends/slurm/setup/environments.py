"""Builds a pinned virtual environment on a cluster's shared file system, and checks it on the nodes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from sm_llm.errors import Issue, PlanError, SubmitError
from sm_llm.launcher.backends.slurm.setup.setup_job import SetupJob, run_job
from sm_llm.launcher.images.images import lock_text
from sm_llm.spec.machines.neuron_releases import RELEASES
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sm_llm.launcher.backends.slurm.cluster import Cluster
    from sm_llm.spec.backends.slurm import SlurmOptions

START_SECONDS = 3600.0
"""So long a job may wait for a node."""
_MOST_NODES = 256
_CHECK = "environment_check.py"
_NEURON_INDEX = "https://pip.repos.neuron.amazonaws.com"

BUILD = """
# Arguments: where to build, python, folder of the pins, then pip's options. A virtual environment cannot be moved, so
# it is built in place, and counts once the file "complete" is there. -P: the job works where sbatch was called, and
# files there are not modules of these programs.
set -e
target=$1 python=$2 pins=$3; shift 3
"$python" -c 'import sys; sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}: 3.11 or newer is needed"
  if sys.version_info < (3, 11) else 0)'
if [ ! -e "$target/complete" ]; then
  rm -rf -- "$target"
  "$python" -P -m venv -- "$target"
  pip=("$target/bin/python" -P -m pip --disable-pip-version-check --no-input install "$@")
  "${pip[@]}" --constraint "$pins/packages.txt" --requirement "$pins/base.txt"
  # Like on an image of SageMaker: the lock is whole, and nothing that it lacks shall change the base.
  "${pip[@]}" --no-deps --requirement "$pins/packages.txt"
  "$target/bin/python" "$pins/environment_check.py" "$pins/base.txt" "$pins/packages.txt" --
  touch "$target/complete"
fi
"""

CHECK = """
# Arguments: the environment, folder of the pins, then modules to import.
target=$1 pins=$2; shift 2
# shellcheck disable=SC2016  # the step's own bash expands these
srun --kill-on-bad-exit=0 bash -c '
  target=$1 pins=$2; shift 2
  [ -x "$target/bin/python" ] || { echo "environment $SLURMD_NODENAME - $target is not there"; exit 1; }
  exec "$target/bin/python" "$pins/environment_check.py" "$pins/base.txt" "$pins/packages.txt" -- "$@"
' check "$target" "$pins" "$@"
"""


@dataclass(frozen=True)
class Profile:
    """What an environment holds."""

    base: str
    """Requirements that pip resolves: PyTorch and what comes with it."""
    packages: str
    """The lock of everything else, installed without dependencies."""
    modules: tuple[str, ...]
    """What every node must be able to import."""
    index: str | None = None
    """Where packages are that PyPI lacks."""

    def digest(self, python: str) -> str:
        """12 hex digits: another lock, or another Python, makes another environment."""
        text = "\0".join((self.base, self.packages, self.index or "", python))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


_MODULES = ("torch", "transformers", "tokenizers", "safetensors", "pydantic")


def profiles() -> dict[str, Profile]:
    """The environments by name."""
    sdk = "".join(f"{name}=={version}\n" for name, version in RELEASES[0].packages.items())
    neuron = f"{sdk}{lock_text('environment-neuron')}"
    return {
        "fsdp": Profile(lock_text("environment-fsdp"), lock_text("gpu"), _MODULES),
        "neuron": Profile(
            neuron, lock_text("neuron"), (*_MODULES, "torch_neuronx", "neuronx_distributed"), _NEURON_INDEX
        ),
    }


def create(
    profile: str, options: SlurmOptions, cluster: Cluster, tell: Callable[[str], None], *,
    python: str = "python3", wheels: str | None = None,
) -> str:  # fmt: skip
    """Build the environment unless it is there, and check it on all idle nodes; returns its folder on the cluster.

    Args:
        profile: ``fsdp`` or ``neuron``.
        options: where the cluster is, and where jobs may run there.
        cluster: the same, connected.
        tell: gets a line about each step.
        python: the interpreter on the nodes, 3.11 or newer.
        wheels: folder of wheels that the nodes see, in place of the package index.

    Raises:
        PlanError: there is no such profile.
        SubmitError: a job could not run, or nodes do not have the environment; they are named.
    """
    known = profiles()
    if profile not in known:
        remedy = f"Known: {', '.join(known)}"
        raise PlanError(
            [Issue("environment-profile-unknown", "--profile", "there is no such profile", profile, remedy)]
        )
    chosen = known[profile]
    name = f"{profile}-{chosen.digest(python)}"
    target, pins = f"{options.shared_folder}/environments/{name}", f"{options.shared_folder}/setup/{name}"
    texts = {"base.txt": chosen.base, "packages.txt": chosen.packages, _CHECK: _check_text()}
    for file, text in texts.items():
        cluster.put(f"{pins}/{file}", text.encode())
    extra = ["--extra-index-url", chosen.index] if chosen.index is not None else []
    # With wheels of their own, nodes need no way to any index.
    own = ["--no-index", "--find-links", wheels] if wheels is not None else extra
    # Alone: two builds of one environment would remove each other's files.
    build = SetupJob("sm-llm-environment", BUILD, (target, python, pins, *own), minutes=120, alone=True)
    end = run_job(build, options, cluster, tell, wait_seconds=START_SECONDS)
    if not end.ok:
        raise SubmitError(f"{target} could not be built: {end.last_words}")
    _check(target, pins, chosen, options, cluster, tell)
    return target


def _check(
    target: str, pins: str, profile: Profile, options: SlurmOptions, cluster: Cluster, tell: Callable[[str], None]
) -> None:
    # Waiting for nodes that train for days would make the check useless.
    nodes = cluster.nodes(options.partition)
    busy = [it.name for it in nodes if it.state != "idle"]
    count = max(1, min(len(nodes) - len(busy), _MOST_NODES))
    job = SetupJob("sm-llm-environment-check", CHECK, (target, pins, *profile.modules), count, minutes=20)
    end = run_job(job, options, cluster, tell, wait_seconds=START_SECONDS)
    lines = [line.split(" ", 3) for line in end.log.splitlines() if line.startswith("environment ")]
    problems = [f"{node}: {words}" for _, node, _, words in lines if words != "ok"]
    # Equal pins are not enough: pip chooses what no lock names, and a node may see another folder at this path.
    digests = {digest for _, _, digest, words in lines if words == "ok"}
    if problems or len(lines) < count or len(digests) > 1:
        raise SubmitError(f"{target} is not the same on all nodes: {'; '.join(problems) or end.last_words}")
    tell(f"it is the same on {counted(len(lines), 'node')}, digest {digests.pop()[:12]}{_unchecked(busy)}")


def _unchecked(busy: Sequence[str]) -> str:
    return f"; not checked, because they are not idle: {', '.join(busy)}" if busy else ""


def _check_text() -> str:
    return (files("sm_llm") / "launcher" / "backends" / "slurm" / "setup" / _CHECK).read_text(encoding="utf-8")
