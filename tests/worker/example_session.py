"""Plans, renders and trains with the example strategy; prints what came of it as JSON. Argument: a folder."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tests.worker.example_strategy  # noqa: F401, I001 - its row is there before the specification's classes are made

from plain_loop import plain_losses
from worker_jobs import events, exact_steps, job_environment, job_file, losses, result_folder, train_task

import sm_llm
from sm_llm.errors import PlanError, SpecError
from sm_llm.worker.main import main
from sm_llm.worker.tasks.train import Trainer

CLOUD = {
    "backend": {"name": "sagemaker", "role": "arn:aws:iam::123456789012:role/x", "region": "us-west-2"},
    "storage": "s3://bucket/runs",
}
EXAMPLE = {"strategy": "example"}


def codes(compute: dict[str, Any], placement: dict[str, Any], **task: Any) -> list[str]:
    """Codes of the issues of a plan."""
    job = {"name": "job", "task": train_task(parallelism=EXAMPLE, **task), "compute": compute, **placement}
    try:
        sm_llm.plan(job)
    except (SpecError, PlanError) as error:
        return [issue.code for issue in error.issues]
    return []


def trained(run: Path, breaks_before: int | None = None) -> int:
    """Exit code of an attempt of a job with two micro-batches a step."""
    take_step = Trainer.take_step

    def breaking(training: Trainer, step: int, micro_batches: Any) -> None:
        if step == breaks_before:
            training.checkpointer.finish()  # the next attempt is in this process, where threads would still publish
            raise RuntimeError("broken on purpose")
        take_step(training, step, micro_batches)

    Trainer.take_step = breaking  # type: ignore[method-assign]
    task = train_task(parallelism=EXAMPLE, micro_batch_size=4, deterministic=False)
    attempt = 2 if run.exists() else 1
    try:
        return main("train", job_environment(job_file(task, run, 1, attempt)))
    finally:
        Trainer.take_step = take_step  # type: ignore[method-assign]


def session(folder: Path) -> dict[str, Any]:
    gpu = {"instance_type": "ml.g5.2xlarge"}
    job = {"name": "job", "task": train_task(parallelism=EXAMPLE), "compute": gpu, **CLOUD}
    (plan,) = sm_llm.plan(job)
    (submission,) = sm_llm.launch(job, dry_run=True)
    found: dict[str, Any] = {
        "several": codes({"processes_per_instance": 2}, {}),
        "compile": codes({}, {}, precision={"compile": True}),
        "trainium": codes({"instance_type": "ml.trn1.2xlarge", "processes_per_instance": 1}, CLOUD),
        "memory": plan.memory is not None,
        "request": submission.to_json(),
        "whole": trained(folder / "whole"),
        "broken": trained(folder / "broken", breaks_before=8),
        "continued": trained(folder / "broken"),
    }
    found["starts"] = [it["step"] for it in events(folder / "broken", "start_chosen")]
    found["equal"] = exact_steps(folder / "whole") == exact_steps(folder / "broken")
    found["losses"] = losses(folder / "whole")
    found["plain"] = plain_losses(train_task(), folder / "plain")
    found["result"] = sorted(it.name for it in result_folder(folder / "whole").iterdir())
    return found


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        answers = session(Path(sys.argv[1]))
    print(json.dumps(answers))
