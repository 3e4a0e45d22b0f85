"""Dense snapshots whose interval changes while the job trains, or at a restart."""

from __future__ import annotations

import re
import uuid

import pytest

from ckptd.core.interval_control import MAX_STALL, IntervalRule, SnapshotCost, interval_of
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.ranks import Ranks, story

DENSE = ("--set", 'policy="dense"', "--set", "window=null")
# Copies of its table take several iterations' time.
CASE, SLOW = "table", ("--slow-copies", "5", "--step-ms", "3")


def _every(rule: int | str, **more: float) -> tuple[str, ...]:
    shown = f'every="{rule}"' if isinstance(rule, str) else f"every={rule}"
    return (*DENSE, "--set", shown, *(p for k, v in more.items() for p in ("--set", f"{k}={v}")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [("checkfreq", {"max_stall": 0.05}), ("gemini", {}), ("young-daly", {"mtbf_s": 600})]
)
def test_an_interval_follows_its_rule_from_what_was_measured(
    jobs: Jobs, daemon: DaemonProcess, rule: tuple[str, dict[str, float]]
) -> None:
    """It is used after a kill, too: the snapshots say which one it was."""
    progress = jobs.folder / "progress"
    run, options = uuid.uuid4().hex[:8], (*_every(rule[0], **rule[1]), *SLOW)
    before = jobs.run(
        *(CASE, *options, "--run", run, "--total", "4000", "--kill-after-new-interval", "30"),
        *("--progress", str(progress)),
        expect_killed=True,
    )
    told = [text for text in daemon.events("schedule_changed", run) if "a snapshot every" in text]
    assert len(told) == 1, jobs.log(before)
    every = int(told[0].split("a snapshot every ")[1].split()[0])
    assert f"every='{rule[0]}': a snapshot stalls training for" in told[0]
    stall_s, busy_s, iteration_s = (float(ms) / 1e3 for ms in re.findall(r"([\d.]+) ms", told[0]))
    of, bound, mtbf_s = IntervalRule(rule[0]), rule[1].get("max_stall", MAX_STALL), rule[1].get("mtbf_s")
    shortest, longest = (  # by numbers that are rounded to a tenth of a millisecond
        interval_of(of, SnapshotCost(stall_s + by, busy_s + by, iteration_s - by), bound=bound, mtbf_s=mtbf_s)
        for by in (-1e-4, 1e-4)
    )
    assert shortest <= every <= longest, told[0]
    total = int(progress.read_text().split()[0]) + 20
    after = jobs.run(CASE, *options, "--run", run, "--seed", "7", "--total", str(total))
    report = jobs.report(after)
    assert report["every"] >= 2, jobs.log(after)
    assert report["resumed_from"] is not None
    assert every >= 2
    reference = jobs.run(CASE, "--total", str(total), daemon="none")
    assert differences(reference, after) == []


@pytest.mark.slow
def test_another_interval_takes_effect_at_a_restart_on_all_ranks(jobs: Jobs, daemon: DaemonProcess) -> None:
    """It was ignored: the recorded one stayed for as long as the run lived."""
    run = uuid.uuid4().hex[:8]
    Ranks(jobs, run, *_every(2), case=CASE, killed=1, kill_at=21, total=30).end_by_the_death_of(1)
    after = Ranks(
        jobs,
        run,
        *_every(5),
        "--seed",
        "7",
        "--step-ms",
        "10",
        case=CASE,
        total=2000,
        each={0: ("--kill-after-new-interval", "23")},
    )
    after.end_by_the_death_of(0)
    told = [
        text for text in daemon.events("schedule_changed", run) if "every 5 iterations instead of 2" in text
    ]
    at = {text.split("from iteration ")[1].split()[0] for text in told}
    assert len(told) == 2, story(daemon, run, after)
    assert len(at) == 1, story(daemon, run, after)
    changed = int(at.pop())
    total = changed + 40
    third = Ranks(jobs, run, *_every(5), "--seed", "8", case=CASE, total=total)
    outs = third.end()
    for out in outs:
        report = jobs.report(out)
        assert report["every"] == 5
        assert report["captured_bytes"] == report["snapshots"] * report["snapshot_bytes"] > 0
        assert report["resumed_from"] > changed
        assert (report["resumed_from"] - changed) % 5 == 0, "the first of them is that of the change itself"
    references = Ranks(jobs, run, case=CASE, daemon="none", total=total).end()
    for reference, out in zip(references, outs, strict=True):
        assert differences(reference, out) == []
