"""The test suite's own tools: each is shown by a small suite that runs in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import durations, mutations

pytestmark = pytest.mark.integration

TESTS = Path(__file__).parent
MEASURED = {"tests/test_long.py": [1, 90, 90, "test_it"], "tests/test_short.py": [1, 2, 2, "test_it"]}

SWEEP = """
    import pytest
    from tests.fixtures.sampling import one_of_each, pick, sample

    @pytest.mark.parametrize(("left", "right"), sample([(n, pytest) for n in range(20)], 3), ids=str)
    def test_pair(left, right):
        assert right is pytest

    @pytest.mark.parametrize("moment", sample([pytest.param(n, id=f"at-{n}") for n in range(20)], 2))
    @pytest.mark.integration
    def test_moment(moment):
        pass

    def test_loop():
        print("picked", *pick(range(20), 3))
        print("kinds", *one_of_each(["PUT /a/1", "PUT /a/2", "GET /a/1", "PUT /0123456789abcdef"]))
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder of tests under this suite's own plugins and settings."""
    (tmp_path / "setup.cfg").write_text((TESTS.parent / "setup.cfg").read_text())
    (tmp_path / "tests").mkdir()
    for name in ("__init__.py", "conftest.py", "durations.py", "fixtures"):
        (tmp_path / "tests" / name).symlink_to(TESTS / name)
    (tmp_path / "tests/durations.json").write_text(json.dumps({"default": MEASURED, "integration": {}}))
    return tmp_path


def run(suite: Path, source: str, *options: str, file: str = "tests/test_it.py") -> str:
    """The output of pytest for one file of tests."""
    (suite / file).write_text(textwrap.dedent(source))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=suite, env=environ, capture_output=True, text=True, timeout=240)
    return done.stdout + done.stderr


def cases(output: str) -> set[str]:
    return set(re.findall(r"::(test_\w+\[.*?\])", output))


def test_sweep_is_sampled(suite: Path) -> None:
    """A seed draws the same cases in every process; another seed draws others; the marker runs them all."""
    first = run(suite, SWEEP, "-v", "-n", "2", "--sample-seed", "1")
    again = run(suite, SWEEP, "-v", "-n", "0", "-s", "--sample-seed", "1")
    other = run(suite, SWEEP, "-v", "-n", "0", "--sample-seed", "2")
    assert cases(first) == cases(again) != cases(other)
    assert len(cases(first)) == len(cases(other)) == 3
    assert "--sample-seed 1)" in first
    assert re.search(r"test_it\.py: 37\n", first)
    assert len(re.search(r"picked ([\d ]+)", again)[1].split()) == 3  # type: ignore[index]
    assert re.search(r"kinds [01] 2 3\n", again)


def test_sweep_of_integration_tests(suite: Path) -> None:
    sampled = run(suite, SWEEP, "-v", "-n", "0", "-m", "integration")
    assert len(cases(sampled)) == 2
    assert re.search(r"--sample-seed 20\d{6}\)", sampled)
    whole = run(suite, SWEEP, "-v", "-n", "0", "-s", "-m", "exhaustive or not gpu")
    assert len(cases(whole)) == 20 + 20
    assert "sweeps: every case" in whole
    assert len(re.search(r"picked ([\d ]+)", whole)[1].split()) == 20  # type: ignore[index]
    assert "kinds 0 1 2 3" in whole


DRAWS = """
    import zlib

    import ours
    from hypothesis import given, strategies as st

    drawn = []

    @given(st.text())
    def test_draws(text):
        drawn.append(text)

    def test_report():
        print("drawn:", len(drawn), zlib.crc32(repr(drawn).encode()), any("of our own" in it for it in drawn))

    @given(st.integers())
    def test_fails(value):
        assert value < 7
"""


