"""Replicas of boundary logs: what is sent in which order, which slot a host gives, and when a replica may go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from ckptd.core.replication.log_replicas import (
    LogReplicator,
    admit_log,
    as_sent,
    oldest_held,
    outdated_slots,
    why_log_removable,
)
from ckptd.core.replication.replicas import Admit, Deny
from ckptd.core.replication.target import (
    PeerBack,
    PeerLost,
    Slots,
)
from ckptd.core.slots.slots import Joined, SlotRecord, SlotState, key_of
from tests.ckptd.core.replication.driven import Driven

SLOTS = 6


def logged(
    iteration: int, *, epoch: int = 0, start: int = -1, generation: int = 3, sequence: int = -1
) -> SlotRecord:
    """The log of an iteration as its slot header tells of it: nothing is anchored, and nothing links to it."""
    return SlotRecord(
        generation=generation,
        index=iteration % SLOTS,
        state=SlotState.SEALED,
        iteration=iteration,
        sequence=iteration if sequence < 0 else sequence,
        image_len=100,
        epoch=epoch,
        epoch_start=start,
        header_digest=bytes([iteration]) * 16,
    )


def logs(iterations: Iterable[int]) -> list[SlotRecord]:
    return [logged(iteration) for iteration in iterations]


def driven_to(*nodes: str) -> Driven:
    """A replicator of logs whose peers answer at once."""
    driven = Driven(LogReplicator(), *nodes)
    driven.feed(Joined(0, -1, 1))
    return driven


def primary_holds(iterations: Iterable[int]) -> Slots:
    """The primary holds the logs of these iterations."""
    return Slots(as_sent(logs(iterations)), 1)


class TestSending:
    def test_all_that_is_here_goes_to_a_new_target_oldest_first(self) -> None:
        """Of snapshots it would be the newest suffix; a rank that replays from 4 on is fed what was
        sent in 4.
        """
        driven = driven_to("a")
        driven.feed(primary_holds(range(4, 9)))
        assert driven.sent == [("a", n) for n in range(4, 9)]
        driven.feed(primary_holds(range(5, 10)))
        assert driven.sent[5:] == [("a", 9)]
        assert driven.core.current_up_to("a") == 9
        assert driven.core.lag("a").iterations == 0

    def test_a_gap_in_the_log_holds_nothing_up(self) -> None:
        driven = driven_to("a")
        driven.feed(primary_holds([4, 5]))
        driven.feed(primary_holds([4, 5, 8, 9]))
        assert driven.sent == [("a", n) for n in (4, 5, 8, 9)]

    def test_what_a_target_lost_is_sent_again_and_what_it_has_is_not(self) -> None:
        driven = driven_to("a")
        driven.feed(primary_holds(range(4, 8)))
        del driven.held["a"][key_of(logged(5))]
        driven.begun.clear()
        driven.feed(PeerLost("a", "restarted"))
        driven.feed(PeerBack("a"))
        assert driven.sent[4:] == [("a", 5)]
        assert driven.begun == [5], "what is newer is not doubted: nobody gives it away"
        assert driven.notes == [], "that the peer was lost is told by the replicator of the snapshots"

    def test_a_target_without_memory_is_told_of_once_and_holds_nobody_back(self) -> None:
        driven = driven_to("a")
        driven.refuse = "quota"
        driven.feed(primary_holds([4]))
        driven.now_s = 100.0
        driven.feed(primary_holds([4, 5]))
        driven.now_s = 300.0
        driven.feed(primary_holds([4, 5, 6]))
        (note,) = driven.notes
        assert note.kind == "replication_refused"
        assert note.message.startswith("boundary log: ")
        assert driven.core.sole

    def test_what_is_not_sealed_or_was_logged_again_is_not_sent(self) -> None:
        filled = replace(logged(6), state=SlotState.FILLED)
        again = logged(4, generation=4, sequence=9, epoch=1, start=4)
        sent = as_sent([logged(3), logged(4), logged(5), filled, again])
        assert [(r.iteration, r.generation) for r in sent] == [(3, 3), (4, 4)]


class TestAdmitting:
    def test_an_empty_slot_then_what_the_primary_has_given_away(self) -> None:
        table = logs(range(4, 4 + SLOTS))
        free = replace(table[2], state=SlotState.FREE)
        found = admit_log(logged(10), [*table[:2], free, *table[3:]], oldest=4)
        assert found == Admit(free.index, f"slot {free.index} is free")
        found = admit_log(logged(10), table, oldest=5)
        assert isinstance(found, Admit)
        assert (found.index, found.releases) == (4, 4)

    @pytest.mark.parametrize("oldest", [4, -1])
    def test_what_the_primary_holds_stays(self, oldest: int) -> None:
        denied = admit_log(logged(10), logs(range(4, 4 + SLOTS)), oldest=oldest)
        assert isinstance(denied, Deny)
        assert denied.code == "busy"

    def test_what_is_read_stays(self) -> None:
        denied = admit_log(logged(10), logs(range(4, 4 + SLOTS)), oldest=5, busy={4})
        assert isinstance(denied, Deny)
        assert denied.code == "busy"

    def test_what_is_here_is_not_sent_again_unless_it_is_another(self) -> None:
        table = logs([4, 5])
        assert isinstance(found := admit_log(logged(5), table, oldest=4), Deny)
        assert found.code == "held"
        other = replace(logged(5), header_digest=b"x" * 16)
        assert isinstance(admit_log(other, table, oldest=4), Admit)
        assert isinstance(found := admit_log(other, table, oldest=4, busy={5}), Deny)
        assert found.code == "busy"

    def test_a_recovery_at_an_iteration_outdates_what_was_sent_in_it(self) -> None:
        """A snapshot of it would be valid still."""
        known = {0: -1, 1: 6}
        assert isinstance(found := admit_log(logged(6), [], oldest=4, epochs=known), Deny)
        assert found.code == "stale"
        table = logs(range(4, 4 + SLOTS))
        assert outdated_slots(table, known) == [r.index for r in table if r.iteration >= 6]
        found = admit_log(logged(6, epoch=1, start=6, sequence=20), table, oldest=4)
        assert isinstance(found, Admit)
        assert found.index == 6 % SLOTS

    def test_the_oldest_is_that_of_the_generation_that_is_sent(self) -> None:
        records = [logged(4), logged(5), logged(5, generation=4, sequence=9), logged(6, generation=4)]
        assert oldest_held(records, 3) == 4
        assert oldest_held(records, 4) == 5
        assert oldest_held(records, 5) == -1


class TestGoing:
    def test_it_stays_until_no_suffix_up_to_the_floor_can_reach_back_to_it(self) -> None:
        table = logs(range(4, 4 + SLOTS))  # up to 9
        for floor in (-1, 9, 9 + SLOTS):
            assert why_log_removable(table, floor) == ""
        assert "up to 16" in why_log_removable(table, 9 + SLOTS + 1)
        assert why_log_removable(table, 9 + SLOTS + 1, span=SLOTS + 1) == ""

    def test_what_holds_nothing_goes(self) -> None:
        assert why_log_removable([], -1)
        table = logs([7, 8])
        assert why_log_removable(table, -1, epochs={0: -1, 1: 7})
        assert why_log_removable(table, -1, epochs={0: -1, 1: 8}) == ""
