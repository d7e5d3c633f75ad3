"""What a user gives an estimator of the SageMaker SDK: arguments that are fields of the specification, and the rest."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sm_llm.contract.hyperparameters import overrides
from sm_llm.contract.job_file import JOB_CHANNEL
from sm_llm.errors import Fault, PlanError, SpecError
from sm_llm.launcher.sagemaker.limits import limit_faults
from sm_llm.spec.faults import did_you_mean
from sm_llm.storage.uri import is_s3

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.launcher.backends.base import Submission

_FIELDS = {
    "base_job_name": "backend.base_job_name",
    "enable_remote_debug": "backend.remote_debug",
    "encrypt_inter_container_traffic": "backend.encrypt_inter_container_traffic",
    "environment": "environment",
    "image_uri": "backend.image_uri",
    "instance_count": "compute.instance_count",
    "instance_groups": "backend.instance_groups",
    "instance_type": "compute.instance_type",
    "keep_alive_period_in_seconds": "backend.keep_alive_period_in_seconds",
    "max_retry_attempts": "backend.max_retry_attempts",
    "max_run": "backend.max_run_seconds",
    "max_wait": "backend.max_wait_seconds",
    "output_kms_key": "backend.output_kms_key_id",
    "role": "backend.role",
    "security_group_ids": "backend.vpc.security_group_ids",
    "subnets": "backend.vpc.subnets",
    "tags": "backend.tags",
    "training_plan": "backend.training_plan_arn",
    "use_spot_instances": "backend.spot",
    "volume_kms_key": "backend.volume_kms_key_id",
    "volume_size": "backend.volume_size_gb",
}
"""Argument of ``PyTorch`` -> the field that says the same. As fields they are checked, and the worker knows them."""

_SETTLED = ("image_uri", "instance_count", "instance_groups", "instance_type")
"""What decides how many processes run what: no variable of a pipeline can change it after it was checked."""

_NO_EFFECT = "has no effect: the job runs the bundle that follows from the specification"
_DECIDED = "follows from the specification"
_REFUSED = {
    "entry_point": (_NO_EFFECT, "Give a script task its task.entry"),
    "source_dir": (_NO_EFFECT, "Give a script task its task.source"),
    "dependencies": (_NO_EFFECT, "Put folders into task.source, and packages into a requirements.txt in its root"),
    "git_config": (_NO_EFFECT, "Clone it, and give the folder as task.source"),
    "code_location": (_NO_EFFECT, "Give backend.bucket"),
    "distribution": (_DECIDED, "Give task.parallelism and compute; sm_llm.distribution() shows what it is"),
    "framework_version": (_DECIDED, "Give backend.image_version"),
    "py_version": (_DECIDED, "Give backend.image_version"),
    "output_path": (_DECIDED, "Give storage: all of a run lies below its folder there"),
    "training_recipe": (_DECIDED, "Give the task"),
    "recipe_overrides": (_DECIDED, "Give the task"),
}
"""Arguments that would be dropped or would break the job: what is wrong with them, and what stands for them."""


def as_fields(kind: Any, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields (by dotted path) that arguments of ``kind``, the SDK's estimator, stand for; and the other arguments.

    Raises ``PlanError`` for names that are none (the SDK drops them silently) and for what follows from the
    specification.
    """
    if faults := list(_argument_faults(kind, kwargs)):
        raise PlanError(faults)
    fields, rest = {}, {}
    for name, value in kwargs.items():
        if name not in _FIELDS or _is_variable(value):
            rest[name] = value
        elif value is not None:
            fields[_FIELDS[name]] = _plain(name, value)
    groups = fields.get("backend.instance_groups", ())
    if groups and "compute.instance_count" not in fields:
        fields["compute.instance_count"] = sum(group["instance_count"] for group in groups)
    return fields, rest


def _argument_faults(kind: Any, kwargs: Mapping[str, Any]) -> Iterator[Fault]:
    known = _parameters(kind)
    for name, value in kwargs.items():
        if name in _REFUSED:
            problem, remedy = _REFUSED[name]
            yield Fault(name, problem, value, remedy)
        elif name not in known:
            yield Fault(name, "is no argument of PyTorch; the SDK would drop it", value, did_you_mean(name, known))
        elif name in _SETTLED and _is_variable(value):
            problem = "a variable of a pipeline cannot change how many processes there are, and of what"
            yield Fault(name, problem, _shown(value), f"Give a value, here or as {_FIELDS[name]}")
        elif name == "enable_network_isolation" and value:
            yield Fault(name, "a job without network cannot read or publish anything in S3", value, "Leave it out")


