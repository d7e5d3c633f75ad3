"""The last words about prepared rows: how many there are of each split, and the command that trains on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.runs.events.events import read_events
from sm_llm.spec.loading.yaml_text import to_typed
from sm_llm.terminal import counted, quoted

if TYPE_CHECKING:
    from sm_llm.launcher.run_handle import RunHandle

# The smallest recipe: the command trains at once on any machine.
RECIPE = "smoke"
"""What the command starts from: a model small enough for any machine."""


def prepared_rows(run: RunHandle) -> dict[str, Any] | None:
    """The account of a preparation, once it has one."""
    found = [event["account"] for event in read_events(run.job.events) if event["kind"] == "account"]
    # The newest attempt's: an earlier one may have been broken off after it had counted.
    return found[-1] if found else None


def rows_sentence(account: dict[str, Any]) -> str:
    """``1,234 rows of 2,048 tokens to train on, 12 rows (3 documents) held out for validation``."""
    train, held_out = account["splits"]["train"], account["splits"].get("validation")
    text = f"{counted(train['rows'], 'row')} of {account['seq_length']:,} tokens to train on"
    if held_out is None:
        return f"{text}, none held out for validation (--validation-fraction)"
    documents = counted(held_out["documents"], "document")
    return f"{text}, {counted(held_out['rows'], 'row')} ({documents}) held out for validation"


def training_command(account: dict[str, Any], result: str) -> str:
    """A command that trains on the rows in ``result``, quoted for a shell."""
    data = {"format": "rows", "seq_length": account["seq_length"], "train": f"{result}/train"}
    if "validation" in account["splits"]:
        data["validation"] = f"{result}/validation"
    changes: dict[str, Any] = {
        "task.data": data,
        "task.tokenizer": f"{result}/tokenizer",
        # The recipe's own model has another vocabulary and another length.
        "task.model.config.vocab_size": account["tokenizer"]["vocab_size"],
        "task.model.config.max_position_embeddings": account["seq_length"],
    }
    typed = (f"{name}={to_typed(value)}" for name, value in changes.items())
    return f"sm-llm fit {quoted(RECIPE, *typed)}"
