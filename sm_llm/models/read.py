"""Finds a model's ``config.json``: in a folder, as a file, or on the Hugging Face hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sm_llm.errors import Issue, SpecError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w-]*")


def read_config(path_or_id: str | Path, *, where: str = "task.model.path") -> dict[str, Any]:
    """The config as it is written, from a folder, a JSON file or a hub id (``org/name``; the local cache comes first
    when the hub cannot be reached). Raises ``SpecError`` at ``where``, also when offline or refused by the hub.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return _parse(path / "config.json", where)
    if path.is_file():
        return _parse(path, where)
    if _HUB_ID.fullmatch(str(path_or_id)):
        return _parse(_download(str(path_or_id), where), where)
    raise _error(
        "model-config-not-found",
        where,
        "there is no such folder or file",
        str(path_or_id),
        "Give a folder with config.json or a hub id.",
    )


def _parse(path: Path, where: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _error(
            "model-folder-without-config",
            where,
            "the folder holds no config.json",
            str(path.parent),
            "It must be a Hugging Face model folder.",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _error("model-config-not-json-text", where, f"cannot be read as JSON: {error}", str(path)) from None
    if not isinstance(config, dict):
        raise _error("model-config-not-an-object", where, "holds no JSON object", str(path))
    return config


def _download(name: str, where: str) -> Path:
    """The hub's copy, or the cached one when the hub does not answer."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError:
        remedy = "pip install huggingface_hub, or give a local folder"
        raise _error(
            "hub-client-missing", where, "is not a folder here, and huggingface_hub is not installed", name, remedy
        ) from None
    try:
        return Path(hf_hub_download(name, "config.json"))
    except HFValidationError:
        raise _error("hub-name-invalid", where, "is neither a folder here nor a hub id", name) from None
    except GatedRepoError:
        page = f"https://huggingface.co/{name}"
        remedy = f"Accept its licence at {page} and set HF_TOKEN to a token that may read it."
        raise _error("hub-model-gated", where, "the hub refuses access to this gated model", name, remedy) from None
    except RepositoryNotFoundError:
        remedy = "Check the name; for a private model set HF_TOKEN."
        raise _error(
            "hub-model-not-found", where, "is neither a folder here nor a model on the hub", name, remedy
        ) from None
    except LocalEntryNotFoundError:
        remedy = "Give a local folder, or run once with a connection (HF_HUB_OFFLINE unset) to fill the cache."
        raise _error(
            "hub-not-reached",
            where,
            "is not a folder here, not in the hub's cache, and the hub cannot be reached",
            name,
            remedy,
        ) from None
    except EntryNotFoundError:
        raise _error("hub-model-without-config", where, "this model on the hub has no config.json", name) from None
    except OSError as error:
        raise _error("hub-not-readable", where, f"the hub could not be read: {error}", name) from None


def _error(code: str, where: str, problem: str, seen: str, remedy: str = "") -> SpecError:
    return SpecError([Issue(code, where, problem, seen, remedy)])