@pytest.mark.timeout(600)
def test_random_draws_are_the_same_in_every_run(suite: Path) -> None:
    """A run draws by the tests alone, whatever is loaded, and keeps nothing; an exhaustive run draws anew, and more."""
    (suite / "ours.py").write_text("")
    found = []
    for options in (["-n", "1", "-rP"], ["-n", "0", "-s"], *[["-n", "0", "-s", "-m", "exhaustive or not gpu"]] * 2):
        output = run(suite, DRAWS, *options)
        assert "1 failed, 2 passed" in output
        found.append(re.search(r"drawn: (\d+) (\d+) (\w+)", output).groups())  # type: ignore[union-attr]
        (suite / "ours.py").write_text("".join(f"TEXT_{n} = 'text {n} of our own'\n" for n in range(1000)))
    first, again, whole, anew = found
    assert first == again
    assert first[0] == "100"
    assert first[2] == "False"
    assert whole[0] == anew[0] == "2000"
    assert whole[1] != anew[1]
    assert whole[2] == "True"
    assert not (suite / ".hypothesis/examples").exists()


PASSES = """
    import pytest

    @pytest.mark.timeout(30)
    def test_it():
        pass
"""


def test_longest_files_run_first(suite: Path) -> None:
    """By their measured time, or by their timeout. A process busy with one long test books the shortest file next."""
    for name in ("long", "new", "short"):
        (suite / f"tests/test_{name}.py").write_text(textwrap.dedent(PASSES))
    alone = run(suite, PASSES.replace("30", "1"), "-v", "-n", "0", file="tests/test_brief.py")
    assert re.findall(r"tests/test_(\w+)\.py::test_it PASSED", alone) == ["long", "new", "short", "brief"]
    shared = run(suite, PASSES.replace("30", "1"), "-v", "-n", "1", file="tests/test_brief.py")
    assert re.findall(r"PASSED \S* *tests/test_(\w+)\.py", shared) == ["long", "brief", "short", "new"]


FAILS = """
    import http.client, threading, time
    from types import SimpleNamespace
    from urllib.parse import urlsplit

    import pytest
    from tests.fixtures.fault_proxy import Rule, running_proxy

    @pytest.fixture(scope="session")
    def world(tmp_path_factory):
        folder = tmp_path_factory.mktemp("world")
        (folder / "state.json").write_text("{}")
        return SimpleNamespace(folder=folder)

    @pytest.fixture(scope="session")
    def broken(tmp_path_factory):
        (tmp_path_factory.mktemp("launch") / "stderr").write_text("it broke off")
        raise RuntimeError

    def test_uses_the_world(world):
        pass

    def test_fails(world, tmp_path):
        logs = tmp_path / "run/logs/attempt-1"
        logs.mkdir(parents=True)
        for node in range(2):
            (logs / f"node-{node}.log").write_text("".join(f"node {node} line {n:03}\\n" for n in range(100)))
        (tmp_path / "many").mkdir()
        for n in range(100):
            (tmp_path / f"many/{n:03}").touch()
        with running_proxy("http://127.0.0.1:1", tmp_path / "requests.log") as proxy:
            for path in ("/before", "/first", "/second"):
                if path == "/first":
                    proxy.set(Rule("GET", "503", first=1))
                connection = http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc)
                connection.request("GET", path)
                try:
                    connection.getresponse()
                except OSError:
                    pass
            raise AssertionError

    def test_set_up_fails(broken):
        pass

    def test_sleeps(tmp_path):
        time.sleep(0.25)
        thread = threading.Thread(target=time.sleep, args=(0.75,))
        thread.start()
        thread.join()

    def test_reports_nothing_of_others():
        raise AssertionError
"""


def assert_summary(output: str) -> None:
    """Of FAILS: the slowest tests, and the seconds slept in its processes."""
    assert re.search(r"slowest tests.*\n +\d+\.\d s  tests/test_it\.py::test_", output)
    slept = re.search(r"(\d+\.\d) s in main threads, (\d+\.\d) s in other", output)
    assert slept
    assert float(slept[1]) >= 0.2
    assert float(slept[2]) >= 0.7


