"""The verbs of pipelines."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from typer.testing import CliRunner

from sm_llm.cli import app
from sm_llm.cli.cache import CACHE_VERBS, cache
from sm_llm.cli.env import ENV_VERBS, environments
from sm_llm.cli.image import IMAGE_VERBS, images
from sm_llm.cli.pipeline import PIPELINE_VERBS, group

if TYPE_CHECKING:
    from pathlib import Path

    import typer

FLOW: dict[str, Any] = {
    "name": "flow",
    "backend": {
        "name": "sagemaker", "role": "arn:aws:iam::111122223333:role/train", "region": "us-east-1",
        "max_run_seconds": 3600,
    },
    "storage": "s3://sm-llm-tests/runs",
    "compute": {"instance_type": "ml.m5.2xlarge"},
    "steps": {"prepare": {"task": {"kind": "prepare", "sources": ["s3://sm-llm-tests/text/"], "seq_length": 512}}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("group", "verbs"),
    [(group, PIPELINE_VERBS), (images, IMAGE_VERBS), (cache, CACHE_VERBS), (environments, ENV_VERBS)],
    ids=["pipeline", "image", "cache", "env"],
)
def test_every_verb_of_a_group_is_one_python_function(group: typer.Typer, verbs: dict[str, str]) -> None:
    commands = group.registered_commands
    assert {it.name or it.callback.__name__ for it in commands if it.callback} == set(verbs)
    for module in verbs.values():
        module, _, name = module.partition(":")
        assert getattr(import_module(module), name).__doc__


def test_render_prints_the_definition_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flow.yaml").write_text(yaml.safe_dump(FLOW))
    done = CliRunner().invoke(
        app, ["pipeline", "render", "flow.yaml", "--variable", "Length=steps.prepare.task.seq_length"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [step["Name"] for step in found["Steps"]] == ["prepare"]
    assert found["Parameters"] == [{"Name": "Length", "Type": "Integer", "DefaultValue": 512}]
