"""The SageMaker backend: training jobs, rendered as values and run through boto3; the SageMaker SDK takes no part."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sm_llm.launcher.backend import NativeJob
from sm_llm.launcher.backends.job_backend import JobBackend
from sm_llm.launcher.backends.sagemaker.plan_checks import plan_checks
from sm_llm.launcher.backends.sagemaker.render import render
from sm_llm.launcher.backends.sagemaker.request.request import request_region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.aws_account import AwsAccount
    from sm_llm.launcher.backend import Emulation, NativeState, Submission
    from sm_llm.launcher.log_filter import LogFilter
    from sm_llm.launcher.planning.plan import Checks, Plan
    from sm_llm.runs.run_record import Attempt, RunRecord
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.job import WorkflowSpec

_JOB_ARN = re.compile(r"arn:[\w-]+:sagemaker:(?P<region>[\w-]+):\d{12}:training-job/(?P<name>[\w-]+)")
_EXECUTION_ARN = re.compile(r"arn:[\w-]+:sagemaker:[\w-]+:\d{12}:pipeline/[\w-]+/execution/\w+")


def _account(region: str) -> AwsAccount:
    """The account's clients, loaded when the first call is made."""
    from sm_llm.launcher.aws_account import account

    return account(region)


@dataclass(frozen=True)
class SageMakerBackend(JobBackend):
    """Renders and runs training jobs."""

    name: str = "sagemaker"
    connect: Callable[[str], AwsAccount] = _account
    """Region -> the account's clients; injected in tests."""
    shell_needs: ClassVar[str] = "the AWS CLI and its session-manager-plugin"

    def plan_checks(self, plan: Plan) -> Checks:
        """Account, image, time and processes, and every issue of the request that follows from them."""
        return plan_checks(plan)

    def render(self, plan: Plan, job: JobFile) -> Submission:
        """The CreateTrainingJob request, the code bundle and job.json. Reads files of this machine, nothing else."""
        return render(plan, job)

    @contextmanager
    def starting(self, run_store: RunStore, number: int, submission: Submission | None = None) -> Iterator[Attempt]:
        """Nothing is held: a claim in S3 is exclusive by itself. A job has its name, and its role is checked."""
        from sm_llm.launcher.backends.sagemaker.jobs.submit import check_role, native_id
        from sm_llm.launcher.submission import assert_ended
        from sm_llm.runs.run_paths import RunPaths
        from sm_llm.runs.run_record import Attempt

        assert_ended(self, run_store)
        request = RunPaths.request_key(number)
        if submission is None:  # its pipeline is rendered once the run's record has the changes
            yield Attempt.claim(number, request=request)
            return
        region = request_region(submission.request)
        check_role(self.connect(region), str(submission.request["RoleArn"]))
        # Known before the job: a launcher that dies in between leaves an attempt that leads to the job.
        yield Attempt.claim(number, native_id(submission, region), request)

    def submit(self, submission: Submission) -> str:
        """Upload what is missing and create the job; the native id is ``REGION/JOB``."""
        from sm_llm.contract.job_file import job_run_store
        from sm_llm.launcher.backends.sagemaker.jobs.submit import create_job

        return create_job(submission, job_run_store(submission.job), self.connect(request_region(submission.request)))

    def submit_workflow(self, run_store: RunStore, attempt: int) -> str:
        """Store the workflow's pipeline and start it; the native id is the execution's ARN."""
        from sm_llm.launcher.backends.sagemaker.pipelines.workflows import start

        return start(run_store, attempt, self.connect)

    def render_workflow(
        self, workflow: WorkflowSpec, plans: Sequence[Plan], run_id: str, run_uri: str
    ) -> list[Submission]:
        """The requests of the steps of its pipeline, whose definition places their runs."""
        from sm_llm.launcher.backends.sagemaker.pipelines.workflows import submissions

        del run_id, run_uri
        return submissions(workflow, plans)

    def step_run_store(self, run_store: RunStore, step: str) -> RunStore:
        """Where the pipeline's definition places the step's run."""
        from sm_llm.launcher.backends.sagemaker.pipelines.workflows import step_run_store

        return step_run_store(run_store, step)

    def open_state(self, run_store: RunStore, record: RunRecord) -> NativeState:
        """The state of the run's newest training job, or of a workflow's newest execution."""
        from sm_llm.launcher.backends.sagemaker.jobs import jobs
        from sm_llm.launcher.backends.sagemaker.pipelines import workflows

        if workflows.is_execution(record.attempts[-1].native_id):
            return workflows.state_of(run_store, record, self.connect)
        return jobs.state_of(run_store, record, self.connect)

    def logs(
        self, run_store: RunStore, attempt: int, wanted: LogFilter, still_running: Callable[[], bool]
    ) -> Iterator[str]:
        """Wanted lines of all hosts, rank 0's first; then new ones while ``still_running``."""
        from sm_llm.launcher.backends.sagemaker.jobs.jobs import logs_of

        return logs_of(run_store, attempt, wanted, still_running, self.connect)

    def stop(self, run_store: RunStore, attempt: Attempt, *, now: bool = False) -> None:
        """Ask the job, or a workflow's execution, to stop; SageMaker gives a job 120 s."""
        from sm_llm.launcher.backends.sagemaker.jobs.jobs import stop_job
        from sm_llm.launcher.backends.sagemaker.pipelines import workflows

        if workflows.is_execution(attempt.native_id):
            workflows.stop(run_store, attempt.native_id, now=now, connect=self.connect)
        else:
            stop_job(run_store, attempt, now=now, connect=self.connect)

    def emulation(self) -> Emulation:
        """The contract of training jobs on this machine, under SageMaker's own toolkit."""
        from sm_llm.launcher.backends.sagemaker import emulation

        return emulation

    def caller_notes(self, plan: Plan) -> Iterator[str]:
        """A role of another account than the caller's, which SageMaker passes to no job."""
        from sm_llm.launcher.backends.sagemaker.account import role_notes

        return role_notes(plan)

    def shell_command(self, run_store: RunStore, native_id: str, node: int) -> list[str]:
        """A session of AWS Systems Manager in the container of a node, where the job allows it."""
        from sm_llm.launcher.backends.sagemaker.jobs.remote_shell import session_command
        from sm_llm.launcher.backends.sagemaker.pipelines.workflows import assert_job

        assert_job(run_store, native_id, "a container")
        return session_command(native_id, node, self.connect)

    def parse_native(self, text: str) -> NativeJob | None:
        """``sagemaker://REGION/JOB`` or a training job's ARN; of a workflow its execution's, with or without scheme."""
        native = text.removeprefix(f"{self.name}://")
        if match := _JOB_ARN.fullmatch(native):
            native = f"{match['region']}/{match['name']}"
        is_execution = _EXECUTION_ARN.fullmatch(native) is not None
        # Text that stays as it is has neither our scheme nor the form of a job's ARN.
        if native == text and not is_execution:
            return None

        def find_run() -> str | None:
            from sm_llm.launcher.backends.sagemaker.jobs.jobs import run_of

            # An execution has no tag that names a run; the recorded attempts are searched for it.
            return None if is_execution else run_of(native, self.connect)

        return NativeJob(f"{self.name}://{native}", find_run)
