"""What failed replays show, and what a plan may use after them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from ckptd.core.recovery.global_plan import NoRecovery, RecoveryPlan, plan_recovery
from ckptd.core.recovery.quarantine import (
    ReplayVerdict,
    add_failure,
    describe_failure,
    judge_replay,
    marks_of,
    open_failures,
    reason_of,
    reported_epochs,
    settled,
    without_marked,
)
from ckptd.transport.messages import RankMismatch, ReplayFailure
from tests.ckptd.core.recovery.test_global_plan import chain, held, snap


def failure(
    first: int,
    last: int,
    result: str = "a",
    *,
    freezing: str = "drop",
    verdict: ReplayVerdict = ReplayVerdict.SUSPECTED,
    epoch: int = 0,
) -> ReplayFailure:
    used = tuple((t, epoch, -1) for t in range(first, last + 1))
    ranks = (RankMismatch(1, "operator e3: param of up", 2, "aa", "bb"),)
    return ReplayFailure(last, used, ranks, result, freezing, verdict)


def test_two_replays_with_one_result_convict_the_record() -> None:
    assert judge_replay(failure(4, 6), []) is ReplayVerdict.SUSPECTED
    assert judge_replay(failure(4, 6), [failure(4, 6)]) is ReplayVerdict.QUARANTINED


@pytest.mark.parametrize("other", [failure(4, 6, "b"), failure(4, 5)])
def test_two_replays_with_two_results_convict_the_program(other: ReplayFailure) -> None:
    assert judge_replay(failure(4, 6), [other]) is ReplayVerdict.UNSTABLE


def test_after_two_results_the_next_two_that_agree_count() -> None:
    """A program that was mended is not held to what it did before."""
    known = add_failure((failure(4, 6, "a"),), failure(4, 6, "b", verdict=ReplayVerdict.UNSTABLE))
    assert [k.result for k in known] == ["b"]
    assert judge_replay(failure(4, 6, "c"), known) is ReplayVerdict.UNSTABLE
    assert judge_replay(failure(4, 6, "b"), known) is ReplayVerdict.QUARANTINED


def test_another_way_of_freezing_may_come_to_another_result_and_convicts_nobody() -> None:
    known = [failure(4, 6, "a", freezing="inputs")]
    assert judge_replay(failure(4, 6, "b"), known) is ReplayVerdict.SUSPECTED
    assert judge_replay(failure(4, 6, "a"), known) is ReplayVerdict.QUARANTINED


def test_a_changed_machine_is_a_better_explanation() -> None:
    """Another number of threads makes every suffix fail alike: that must not cost one of them after
    the other.
    """
    changed = "intra-op threads: 8 when the snapshots were taken, 4 now"
    found = judge_replay(failure(4, 6), [failure(4, 6)], changed=changed)
    assert found is ReplayVerdict.ENVIRONMENT
    told = msgspec.structs.replace(failure(4, 6), verdict=found)
    assert changed in reason_of(told, changed=changed)


def test_what_a_localized_recovery_came_to_is_no_first_try() -> None:
    assert judge_replay(failure(4, 6), [failure(4, 6, verdict=ReplayVerdict.WIDENED)]) == "suspected"


def test_another_suffix_is_another_question() -> None:
    known = [failure(4, 6, verdict=ReplayVerdict.QUARANTINED), failure(2, 3)]
    assert judge_replay(failure(1, 3), known) is ReplayVerdict.SUSPECTED
    assert judge_replay(failure(4, 6, epoch=1), known) is ReplayVerdict.SUSPECTED


def test_what_is_remembered_is_bounded_and_keeps_what_is_decided() -> None:
    known: tuple[ReplayFailure, ...] = (failure(900, 901, verdict=ReplayVerdict.QUARANTINED),)
    for first in range(100):
        known = add_failure(known, failure(first, first + 1, verdict=ReplayVerdict.LEFT))
    assert len(known) == 32
    assert known[0].snapshots[0][0] == 900
    assert add_failure(known, known[5]) == known, "several ranks tell the same"


def test_a_replay_that_reproduces_settles_the_rest() -> None:
    known = (failure(4, 6, verdict=ReplayVerdict.QUARANTINED), failure(2, 3))
    assert [k.verdict for k in settled(known)] == ["left"]
    assert open_failures(settled(known)) == []
    assert marks_of(settled(known)) == {(4, 0), (5, 0), (6, 0)}, "they do not count again"
    assert settled((failure(2, 3),)) == ()


def test_a_failure_is_told_with_operator_iteration_and_digests() -> None:
    text = describe_failure(failure(4, 6))
    for word in ("iteration 5 did", "at iteration 6", "began at iteration 4", "rank 1", "e3", "aa", "bb"):
        assert word in text


# -- plans ---------------------------------------------------------------------------------------

QUARANTINED = failure(7, 8, verdict=ReplayVerdict.QUARANTINED)


def test_a_plan_goes_back_to_the_suffix_before_what_is_quarantined() -> None:
    """On both ranks, though only one of them was wrong, and though a peer and the store still tell of it."""
    everything = [held(rank, chain(2, 5, 8), window=2) for rank in (0, 1)]
    everything += [held(rank, chain(2, 7, 8), window=2, node="peer", own=False) for rank in (0, 1)]
    everything += [held(rank, chain(2, 7, 8), window=2, node=".store", own=False) for rank in (0, 1)]
    before = plan_recovery(everything, 2)
    assert isinstance(before, RecoveryPlan)
    assert (before.start, before.end) == (7, 8)
    after = plan_recovery(without_marked(everything, [QUARANTINED]), 2)
    assert isinstance(after, RecoveryPlan)
    assert (after.start, after.end) == (5, 6)


def test_what_is_only_suspected_is_planned_with_again() -> None:
    everything = [held(0, chain(2, 5, 8), window=2)]
    again = plan_recovery(without_marked(everything, [failure(7, 8)]), 1)
    assert isinstance(again, RecoveryPlan)
    assert again.end == 8


def test_the_same_iterations_recorded_anew_count() -> None:
    """After the fall back the run records iterations 7 and 8 again, in a later epoch."""
    anew = [replace(snap(t, 1 << t % 2), epoch=1, epoch_start=6, sequence=20 + t) for t in (7, 8)]
    everything = [held(0, [*chain(2, 5, 8), *anew], window=2)]
    plan = plan_recovery(without_marked(everything, settled([QUARANTINED])), 1)
    assert isinstance(plan, RecoveryPlan)
    assert (plan.end, {p.record.epoch for p in plan.per_rank[0]}) == (8, {1})


def test_what_is_quarantined_still_tells_of_its_epoch() -> None:
    """Otherwise an abandoned history would come alive again with the only snapshots gone that tell
    where it was left.
    """
    abandoned = chain(2, 3, 9)
    later = [replace(snap(t, 1 << t % 2), epoch=1, epoch_start=6) for t in (7, 8)]
    everything = [held(0, [*abandoned, *later], window=2)]
    used = tuple((t, 1, 6) for t in (7, 8))
    found = msgspec.structs.replace(QUARANTINED, snapshots=used)
    usable = without_marked(everything, [found])
    plan = plan_recovery(usable, 1, epochs=reported_epochs([found]))
    assert isinstance(plan, RecoveryPlan)
    assert plan.end == 6
    wrong = plan_recovery(usable, 1)
    assert isinstance(wrong, RecoveryPlan)
    assert wrong.end == 9, "the check has something to find"


def test_with_all_of_it_quarantined_there_is_no_plan() -> None:
    everything = [held(0, chain(2, 7, 8), window=2)]
    assert isinstance(plan_recovery(without_marked(everything, [QUARANTINED]), 1), NoRecovery)