def _parameters(kind: Any) -> list[str]:
    signatures = [inspect.signature(it.__init__) for it in kind.__mro__ if "__init__" in vars(it)]
    return sorted({name for it in signatures for name in it.parameters if name not in ("self", "args", "kwargs")})


def _shown(value: Any) -> Any:
    return getattr(value, "expr", value)  # the SDK's own text of a variable is an exception


def _is_variable(value: Any) -> bool:
    """Whether a value, or one in it, is known to a pipeline alone."""
    if isinstance(value, dict):
        return any(map(_is_variable, value.values()))
    return any(map(_is_variable, value)) if isinstance(value, list | tuple) else hasattr(value, "expr")


def _plain(name: str, value: Any) -> Any:
    """An argument as the specification spells it."""
    if name == "tags" and isinstance(value, list):
        return {str(tag["Key"]): str(tag["Value"]) for tag in value}
    if name == "instance_groups":
        return [
            {"name": it.instance_group_name, "instance_type": it.instance_type, "instance_count": it.instance_count}
            for it in value
        ]
    return value


def _usual(entry: tuple[str, Any]) -> tuple[str, Any]:
    """A hyperparameter, where it is a variable of a pipeline by its default."""
    name, value = entry
    default = getattr(value, "default_value", None) if _is_variable(value) else None
    return (name, value) if default is None else (name, default)


def hyperparameter_faults(submission: Submission, given: Mapping[str, Any]) -> Iterator[Fault]:
    """What the service would refuse, or the worker minutes after the job has begun to cost: names, values, lengths."""
    try:
        texts = {name: json.dumps(value) for name, value in map(_usual, given.items()) if not _is_variable(value)}
    except (TypeError, ValueError) as error:
        yield Fault("hyperparameters", f"cannot be written as JSON, which the SDK makes of them: {error}")
        return
    whole = {**submission.request["HyperParameters"], **texts}
    for fault in limit_faults({**submission.request, "HyperParameters": whole}):
        if fault.path.startswith("HyperParameters"):
            path = fault.path.replace("HyperParameters", "hyperparameters", 1)
            yield replace(fault, path=path, remedy="Say it in the specification: a job file has no such limit")
    try:
        submission.job.changed(overrides(texts))
    except SpecError as error:
        for fault in error.faults:
            own = submission.job.spec.task.kind == "script" and "." not in fault.path
            remedy = "Arguments of the program are task.args" if own else fault.remedy
            yield replace(fault, path=f"hyperparameters.{fault.path}", origin="", remedy=remedy)


def fit_faults(submission: Submission, inputs: Mapping[str, Any], job_name: Any) -> Iterator[Fault]:
    """What ``fit`` is given and the SDK or the service would refuse, after the code had been stored."""
    request = dict(submission.request)
    own = {channel["ChannelName"] for channel in request["InputDataConfig"]}
    if JOB_CHANNEL in inputs:
        remedy = "Give the input another name"
        yield Fault(f"inputs.{JOB_CHANNEL}", "is the name of the channel that brings the job itself", remedy=remedy)
    for name, value in inputs.items():
        if isinstance(value, str) and not is_s3(value):
            yield Fault(f"inputs.{name}", "is no prefix in S3", value, "Write s3://bucket/prefix")
    more = [{"ChannelName": name, "DataSource": {}} for name in inputs if name not in own]
    request |= {"InputDataConfig": [*request["InputDataConfig"], *more]}
    request |= {"TrainingJobName": job_name} if isinstance(job_name, str) else {}
    for fault in limit_faults(request):
        if fault.path == "TrainingJobName":
            yield replace(fault, path="job_name", remedy="Leave it out, or write letters, digits and hyphens")
        elif fault.path.startswith("InputDataConfig"):
            yield replace(fault, path="inputs", remedy="Letters, digits and ._- name a channel; there are at most 20")
