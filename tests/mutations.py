"""Twenty deliberate faults, one per module: each must fail a test of README's command.

    python -m tests.mutations          try all, in a copy of this tree
    python -m tests.mutations 5 13     try some, by their numbers

First the named tests run without a fault and must pass. Ends with a table; exit code 1 unless each fault was caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 1200


@dataclass(frozen=True)
class Fault:
    """In ``module``, ``old`` (there once) becomes ``new``; ``tests`` are files below ``tests`` or single tests."""

    module: str
    old: str
    new: str
    tests: str
    what: str


FAULTS = (
    Fault(
        "spec/derive.py",
        "return math.ceil(Fraction(max_tokens, tokens_per_step))",
        "return max_tokens // tokens_per_step",
        "spec/test_derive.py",
        "a job ends before max_tokens are seen",
    ),
    Fault(
        "redaction.py", "for shift in range(3):", "for shift in range(1):", "test_redaction.py", "base64 shows a secret"
    ),
    Fault(
        "models/families/gated.py",
        '"k_proj": (keys, hidden),',
        '"k_proj": (queries, hidden),',
        "models/test_families.py",
        "grouped keys get the shape of queries",
    ),
    Fault(
        "storage/publication/publish.py",
        "if leader and any(part_errors):",
        "if leader and all(part_errors):",
        "storage/test_publish.py",
        "a failed save stays in the store",
    ),
    Fault(
        "storage/publication/collect.py",
        "    for item in doomed:\n        store.delete([item.key])\n"
        "    sizes = [_delete_save(store, item) for item in doomed]\n",
        "    sizes = [_delete_save(store, item) for item in doomed]\n    store.delete(item.key for item in doomed)\n",
        "storage/test_kill_sweep.py",
        "a killed collection leaves a commit without data",
    ),
    Fault(
        "storage/publication/restore.py",
        "path.stat().st_size == entry.size and crc64_file(path, from_disk=True) == entry.crc64nvme",
        "path.stat().st_size == entry.size",
        "storage/test_restore.py storage/test_damage.py",
        "an altered file of the right size is taken",
    ),
    Fault(
        "storage/s3/s3_objects.py",
        "if status_of(error) == 412:\n                        return False",
        "if status_of(error) == 412:\n                        return True",
        "storage/test_s3.py",
        "two writers of one key both win",
    ),
    Fault(
        "contract/hosts.py",
        'sorted(value["hosts"], key=numeric)',
        'sorted(value["hosts"])',
        "contract/test_hosts.py",
        "algo-10 comes before algo-2",
    ),
    Fault(
        "runs/run_record.py",
        'with exclusive(path.with_name(f".{path.name}.lock")):',
        "if True:",
        "runs/test_run_record.py",
        "two writers of a record lose changes",
    ),
    Fault(
        "data/order.py",
        "keys = mix(stream_key(seed) + epoch.astype(np.uint64) * np.uint64(_GOLDEN))",
        "keys = mix(stream_key(seed) + epoch.astype(np.uint64) * np.uint64(0))",
        "data/test_order.py",
        "every epoch has the same order",
    ),
    Fault(
        "data/stream.py",
        '"skip": self._consumed - fetched}',
        '"skip": 0}',
        "data/test_stream.py",
        "a resumed stream repeats tokens",
    ),
    Fault(
        "launcher/attempt_outcome.py",
        "[(failure.cause.is_consequence, at, failure) for",
        "[(False, at, failure) for",
        "launcher/test_attempt_outcome.py",
        "a rank that only lost its peer is blamed",
    ),
    Fault(
        "launcher/backends/local/local_run.py",
        "if not mine or _is_alive_here(run_store, record) or is_alive_elsewhere(run_store, record):",
        "if not mine or is_alive_elsewhere(run_store, record):",
        "launcher/test_supervisor.py launcher/test_handle.py",
        "a running run is started a second time",
    ),
    Fault(
        "launcher/backends/sagemaker/jobs/states.py",
        '"MaxRuntimeExceeded": (RunState.INTERRUPTED,',
        '"MaxRuntimeExceeded": (RunState.STOPPED,',
        "launcher/sagemaker/test_parts.py",
        "a job out of time cannot be resumed",
    ),
    Fault(
        "launcher/backends/sagemaker/pipelines/pipeline_definition.py",
        "json.dumps([spec_digest, code, image])",
        "json.dumps([code, image])",
        "launcher/test_pipelines.py",
        "a changed step reuses the cached one's address",
    ),
    Fault(
        "worker/training/schedule.py",
        "return peak * step / warmup_steps",
        "return peak * (step - 1) / warmup_steps",
        "worker/test_schedule.py",
        "the first step trains at rate zero",
    ),
    Fault(
        "worker/training/token_loss.py",
        "F.pad(labels[:, 1:], (0, 1), value=IGNORED)",
        "F.pad(labels[:, 1:], (0, 1), value=0)",
        "worker/test_worlds.py",
        "the last position of a row counts",
    ),
    Fault(
        "worker/training/nonfinite_policy.py",
        "if (length := self._bad.count(step)) >= self._spec.limit:",
        "if (length := self._bad.count(step)) > self._spec.limit:",
        "worker/test_nonfinite_policy.py",
        "one step too many is skipped",
    ),
    Fault(
        "worker/transfer/agent_process.py",
        "    raise _Ended\n\n\ndef _listen",
        "    os._exit(0)\n\n\ndef _listen",
        "worker/test_transfer_agent.py",
        "an agent that ends leaves its upload open",
    ),
    Fault(
        "cli/app.py",
        "sys.exit(USAGE_EXIT_CODE if isinstance(error, _REFUSALS) else 1)",
        "sys.exit(1)",
        "cli/test_cli.py",
        "a wrong specification has the exit code of a failed run",
    ),
)


def spoil(tree: Path, fault: Fault) -> None:
    """Put the fault into a copy of the tree. Raises ``ValueError`` if its text is not there exactly once."""
    module = tree / "sm_llm" / fault.module
    text = module.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.module} holds {fault.old!r} {text.count(fault.old)} times; adapt tests/mutations.py")
    module.write_text(text.replace(fault.old, fault.new))


def run(tree: Path, tests: list[str]) -> tuple[int, str]:
    """pytest's exit code in ``tree``, and the first test that failed or the last line."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-m", "not exhaustive and not gpu"]
    command += [f"tests/{test}" for test in tests]
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else (done.stdout + done.stderr).strip().rpartition("\n")[2]


