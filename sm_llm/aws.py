"""Sessions of AWS's SDK, for stores and backends alike."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

from sm_llm.errors import SubmitError
from sm_llm.optional import missing


def fresh_session() -> Any:
    """A botocore session that reads credentials anew; what AWS's services understand is read once per process."""
    import botocore.session

    session = botocore.session.get_session()
    # A loader caches the models that it has read, but each session would make a loader of its own.
    session.register_component("data_loader", _loader(os.environ.get("AWS_DATA_PATH")))
    return session


@lru_cache
def _loader(data_path: str | None) -> Any:
    """Botocore's reader of service models: most of what another client would cost."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


def need_aws() -> None:
    """Raise ``SubmitError`` where boto3 is not installed: nothing of AWS can be asked or read then."""
    if (lack := missing("boto3", "botocore")) is not None:
        raise SubmitError(f"AWS: {lack}")
