"""Processes of a local run listen on the loopback interface alone."""

from __future__ import annotations

import ipaddress
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher import api
from sm_llm.launcher.backends.local.container import LOOPBACK_ENVIRONMENT
from sm_llm.runs.run_states import RunState
from tests.launcher.conftest import SYNTHETIC

if TYPE_CHECKING:
    from sm_llm.launcher.run import Run

pytestmark = pytest.mark.integration


def listening() -> dict[str, str]:
    """Inode -> address of every TCP socket of this machine that listens."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                raw = bytes.fromhex(words[1].partition(":")[0])
                whole = b"".join(struct.pack(">I", it) for it in struct.unpack(f"<{len(raw) // 4}I", raw))
                found[words[9]] = str(ipaddress.ip_address(whole))
    return found


def addresses_of(run: Run) -> set[str]:
    """Where processes of the run listen now."""
    sockets, found = listening(), set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"SM_LLM_RUN_FOLDER={run.root}".encode() not in (process / "environ").read_bytes().split(b"\0"):
                continue
            targets = [os.readlink(it) for it in (process / "fd").iterdir()]
        except OSError:
            continue
        found |= {sockets[it[8:-1]] for it in targets if it.startswith("socket:[") and it[8:-1] in sockets}
    return found


def watched(run: Run, fakes: Any, seen_file: Path | None = None) -> set[str]:
    """Where processes of the run listened until its end; ``seen_file`` appears when something was seen."""
    seen: set[str] = set()

    def ended() -> bool:
        seen.update(addresses_of(run))
        if seen and seen_file:
            seen_file.touch()
        return run.state.is_final

    fakes.wait_until(ended)
    assert run.state is RunState.COMPLETED, list(run.logs())
    return seen


@pytest.mark.parametrize(("nodes", "processes"), [(1, 2), (2, 1)])
def test_9_a_training_listens_on_loopback_only(fakes: Any, nodes: int, processes: int) -> None:
    compute = {"instance_count": nodes, "processes_per_instance": processes}
    run = api.launch({**SYNTHETIC, "storage": str(fakes.storage), "compute": compute})
    seen = watched(run, fakes)
    assert seen, "torchrun's store and gloo listen"
    assert not [it for it in seen if not ipaddress.ip_address(it).is_loopback], seen


def test_9_a_script_job_of_two_processes_listens_on_loopback_only(fakes: Any, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text(
        "import os, time\nassert os.environ['GLOO_SOCKET_IFNAME'] == os.environ['NCCL_SOCKET_IFNAME']\n"
        "open(os.environ['SM_LLM_OUTPUT'] + '/x', 'w').write('x')\n"
        f"while not os.path.exists({str(tmp_path / 'seen')!r}):\n    time.sleep(0.05)\n"
    )
    task = {"kind": "script", "entry": "main.py", "source": str(tmp_path / "src")}
    run = api.launch(
        {"name": "two", "task": task, "storage": str(fakes.storage), "compute": {"processes_per_instance": 2}}
    )
    seen = watched(run, fakes, tmp_path / "seen")
    assert seen
    assert not [it for it in seen if not ipaddress.ip_address(it).is_loopback], seen


def test_the_interface_is_the_one_that_this_machine_calls_loopback() -> None:
    assert {Path("/sys/class/net", it).is_dir() for it in LOOPBACK_ENVIRONMENT.values()} == {True}
