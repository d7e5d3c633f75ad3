"""A whole strategy in one module, as CONTRIBUTING.md describes it: options, engine, row; no other module is touched.

Its engine runs the micro-batches of a step at once, as engines with pipelines do, on one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sm_llm.errors import Issue
from sm_llm.spec.parallelism.base import Capabilities, StrategySpec
from sm_llm.spec.parallelism.table import STRATEGIES, StrategyEntry

if TYPE_CHECKING:
    from collections.abc import Iterator


class ExampleSpec(StrategySpec):
    """A model that one process holds whole."""

    strategy: Literal["example"] = "example"
    """The training engine."""

    can: ClassVar = Capabilities(compiles_layers=False)

    def degree_issues(self, world_size: int, node_size: int) -> Iterator[Issue]:
        if world_size > 1:
            yield Issue("example-on-several", "task.parallelism.strategy", "trains on one process", world_size)


class ExampleStrategy:
    """The model of transformers, and AdamW."""

    def __init__(self, task: Any, process: Any, device: Any) -> None:
        self.task, self.process, self.device = task, process, device
        self.layout, self.data_parallel_rank = task.parallelism.layout(process.world_size), 0

    def setup(self) -> None:
        from sm_llm.worker.strategies.fsdp.mesh import start_process_group

        start_process_group(self.device.torch_device, self.process)

    def refusal(self, saved: Any) -> str | None:
        return None

    def build(self, config: Any, weights: Any) -> None:
        from sm_llm.models.families.table import family
        from sm_llm.worker.strategies.model import build_on_meta, materialise, named_parameters
        from sm_llm.worker.training.optim import build_adamw

        self.model = build_on_meta(config)
        materialise(self.model, self.device.torch_device, self.device.torch_device, weights)
        self.parameters = named_parameters(self.model)
        self.optimizer = build_adamw(self.parameters, family(config).parameters(config), self.task.optim)

    def loss_sum(self, batches: Any) -> Any:
        import numpy as np

        from sm_llm.worker.training.token_loss import next_tokens, token_loss_sum

        labels = self.device.send(np.concatenate([it.labels for it in batches]))
        logits = self.logits(self.device.send(np.concatenate([it.input_ids for it in batches])))
        return token_loss_sum(logits, next_tokens(labels))

    def forward_backward(self, micro_batches: Any, scale: Any) -> Any:
        from sm_llm.worker.training.nonfinite_policy import poisoned

        loss = self.loss_sum(micro_batches)
        loss.backward(poisoned(loss, scale))
        return loss.detach().double()

    def update(self, learning_rate: float, max_norm: float | None, targets: Any) -> tuple[Any, Any]:
        import torch

        from sm_llm.worker.training.nonfinite_policy import flag_of
        from sm_llm.worker.training.optim import set_learning_rate

        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_norm or float("inf"))
        flag = flag_of(norm, targets)
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.found_inf = flag.clamp(max=1.0)  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, flag

    def evaluate(self, batch: Any) -> Any:
        return self.loss_sum([batch]).detach()

    def logits(self, input_ids: Any) -> Any:
        return self.model(input_ids=input_ids, use_cache=False).logits

    def attention(self) -> None:
        return None

    def collectives(self) -> None:
        return None

    def compilation(self) -> None:
        return None

    def train_mode(self, enabled: bool) -> None:
        self.model.train(enabled)

    def state_dict(self) -> dict[str, Any]:
        state = {f"model.{name}": it.detach() for name, it in self.parameters.items()}
        for name, parameter in self.parameters.items():
            state |= {f"optimizer.{name}.{key}": it for key, it in self.optimizer.state[parameter].items()}
        return state

    def state_loaded(self) -> None:
        """The state holds the live tensors, and nothing is derived from them."""

    def export_weights(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, it.detach()) for name, it in self.parameters.items())

    def close(self) -> None:
        import torch.distributed

        torch.distributed.destroy_process_group()


STRATEGIES["example"] = StrategyEntry(ExampleSpec, f"{__name__}:ExampleStrategy")
