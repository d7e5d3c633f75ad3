"""Experiment trackers fed from the event log: TensorBoard and MLflow by their own readers, W&B through a double."""

from __future__ import annotations

import json
import math
import sys
import threading
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.contract.job_file import JobFile
from sm_llm.runs.events import events as ev
from sm_llm.runs.run_paths import RunPaths
from sm_llm.spec.job import JobSpec, spec_digest
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.trackers import experiment_trackers
from sm_llm.worker.trackers.experiment_trackers import EventForwarder, forwarded_events, numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

TASK: dict[str, Any] = {
    "kind": "train",
    "model": {"preset": "tiny"},
    "data": {"format": "synthetic", "seq_length": 8},
    "max_steps": 40,
}

LONG_SECONDS = 120.0
"""For what is done at once, on a busy machine."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_trackers, "CLOSE_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(experiment_trackers, "CLOSE_AFTER_ERROR_SECONDS", LONG_SECONDS)


def context_of(
    root: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], *, attempt: int = 1, rank: int = 0, **job: Any
) -> WorkerContext:
    """The context of one process of an attempt whose job has the trackers ``spec``."""
    task = {**TASK, "logging": {"sinks": spec}}
    made = JobSpec.model_validate({"name": "job", "task": task, "environment": {"API_KEY": "hidden"}})
    file = JobFile(
        run_id="job-1", attempt=attempt, run_uri=str(root), spec=made, spec_digest=spec_digest(made), **job
    )  # fmt: skip
    root.mkdir(exist_ok=True)
    file.write(RunPaths(root).job_file)
    environ = {
        "SM_LLM_JOB_FILE": str(RunPaths(root).job_file), "SAGEMAKER_BASE_DIR": str(root / "base"), "RANK": str(rank)
    }  # fmt: skip
    return WorkerContext.read(environ)


def step(number: int, loss: float) -> ev.Step:
    return ev.Step(step=number, loss=loss, grad_norm=1.5, learning_rate=7e-5, tokens=128)


def noticed(root: Path) -> list[str]:
    return [event["message"] for event in ev.read_events(RunPaths(root).events) if event["kind"] == "notice"]


@dataclass
class Fake:
    """A tracker that remembers, and fails or hangs when the test asks for it."""

    id: str = "id-1"
    uri: str | None = None
    fail: bool = False
    hang: threading.Event | None = None
    events: list[Mapping[str, Any]] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)

    def take(self, events: Sequence[Mapping[str, Any]]) -> None:
        if self.hang:
            self.hang.wait(300)
        if self.fail:
            raise ConnectionError("the server\nis away")
        self.events.extend(events)

    def close(self, *, completed: bool) -> None:
        self.closed.append(completed)


def fed(context: WorkerContext, *events: ev.Event, seconds: float = LONG_SECONDS, **fakes: Fake) -> None:
    feed = EventForwarder(context, {name: lambda fake=fake: fake for name, fake in fakes.items()}, poll_seconds=0.01)
    feed.start()
    for event in events:
        context.emit(event)
    feed.close(seconds)


def test_every_event_arrives_once_in_order_and_the_id_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, fake = context_of(tmp_path / "run", monkeypatch, {}), Fake()
    fed(context, *(step(number, 1.0 / number) for number in range(1, 200)), ev.FinalPublished("x", 1), a=fake)
    assert [event["step"] for event in fake.events if event["kind"] == "step"] == list(range(1, 200))
    assert fake.closed == [True]
    (opened,) = [event for event in ev.read_events(context.run.events) if event["kind"] == "tracker_opened"]
    assert (opened["tracker"], opened["id"]) == ("a", "id-1")


def test_a_tracker_that_fails_is_left_and_reported_while_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, good, bad = context_of(tmp_path / "run", monkeypatch, {}), Fake(), Fake(fail=True)
    fed(context, step(1, 2.0), step(2, 1.0), good=good, bad=bad)
    assert [event["step"] for event in good.events if event["kind"] == "step"] == [1, 2]
    assert good.closed == [False]
    assert bad.closed == []
    (message,) = noticed(tmp_path / "run")
    assert message.startswith("bad gets no more numbers of this attempt (ConnectionError: the server is away)")


def test_a_tracker_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    context, fake = context_of(tmp_path / "run", monkeypatch, {}), Fake(hang=hang)
    fed(context, step(1, 2.0), seconds=0.3, slow=fake)
    assert not hang.is_set()
    assert noticed(tmp_path / "run") == ["slow: not done after 0 s; the run's own events have it all"]
    hang.set()


def test_a_tracker_that_cannot_be_opened_does_not_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "sm_llm.worker.trackers.wandb_tracker", raising=False)
    context = context_of(tmp_path / "run", monkeypatch, {"wandb": {"project": "p"}})
    with forwarded_events(context):
        context.emit(step(1, 2.0))
    (message,) = noticed(tmp_path / "run")
    assert message.startswith("wandb gets no more numbers of this attempt (ModuleNotFoundError")


def test_an_error_of_the_training_passes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    monkeypatch.setattr(experiment_trackers, "load_openers", lambda *_: {"a": lambda: fake})
    context = context_of(tmp_path / "run", monkeypatch, {"tensorboard": {}})
    context.emit(step(1, 2.0))
    with pytest.raises(ZeroDivisionError), forwarded_events(context):
        raise ZeroDivisionError
    assert fake.closed == [False]


def test_OB01_OB03_numbers_are_exact_and_nan_and_infinity_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, fake = context_of(tmp_path / "run", monkeypatch, {}), Fake()
    values = [7e-5, 1e-4, 1.2e3, -3e-2, 0.5, 1234.5, 0.1 + 0.2, math.inf, -math.inf]
    fed(context, *(step(number, value) for number, value in enumerate(values, 1)), step(10, math.nan), a=fake)
    losses = [numbers(event)["train/loss"] for event in fake.events if event["kind"] == "step"]
    assert losses[:-1] == values
    assert math.isnan(losses[-1])
    assert numbers({"kind": "throughput", "mfu": None, "tokens_per_second": 5}) == {"speed/tokens_per_second": 5.0}
    assert numbers({"kind": "notice", "message": "x"}) == {}


# --- Weights & Biases, through a double of its documented calls


@dataclass
class WandbDouble(types.ModuleType):
    """A contract double of the calls that W&B documents: init, Run.define_metric, Run.log, Run.finish, Settings, and
    Api().run(path).scan_history, which returns the rows that hold all of the keys."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    loses: Callable[[dict[str, Any]], bool] = lambda row: False
    """Rows that were logged and never came to the server: their process was killed."""
    answers: bool = True

    def __post_init__(self) -> None:
        super().__init__("wandb")
        self.Settings = lambda **settings: settings
        self.Api = lambda: types.SimpleNamespace(run=self._known)

    def _known(self, path: str) -> Any:
        assert path == "team/p/job-1"
        if not self.answers:
            raise ConnectionError("no answer")
        return types.SimpleNamespace(scan_history=self._scan)

    def _scan(self, *, keys: list[str], use_cache: bool) -> list[dict[str, Any]]:
        assert not use_cache, "what another attempt has read is not what the server has now"
        rows = [row for row in self.of("log") if not self.loses(row)]
        return [{key: row[key] for key in keys} for row in rows if all(key in row for key in keys)]

    def init(self, **arguments: Any) -> Any:
        self.calls.append(("init", arguments))
        record = self.calls.append
        return types.SimpleNamespace(
            offline=arguments["mode"] == "offline",
            path=f"{arguments['entity']}/{arguments['project']}/{arguments['id']}",
            url=f"https://wandb.example/{arguments['project']}/runs/{arguments['id']}",
            define_metric=lambda name, **options: record(("define_metric", {"name": name, **options})),
            log=lambda data: record(("log", dict(data))),
            finish=lambda **options: record(("finish", options)),
        )

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [arguments for name, arguments in self.calls if name == kind]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> WandbDouble:
    double = WandbDouble()
    monkeypatch.setitem(sys.modules, "wandb", double)
    monkeypatch.delitem(sys.modules, "sm_llm.worker.trackers.wandb_tracker", raising=False)
    return double


