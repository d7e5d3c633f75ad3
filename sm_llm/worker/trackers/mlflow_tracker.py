"""MLflow: one run there for all attempts, found again by the id that the run's record keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from sm_llm.worker.trackers.experiment_trackers import numbers, shown_names, shown_spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.spec.training import MlflowSpec
    from sm_llm.worker.context import WorkerContext

RUN_TAG = "sm_llm.run_id"
# Numbers that a step has whenever it is computed; speeds and memory differ each time.
_OF_TRAINING = ("train/", "validation/")
# Limits of one log-batch request of MLflow's REST API.
_METRICS_PER_CALL = 1000
_PARAMS_PER_CALL = 100
_LONGEST_PARAM = 500


class MlflowTracker:
    """Metrics by step with the time they were measured; the specification as parameters when the run is made."""

    def __init__(self, spec: MlflowSpec, context: WorkerContext) -> None:
        self._client: Any = MlflowClient(tracking_uri=spec.tracking_uri)
        experiment = self._experiment(spec.experiment or context.job.spec.name)
        # The record's id first; the tag finds a run whose id never reached the record.
        known = context.job.trackers.get("mlflow") or self._tagged(experiment, context.job.run_id)
        self.id: str = known or self._make(experiment, context)
        if known:
            # An earlier attempt has ended it, as killed.
            self._client.update_run(known, status="RUNNING")
        self.uri: str | None = self._address(experiment)
        # (name, step) -> values that MLflow has: it appends, and forgets nothing.
        self._held = self._history() if known else {}

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _tagged(self, experiment: str, run_id: str) -> str | None:
        """The run of an attempt that was killed before its launcher could note the id."""
        found = self._client.search_runs([experiment], filter_string=f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1)
        return found[0].info.run_id if found else None

    def _make(self, experiment: str, context: WorkerContext) -> str:
        run_id = context.job.run_id
        made: str = self._client.create_run(experiment, run_name=run_id, tags={RUN_TAG: run_id}).info.run_id
        # Cut, because MLflow refuses the whole batch for one value that is too long.
        params = [Param(name, str(value)[:_LONGEST_PARAM]) for name, value in _leaves(shown_spec(context))]
        for begin in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(made, params=params[begin : begin + _PARAMS_PER_CALL])
        return made

    def _address(self, experiment: str) -> str:
        root = str(self._client.tracking_uri)
        return f"{root.rstrip('/')}/#/experiments/{experiment}/runs/{self.id}" if root.startswith("http") else root

    def _history(self) -> dict[tuple[str, int], set[str]]:
        held: dict[tuple[str, int], set[str]] = {}
        for name in shown_names():
            for it in self._client.get_metric_history(self.id, name):
                held.setdefault((name, it.step), set()).add(repr(it.value))
        return held

    def _is_new(self, name: str, step: int, value: float) -> bool:
        """Not what is there already. How fast a step was taken again is not about the training: the first stays."""
        values = self._held.get((name, step), set())
        return repr(value) not in values if name.startswith(_OF_TRAINING) else not values

    def refill(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.take(events)

    def take(self, events: Sequence[Mapping[str, Any]]) -> None:
        metrics = [
            Metric(name, value, int(event["time"] * 1000), event["step"])
            for event in events
            for name, value in numbers(event).items()
            if self._is_new(name, event["step"], value)
        ]
        for begin in range(0, len(metrics), _METRICS_PER_CALL):
            self._client.log_batch(self.id, metrics=metrics[begin : begin + _METRICS_PER_CALL])

    def close(self, *, completed: bool) -> None:
        # KILLED: MLflow has no state for a run that continues later.
        self._client.set_terminated(self.id, "FINISHED" if completed else "KILLED")


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
