"""neuronx-distributed on Trainium: tensor and pipeline parallelism, sequence parallelism, ZeRO-1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from sm_llm.errors import CheckpointError
from sm_llm.worker.device import DTYPES
from sm_llm.worker.inputs.space import own_bytes
from sm_llm.worker.parameter_names import with_plain_names
from sm_llm.worker.strategies.nxd import library, tagged
from sm_llm.worker.strategies.nxd.model import CoreAttention, DecoderLayer, LossSum, Mlp, NxdLlama, RmsNorm, shape_of
from sm_llm.worker.strategies.nxd.optimizer import ShardedAdamW
from sm_llm.worker.strategies.nxd.shards import RankShards
from sm_llm.worker.training.optim import MOMENTS, set_learning_rate
from sm_llm.worker.training.token_loss import IGNORED, next_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Literal

    from sm_llm.data.source import Batch
    from sm_llm.spec.parallelism.nxd import NxdSpec
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.worker.device import Device
    from sm_llm.worker.process_info import ProcessInfo
    from sm_llm.worker.strategies.weights import WeightReader

# From here on selective checkpointing computes the feed-forward block again as well, as AWS's scripts do.
_LONG_SEQUENCE = 8192


class NxdStrategy:
    """NxD (``Strategy``). Parameters have NxD's own names and shapes on every rank, so any of its shards fits.

    Every process fills in its own part of Hugging Face weights, whatever the degrees: nothing need be converted before.
    NxD writes checkpoints (``CheckpointLibrary``): each process's part, bound to the degrees (``refusal``).

    XLA compiles a graph for each shape, so all batches have one: incomplete ones are filled up with rows that do not
    count.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, task: TrainTask, process: ProcessInfo, device: Device) -> None:
        self.device = device
        self._task = task
        self._nxd = cast("NxdSpec", task.parallelism)
        self._process = process
        self._compute = DTYPES[task.precision.compute]
        self._owns_group = False
        self.layout = self._nxd.layout(process.world_size)
        self.data_parallel_rank = self.layout.data_rank(process.rank)

    def setup(self) -> None:
        self._owns_group = library.start_process_group()
        self._config = library.configure(
            tensor_parallel_size=self._nxd.tensor_parallel_degree,
            pipeline_parallel_size=self._nxd.pipeline_parallel_degree,
            pipeline_config=self._pipeline(),
            optimizer_config={"zero_one_enabled": self._nxd.zero1, "grad_clipping": False},
            sequence_parallel=self._nxd.sequence_parallel,
            lnc_size=library.logical_cores(),
            activation_checkpoint_config=self._checkpointed(),
            model_init_config=self._initialisation(),
            mixed_precision_config={
                "use_master_weights": self._nxd.zero1,
                "use_fp32_grad_acc": self._nxd.zero1 and self._task.precision.reduce == "fp32",
                "use_master_weights_in_ckpt": False,
            },
        )
        self.data_parallel_rank = library.rank_of("data")
        self._tensor_rank, self._stage = library.rank_of("tensor_model"), library.rank_of("pipeline_model")
        # The default group moves tensors of the device alone; places and exported slices are the host's.
        self._host_group = dist.new_group(backend="gloo")
        positions: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(positions, (self._tensor_rank, self._stage), group=self._host_group)
        # The first process of a place: NxD arranges those of a node in another way for some degrees.
        self._ranks = {position: rank for rank, position in reversed(list(enumerate(positions)))}

    @property
    def _is_pipeline(self) -> bool:
        return self.layout.pipeline > 1

    @property
    def _rows(self) -> int:
        """Rows that the engine gets at a time: a micro-batch, or all those of a step where they pass through stages."""
        size = self._task.micro_batch
        # A pipeline splits the rows of a step into micro-batches itself.
        if not self._is_pipeline or self._task.global_batch_size is None:
            return size
        return self._task.global_batch_size // self.layout.data

    def _pipeline(self) -> dict[str, Any] | None:
        """How NxD cuts the model and runs its stages: it traces what is around the layers, and not what is in them."""
        if not self._is_pipeline:
            return None
        return {
            "transformer_layer_cls": DecoderLayer,
            "leaf_module_cls": [RmsNorm.__name__, LossSum.__name__],
            "input_names": ["input_ids", "targets", "scale"],
            "num_microbatches": self._rows // self._task.micro_batch,
            "virtual_pipeline_size": self._nxd.virtual_pipeline_degree,
            "auto_partition": True,
            "output_loss_value_spec": True,
            "return_loss_on_cpu": False,
            "use_zero1_optimizer": self._nxd.zero1,
            "use_optimizer_wrapper": True,
        }

    def _checkpointed(self) -> list[type[torch.nn.Module]] | None:
        """Modules that the backward pass computes again."""
        kind = self._nxd.activation_checkpointing
        if kind == "full":
            return [DecoderLayer]
        chosen: list[type[torch.nn.Module]] = []
        if kind == "selective" and not self._nxd.flash_attention:
            chosen.append(CoreAttention)
        if kind == "selective" and self._task.data.seq_length >= _LONG_SEQUENCE:
            chosen.append(Mlp)
        return chosen or None

    def _initialisation(self) -> dict[str, Any] | None:
        if not self._nxd.meta_device_initialization:
            return None
        return {"meta_device_init": True, "param_init_fn": self._fill_module}

    def refusal(self, saved: Mapping[str, Any]) -> str | None:
        now = self.layout.degrees()
        # ZeRO-1 splits optimiser state over data-parallel processes; without it each of them has the whole.
        kept = ["tensor_parallel_degree", *(["data_parallel_degree"] if self._nxd.zero1 else [])]
        changes = [f"{it} {saved[it]} -> {now[it]}" for it in kept if saved.get(it, now[it]) != now[it]]
        stages = saved.get("pipeline_parallel_degree", 1)
        if stages != self.layout.pipeline:
            changes.append(f"pipeline_parallel_degree {stages} -> {self.layout.pipeline}")
        if not changes:
            return None
        return (
            f"NxD's checkpoints hold each process's own part and cannot be resharded ({', '.join(changes)}). Keep "
            "these degrees, or start a new run from a published model (start.pretrained)"
        )

    def build(self, config: Mapping[str, Any], weights: WeightReader | None) -> None:
        self._config_of_model = config
        order = cast("Literal['trn1', 'trn2']", library.platform())
        self._shards = RankShards(config, self._nxd, order, self._tensor_rank, self._stage)
        self._weights = weights
        shape = shape_of(
            config,
            tensor=self._nxd.tensor_parallel_degree,
            sequence_parallel=self._nxd.sequence_parallel,
            fuse_qkv=self._nxd.fuse_qkv,
            flash_attention=self._nxd.flash_attention,
            dtype=self._compute,
        )

        def make() -> torch.nn.Module:
            model = NxdLlama(shape, config, tied=bool(config.get("tie_word_embeddings")))
            if not self._nxd.meta_device_initialization:
                for module in model.modules():
                    self._fill_module(module, torch.device("cpu"))
            return model

        self._model = library.make_model(self._config, make)
        self._parameters = with_plain_names(self._model.named_parameters())
        # The layers are NxD's, the names are derived: a difference would leave parameters without values.
        if apart := sorted(self._parameters.keys() ^ self._shards.tensors.keys()):
            raise CheckpointError(f"NxD's layers and the model's shards differ in {', '.join(apart)}")
        self._nxd_optimizer = library.make_optimizer(
            self._config,
            ShardedAdamW,
            [self._group(name, it) for name, it in self._parameters.items()],
            lr=self._task.optim.learning_rate,
            betas=self._task.optim.betas,
            eps=self._task.optim.eps,
        )
        self.optimizer = library.base_optimizer(self._nxd_optimizer)

    @torch.no_grad()
    def _fill_module(self, module: torch.nn.Module, device: torch.device) -> None:
        """Give a module's own parameters their values: NaN where a checkpoint brings them."""
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{module.own_name}.{name}"
            if full not in self._shards.tensors:
                continue  # of another stage, or the token table under its second name
            # See ``strategies.model.materialise``: NaN cannot go unnoticed.
            if self._weights is None:
                parameter.fill_(torch.nan)
            else:
                self._shards.fill(full, parameter, self._weights)

    def _group(self, name: str, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """An optimiser group of one parameter, because what its elements count in the norm is its own."""
        optim = self._task.optim
        decay = optim.weight_decay if self._shards.is_decayed(name, optim) else 0.0
        return {"params": [parameter], "weight_decay": decay, "share": self._share(name, parameter)}

    def _share(self, name: str, parameter: torch.nn.Parameter) -> float | torch.Tensor:
        """See ``ShardedAdamW``. With ZeRO-1 of the rows that this process updates, the last part padded."""
        runs, degree = self._shards.shares(name), self.layout.data
        if not self._nxd.zero1:
            # Every data-parallel process has the same elements, so each counts a part of them.
            runs = [(rows, share / degree) for rows, share in runs]
        if len({share for _, share in runs}) == 1:
            return runs[0][1]
        rows = torch.cat([torch.full((count,), share) for count, share in runs])
        if self._nxd.zero1:
            # ZeRO-1 pads a parameter in the same way before it splits its rows.
            rows = torch.nn.functional.pad(rows, (0, -len(rows) % degree)).chunk(degree)[self.data_parallel_rank]
        return rows.reshape(-1, *[1] * (parameter.dim() - 1)).to(self.device.torch_device)

    def forward_backward(self, micro_batches: Sequence[Batch], scale: torch.Tensor | float) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        # One graph per micro-batch: a graph of the whole step would grow with their number.
        parts = [micro_batches] if self._is_pipeline else [[it] for it in micro_batches]
        for part in parts:
            found = self._model.run_train(**self._inputs(part, scale))
            total += self._sum_of(found)
            library.cut_graph()
        return total

    def _inputs(self, batches: Sequence[Batch], scale: torch.Tensor | float = 1.0) -> dict[str, torch.Tensor]:
        """Token ids, targets and the gradient's factor of some rows, filled up with rows that do not count."""
        ids = torch.cat([torch.as_tensor(it.input_ids) for it in batches])
        labels = torch.cat([torch.as_tensor(it.labels) for it in batches])
        missing = self._rows - len(ids)
        ids = torch.nn.functional.pad(ids, (0, 0, 0, missing))
        labels = torch.nn.functional.pad(labels, (0, 0, 0, missing), value=IGNORED)
        # NxD's pipeline refuses rows on a device: it brings each micro-batch there itself.
        device = torch.device("cpu") if self._is_pipeline else self.device.torch_device
        # A pipeline averages over its micro-batches, what they were scaled by included.
        count = self._rows // self._task.micro_batch if self._is_pipeline else 1
        factor = (torch.as_tensor(scale, dtype=torch.float32).to(device) * count).expand(self._rows)
        return {"input_ids": ids.to(device), "targets": next_tokens(labels).to(device), "scale": factor}

    def _sum_of(self, found: torch.Tensor | None) -> torch.Tensor:
        """The sum of token losses of a pass. A pipeline gives their mean over micro-batches, on its last stage."""
        if found is None:
            return torch.zeros((), device=self.device.torch_device)
        count = self._rows // self._task.micro_batch if self._is_pipeline else 1
        return found.detach() * count

    def update(
        self, learning_rate: float, max_norm: float | None, targets: torch.Tensor | int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        base = cast("ShardedAdamW", self.optimizer)
        set_learning_rate(self._nxd_optimizer, learning_rate)
        base.prepare(learning_rate, max_norm, targets)
        self._nxd_optimizer.step()
        self._nxd_optimizer.zero_grad(set_to_none=True)
        library.cut_graph()
        return base.norm, base.flag

    def evaluate(self, batch: Batch) -> torch.Tensor:
        forward = self._model.run_eval if self._is_pipeline else self._model
        with torch.no_grad():
            found = self._sum_of(forward(**self._inputs([batch])))
        library.cut_graph()
        return found

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        assert not self._is_pipeline, "a pipeline gives losses alone; checked with the specification"
        length, whole = input_ids.shape[1], self._task.data.seq_length
        padded = torch.nn.functional.pad(input_ids, (0, whole - length))  # behind them, where no token attends
        rows = library.whole_vocabulary(self._model(input_ids=padded))
        return (rows.transpose(0, 1) if self._nxd.sequence_parallel else rows)[:, :length]

    def attention(self) -> None:
        """None: NxD's kernels are the compiler's."""

    def collectives(self) -> None:
        """None: the compiler inserts them."""

    def compilation(self) -> None:
        """None: torch.compile has no part in it."""

    def train_mode(self, enabled: bool) -> None:
        """A pipeline's passes do it themselves."""
        if not self._is_pipeline:
            self._model.train(enabled)

    def state_dict(self) -> dict[str, Any]:
        state = self._live()
        if self._nxd.zero1 or self.layout.data == 1:
            return state
        # NxD reads such a part by adding zeros of the other data-parallel ranks to it, which makes 0 of -0.
        return {name: it + 0.0 for name, it in state.items()}

    def _live(self) -> dict[str, torch.Tensor]:
        """This process's part; of ZeRO-1 the shards are the parameters, in fp32."""
        state: dict[str, Any] = {}
        for name, (_, _, shard) in zip(self._parameters, library.shards(self._nxd_optimizer), strict=True):
            state[f"model.{name}"] = shard.detach()
            for moment in MOMENTS:
                state[f"optimizer.{name}.{moment}"] = self.optimizer.state[shard][moment]
        state["optimizer.step"] = cast("ShardedAdamW", self.optimizer).step_count
        return state

    @property
    def _files(self) -> tagged.RankFiles:
        return tagged.RankFiles(
            self._tensor_rank, self._stage, self.data_parallel_rank, self.layout.data, self._nxd.zero1
        )

    def checkpoint_bytes(self) -> int:
        """Weights are spread over a data-parallel group, and without ZeRO-1 the optimiser's state as well."""
        weights = own_bytes(self._parameters)
        state = own_bytes(self._live())
        # Without ZeRO-1 the weights are the state's own.
        return state + weights // self.layout.data if self._nxd.zero1 else state // self.layout.data

    def write_checkpoint(self, folder: Path, step: int) -> None:
        weights = {name: it.detach() for name, it in self._parameters.items()}
        tagged.write(folder, step, weights, self._live(), zero1=self._nxd.zero1)
        if self._process.is_leader:
            degrees, tokenizer = self._shards.degrees, self._task.tokenizer
            tagged.describe(folder, step, self._config_of_model, degrees, self._compute, tokenizer)

    def checkpoint_reads(self, step: int) -> list[str]:
        return self._files.reads(step)

    def read_checkpoint(self, folder: Path, step: int) -> None:
        tagged.read(folder, step, self._live(), zero1=self._nxd.zero1)

    def state_loaded(self) -> None:
        if self._nxd.zero1:
            library.spread_shards(self._nxd_optimizer)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Slices go from process to process over the host's network, one tensor at a time."""
        own = {name: it.detach().to(self._compute) for name, it in self._parameters.items()}
        yield from self._shards.whole_tensors(own, self._host_group, self._ranks)

    def close(self) -> None:
        library.forget_groups()
        if self._owns_group:
            dist.destroy_process_group()
