"""Asks the cluster of a backend what no run holds: its nodes, and whether it is as jobs need it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, PlanError
from sm_llm.launcher.backend import ChecksCluster, ListsNodes, PreparesSoftware, backend
from sm_llm.spec.backends.table import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sm_llm.launcher.backend import Backend, ClusterCheck, ClusterNode, ImportedImage
    from sm_llm.spec.loading.overrides import Override

_KNOWN = f"Known: {', '.join(BACKENDS)}"


def nodes(name: str | None = None, *overrides: Override, **fields: Any) -> list[ClusterNode]:
    """The nodes of a cluster: state, reason, accelerators, and health as HyperPod sees it.

    Args:
        name: the backend; None takes the first that has nodes.
        overrides: where the cluster is, as in a job: ``backend.ssh_host=login``, ``backend.partition=p5``.
        fields: the same by keyword.

    Raises:
        PlanError: the backend has no nodes of its own.
        SpecError: the options are wrong.
        SubmitError: the cluster does not answer.
    """
    for it in _backends(name):
        if isinstance(it, ListsNodes):
            return it.nodes(overrides, fields)
    raise _lacking(name, "has no nodes to list")


@dataclass(frozen=True)
class ClusterReport:
    """All that was checked on a cluster."""

    backend: str
    checks: tuple[ClusterCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether jobs can run; warnings aside."""
        return not any(it.outcome == "failed" for it in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {**asdict(self), "ok": self.ok}

    def text(self) -> str:
        """A line per check, then the policies that were asked for."""
        width = max(len(it.outcome) for it in self.checks)
        lines = [f"{it.outcome:<{width}}  {it.name}{': ' if it.detail else ''}{it.detail}" for it in self.checks]
        # Policies take many lines: below the table, which stays readable.
        for it in self.checks:
            if it.policy is not None:
                lines += ["", f"{it.name}:", json.dumps(it.policy, indent=2)]
        return "\n".join(lines)


def check_cluster(
    name: str, *overrides: Override, tell: Callable[[str], None] = lambda text: None, **fields: Any
) -> ClusterReport:
    """Check whether a cluster is as jobs with these options need it; its nodes by a job of a minute.

    Args:
        name: the backend.
        overrides: its options, as in a job: ``backend.shared_folder=/fsx/sm_llm``.
        tell: gets a line about what takes long.
        fields: the same by keyword.

    Raises ``PlanError`` for a backend that has no such check, ``SpecError`` for wrong options.
    """
    for it in _backends(name):
        if isinstance(it, ChecksCluster):
            return ClusterReport(name, tuple(it.check_cluster(overrides, fields, tell)))
    raise _lacking(name, "has no cluster to check")


def create_environment(
    name: str | None,
    profile: str,
    *overrides: Override,
    python: str = "python3",
    wheels: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
    **fields: Any,
) -> str:
    """Build a pinned virtual environment on a cluster's shared file system and check it on its nodes.

    Args:
        name: the backend; None takes the first that has a cluster.
        profile: ``fsdp`` or ``neuron``.
        overrides: options of the backend, as in a job: ``backend.shared_folder=/fsx/sm_llm``.
        python: the interpreter on the nodes.
        wheels: folder of wheels that the nodes see, in place of the package index.
        tell: gets a line about each step.
        fields: the same as ``overrides`` by keyword.

    Returns its folder, for ``backend.virtual_environment``.
    Raises ``PlanError``, ``SpecError``, and ``SubmitError`` where it cannot be built or differs between nodes.
    """
    return _preparing(name).create_environment(profile, overrides, fields, tell, python=python, wheels=wheels)


def import_image(
    name: str | None, image: str, *overrides: Override, tell: Callable[[str], None] = lambda text: None, **fields: Any
) -> ImportedImage:
    """Bring an image of ECR onto a cluster, as the file for ``backend.container_image``, unless it is current there.

    Args:
        name: the backend; None takes the first that has a cluster.
        image: ``ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG``.
        overrides: options of the backend, as in a job.
        tell: gets a line about each step.
        fields: the same as ``overrides`` by keyword.

    Raises ``PlanError``, ``SpecError``, and ``SubmitError`` where it cannot be imported.
    """
    return _preparing(name).import_image(image, overrides, fields, tell)


def _preparing(name: str | None) -> PreparesSoftware:
    for it in _backends(name):
        if isinstance(it, PreparesSoftware):
            return it
    raise _lacking(name, "has no cluster to prepare")


def _backends(name: str | None) -> list[Backend]:
    """The backend called ``name``; None stands for all. Raises ``PlanError``."""
    if name is not None and name not in BACKENDS:
        raise PlanError([Issue("backend-unknown", "backend", "there is no such backend", name, _KNOWN)])
    return [backend(it) for it in (BACKENDS if name is None else [name])]


def _lacking(name: str | None, problem: str) -> PlanError:
    return PlanError([Issue("backend-without-cluster", "backend", problem, name, _KNOWN)])


def rows(found: Sequence[ClusterNode]) -> list[str]:
    """The nodes as lines of a table."""
    header = ("node", "state", "free", "health", "reason")
    table = [header, *((it.name, it.state, _free(it), it.health or "-", it.reason or "-") for it in found)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return ["  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _free(node: ClusterNode) -> str:
    return "-" if node.accelerators is None else f"{node.free}/{node.accelerators}"
