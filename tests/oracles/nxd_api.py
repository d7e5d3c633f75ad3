"""Writes what the public training API of neuronx-distributed takes, release by release, to a golden file.

    git clone https://github.com/aws-neuron/neuronx-distributed
    git clone --filter=blob:none https://github.com/pytorch/xla
    python -m tests.oracles.nxd_api neuronx-distributed xla

The sources are parsed, not imported, so neither library need be installed. ``tests/worker/test_nxd_api.py`` holds the
contract double and everything that the strategy calls against the file that this writes.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "nxd_api.json"
RELEASES = {"2.28.0": "v2.28.0", "2.29.0": "fbac349"}
"""SDK release -> commit of neuronx-distributed. The repository has no later one; 2.29's has no tag."""
XLA = "v2.9.0"

_STATE = (
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "destroy_model_parallel",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "get_data_parallel_replica_groups",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_size",
    "get_context_model_parallel_size",
    "get_kv_shared_group",
    "get_kv_shared_group_size",
    "initialize_kv_group",
)
_MAPPINGS = (
    "copy_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
)
SYMBOLS = {
    "trainer/trainer.py": (
        "neuronx_distributed_config",
        "initialize_parallel_model",
        "initialize_parallel_optimizer",
    ),
    "trainer/checkpoint.py": ("save_checkpoint", "load_checkpoint", "has_checkpoint", "finalize_checkpoint"),
    "trainer/model.py": ("NxDModel",),
    "trainer/optimizer.py": ("NxDOptimizer",),
    "optimizer/zero_redundancy_optimizer.py": ("NeuronZero1Optimizer",),
    "pipeline/model.py": ("NxDPPModel",),
    "parallel_layers/layers.py": ("ColumnParallelLinear", "RowParallelLinear", "ParallelEmbedding"),
    "parallel_layers/loss_functions.py": ("parallel_cross_entropy",),
    "parallel_layers/mappings.py": _MAPPINGS,
    "parallel_layers/parallel_state.py": _STATE,
    "modules/qkv_linear.py": ("GQAQKVColumnParallelLinear",),
    "kernels/flash_attn.py": ("nki_flash_attn_func",),
}
"""File of the package -> its functions and classes."""
XLA_SYMBOLS = {
    "core/xla_model.py": ("xla_device", "mark_step"),
    "distributed/zero_redundancy_optimizer.py": ("ZeroRedundancyOptimizer",),
    "utils/checkpoint.py": ("checkpoint",),
    "utils/serialization.py": ("TensorReference",),
}


def described(checkout: Path, commit: str, root: str, wanted: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Dotted name -> parameters of every wanted symbol; of a class also those of its public methods."""
    found: dict[str, str] = {}
    package = Path(root).name
    for file, names in wanted.items():
        module = f"{package}.{file.removesuffix('.py').replace('/', '.')}"
        tree = ast.parse(_source(checkout, commit, f"{root}/{file}"))
        definitions = {it.name: it for it in tree.body if isinstance(it, ast.FunctionDef | ast.ClassDef)}
        for name in names:
            node = definitions[name]
            if isinstance(node, ast.FunctionDef):
                found[f"{module}.{name}"] = _signature(node)
                continue
            methods = [it for it in node.body if isinstance(it, ast.FunctionDef)]
            for method in methods:
                if method.name == "__init__":
                    found[f"{module}.{name}"] = _signature(method, is_method=True)
                elif not method.name.startswith("_") and not _is_setter(method):
                    found[f"{module}.{name}.{method.name}"] = _signature(method, is_method=True)
    return found


def _source(checkout: Path, commit: str, path: str) -> str:
    command = ["git", "-C", str(checkout), "show", f"{commit}:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _is_setter(method: ast.FunctionDef) -> bool:
    return any(isinstance(it, ast.Attribute) and it.attr == "setter" for it in method.decorator_list)


def _signature(function: ast.FunctionDef, *, is_method: bool = False) -> str:
    """Its parameters as they are written, without annotations and without ``self``."""
    arguments = function.args
    for it in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if it is not None:
            it.annotation = None
    if is_method and not any(isinstance(it, ast.Name) and it.id == "staticmethod" for it in function.decorator_list):
        del arguments.args[0]
    return ast.unparse(arguments)


def main(nxd: Path, xla: Path) -> int:
    releases = {}
    for release, commit in RELEASES.items():
        version = _source(nxd, commit, "src/neuronx_distributed/_version.py").rpartition("=")[2].strip().strip('"')
        symbols = described(nxd, commit, "src/neuronx_distributed", SYMBOLS)
        releases[release] = {"commit": commit, "neuronx_distributed": version, "symbols": symbols}
    golden = {
        "releases": releases,
        "torch_xla": {"commit": XLA, "symbols": described(xla, XLA, "torch_xla", XLA_SYMBOLS)},
    }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    print({release: len(it["symbols"]) for release, it in releases.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
