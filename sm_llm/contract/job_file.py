"""job.json: everything the launcher tells the worker, as one validated file."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from sm_llm.spec.job import JobSpec

JOB_ENVIRONMENT = "SM_LLM_JOB_FILE"
"""Environment variable that names job.json inside the container."""


class JobFile(BaseModel):
    """One job as the worker reads it. ``spec`` holds resolved inputs: no ``inputs.…`` or ``steps.…`` is left."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = 1
    run_id: str
    attempt: int = Field(ge=1)
    run_uri: str
    """The run's folder (the worker publishes below it)."""
    spec: JobSpec
    spec_digest: str
    channels: dict[str, str] = Field(default_factory=dict)
    """Input channels the backend mounts: name -> source URI."""

    def write(self, path: Path) -> None:
        """Write atomically (temporary file in the same folder, then rename)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(self.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> JobFile:
        """Read and validate; raises ``FileNotFoundError`` or ``pydantic.ValidationError``."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))
