"""The host of replicas: what it admits, what it never gives away, what may go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.replication.replicas import (
    Admit,
    Deny,
    Promise,
    admit,
    promised,
    removable,
    spanning_suffix,
    stale_slots,
)
from ckptd.core.slots.ring import newest_by_iteration
from ckptd.core.slots.slots import SlotRecord, SlotState

W = 2


def snapshot(
    iteration: int, index: int = 0, *, linked: bool = True, epoch: int = 0, start: int = -1
) -> SlotRecord:
    return SlotRecord(
        generation=0,
        index=index,
        state=SlotState.SEALED,
        iteration=iteration,
        previous=iteration - 1 if linked else -1,
        sequence=iteration,
        anchors=1 << iteration % W,
        epoch=epoch,
        epoch_start=start,
        header_digest=f"{iteration} {epoch}".encode(),
    )


def ring(*iterations: int, generation: int = 0) -> list[SlotRecord]:
    return [
        replace(snapshot(iteration, index), generation=generation)
        for index, iteration in enumerate(iterations)
    ]


def released(records: list[SlotRecord], iteration: int, promise: Promise, span: int = 1) -> object:
    """The iteration that is given away for this one, or the code of the refusal."""
    answer = admit(snapshot(iteration), records, W, generation=0, promise=promise, span=span)
    return answer.releases if isinstance(answer, Admit) else answer.code


class TestAdmit:
    def test_an_empty_slot_comes_first(self) -> None:
        records = [*ring(1, 2, 3), SlotRecord(0, 3, SlotState.FREE)]
        answer = admit(snapshot(4), records, W, generation=0, promise=Promise(3, 3))
        assert answer == Admit(3, "slot is free")

    def test_what_is_older_than_the_floor_needs_goes_oldest_first(self) -> None:
        assert released(ring(1, 2, 3, 4), 5, Promise(4, 1)) == 1
        assert released(ring(5, 2, 3, 4), 6, Promise(4, 1)) == 2

    @pytest.mark.parametrize("floor", [2, 1, -1])
    def test_nothing_from_the_floor_on_is_given_away(self, floor: int) -> None:
        """Each of these ends may be the next floor: the rank has said that it holds them."""
        assert released(ring(1, 2, 3, 4), 5, Promise(floor, -1)) == "busy"

    def test_ends_before_the_horizon_are_given_away_but_the_floor_is_not(self) -> None:
        records = ring(1, 2, 3, 4, 5, 6)  # floor 2: suffix 1, 2
        assert released(records, 9, Promise(2, 9)) == 3
        assert released(records, 7, Promise(2, 9)) == 3
        assert released(ring(1, 2, 7, 8, 6), 9, Promise(2, 9)) == 6
        assert released(ring(1, 2, 8), 9, Promise(2, 9)) == "busy"

    def test_an_interrupted_chain_does_not_block_the_next_one(self) -> None:
        """Found by the simulation: a ring full of beginnings was busy for ever."""
        records = ring(1, 2, 5, 8)
        records = [*records[:2], replace(records[2], previous=-1), replace(records[3], previous=-1)]
        assert released(records, 12, Promise(2, 2)) == 5

    def test_what_the_missing_link_joins_goes_only_if_nothing_else_can(self) -> None:
        """1 to 4 fill a ring with 6 and 7, and 5 comes: the peer does not count on 6 and 7 until it has sent 5.

        A ring that was full of what is newer than the gap was busy for ever (simulation, falls back, seed 202).
        """
        assert released(ring(0, 1, 2, 4, 6, 7), 5, Promise(2, 2)) == 0
        assert released(ring(1, 2, 5, 7), 6, Promise(2, 2)) == 7
        # 6 and 7 are a suffix that may be the floor.
        assert released(ring(1, 2, 6, 7), 5, Promise(2, 2)) == "busy"

    def test_without_a_promised_suffix_the_newest_one_stays_until_its_successor_is_sealed(
        self,
    ) -> None:
        assert released(ring(5, 6), 9, Promise(20, 20)) == "busy"
        assert released(ring(4, 5, 6), 9, Promise(20, 20)) == 4

    def test_a_wide_span_keeps_more(self) -> None:
        assert released(ring(1, 2, 3, 4), 5, Promise(4, 1), span=3) == 1
        assert released(ring(2, 3, 4), 5, Promise(4, 1), span=3) == "busy"

    def test_what_is_held_is_not_put_again(self) -> None:
        answer = admit(snapshot(3), ring(2, 3), W, generation=0, promise=Promise())
        assert answer == Deny("held", "iteration 3 of epoch 0 is in slot 1")

    def test_another_image_under_the_same_name_is_replaced(self) -> None:
        other = replace(snapshot(3), header_digest=b"other")
        answer = admit(other, ring(2, 3), W, generation=0, promise=Promise(3, 3))
        assert isinstance(answer, Admit)
        assert answer.index == 1

    def test_an_abandoned_history_is_refused_and_gives_its_slots(self) -> None:
        records = ring(2, 3, 4)
        late = admit(snapshot(5), records, W, generation=0, promise=Promise(), epochs={1: 3})
        assert isinstance(late, Deny)
        assert late.code == "stale"
        new = snapshot(4, epoch=1, start=3)
        answer = admit(new, records, W, generation=0, promise=Promise())
        assert isinstance(answer, Admit)
        assert answer.index == 2

    def test_a_slot_that_is_read_is_passed_over(self) -> None:
        records = ring(1, 2, 3, 4)
        answer = admit(snapshot(5), records, W, generation=0, promise=Promise(4, 1), busy={(0, 0)})
        assert isinstance(answer, Admit)
        assert answer.releases == 2

    def test_another_replica_of_the_rank_counts_but_is_not_touched(self) -> None:
        """The suffix of the floor lies in the replica of the generation before."""
        records = [*ring(1, 2, generation=0), *ring(3, 4, generation=1)]
        kept = promised(records, W, promise=Promise(2, 4))
        assert kept == {(0, 0), (0, 1), (1, 0), (1, 1)}
        incoming = snapshot(5)
        answer = admit(incoming, records, W, generation=1, promise=Promise(4, 4))
        assert answer == Deny("busy", "all 2 slots are promised (floor 4) or in use")


class TestRemovable:
    def test_nothing_goes_before_there_is_a_floor(self) -> None:
        group = {"old": (W, ring(1, 2)), "new": (W, ring(7, 8, generation=1))}
        assert removable(group, Promise()) == []

    def test_a_replica_goes_once_the_floor_has_passed_it(self) -> None:
        group = {"old": (W, ring(1, 2)), "new": (W, ring(7, 8, generation=1))}
        assert removable(group, Promise(2, 8)) == []
        assert [name for name, _ in removable(group, Promise(8, 8))] == ["old"]

    def test_a_node_that_is_no_target_any_more_lets_go_when_others_hold_newer(self) -> None:
        group = {"only": (W, ring(7, 8))}
        assert removable(group, Promise(8, 8)) == []
        ((name, why),) = removable(group, Promise(9, 8))
        assert (name, why) == ("only", "every replica that counts holds a suffix up to 9")

    def test_abandoned_histories_and_empty_replicas_go(self) -> None:
        group = {"old": (W, ring(5, 6))}
        assert [name for name, _ in removable(group, Promise(), epochs={1: 4})] == ["old"]
        empty = {"new": (W, [SlotRecord(0, 0, SlotState.FREE)])}
        assert [name for name, _ in removable(empty, Promise())] == ["new"]


def test_stale_slots_are_those_a_later_epoch_left_behind() -> None:
    records = [*ring(2, 3, 4), snapshot(4, 3, epoch=1, start=3)]
    assert stale_slots(records) == [(0, 2)]
    assert stale_slots(ring(2, 3, 4), {1: 2}) == [(0, 1), (0, 2)]
    assert stale_slots(ring(2, 3, 4)) == []


def test_a_spanning_suffix_is_as_long_as_asked() -> None:
    newest = newest_by_iteration(ring(1, 2, 3, 4))
    found = spanning_suffix(newest, W, 3)
    assert found is not None
    assert (found.start, found.end) == (2, 4)
    assert spanning_suffix(newest, W, 5) is None
    assert spanning_suffix(newest, W, 2, end=9) is None
