"""The tutorial, typed as it stands there: the same lines come, but for numbers that machines differ in."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.code_blocks import ROOT, blocks_of
from tests.docs.test_console_blocks import commands

PAGE = ROOT / "docs/tutorial.md"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A user without a daemon; the trainer starts one, which the last command of the page ends."""
    segments = Path(f"/dev/shm/ckptd-test-{secrets.token_hex(6)}")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    folders = {"CKPTD_RUNTIME_DIR": str(tmp_path / "run"), "CKPTD_SEGMENT_DIR": str(segments)}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    given = {**kept, **folders, "CKPTD_MEMORY": "64MiB", "PATH": path, "PYTHONPATH": str(ROOT)}
    try:
        yield given
    finally:
        command = [sys.executable, "-m", "ckptd.ctl", "stop", "--wait"]  # if a command before it failed
        subprocess.run(command, env=given, capture_output=True, check=False)
        shutil.rmtree(segments, ignore_errors=True)


def test_the_tutorial(tmp_path: Path, environment: dict[str, str]) -> None:
    (program,) = [block for block in blocks_of(PAGE) if block.language == "python"]
    (tmp_path / "train.py").write_text(program.text)
    typed = [each for each in commands() if each.block.page == "docs/tutorial.md" and "pip" not in each.line]
    assert len(typed) == 8
    said, ran = list[list[str]](), list[list[str]]()
    for command in typed:
        # `ckptctl` of this tree, whether it is installed or not.
        script = f'ckptctl() {{ python -m ckptd.ctl "$@"; }}\n{command.line}\n'
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        shown = done.stdout + (
            "Killed\n" if abs(done.returncode) in (signal.SIGKILL, 128 + signal.SIGKILL) else ""
        )  # a shell says it
        assert masked(shown) == masked(command.output), f"{command}:\n{shown}"
        if "train.py" in command.line:
            said.append(results(command.output))
            ran.append(results(shown))
    for calm, killed, resumed in (said, ran):
        assert len(calm) == 7
        assert killed == calm[: len(killed)]
        assert resumed == calm[-len(resumed) :]
        assert len(killed) + len(resumed) >= len(calm)  # more if few snapshots were complete: steps again


def results(text: str) -> list[str]:
    """The losses, and the sum of the weights."""
    return re.findall(r"^step \d+: loss .*|^sum of the weights .*", text, re.MULTILINE)


def masked(text: str) -> set[str]:
    """The different lines without their numbers: another machine has others, and other snapshots are complete.
    On a busy one ckptd also says what holds training up.
    """
    text = re.sub(
        r"^ckptd: (copies hold training up|digests are slower|training is slower).*\n",
        "",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"replay begins at \d+: .*", "replay begins", text)
    text = re.sub(r"\d[\d.]*( [KMG]iB)?", "#", text)
    return {" ".join(line.split()) for line in text.splitlines()}
