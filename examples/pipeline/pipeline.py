"""A SageMaker Pipeline written by hand: two training steps of the SageMaker SDK, made by ``sm_llm.estimator``.

The first packs text into rows, the second trains on them. A workflow file does the same without the SDK
(``sm-llm fit flow.yaml backend.name=sagemaker``); write the pipeline by hand to put steps of other kinds beside ours.
Needs ``pip install 'sm_llm[sagemaker]'`` and, for the last two lines, an AWS account.
"""

from __future__ import annotations

from typing import Any

import boto3
from sagemaker.inputs import TrainingInput
from sagemaker.workflow.parameters import ParameterFloat
from sagemaker.workflow.pipeline import Pipeline
from sagemaker.workflow.pipeline_context import PipelineSession
from sagemaker.workflow.steps import CacheConfig, TrainingStep

import sm_llm

BUCKET = "my-bucket"
BACKEND = {
    "name": "sagemaker",
    "role": "arn:aws:iam::123456789012:role/SageMaker",
    "region": "us-west-2",
    "max_run_seconds": 86_400,
}
PREPARE = {
    "kind": "prepare",
    "sources": [f"s3://{BUCKET}/text/"],
    "seq_length": 2048,
    "train_tokenizer": {"vocab_size": 32_000},
}
TRAIN = {
    "kind": "train",
    "model": {"preset": "llama-2-7b"},
    "tokenizer": "inputs.prepared/tokenizer",
    "data": {"format": "rows", "train": "inputs.prepared/train", "seq_length": 2048},
    "max_steps": 1000,
}


def job(name: str, task: dict[str, Any], instance_type: str, **more: Any) -> dict[str, Any]:
    """The specification of one step."""
    compute = {"instance_type": instance_type, "instance_count": 1}
    return {
        "name": name,
        "task": task,
        "compute": compute,
        "backend": BACKEND,
        "storage": f"s3://{BUCKET}/runs",
        **more,
    }


def build(session: PipelineSession) -> Pipeline:
    """The pipeline; code and job files are stored in S3 when its definition is made."""
    rate = ParameterFloat("LearningRate", 3e-4)
    cache = CacheConfig(enable_caching=True, expire_after="P30D")
    prepare = sm_llm.estimator(job("prepare", PREPARE, "ml.m5.4xlarge"), sagemaker_session=session)
    first = TrainingStep("Prepare", step_args=prepare.fit(), cache_config=cache)

    train = sm_llm.estimator(
        job("train", TRAIN, "ml.p5.48xlarge", inputs={"prepared": f"s3://{BUCKET}/runs"}),
        sagemaker_session=session,
        hyperparameters={"task.optim.learning_rate": rate},
    )
    prepared = TrainingInput(prepare.result_uri, input_mode="FastFile")
    second = TrainingStep("Train", step_args=train.fit({"prepared": prepared}), cache_config=cache, depends_on=[first])
    return Pipeline("pretrain", parameters=[rate], steps=[first, second], sagemaker_session=session)


if __name__ == "__main__":
    region = boto3.session.Session(region_name=BACKEND["region"])
    pipeline = build(PipelineSession(region, default_bucket=BUCKET))
    pipeline.upsert(role_arn=BACKEND["role"])
    print(pipeline.start(parameters={"LearningRate": 1e-4}).arn)
