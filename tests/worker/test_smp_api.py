"""Everything that runs in the SMP image uses of torch and transformers what torch 2.5.1 and transformers 4.44.2 have.

The golden file was made there by ``tests/golden/torch251_api.py``; run that again once a new symbol is used.
"""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from tests.golden.torch251_api import GOLDEN, modules, scan

REMEDY = "not known of torch 2.5.1: run tests/golden/torch251_api.py there; what it lacks cannot be used on this path"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    assert found["versions"] == {"torch": "2.5.1", "transformers": "4.44.2"}
    return found


def test_every_symbol_and_keyword_of_the_smp_path_is_in_the_image(golden: dict[str, Any]) -> None:
    used = scan()
    assert len(used) > 80
    unknown = [symbol for symbol in used if golden["symbols"].get(symbol) is None]
    assert not unknown, REMEDY
    refused = {}
    for symbol, keywords in used.items():
        taken = golden["symbols"][symbol]["keywords"]
        if taken is not None and (surplus := keywords - set(taken)):
            refused[symbol] = surplus
    assert not refused, REMEDY


def test_what_is_read_of_flat_parameters_is_there(golden: dict[str, Any]) -> None:
    tree = modules()["sm_llm.worker.strategies.smp.shards"]
    private = {it.attr for it in ast.walk(tree) if isinstance(it, ast.Attribute) and it.attr.startswith("_")}
    ours = {"_handle"}  # of FSDP's modules, set by its initialisation
    assert private - ours <= set(golden["fields"]["FlatParameter"])
    assert {"_params", "_shapes", "_shard_param_infos"} <= private
    assert {"intra_param_start_idx", "intra_param_end_idx"} <= set(golden["fields"]["_ShardParamInfo"])


def test_the_scan_sees_symbols_keywords_and_modules() -> None:
    used = scan()
    assert "use_orig_params" in used["torch.distributed.fsdp.FullyShardedDataParallel"]
    assert "attn_implementation" in used["transformers.AutoModelForCausalLM.from_config"]
    names = modules()
    assert "sm_llm.worker.checkpoint.checkpoint" in names
    assert "sm_llm.worker.strategies.smp.model" in names
    assert not [name for name in names if name.startswith("sm_llm.worker.strategies.fsdp.strategy")]
