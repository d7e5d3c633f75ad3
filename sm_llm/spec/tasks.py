"""The task kinds: what a job does once it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from sm_llm.spec.base import Source, SpecModel
from sm_llm.spec.field_classes import (
    BATCH,
    DATA,
    FREE,
    LENGTH,
    OPTIMISER,
    ORDER,
    PLACEMENT,
    PRECISION,
    SCHEDULE,
    START,
    WORK,
)
from sm_llm.spec.parallelism.table import default_options, strategy_spec
from sm_llm.spec.training import (
    CheckpointSpec,
    CheckpointStart,
    DataSpec,
    ModelSpec,
    NotFiniteSpec,
    OptimSpec,
    PretrainedStart,
    ProfileSpec,
    TrackersSpec,
    WatchdogSpec,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.spec.parallelism.base import StrategySpec as Parallelism
else:  # a field's type, made of the table's rows
    Parallelism = strategy_spec()


AUTO = "auto"
CHECKPOINTING = "parallelism.activation_checkpointing"
RESHARD = "parallelism.reshard_after_forward"
MICRO_BATCH = "micro_batch_size"
COMPILE = "precision.compile"
PLAINEST: dict[str, Any] = {MICRO_BATCH: 1, CHECKPOINTING: "none", RESHARD: True, COMPILE: False}
"""Setting that the memory planner may choose, below the task -> its value where nothing is planned: what every machine
and engine can do."""


class PrecisionSpec(SpecModel):
    """Number formats."""

    compute: Literal["auto", "bf16", "fp32", "fp8"] = "auto"
    """Format of the forward and backward pass; ``auto`` is bf16 where the hardware computes it natively, else fp32.
    ``fp8`` is bf16 with the matrix products of the decoder layers in fp8: strategy fsdp, on GPUs since Ada and Hopper,
    best with ``compile``."""
    master: Literal["fp32", "bf16"] = "fp32"
    """Format of the parameters and the optimiser's state between steps. bf16 takes half the memory, but small updates
    are rounded away: for short fine-tuning. Needs compute: bf16."""
    moments: Literal["master", "bf16"] = "master"
    """Format of AdamW's two moments between steps: that of the parameters, or bf16, which takes 4 bytes a parameter
    less than fp32. Each step is computed in fp32 and rounded, so losses differ. Strategy fsdp."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are summed over processes."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile every decoder layer. ``auto``: on a GPU, where the training is long enough to win back the time
    that compilation takes."""
    compiled_graphs: Annotated[Literal["auto", "scratch", "storage"], FREE] = "auto"
    """Where compiled layers are kept for later attempts: on the node alone, or in the run's storage as well. They are
    pickles: whoever can write to that storage can run code in the job. ``auto``: in folders, where the owner is
    checked, and not in S3."""


class ValidationSpec(SpecModel):
    """Loss and perplexity on the validation rows. Of a loss that is NaN or infinite a job warns, and continues."""

    every_steps: int | None = Field(default=None, ge=1, le=10**12)
    """Validate every n steps, and always at the last step; null derives about ten validations a run."""
    max_rows: int | None = Field(default=None, ge=1, le=10**12)
    """Use only the first n rows."""


class LoggingSpec(SpecModel):
    """How often the loop reports."""

    every_steps: int = Field(default=10, ge=1, le=10**12)
    """Read the device's metrics and print a training line every n steps; every step's loss is recorded all the same."""
    sample_prompt: str | None = None
    """Generate a sample from this prompt once training has finished."""
    sample_tokens: int = Field(default=64, ge=1, le=2**24)
    """Tokens of the sample."""
    profile: ProfileSpec | None = None
    """Traces of torch's profiler every n steps, published with the run."""
    sinks: TrackersSpec = Field(default_factory=TrackersSpec)
    """Experiment trackers that get the same numbers."""


