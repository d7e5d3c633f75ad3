"""The user's own defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm_llm.errors import SpecError
from sm_llm.spec.loading.defaults import read_defaults
from sm_llm.spec.loading.load import load
from sm_llm.spec.loading.user_file import user_config_file
from sm_llm.spec.reference.show import show


def write(folder: Path, text: str) -> Path:
    file = folder / "sm_llm" / "config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_the_file_is_found_the_xdg_way() -> None:
    assert user_config_file({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/sm_llm/config.yaml")
    assert user_config_file({"HOME": "/h"}) == Path("/h/.config/sm_llm/config.yaml")


def test_variables_win_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "role: r\nstorage: /file\nvpc:\n  subnets: [s1]\n  security_group_ids: [g1]\n")
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "SM_LLM_STORAGE": "/env", "SM_LLM_SUBNETS": "a, b"}
    defaults = read_defaults(environ)
    assert defaults.values.role == "r"
    assert defaults.values.storage == "/env"
    assert defaults.values.vpc.subnets == ["a", "b"]
    assert defaults.values.vpc.security_group_ids == ["g1"]
    assert defaults.origins["role"] == f"user config {file}:1"
    assert defaults.origins["storage"] == "environment SM_LLM_STORAGE"


def test_without_file_and_variables_nothing_is_set(tmp_path: Path) -> None:
    defaults = read_defaults({"XDG_CONFIG_HOME": str(tmp_path)})
    assert defaults.origins == {}
    assert defaults.values.storage is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("storge: /x\nregion: 3\nvpc: {subnet: []}\n", ["Did you mean storage?", "Did you mean vpc.subnets?"]),
        ("- a\n", ["a configuration is a mapping"]),
        ("vpc: [a]\n", ["vpc", "expected a mapping with subnets, security_group_ids"]),
    ],
)
def test_a_faulty_file_is_refused_with_every_fault(tmp_path: Path, text: str, expected: list[str]) -> None:
    write(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        read_defaults({"XDG_CONFIG_HOME": str(tmp_path)})
    assert all(part in str(caught.value) for part in expected)


def test_show_lists_every_value_with_its_origin_and_the_users_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "storage: /mine\nregion: eu-west-1\n")
    rows = show(load("smoke", ["task.seed=4"], environ={"XDG_CONFIG_HOME": str(tmp_path)}))
    table = {path: (value, origin) for path, value, origin in rows}
    assert table["task.seed"] == (4, "override")
    assert table["storage"] == ("/mine", f"user config {file}:1")
    assert table["task.optim.betas"] == ([0.9, 0.95], "default")
    assert table["task.max_steps"][1].startswith("recipe smoke:")
    assert table["user defaults: region"] == ("eu-west-1", f"user config {file}:2")
    assert table["environment"] == ({}, "default")
    assert "user defaults: role" not in table


def test_how_S3_is_reached_is_a_default_that_a_job_can_override(tmp_path: Path) -> None:
    write(tmp_path, "storage_options:\n  endpoint_url: http://file\n  region: eu-west-1\n")
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "SM_LLM_ENDPOINT_URL": "http://env"}
    task = {"kind": "prepare", "sources": ["x"], "seq_length": 8}
    loaded = load({"name": "job", "task": task}, environ=environ)
    assert (loaded.spec.storage_options.endpoint_url, loaded.spec.storage_options.region) == ("http://env", "eu-west-1")
    assert loaded.origins["storage_options.endpoint_url"] == "environment SM_LLM_ENDPOINT_URL"
    own = load({"name": "job", "task": task, "storage_options": {"endpoint_url": "http://own"}}, environ=environ)
    assert (own.spec.storage_options.endpoint_url, own.spec.storage_options.region) == ("http://own", "eu-west-1")
    emptied = load({"name": "job", "task": task}, ["storage_options={}"], environ=environ)
    assert emptied.spec.storage_options.region is None
    assert {path: it for path, it in emptied.origins.items() if path.startswith("storage_options")} == {
        "storage_options": "override"
    }
    assert own.digest == loaded.digest == load({"name": "job", "task": task}, environ={}).digest
