"""Checks a cluster before the first job: commands, plugins, the shared folder and, by a job of a minute, the nodes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sm_llm.errors import SubmitError
from sm_llm.launcher.backend import ClusterCheck
from sm_llm.launcher.backends.slurm.paths import IN_CONTAINER
from sm_llm.launcher.backends.slurm.setup.setup_job import SetupJob, run_job
from sm_llm.launcher.backends.slurm.submit import HYPERPOD
from sm_llm.launcher.images.image_build import pull_policy
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sm_llm.launcher.backend import ClusterNode
    from sm_llm.launcher.backends.slurm.cluster import Cluster
    from sm_llm.launcher.backends.slurm.setup.setup_job import JobEnd
    from sm_llm.spec.backends.slurm import SlurmOptions

START_SECONDS = 60.0
"""So long the job that checks nodes may wait for them."""
_MOST_NODES = 64
_IN_ECR = re.compile(r"[0-9]{12}\.dkr\.ecr\.")

NODES = """
# Arguments: shared folder, scratch folder, python of the virtual environment or nothing, image or nothing, and where a
# container sees the shared folder. job.sh was written into the job's own folder below the shared one: a node that has
# a disk of its own at that path does not have it.
# shellcheck disable=SC2016  # the step's own bash expands these
srun bash -c '
  shared=no; [ -w "$1" ] && [ -e job.sh ] && shared=yes
  scratch=no; [ -d "$2" ] && [ -w "$2" ] && scratch=yes
  python=none; [ -z "$3" ] || { python=no; "$3" -c "" 2> /dev/null && python=yes; }
  enroot=no; [ -z "$(command -v enroot)" ] || enroot=yes
  echo "node $SLURMD_NODENAME shared=$shared scratch=$scratch python=$python enroot=$enroot"
' check "$1" "$2" "$3"
[ -n "$4" ] || exit 0
# pyxis is ignored without a word where Slurm does not load it: only a mount that is really there proves a container.
# shellcheck disable=SC2016  # the step's own bash expands these
srun --nodes=1 --ntasks=1 --container-image="$4" --container-mounts="$1:$5:ro" --no-container-mount-home \\
  bash -c '[ -d "$1/setup" ] && echo "container started" || echo "container ignored"' check "$5"
