"""What CloudWatch reads from the training line: the same definitions on every path to a training job."""

from __future__ import annotations

_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|[-+]?inf)(?![\w,.])"
"""Exponents whole, and what a run that has gone wrong prints. Rather nothing than a part of ``1,234.5``."""

METRICS: dict[str, str] = {
    "train:loss": rf"\bLoss: {_NUMBER}",
    "train:tokens_per_second_per_device": rf"\| {_NUMBER} tokens/s/device",
    "train:mfu_percent": rf"\bMFU {_NUMBER}%",
    "train:grad_norm": rf"\bgrad norm {_NUMBER}",
    "train:learning_rate": rf"\blr {_NUMBER}",
    "train:data_wait_seconds": rf"\bdata wait {_NUMBER} s",
    "train:step": r"\bstep (\d+)/\d+",
    "validation:loss": rf"\bvalidation loss {_NUMBER}",
}
"""Name -> regular expression with one group. The events in the run's folder hold the exact numbers."""
VALIDATION = "validation:loss"
BETTER: dict[str, str] = {
    "train:loss": "Minimize",
    "train:tokens_per_second_per_device": "Maximize",
    "train:mfu_percent": "Maximize",
    "train:grad_norm": "Minimize",
    "train:data_wait_seconds": "Minimize",
    VALIDATION: "Minimize",
}
"""Metric -> the direction in which a tuning job improves it; the other metrics are not outcomes."""


def metric_definitions() -> list[dict[str, str]]:
    """The definitions as the service takes them."""
    return [{"Name": name, "Regex": regex} for name, regex in METRICS.items()]
