"""Train large language models from one job specification: on this machine, on Amazon SageMaker and beyond.

::

    import sm_llm

    for step in sm_llm.plan("tiny-local"):       # checked and computed, nothing started
        print(step.summary())
    run = sm_llm.launch("tiny-local", wait=True)  # the same job the command line's ``fit`` starts
    print(run.result)                             # the published Hugging Face folder

Everything here is loaded on first use, so ``import sm_llm`` stays instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sm_llm import pipelines
    from sm_llm.convert.api import convert
    from sm_llm.errors import (
        CheckpointError,
        ConversionError,
        ConversionRefused,
        DataError,
        Issue,
        LaunchRefused,
        PlanError,
        QueryError,
        RunFailed,
        RunNotFound,
        SmLlmError,
        SpecError,
        StorageError,
        StorageRefused,
        SubmitError,
        UsageError,
    )
    from sm_llm.launcher.api import launch, load_spec, prepare
    from sm_llm.launcher.backends.sagemaker.sdk.estimators import distribution, estimator
    from sm_llm.launcher.find_runs import attach, ls
    from sm_llm.launcher.planner import plan
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.run import Run
    from sm_llm.launcher.tools.sync_command import sync
    from sm_llm.launcher.unfinished import UnfinishedRun
    from sm_llm.spec.job import JobSpec, WorkflowSpec
    from sm_llm.storage.hub.hub_fetch import fetch
    from sm_llm.worker.script.calls import log, publish

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConversionError",
    "ConversionRefused",
    "DataError",
    "Issue",
    "JobSpec",
    "LaunchRefused",
    "Plan",
    "PlanError",
    "QueryError",
    "Run",
    "RunFailed",
    "RunNotFound",
    "SmLlmError",
    "SpecError",
    "StorageError",
    "StorageRefused",
    "SubmitError",
    "UnfinishedRun",
    "UsageError",
    "WorkflowSpec",
    "attach",
    "convert",
    "distribution",
    "estimator",
    "fetch",
    "launch",
    "load_spec",
    "log",
    "ls",
    "pipelines",
    "plan",
    "prepare",
    "publish",
    "sync",
]

_DEFINED_IN = {
    "sm_llm.launcher.api": ("launch", "load_spec", "prepare"),
    "sm_llm.launcher.find_runs": ("attach", "ls"),
    "sm_llm.launcher.backends.sagemaker.sdk.estimators": ("distribution", "estimator"),
    "sm_llm.launcher.planner": ("plan",),
    "sm_llm.launcher.planning.plan": ("Plan",),
    "sm_llm.launcher.run": ("Run",),
    "sm_llm.launcher.tools.sync_command": ("sync",),
    "sm_llm.launcher.unfinished": ("UnfinishedRun",),
    "sm_llm.storage.hub.hub_fetch": ("fetch",),
    "sm_llm.spec.job": ("JobSpec", "WorkflowSpec"),
    "sm_llm.worker.script.calls": ("log", "publish"),
}
# Modules that are public as a whole.
_MODULES = {"convert": "sm_llm.convert", "pipelines": "sm_llm.pipelines"}
_MODULE_OF = {name: module for module, names in _DEFINED_IN.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        value: Any = import_module(_MODULES[name])
    else:
        value = getattr(import_module(_MODULE_OF.get(name, "sm_llm.errors")), name)
    # Kept, so that ``__getattr__`` is called once for each name.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
