"""SageMaker Pipelines from workflows: render, build with the SDK, create or update, start, watch, stop.

::

    from sm_llm import pipelines

    pipelines.definition("flow.yaml", variables={"Steps": "steps.train.task.max_steps"})   # a value, without the SDK
    pipelines.upsert("flow.yaml"); pipelines.start("flow", {"Steps": 100})
    pipelines.build_pipeline("flow.yaml")                                                   # the SDK's own object
"""

from __future__ import annotations

from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_definition import Register
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import (
    StepState,
    definition,
    logs,
    start,
    status,
    stop,
    upsert,
)
from sm_llm.launcher.backends.sagemaker.sdk.pipeline_sdk import build_pipeline

__all__ = ["Register", "StepState", "build_pipeline", "definition", "logs", "start", "status", "stop", "upsert"]
