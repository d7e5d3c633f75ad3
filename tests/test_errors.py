"""What a person reads when something is wrong."""

from __future__ import annotations

from sm_llm.errors import Fault, PlanError, SmLlmError, SpecError


def test_a_fault_says_what_where_seen_and_what_to_do() -> None:
    fault = Fault("task.seed", "must be at least 0", -1, "Use 0", "job.yaml:3")
    assert str(fault) == "task.seed (job.yaml:3): must be at least 0 (got -1). Use 0"
    assert str(Fault("name", "missing")) == "name: missing"
    assert str(Fault("task.tokenizer", "is empty", None)) == "task.tokenizer: is empty (got None)"


def test_a_long_value_is_shortened() -> None:
    assert len(str(Fault("a", "b", "x" * 10_000))) < 150


def test_an_error_lists_all_its_faults() -> None:
    first, second = Fault("a", "x"), Fault("b", "y")
    assert str(SpecError([first])) == "a: x"
    assert str(PlanError([first, second])) == "2 faults:\n  - a: x\n  - b: y"
    assert SpecError("in words").faults == ()
    assert issubclass(SpecError, SmLlmError)