def test_failure_shows_files_logs_and_requests(suite: Path) -> None:
    output = run(suite, FAILS, "-n", "2")
    part = r"(?ms)^_+ (?:ERROR at setup of )?(test_\w+) _+$(.*?)(?=^_{5,} |^=)"
    shown: dict[str, str] = dict(re.findall(part, output))
    failed = shown["test_fails"]
    assert "state.json  2 bytes" in failed
    assert "node-1.log  1600 bytes" in failed
    assert "... and 76 more" in failed
    for node in range(2):
        assert f"node {node} line 070\n" in failed
        assert f"node {node} line 099\n" in failed
        assert f"node {node} line 069\n" not in failed
    assert re.search(r"requests at http://127\.0\.0\.1:\d+, in front of http://127\.0\.0\.1:1 ", failed)
    assert len(re.findall(r"\n    0 +GET /before\n    0 +GET /first\n    1  503 +GET /second\n", failed)) == 2, (
        "here, and in the file"
    )
    assert "it broke off" in shown["test_set_up_fails"]
    assert not re.search("files of|end of|requests at", shown["test_reports_nothing_of_others"])
    assert "state.json" not in shown["test_set_up_fails"]
    assert_summary(output)


def test_table_is_of_the_measured_durations_of_tests_that_exist() -> None:
    assert durations.table(durations.read()) in (TESTS / "README.md").read_text()
    for files in durations.read().values():
        for name, measured in files.items():
            test = measured.longest_test.partition("[")[0]
            text = (TESTS.parent / name).read_text()
            assert f"def {test}(" in text, f"{name} has no {test} any more: measure again, python -m tests.durations"


@pytest.mark.parametrize("fault", mutations.FAULTS, ids=[fault.module for fault in mutations.FAULTS])
def test_deliberate_faults_fit_the_code(fault: mutations.Fault, tmp_path: Path) -> None:
    """``python -m tests.mutations`` tries them; each is in a module of its own and names tests that exist."""
    (tmp_path / "sm_llm" / fault.module).parent.mkdir(parents=True)
    shutil.copy(TESTS.parent / "sm_llm" / fault.module, tmp_path / "sm_llm" / fault.module)
    mutations.spoil(tmp_path, fault)
    compile((tmp_path / "sm_llm" / fault.module).read_text(), fault.module, "exec")
    assert all((TESTS / name).is_file() for name in fault.tests.split())
    assert [other.module for other in mutations.FAULTS].count(fault.module) == 1


def test_durations_are_read_from_reports(suite: Path) -> None:
    """Set-up counts; an option of pytest names the report; the table replaces the old one."""
    (suite / "tests/README.md").write_text(f"before\n{durations.BEGIN}\nold\n{durations.END}\nafter\n")
    assert_summary(run(suite, FAILS, "-n", "0", "--junitxml=default.xml"))
    run(suite, SWEEP, "-n", "0", "-m", "integration", "--junitxml=integration.xml", file="tests/test_sweep.py")
    command = [sys.executable, "-m", "tests.durations", "default.xml", "integration.xml"]
    subprocess.run(command, cwd=suite, check=True, timeout=300)
    written = json.loads((suite / "tests/durations.json").read_text())
    assert written["default"]["tests/test_it.py"][0] == 5
    assert written["default"]["tests/test_it.py"][1] >= 1.0
    assert written["default"]["tests/test_it.py"][3] == "test_sleeps"
    assert written["integration"]["tests/test_sweep.py"][0] == 2
    text = (suite / "tests/README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| test_it.py | 5 |" in text
    assert "old" not in text
    wrong = subprocess.run([*command, "more"], cwd=suite, capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 1
    assert "got 3" in wrong.stderr


@pytest.mark.parametrize("words", [["all"], ["--fast"], ["0"], ["21"], ["1", "x"], ["1.5"]])
def test_the_mutation_check_refuses_what_it_does_not_know(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        mutations.asked(words)
    assert leaving.value.code == 2
    assert "usage: python -m tests.mutations" in capsys.readouterr().err


def test_the_mutation_check_takes_numbers_and_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutations.asked([]) == list(range(1, 21))
    assert mutations.asked(["5", "13"]) == [5, 13]
    with pytest.raises(SystemExit) as leaving:
        mutations.asked(["--help"])
    assert (leaving.value.code, "1 to 20" in capsys.readouterr().out) == (0, True)
