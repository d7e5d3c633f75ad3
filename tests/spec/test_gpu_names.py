"""``compute.gpu``: names as people and nvidia-smi write them, with the memory of a card that exists."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.errors import SpecError
from sm_llm.launcher.planner import plan
from sm_llm.spec.machines.compute import ComputeSpec, gpu_issues
from sm_llm.spec.machines.gpu_names import card
from sm_llm.spec.machines.hardware import Card

TRAINING: dict[str, Any] = {
    "name": "x",
    "task": {
        "kind": "train",
        "model": {"preset": "tiny"},
        "data": {"format": "synthetic", "seq_length": 64},
        "max_steps": 1,
    },
}


@pytest.mark.parametrize(
    ("text", "name", "gib"),
    [
        # As nvidia-smi prints them.
        ("NVIDIA H100 80GB HBM3", "H100", 80),
        ("NVIDIA H100 PCIe", "H100 PCIe", 80),
        ("NVIDIA H100 NVL", "H100 NVL", 94),
        ("NVIDIA H200", "H200", 141),
        ("NVIDIA H200 NVL", "H200", 141),
        ("NVIDIA GH200 480GB", "GH200 480GB", 96),
        ("NVIDIA GH200 144G HBM3e", "GH200", 144),
        ("NVIDIA A100-SXM4-40GB", "A100", 40),
        ("NVIDIA A100-SXM4-80GB", "A100", 80),
        ("NVIDIA A100-SXM-64GB", "A100", 64),
        ("NVIDIA A100 80GB PCIe", "A100", 80),
        ("NVIDIA A10G", "A10G", 22.4),
        ("NVIDIA L40S", "L40S", 44.7),
        ("Tesla T4", "T4", 16),
        ("Tesla V100-SXM2-32GB", "V100", 32),
        ("NVIDIA B300 SXM6 AC", "B300", 268.6),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000", 96),
        # As people do.
        ("h100", "H100", 80),
        ("GH200", "GH200", 96),
        ("A100", "A100", 40),
        ("A100-80GB", "A100", 80),
        ("A100 80 GB", "A100", 80),
        ("a100 80GiB", "A100", 80),
        # Of vendors, whose gigabytes are smaller.
        ("L40S 48GB", "L40S", 44.7),
        ("A10G 24GB", "A10G", 22.4),
        ("B200 192GB", "B200", 179.1),
        # Not in the table.
        ("RTX 4090 24GB", "RTX 4090", 24),
        ("NVIDIA GeForce RTX 4090 24 GB", "GeForce RTX 4090", 24),
        ("NVIDIA L40 48GB", "L40", 48),
        ("H100 MIG 1g.10gb", "H100 MIG", 10),
    ],
)
def test_a_name_is_understood(text: str, name: str, gib: float) -> None:
    assert card(text) == Card(name, gib)
    assert list(gpu_issues(ComputeSpec(gpu=text))) == []


@pytest.mark.parametrize("text", ["H100 9999GB", "A100 7GB", "H100 141GiB", "NVIDIA H200 80GB", "L4 48GB"])
def test_a_memory_that_no_card_of_the_name_has_is_refused(text: str) -> None:
    [issue] = gpu_issues(ComputeSpec(gpu=text))
    assert (issue.code, issue.path, issue.value, card(text)) == ("gpu-memory-unknown", "compute.gpu", text, None)


def test_the_refusal_lists_the_memories_that_there_are() -> None:
    with pytest.raises(SpecError) as caught:
        plan(TRAINING, "compute.gpu=A100 7GB")
    assert "compute.gpu (override): no A100 has this memory: it must be one of 40, 64, 80 GiB" in str(caught.value)
    assert "Use A100 40GB or A100 64GB or A100 80GB" in str(caught.value)


@pytest.mark.parametrize("text", ["RTX 4090", "NVIDIA GeForce RTX 4090", "80GB", " ", "A100 40GB 80GB", "Foo 0GB"])
def test_a_gpu_without_a_known_memory_is_refused_with_what_to_write(text: str) -> None:
    [issue] = gpu_issues(ComputeSpec(gpu=text))
    assert (issue.code, card(text)) == ("gpu-unknown", None)
    assert "Write its memory in GiB behind its name, as in RTX 4090 24GB, or use one of A100, A10G," in issue.remedy


def test_the_memory_of_a_gpu_that_the_table_lacks_counts_and_is_warned_of() -> None:
    [made] = plan(TRAINING, "compute.gpu=NVIDIA GeForce RTX 4090 24GB")
    [found] = [it for it in made.issues if it.code == "gpu-not-in-table"]
    assert found.message == (
        "is not in the table of GPUs: the plan counts with the 24 GiB that it states, and with bf16 and fp8, which it "
        "may lack; without a known peak rate a training on it logs no MFU"
    )
    assert made.choice is not None
    assert "of GeForce RTX 4090 (24 GiB)" in made.choice.reason
    [made] = plan(TRAINING, "compute.gpu=H100 MIG 1g.10gb")
    assert [it.message for it in made.issues if it.code == "gpu-not-in-table"] == [
        "is not in the table of GPUs: the plan counts with the 10 GiB that it states, and with bf16 and fp8, which it "
        "may lack"
    ]
    [made] = plan(TRAINING, "compute.gpu=NVIDIA H100 80GB HBM3")
    assert not [it for it in made.issues if it.code == "gpu-not-in-table"]