def test_CK33_every_attempt_continues_under_the_same_id_and_only_rank_0_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: WandbDouble
) -> None:
    spec = {"wandb": {"project": "p", "entity": "team"}}
    for attempt, first in ((1, 1), (2, 2)):
        with forwarded_events(context := context_of(tmp_path / "run", monkeypatch, spec, attempt=attempt)):
            context.emit(step(first, 2.0))
            context.emit(step(first + 1, 1.0))
        with forwarded_events(context_of(tmp_path / "run", monkeypatch, spec, attempt=attempt, rank=1)):
            pass
    first_call, second_call = wandb.of("init")
    assert first_call["id"] == second_call["id"] == "job-1"
    assert first_call["resume"] == second_call["resume"] == "allow"
    assert (first_call["project"], first_call["entity"]) == ("p", "team")
    assert [call["step"] for call in wandb.of("log")] == [1, 2, 2, 3], "a step that came again is not dropped"
    assert {"name": "*", "step_metric": "step"} in wandb.of("define_metric")
    assert wandb.of("log")[0]["train/learning_rate"] == 7e-5
    assert "hidden" not in json.dumps(first_call["config"]), "environment variables are nobody's business"
    reported = [event["uri"] for event in ev.read_events(RunPaths(tmp_path / "run").events) if "uri" in event]
    assert reported == ["https://wandb.example/p/runs/job-1"] * 2


