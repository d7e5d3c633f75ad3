"""README and docs promise what can be done: pages are linked, plans are called plans, examples fit the first run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sm_llm.launcher.backends.registry import BACKENDS
from sm_llm.launcher.plan import plan
from sm_llm.launcher.runnable import STRATEGIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CLAIMS = {"slurm": r"slurm", "kubeflow": r"\beks\b|kubeflow", "nxd": r"trainium|\btrn1\b"}
"""What runs jobs -> the words that claim so."""


def test_the_index_links_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert "docs/index.md" in README


@pytest.mark.parametrize("name", CLAIMS)
def test_what_cannot_run_yet_is_called_planned(name: str) -> None:
    if name in BACKENDS or name in STRATEGIES:
        return
    texts = {
        path.name: path.read_text() for path in (ROOT / "README.md", ROOT / "docs" / "design.md", ROOT / "setup.cfg")
    }
    texts |= {path.name: path.read_text() for path in (ROOT / "sm_llm" / "cli").glob("*.py")}
    texts |= {path.name: path.read_text() for path in (ROOT / "sm_llm" / "recipes").glob("*.yaml")}
    for file, text in texts.items():
        first = re.search(CLAIMS[name], text, re.IGNORECASE)
        sentence = first and text[max(0, first.start() - 200) : first.end() + 200]
        assert sentence is None or "planned" in sentence.lower(), f"{file} claims {name}: {sentence}"


def test_the_install_command_covers_s3() -> None:
    (command,) = re.findall(r"^pip install torch\S* '\.\[(.*)\]'\nsm-llm fit", README, re.MULTILINE)
    assert {"local", "s3"} <= set(command.split(","))


def test_steps_in_examples_are_checkpoints_of_the_first_run() -> None:
    train = plan("tiny-local")[-1].derived
    assert train is not None and train.total_steps is not None and train.checkpoint_every is not None  # noqa: PT018
    kept = [step for step in range(1, train.total_steps + 1) if step % train.checkpoint_every == 0][-3:]
    examples = README + (ROOT / "sm_llm" / "cli" / "steer.py").read_text()
    named = re.findall(r"sm-llm (?:resume|branch) (?:RUN|tiny-local) --step (\d+)", examples)
    assert len(named) >= 3
    assert {int(step) for step in named} <= set(kept)
