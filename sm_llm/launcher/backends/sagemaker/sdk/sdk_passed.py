"""Arguments of an estimator that go into the request as given: their types, limits and metric rules."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue
from sm_llm.launcher.backends.sagemaker.pipelines.known_values import fillings
from sm_llm.launcher.backends.sagemaker.request.limits import value_issues
from sm_llm.spec.validation.fields import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_METRICS = "AlgorithmSpecification.MetricDefinitions"
# Argument -> its place in the request.
_LOCATIONS = {
    "enable_infra_check": "InfraCheckConfig.EnableInfraCheck",
    "enable_sagemaker_metrics": "AlgorithmSpecification.EnableSageMakerMetricsTimeSeries",
    "enable_session_tag_chaining": "SessionChainingConfig.EnableSessionTagChaining",
    "instance_placement_config": "ResourceConfig.InstancePlacementConfig",
    "metric_definitions": _METRICS,
}


def passed_issues(passed: Mapping[str, Any], own_metrics: Sequence[Mapping[str, str]]) -> Iterator[Issue]:
    """What the SDK or the service would refuse, after the run's record was written.

    ``own_metrics`` are the metric definitions of the job itself, which count with those that are ``passed``.
    """
    for name, location in _LOCATIONS.items():
        given = passed.get(name)
        for value in fillings(given) if given is not None else ():
            issues = list(value_issues(location, value, name))
            if name == "metric_definitions" and not issues:
                issues = list(_metric_issues(value, own_metrics))
            yield from issues
    level = passed.get("container_log_level")
    if level is not None and (isinstance(level, bool) or not isinstance(level, int)):
        yield Issue(
            "log-level-invalid",
            "container_log_level",
            "must be a level of logging as a whole number",
            level,
            "Write 20 for INFO",
        )


def _metric_issues(given: Sequence[Mapping[str, str]], own: Sequence[Mapping[str, str]]) -> Iterator[Issue]:
    names = [rule["Name"] for rule in given]
    for name in sorted({it for it in names if names.count(it) > 1}):
        problem = f"defines {name!r} {names.count(name)} times, and only the last would count"
        yield Issue("metric-name-repeated", "metric_definitions", problem, remedy="Keep one, or rename the others")
    for number, rule in enumerate(given):
        path = f"metric_definitions.{number}.Regex"
        try:
            groups = re.compile(rule["Regex"]).groups
        except re.error as error:
            yield Issue(
                "metric-regex-invalid", path, f"is not a regular expression: {error}", rule["Regex"], "Correct it"
            )
            continue
        if not groups:
            problem = f"has no group, so {rule['Name']} would have no value"
            yield Issue(
                "metric-regex-without-group",
                path,
                problem,
                rule["Regex"],
                r"Put the number in parentheses: loss=([0-9.]+)",
            )
    # Merged by name, as the estimator does it.
    merged = {it["Name"]: it for it in (*own, *given)}
    yield from value_issues(_METRICS, list(merged.values()), "metric_definitions")


_LOGS = ("All", "None", "Rules", "Training")
_EXPERIMENT = "experiment_config"


def option_issues(options: Mapping[str, Any], logs: Any) -> Iterator[Issue]:
    """What ``fit`` is given beside inputs and the SDK or the service would refuse, after the code had been stored."""
    for name, value in options.items():
        if name == _EXPERIMENT and value is not None:
            yield from value_issues("ExperimentConfig", value, name)
        elif name != _EXPERIMENT:
            known = ("inputs", "wait", "logs", "job_name", _EXPERIMENT)
            yield Issue(
                "fit-argument-unknown",
                f"fit({name})",
                "is not an argument of fit",
                value,
                did_you_mean(name, known) or "Leave it out",
            )
    wanted = [logs] if isinstance(logs, str) else logs
    if not isinstance(logs, bool) and not (isinstance(wanted, list) and set(map(str, wanted)) <= set(_LOGS)):
        yield Issue("fit-logs-invalid", "logs", "is not a kind of logs", logs, f"Write {', '.join(_LOGS)}")
