"""Variables in the address of a step's run, which is a tag of its job and a folder in S3: values that cannot be one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue
from sm_llm.launcher.backends.sagemaker.request.limits import value_issues
from sm_llm.launcher.backends.sagemaker.request.request import RUN_TAG

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

# The address is a tag of the job, which is the narrower limit: a key in S3 takes 1,024 bytes.
_TAG, _LONGEST = "Tags.*.Value", 256
_GET = "Parameters."
# In place of what only an execution knows.
_EXECUTION_ID = "x" * 12


def part_problem(text: str) -> str | None:
    """Why a variable's value cannot be part of the address of a run; None where it can."""
    if not text:
        return "is empty, which no folder in S3 is"
    if {".", ".."} & set(text.split("/")):
        return "holds '.' or '..', which S3 takes for names"
    # Cut, because the length is checked of the whole address.
    if next(value_issues(_TAG, text[:_LONGEST], "value"), None) is not None:
        return "holds what the tag of a job cannot: letters, digits, spaces and _.:/=+-@ are possible"
    return None


def length_problem(address: str) -> str | None:
    """Why an address is too long for the tag of a job; None where it is not."""
    if len(address) <= _LONGEST:
        return None
    return f"has {len(address)} characters with them, and the tag of a job takes {_LONGEST}"


def address_issues(
    steps: Iterable[Mapping[str, Any]], texts: Mapping[str, str], values: Container[str]
) -> Iterator[Issue]:
    """Values of variables with which the address of a step's run cannot be made.

    ``texts`` are those of all variables by name; those in ``values`` were given at a start, others are defaults.
    """
    reported: set[str] = set()
    for step in steps:
        parts = _parts(step["Arguments"])
        used = [name for name in map(_variable, parts) if name in texts]
        for name in used:
            if name not in reported and (problem := part_problem(texts[name])) is not None:
                reported.add(name)
                where = f"{'values' if name in values else 'variables'}.{name}"
                message = f"is part of the address of the run of step {step['Name']}, and {problem}"
                yield Issue("pipeline-value-not-an-address", where, message, texts[name], "Give another value")
        # The service joins the parts only in an execution; here with the values they will have.
        whole = "/".join(it if isinstance(it, str) else texts.get(_variable(it), _EXECUTION_ID) for it in parts)
        if used and not reported and (problem := length_problem(whole)) is not None:
            message = f"the address of the run of step {step['Name']} {problem}"
            yield Issue("pipeline-address-too-long", f"variables.{used[-1]}", message, remedy="Give a shorter value")
            return


def _parts(arguments: Mapping[str, Any]) -> list[Any]:
    """The parts of the address of a step's run; none where it has no variables."""
    address = next((it["Value"] for it in arguments.get("Tags", ()) if it["Key"] == RUN_TAG), "")
    return list(address.get("Std:Join", {}).get("Values", ())) if isinstance(address, dict) else []


def _variable(part: Any) -> str:
    """The variable that a part is; empty for any other."""
    name = part.get("Get", "") if isinstance(part, dict) else ""
    return name.removeprefix(_GET) if isinstance(name, str) and name.startswith(_GET) else ""
