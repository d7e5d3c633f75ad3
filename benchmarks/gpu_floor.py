"""The floor of a training step in bf16: its matrix products, attention and memory traffic alone, on one GPU.

What a step of a setting cannot go below with cuBLAS, torch's attention and this card's memory, however the rest is
written: kernels run one after the other without a framework around them, for long enough that the card is at its limit
of power. Communication is taken to cost nothing.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from gpu_settings import SETTINGS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sm_llm.models.config import model_config
from sm_llm.models.families.table import family

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_settings import Setting

DTYPE = torch.bfloat16
OPTIMISER_BYTES = 28
"""Of a parameter: AdamW reads and writes master and moments in fp32, reads the gradient and writes the weight."""


def products(config: dict[str, Any]) -> Counter[tuple[int, int]]:
    """(outputs, inputs) of the model's linear layers -> how many; the head among them, also where it is tied."""
    kind = family(config)
    found: Counter[tuple[int, int]] = Counter()
    for name, tensor in kind.tensors(config).items():
        if ".layers." in name and len(tensor.shape) == 2:
            found[tensor.shape[0], tensor.shape[1]] += 1
    found[kind.vocab_size(config), int(config["hidden_size"])] += 1
    return found


def elements(config: dict[str, Any]) -> int:
    """Per token and layer of a Llama: what its elementwise parts read and write, each tensor once.

    Forward: two norms, one with a residual (6 h), rotary embedding (2 (q + k)), SwiGLU (3 f). Backward: 8 h for norms
    and residuals, 2 (q + k), 5 f.
    """
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    head = family(config).head_dim(config)
    rotated = head * (int(config["num_attention_heads"]) + int(config["num_key_value_heads"]))
    return 14 * hidden + 4 * rotated + 8 * inner


class Floor:
    """The parts of a step of one setting on one device."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self.config = model_config(preset=setting.preset, path=None, pretrained=None, overrides=setting.config)
        self.rows, self.length, self.device = setting.batch, setting.seq_length, device
        self.tokens = setting.batch * setting.seq_length
        self.gpus = setting.gpus
        self.layers = int(self.config["num_hidden_layers"])

    def multiply(self) -> Callable[[], None]:
        """All products of forward and backward pass: of inputs, of gradients, and for gradients of weights."""
        operands = [
            (
                self._random(self.tokens, inputs),
                self._random(outputs, inputs),
                self._random(self.tokens, outputs),
                count,
            )
            for (outputs, inputs), count in products(self.config).items()
        ]

        def run() -> None:
            for given, weight, gradient, count in operands:
                for _ in range(count):
                    given @ weight.T
                    gradient @ weight
                    gradient.T @ given

        return run

    def attend(self) -> Callable[[], None]:
        """Causal attention of all layers, forward and backward."""
        head = family(self.config).head_dim(self.config)
        heads, shared = int(self.config["num_attention_heads"]), int(self.config["num_key_value_heads"])
        query, key, value = (
            self._random(self.rows, count, self.length, head).requires_grad_() for count in (heads, shared, shared)
        )
        gradient = self._random(self.rows, heads, self.length, head)

        def run() -> None:
            # As the worker lets torch choose on such cards.
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], True):
                for _ in range(self.layers):
                    result = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
                    torch.autograd.grad(result, (query, key, value), gradient)

        return run

    def move(self) -> Callable[[], None]:
        """As many bytes read and written as the optimiser's, of a shard, and the elementwise parts of all layers."""
        parameters = sum(it.size for it in family(self.config).tensors(self.config).values())
        size = OPTIMISER_BYTES * parameters // self.gpus
        size += DTYPE.itemsize * elements(self.config) * self.layers * self.tokens
        block = torch.empty(min(size // 2, 1 << 30), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(block)

        def run() -> None:
            for _ in range(max(1, round(size / 2 / block.numel()))):
                target.copy_(block)

        return run

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=DTYPE, device=self.device)


def timed(run: Callable[[], None], seconds: float, device: torch.device) -> float:
    """Seconds of one call, in as many as fill ``seconds``, after one that is not counted."""
    module = torch.get_device_module(device)
    run()
    module.synchronize()
    count, begin = 0, time.perf_counter()
    while True:
        run()
        module.synchronize()
        count += 1
        if (taken := time.perf_counter() - begin) >= seconds:
            return taken / count


def main(options: argparse.Namespace) -> None:
    """Print a table: what each part takes, and the tokens/s if they were all there is."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(
        "| setting | products ms | attention ms | memory ms | floor ms | tokens/s per GPU |\n|---|---|---|---|---|---|"
    )
    for name in options.settings:
        floor = Floor(SETTINGS[name], device)
        parts = [timed(part(), options.seconds, device) * 1e3 for part in (floor.multiply, floor.attend, floor.move)]
        numbers = " | ".join(f"{it:.1f}" for it in [*parts, sum(parts)])
        print(f"| {name} | {numbers} | {floor.tokens / sum(parts) * 1e3:,.0f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+", choices=SETTINGS, metavar="SETTING", help="of gpu_train.py --list")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each part")
    main(parser.parse_args())
