"""transformers' ``Trainer`` with nothing but ``CkptdCallback`` added, through SIGKILL.

What is compared with is a Trainer without ckptd: parameters, optimizer, scheduler, random state,
step, and the whole log (losses, gradient norms, rates, evaluations), to the bit.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess
from tests.e2e.lives import Life, Parent, Run, resumed_at
from tests.e2e.two_ranks import TwoRanks
from tests.long import long

# Looked for, not imported: every worker collects every file, and importing takes seconds.
pytestmark = pytest.mark.skipif(
    not all(find_spec(name) for name in ("accelerate", "transformers")),
    reason="transformers and accelerate are not installed: pip install ckptd[test]",
)

JOB = "tests.e2e.trainer_job"
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    with Parent(JOB) as made:
        yield made


def test_resumes_at_the_exact_bits(parent: Parent, tmp_path: Path, daemon: DaemonProcess) -> None:
    """In the middle of an epoch, and at the first step of one; with another seed; and once more
    when all is done.
    """
    plain = Life(tmp_path / "plain.pt", "--bf16")
    middle, edge = Run(tmp_path, daemon, "--bf16"), Run(tmp_path, daemon, "--bf16")
    codes = parent.live(
        [
            [plain, middle.life("--kill-at", "13"), edge.life("--kill-at", "15")],
            [middle.life("--seed", "77"), edge.life()],
            [edge.life()],
        ],
    )
    told = "\n".join(life.log for life in (plain, *middle.lives, *edge.lives))
    assert codes == [[0, KILLED, KILLED], [0, 0], [0]], told
    assert resumed_at(middle.lives[1].log) in (12, 13), told
    assert resumed_at(edge.lives[1].log) in (14, 15), told
    assert resumed_at(edge.lives[2].log) == 18, told
    for life in (middle.lives[1], edge.lives[1], edge.lives[2]):
        assert differences(plain.out, life.out) == [], told


def test_a_checkpoint_of_the_trainer_that_a_kill_cut_off(
    parent: Parent, tmp_path: Path, daemon: DaemonProcess
) -> None:
    """``resume_from_checkpoint=True`` took the half-written one and failed at each start, though
    there were newer snapshots.

    It is said and passed over: the snapshots of the run come first. Named by its path, it is
    refused. A run without snapshots begins at the newest complete one.
    """
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    plain, run = Life(tmp_path / "whole" / "plain.pt", "--save"), Run(tmp_path / "cut", daemon)
    torn = tmp_path / "cut" / "hf" / "checkpoint-10"
    codes = parent.live([[plain, run.life("--save", "--kill-in-save", "10")]])
    assert codes == [[0, KILLED]], run.lives[0].log
    assert (torn / "optimizer.pt").exists()
    assert not (torn / "trainer_state.json").exists()
    other = Run(tmp_path / "cut", daemon)
    named = run.life("--save", "--resume-from", str(torn))
    anew = other.life("--save", "--resume-from", "last", "--kill-at", "7")
    last = run.life("--save", "--resume-from", "last")
    codes = parent.live([[named], [anew], [last]])
    told = "\n".join(life.log for life in (plain, *run.lives, *other.lives))
    assert codes == [[1], [KILLED], [0]], told
    assert "checkpoint-10' is half-written: its last file, trainer_state.json" in named.log, told
    assert re.search(r"ignoring the half-written checkpoint \S*checkpoint-10 ", last.log), told
    assert re.search(r"training starts at \S*checkpoint-5\.", anew.log), told
    assert resumed_at(last.log) in (8, 9), told
    assert differences(plain.out, last.out) == [], told


@long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--data", "stream"), id="stream without a length"),
        pytest.param(("--data", "noisy", "--workers", "1", "--refetch"), id="random workers"),
    ],
)
def test_other_data(parent: Parent, tmp_path: Path, daemon: DaemonProcess, options: tuple[str, ...]) -> None:
    """Data that cannot be skipped is fetched again, to the very same batches."""
    plain, run = Life(tmp_path / "plain.pt", *options), Run(tmp_path, daemon, *options)
    codes = parent.live([[plain, run.life("--kill-at", "10")], [run.life()]])
    told = "\n".join(life.log for life in (plain, *run.lives))
    assert codes == [[0, KILLED], [0]], told
    assert differences(plain.out, run.lives[1].out) == [], told


@long
def test_a_batch_that_is_another_is_noticed(parent: Parent, tmp_path: Path, daemon: DaemonProcess) -> None:
    """The control: with one random state not restored, replay itself says so; and the comparison
    tells two seeds apart.
    """
    run = Run(tmp_path, daemon)
    plain, other = Life(tmp_path / "plain.pt"), Life(tmp_path / "other.pt", "--seed", "2")
    codes = parent.live([[run.life("--kill-at", "13"), plain, other], [run.life("--forget")]])
    assert codes == [[KILLED, 0, 0], [1]], run.lives[1].log
    assert "ReplayMismatch" in run.lives[1].log
    assert "log" in differences(plain.out, other.out)


@long
def test_two_ranks(parent: Parent, tmp_path: Path, daemon: DaemonProcess) -> None:
    """DistributedDataParallel: one rank is killed, the other fails with it, and both come back to
    the same step.
    """
    ranks = TwoRanks(tmp_path, daemon, 7)
    codes = parent.live([[*ranks.plain, *ranks.killed], ranks.resumed])
    assert codes == [[0, 0, 1, KILLED], [0, 0]], ranks.told
    ranks.check((6, 7))
