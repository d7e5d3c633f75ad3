"""One table of what belongs together in AWS's Neuron SDK, and what a process checks against it at its start."""

from __future__ import annotations

import pytest

from sm_llm.launcher.images.images import rows
from sm_llm.spec.machines.neuron_releases import RELEASES, release_problem


def test_the_images_of_the_launcher_are_those_of_the_table() -> None:
    assert [(it.version, it.tag, it.torch) for it in rows("neuron")] == [
        (it.sdk, it.image, it.torch) for it in RELEASES
    ]
    assert RELEASES[0].sdk == "2.28.0", "what AWS advises comes first"
    for it in RELEASES:
        assert (
            it.image == f"{it.torch}-neuronx-py{it.python.replace('.', '')}-sdk{it.sdk}-{it.image.rpartition('-')[2]}"
        )


@pytest.mark.parametrize("release", [it for it in RELEASES if it.trains], ids=lambda it: it.sdk)
def test_the_packages_of_a_release_are_accepted_with_their_builds(release: object) -> None:
    packages = release.packages  # type: ignore[attr-defined]
    assert release_problem({name: f"{version}+0f1dac25" for name, version in packages.items()}) is None


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"neuronx-cc": "2.24.5133.0+58f8de22"}, "neuronx-cc 2.24.5133.0"),
        ({"neuronx-distributed": "0.8.0"}, "neuronx-distributed 0.8.0"),
        ({"torch-neuronx": None}, "torch-neuronx missing"),
    ],
)
def test_NX02_packages_of_two_releases_are_refused_with_the_image_to_use(
    change: dict[str, str | None], shown: str
) -> None:
    fault = release_problem({**RELEASES[0].packages, **change}) or ""
    assert shown in fault
    assert f"use its image pytorch-training-neuronx:{RELEASES[0].image}" in fault


def test_the_release_that_fits_neuronx_distributed_is_the_one_to_use() -> None:
    newest = next(it for it in RELEASES if it.sdk == "2.30.0")
    fault = release_problem({**newest.packages, "neuronx-cc": "2.23.6484.0"}) or ""
    assert newest.image in fault


def test_releases_whose_training_api_was_not_read_are_refused() -> None:
    old = next(it for it in RELEASES if it.sdk == "2.27.1")
    assert "2.28.0" in (release_problem(old.packages) or "")
