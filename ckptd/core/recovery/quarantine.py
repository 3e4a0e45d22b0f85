"""What follows when a replay does not reproduce what was recorded (pure): whom to suspect, and what
a plan may use after that.

The snapshots may be wrong (torn, or changed in memory before their digests were made), or the
program (not deterministic), or the machine (another version of torch, another number of threads).
One replay cannot tell which, a second one of the same snapshots can:

::

    first failure            SUSPECTED    the next start replays the same snapshots once more
    second, same result      QUARANTINED  the program is deterministic, so what was recorded is wrong
    second, other result     UNSTABLE     the program is not: nothing is quarantined
    on a changed machine     ENVIRONMENT  no evidence against the snapshots: nothing is quarantined
    in a localized recovery  WIDENED      all ranks recover together next, which says more

What was quarantined is everything that the replay had used when it failed, of all ranks: which of
these snapshots is the wrong one, and of which rank, cannot be seen, since the ranks average their
gradients. A plan leaves it out, wherever a copy of it lies. It is named by iteration and epoch:
what the run records anew in a later epoch is something else. When the run has gone on from
elsewhere the failure is LEFT: its snapshots still do not count, and nobody has to decide about them
any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum

import msgspec

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.recovery.snapshot_sources import SnapshotToLoad
from ckptd.transport.control.messages import ReplayFailure

__all__ = [
    "Mark",
    "ReplayVerdict",
    "Used",
    "add_failure",
    "describe_failure",
    "judge_replay",
    "marks_of",
    "open_failures",
    "quarantined_failures",
    "reason_of",
    "reported_epochs",
    "reported_spans",
    "settled",
    "snapshots_used",
    "without_marked",
]

Mark = tuple[int, int]  # iteration and epoch
Used = tuple[int, int, int]  # and where that epoch began

_LIMIT = 32  # failures of a run that are remembered
_SHOWN = 8


class ReplayVerdict(StrEnum):
    """What a failed replay is taken for; see the module."""

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
    """What a failure of a recovery of all ranks shows, given those before it.

    Args:
        failure: its own verdict does not matter.
        known: failures that any node knows of.
        changed: how the machine differs from the one that recorded.
    """
    if changed:
        return ReplayVerdict.ENVIRONMENT
    before = [k for k in known if _same_start(k, failure) and k.verdict in _COUNTS_AS_TRY]
    if any((k.iteration, k.result) == (failure.iteration, failure.result) for k in before):
        return ReplayVerdict.QUARANTINED
    # Replayed otherwise (`drop` after `inputs`) it may come to something else without being unstable.
    if any(k.freezing == failure.freezing for k in before):
        return ReplayVerdict.UNSTABLE
    return ReplayVerdict.SUSPECTED


def add_failure(known: Sequence[ReplayFailure], fresh: ReplayFailure) -> tuple[ReplayFailure, ...]:
    """The failures to remember: of each suffix the last one, and of all no more than a bounded number."""
    kept = [k for k in known if k.verdict in _DECIDED or not _same_start(k, fresh)]
    if fresh not in kept:
        kept.append(fresh)
    while len(kept) > _LIMIT:
        kept.remove(next((k for k in kept if k.verdict == ReplayVerdict.LEFT), kept[0]))
    return tuple(kept)


def settled(known: Iterable[ReplayFailure]) -> tuple[ReplayFailure, ...]:
    """What is left to remember after a replay that reproduced."""
    return tuple(
        msgspec.structs.replace(k, verdict=ReplayVerdict.LEFT)
        for k in known
        if k.verdict in _DECIDED
    )


def open_failures(known: Iterable[ReplayFailure]) -> list[ReplayFailure]:
    """Those after which no replay has reproduced yet."""
    return [k for k in known if k.verdict != ReplayVerdict.LEFT]


def quarantined_failures(known: Iterable[ReplayFailure]) -> list[ReplayFailure]:
    """Those of which somebody may have to decide."""
    return [k for k in known if k.verdict == ReplayVerdict.QUARANTINED]


def snapshots_used(pieces: Iterable[SnapshotToLoad]) -> tuple[Used, ...]:
    """What a replay of these uses."""
    records = (piece.record for piece in pieces)
    return tuple((r.iteration, r.epoch, r.epoch_start) for r in records)


def marks_of(known: Iterable[ReplayFailure]) -> frozenset[Mark]:
    """The snapshots that no plan may use."""
    return frozenset(used[:2] for k in known if k.verdict in _DECIDED for used in k.snapshots)


def reported_epochs(known: Iterable[ReplayFailure]) -> dict[int, int]:
    """The starts of the epochs of these snapshots: nobody else may tell of them, now that the
    snapshots do not count.
    """
    starts: dict[int, int] = {}
    for _, epoch, start in (used for k in known for used in k.snapshots):
        starts[epoch] = min(start, starts.get(epoch, start))
    return starts


def without_marked(
    held: Iterable[HeldRecords], known: Iterable[ReplayFailure]
) -> tuple[HeldRecords, ...]:
    """What is held, without what is quarantined, wherever it lies."""
    marks = marks_of(known)
    if not marks:
        return tuple(held)
    return tuple(
        replace(h, records=tuple(r for r in h.records if (r.iteration, r.epoch) not in marks))
        for h in held
    )


def reported_spans(failures: Iterable[ReplayFailure]) -> str:
    """For a message: the iterations of what these replays had used."""
    spans = sorted({(k.snapshots[0][0], k.snapshots[-1][0]) for k in failures}, reverse=True)
    shown = [f"{a} to {b}" if a != b else f"{a}" for a, b in spans[:_SHOWN]]
    return f"iterations {', '.join(shown)}" + (", …" if len(spans) > _SHOWN else "")


def reason_of(failure: ReplayFailure, *, changed: str = "") -> str:
    """For a message: what follows."""
    match failure.verdict:
        case ReplayVerdict.SUSPECTED:
            return "This was the first time: the next start replays the same snapshots once more"
        case ReplayVerdict.QUARANTINED:
            return (
                "Two replays came to the same result, so what was recorded is wrong: the snapshots of "
                f"{reported_spans([failure])} are quarantined on every node, and the next start goes back to an older state"
            )
        case ReplayVerdict.UNSTABLE:
            return (
                "Two replays of the same snapshots came to different results: the program is not deterministic. "
                "Nothing is quarantined. Make the step deterministic and start again"
            )
        case ReplayVerdict.ENVIRONMENT:
            return (
                f"This process does not run as the one that recorded ({changed}), which can change bits. "
                "Nothing is quarantined. Start it as before"
            )
        case _:
            return "The next start recovers all ranks together"


def describe_failure(failure: ReplayFailure) -> str:
    """For a message: what differed, and where."""
    first, last = failure.snapshots[0][0], failure.iteration
    told = failure.ranks[0] if failure.ranks else None
    what = "another rank's state" if told is None else f"rank {told.rank}: {told.what}"
    digests = "" if told is None else f" (recorded {told.expected}, recomputed {told.got})"
    return (
        f"replay of iteration {last - 1} did not reproduce what was recorded at iteration {last}: {what}{digests}; "
        f"it began at iteration {first}"
    )


def _same_start(a: ReplayFailure, b: ReplayFailure) -> bool:
    return a.snapshots[0] == b.snapshots[0]
