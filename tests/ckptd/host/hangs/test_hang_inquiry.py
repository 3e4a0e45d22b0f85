"""The verdict names who hangs, as far as hosts can see it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ckptd.host.hangs.hang_inquiry import HangInquiry, Position, TrainerState
from ckptd.progress_page import StepStage

State = TrainerState
REPORTED = Position(41, StepStage.BACKWARD)


def verdict(answers: Mapping[int, Position], world_size: int = 4) -> str:
    inquiry = HangInquiry(world_size, 1, REPORTED, idle_s=12.34, deadline_s=10.0)
    complete = [inquiry.answer(rank, position) for rank, position in answers.items()]
    assert any(complete) == (len(answers) == world_size)
    report, colon, culprits = inquiry.verdict().partition(": ")
    assert report == "step 41 of rank 1 has not gone on for 12.3 s (deadline 10.0 s)"
    assert colon
    return culprits


def at(
    step: int, *ranks: int, stage: StepStage = StepStage.BACKWARD, state: State = State.IN_STEP
) -> dict[int, Position]:
    return {rank: Position(step, stage, state) for rank in ranks}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (at(41, 0, 1, 3) | at(41, 2, state=State.STOPPED), "rank 2 is stopped by a signal"),
        (at(41, 1) | at(40, 0, 2, 3, state=State.STOPPED), "ranks 0, 2, 3 are stopped by a signal"),
        (at(41, 1) | at(40, 0, 3, state=State.STOPPED), "rank 2 is not answered for by a host"),
        (
            at(41, 0, 1, 3) | at(40, 2),
            "rank 2 is in step 40 after a forward, and the others have come further",
        ),
        (
            at(41, 0, 1) | at(41, 2, 3, stage=StepStage.TOP),
            "ranks 2, 3 are in step 41 before its first forward, and the others have come further",
        ),
        (at(41, 0, 1, 3), "rank 2 is not answered for by a host"),
        (at(41, 1), "ranks 0, 2, 3 are not answered for by a host"),
        (at(41, 0, 1, 2) | at(41, 3, state=State.OUTSIDE), "rank 3 is outside the loop"),
        (
            at(41, 0, 1, 2, 3, stage=StepStage.UPDATE),
            "all ranks are in step 41 in or after the optimizer's step",
        ),
        (at(41, 0, 1, 2) | at(41, 3, state=State.ENDED), "rank 3 is outside the loop"),
    ],
)
def test_who_hangs(answers: dict[int, Position], expected: str) -> None:
    assert verdict(answers) == expected


def test_of_many_some_are_named() -> None:
    answers = at(41, 0) | at(40, *range(1, 100))
    assert verdict(answers, 100) == (
        "ranks 1, 2, 3, 4, 5, 6, 7, 8, … are in step 40 after a forward, and the others have come further"
    )


def of_two(*answers: Position) -> HangInquiry:
    inquiry = HangInquiry(2, 0, REPORTED, idle_s=1.0, deadline_s=1.0)
    for rank, answer in enumerate(answers):
        inquiry.answer(rank, answer)
    return inquiry


def test_whom_a_debugger_holds_is_left_alone() -> None:
    assert of_two(REPORTED, REPORTED).settled == ""
    held = Position(41, StepStage.TOP, State.TRACED)
    assert of_two(REPORTED, held).settled == "rank 1 is held by a debugger"


def test_who_has_gone_on_since_its_report_does_not_hang() -> None:
    """The step ended while the others were asked where they are."""
    for later in (Position(41, StepStage.UPDATE), Position(42, StepStage.TOP)):
        assert of_two(later, REPORTED).settled == "rank 0 has gone on"
    assert of_two(REPORTED, Position(42, StepStage.TOP)).settled == "", "another rank may be further"
    assert of_two(Position(41, StepStage.BACKWARD, State.STOPPED), REPORTED).settled == ""