"""


def checks(options: SlurmOptions, cluster: Cluster, tell: Callable[[str], None]) -> Iterator[ClusterCheck]:
    """One check after the other; where Slurm does not answer, the first is the last."""
    try:
        name, nodes = cluster.name, cluster.nodes(options.partition)
    except SubmitError as error:
        yield ClusterCheck("slurm", "failed", str(error))
        return
    yield ClusterCheck("slurm", "ok", f"{name}, through {cluster.transport.where}")
    yield from _nodes(nodes)
    yield _accounting(cluster)
    yield from _hyperpod(options, cluster)
    yield from _image(options, cluster)
    if not cluster.has_folder(options.shared_folder):
        detail = f"{options.shared_folder} is not there. Make it, on a file system that all nodes mount at this path"
        yield ClusterCheck("shared folder", "failed", detail)
        return
    yield from _seen_by_nodes(options, cluster, nodes, tell)


def _nodes(nodes: Sequence[ClusterNode]) -> Iterator[ClusterCheck]:
    unfit = [f"{it.name} is {it.state}{f' ({it.reason})' if it.reason else ''}" for it in nodes if it.reason]
    if not nodes:
        yield ClusterCheck("nodes", "failed", "the partition has none. sinfo lists partitions")
    else:
        detail = f"{len(nodes)}, of which {len(unfit)} have a reason to take no jobs: {'; '.join(unfit)}"
        yield ClusterCheck("nodes", "warning" if unfit else "ok", detail if unfit else str(len(nodes)))


def _accounting(cluster: Cluster) -> ClusterCheck:
    if cluster.has_accounting():
        return ClusterCheck("accounting", "ok", "sacct answers")
    detail = "sacct has no database: minutes after its end a job's state is known only by the file that it leaves"
    return ClusterCheck("accounting", "warning", detail)


def _hyperpod(options: SlurmOptions, cluster: Cluster) -> Iterator[ClusterCheck]:
    is_hyperpod = cluster.has_folder(HYPERPOD)
    if options.retry != "auto-resume":
        yield ClusterCheck("HyperPod", "ok", "yes" if is_hyperpod else f"no: {HYPERPOD} is not there")
        return
    if not is_hyperpod:
        yield ClusterCheck("HyperPod", "failed", f"{HYPERPOD} is not there. Use backend.retry=requeue")
    # Slurm does not change the nodes of a job that holds GRES, so HyperPod cannot put another in their place.
    elif options.gpus_per_node is not None or cluster.resource_types is not None:
        whose = "the job asks for GRES" if options.gpus_per_node is not None else "the nodes have GRES"
        detail = f"{whose}, for which HyperPod's auto-resume starts no step again on other nodes. Use requeue"
        yield ClusterCheck("auto-resume", "warning", detail)
    else:
        yield ClusterCheck("auto-resume", "ok")


def _image(options: SlurmOptions, cluster: Cluster) -> Iterator[ClusterCheck]:
    has_pyxis, image = cluster.has_option("container-image"), options.container_image
    if image is None:
        detail = "srun takes --container-image" if has_pyxis else "not loaded: only virtual environments can be used"
        yield ClusterCheck("pyxis", "ok" if has_pyxis else "warning", detail)
        return
    if not has_pyxis:
        yield ClusterCheck("pyxis", "failed", "srun has no --container-image. Load it, or use a virtual environment")
    if _IN_ECR.match(image):
        # Only IAM itself could state what the role of the nodes may do, and a user may not ask it.
        # enroot writes REGISTRY#REPOSITORY where Docker writes a slash.
        policy = pull_policy(image.replace("#", "/", 1))
        detail = "the role of the nodes needs the policy below to pull it; that cannot be checked from here"
        yield ClusterCheck("image in ECR", "warning", detail, policy)


def _seen_by_nodes(
    options: SlurmOptions, cluster: Cluster, nodes: Sequence[ClusterNode], tell: Callable[[str], None]
) -> Iterator[ClusterCheck]:
    # A check must not wait for trainings to end: nodes that are taken are left out.
    idle = [it for it in nodes if it.state == "idle"]
    venv, image = options.virtual_environment, options.container_image
    # Without pyxis srun would refuse the option, and the nodes would not be checked at all.
    if not cluster.has_option("container-image"):
        image = None
    python = f"{venv}/bin/python" if venv is not None else ""
    arguments = (options.shared_folder, options.scratch_folder, python, image or "", IN_CONTAINER)
    # With an image the first start of a container unpacks it, which takes minutes.
    count, minutes = max(1, min(len(idle), _MOST_NODES)), 5 if image is None else 30
    job = SetupJob("sm-llm-check", NODES, arguments, count, minutes)
    try:
        end = run_job(job, options, cluster, tell, wait_seconds=START_SECONDS)
    except SubmitError as error:
        yield ClusterCheck("what nodes see", "skipped", f"{error}. Nodes: {_unchecked(nodes, ())}")
        return
    found = [
        dict(it.partition("=")[::2] for it in line.split()[2:]) | {"name": line.split()[1]} for line in _lines(end)
    ]
    if not found:
        yield ClusterCheck("what nodes see", "failed", end.last_words)
        return
    if unchecked := _unchecked(nodes, [it["name"] for it in found]):
        yield ClusterCheck("nodes not checked", "skipped", unchecked)
    yield _on_nodes(
        "shared folder", found, "shared", f"{options.shared_folder} is another folder, or cannot be written, on"
    )
    yield _on_nodes("scratch folder", found, "scratch", f"{options.scratch_folder} cannot be written on")
    if venv is not None:
        yield _on_nodes("virtual environment", found, "python", f"{python} does not run on")
    if image is not None:
        yield _on_nodes("enroot", found, "enroot", "is not installed on")
        yield _container(end)


def _unchecked(nodes: Sequence[ClusterNode], checked: Sequence[str]) -> str:
    """Nodes that no job has tried, by why; empty where there are none."""
    # A node that is idle and printed nothing has a fault, unless there were more than the job may try.
    is_many = sum(it.state == "idle" for it in nodes) > _MOST_NODES
    idle = f"idle; {_MOST_NODES} are tried at most" if is_many else "idle, but it printed nothing"
    reasons: dict[str, list[str]] = {}
    for node in nodes:
        if node.name not in checked:
            why = idle if node.state == "idle" else node.state
            reasons.setdefault(f"{why}: {node.reason}" if node.reason else why, []).append(node.name)
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())


def _lines(end: JobEnd) -> list[str]:
    return [line for line in end.log.splitlines() if line.startswith("node ")]


def _on_nodes(name: str, found: Sequence[dict[str, str]], key: str, problem: str) -> ClusterCheck:
    bad = sorted(it["name"] for it in found if it.get(key) != "yes")
    detail = f"{problem} {', '.join(bad)}" if bad else f"on {counted(len(found), 'node')}"
    return ClusterCheck(name, "failed" if bad else "ok", detail)


def _container(end: JobEnd) -> ClusterCheck:
    # By what the step printed: where pyxis is ignored, srun ends without an error.
    if "container started" in end.log:
        return ClusterCheck("container", "ok", "the image starts on a node")
    if "container ignored" in end.log:
        detail = "pyxis takes the option and starts no container: the job runs on the bare node. Check plugstack.conf"
        return ClusterCheck("container", "failed", detail)
    return ClusterCheck("container", "failed", end.last_words)
