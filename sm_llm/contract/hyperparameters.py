"""Hyperparameters of a training job: names and values that change the specification in job.json.

One grammar for all that arrives: the name is a dotted path, the value a YAML scalar, list or mapping, as on the
command line. JSON is YAML, so what the SageMaker SDK writes (``json.dumps`` of every value) and what a Pipeline
variable leaves (bare text) are read the same way. The container toolkit's own argv is lossy (it writes Python's
``str``), so it is never read where the values themselves can be.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.loading.overrides import Hyperparameter
from sm_llm.spec.loading.yaml_text import to_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sm_llm.contract.job_file import JobFile

TOOLKIT_ENVIRONMENT = "SM_TRAINING_ENV"
"""Set by the container toolkit alone, for the program that it starts."""
TUNING_METRIC = "_tuning_objective_metric"
"""Hyperparameter that a tuning job adds."""
RUN_HYPERPARAMETER = "sm_llm_run"
"""Hyperparameter with the address of the run's folder, where only the platform knows it (a pipeline's variables)."""
# Names that SageMaker's SDK and toolkit set beside those of the user.
_OF_THE_PLATFORM = re.compile(r"sagemaker_.*|mp_parameters|default_user_module_name")
# The toolkit exports every hyperparameter under this prefix, in capitals.
_PREFIX = "SM_HP_"
# Fields of a model's config, which any value fits until the model's own checks; none is a text of digits.
_OF_CONFIG = re.compile(r"(steps\.[^.=]+\.)?task\.model\.config\.")


def spelt(value: Any) -> str:
    """A plain value as a hyperparameter's text, from which ``yaml_text.from_typed`` reads the same value."""
    return to_yaml(value)


def read_hyperparameters(path: Path, argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Name -> text of every hyperparameter that a container was started with, the platform's own among them.

    ``path`` is ``input/config/hyperparameters.json``; without it, ``SM_HPS`` else the ``SM_HP_…`` variables are read.
    Arguments (``--key value``, ``--key=value``, ``key=value``) come on top of it, unless the toolkit wrote them.
    Raises ``SpecError`` for a file that is none, or for arguments that are not written that way.
    """
    found = _of_file(path) if path.is_file() else _of_environment(environ)
    return found if TOOLKIT_ENVIRONMENT in environ else {**found, **of_arguments(argv)}


def overrides(hyperparameters: Mapping[str, str]) -> list[str]:
    """Those that change the specification, as ``key.path=value``."""
    return [Hyperparameter(f"{name}={text}") for name, text in hyperparameters.items() if not is_reserved(name)]


def is_reserved(name: str) -> bool:
    """Whether a name is one that sm_llm or the platform sets, and no field of the specification."""
    return name in (RUN_HYPERPARAMETER, TUNING_METRIC) or _OF_THE_PLATFORM.fullmatch(name) is not None


def applied(job: JobFile, hyperparameters: Mapping[str, str]) -> tuple[JobFile, list[str]]:
    """The job as hyperparameters change it, and the overrides that do so.

    The SageMaker SDK sends a value of a tuner's ``CategoricalParameter`` as JSON text of the value's own text, so 0.1
    arrives as ``"0.1"`` in quotes. A field that takes no text takes what is inside the quotes.
    Raises ``SpecError``.
    """
    changes = [_unquoted(it) if _OF_CONFIG.match(it) else it for it in overrides(hyperparameters)]
    try:
        return job.changed(changes), changes
    except SpecError as error:
        refused = [issue.path for issue in error.issues]
        # Only what was refused: in a field that takes text, the quotes may be meant.
        again = [_unquoted(it) if _is_about(it.partition("=")[0], refused) else it for it in changes]
        if again == changes:
            raise
    return job.changed(again), again


def _is_about(name: str, paths: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for path in paths)


def _unquoted(change: str) -> str:
    """An override whose value is a JSON string, with the text of the string; Python's None is YAML's null."""
    name, _, text = change.partition("=")
    if not text.startswith('"'):
        return change
    try:
        inside = json.loads(text)
    except ValueError:
        return change
    return type(change)(f"{name}={'null' if inside == 'None' else inside}")


def _of_file(path: Path) -> dict[str, str]:
    try:
        return _texts(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, AttributeError, RecursionError) as error:
        raise SpecError(
            [Issue("hyperparameters-file-invalid", str(path), f"is not a JSON object of hyperparameters: {error}")]
        ) from error


def _of_environment(environ: Mapping[str, str]) -> dict[str, str]:
    if text := environ.get("SM_HPS"):
        return {name: spelt(value) for name, value in json.loads(text).items()}
    return {name[len(_PREFIX) :].lower(): text for name, text in environ.items() if name.startswith(_PREFIX)}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else spelt(value) for name, value in values.items()}


def of_arguments(argv: Sequence[str]) -> dict[str, str]:
    """Names and texts of ``--key value``, ``--key=value`` and ``key=value``. Raises ``SpecError`` for anything else."""
    found: dict[str, str] = {}
    issues = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if equals and name.lstrip("-"):
            name = name.removeprefix("--")
        elif word.startswith("--") and len(word) > len("--") and rest and not rest[0].startswith("--"):
            name, text = word.removeprefix("--"), rest.pop(0)
        else:
            remedy = "Write --key.path value, for example --task.max_steps 100"
            issues.append(Issue("argument-not-an-override", word, "is not an override", remedy=remedy))
            continue
        if found.setdefault(name, text) != text:
            problem = f"is given twice: {found[name]} and {text}"
            issues.append(Issue("hyperparameter-repeated", name, problem, remedy="Keep one"))
    if issues:
        raise SpecError(issues)
    return found