def asked(words: list[str]) -> list[int]:
    """The numbers of the faults to try; leaves with exit code 2 for anything else."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    numbers = range(1, len(FAULTS) + 1)
    what = f"a fault to try, 1 to {len(FAULTS)}; without any, all are tried"
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help=what)
    given: list[int] = parser.parse_args(words).numbers
    if wrong := [it for it in given if it not in numbers]:
        parser.error(f"NUMBER must be 1 to {len(FAULTS)}, got {', '.join(map(str, wrong))}")
    return given or list(numbers)


def copy_sources(tree: Path) -> None:
    """Copy what git does not ignore: a pattern such as ``runs`` would also match a package of that name."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)


def main(numbers: list[int]) -> None:
    """Try the faults of these numbers."""
    chosen = [(number, fault) for number, fault in enumerate(FAULTS, 1) if number in numbers]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        copy_sources(tree)
        code, line = run(tree, sorted({test for _, fault in chosen for test in fault.tests.split()}))
        if code:
            sys.exit(f"without a fault the tests must pass: {line}")
        print("| # | module | fault | caught by |\n|--:|---|---|---|", flush=True)
        missed = 0
        for number, fault in chosen:
            original = (tree / "sm_llm" / fault.module).read_text()
            spoil(tree, fault)
            code, line = run(tree, fault.tests.split())
            (tree / "sm_llm" / fault.module).write_text(original)
            missed += code != 1
            caught = f"`{line}`" if code == 1 else f"NOT CAUGHT (pytest's exit code {code}: {line})"
            print(f"| {number} | `{fault.module}` | {fault.what} | {caught} |", flush=True)
    sys.exit(f"{missed} of {len(chosen)} faults not caught" if missed else 0)


if __name__ == "__main__":
    main(asked(sys.argv[1:]))
