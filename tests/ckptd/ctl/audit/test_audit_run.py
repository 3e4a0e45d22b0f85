"""What an audit concludes, and what it leaves behind: no process and no folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptd.ctl.audit.audit_run import AuditFolder, conclude, differences_text, run_program
from ckptd.ctl.audit.step_copies import CopiedStep
from ckptd.ctl.command import CommandError
from ckptd.transport.messages import AuditDifference, AuditReport

STEP = CopiedStep("job", "run", 2, 4, 5, 0, {}, 0.001, 1 << 20, 1 << 21)
WEIGHT = AuditDifference(5, "operator a: param of a.weight", "a.weight", 64, 1, 1, 0.5)
MOMENT = AuditDifference(5, "operator a: optim exp_avg of a.weight", "a.weight", 64, 1, 3, 0.1)
OTHER = AuditDifference(5, "operator b: param of b.weight", "b.weight", 64, 60, 90, 0.01)
BATCHES = AuditDifference(5, "batch of iteration 4 differs", ratio=1e300)


def report(rank: int, *found: AuditDifference, result: str = "one", changed: str = "") -> AuditReport:
    return AuditReport(rank, 2, 4, 5, 10, 0.1, changed, result if found else "", len(found), found)


def verdict(*reports: AuditReport, again: tuple[AuditReport, ...] | None = None) -> tuple[bool, bool, str]:
    found = conclude(STEP, reports, reports if again is None else again, 3.0)
    return found.passed, found.certain, found.verdict


def test_without_a_difference_the_step_has_passed() -> None:
    passed, certain, text = verdict(report(0), report(1))
    assert (passed, certain) == (True, True)
    assert "from iteration 4 to 5 came to the bits that were recorded: 20 tensors of 2 ranks" in text


def test_the_tensor_that_alone_differs_is_named() -> None:
    passed, certain, text = verdict(report(0), report(1, WEIGHT, MOMENT))
    assert (passed, certain) == (False, True)
    assert "Only a.weight differs (rank 1)" in text


def test_where_many_values_differ_the_cause_was_before_the_gradients() -> None:
    passed, certain, text = verdict(report(0, WEIGHT, OTHER), report(1, OTHER))
    assert (passed, certain) == (False, True)
    assert "Many values differ (ranks 0 to 1)" in text
    assert "The largest difference is in operator a: param of a.weight" in text
    assert "or its batches were others" in verdict(report(0, BATCHES, WEIGHT), report(1))[2]


def test_what_the_auditor_may_have_caused_says_nothing_about_the_trainer() -> None:
    first = (report(0, WEIGHT), report(1))
    passed, certain, text = verdict(*first, again=(report(0, WEIGHT, result="two"), report(1)))
    assert (passed, certain) == (False, False)
    assert "a second replay came to other values" in text
    passed, certain, text = verdict(*first, again=(report(0), report(1)))
    assert (passed, certain) == (False, False)
    passed, certain, text = verdict(report(0, WEIGHT, changed="torch: 2.9 then, 2.8 now"), report(1))
    assert (passed, certain) == (False, False)
    assert "does not compute as the one that trains: torch: 2.9 then, 2.8 now" in text


def test_differences_are_shown_with_their_bits() -> None:
    found = conclude(STEP, [report(0, WEIGHT), report(1, *[MOMENT] * 9)], [], 3.0)
    lines = differences_text(found).splitlines()
    assert lines[0] == (
        "  rank 0, iteration 5: operator a: param of a.weight: 1 bit in 1 of 64 elements, by up to 0.5 of "
        "the largest value"
    )
    assert lines[-1] == "  rank 1: and 1 more (--json has all)"


def test_a_program_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = 'sleep 1000 & echo $! > "$0"; wait'
    assert run_program(["sh", "-c", script, str(pid)], 3.0, dict(os.environ)) is None
    child = pid.read_text().strip() if pid.exists() else ""
    deadline = time.monotonic() + 30
    while child and Path(f"/proc/{child}").exists():  # init takes it over, and reaps it
        if "\nState:\tZ" in Path(f"/proc/{child}/status").read_text():
            break
        assert time.monotonic() < deadline, "the child of the program still runs"
        time.sleep(0.02)
    assert run_program(["false"], 30.0, dict(os.environ)) == 1
    with pytest.raises(CommandError, match="no-such-program cannot be started"):
        run_program(["no-such-program"], 30.0, {})


def test_folders_go_with_the_audit_and_those_of_a_killed_one_with_the_next(tmp_path: Path) -> None:
    """The next one may have its copies elsewhere."""
    code = "import os, pathlib, sys; from ckptd.ctl.audit.audit_run import AuditFolder"
    killed = f"{code}; made = AuditFolder.made(pathlib.Path(sys.argv[1])); made.__enter__(); os._exit(0)"
    subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=True)
    (abandoned,) = tmp_path.iterdir()
    path = Path("/tmp") / abandoned.name.removesuffix("-copies")
    assert path.is_dir()
    with AuditFolder.made(tmp_path) as first:
        assert not path.exists()
        with AuditFolder.made(tmp_path) as second:
            assert sorted(tmp_path.iterdir()) == sorted([first.copies, second.copies])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CommandError, match="--copies names another one"), AuditFolder.made(tmp_path / "no"):
        pass


def test_a_program_of_which_not_all_ranks_came_to_the_end_is_an_error(tmp_path: Path) -> None:
    with (
        AuditFolder.made(tmp_path) as folder,
        pytest.raises(CommandError, match=r"ended with status 3, and 0 of 2 ranks .* trains job/run"),
    ):
        folder.run(lambda environment: 3, STEP)
