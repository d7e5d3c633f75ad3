"""A run's record is data: it never decides which host gets requests signed with the user's credentials."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError, SubmitError
from sm_llm.launcher.backends.sagemaker.pipelines.workflows import step_run_store
from sm_llm.launcher.backends.sagemaker.request.request import RUN_TAG
from sm_llm.launcher.run import Run
from sm_llm.runs import locate
from sm_llm.runs.run_record import Attempt, RunRecord
from sm_llm.runs.run_states import RunState
from sm_llm.runs.run_store import run_store_at
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

Fakes = Any
EVIL = "http://127.0.0.1:9/latest"


def point_elsewhere(run: Run, endpoint: str = EVIL) -> None:
    """As somebody who may write the record would."""

    def change(record: Any) -> Any:
        options = {**record.spec["storage_options"], "endpoint_url": endpoint}
        return record.model_copy(update={"spec": {**record.spec, "storage_options": options}})

    run.run_store.update(change)


@pytest.fixture
def finished(s3_fakes: Fakes) -> Run:
    s3_fakes.use("put(1); put(None)")
    run = s3_fakes.launch()
    assert s3_fakes.end(run) is RunState.COMPLETED, run.logs()
    return run


def test_s10_the_endpoint_of_a_record_is_not_used_and_reported(finished: Run, caplog: pytest.LogCaptureFixture) -> None:
    point_elsewhere(finished)
    with caplog.at_level(logging.WARNING):
        again = Run(finished.uri)
    assert again.state is RunState.COMPLETED
    assert again.run_store.store.client.meta.endpoint_url != EVIL
    assert EVIL in caplog.text


@pytest.mark.parametrize("verb", ["rerun", "branch"])
def test_s10_a_new_run_from_such_a_record_asks_for_a_confirmation(finished: Run, verb: str) -> None:
    point_elsewhere(finished)
    with pytest.raises(SubmitError, match=r"storage_options\.endpoint_url=null") as caught:
        getattr(Run(finished.uri), verb)()
    assert EVIL in str(caught.value)


def test_s10_a_launch_remembers_how_it_reached_its_run_and_no_record_changes_that(
    s3_fakes: Fakes, finished: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SM_LLM_ENDPOINT_URL")
    point_elsewhere(finished)
    assert Run(finished.uri).state is RunState.COMPLETED
    assert Run(finished.uri).state is RunState.COMPLETED, "also after its record was copied here"


def test_the_users_own_endpoint_needs_no_confirmation(finished: Run, s3_fakes: Fakes) -> None:
    assert locate.is_own_endpoint(finished.run_store, s3_fakes.options["endpoint_url"])
    assert not locate.is_own_endpoint(finished.run_store, EVIL)


def test_a_record_of_another_user_in_a_shared_folder_is_not_the_users_own(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.use("put(None)")
    run = fakes.launch()
    fakes.end(run)
    point_elsewhere(run)
    assert locate.is_own_endpoint(run.run_store, EVIL)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(SubmitError, match="nothing of yours names"):
        run.rerun()


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254", "169.254.170.2", "[fd00:ec2::254]", "100.100.100.200", "metadata.google.internal",
        "[fe80::1]", "2852039166", "0xA9FEA9FE", "0251.0376.0251.0376", "169.254.43518", "[::ffff:169.254.169.254]",
        "[fd00:ec2::23]", "[64:ff9b::a9fe:a9fe]", "[64:ff9b:1::a9fe:a9fe]", "[::169.254.169.254]", "[2002:a9fe:a9fe::]",
        "168.63.129.16", "metadata.goog", "METADATA.goog.",
    ],
)  # fmt: skip
def test_s10_metadata_services_are_no_stores(host: str, aws_environment: None) -> None:
    with pytest.raises(StorageError, match="metadata service"):
        S3Store("bkt", "", S3Options(endpoint_url=f"http://{host}/latest")).list("")


def test_s10_a_name_is_judged_by_every_address_that_it_has(
    monkeypatch: pytest.MonkeyPatch, aws_environment: None
) -> None:
    locations = [(2, 1, 6, "", ("203.0.113.7", 0)), (10, 1, 6, "", ("fe80::1%2", 0, 0, 2))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: locations)
    with pytest.raises(StorageError, match="metadata service"):
        S3Store("bkt", "", S3Options(endpoint_url="http://storage.example")).list("")


def test_what_was_remembered_is_read_as_data(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (finished.run_store.root / "reached.json").write_text(json.dumps([1]))
    assert Run(finished.uri).state is RunState.COMPLETED


DEFINITION = {"Steps": [{"Name": "a", "Arguments": {"Tags": [{"Key": RUN_TAG, "Value": "s3://bkt/step"}]}}]}


def workflow(body: bytes) -> Any:
    """A workflow in S3 whose record and stored definition somebody else wrote."""
    spec = {
        "backend": {"name": "sagemaker"}, "steps": {"a": {}}, "storage_options": {"endpoint_url": EVIL, "region": None},
    }  # fmt: skip
    attempt = Attempt(number=1, native_id="x", started=1.0, request="definition.json")
    record = RunRecord(run_id="w", name="w", created=1.0, spec=spec, spec_digest="d", attempts=(attempt,))
    options = S3Options(endpoint_url="http://127.0.0.1:10")
    return SimpleNamespace(
        uri="s3://bkt/w", record=lambda: record, store=SimpleNamespace(get=lambda key: body), options=options
    )


def test_s10_a_step_of_a_pipeline_is_reached_as_its_workflow_is(aws_environment: None) -> None:
    run_store: Any = step_run_store(workflow(json.dumps(DEFINITION).encode()), "a")
    assert run_store.uri == "s3://bkt/step"
    assert run_store.store.client.meta.endpoint_url == "http://127.0.0.1:10"


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b'{"Steps": 5}', b'{"Steps": [1]}', b'{"Steps": [{"Name": "a"}]}', b"[" * 100_000, b"\xff",
     b'{"Steps": [{"Name": "a", "Arguments": {"Tags": []}}]}'],
)  # fmt: skip
def test_4_a_stored_definition_that_is_none_is_an_error_in_words(body: bytes) -> None:
    with pytest.raises(StorageError, match=r"s3://bkt/w/definition\.json: cannot be used"):
        step_run_store(workflow(body), "a")


def test_4_an_option_of_a_record_that_is_not_a_text_is_not_used(aws_environment: None) -> None:
    run_store = run_store_at("s3://bkt/w", S3Options(endpoint_url="http://127.0.0.1:10"))
    record = workflow(b"").record()
    options = {"region": True, "kms_key_id": False, "shared_with_group": True, "storage_class": "STANDARD"}
    record = record.model_copy(update={"spec": {**record.spec, "storage_options": options}})
    found: Any = locate.with_recorded_options(run_store, record)
    assert (found.store.options.region, found.store.options.kms_key_id) == (None, None)
    assert (found.store.options.shared_with_group, found.store.options.storage_class) == (True, "STANDARD")
