"""What a user gives an estimator of the SageMaker SDK: arguments that are fields of the specification, and the rest."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sm_llm.contract.hyperparameters import applied, is_reserved, overrides
from sm_llm.contract.job_file import JOB_CHANNEL
from sm_llm.errors import Issue, PlanError, SpecError
from sm_llm.launcher.backends.sagemaker.pipelines.known_values import ANY_NETWORK, fillings, is_known, known_values
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_values import spelt
from sm_llm.launcher.backends.sagemaker.pipelines.settled import PROBLEM, launched, variable_issue
from sm_llm.launcher.backends.sagemaker.request.limits import limit_issues
from sm_llm.launcher.backends.sagemaker.sdk.sdk_effects import EFFECTS
from sm_llm.launcher.backends.sagemaker.sdk.sdk_inputs import input_issues
from sm_llm.launcher.planner import load_whole, plan_loaded
from sm_llm.spec.environment.variables import reserved_issues
from sm_llm.spec.job import JobSpec
from sm_llm.spec.loading.overrides import parse_fields, parse_overrides
from sm_llm.spec.schema import knows
from sm_llm.spec.tree import Tree
from sm_llm.spec.validation.fields import did_you_mean, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.backends.sagemaker.sdk.sdk_effects import Effect
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.spec.loading.overrides import Override

# Arguments whose keys are names.
_NAMED_BY_KEY = ("environment", "hyperparameters")
_KEEP = "Keep one of the two"


def as_fields(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields (by dotted path) that arguments of the SDK's estimator stand for; and the other arguments.

    ``sdk_effects.EFFECTS`` lists the effect of every argument. ``kwargs`` have no issues (``argument_issues``).
    """
    fields, rest = {}, {}
    for name, value in kwargs.items():
        effect = EFFECTS[name]
        # A variable has no value yet that a field could hold, so it goes to the SDK as it is.
        if effect.kind == "passed" or (effect.kind == "field" and is_variable(value)):
            rest[name] = value
        elif effect.kind == "field" and value is not None:
            fields[effect.target] = _plain(name, value)
    # The groups hold their counts and types, which the specification wants in fields of their own, too.
    groups = fields.get("backend.instance_groups", ())
    if groups and "compute.instance_count" not in fields:
        fields["compute.instance_count"] = sum(group["instance_count"] for group in groups)
    if groups and "compute.instance_type" not in fields:
        fields["compute.instance_type"] = groups[0]["instance_type"]
    return fields, rest


