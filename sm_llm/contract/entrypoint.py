"""The text of every entrypoint script: one template for the checkout, the bundle and the run's folder."""

from __future__ import annotations

from sm_llm.spec.tasks import TASK_KINDS

_TEMPLATE = '''"""Entry point of {kind} jobs: everything it needs to know is in job.json."""

from sm_llm.contract.bootstrap import install_missing

install_missing(__file__)

from sm_llm.worker.main import program  # noqa: E402 - it needs what has just been installed

if __name__ == "__main__":  # helper processes that are spawned import this file again
    raise SystemExit(program("{kind}"))
'''


def entrypoint_source(kind: str) -> str:
    """The script ``<kind>.py``. Raises ``ValueError`` for a kind that no task has."""
    if kind not in TASK_KINDS:
        raise ValueError(f"no task kind {kind!r}; there are {', '.join(TASK_KINDS)}")
    return _TEMPLATE.format(kind=kind)
