"""Ranks that begin at different iterations have the same phases from there on, or do not begin so."""

from __future__ import annotations

import pytest

from ckptd.client import values
from ckptd.client.schedule.same_schedule import ScheduleStart, differing, of_parked


def parked(iteration: int, phase: int, span: int = 3, stride: int = 1) -> ScheduleStart:
    return ScheduleStart([(iteration, phase)], span, stride)


def suffix(*phases: int, start: int = 0) -> ScheduleStart:
    return ScheduleStart(list(enumerate(phases, start)))


@pytest.mark.parametrize(
    "told",
    [
        [parked(10, 1), parked(11, 2), suffix(2, 0, 1, start=8)],
        [suffix(2, 0, 1, start=8), parked(10, 1)],
        [parked(12, 1, stride=4), ScheduleStart([(4, 2), (8, 0)])],
        [parked(10, 0, span=1), suffix(0, 0, start=9)],
    ],
)
def test_what_agrees(told: list[ScheduleStart]) -> None:
    assert differing(told) == ""


@pytest.mark.parametrize(
    "told",
    [
        [parked(10, 1), suffix(1, 2, 0, start=8)],  # another base
        [parked(10, 1), parked(10, 1, span=4)],
        [parked(10, 1), parked(10, 1, stride=2)],
        [parked(10, 0, span=5), suffix(0, 1, 2, start=7)],  # from the window before: 10 begins one
        [parked(10, 0, span=2), suffix(0, 1, 2, start=7)],
        [parked(10, 0, span=1), suffix(0, 1, 2, start=7)],
        [parked(10, 1), ScheduleStart()],
        [suffix(0, 1, 2)],
    ],
)
def test_what_differs(told: list[ScheduleStart]) -> None:
    assert differing(told).startswith("rank ")


@pytest.mark.parametrize(
    ("policy", "phases", "span"), [("sliding", 3, 3), ("dense", 1, 5), ("sliding", 4, 0)]
)
def test_what_a_parked_rank_tells(policy: str, phases: int, span: int) -> None:
    """Nothing, if its ring is of another window than what was parked."""
    scalars = {"phases": [[0]] * phases, "stride": 2}
    recorded = 1 if policy == "dense" else 3
    payload = values.pack({"policy": policy, "every": 5, "phases": [[0]] * recorded}, "a plan")
    told = of_parked(10, 1, scalars, payload)
    assert told == (ScheduleStart([(10, 1)], span, 2) if span else ScheduleStart())
