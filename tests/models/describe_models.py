"""Run as a program under any transformers: what it makes of model folders, as JSON on standard output.

Usage: ``python describe_models.py JOB.json`` with ``{"meta": {name: config},
"moments": {name: config}, "folders": {name: folder}}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]]


def shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Parameter names and shapes in model order, without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def initial_moments(config: dict[str, Any]) -> dict[str, list[float]]:
    """Mean and standard deviation of each parameter as transformers initialises it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return {name: [p.mean().item(), p.std().item()] for name, p in model.named_parameters()}


def load(folder: str) -> dict[str, Any]:
    """Logits of a fixed sequence, the config as this version writes it, and how the weights fitted."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    except (RuntimeError, ValueError) as refusal:
        return {"refusal": str(refusal)}
    with torch.no_grad():
        logits = model.eval()(torch.tensor(IDS)).logits
    theta = getattr(model.config, "rope_theta", None)
    return {
        "logits": logits[0].double().tolist(),
        "missing": sorted(map(str, info["missing_keys"])),
        "unexpected": sorted(map(str, info["unexpected_keys"])),
        "theta": theta if theta is not None else model.config.rope_parameters["rope_theta"],
        "dtype": str(next(model.parameters()).dtype),
        "layer_class": type(model.base_model.layers[0]).__name__,
        "model_class": type(model).__name__,
        "config": json.loads(model.config.to_json_string(use_diff=False)),
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    answer = {
        "version": transformers.__version__,
        "shapes": {name: shapes(config) for name, config in job["meta"].items()},
        "moments": {name: initial_moments(config) for name, config in job["moments"].items()},
        "loaded": {name: load(folder) for name, folder in job["folders"].items()},
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
