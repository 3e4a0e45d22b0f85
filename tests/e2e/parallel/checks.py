"""What every case of the parallelism matrix must show, and what must be seen when something is left out."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.parallel.registry import Case
from tests.e2e.ranks import Ranks, story

__all__ = ["assert_exact_through_a_kill", "assert_noticed_when_left_out"]


def assert_exact_through_a_kill(jobs: Jobs, daemon: DaemonProcess, case: Case) -> list[dict[str, Any]]:
    """One rank dies in the middle of a step; all come back, replay with operators frozen, and end
    at the exact bits. Returns what the ranks reported then.
    """
    run = uuid.uuid4().hex[:8]
    references = _life(jobs, run, case, daemon="none").end()
    before = _life(jobs, run, case, killed=case.victim)
    before.end_by_the_death_of(case.victim)
    after = _life(jobs, run, case, "--seed", "7")
    outs = after.end()
    reports = [jobs.report(out) for out in outs]
    told = story(daemon, run, before, after)
    resumed = {report["resumed_from"] for report in reports}
    assert len(resumed) == 1, f"resumed from {resumed}{told}"
    # A rank may be a little ahead of what all of them hold.
    assert resumed <= set(range(case.kill_at - 3, case.kill_at + 1)), f"resumed from {resumed}{told}"
    for rank, (reference, out, report) in enumerate(zip(references, outs, reports, strict=True)):
        assert report["window"] > 1, f"rank {rank}{told}"
        assert report["replayed_with_frozen"] > 0, f"rank {rank}{told}"
        found = differences(reference, out)
        assert found == [], f"rank {rank} differs in {len(found)}: {sorted(found)[:8]}{told}"
    return reports


def assert_noticed_when_left_out(
    jobs: Jobs, daemon: DaemonProcess, case: Case, what: str, *, rank: int = 0
) -> None:
    """The negative control: without ``what`` (see ``sabotage.py``) on one rank, replay notices, and
    the end differs.

    First with ``on_mismatch="raise"``, as users run it; then with ``"warn"``, which trains on
    regardless: the comparison of final states must fail, or it would prove nothing in the other
    tests.
    """
    run = uuid.uuid4().hex[:8]
    references = _life(jobs, run, case, daemon="none").end()
    _life(jobs, run, case, killed=case.victim).end_by_the_death_of(case.victim)
    without = {rank: ("--leave-out", what)}
    logs = _life(jobs, run, case, "--seed", "7", each=without).end_by_a_failure()
    assert "ReplayMismatch: replay of iteration" in logs, logs
    warns = ("--set", 'on_mismatch="warn"')
    after = _life(jobs, run, case, "--seed", "8", *warns, each=without)
    outs = after.end()
    found = [differences(a, b) for a, b in zip(references, outs, strict=True)]
    assert any(found), f"identical without {what}{story(daemon, run, after)}"


def _life(
    jobs: Jobs,
    run: str,
    case: Case,
    *options: str,
    daemon: str | None = None,
    killed: int | None = None,
    each: Mapping[int, tuple[str, ...]] = MappingProxyType({}),
) -> Ranks:
    return Ranks(
        jobs,
        run,
        *options,
        case=case.name,
        world_size=case.ranks,
        total=case.total,
        kill_at=case.kill_at,
        daemon=daemon,
        killed=killed,
        each=each,
    )
