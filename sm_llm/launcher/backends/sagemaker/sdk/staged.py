"""Runs of an estimator before their training job is created: id, record, submission, and how they are stored."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_definition import request_digest
from sm_llm.runs.run_paths import storage_root
from sm_llm.spec.backends.sagemaker import SageMakerOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.runs.run_record import RunRecord
    from sm_llm.spec.loading.load import Loaded


def planned(loaded: Loaded) -> Plan:
    """The plan of a job that can be started. Raises ``PlanError``."""
    from sm_llm.launcher.planner import plan_loaded
    from sm_llm.launcher.planning.plan import assert_supported

    plans = plan_loaded(loaded)
    assert_supported(plans)
    return plans[0]


class Staged:
    """A run that has an id and a submission, and that is not submitted yet."""

    def __init__(self, loaded: Loaded, plan: Plan, record: RunRecord, submission: Submission) -> None:
        self._loaded = loaded
        self.plan = plan
        self.record = record
        self.submission = submission
        self.is_stored = False

    @classmethod
    def next(cls, loaded: Loaded, plan: Plan, *, is_pipeline: bool) -> Staged:
        """A fresh run; in a pipeline, where equal definitions must be equal, one named by its content."""
        from sm_llm.runs.run_paths import generate_run_id

        name = loaded.spec.name
        if not is_pipeline:
            return cls.named(generate_run_id(name), loaded, plan)
        # The digest in the name follows the request, so a first one is rendered under a provisional name.
        sent = cls.named(f"{name}-{loaded.digest[:12]}", loaded, plan).request  # for its code and image
        return cls.named(f"{name}-{request_digest(loaded.digest, sent)}", loaded, plan, in_pipeline=True)

    @classmethod
    def named(cls, run_id: str, loaded: Loaded, plan: Plan, *, in_pipeline: bool = False) -> Staged:
        """The run of that id."""
        from sm_llm.launcher.build_submission import build_submission, new_record
        from sm_llm.runs.run_store import run_store_at
        from sm_llm.storage.uri import join

        spec = loaded.spec
        run_store = run_store_at(join(storage_root(spec), run_id), spec.storage_options.model_dump())
        record = new_record(run_id, spec, loaded.digest, loaded.origins, [plan.to_json()], created=time.time())
        record = record.model_copy(update={"in_pipeline": in_pipeline})
        return cls(loaded, plan, record, build_submission(plan, run_store, record))

    def again(self) -> Staged:
        """Another run of the same job, planned anew: the program's files may have changed."""
        return Staged.next(self._loaded, planned(self._loaded), is_pipeline=False)

    def reading(self, given: Mapping[str, Any]) -> Staged:
        """The same run of a job that has the inputs ``given`` to ``fit``, in the specification's form, as its own.

        In a pipeline, where a run is named by its content, it is another run.
        """
        from sm_llm.launcher.planner import load_whole

        if not given:
            return self
        whole = self._loaded.spec.model_dump()["inputs"]
        loaded = load_whole(self._loaded.spec, fields={"inputs": {**whole, **given}})
        # Loading from an object gives all values one origin, so those of the first load are kept.
        loaded = replace(loaded, origins={**loaded.origins, **self._loaded.origins})
        plan = planned(loaded)
        if self.record.in_pipeline:
            return Staged.next(loaded, plan, is_pipeline=True)
        return Staged.named(self.record.run_id, loaded, plan)

    @property
    def request(self) -> dict[str, Any]:
        return self.submission.request

    @property
    def names_jobs(self) -> bool:
        """Whether the specification asks for another name of its jobs than its own."""
        return SageMakerOptions.of(self._loaded.spec).base_job_name is not None

    def store(self, *, with_record: bool = True) -> None:
        """Put the run's record, the code and job.json where the job will look for them.

        A step whose address only its execution knows writes its record itself (``with_record`` false).
        Raises ``StorageError`` and ``SubmitError``.
        """
        from sm_llm.contract.job_file import job_run_store
        from sm_llm.launcher.backends.sagemaker.jobs.submit import upload

        if self.is_stored:
            return
        run_store = job_run_store(self.submission.job)
        # In a pipeline an equal step may have been stored before.
        if with_record and not run_store.exists():
            run_store.create(self.record)
        upload(self.submission)
        self.is_stored = True

    def claimed(self, native_id: str, exists: Callable[[], bool]) -> AbstractContextManager[None]:
        """Put the training job, which is created inside, into the run's record; out again where it was not created."""
        from sm_llm.contract.job_file import job_run_store
        from sm_llm.launcher.submission import claimed
        from sm_llm.runs.run_record import Attempt

        return claimed(job_run_store(self.submission.job), Attempt.claim(1, native_id), exists=exists)

    def close(self, native_id: str, error: BaseException) -> None:
        """Record that the training job was not created, so that nobody waits for it; nothing where it was."""
        from sm_llm.contract.job_file import job_run_store
        from sm_llm.runs.run_record import Attempt
        from sm_llm.runs.run_states import RunState

        refused = isinstance(error, Exception)  # else Ctrl-C
        why = " ".join(str(error).split()) if refused else "interrupted"
        end = {
            "ended": time.time(),
            "state": RunState.FAILED if refused else RunState.STOPPED,
            "reason": f"its training job was not created: {why}",
        }
        attempt = Attempt.claim(1, native_id).model_copy(update=end)
        # An attempt in the record is that of a job which exists.
        job_run_store(self.submission.job).update(lambda held: held if held.attempts else held.with_attempt(attempt))