def known_fields(rest: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Fields that arguments with pipeline variables stand for, with values that these may have: all defaults, then
    each other choice of one. Of lists and mappings the known entries remain.

    ``rest`` are the arguments of ``as_fields`` that are no fields because of their variables.
    """
    given = [(name, value) for name, value in rest.items() if EFFECTS[name].kind == "field"]
    given = [(name, _known_entries(value)) for name, value in given]
    found = {EFFECTS[name].target: [_plain(name, it) for it in fillings(value)] for name, value in given}
    found = {target: values for target, values in found.items() if values}
    # The two lists are checked together, and of one nothing may be known.
    if len(network := [it for it in ANY_NETWORK if it in found]) == 1:
        found |= {target: [[entry]] for target, entry in ANY_NETWORK.items() if target not in network}
    first = {target: values[0] for target, values in found.items()}
    if first:
        yield first
    yield from ({**first, target: other} for target, values in found.items() for other in values[1:])


def example_fields(rest: Mapping[str, Any]) -> Iterator[tuple[str, Any, list[Any]]]:
    """Fields that single variables without known values stand for: path, variable, and values of its type.

    A field that takes none of them takes no value that the variable can have.
    """
    for name, value in rest.items():
        if EFFECTS[name].kind == "field" and hasattr(value, "expr") and (examples := known_values(value).examples):
            yield EFFECTS[name].target, value, [_plain(name, it) for it in examples]


def _known_entries(value: Any) -> Any:
    return {key: it for key, it in value.items() if is_known(it)} if isinstance(value, dict) else value


def argument_issues(kind: Any, kwargs: Mapping[str, Any]) -> Iterator[Issue]:
    """Arguments of ``kind``, the SDK's estimator, that are none (the SDK drops them silently), that are not in the
    table of effects, or that follow from the specification.
    """
    for name, value in kwargs.items():
        effect = EFFECTS.get(name)
        if effect is None:
            known = _parameters(kind)
            if name in known:
                problem = "is an argument of the SDK whose effect on the job is not known"
                yield Issue("estimator-argument-unsupported", name, problem, shown(value), "Leave it out")
            else:
                yield Issue(
                    "estimator-argument-unknown",
                    name,
                    "is not an argument of PyTorch; the SDK drops it",
                    value,
                    did_you_mean(name, known),
                )
        elif effect.kind == "refused":
            if value is not None and not any(value is it or value == it for it in effect.neutral):
                yield Issue("estimator-argument-refused", name, effect.reason, shown(value), effect.target)
        elif is_variable(value) and not effect.variable:
            problem = "must be a value: job.json and how many processes start follow from it, before a pipeline starts"
            yield Issue("estimator-argument-is-variable", name, problem, shown(value), _instead(name, effect))
        else:
            yield from _name_issues(name, value)
            yield from _group_issues(value) if name == "instance_groups" else ()
    # VpcConfig takes both lists or neither, so one cannot come from the specification and one from a pipeline.
    network = {name: is_variable(kwargs[name]) for name in ("subnets", "security_group_ids") if kwargs.get(name)}
    if len(set(network.values())) == 2:
        variable, fixed = sorted(network, key=lambda it: not network[it])
        problem = f"holds a pipeline variable, and {fixed} holds values: the two are checked together"
        yield Issue(
            "estimator-network-mixed",
            variable,
            problem,
            shown(kwargs[variable]),
            "Give both as values, or both as variables",
        )


def twice_issues(
    arguments: Mapping[str, Any], hyperparameters: Any, overrides: Sequence[Override], fields: Mapping[str, Any]
) -> Iterator[Issue]:
    """Values that one call gives twice, by two ways: one of the two would have no effect.

    ``arguments`` are the fields that arguments of the SDK stand for.
    """
    # Their issues are reported where the specification is loaded; here only paths are compared.
    changes = [*parse_overrides(overrides)[0], *parse_fields(fields)[0]]
    given = {".".join(path): "an override" for path, _ in changes}
    for path, value in _leaves(arguments):
        if (other := _same(path, given)) is not None:
            yield Issue(
                "argument-given-twice",
                path,
                f"is given twice, by an argument of the SDK and by {given[other]} of {other}",
                value,
                _KEEP,
            )
    given |= dict.fromkeys(dict(_leaves(arguments)), "an argument of the SDK")
    for path in hyperparameters if isinstance(hyperparameters, dict) else ():
        if isinstance(path, str) and (other := _same(path, given)) is not None:
            where = f"hyperparameters.{path}"
            yield Issue(
                "hyperparameter-given-twice",
                where,
                f"is given twice, here and by {given[other]}",
                shown(hyperparameters[path]),
                _KEEP,
            )


def _leaves(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Paths and values; what is a mapping has one for each of its keys."""
    return [
        leaf
        for path, value in arguments.items()
        for leaf in (
            [(f"{path}.{key}", item) for key, item in value.items()]
            if isinstance(value, dict) and value
            else [(path, value)]
        )
    ]


def _same(path: str, given: Iterable[str]) -> str | None:
    """The path in ``given`` that sets what ``path`` does, or a part of it."""
    return next((it for it in given if f"{it}.".startswith(f"{path}.") or f"{path}.".startswith(f"{it}.")), None)


def _instead(name: str, effect: Effect) -> str:
    return f"Give a value, here or as {effect.target}" if effect.kind == "field" else f"Give {name} a value"


def _name_issues(argument: str, value: Any) -> Iterator[Issue]:
    """Names that are not text: a pipeline variable has a value only once the pipeline runs."""
    if argument in _NAMED_BY_KEY and isinstance(value, dict):
        names = list(value)
    elif argument == "tags" and isinstance(value, list):
        yield from _tag_issues(value)
        names = [tag["Key"] for tag in value if isinstance(tag, dict) and "Key" in tag]
    else:
        return
    for name in names:
        if not isinstance(name, str):
            yield Issue(
                "estimator-name-is-variable",
                argument,
                "a name must be text, not a pipeline variable",
                shown(name),
                "Write the name itself",
            )
    if argument == "environment":
        yield from reserved_issues(name for name in names if isinstance(name, str))


def _tag_issues(tags: list[Any]) -> Iterator[Issue]:
    """Tags that are not the SDK's pairs, or that give one key two values: the service refuses both."""
    for tag in tags:
        if not isinstance(tag, dict) or set(tag) != {"Key", "Value"}:
            yield Issue(
                "tag-malformed",
                "tags",
                "a tag must have Key and Value, and nothing else",
                shown(tag),
                "Write {'Key': …, 'Value': …}",
            )
    # Keys that are variables are reported by _name_issues.
    keys = [tag["Key"] for tag in tags if isinstance(tag, dict) and isinstance(tag.get("Key"), str)]
    for key in sorted({it for it in keys if keys.count(it) > 1}):
        yield Issue("tag-repeated", "tags", f"the key {key!r} is given {keys.count(key)} times", remedy="Keep one")


def _group_issues(groups: Any) -> Iterator[Issue]:
    from sagemaker.instance_group import InstanceGroup

    if groups is not None and not (isinstance(groups, list) and all(isinstance(it, InstanceGroup) for it in groups)):
        remedy = "Write [sagemaker.instance_group.InstanceGroup('name', 'ml.m5.large', 2)], or backend.instance_groups"
        yield Issue(
            "instance-groups-invalid",
            "instance_groups",
            "must be a list of the SDK's InstanceGroup",
            shown(groups),
            remedy,
        )


def _parameters(kind: Any) -> list[str]:
    # PyTorch passes most of its arguments on to its base classes as keywords.
    signatures = [inspect.signature(it.__init__) for it in kind.__mro__ if "__init__" in vars(it)]
    return sorted({name for it in signatures for name in it.parameters if name not in ("self", "args", "kwargs")})


def shown(value: Any) -> Any:
    """A value for a message: the SDK's own text of a variable is an exception."""
    if isinstance(value, dict):
        return {shown(key): shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    if hasattr(value, "expr"):
        return json.dumps(value.expr) if isinstance(value.expr, dict) else value.expr
    return value


def is_variable(value: Any) -> bool:
    """Whether a value, or one in it, is known to a pipeline alone."""
    if isinstance(value, dict):
        return any(map(is_variable, value.values()))
    return any(map(is_variable, value)) if isinstance(value, list | tuple) else hasattr(value, "expr")


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


def hyperparameter_issues(submission: Submission, plan: Plan, given: Mapping[str, Any]) -> Iterator[Issue]:
    """What the service would refuse, or the worker minutes after the job has begun to cost: names, values, lengths.

    ``plan`` is that of the job that ``submission`` starts.
    """
    if not isinstance(given, dict):
        yield Issue(
            "hyperparameters-not-a-mapping",
            "hyperparameters",
            "must be a mapping",
            given,
            "Write {'task.max_steps': 100}",
        )
        return
    reserved = [name for name in given if isinstance(name, str) and is_reserved(name)]
    for name in reserved:
        problem = "is a hyperparameter of sm_llm or the training toolkit: it follows from the specification"
        remedy = "Leave it out; storage, task, compute and task.parallelism are the fields it follows from"
        yield Issue("hyperparameter-reserved", f"hyperparameters.{name}", problem, shown(given[name]), remedy)
    # A reserved name makes the request another one, so the rest cannot be checked.
    if reserved:
        return
    variable = [name for name, value in given.items() if is_variable(value)]
    named = [*_holding_issues(given), *_variable_issues(submission.job.spec, variable)]
    yield from named
    refused = {issue.path for issue in named}  # their default values would be refused once more
    given = {name: value for name, value in given.items() if f"hyperparameters.{name}" not in refused}
    try:
        texts = _known_texts(given)
    except (TypeError, ValueError) as error:
        yield Issue(
            "hyperparameters-not-json",
            "hyperparameters",
            f"cannot be written as JSON, which the SDK makes of them: {error}",
        )
        return
    variables = {name: it for name, it in given.items() if hasattr(it, "expr")}
    known = {name: known_values(it) for name, it in variables.items()}
    found = list(_text_issues(submission, plan, texts))
    yield from found
    for name, it in known.items() if not found else ():
        # Choices may all be asked for. Of examples, which stand for values that nobody knows, one must work.
        others = [list(_text_issues(submission, plan, {**texts, name: spelt(value)})) for value in it.every[1:]]
        tried = [list(_text_issues(submission, plan, {**texts, name: spelt(value)})) for value in it.examples]
        yield from (issue for issues in others for issue in issues)
        if tried and all(tried):
            yield from (replace(issue, value=shown(variables[name])) for issue in tried[0])


def _known_texts(given: Mapping[str, Any]) -> dict[str, str]:
    """Texts of hyperparameters; of variables their default or first choice. Raises ``TypeError`` and ``ValueError``."""
    known = {name: known_values(it).every for name, it in given.items() if hasattr(it, "expr")}
    fixed = {name: json.dumps(value) for name, value in given.items() if not is_variable(value)}
    return fixed | {name: spelt(values[0]) for name, values in known.items() if values}


def plan_with(submission: Submission, plan: Plan, given: Mapping[str, Any]) -> Plan:
    """The plan of the job as the hyperparameters that it was ``given`` change it, which have no issues."""
    try:
        changes = applied(submission.job, _known_texts(given))[1]
        # Variables that come as hyperparameters have other limits than those of the request.
        own = [it for it in changes if not it.startswith("environment.")]
        return plan_loaded(load_whole(plan.job, own))[0] if own else plan
    except (SpecError, PlanError):  # values that fit beside those of a tuning job's ranges alone
        return plan


def _text_issues(submission: Submission, plan: Plan, texts: Mapping[str, str]) -> Iterator[Issue]:
    """Issues of the texts of hyperparameters, all together."""
    # The service limits the hyperparameters of a request as a whole, those of the toolkit included.
    whole, too_long = {**submission.request["HyperParameters"], **texts}, False
    for issue in limit_issues({**submission.request, "HyperParameters": whole}):
        if issue.path.startswith("HyperParameters"):
            too_long = True
            path = issue.path.replace("HyperParameters", "hyperparameters", 1)
            yield replace(issue, path=path, remedy="Set it in the specification: a job file has no such limit")
    try:
        # The same function as in the worker: what passes here passes there.
        _, changes = applied(submission.job, texts)
        if not too_long:
            yield from _launch_issues(plan, changes)
    except (SpecError, PlanError) as error:
        for issue in error.issues:
            # A name without a dot is not a path of the specification, so an argument of the program was meant.
            own = submission.job.spec.task.kind == "script" and "." not in issue.path
            remedy = "Arguments of the program are task.args" if own else issue.remedy
            yield replace(issue, path=f"hyperparameters.{issue.path}", origin="", remedy=remedy)


def _holding_issues(given: Mapping[Any, Any]) -> Iterator[Issue]:
    """Lists and mappings with a variable in them: the SDK cannot write them as the JSON text of a hyperparameter."""
    for name, value in given.items():
        if is_variable(value) and not hasattr(value, "expr"):
            problem = "holds a pipeline variable: a hyperparameter is one text, which holds no variable of its own"
            if isinstance(value, dict):
                remedy = f"Give each value by its own path, such as {name}.{next(iter(value))}"
            else:
                remedy = "Give the whole list as one variable, such as ParameterString('Betas', '[0.9, 0.95]')"
            yield Issue("hyperparameter-holds-variable", f"hyperparameters.{name}", problem, shown(value), remedy)


def _variable_issues(job: JobSpec, names: Sequence[Any]) -> Iterator[Issue]:
    """Names of hyperparameters whose values only a pipeline knows: the worker would refuse them whatever they are."""
    written = job.model_dump()
    for change in overrides({name: "" for name in names if isinstance(name, str)}):
        name = change.partition("=")[0]
        where = f"hyperparameters.{name}"
        if not knows(JobSpec, written, name.split(".")):
            own = job.task.kind == "script" and "." not in name
            meant = nearest(JobSpec, Tree(written), tuple(name.split(".")))
            remedy = "Arguments of the program are task.args" if own else meant
            yield Issue("hyperparameter-unknown", where, "unknown key", remedy=remedy)
        elif (issue := variable_issue(job, name)) is not None:
            yield replace(issue, path=where)
        elif name.startswith("environment."):
            yield from reserved_issues([name.removeprefix("environment.")], "hyperparameters.environment")


def _launch_issues(plan: Plan, changes: Sequence[str]) -> Iterator[Issue]:
    """Changes that the request was made without: it would start the processes for another job than the worker reads.

    Raises ``SpecError`` and ``PlanError`` where the changed job cannot be planned.
    """
    if not changes:
        return
    # Limits of the request's environment do not hold for variables that come as hyperparameters.
    (changed,) = plan_loaded(load_whole(plan.job, [it for it in changes if not it.startswith("environment.")]))
    if launched(changed.job) == launched(plan.job):
        return
    # The changes together start other processes: each that does so by itself is named.
    for change in changes:
        name = change.partition("=")[0]
        try:
            alone = load_whole(plan.job, [change]).spec
        except SpecError:
            # A change that is valid only beside the others is not the cause by itself.
            continue
        if isinstance(alone, JobSpec) and launched(alone) != launched(plan.job):
            remedy = f"Give it to the specification: sm_llm.estimator(spec, {change!r})"
            yield Issue(
                "hyperparameter-fixed-by-request", f"hyperparameters.{name}", PROBLEM, change.partition("=")[2], remedy
            )


def fit_issues(submission: Submission, inputs: Mapping[str, Any], job_name: Any) -> Iterator[Issue]:
    """What ``fit`` is given and the SDK or the service would refuse, after the code had been stored."""
    request = dict(submission.request)
    own = {channel["ChannelName"] for channel in request["InputDataConfig"]}
    if JOB_CHANNEL in inputs:
        remedy = "Give the input another name"
        yield Issue(
            "channel-name-reserved",
            f"inputs.{JOB_CHANNEL}",
            "is the name of the channel that brings the job itself",
            remedy=remedy,
        )
    yield from input_issues(submission.job.spec, inputs, has_network="VpcConfig" in request)
    if job_name is not None and not isinstance(job_name, str):
        yield Issue(
            "job-name-is-variable",
            "job_name",
            "must be text, not a pipeline variable",
            shown(job_name),
            "Write the name itself",
        )
    more = [{"ChannelName": name, "DataSource": {}} for name in inputs if isinstance(name, str) and name not in own]
    request |= {"InputDataConfig": [*request["InputDataConfig"], *more]}
    request |= {"TrainingJobName": job_name} if isinstance(job_name, str) else {}
    for issue in limit_issues(request):
        if issue.path == "TrainingJobName":
            yield replace(issue, path="job_name", remedy="Leave it out, or write letters, digits and hyphens")
        elif issue.path.startswith("InputDataConfig"):
            yield replace(issue, path="inputs", remedy="Letters, digits and ._- name a channel; there are at most 20")
