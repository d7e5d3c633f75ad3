"""The releases of AWS's Neuron SDK: which packages and which image belong together.

Source: the Dockerfiles of aws-neuron/deep-learning-containers at each release (pytorch/training). After 2.30 AWS
publishes no image for training with neuronx-distributed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MAINTENANCE = "neuronx-distributed is in maintenance; AWS advises SDK 2.28 to those who train with it"
"""What everybody who trains with it should know."""


@dataclass(frozen=True)
class NeuronRelease:
    """One release. Versions are the public ones, without the build behind a ``+``."""

    sdk: str
    nxd: str
    compiler: str
    framework: str
    """Of torch-neuronx: PyTorch's version, then its own."""
    image: str
    """Tag of the image ``pytorch-training-neuronx``."""
    python: str
    trains: bool = True
    """Whether the strategy nxd was made for it: its training API is that of 2.28, or AWS states that it is."""

    @property
    def torch(self) -> str:
        """PyTorch's version."""
        return ".".join(self.framework.split(".")[:3])

    @property
    def packages(self) -> dict[str, str]:
        """Distribution -> version, of what must fit together."""
        return {"neuronx-distributed": self.nxd, "neuronx-cc": self.compiler, "torch-neuronx": self.framework}


RELEASES = (
    NeuronRelease(
        "2.28.0", "0.17.26814", "2.23.6484.0", "2.9.0.2.12.22436", "2.9.0-neuronx-py312-sdk2.28.0-ubuntu24.04", "3.12"
    ),
    NeuronRelease(
        "2.30.0", "0.19.28093", "2.25.3371.0", "2.9.0.2.14.27725", "2.9.0-neuronx-py312-sdk2.30.0-ubuntu24.04", "3.12"
    ),
    NeuronRelease(
        "2.29.1", "0.18.27753", "2.24.8799.0", "2.9.0.2.13.26312", "2.9.0-neuronx-py312-sdk2.29.1-ubuntu24.04", "3.12"
    ),
    NeuronRelease(
        "2.29.0", "0.18.27753", "2.24.5133.0", "2.9.0.2.13.24727", "2.9.0-neuronx-py312-sdk2.29.0-ubuntu24.04", "3.12"
    ),
    NeuronRelease(
        "2.27.1", "0.16.25997", "2.22.12471.0", "2.9.0.2.11.19912", "2.9.0-neuronx-py312-sdk2.27.1-ubuntu24.04", "3.12",
        trains=False,
    ),
    NeuronRelease(
        "2.26.1", "0.15.22404", "2.21.33363.0", "2.8.0.2.10.16998", "2.8.0-neuronx-py311-sdk2.26.1-ubuntu22.04", "3.11",
        trains=False,
    ),
)  # fmt: skip
"""The advised one first."""


def installed_packages() -> dict[str, str | None]:
    """Distribution -> version of what must fit together, as installed in this environment; None where it is missing."""
    return {name: _version(name) for name in RELEASES[0].packages}


def _version(name: str) -> str | None:
    try:
        # Read from metadata: the packages are checked before any of them is imported.
        return version(name)
    except PackageNotFoundError:
        return None


def installed_sdk() -> str | None:
    """The SDK whose packages are installed here, if they are those of one that trains."""
    # A build behind + differs between the package index and an image's own wheels.
    found = _plain(installed_packages())
    return next((it.sdk for it in RELEASES if it.packages == found and it.trains), None)


def _plain(installed: Mapping[str, str | None]) -> dict[str, str | None]:
    return {name: None if it is None else it.partition("+")[0] for name, it in installed.items()}


def release_problem(installed: Mapping[str, str | None]) -> str | None:
    """Why the ``installed`` packages (distribution -> version, None where it is missing) are not those of a release.

    None if they are those of one that trains.
    """
    found = _plain(installed)
    if any(it.packages == found and it.trains for it in RELEASES):
        return None
    shown = ", ".join(f"{name} {it or 'missing'}" for name, it in installed.items())
    # The release whose neuronx-distributed is installed is probably the one that was meant.
    row = next((it for it in RELEASES if it.trains and it.nxd == found.get("neuronx-distributed")), RELEASES[0])
    wanted = ", ".join(f"{name} {it}" for name, it in row.packages.items())
    releases = ", ".join(it.sdk for it in RELEASES if it.trains)
    return (
        f"strategy nxd needs the packages of one Neuron SDK ({releases}), and this image has {shown}. SDK {row.sdk} "
        f"has {wanted}: use its image pytorch-training-neuronx:{row.image}"
    )