class TrainTask(SpecModel):
    """Train a causal language model."""

    kind: Annotated[Literal["train"], WORK] = "train"
    """The task kind."""
    model: ModelSpec = Field(default_factory=ModelSpec)
    """The architecture."""
    tokenizer: Annotated[Source | None, DATA] = None
    """Folder with the tokenizer that made the rows; published with the model, and checked against its vocabulary."""
    data: DataSpec
    """The rows."""
    parallelism: Annotated[Parallelism, PLACEMENT] = Field(default_factory=default_options)
    """The training engine and how it spreads the model."""
    micro_batch_size: Annotated[Annotated[int, Field(ge=1, le=2**20)] | Literal["auto"], PLACEMENT] = "auto"
    """Sequences in one forward pass of one data-parallel rank. ``auto``: on a GPU, the fastest divisor of the rank's
    part of the global batch that fits in memory; else 1."""
    global_batch_size: Annotated[int | None, BATCH] = Field(default=None, ge=1, le=2**31)
    """Sequences in one optimiser step; null means one micro-batch per rank (of one sequence, where its size is
    ``auto``)."""
    max_steps: Annotated[int | None, LENGTH] = Field(default=None, ge=1, le=10**12)
    """Length of training in optimiser steps; exactly one of max_steps, max_tokens, max_epochs."""
    max_tokens: Annotated[int | None, LENGTH] = Field(default=None, ge=1, le=10**18)
    """Length of training in tokens, rounded up to whole steps."""
    max_epochs: Annotated[float | None, LENGTH] = Field(default=None, gt=0, le=1e9)
    """Length of training in passes over the rows, rounded down to whole steps."""
    optim: Annotated[OptimSpec, OPTIMISER] = Field(default_factory=OptimSpec)
    """Optimiser and learning rate."""
    precision: Annotated[PrecisionSpec, PRECISION] = Field(default_factory=PrecisionSpec)
    """Number formats."""
    validation: Annotated[ValidationSpec, SCHEDULE] = Field(default_factory=ValidationSpec)
    """When and on how much to validate."""
    checkpoint: Annotated[CheckpointSpec, FREE] = Field(default_factory=CheckpointSpec)
    """When to save training state, and what to keep."""
    logging: Annotated[LoggingSpec, FREE] = Field(default_factory=LoggingSpec)
    """How often to report, and the sample at the end."""
    not_finite: Annotated[NotFiniteSpec, OPTIMISER] = Field(default_factory=NotFiniteSpec)
    """What happens when a loss or gradient is NaN or infinite."""
    watchdog: Annotated[WatchdogSpec, FREE] = Field(default_factory=WatchdogSpec)
    """When a job that does not get on is ended."""
    start: Annotated[Literal["auto", "scratch"] | PretrainedStart | CheckpointStart, START] = "auto"
    """``auto`` (this run's newest commit, else scratch), ``scratch``, ``pretrained: URI`` or ``checkpoint: URI``."""
    seed: Annotated[int, ORDER] = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of initial weights, data order and dropout."""
    deterministic: Annotated[bool, PRECISION] = False
    """Ask torch for deterministic kernels (bit-identical resume on a GPU; slower)."""

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch. One, which divides every batch, until the planner has chosen."""
        return 1 if self.micro_batch_size == "auto" else self.micro_batch_size


def open_settings(task: TrainTask) -> tuple[str, ...]:
    """Those that ``task`` leaves open."""
    return tuple(name for name in PLAINEST if setting(task, name) == AUTO)


def with_settings(task: TrainTask, values: Mapping[str, Any]) -> TrainTask:
    """``task`` with ``values`` of settings that it leaves open."""
    parallelism = {name.rpartition(".")[2]: it for name, it in values.items() if name in (CHECKPOINTING, RESHARD)}
    changes: dict[str, Any] = {}
    if parallelism:
        changes["parallelism"] = task.parallelism.model_copy(update=parallelism)
    if COMPILE in values:
        changes["precision"] = task.precision.model_copy(update={"compile": values[COMPILE]})
    if MICRO_BATCH in values:
        changes[MICRO_BATCH] = values[MICRO_BATCH]
    return task.model_copy(update=changes) if changes else task


def plainest(task: TrainTask) -> TrainTask:
    """``task`` with the plainest value of whatever it leaves open."""
    values = {name: PLAINEST[name] for name in open_settings(task)}
    # Offloading takes the inputs of layers that are computed again: without any it would have no effect.
    if CHECKPOINTING in values and task.parallelism.memory().offloads_activations:
        values[CHECKPOINTING] = "full"
    return with_settings(task, values)


def settled_compute(task: TrainTask, *, has_bf16: bool) -> TrainTask:
    """``task`` with ``precision.compute: auto`` replaced: bf16 where it is native (or the masters are), else fp32.

    Where bf16 is emulated it is many times slower than fp32: forty times on an x86 CPU without AVX-512.
    """
    precision = task.precision
    if precision.compute != AUTO:
        return task
    compute = "bf16" if has_bf16 or precision.master == "bf16" else "fp32"
    return task.model_copy(update={"precision": precision.model_copy(update={"compute": compute})})


def settings(task: TrainTask) -> dict[str, Any]:
    """The values of all of them."""
    return {name: setting(task, name) for name in PLAINEST}


def setting(task: TrainTask, name: str) -> Any:
    """The value of one of ``PLAINEST``; the plainest where the strategy has no such setting."""
    holder, _, field = name.rpartition(".")
    return getattr(getattr(task, holder) if holder else task, field, PLAINEST[name])


