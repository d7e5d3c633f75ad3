"""Whatever text stands in whatever field of a job: it is refused, or it stays a value in the script."""

from __future__ import annotations

import shlex
import subprocess
from copy import deepcopy
from dataclasses import fields
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jinja2
import pytest
from jinja2 import nodes

from sm_llm.errors import SmLlmError
from sm_llm.launcher.backends.slurm.batch_script import BatchScript
from sm_llm.spec.backends.slurm import SlurmOptions
from tests.launcher.slurm.conftest import TINY, render

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

HOSTILE = (
    "a b'c\"d $(touch executed) `touch executed` ; touch executed & | > * \\",
    "x;touch${IFS}executed\ntouch executed\n#SBATCH --partition=other\n",
)
PATHS = (*HOSTILE, *(f"/{it}" for it in HOSTILE))
COMMON = {
    "name": "slurm", "shared_folder": "/fsx/sm_llm", "partition": "p", "account": "a", "qos": "q", "reservation": "r",
    "constraint": "c", "time_limit_minutes": 60, "scratch_folder": "/scratch", "ssh_host": "login",
}  # fmt: skip
JOB: dict[str, Any] = {
    **TINY,
    "environment": {"NAME": "value", "PYTHONPATH": "/own"},
    "secrets": {"HF_TOKEN": "file:/keys/hub"},
    "storage": "s3://bucket/runs",
    "task": {
        **TINY["task"],
        "logging": {"sinks": {"tensorboard": {"folder": "/fsx/board"}, "mlflow": {"tracking_uri": "/fsx/mlflow"}}},
    },
}
JOBS = {
    "container, over SSH": {
        **JOB, "backend": {**COMMON, "container_image": "/fsx/x.sqsh", "container_mounts": ["/opt/own:/own:ro"]},
    },
    "environment, on the login node": {
        **JOB, "storage": "/fsx/runs",
        "backend": {**COMMON, "ssh_host": None, "virtual_environment": "/fsx/venv", "retry": "auto-resume"},
    },
}  # fmt: skip


def variants(job: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The job with each of its texts, and each name in a table, replaced by each hostile one."""
    unset = [("backend", it) for it in SlurmOptions.model_fields if it not in job["backend"]]
    for path in [*leaves(job), *unset]:
        for text in PATHS:
            # A field that the job does not set may be a list.
            for value in (text, [text]) if path in unset else (text,):
                changed = deepcopy(job)
                holder = changed
                for key in path[:-1]:
                    holder = holder[key]
                holder[path[-1]] = value
                yield f"{'.'.join(map(str, path))}={value!r}", changed
    for table in ("environment", "secrets"):
        for text in HOSTILE:
            yield f"{table} {text!r}", {**job, table: {text: "/data/rows"}}


def leaves(value: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from leaves(part, *above, key)
    if isinstance(value, str):
        yield above


def options(script: str) -> list[str]:
    """The options of sbatch; each stands on a line of its own, which holds nothing else."""
    lines = [it for it in script.split("\n") if it.startswith("#SBATCH")]
    assert all(len(shlex.split(it)) == 2 for it in lines), lines
    return [it.partition("=")[0] for it in lines]


@pytest.mark.parametrize("name", JOBS)
def test_hostile_text_in_any_field_is_refused_or_stays_a_value(name: str, stubs: Path, tmp_path: Path) -> None:
    """Every field of the backend, also one that was added since; the table of jobs sets those of the job itself."""
    usual = options(render(JOBS[name]).request["script"])
    taken, scripts = set(), []
    for what, job in variants(JOBS[name]):
        try:
            script = render(job).request["script"]
        except SmLlmError:
            continue
        assert set(options(script)) <= {*usual, f"#SBATCH --{what.partition('=')[0].rpartition('.')[2]}"}, what
        if "executed" in script:
            taken.add(what.partition("=")[0])
            scripts.append(script.replace("/fsx/sm_llm/jobs", f"{tmp_path}/jobs"))
    assert {"environment.NAME", "environment.PYTHONPATH"} <= taken
    for number, script in enumerate(scripts):
        (tmp_path / f"{number}.sh").write_text(script, encoding="utf-8")
    # One bash for all of them: each script runs in a shell of its own.
    loop = 'for script in *.sh; do bash "$script" > /dev/null 2>> errors; done; true'
    subprocess.run(["bash", "-c", loop], cwd=tmp_path, timeout=300, check=True)
    assert not list(tmp_path.rglob("executed*")), (tmp_path / "errors").read_text()[-2000:]
    assert (stubs / "mkdir").exists(), "no folder of a cluster is made on this machine"


def test_every_value_in_the_template_passes_a_filter_or_is_a_number() -> None:
    source = (files("sm_llm") / "launcher" / "backends" / "slurm" / "job.sh.j2").read_text(encoding="utf-8")
    numbers = {it.name for it in fields(BatchScript) if it.type in ("int", "int | None")}
    printed = [it for output in jinja2.Environment().parse(source).find_all(nodes.Output) for it in output.nodes]
    bare = [it for it in printed if not isinstance(it, nodes.TemplateData)]
    assert len(bare) > 15
    unquoted = {str(it) for it in bare if not is_safe(it, numbers)}
    # Lines of options are quoted where they are made; names of options are our own.
    assert unquoted == {"Name(name='option_lines', ctx='load')", "Name(name='option', ctx='load')"}


def is_safe(node: nodes.Node, numbers: set[str]) -> bool:
    """Whether what a template prints there cannot be anything but one word, a number, or text of the template."""
    match node:
        case nodes.Const() | nodes.Filter(name="q" | "comment" | "variable"):
            return True
        case nodes.Name():
            return node.name in numbers
        case nodes.Concat():
            return all(is_safe(it, numbers) for it in node.nodes)
        case nodes.CondExpr():
            return is_safe(node.expr1, numbers) and (node.expr2 is None or is_safe(node.expr2, numbers))
    return False