def test_an_id_from_the_run_record_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: WandbDouble
) -> None:
    spec = {"wandb": {"project": "p"}}
    with forwarded_events(context := context_of(tmp_path / "run", monkeypatch, spec, trackers={"wandb": "old-id"})):
        context.emit(ev.FinalPublished("x", 1))
    assert wandb.of("init")[0]["id"] == "old-id"
    assert wandb.of("finish") == [{"exit_code": 0}]


# --- the real libraries


@pytest.mark.integration
def test_tensorboard_reads_one_curve_over_attempts_without_the_steps_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    legs = [(1, 0, range(1, 9)), (2, 4, range(5, 13))]
    for attempt, done, steps in legs:
        context = context_of(tmp_path / "run", monkeypatch, {"tensorboard": {}}, attempt=attempt)
        with forwarded_events(context):
            context.emit(ev.StartChosen("checkpoint" if done else "scratch", done))
            for number in steps:
                context.emit(step(number, attempt + number / 100))
            context.emit(ev.Validation(steps[-1], 4.5, 90.0, 64))
    shown = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    losses = shown.Scalars("train/loss")
    assert [it.step for it in losses] == list(range(1, 13))
    assert [round(it.value) for it in losses] == [1] * 4 + [2] * 8
    assert [it.step for it in shown.Scalars("validation/loss")] == [12], "that of step 8 was taken back"
    assert "specification/text_summary" in shown.Tags()["tensors"]


@pytest.mark.integration
def test_mlflow_keeps_one_run_over_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = str(tmp_path / "mlruns")
    spec = {"mlflow": {"tracking_uri": uri, "experiment": "mine"}}
    for attempt, steps in ((1, (1, 2)), (2, (2, 3))):
        # The second attempt has no id: the first one's launcher was killed before it could note it.
        with forwarded_events(context := context_of(tmp_path / "run", monkeypatch, spec, attempt=attempt)):
            for number in steps:
                context.emit(step(number, 0.1 + attempt))
            if attempt == 2:
                context.emit(ev.FinalPublished("x", 1))
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("job-1", "FINISHED")
    assert run.data.params["task.max_steps"] == "40"
    assert not any("API_KEY" in name for name in run.data.params)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((it.step, it.value) for it in history) == [(1, 1.1), (2, 1.1), (2, 2.1), (3, 2.1)]