class TrainTokenizer(SpecModel):
    """Train a byte-level BPE tokenizer on the same text."""

    vocab_size: int = Field(default=32_000, ge=257, le=2**31 - 1)
    """Entries, the 256 bytes and the end token among them."""
    end_token: str = "<|endoftext|>"
    """Put after every document."""
    max_bytes: int = Field(default=50_000_000, ge=1, le=10**15)
    """Train on at most this much text."""


class PrepareTask(SpecModel):
    """Turn text into packed rows of token ids."""

    fields_are: ClassVar = WORK

    kind: Literal["prepare"] = "prepare"
    """The task kind."""
    sources: list[Source] = Field(min_length=1)
    """Files or folders of .txt, .jsonl, .jsonl.gz, .parquet; saved Hugging Face datasets; ``builtin:python-docs``."""
    text_field: str = "text"
    """Field or column that holds the text."""
    tokenizer: Source | None = None
    """Folder of an existing tokenizer; null trains one with ``train_tokenizer``."""
    train_tokenizer: TrainTokenizer = Field(default_factory=TrainTokenizer)
    """The tokenizer to train where none is given."""
    seq_length: int = Field(ge=2, le=2**24)
    """Tokens per row."""
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of documents held out; chosen by a hash of the document, so it does not depend on order. Where the
    documents are too few for that, the last rows are held out."""
    columns: list[Literal["labels", "attention_mask"]] = Field(default_factory=list)
    """Columns beside ``input_ids``."""
    tail: Literal["pad", "drop"] = "drop"
    """The last partly filled row: drop it, or pad it (attention mask and labels then follow)."""
    rows_per_shard: int = Field(default=100_000, ge=1, le=10**9)
    """Rows in one file."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of the held-out choice."""


class FetchTask(SpecModel):
    """Bring a model or data set of the Hugging Face hub into the run's storage: pinned, verified, by one process."""

    fields_are: ClassVar = WORK

    kind: Literal["fetch"] = "fetch"
    """The task kind."""
    source: str
    """``hf://org/name@revision``, ``hf://datasets/org/name@revision``, or a file or folder below one of them."""
    include: list[str] = Field(default_factory=list)
    """Take only what these patterns match: a folder, a suffix such as .json, or a glob."""
    exclude: list[str] = Field(default_factory=lambda: ["original"])
    """Leave out what these match; they win."""
    one_weight_format: bool = True
    """Where the weights are there as safetensors, leave other formats of them out."""


class ConvertTask(SpecModel):
    """Convert weights between a Hugging Face folder and neuronx-distributed shards."""

    fields_are: ClassVar = WORK

    kind: Literal["convert"] = "convert"
    """The task kind."""
    source: Source
    """Folder or URI of the weights to read."""
    to: Literal["nxd", "hf"]
    """What to write."""
    tensor_parallel_degree: int = Field(default=1, ge=1, le=65_536)
    """Ranks that share each matrix; read from the shards' manifest where they have one."""
    pipeline_parallel_degree: int = Field(default=1, ge=1, le=65_536)
    """Pipeline stages."""
    virtual_pipeline_degree: int = Field(default=1, ge=1, le=65_536)
    """Parts of the layers that each stage holds."""
    kv_size_multiplier: int | None = Field(default=None, ge=1, le=65_536)
    """Copies of each key/value head; null derives tensor_parallel_degree / kv heads where that is more than 1."""
    qkv: Literal["split", "linear", "fused", "coalesced"] = "fused"
    """How query, key and value are stored; as in the training (its fuse_qkv means ``fused``)."""
    layout: Literal["trn1", "trn2"] = "trn1"
    """Order of heads where key/value heads are copied."""
    xser: bool = True
    """One file per tensor, beside a file of references."""
    config: Source | None = None
    """config.json, or its folder, of shards that have none beside them."""
    verify: bool = False
    """Read back what was written: all checksums, and the logits of the shards."""


class RegisterTask(SpecModel):
    """Register what a run has published as a version of a model on SageMaker: exactly its files, uncompressed."""

    fields_are: ClassVar = WORK

    kind: Literal["register"] = "register"
    """The task kind."""
    model: str
    """``steps.NAME.output``, ``RUN/result`` of a run in S3, or an ``s3://`` folder of model files."""
    group: str
    """Name or ARN of the model package group; made if it is not there."""
    image_uri: str
    """Image that serves the model."""


class PrecompileTask(SpecModel):
    """Compile the graphs of a training on Trainium ahead of it, on as many nodes and with the same settings."""

    kind: Annotated[Literal["precompile"], WORK] = "precompile"
    """The task kind."""
    training: TrainTask
    """The training, exactly as it will run."""
    extract_steps: Annotated[int, WORK] = Field(default=10, ge=1, le=10_000)
    """Steps that are traced for their graphs."""
    stall_seconds: Annotated[float, WORK] = Field(default=10_800.0, gt=0, le=2_419_200)
    """No graph extracted, compiled or failed on a node for so long: its compiler hangs, and the job fails."""


