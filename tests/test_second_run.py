"""A test that fails among others and passes alone is named, and no failure is forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ckptd.running import ROOT

# Fails for as many runs as its file has lines.
FAILS = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", {names})
def test_of(name):
    path = Path(__file__).with_name(name)
    left = path.read_text().splitlines() if path.exists() else []
    path.write_text("\\n".join(left[1:]))
    assert not left, f"{{name}} fails"
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("CKPTD_CPU_SECONDS", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.second_run", "-q", *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def suite(folder: Path, fails: dict[str, int]) -> None:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_some.py").write_text(FAILS.format(names=sorted(fails)))
    for name, times in fails.items():
        (folder / name).write_text("x\n" * times)


def test_what_passes_is_not_run_again(tmp_path: Path) -> None:
    suite(tmp_path, {"a": 0, "b": 0})
    code, text = run(tmp_path)
    assert code == 0
    assert "2 passed" in text
    assert "alone" not in text


@pytest.mark.parametrize("flags", [(), ("-n", "2", "--dist", "loadfile")])
def test_what_passes_alone_is_named_with_its_first_report(tmp_path: Path, flags: tuple[str, ...]) -> None:
    suite(tmp_path, {"a": 0, "b": 1, "c": 1})
    code, text = run(tmp_path, *flags)
    assert code == 0
    assert "b fails" in text
    named = text.rpartition("FAILED AMONG OTHERS, passed alone")[2]
    assert named.split()[-2:] == ["test_some.py::test_of[b]", "test_some.py::test_of[c]"]


def test_what_fails_alone_too_is_a_failure(tmp_path: Path) -> None:
    suite(tmp_path, {"a": 0, "b": 2, "c": 1})
    code, text = run(tmp_path)
    assert code == 1
    assert "FAILED AMONG OTHERS" not in text


def test_three_failures_are_no_chance(tmp_path: Path) -> None:
    suite(tmp_path, {"a": 1, "b": 1, "c": 1})
    code, text = run(tmp_path)
    assert code == 1
    assert "Alone" not in text


def test_an_error_of_collection_is_not_run_again(tmp_path: Path) -> None:
    suite(tmp_path, {"a": 0})
    (tmp_path / "test_other.py").write_text("import nothing_of_that_name")
    assert run(tmp_path)[0] == 2
