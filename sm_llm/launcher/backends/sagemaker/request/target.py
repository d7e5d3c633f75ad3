"""What a training job gets: the typed values that its request is formatted from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sm_llm.launcher.images import images
from sm_llm.terminal import counted, duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.launcher.backends.sagemaker.request.capacity import TimeLimit
    from sm_llm.launcher.backends.sagemaker.request.distribution import Distribution
    from sm_llm.launcher.backends.sagemaker.request.settings import JobSettings
    from sm_llm.launcher.source_tree import SourceTree


@dataclass(frozen=True)
class SageMakerTarget:
    """Everything that a request takes from outside the job's own fields."""

    settings: JobSettings
    image_uri: str
    image: images.Image | None
    """The row of the table of images; None where the specification names an address."""
    is_stock: bool
    """Whether what the image lacks is installed on every node."""
    limit: TimeLimit
    distribution: Distribution
    command: tuple[tuple[str, ...], ...]
    program: SourceTree | None = None
    """The files of the user's program, where they are on this machine."""
    request: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What every run of the job sends alike."""

    @property
    def facts(self) -> dict[str, str]:
        """The decisions in words."""
        limit = self.limit
        wait = f", waiting included {duration(limit.max_wait)}" if limit.max_wait is not None else ""
        facts = {
            "image": self.image_uri,
            "image mode": "stock (what it lacks is installed once per node)" if self.is_stock else "built",
            "time limit": f"{duration(limit.max_run)}{wait} ({limit.reason})",
            "role": str(self.settings.role),
            "region": str(self.settings.region),
        }
        if self.image is not None and self.image.note:
            facts["image note"] = self.image.note
        if self.image is not None and self.image.patched_until is not None:
            facts["image patches"] = f"until {self.image.patched_until} (table of {images.TABLE_DATE})"
        if self.program is not None:
            out = f", {len(self.program.left_out)} left out" if self.program.left_out else ""
            facts["program"] = f"{counted(len(self.program.files), 'file')}, {self.program.bytes / 1e6:.1f} MB{out}"
        return facts | {f"{name} from": origin for name, origin in self.settings.origins.items()}