class ScriptTask(SpecModel):
    """Run the user's own program, with data staged before it and its results published while it runs."""

    fields_are: ClassVar = WORK

    kind: Literal["script"] = "script"
    """The task kind."""
    entry: str
    """``train.py``, ``-m package.module`` or ``run.sh``, relative to ``source``."""
    source: Source | None = None
    """Folder of the program, here or in S3. null means the entry is in the image already."""
    args: list[str] | dict[str, Any] = Field(default_factory=list)
    """Arguments, passed on untouched; or a mapping that ``args_style`` writes out in its own order. An argument that is
    null is left out where it would be an option (``--key value``, ``flags``): ``task.args.NAME=null`` removes one."""
    args_style: Literal["--key value", "key=value", "flags", "file"] = "--key value"
    """How a mapping becomes arguments. ``flags`` is ``--key value`` where true is a bare ``--key`` and false is left
    out; ``file`` writes it as YAML and passes the file's path."""
    parallelism: Annotated[Parallelism | None, PLACEMENT] = None
    """Strategy whose image, parameters and environment the program gets; null is plain torchrun."""
    output_folder: str = "output"
    """Folder, relative to the program's working directory, that is published as the run's result."""
    checkpoint_folder: str = "checkpoints"
    """Folder whose newest contents are published while the program runs, and restored before it starts again."""


Task = Annotated[
    TrainTask | PrepareTask | FetchTask | ConvertTask | RegisterTask | PrecompileTask | ScriptTask,
    Field(discriminator="kind"),
]


@dataclass(frozen=True)
class TaskKind:
    """What every part of the program asks of a task kind; tests compare the table with ``Task`` and the workers."""

    spec: type[SpecModel]
    worker: str
    """``module:function`` that runs it in a job."""
    starts_ranks: bool = False
    """Whether it uses all processes of ``compute``, by torch; the others use one process, and load no torch."""
    starts_them_itself: bool = False
    """Whether those are processes of its own: it is started once per node."""
    packages: tuple[str, ...] = ()
    """What its worker imports beside torch, which starts all of them; images bring it, this machine may not."""

    @property
    def entrypoint(self) -> str:
        """The name of the script that starts its worker, in the code bundle and in the run's folder."""
        return f"{self.spec.model_fields['kind'].default}.py"


_WORKERS = "sm_llm.worker.tasks"
TASK_KINDS = {
    "train": TaskKind(
        TrainTask, f"{_WORKERS}.train:run", starts_ranks=True, packages=("transformers", "tokenizers", "safetensors")
    ),
    "prepare": TaskKind(PrepareTask, f"{_WORKERS}.prepare:run", packages=("tokenizers",)),
    "fetch": TaskKind(FetchTask, f"{_WORKERS}.fetch:run"),
    "convert": TaskKind(ConvertTask, f"{_WORKERS}.convert:run"),
    "register": TaskKind(RegisterTask, f"{_WORKERS}.register:run"),
    "precompile": TaskKind(
        PrecompileTask,
        f"{_WORKERS}.precompile:run",
        starts_ranks=True,
        starts_them_itself=True,
        packages=("transformers", "safetensors"),
    ),
    "script": TaskKind(ScriptTask, f"{_WORKERS}.script:run", starts_ranks=True),
}
"""Kind -> row. Names of workers, because the specification imports nothing of what runs in a job."""


def training_of(task: Task) -> TrainTask | None:
    """The training of a task that trains, or that compiles for one."""
    if isinstance(task, PrecompileTask):
        return task.training
    return task if isinstance(task, TrainTask) else None


def starts_ranks(task: Task) -> bool:
    """Whether a task runs once per process of ``compute``; some start their own, and the others need but one.

    On a managed backend whatever does not start ranks runs once per node.
    """
    return kind_starts_ranks(task.kind, task.entry if isinstance(task, ScriptTask) else "")


def kind_starts_ranks(kind: str, entry: str = "") -> bool:
    """``starts_ranks`` of a task that is not checked yet; a shell script as ``entry`` starts its own."""
    row = TASK_KINDS.get(kind)
    return row is not None and row.starts_ranks and not row.starts_them_itself and not entry.endswith(".sh")


def starts_own_ranks(task: Task) -> bool:
    """Whether a task starts the processes of ``compute`` itself, once per node."""
    return TASK_KINDS[task.kind].starts_ranks and not starts_ranks(task)


def parallelism_of(task: Task) -> Parallelism | None:
    """The strategy of a task, where it has one."""
    training = training_of(task)
    return training.parallelism if training else task.parallelism if isinstance(task, ScriptTask) else None
