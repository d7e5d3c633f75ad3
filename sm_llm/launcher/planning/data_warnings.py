"""What about data and tokenizer on this machine is probably not meant, for a plan to warn of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.data.describe import is_far_smaller
from sm_llm.data.peek import repeats_one_row
from sm_llm.errors import DataError
from sm_llm.launcher.planning.local_places import local_folder
from sm_llm.launcher.planning.upstream import tokenizer_vocabulary

if TYPE_CHECKING:
    from sm_llm.data.describe import RowsInfo
    from sm_llm.launcher.planning.model_facts import ModelFacts
    from sm_llm.spec.tasks import TrainTask


def data_warnings(task: TrainTask, model: ModelFacts | None, rows: RowsInfo | None) -> list[str]:
    """A vocabulary that is hardly used, and one row that is all the data. ``rows`` are those that exist here."""
    found = []
    if model is not None:
        found += _vocabulary_warnings(task, model, rows)
    if (problem := _repeated(task, rows)) is not None:
        found.append(f"task.data.train: {problem}: the model learns it by heart and nothing else")
    return found


def _vocabulary_warnings(task: TrainTask, model: ModelFacts, rows: RowsInfo | None) -> list[str]:
    sizes = {"task.data.train": rows.vocab_size if rows else None, "task.tokenizer": None}
    folder = local_folder(task.tokenizer)
    if folder is not None and folder.is_dir():
        try:
            sizes["task.tokenizer"] = tokenizer_vocabulary(folder)
        except DataError:
            return []  # a issue already
    return [
        f"{path}: {size:,} tokens, but the model's vocabulary has {model.vocab_size:,}: the other rows of its "
        "embedding are never trained. Set task.model.config.vocab_size, unless the model is trained on more text later"
        for path, size in sizes.items()
        if size is not None and is_far_smaller(size, model.vocab_size)
    ]


def _repeated(task: TrainTask, rows: RowsInfo | None) -> str | None:
    data = task.data
    if rows is not None and rows.rows == 1:
        return "the data hold a single row"
    if rows is not None and rows.repeated:
        return f"all {rows.rows:,} rows are the same row"
    folder = local_folder(data.train) if data.format == "json_rows" else None
    if folder is None or not folder.is_dir():
        return None
    count = repeats_one_row(folder, data.seq_length)
    if count is None:
        return None
    return "the data hold a single row" if count == 1 else f"the first {count:,} lines are the same row"
