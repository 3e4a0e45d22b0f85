"""The verdict on a replay that does not reproduce the recorded values, and its effect on plans. Pure.

The snapshots may be wrong (torn, or changed in memory before their digests were computed), the program
may not be deterministic, or the machine may differ (another version of torch, another number of
threads). A second replay of the same snapshots shows which:

::

    first failure            SUSPECTED    the next start replays the same snapshots once more
    second, same result      QUARANTINED  the program is deterministic, so the recorded values are wrong
    second, other result     UNSTABLE     the program is not: nothing is quarantined
    on a changed machine     ENVIRONMENT  no evidence against the snapshots: nothing is quarantined
    in a localized recovery  WIDENED      the next recovery is global, which shows more

All snapshots that the replay had used when it failed are quarantined, on all ranks: because the ranks
average their gradients, the wrong snapshot cannot be identified. A plan ignores every copy of them. They
are identified by iteration and epoch: snapshots that the run records in a later epoch are others. When
the run has resumed from another state, the failure is LEFT: its snapshots still do not count, and no
decision about them is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum

import msgspec

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.recovery.snapshot_tables import SnapshotToLoad
from ckptd.transport.messages import ReplayFailure

Mark = tuple[int, int]  # iteration and epoch
Used = tuple[int, int, int]  # and where that epoch began

_LIMIT = 32  # limit of remembered failures per run
_SHOWN = 8


class ReplayVerdict(StrEnum):
    """The verdict on a failed replay; see the module."""

    SUSPECTED = "suspected"
    QUARANTINED = "quarantined"
    UNSTABLE = "unstable"
    ENVIRONMENT = "environment"
    WIDENED = "widened"
    LEFT = "left"


_DECIDED = (ReplayVerdict.QUARANTINED, ReplayVerdict.LEFT)
_COUNTS_AS_TRY = (ReplayVerdict.SUSPECTED, ReplayVerdict.UNSTABLE)


def judge_replay(
    failure: ReplayFailure, known: Iterable[ReplayFailure], *, changed: str = ""
) -> ReplayVerdict:
    """The verdict on a failure of a global recovery, given earlier failures.

    Args:
        failure: its own verdict is ignored.
        known: the failures that any node knows.
        changed: the differences from the machine that recorded; "" if there are none.
    """
    if changed:
        return ReplayVerdict.ENVIRONMENT
    before = [k for k in known if _same_start(k, failure) and k.verdict in _COUNTS_AS_TRY]
    if any((k.iteration, k.result) == (failure.iteration, failure.result) for k in before):
        return ReplayVerdict.QUARANTINED
    # A replay in another way (`drop` after `inputs`) may give another result without being unstable.
    if any(k.freezing == failure.freezing for k in before):
        return ReplayVerdict.UNSTABLE
    return ReplayVerdict.SUSPECTED


def add_failure(known: Sequence[ReplayFailure], fresh: ReplayFailure) -> tuple[ReplayFailure, ...]:
    """The failures to remember: the last one of each suffix, up to a limit."""
    kept = [k for k in known if k.verdict in _DECIDED or not _same_start(k, fresh)]
    if fresh not in kept:
        kept.append(fresh)
    while len(kept) > _LIMIT:
        kept.remove(next((k for k in kept if k.verdict == ReplayVerdict.LEFT), kept[0]))
    return tuple(kept)


def settled(known: Iterable[ReplayFailure]) -> tuple[ReplayFailure, ...]:
    """The failures to remember after a replay that reproduced."""
    return tuple(
        msgspec.structs.replace(k, verdict=ReplayVerdict.LEFT) for k in known if k.verdict in _DECIDED
    )


def open_failures(known: Iterable[ReplayFailure]) -> list[ReplayFailure]:
    """The failures after which no replay has reproduced yet."""
    return [k for k in known if k.verdict != ReplayVerdict.LEFT]


def quarantined_failures(known: Iterable[ReplayFailure]) -> list[ReplayFailure]:
    """The failures that an operator may have to decide about."""
    return [k for k in known if k.verdict == ReplayVerdict.QUARANTINED]


def snapshots_used(loaded: Iterable[SnapshotToLoad]) -> tuple[Used, ...]:
    """The identities of the snapshots that a replay uses."""
    records = (image.record for image in loaded)
    return tuple((r.iteration, r.epoch, r.epoch_start) for r in records)


def marks_of(known: Iterable[ReplayFailure]) -> frozenset[Mark]:
    """The snapshots that no plan may use."""
    return frozenset(used[:2] for k in known if k.verdict in _DECIDED for used in k.snapshots)


def reported_epochs(known: Iterable[ReplayFailure]) -> dict[int, int]:
    """The starts of the epochs of these snapshots, which other records may not show."""
    starts: dict[int, int] = {}
    for _, epoch, start in (used for k in known for used in k.snapshots):
        starts[epoch] = min(start, starts.get(epoch, start))
    return starts


def without_marked(held: Iterable[HeldRecords], known: Iterable[ReplayFailure]) -> tuple[HeldRecords, ...]:
    """The inventories without all copies of quarantined snapshots."""
    marks = marks_of(known)
    if not marks:
        return tuple(held)
    return tuple(
        replace(h, records=tuple(r for r in h.records if (r.iteration, r.epoch) not in marks)) for h in held
    )


def reported_spans(failures: Iterable[ReplayFailure]) -> str:
    """For a message: the iterations of the snapshots that these replays used."""
    spans = sorted({(k.snapshots[0][0], k.snapshots[-1][0]) for k in failures}, reverse=True)
    shown = [f"{a} to {b}" if a != b else f"{a}" for a, b in spans[:_SHOWN]]
    return f"iterations {', '.join(shown)}" + (", …" if len(spans) > _SHOWN else "")


def reason_of(failure: ReplayFailure, *, changed: str = "") -> str:
    """For a message: the consequence of the failure."""
    match failure.verdict:
        case ReplayVerdict.SUSPECTED:
            return "This is the first failure: the next start replays the same snapshots once more"
        case ReplayVerdict.QUARANTINED:
            return (
                "Two replays had the same result, so the recorded values are wrong: the snapshots of "
                f"{reported_spans([failure])} are quarantined on every node, and the next start "
                "uses an older state"
            )
        case ReplayVerdict.UNSTABLE:
            return (
                "Two replays of the same snapshots had different results: the program is not deterministic. "
                "Nothing is quarantined. Make the step deterministic and start again"
            )
        case ReplayVerdict.ENVIRONMENT:
            return (
                f"The environment differs from that of the recording process ({changed}), which can change "
                "bits. Nothing is quarantined. Restore the environment and start again"
            )
        case _:
            return "The next start recovers all ranks (global recovery)"


def describe_failure(failure: ReplayFailure) -> str:
    """For a message: the values that differ, and their place."""
    first, last = failure.snapshots[0][0], failure.iteration
    worst = failure.ranks[0] if failure.ranks else None
    what = "another rank's state" if worst is None else f"rank {worst.rank}: {worst.what}"
    digests = "" if worst is None else f" (recorded {worst.expected}, recomputed {worst.got})"
    return (
        f"replay of iteration {last - 1} did not reproduce the values recorded at iteration {last}: "
        f"{what}{digests}; it began at iteration {first}"
    )


def _same_start(a: ReplayFailure, b: ReplayFailure) -> bool:
    return a.snapshots[0] == b.snapshots[0]
