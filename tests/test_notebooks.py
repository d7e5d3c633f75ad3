"""Every notebook runs from top to bottom in a fresh kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbclient import NotebookClient

from tests.launcher.kubeflow.test_setup import node

if TYPE_CHECKING:
    from tests.fixtures.kubernetes_double import KubernetesDouble
    from tests.fixtures.preloaded import Preloaded
    from tests.fixtures.slurm import SlurmCluster

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.integration
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", [it for it in NOTEBOOKS if "hyperpod" not in it.stem], ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, preloaded: Preloaded) -> None:
    outputs_of(path, tmp_path, seconds=280)


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_notebook_of_slurm_runs_on_a_cluster(slurm: SlurmCluster, tmp_path: Path) -> None:
    text = outputs_of(NOTEBOOKS[0].with_name("05_hyperpod_slurm.ipynb"), tmp_path, seconds=600)
    assert "#SBATCH --nodes=2" in text
    assert text.count("RunState.INTERRUPTED") + text.count("interrupted-resumable") >= 2
    assert "restart 0: node 0 of 2" in text.rpartition("is safe")[2]
    assert re.search(r"MiB were on the nodes' disks, 0\.\d MiB came from storage", text)


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("mounted_claim")
def test_notebook_of_EKS_runs_on_the_double(
    ready_kubernetes: KubernetesDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    ready_kubernetes.nodes = [node("n1", labels={"sagemaker.amazonaws.com/node-health-status": "Schedulable"})]
    text = outputs_of(NOTEBOOKS[0].with_name("06_hyperpod_eks.ipynb"), tmp_path / "claims", seconds=600)
    assert 'kind: "PyTorchJob"' in text
    assert 'vpc.amazonaws.com/efa: "4"' in text or "4 vpc.amazonaws.com/efa" in text
    assert re.search(r"n1 +Ready +8/8 +Schedulable", text)
    assert "ok       image: pulled; it has python3 and boto3" in text
    assert text.count("interrupted-resumable") + text.count("RunState.INTERRUPTED") >= 2
    assert re.search(r"starting at step [1-9]", text)


def outputs_of(path: Path, folder: Path, *, seconds: int) -> str:
    """What a notebook prints, run in ``folder``; no cell may fail."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=seconds, resources={"metadata": {"path": str(folder)}}).execute()
    nbformat.write(notebook, folder / path.name)
    outputs = [it for cell in notebook.cells for it in cell.get("outputs", [])]
    assert not [it for it in outputs if it.output_type == "error"]
    return "\n".join(it.get("text") or str(it.get("data", {}).get("text/plain", "")) for it in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
