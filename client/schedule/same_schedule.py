"""Whether ranks that begin a localized recovery at different iterations go by one schedule from there on.

Each goes on by the schedule of what it loads. If the ranks went over to another window after the
last snapshot of those who replay, these would not know of it: phases would differ for good, and no
recovery of all ranks together would be exact any more. Then all go back now, while they have a
suffix in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ckptd.client import values

__all__ = ["ScheduleStart", "differing", "of_parked"]


class ScheduleStart(msgspec.Struct, frozen=True, array_like=True):
    """What one rank begins with.

    Args:
        phases: pairs of an iteration and its phase.
        span: after how many snapshots phases repeat, at the last of ``phases``; 0: not known (a
            snapshot may not be here yet).
        stride: iterations between two snapshots there.
    """

    phases: list[tuple[int, int]] = []
    span: int = 0
    stride: int = 1

    def agrees(self, iteration: int, phase: int) -> bool:
        """Whether this rank has that phase in that iteration, were its schedule always the same."""
        at, here = self.phases[-1]
        return (here + (iteration - at) // self.stride) % self.span == phase


def of_parked(iteration: int, phase: int, scalars: dict[str, Any], payload: bytes) -> ScheduleStart:
    """Of a rank that goes on from parked state.

    Args:
        scalars: its step scalars.
        payload: the plan in its ring, as in a segment's descriptor.
    """
    plan = values.unpack(payload)
    dense = plan["policy"] == "dense"
    window = len(scalars["phases"])
    if window != len(plan["phases"]):
        return ScheduleStart()  # its ring is already that of another window, or not yet
    return ScheduleStart(
        [(iteration, phase)], plan["every"] if dense else window, int(scalars.get("stride", 1))
    )


def differing(starts: Sequence[ScheduleStart]) -> str:
    """Which ranks go by different schedules, in words; empty if all agree. ``starts`` is by rank; one
    that tells nothing differs from all.
    """
    known = next((each for each in starts if each.span), None)
    for rank, each in enumerate(starts):
        agrees = known is not None and bool(each.phases)
        if agrees and known is not None:
            agrees = all(known.agrees(*pair) for pair in each.phases)
            agrees &= not each.span or (each.span, each.stride) == (known.span, known.stride)
        if not agrees:
            return f"rank {rank} would go on by another schedule of snapshots than those before it"
    return ""
