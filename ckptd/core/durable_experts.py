"""Which experts a durable checkpoint of partial snapshots stores, and which it takes from earlier ones. Pure.

A checkpoint of partial snapshots (`ckptd.core.partial_experts`) has the newest snapshot, and for each phase
of the window an image with the experts of that phase. With MoC-System's second K, K_persist, a checkpoint
stores K_persist of a layer's E experts. The others are those of earlier checkpoints: the manifest of a new
checkpoint lists images that the last one lists, too.

So experts are stored by phases, ``ceil(window * K_persist / E)`` with each checkpoint, those whose durable
copies are oldest. If it is not the turn of the experts in the newest snapshot, this one is stored *bare*,
without them.

All ranks must choose the same, since replicas of one expert must be of one iteration. The choice follows from
the iterations and phases of the last checkpoint and of this one, and from numbers that all ranks have
recorded in the newest snapshot. The names of manifests cover the choice: ranks that chose differently have no
checkpoint in common.

Source: MoC-System (ASPLOS '25), section 5.1.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Listed(NamedTuple):
    """A snapshot of a checkpoint."""

    iteration: int
    phase: int


@dataclass(frozen=True, slots=True)
class DurableTurns:
    """How many experts a checkpoint stores.

    Args:
        experts: K_persist, of each layer.
        of: E, the experts of the largest layer.
        limit: of the PLT after a recovery from storage; None: no limit.
        lost_iterations: what earlier failures have lost, as iterations of all experts' tokens.
    """

    experts: int
    of: int
    limit: float | None
    lost_iterations: float = 0.0


@dataclass(frozen=True, slots=True)
class DurableChoice:
    """The snapshots of a checkpoint, oldest first.

    Attributes:
        kept: iterations of the last checkpoint's images that this one lists, too.
        stored: iterations of the snapshots that it stores itself; the newest one is the last of them.
        bare: the newest one is stored without experts.
    """

    kept: tuple[int, ...]
    stored: tuple[int, ...]
    bare: bool

    @property
    def iterations(self) -> tuple[int, ...]:
        """Of all images, ascending."""
        return tuple(sorted((*self.kept, *self.stored)))


def turns_of(experts: int, of: int, window: int) -> int:
    """The phases of a window that a checkpoint stores so that they have ``experts`` of ``of`` or more."""
    return min(window, max(1, math.ceil(window * experts / of)))


def slots_with_old_copies(window: int) -> int:
    """The slots that a ring needs after a recovery from storage: its images may all be needed until a whole
    window of new snapshots is there.
    """
    return 2 * window + 2


def have_gaps(images: Iterable[tuple[int, int]]) -> bool:
    """Whether snapshots were taken between these partial ones: images of several durable checkpoints.

    A recovery leaves out sequence numbers, too, but no iterations. With an interval above 1 iterations are
    left out, but no sequence numbers. Only a recovery with such an interval cannot be told from these images.

    Args:
        images: iteration and sequence of each, ascending.
    """
    return any(after[0] > before[0] + 1 and after[1] > before[1] + 1 for before, after in pairwise(images))


def choose_durable(
    last: Sequence[Listed], now: Sequence[Listed], window: int, turns: DurableTurns
) -> DurableChoice | None:
    """What a checkpoint stores; None if it stores the experts of all of its snapshots.

    All are stored if the last checkpoint has another window, if one of them is not a plain window (after a
    recovery, until a whole window of new snapshots is there), or if anything less could exceed the limit.

    Args:
        last: the last committed checkpoint, as its manifest lists it.
        now: the snapshots in memory that this one would store otherwise.
        window: of both.
    """
    copies, newer = _copies(last, window), {each.phase: each.iteration for each in now}
    if copies is None or len(now) != window or set(newer) != set(copies):
        return None
    end = now[-1]
    if end.iteration <= last[-1].iteration:
        return None
    oldest = sorted((p for p in copies if newer[p] > copies[p]), key=copies.__getitem__)
    # What the newest snapshot is stored with it stays with everything that is no expert, as long as a
    # checkpoint refers to it. So its experts wait for the next checkpoint, unless that is in this phase, too.
    if last[-1].phase != end.phase and end.phase in oldest:
        oldest.remove(end.phase)
        oldest.append(end.phase)
    for number in range(turns_of(turns.experts, turns.of, window), len(oldest)):
        fresh = set(oldest[:number])
        if _looks_plain(copies, now, fresh):
            # With the newest snapshot's experts in place of others, unless those have waited before.
            waits = oldest[number - 1]
            if copies[waits] < last[-1].iteration - (end.iteration - now[0].iteration):
                continue
            fresh = {*oldest[: number - 1], end.phase}
        ages = [end.iteration - (newer[p] if p in fresh else copies[p]) for p in copies]
        if turns.limit is None or (turns.lost_iterations + sum(ages) / window <= turns.limit * end.iteration):
            stored = {newer[p] for p in fresh} | {end.iteration}
            kept = [copies[p] for p in copies if p not in fresh]
            return DurableChoice(tuple(sorted(kept)), tuple(sorted(stored)), end.phase not in fresh)
    return None


def _looks_plain(copies: Mapping[int, int], now: Sequence[Listed], fresh: Container[int]) -> bool:
    """Whether the images of a checkpoint that stores these phases could be taken for consecutive snapshots
    (`have_gaps`), although the newest one is bare, and the experts of its phase are those of the snapshot
    before the window.

    A rank that has the same iterations in memory would take these experts from there, and others would not.
    """
    *others, end = now
    if end.phase in fresh or any(copies[p] != i and p not in fresh for i, p in others):
        return False
    longest = max((b.iteration - a.iteration for a, b in pairwise(now)), default=0)
    return now[0].iteration - copies[end.phase] <= longest


def _copies(listed: Sequence[Listed], window: int) -> dict[int, int] | None:
    """By phase, the iteration of the image that has its experts; None if it is not one of each phase.

    The newest snapshot is bare if an older image is of its phase.
    """
    if not listed:
        return None
    *older, newest = listed
    copies = {each.phase: each.iteration for each in older}
    if len(copies) != len(older):
        return None
    copies.setdefault(newest.phase, newest.iteration)
    return copies if set(copies) == set(range(window)) else None
