"""requirements.txt as pip reads it: continued lines, options, and files that do not go with the program."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from sm_llm.launcher.images import images
from sm_llm.launcher.planner import plan
from sm_llm.launcher.planning.plan import requirements
from sm_llm.launcher.planning.requirement_file import logical_lines, requirement_issues
from sm_llm.launcher.planning.source_tree import source_tree
from sm_llm.spec.loading.load import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sm_llm.errors import Issue

    Faults = Callable[..., list[Issue]]

GPU = next(it for it in images.IMAGES if it.stack == "gpu")


def test_C12_continued_lines_are_joined_as_pip_does() -> None:
    """Compared with pip's own reader of such files."""
    text = "torch\\\n==2.1.0 \\\n  --hash=sha256:00\n# a comment \\\neinops  # why\nrich \\\n# ends it\nabc\\\n"
    assert list(logical_lines(text)) == [(1, "torch==2.1.0   --hash=sha256:00"), (5, "einops"), (6, "rich"), (8, "abc")]
    from pip._internal.req.req_file import preprocess

    assert [(number, line.strip()) for number, line in preprocess(text)] == list(logical_lines(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torch \\\n  ==2.1.0\n", "line 1 asks for torch   ==2.1.0, which belongs to the image"),
        ("einops\n-c missing.txt\n", "line 2 names a file that does not go with the program"),
        ("--constraint=missing.txt\n", "line 1 names a file"),
        ("-r missing.txt\n", "line 1 names a file"),
        ("-rmissing.txt\n", "line 1 names a file"),
        ("-r ../outside.txt\n", "line 1 names a file"),
        ("-r left_out.txt\n", "line 1 names a file"),
        ("-r sub/more.txt\n", "task.source/sub/more.txt: line 1 names a file"),
        ("-e .\n", "line 1 asks pip to install a folder that has no pyproject.toml"),
        ("--editable ./bare\n", "line 1 asks pip to install a folder"),
        ("-e gone\n", "line 1 names a folder"),
        ("./gone\n", "line 1 names a folder"),
        ("../outside\n", "line 1 names a folder"),
        ("gone-1.0-py3-none-any.whl\n", "line 1 names an archive"),
        ("--install-option=x\n", "line 1 has an option that pip does not take"),
        ("-e ./torch-2.1.0.zip\n", "names an archive"),
    ],
)
@pytest.mark.parametrize("bundled", [False, True])
def test_C12_what_pip_could_not_install_in_the_job_is_refused(
    text: str, words: str, bundled: bool, tmp_path: Path
) -> None:
    root = tmp_path / "src"
    for name in ("bare/x.py", "sub/x.py", "left_out.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (root / ".smllmignore").write_text("left_out.txt\n")
    (root / "sub" / "more.txt").write_text("-r gone.txt\n")
    (tmp_path / "outside.txt").write_text("einops\n")
    (root / "requirements.txt").write_text(text)
    files = source_tree(root).files if bundled else None
    found = list(requirement_issues(root / "requirements.txt", GPU, files))
    assert found
    assert words in str(found[0])


def test_C12_what_pip_installs_is_not_refused(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "lib/setup.py", "wheels/a-1.0-py3-none-any.whl", "sub/limits.txt", "sub/more.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "sub" / "more.txt").write_text("-c limits.txt\neinops\n")
    (tmp_path / "requirements.txt").write_text(
        "-e .\n-e ./lib\n./lib\n.[extra]\n./wheels/a-1.0-py3-none-any.whl\n-r sub/more.txt\n-r requirements.txt\n"
        "--extra-index-url https://example.com/simple\n-i https://example.com/simple\n--pre\n-c https://example.com/c\n"
        "name @ git+https://example.com/name\nrich; python_version < '3.12'  # only there\n"
    )
    assert list(requirement_issues(tmp_path / "requirements.txt", GPU)) == []
    assert list(requirement_issues(tmp_path / "requirements.txt", GPU, source_tree(tmp_path).files)) == []
    (tmp_path / "requirements.txt").write_text("/opt/image/x.whl\n")
    assert list(requirement_issues(tmp_path / "requirements.txt", None)) == []  # an image of one's own may hold it


def test_C12_a_local_run_is_checked_alike(tmp_path: Path, faults: Faults) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "requirements.txt").write_text("einops \\\n  >=0.8\n-c missing.txt\n")
    job = {"name": "x", "task": {"kind": "script", "entry": "train.py", "source": str(tmp_path)}}
    (fault,) = faults(job)
    assert "line 3 names a file" in fault.message
    (tmp_path / "missing.txt").write_text("")
    (made,) = plan(job)
    assert made.settings["installs"].startswith("einops   >=0.8")


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://user:hunter22@x.org/simple",
        "--extra-index-url=https://user:hunter22@x.org/simple",
        "pkg @ git+https://oauth2:hunter22@github.com/x/y",
        "git+https://ghp_" + "a1B2" * 9 + "@github.com/x/y",
        "-e git+https://u:hunter22@github.com/x/y#egg=y",
        "pkg @ https://x.org/a.whl?token=hunter22hunter22",
    ],
)
def test_S12_22_a_password_in_a_requirement_is_refused_and_not_shown(line: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"einops\n{line}\n")
    (fault,) = requirement_issues(tmp_path / "requirements.txt", None)
    assert "line 2 holds a token or password" in fault.message
    assert not re.search("hunter22|a1B2", str(fault))
    shown = requirements(load({"name": "x", "task": {"kind": "script", "source": str(tmp_path), "entry": "-m x"}}).spec)  # type: ignore[arg-type]
    assert not re.search("hunter22|a1B2", str(shown))


def test_S12_22_a_reference_to_a_secret_is_not_one(tmp_path: Path) -> None:
    line = "--index-url https://${USER_NAME}:${INDEX_TOKEN}@x.org/simple"
    (tmp_path / "requirements.txt").write_text(f"{line}\nx @ https://u:${{T}}@x.org/x-1.whl\n")
    assert list(requirement_issues(tmp_path / "requirements.txt", None)) == []
