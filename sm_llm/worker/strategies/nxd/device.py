"""A NeuronCore as the loop sees it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from sm_llm.worker.device import LAG_STEPS, HostGenerator
from sm_llm.worker.strategies.nxd import library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from sm_llm.worker.process_info import ProcessInfo

_NAMES = {"trn1": "Trainium", "trn2": "Trainium2"}


class NeuronDevice(HostGenerator):
    """The NeuronCore of this process (``Device``).

    XLA records operations and compiles them as a graph, which is compiled again when a shape or a constant in it
    changes. So numbers are copied to the host one by one, and put together there.
    """

    type = "xla"
    lag_steps = LAG_STEPS

    @cached_property
    def torch_device(self) -> torch.device:
        """Known once the process group is made, which gives each process its cores."""
        return library.device()

    @property
    def counts(self) -> torch.device:
        """The device: the default group has no other collectives."""
        return self.torch_device

    @cached_property
    def name(self) -> str:
        """The accelerator's name in ``spec.machines.hardware``."""
        return _NAMES.get(library.platform(), library.platform())

    def computes_bf16(self) -> bool:
        return True

    def computes_fp8(self) -> bool:
        """NxD's layers have no fp8 for training."""
        return False

    def copy_obstacle(self, devices: int, *, is_asked_for: bool) -> str:
        return "NxD has collectives of its own"

    def send(self, values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values).to(self.torch_device)

    def scalars(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        # Stacked on the device they would be a graph of their own for every number of values.
        return torch.tensor([float(it) for it in values], dtype=torch.float64).to(self.torch_device)

    def read_later(self, value: torch.Tensor) -> Callable[[], float]:
        return value.item

    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        for buffer, tensor in pairs:
            buffer.copy_(tensor, non_blocking=True)
        self.wait()
        return lambda: None

    def after_copies(self) -> None:
        """Copies are complete when ``copy_out`` returns."""

    def host_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu")

    def wait(self) -> None:
        # XLA runs nothing before its graph is cut.
        library.cut_graph(wait=True)

    @property
    def total_memory(self) -> None:
        """None: nothing is chosen by it, since the strategy for Neuron leaves no setting open."""
        return None

    def peak_memory(self) -> None:
        """None: the runtime reports none to a program."""


def neuron_core(process: ProcessInfo) -> NeuronDevice:
    """The NeuronCore of this process. Raises ``RunFailed`` where the image is not one that trains."""
    # Before anything else is imported: packages of several releases fail later, and in other words.
    library.check_release()
    return NeuronDevice()
