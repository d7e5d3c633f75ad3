"""The verb that converts weights to and from neuronx-distributed."""

from __future__ import annotations

from typing import Annotated

import typer

from sm_llm.cli.app import app
from sm_llm.cli.options import AsJson, S3Access, console, print_json, s3_access
from sm_llm.terminal import echo

Source = Annotated[str, typer.Argument(metavar="SRC", help="Weights: a folder here, s3://..., or (to hf) RUN[@STEP].")]
Destination = Annotated[str, typer.Argument(metavar="DST", help="New folder, here or s3://...")]
To = Annotated[str, typer.Option("--to", metavar="nxd|hf", help="What to write.")]
Tensor = Annotated[int | None, typer.Option("--tp", help="Tensor-parallel degree; to nxd required.")]
Pipeline = Annotated[int | None, typer.Option("--pp", help="Pipeline stages. [default: 1]")]
Virtual = Annotated[int | None, typer.Option("--virtual-pp", help="Parts of each stage. [default: 1]")]
Multiplier = Annotated[
    int | None, typer.Option("--kv-multiplier", help="Copies of each key/value head. [default: --tp / heads]")
]
Form = Annotated[
    str | None,
    typer.Option("--qkv", metavar="split|linear|fused|coalesced", help="As the training has it. [default: fused]"),
]
Order = Annotated[
    str | None,
    typer.Option("--layout", metavar="trn1|trn2", help="Order of heads with copied heads. [default: trn1]"),
]
Xser = Annotated[bool | None, typer.Option("--xser/--no-xser", help="A file per tensor, or per rank. [default: xser]")]
ConfigFile = Annotated[
    str | None, typer.Option("--config", metavar="FILE|FOLDER", help="config.json of shards that have none.")
]

Verify = Annotated[bool, typer.Option("--verify", help="Read back: all checksums, and the logits of the shards.")]
Scratch = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Copies of what is not streamed from S3. [default: temporary files]"),
]
Workers = Annotated[int | None, typer.Option("--workers", help="Threads that write. [default: 2 x CPUs, at most 8]")]


@app.command()
@s3_access
def convert(
    source: Source,
    destination: Destination,
    to: To,
    tp: Tensor = None,
    pp: Pipeline = None,
    virtual_pp: Virtual = None,
    kv_multiplier: Multiplier = None,
    qkv: Form = None,
    layout: Order = None,
    xser: Xser = None,
    config: ConfigFile = None,
    verify: Verify = False,
    workers: Workers = None,
    scratch: Scratch = None,
    as_json: AsJson = False,
    *,
    options: S3Access,
) -> None:
    """Convert a Hugging Face folder to shards of neuronx-distributed (NxD), or back, in a few MiB of memory.

    Everything is checked first: names, shapes, degrees, the disk. Broken off, the same command continues. The way back
    takes the degrees from the manifest beside the shards, conversion.json; without one it needs --config.

    \b
    The degrees, for Q query heads and K key/value heads:
      --tp T            divides Q and the inner width, and T divides K, or T = K x m: then each key/value head
                        is copied m times (--kv-multiplier; Llama 3 8B at --tp 32: 8 x 4)
      --qkv             fused: training with fuse_qkv; linear: qkv_linear without; split: separate layers, no copied
                        heads; coalesced: one matrix, for as many key/value heads as query heads
      --layout          of copied heads; trn2: as ranks there expect it, unlike NxD's own converter
    A vocabulary that T does not divide is padded with zero rows, and trimmed on the way back.

    \b
    Examples:
      sm-llm convert ./llama-3-8b ./ckpt/pretrained_weight --to nxd --tp 32 --kv-multiplier 4 --qkv fused --verify
      sm-llm convert ./ckpt/step_1000 ./trained --to hf --config ./llama-3-8b
      sm-llm convert s3://BUCKET/llama-3-8b s3://BUCKET/shards --to nxd --tp 8 --scratch /mnt/nvme
      sm-llm convert ./runs/NAME@400 ./step-400 --to hf
    """
    from sm_llm.convert.api import convert as run
    from sm_llm.launcher.tools.sync_command import shown, stopping_on_signals

    with stopping_on_signals(), shown(console(stderr=True)) as progress:
        degrees = {"tensor_parallel_degree": tp, "pipeline_parallel_degree": pp, "virtual_pipeline_degree": virtual_pp}
        form = {"kv_size_multiplier": kv_multiplier, "qkv": qkv, "layout": layout, "xser": xser, "config": config}
        how = {"verify": verify, "workers": workers, "scratch": scratch, "options": options, "progress": progress}
        report = run(source, destination, to=to, **degrees, **form, **how)  # type: ignore[arg-type]
    if as_json:
        print_json(report.to_json())
        return
    echo(*report.lines())
