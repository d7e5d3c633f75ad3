"""Estimators of the SageMaker Python SDK 2 that send exactly what ``launch`` would, and its ``distribution`` alone."""

from __future__ import annotations

import json
import logging
import os
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, PlanError, SubmitError
from sm_llm.launcher.backends.sagemaker.account import role_notes
from sm_llm.launcher.backends.sagemaker.sdk.estimator_address import address_below, step_address, step_of
from sm_llm.launcher.backends.sagemaker.sdk.sdk_arguments import arguments, channels, job_channel
from sm_llm.launcher.backends.sagemaker.sdk.sdk_attributes import attributes
from sm_llm.launcher.backends.sagemaker.sdk.sdk_checks import (
    ATTRIBUTE_CHECKERS,
    ESTIMATOR_CHECKERS,
    FIELD_CHECKERS,
    FIT_CHECKERS,
    JOB_ARGUMENT_CHECKERS,
    KNOWN_VALUE_CHECKERS,
    RESULT_CHECKERS,
    STEP_CHECKERS,
    EstimatorCall,
    FitCall,
    GivenFields,
    GivenToJob,
    JobOfVariables,
    StepCall,
)
from sm_llm.launcher.backends.sagemaker.sdk.sdk_effects import METHODS
from sm_llm.launcher.backends.sagemaker.sdk.sdk_inputs import inputs_by_name, specified, variables_of
from sm_llm.launcher.backends.sagemaker.sdk.sdk_overrides import as_fields, plan_with
from sm_llm.launcher.backends.sagemaker.sdk.sdk_pipelines import watch_pipelines
from sm_llm.launcher.backends.sagemaker.sdk.sdk_session import defaults_of, is_pipeline, was_created
from sm_llm.launcher.backends.sagemaker.sdk.sdk_tuner import watch_tuners
from sm_llm.launcher.backends.sagemaker.sdk.staged import Staged, planned
from sm_llm.launcher.planning.input_locations import assert_inputs_exist
from sm_llm.optional import command
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.validation.runner import refuse, run
from sm_llm.storage.publication.result import RESULT
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.planner import Source
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.spec.loading.load import Loaded
    from sm_llm.spec.loading.overrides import Override

# Arguments of which the job has entries of its own; what a user gives comes on top.
_MAPPINGS = ("environment", "hyperparameters")
_NAMED_BY_PIPELINES = (
    "backend.base_job_name and job_name: SageMaker Pipelines names the jobs of its steps itself, unless the pipeline "
    "has PipelineDefinitionConfig(use_custom_job_prefix=True)"
)
_OPT_OUT = ("SageMaker", "PythonSDK", "Modules", "TelemetryOptOut")


def distribution(spec: Source, *overrides: Override, **fields: Any) -> dict[str, Any]:
    """The ``distribution`` argument of the SDK's estimators for a job: torchrun, SMP v2 or Neuron's torchrun.

    For who builds an estimator himself. Raises ``SpecError``, and ``PlanError`` for a task that has no worker.
    """
    from sm_llm.launcher.backends.sagemaker.request import distribution as rules
    from sm_llm.launcher.planner import without_worker
    from sm_llm.spec.loading.load import load

    job: Any = _job(load(spec, overrides, fields)).spec
    refuse(without_worker(job))
    return dict(rules.distribution(job).estimator or {})


