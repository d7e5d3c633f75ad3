"""The strategy ``nxd``: neuronx-distributed on Trainium."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from sm_llm.errors import Issue
from sm_llm.spec.parallelism.base import Capabilities, Degrees, StrategySpec, TrainingFacts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.machines.hardware import Instance


class NxdSpec(StrategySpec):
    """NxD: tensor and pipeline parallelism on NeuronCores, optimiser state sharded over data-parallel ranks.

    World size = tensor_parallel_degree x pipeline_parallel_degree x data-parallel degree.
    """

    strategy: Literal["nxd"] = "nxd"
    """The training engine."""
    tensor_parallel_degree: int = Field(default=8, ge=1, le=65_536)
    """NeuronCores that share each layer's matrices."""
    pipeline_parallel_degree: int = Field(default=1, ge=1, le=65_536)
    """Stages that the layers are divided into."""
    virtual_pipeline_degree: int = Field(default=1, ge=1, le=65_536)
    """Parts of the layers that each stage holds (interleaved schedule)."""
    kv_size_multiplier: int | None = Field(default=None, ge=1, le=65_536)
    """Copies of each key/value head; null derives tensor_parallel_degree / kv heads where that is more than 1."""
    sequence_parallel: bool = True
    """Divide activations between the tensor-parallel regions along the sequence."""
    zero1: bool = True
    """Shard the optimiser state over data-parallel ranks (ZeRO-1)."""
    fuse_qkv: bool = True
    """One matrix for query, key and value; converted checkpoints must have been made with the same."""
    flash_attention: bool = True
    """NKI flash attention."""
    activation_checkpointing: Literal["none", "selective", "full"] = "selective"
    """``selective`` recomputes attention, ``full`` every decoder layer."""
    meta_device_initialization: bool = True
    """Build the model without memory first."""
    compile_cache: str | None = None
    """Folder or S3 prefix of compiled graphs; null keeps them beside the runs, shared by all of them."""

    can: ClassVar = Capabilities(
        train=False, compiles_layers=False, takes_any_shape=False, compiles_ahead=True, reach_programs=True
    )
    image_stack: ClassVar = "neuron"

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.tensor_parallel_degree, pipeline=self.pipeline_parallel_degree)

    def training_issues(self, training: TrainingFacts) -> Iterator[Issue]:
        yield from super().training_issues(training)
        if training.micro_batch_size != 1:
            problem = "neuronx-distributed trains with micro-batches of one sequence only"
            yield Issue(
                "nxd-micro-batch-not-one",
                "task.micro_batch_size",
                problem,
                training.micro_batch_size,
                "Use 1 and raise global_batch_size",
            )

    def instance_issues(self, machine: Instance, where: str) -> Iterator[Issue]:
        if not machine.is_neuron:
            yield Issue(
                "nxd-needs-trainium",
                where,
                "nxd runs on Trainium only",
                machine.name,
                "Use ml.trn1.32xlarge, or strategy fsdp",
            )

    def head_issues(self, machine: Instance, key_value_heads: int) -> Iterator[Issue]:
        """On Trn2, NxD's converter and its ranks disagree about where copied key/value heads are."""
        degree = self.tensor_parallel_degree
        if machine.family.startswith("trn2") and degree > key_value_heads:
            problem = f"more than the {key_value_heads} key/value heads, which NxD would copy, wrongly so on Trn2"
            remedy = f"Use at most {key_value_heads} on {machine.name}"
            yield Issue("trn2-degree-too-large", "task.parallelism.tensor_parallel_degree", problem, degree, remedy)

    def memory(self) -> None:
        """None: the estimate counts what a GPU holds."""
