"""Two runs of one job, written by an earlier version: makes the archive, and unpacks it for the tests.

``python tests/golden/previous_run.py`` writes ``previous_run.tar.xz`` beside this file with the version that is checked
out. Make it anew only where an archive of a later version shall be kept as well: what counts is that it is old.

``whole`` completed its 12 steps. ``broken`` is the same job, killed by SIGKILL before step 7 and, in its second
attempt, before step 11. Addresses in the archive begin with ``/srv/runs``; ``unpack`` writes the folder's own in their
place.
"""

from __future__ import annotations

import getpass
import io
import os
import platform
import re
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).with_suffix(".tar.xz")
STORAGE = "/srv/runs"
TEXT = {".json", ".jsonl", ".log", ".py"}
BREAK_BEFORE_STEPS = "7,11"
SPEC: dict[str, Any] = {
    "task": {
        "kind": "train",
        "model": {
            "preset": "tiny",
            "config": {
                "vocab_size": 64,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "tie_word_embeddings": True,
            },
        },
        "data": {"format": "synthetic", "seq_length": 16, "rows": 64, "validation_rows": 8},
        "micro_batch_size": 2,
        "max_steps": 12,
        "optim": {"learning_rate": 3e-3},
        "precision": {"compute": "fp32"},
        "checkpoint": {"every_steps": 2, "keep_last": 2, "async_save": False},
        "validation": {"every_steps": 4},
        "logging": {"every_steps": 2},
    },
    "compute": {"processes_per_instance": 2},
    # The same kernels on every x86-64 processor, so that losses are bit-equal on other machines as well.
    "environment": {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}


def unpack(folder: Path) -> None:
    """Put the runs below ``folder`` and its address into their records, job files and requests."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    for path in _texts(folder):
        text = path.read_text()
        if STORAGE in text:
            path.write_text(text.replace(STORAGE, str(folder)))


def make() -> None:
    """Train both runs, and archive them without what names this machine."""
    import sm_llm

    with tempfile.TemporaryDirectory() as folder:
        storage = Path(folder).resolve() / "runs"
        whole = sm_llm.launch({"name": "whole", "storage": str(storage), **SPEC}, wait=True)
        print(whole.uri, whole.state)
        environment = {**SPEC["environment"], "SM_LLM_BREAK_BEFORE_STEPS": BREAK_BEFORE_STEPS}
        broken = {"name": "broken", "storage": str(storage), **SPEC, "environment": environment}
        for _ in BREAK_BEFORE_STEPS.split(","):
            try:
                run = sm_llm.launch(broken, wait=True)
                print(run.uri, run.state)
            except sm_llm.errors.RunFailed as failed:
                print(failed)
        names = {
            str(storage): STORAGE,
            sys.executable: "/usr/bin/python3",
            os.getcwd(): "/home/user",
            f'"name": "{platform.node()}"': '"name": "host"',
            f'"host": "{platform.node()}"': '"host": "host"',
            platform.platform(): "Linux",
            f'"user": "{getpass.getuser()}"': '"user": "user"',
        }
        for path in _texts(storage):
            text = path.read_text()
            for name, neutral in names.items():
                text = text.replace(name, neutral)
            path.write_text(re.sub(r'"/[^"]*/site-packages/', '"/usr/lib/python3/site-packages/', text))
        _archive(storage)


def _texts(folder: Path) -> list[Path]:
    """Files of a run that may name its address: not those of a save, whose manifests hold their checksums."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in TEXT and path.is_file() and not {"ckpt", "final"} & set(path.parts)
    ]


def _archive(storage: Path) -> None:
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for path in sorted(storage.rglob("*")):
            info = tarfile.TarInfo(str(path.relative_to(storage)))
            info.mode, info.mtime = 0o755 if path.is_dir() else 0o644, 0
            if path.is_symlink():
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
                archive.addfile(info)
            elif path.is_dir():
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            elif path.name != ".room":  # space that is set aside for the failure file
                info.size = path.stat().st_size
                archive.addfile(info, io.BytesIO(path.read_bytes()))


if __name__ == "__main__":
    make()
