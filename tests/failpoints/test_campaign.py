"""A few strikes of the campaign, in a process of its own: it changes the environment of all that it starts."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.failpoints.beside import Beside
from tests.failpoints.campaign import AT_END, Coverage, keep_failure
from tests.failpoints.runtime import Arm
from tests.failpoints.world import Layout, Round, Strike

ROOT = Path(__file__).resolve().parents[2]
SEED = os.environ.get("CKPTD_SEED", "1")


@pytest.mark.slow
def test_a_job_that_is_hurt_at_failpoints_ends_with_the_same_bits() -> None:
    """Two ranks on two nodes with replicas and a store; ``CKPTD_SEED`` draws other points."""
    command = [sys.executable, "-m", "tests.failpoints.campaign", "--kills", "6", "--seed", SEED, "--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]
    assert "6 strikes" in done.stdout
    assert "\n0 failed rounds" in done.stdout


LAYOUT = Layout("plain", 2, 2, 1, stores=True)
LOCK = "ckptd.memory.locks.try_lock/fcntl.fcntl"
OPEN = "ckptd.memory.locks.lock_file/os.open"


def plans(folder: Path, *hits: str) -> Path:
    """A campaign's folder in which processes have reached these."""
    folder.mkdir()
    (folder / "hits").write_text("".join(f"{hit}\n" for hit in hits))
    return folder


def test_the_coverage_of_several_runs_adds_up_in_a_file(tmp_path: Path) -> None:
    """Also of two that run at once; draws go to what was hurt least in all of them."""
    file = tmp_path / "coverage.json"
    one = Coverage(plans(tmp_path / "1", f"daemon {LOCK} before 4 ", f"daemon {OPEN} before 1 "), file)
    other = Coverage(plans(tmp_path / "2", f"daemon {LOCK} after 4 "), file)
    for coverage in (one, other):
        coverage.learn(LAYOUT, "")
    one.note(Arm(LOCK, "daemon", "before", 1, "kill"), hurt=True)
    other.note(Arm(LOCK, "daemon", "after", 1, "kill"), hurt=False)
    one.sums["strikes"] += 1
    one.save()
    other.save()
    other.save()
    one.save()
    third = Coverage(plans(tmp_path / "3"), file)
    for coverage in (one, other, third):
        assert coverage.fired == {("daemon", LOCK, "before"): 1}
        assert coverage.missed == {("daemon", LOCK, "after"): 1}
        assert coverage.sums == {"strikes": 1}
        assert len(coverage.known()) == 3
        assert coverage.draw_layout(random.Random(0)) == LAYOUT
    assert third.draw(random.Random(0), LAYOUT)[0].point == OPEN
    assert third.draw_at_end(random.Random(0)) is None


def test_what_only_an_answer_to_an_error_reaches_is_hurt_after_that_error(tmp_path: Path) -> None:
    """And what only the end of a job reaches, there."""
    hits = f"daemon {LOCK} before 1 EIO@{OPEN}"
    coverage = Coverage(plans(tmp_path / "1", hits))
    coverage.learn(LAYOUT, "")
    plan, beside = coverage.draw(random.Random(0), LAYOUT)
    assert (plan.point, plan.action, plan.then, beside) == (OPEN, "EIO", (LOCK, "before"), "")
    coverage.note(plan, hurt=True, then=True)
    assert coverage.fired == {("daemon", OPEN, "before"): 1, ("daemon", LOCK, "before"): 1}
    at_end = Coverage(plans(tmp_path / "2", f"trainer {LOCK} before 1 "))
    at_end.learn(LAYOUT, AT_END)
    found = at_end.draw_at_end(random.Random(0))
    assert found is not None
    assert found.point == LOCK


def test_what_a_command_of_an_operator_reaches_is_hurt_beside_any_job(tmp_path: Path) -> None:
    """But for one that needs a store."""
    coverage = Coverage(plans(tmp_path / "1", f"ctl {LOCK} before 1 "))
    coverage.learn(LAYOUT, Beside.VERIFY)
    coverage.begin_round()
    (tmp_path / "1" / "hits").write_text(f"daemon {OPEN} before 1 \n")
    coverage.note(Arm(OPEN, "daemon", "before", 1, "kill"), hurt=True)
    for stores, point in ((True, LOCK), (False, OPEN)):
        plan, _ = coverage.draw(random.Random(0), Layout("dense", 2, 3, 0, stores=stores))
        assert plan.point == point


def test_a_failed_round_is_kept_whatever_runs_later(tmp_path: Path) -> None:
    """The log of one was overwritten by the next run before it was read."""
    strikes = [Strike(Arm(LOCK, "daemon", "before", 1, "kill"))]
    failed = Round(LAYOUT, 2304, strikes, ["not all ranks trained"], logs="-- log of n0")
    kept = [keep_failure(tmp_path / "coverage.json", failed) for _ in range(2)]
    assert len({*kept}) == 2
    for path in kept:
        text = path.read_text()
        assert "seed 2304" in text
        assert LOCK in text
        assert "not all ranks trained\n-- log of n0" in text
