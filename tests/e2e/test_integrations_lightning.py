"""Lightning's ``Trainer`` with nothing but ``CkptdCallback`` added, through SIGKILL.

What is compared with is a Trainer without ckptd: parameters, buffers, optimizer, scheduler, random
state, all counters of all loops, the loss of every batch and the logged means of every epoch, to
the bit.
"""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess
from tests.e2e.lives import Life, Run, live, resumed_at
from tests.e2e.two_ranks import TwoRanks
from tests.long import long

# Looked for, not imported: every worker collects every file, and importing takes seconds.
pytestmark = pytest.mark.skipif(
    not all(find_spec(name) for name in ("lightning", "pytorch_lightning")),
    reason="lightning is not installed: pip install ckptd[test]",
)

JOB = "tests.e2e.lightning_job"
KILLED = -signal.SIGKILL


def test_resumes_at_the_exact_bits(tmp_path: Path, daemon: DaemonProcess) -> None:
    """In the middle of an epoch, and at the first step of one; with another seed; and once more
    when all is done.
    """
    options = ("--precision", "bf16-mixed")
    plain = Life(tmp_path / "plain.pt", *options)
    middle, edge = Run(tmp_path, daemon, *options), Run(tmp_path, daemon, *options)
    codes = live(
        JOB,
        [
            [plain, middle.life("--kill-at", "14"), edge.life("--kill-at", "15")],
            [middle.life("--seed", "77"), edge.life()],
            [edge.life()],
        ],
    )
    told = "\n".join(life.log for life in (plain, *middle.lives, *edge.lives))
    assert codes == [[0, KILLED, KILLED], [0, 0], [0]], told
    assert resumed_at(middle.lives[1].log) in (13, 14), told
    assert resumed_at(edge.lives[1].log) in (14, 15), told
    assert resumed_at(edge.lives[2].log) == 18, told
    for life in (middle.lives[1], edge.lives[1], edge.lives[2]):
        assert differences(plain.out, life.out) == [], told


@long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--data", "stream"), id="stream without a length"),
        pytest.param(("--data", "noisy", "--workers", "1"), id="random workers"),
    ],
)
def test_other_data(tmp_path: Path, daemon: DaemonProcess, options: tuple[str, ...]) -> None:
    """Data that cannot be skipped is fetched again, to the very same batches.

    It is fetched ahead in the set-up, before any callback: there the order of the first epoch is
    another than without ckptd, so one life with ckptd is compared with two.
    """
    whole, run = Run(tmp_path, daemon, *options), Run(tmp_path, daemon, *options)
    codes = live(JOB, [[whole.life(), run.life("--kill-at", "5")], [run.life()]])
    told = "\n".join(life.log for life in (*whole.lives, *run.lives))
    assert codes == [[0, KILLED], [0]], told
    assert resumed_at(run.lives[1].log) in (4, 5), told
    assert differences(whole.lives[0].out, run.lives[1].out) == [], told


@long
def test_the_other_package_and_a_control(
    tmp_path: Path, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pytorch_lightning``; there, with one random state not restored, replay says so, and the
    comparison tells two seeds apart.
    """
    monkeypatch.setenv("CKPTD_TEST_LIGHTNING", "pytorch_lightning")
    plain, other = Life(tmp_path / "plain.pt"), Life(tmp_path / "other.pt", "--seed", "2")
    good, bad = Run(tmp_path, daemon), Run(tmp_path, daemon)
    codes = live(
        JOB,
        [
            [plain, other, good.life("--kill-at", "14"), bad.life("--kill-at", "14")],
            [good.life(), bad.life("--forget")],
        ],
    )
    told = "\n".join(life.log for life in (plain, *good.lives, *bad.lives))
    assert codes == [[0, 0, KILLED, KILLED], [0, 1]], told
    assert differences(plain.out, good.lives[1].out) == [], told
    assert "ReplayMismatch" in bad.lives[1].log, told
    assert "history" in differences(plain.out, other.out)


@long
def test_two_ranks(tmp_path: Path, daemon: DaemonProcess) -> None:
    """DistributedDataParallel: one rank is killed, the other fails with it, and both come back to
    the same step.
    """
    ranks = TwoRanks(tmp_path, daemon, 7)
    codes = live(JOB, [[*ranks.plain, *ranks.killed], ranks.resumed])
    assert codes == [[0, 0, 1, KILLED], [0, 0]], ranks.told
    ranks.check((6, 7))
