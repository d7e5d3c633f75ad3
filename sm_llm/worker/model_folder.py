"""The files beside the weights of a Hugging Face folder: config, generation config and tokenizer."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch

from sm_llm.errors import DataError
from sm_llm.models.config import both_spellings
from sm_llm.models.safetensors_folder import TOKENIZER_FILES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_configs(folder: Path, config: Mapping[str, Any], dtype: torch.dtype, tokenizer: Path | None) -> None:
    """Config, generation config and tokenizer of a model folder."""
    # Generation stops at the ids of the tokenizer that the model was trained with, not at those of the config.
    special = {} if tokenizer is None else _ids_of(tokenizer)
    full = both_spellings({**config, **special, "dtype": _DTYPE_NAMES[dtype]})
    write_json(folder / "config.json", full)
    ids = {name: full[name] for name in _SPECIAL_IDS if full.get(name) is not None}
    write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 0.8, "top_k": 50, **ids})
    for name in TOKENIZER_FILES:
        if tokenizer is not None and (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


def _ids_of(tokenizer: Path) -> dict[str, int | None]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` as ``tokenizer_config.json`` names them, if it is there.

    Raises ``DataError`` if the folder lacks ``tokenizer.json``.
    """
    from tokenizers import Tokenizer

    if not (tokenizer / "tokenizer.json").is_file():
        raise DataError(f"task.tokenizer: {tokenizer} has no tokenizer.json")
    coder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    settings = tokenizer / "tokenizer_config.json"
    if not settings.is_file():
        return {}
    named = json.loads(settings.read_text(encoding="utf-8"))
    return {f"{role}_id": _id(coder, named.get(role)) for role in ("bos_token", "eos_token", "pad_token")}


def _id(coder: Any, token: Any) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    found: int | None = None if text is None else coder.token_to_id(text)
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A file of JSON for people."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
