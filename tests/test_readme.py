"""README and docs promise what can be done: pages are linked, plans are called plans, examples fit the first run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sm_llm.launcher.backend import BACKENDS
from sm_llm.launcher.planner import plan
from sm_llm.spec.parallelism.table import trained
from sm_llm.terminal import quoted

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "tests" / "README.md"]
README = (ROOT / "README.md").read_text()
CLAIMS = {"slurm": r"slurm", "kubeflow": r"\beks\b|kubeflow", "nxd": r"trainium|\btrn1\b"}
"""What runs jobs -> the words that claim so."""


def test_the_index_links_every_page() -> None:
    docs = ROOT / "docs"
    linked = {path for path in links(docs / "index.md") if path.is_relative_to(docs)}
    assert linked == set(docs.rglob("*.md")) - {docs / "index.md"}
    assert "docs/index.md" in README


def links(page: Path) -> set[Path]:
    """Files of this repository that a page links to."""
    found = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / it).resolve() for it in found if "://" not in it}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    assert not [str(it) for it in links(page) if not it.exists()]


def test_contributing_names_files_that_exist() -> None:
    named = re.findall(r"`((?:sm_llm|tests|docs|entrypoints)/[\w/.-]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 30
    assert not [it for it in named if "NAME" not in it and not (ROOT / it).exists()]


def test_hooks_run_the_tools_of_the_project_and_download_nothing() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {it["id"]: it for it in local["hooks"]}
    assert local["repo"] == "local"
    assert {it["language"] for it in hooks.values()} == {"system", "pygrep"}
    first = {it["entry"].split()[0] for it in hooks.values() if it["language"] == "system"}
    assert first == {"ruff", "mypy", "lint-imports", "python"}
    refused = re.compile(hooks["subject"]["entry"], re.MULTILINE | re.DOTALL)
    assert not refused.search("Refuse it\n\nBecause.\n# a comment\n")
    assert not refused.search("x" * 72)
    assert refused.search("x" * 73)
    assert refused.search("Refuse it\nBecause.\n")


@pytest.mark.parametrize("name", CLAIMS)
def test_what_cannot_run_yet_is_called_planned(name: str) -> None:
    if name in BACKENDS or name in trained():
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
    examples = README + (ROOT / "sm_llm" / "cli" / "control.py").read_text()
    named = re.findall(r"sm-llm (?:resume|branch) (?:RUN|tiny-local) --step (\d+)", examples)
    assert len(named) >= 3
    assert {int(step) for step in named} <= set(kept)


def block(heading: str, language: str) -> str:
    """The first block of code of a section of README."""
    section = README.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return section.partition(f"```{language}\n")[2].partition("```")[0]


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_own_text_is_prepared_trained_on_plotted_and_loaded_as_README_states(tmp_path: Path) -> None:
    """Its very commands, with the model's size, length and processes reduced."""
    (tmp_path / "my-texts").mkdir()
    for number, page in enumerate(sorted((ROOT / "docs").rglob("*.md"))[:12]):
        (tmp_path / f"my-texts/{number}.txt").write_text(page.read_text())
    changes = {
        "compute.processes_per_instance": "1",
        "steps.prepare.task.train_tokenizer.vocab_size": "400",
        "steps.train.task.model.config": "{num_hidden_layers: 1, hidden_size: 32, vocab_size: 400}",
        "steps.train.task.max_steps": "3",
    }
    small = quoted(*(f"{name}={value}" for name, value in changes.items()))
    commands = block("Your own text", "bash").replace("sm-llm fit tiny-local", f"sm-llm fit tiny-local {small}")
    commands = commands.replace("sm-llm ", f"{sys.executable} -m sm_llm.cli ")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"}
    for argv in (["bash", "-ec", commands], [sys.executable, "-c", block("Your own text", "python")]):
        done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("It is")
    assert len(done.stdout.strip()) > len("It is")
    assert list(tmp_path.glob("runs/my-model-*/plot.png"))
