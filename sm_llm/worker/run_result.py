"""Addresses below a run's result: ``RUN/result/train`` is what the run has published, wherever in it that lies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.storage.layout import FINAL
from sm_llm.storage.publish import find_final
from sm_llm.storage.uri import join, open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

_RESULT = re.compile(r"(?P<run>s3://.+?)/result(?:/(?P<rest>.*))?")
"""In a folder the name is a link; S3 has none."""


def result_address(uri: str, options: Mapping[str, Any]) -> str:
    """The address of the files that ``uri`` means; itself, unless it lies below the result of a run.

    Raises ``StorageError`` for a run that has not published a result, ``CheckpointError`` for a damaged one.
    """
    match = _RESULT.fullmatch(uri.rstrip("/"))
    if match is None:
        return uri
    store = open_store(match["run"], options)
    if store.head("run.json") is None and store.head(FINAL.commit_key) is None:
        return uri  # a folder that happens to have this name
    commit = find_final(store)
    if commit is None:
        raise StorageError(f"{uri}: the run has not published a result")
    return join(match["run"], commit.save.data_prefix.rstrip("/"), match["rest"] or "")