def estimator(
    spec: Source,
    *overrides: Override,
    sagemaker_session: Any = None,
    fields: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """A ``sagemaker.pytorch.PyTorch`` for a job of the sagemaker backend; ``fit()`` starts what ``launch`` would.

    Code and job.json are stored in S3 by ``fit`` (or when a pipeline or tuning job is made of it), not before. The run
    is found by ``attach`` like any other: ``estimator.run_uri``.

    Args:
        spec: recipe name, YAML file, mapping or specification, changed by ``overrides`` and ``fields``.
        sagemaker_session: a ``Session`` or ``PipelineSession``; telemetry of the SDK is switched off in it.
        kwargs: arguments of ``PyTorch``. Those that are fields of the specification (``instance_count``, ``role``,
            ``tags``, …) change it, and are checked with it; those about code and distribution follow from it.
            ``sdk_effects.EFFECTS`` lists the effect of each; others are refused.

    Returns the estimator. Its ``channels`` are what ``fit``, a tuner's too, adds to the inputs it is given.
    Raises ``SpecError``, ``PlanError``, and ``SubmitError`` without version 2 of the SDK.
    """
    from sm_llm.launcher.planner import load_whole

    kind = _estimator_class()
    # Before any estimator exists: a tuner or a pipeline of the SDK's own class may get it next.
    watch_tuners()
    watch_pipelines()
    refuse(run(ESTIMATOR_CHECKERS, EstimatorCall(pytorch(), sagemaker_session, kwargs)))
    own, rest = as_fields(kwargs)
    refuse(run(FIELD_CHECKERS, GivenFields(own, rest.get("hyperparameters"), overrides, fields or {})))
    with defaults_of(sagemaker_session, rest):
        # Arguments of the SDK come last, and a value given twice was refused above.
        loaded = _job(load_whole(spec, overrides, {**(fields or {}), **own}))
        plan = planned(loaded)
        refuse(run(KNOWN_VALUE_CHECKERS, JobOfVariables(loaded, rest)))
    session = without_telemetry(sagemaker_session or _session(plan))
    staged = Staged.next(loaded, plan, is_pipeline=is_pipeline(session))
    refuse(run(JOB_ARGUMENT_CHECKERS, GivenToJob(session, staged.submission, plan, rest)))
    return kind(staged, session, rest)


def _job(loaded: Loaded) -> Loaded:
    from sm_llm.spec.job import JobSpec

    if isinstance(loaded.spec, JobSpec) and loaded.spec.backend.name == "sagemaker":
        return loaded
    remedy = "Give one job with backend.name=sagemaker; for workflows there is sm_llm.pipelines"
    raise PlanError(
        [
            Issue(
                "estimator-backend-unsupported",
                "backend.name",
                "an estimator is for a training job of SageMaker",
                remedy=remedy,
            )
        ]
    )


def pytorch() -> Any:
    """The SDK's estimator class. Raises ``SubmitError`` without version 2 of the SDK."""
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
    for noise in ("sagemaker.config", "sagemaker.telemetry"):  # the second announces what without_telemetry turns off
        logging.getLogger(noise).setLevel(logging.WARNING)
    try:
        from sagemaker.pytorch import PyTorch
    except ImportError:
        raise SubmitError(
            "estimator() and build_pipeline() need version 2 of the SageMaker SDK (launch() and fit do not): "
            f"{command('sagemaker')}"
        ) from None
    return PyTorch


class _NoJobYet(PlanError, AttributeError):
    """An attribute error as well: a tuner of the SDK asks with ``getattr(estimator, "model_data", None)``."""


_OF_A_JOB = ("changes a job that runs", "Set backend.remote_debug for the next")

# Stands for the SDK's class, which comes after ours among the bases of the estimator.
# The SDK is imported only when an estimator is made: its import takes about three seconds.
_SDK: Any = object


class _OfRuns(_SDK):  # type: ignore[misc]
    """What makes a PyTorch estimator of the SDK one whose every job is a run of ours; comes before the SDK's class."""

    def __init__(self, staged: Staged, session: Any, kwargs: Mapping[str, Any]) -> None:
        # The first run is what the estimator was built for; the staged one is that of the newest fit, with its inputs.
        self._first = self._staged = staged
        self._fitted = False
        self._more_tags = kwargs.get("tags") or []
        self._arguments = dict(kwargs)
        self._given: dict[str, Any] = {name: dict(kwargs.get(name) or {}) for name in _MAPPINGS}
        self._address: Any = None
        self._is_fitting = False
        self._source: Any = None
        with _defaults_of_the_user(session):
            super().__init__(sagemaker_session=session, **_with(arguments(staged.request), kwargs))
        self._adopt()
        self._built = attributes(self)

    @property
    def run_uri(self) -> Any:
        """The address of the run; in a pipeline a ``Join`` where variables are part of it (see ``fit``)."""
        given = self._given if is_pipeline(self.sagemaker_session) else {}
        return self._address or step_address(self.submission.job.run_uri, given)

    @property
    def result_uri(self) -> Any:
        """The stable address of the result, known before the run begins: for ``TrainingInput`` of a next step."""
        refuse(run(RESULT_CHECKERS, self.run_uri))
        return address_below(self.run_uri, RESULT)

    @property
    def channels(self) -> dict[str, Any]:
        """Inputs of the specification; the channel with job.json is added everywhere by itself."""
        return channels(self._first.request)

    @property
    def submission(self) -> Submission:
        """What ``fit`` sends, but for arguments that were given to the estimator."""
        return self._staged.submission

    @property
    def plan(self) -> Plan:
        """The plan of the job, without hyperparameters."""
        return self._staged.plan

    @property
    def hyperparameters_given(self) -> Mapping[str, Any]:
        """Hyperparameters that the estimator was given, without the toolkit's own."""
        return dict(self._given["hyperparameters"])

    @property
    def arguments_given(self) -> Mapping[str, Any]:
        """Arguments of the SDK that the estimator was given and that are no fields of the specification."""
        return self._arguments

    def inputs_of(self, inputs: Any, job_name: Any = None, logs: Any = "All", **options: Any) -> dict[str, Any] | None:
        """The inputs of the specification with those that ``fit`` is given. Raises ``PlanError``.

        Refuses attributes that were set after the estimator was built, too.
        """
        given = inputs_by_name(inputs)
        call = FitCall(self.sagemaker_session, self.submission, given, job_name, logs, options)
        refuse([*run(ATTRIBUTE_CHECKERS, self), *run(FIT_CHECKERS, call)])
        return {**self.channels, **given} or None

    def _adopt(self) -> None:
        """Take over what belongs to one run."""
        request = self._staged.request
        self.source_dir = json.loads(request["HyperParameters"]["sagemaker_submit_directory"])
        self.output_path = request["OutputDataConfig"]["S3OutputPath"]
        self.tags = [*request["Tags"], *self._more_tags]
        self.code_channel_name, self.code_uri = job_channel(request)

    def fit(
        self, inputs: Any = None, wait: bool = True, logs: str = "All", job_name: Any = None, **options: Any
    ) -> Any:
        # Everything that was given is checked before anything is stored.
        merged = self.inputs_of(inputs, job_name, logs, **options)
        in_pipeline = is_pipeline(self.sagemaker_session)
        with defaults_of(self.sagemaker_session, self._arguments):
            # Every fit starts a run of its own, but in a pipeline, where equal steps share one.
            begun = self._first.again() if self._fitted and not in_pipeline else self._first
            self._staged = begun.reading(specified(inputs))
        self._adopt()
        self._built = attributes(self)
        # From now on another fit is another run, even if the job could not be created.
        self._fitted = True
        name = job_name or self._staged.request["TrainingJobName"]
        self.show_start()
        if in_pipeline:
            return self._fit_step(inputs, job_name, merged, wait=wait, logs=logs, **options)
        session, output_path = self.sagemaker_session, self.output_path
        # The name is ours, so the claimed attempt leads to the job before the job exists.
        native_id = f"{session.boto_region_name}/{name}"
        with of_session(session):
            # Only here: in a pipeline an earlier step may make the inputs.
            assert_inputs_exist([self._staged.plan])
            self._store()
        try:
            with ExitStack() as created:
                with of_session(session):
                    created.enter_context(
                        self._staged.claimed(native_id, lambda: was_created(session, name, output_path))
                    )
                with self.fitting():
                    return super().fit(merged, wait=wait, logs=logs, job_name=name, **options)
        except BaseException as error:
            # The claim was rolled back if no job was created, so the reason is recorded in its place.
            with of_session(session):
                self._staged.close(native_id, error)
            raise

    def show_start(self) -> None:
        """Print what the job trains on and starts from, and the warnings of its plan: on standard error."""
        with defaults_of(self.sagemaker_session, self._arguments):
            shown_plan = plan_with(self.submission, self.plan, self._given["hyperparameters"])
        echo(*shown_plan.start_lines(), err=True)

    def _fit_step(self, inputs: Any, job_name: Any, merged: Any, **options: Any) -> Any:
        """The arguments of a step. What of its inputs only the pipeline knows is part of its run's address."""
        if job_name is not None or self._first.names_jobs:
            echo(f"  warning: {_NAMED_BY_PIPELINES}", err=True)
        step = self._for_step(inputs)
        step._is_fitting = True
        name = job_name or self._staged.request["TrainingJobName"]
        return super(_OfRuns, step).fit(merged, job_name=name, **options)

    def _for_step(self, inputs: Any) -> Any:
        """A copy for one step of a pipeline, at the address that this estimator names from now on."""
        given = {**self._given, "inputs": variables_of(inputs)}
        base = self.submission.job.run_uri
        refuse(run(STEP_CHECKERS, StepCall(base, given)))
        step = step_of(self, base, given)
        self._address = step._address
        step._built = attributes(step)
        return step

    def _store(self, *, with_record: bool = True) -> None:
        """Store the run, after a warning where its role is one that the credentials of the session cannot pass."""
        # Not before: building an estimator contacts nothing. A role that is a pipeline variable has no account yet.
        if not self._staged.is_stored and "role" not in self._arguments:
            for note in role_notes(self.plan, self.sagemaker_session.boto_session._session):
                echo(f"  warning: {note}", err=True)
        self._staged.store(with_record=with_record)

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Inside, the SDK may prepare a job: ``fit``, ours or a tuner's, has checked and completed the inputs."""
        # Restored rather than cleared: a tuner's fit may enclose ours.
        before, self._is_fitting = self._is_fitting, True
        try:
            yield
        finally:
            self._is_fitting = before

    def for_tuner(self, inputs: Any) -> Any:
        """What ``fit`` of a tuner uses: in a pipeline, which is defined later, a copy for its step.

        Trials publish below its address, which follows variables as that of a training step does.
        """
        # The estimator itself, so that attributes that are set after this are noticed.
        if not is_pipeline(self.sagemaker_session):
            return self
        source = self._source or self
        own = source._for_step(inputs)
        own._source = source
        return own

    def set_hyperparameters(self, **given: Any) -> None:
        arguments = {**self._arguments, "hyperparameters": given}
        call = GivenToJob(self.sagemaker_session, self.submission, self.plan, arguments)
        refuse([*run(ATTRIBUTE_CHECKERS, self), *run(JOB_ARGUMENT_CHECKERS, call)])
        self._given["hyperparameters"] |= given
        super().set_hyperparameters(**given)
        self._built = attributes(self)

    def enable_remote_debug(self) -> None:
        self._assert_started("enable_remote_debug", *_OF_A_JOB)
        super().enable_remote_debug()

    def disable_remote_debug(self) -> None:
        self._assert_started("disable_remote_debug", *_OF_A_JOB)
        super().disable_remote_debug()

    def logs(self) -> None:
        self._assert_started("logs", "shows the log of a job", "Call fit(); a run's log is attach(run_uri).logs()")
        super().logs()

    @property
    def model_data(self) -> Any:
        where = "Call fit(); after it estimator.result_uri is where the result will be"
        self._assert_started("model_data", "is where a job left its model", where, ends="")
        return super().model_data

    def _assert_started(self, method: str, does: str, remedy: str, ends: str = "()") -> None:
        if self.latest_training_job is None:
            problem = f"{does}, and none was started by this estimator"
            raise _NoJobYet([Issue("estimator-job-not-started", f"estimator.{method}{ends}", problem, remedy=remedy)])

    def _prepare_for_training(self, job_name: Any = None) -> None:
        if not self._is_fitting:  # TrainingStep(estimator=…), TuningStep(tuner=…), Airflow's training_config
            problem = "is used without fit, which gives the job its inputs and the address of its run"
            remedy = "Write step_args=estimator.fit(inputs), for a tuner step_args=tuner.fit(inputs)"
            raise PlanError([Issue("estimator-without-fit", "estimator", problem, remedy=remedy)])
        for it in (self, self._source):  # a step is prepared when its pipeline is defined, after ``fit``
            if it is not None:
                refuse(run(ATTRIBUTE_CHECKERS, it))
        with of_session(self.sagemaker_session):
            self._store(with_record=self._address in (None, self.submission.job.run_uri))
        super()._prepare_for_training(job_name=job_name)
        self._built = attributes(self)


@cache
def _estimator_class() -> Any:
    """A subclass of the SDK's estimator, made here because the SDK takes seconds to import.

    A tuning job stores name and module of the class, and ``HyperparameterTuner.attach`` imports what they name: that
    is the SDK's own class, which can be made from a job.
    """
    kind = pytorch()
    own = {"__doc__": "A PyTorch estimator whose every job is a run.", "__module__": kind.__module__}
    unusable = {name: _unusable(name, why, instead) for name, (why, instead) in METHODS.items()}
    return type(kind.__name__, (_OfRuns, kind), {**own, **unusable})


def _unusable(name: str, why: str, instead: str) -> Any:
    issue = Issue("estimator-method-unusable", f"estimator.{name}()", why, remedy=instead)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise PlanError([issue])

    method.__name__, method.__doc__ = name, f"Not possible: it {why}."
    return method


def _with(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    both: dict[str, Any] = {name: {**(own[name] or {}), **(given.get(name) or {})} or None for name in _MAPPINGS}
    # By name, the user's last: the service refuses a name that is defined twice.
    rules = [*(own["metric_definitions"] or []), *(given.get("metric_definitions") or [])]
    both["metric_definitions"] = list({it["Name"]: it for it in rules}.values()) or None
    return {**own, **given, **both}


def _session(plan: Plan) -> Any:
    import boto3
    import sagemaker

    region = SageMakerOptions.of(plan.job).region
    return sagemaker.Session(boto3.session.Session(region_name=region))


def of_session(session: Any) -> AbstractContextManager[None]:
    """Inside, S3 is reached with the credentials of the SDK's session: an assumed role, for example."""
    from sm_llm.storage.s3.s3_client import as_session

    # boto3 has no public name for the session of botocore that it wraps.
    return as_session(session.boto_session._session)


@contextmanager
def _defaults_of_the_user(session: Any) -> Iterator[None]:
    """Inside, a configuration that holds our opt-out alone is empty.

    The SDK validates one that is not at each of ten look-ups of an estimator, for seconds together.
    """
    kept = session.sagemaker_config
    if kept == _opted_out({}):
        session.sagemaker_config = {}
    try:
        yield
    finally:
        session.sagemaker_config = kept


def without_telemetry(session: Any) -> Any:
    """Opt out, which the SDK reads from the session's configuration alone: else every ``fit`` calls home."""
    session.sagemaker_config = _opted_out(session.sagemaker_config or {})
    return session


def _opted_out(given: Mapping[str, Any]) -> dict[str, Any]:
    config = {"SchemaVersion": "1.0", **given}
    block = config
    for key in _OPT_OUT[:-1]:
        # Copied on the way down, so that the user's own configuration stays as it is.
        block[key] = dict(block.get(key) or {})
        block = block[key]
    block[_OPT_OUT[-1]] = True
    return config
