"""The replicator, event by event: what it sends where and in which order, and what it believes of
its targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ckptd.core.replication.copies import Interval
from ckptd.core.replication.replicator import Replicator
from ckptd.core.replication.target import (
    TRANSITIONS,
    Abort,
    Agreed,
    Begin,
    BeginRefused,
    Event,
    Granted,
    OpenRefused,
    OpenTarget,
    PeerBack,
    PeerLost,
    Phase,
    Put,
    PutEnded,
    ReplicationConfig,
    Seal,
    SealedThere,
    SealRefused,
    Slots,
    TargetEvent,
    TargetOpened,
    Targets,
)
from ckptd.core.slots.slots import (
    Hold,
    Joined,
    Note,
    Release,
    SlotRecord,
    SlotState,
    SnapshotKey,
    Tick,
    key_of,
)
from ckptd.errors import LocalProtocolError
from tests.ckptd.core.replication.driven import Driven
from tests.transcripts import Driver, scenarios, shown

W = 2
CONFIG = ReplicationConfig()


def snapshot(iteration: int, *, linked: bool = True, epoch: int = 0, start: int = -1) -> SlotRecord:
    """A sealed snapshot of a rank with two operators, anchored in turns."""
    return SlotRecord(
        generation=0,
        index=iteration % 6,
        state=SlotState.SEALED,
        iteration=iteration,
        previous=iteration - 1 if linked else -1,
        sequence=iteration,
        image_len=100,
        anchors=1 << iteration % W,
        epoch=epoch,
        epoch_start=start,
    )


def key(iteration: int) -> SnapshotKey:
    return key_of(snapshot(iteration))


def driven_to(*nodes: str) -> Driven:
    """A replicator of snapshots whose peers answer at once."""
    return Driven(Replicator(CONFIG), *nodes)


def table(*iterations: int) -> Slots:
    """The local ring holds the snapshots of these iterations."""
    return Slots(tuple(snapshot(i) for i in iterations), W)


def opened(*nodes: str, table: tuple[int, ...] = (3, 4)) -> Replicator:
    """A replicator whose targets are open and hold nothing; it has asked to begin."""
    core = Replicator(CONFIG)
    core.handle(Targets(nodes), now_s=0)
    core.handle(Slots(tuple(snapshot(i) for i in table), W), now_s=0)
    for node in nodes:
        core.handle(TargetOpened(node, 0, 1, ()), now_s=0)
    return core


class TestOrder:
    def test_one_snapshot_step_by_step(self) -> None:
        core = Replicator(CONFIG)
        assert core.handle(Targets(("a",)), now_s=0) == []
        record = snapshot(3)
        assert core.handle(Slots((record,), W), now_s=0) == [OpenTarget("a", 0)]
        effects = core.handle(TargetOpened("a", 0, 7, ()), now_s=0)
        assert effects == [Hold(key(3), record), Begin("a", key(3), record)]
        assert core.handle(Granted("a", key(3), "g"), now_s=1) == [Put("a", key(3), record, "g")]
        effects = core.handle(PutEnded("a", key(3), True, ""), now_s=2)
        assert effects == [Release(key(3)), Seal("a", key(3), "g")]
        assert core.handle(SealedThere("a", key(3)), now_s=3) == []

    def test_a_fresh_target_gets_the_newest_suffix_first_then_what_is_newer(self) -> None:
        driven = driven_to("a")
        driven.feed(table(2, 3, 4, 5))
        assert driven.sent == [("a", 4), ("a", 5)]
        assert driven.core.replicated == Interval(5, 5)
        driven.feed(table(3, 4, 5, 6))
        assert driven.sent[2:] == [("a", 6)]
        assert driven.core.replicated == Interval(5, 6)

    def test_a_target_that_is_behind_goes_on_in_order(self) -> None:
        driven = driven_to("a")
        driven.feed(table(2, 3))
        driven.sent.clear()
        driven.feed(table(3, 4, 5, 6, 7))
        assert driven.sent == [("a", i) for i in (4, 5, 6, 7)]
        assert driven.core.replicated == Interval(3, 7)

    def test_what_is_newer_than_a_gap_is_not_believed_to_be_there_while_the_gap_is_filled(
        self,
    ) -> None:
        """Nothing links to it there, so the host may have given its slot away for what comes before it."""
        core = Replicator(CONFIG)
        core.handle(Targets(("a",)), now_s=0)
        core.handle(Slots((snapshot(3), snapshot(4)), W), now_s=0)
        effects = core.handle(TargetOpened("a", 0, 1, (snapshot(4),)), now_s=0)
        assert Begin("a", key(3), snapshot(3)) in effects
        core.handle(Granted("a", key(3), "g"), now_s=0)
        core.handle(PutEnded("a", key(3), True, ""), now_s=0)
        effects = core.handle(SealedThere("a", key(3)), now_s=0)
        assert core.replicated == Interval(-1, -1)
        assert Begin("a", key(4), snapshot(4)) in effects
        core.handle(BeginRefused("a", key(4), "held", "it is here"), now_s=0)
        assert core.replicated == Interval(4, 4)

    def test_a_target_whose_next_snapshot_is_gone_begins_with_the_newest_suffix(self) -> None:
        """And the interval says that it holds no suffix that ends between."""
        driven = driven_to("a")
        driven.feed(table(2, 3))
        driven.sent.clear()
        driven.feed(table(6, 7, 8))
        assert driven.sent == [("a", 7), ("a", 8)]
        assert driven.core.replicated == Interval(8, 8)

    def test_a_broken_chain_begins_another_interval(self) -> None:
        driven = driven_to("a")
        driven.feed(table(2, 3))
        broken = (snapshot(2), snapshot(3), snapshot(5, linked=False), snapshot(6))
        driven.feed(Slots(broken, W))
        assert driven.sent == [("a", i) for i in (2, 3, 5, 6)]
        assert driven.core.replicated == Interval(6, 6)

    def test_targets_do_not_wait_for_each_other(self) -> None:
        driven = driven_to("a", "b")
        driven.deaf = {"b"}
        driven.feed(table(2, 3))
        assert driven.sent == [("a", 2), ("a", 3)]
        assert driven.core.current_up_to("a") == 3
        assert driven.core.replicated.last == -1
        assert driven.core.lag("b") == (2, 200)
        assert driven.core.lag("a") == (0, 0)

    def test_what_a_target_holds_already_is_not_sent_again(self) -> None:
        driven = driven_to("a")
        driven.keeps("a", map(snapshot, (1, 2, 3)))
        driven.feed(table(2, 3, 4))
        assert driven.sent == [("a", 4)]
        assert driven.core.replicated == Interval(2, 4)

    def test_a_span_wider_than_the_window_asks_for_more_snapshots(self) -> None:
        """All ranks need a common start, so a narrow window must keep what a wide one needs."""
        driven = driven_to("a")
        driven.feed(Joined(0, -1, span=3))
        driven.feed(table(2, 3, 4, 5))
        assert driven.sent == [("a", 3), ("a", 4), ("a", 5)]
        assert driven.core.replicated == Interval(5, 5)

    def test_a_new_generation_opens_another_replica(self) -> None:
        driven = driven_to("a")
        driven.feed(table(2, 3))
        new = replace(snapshot(4), generation=1)
        effects = driven.feed(Slots((snapshot(2), snapshot(3), new), W))
        assert effects == [OpenTarget("a", 1)]
        assert driven.core.replicated == Interval(3, 4)


class TestHolding:
    def test_a_slot_that_two_targets_are_sent_is_held_once_and_let_go_last(self) -> None:
        core = opened("a", "b")
        core.handle(Granted("a", key(3), 1), now_s=0)
        core.handle(Granted("b", key(3), 2), now_s=0)
        assert core.handle(PutEnded("a", key(3), True, ""), now_s=1) == [Seal("a", key(3), 1)]
        effects = core.handle(PutEnded("b", key(3), True, ""), now_s=1)
        assert effects[0] == Release(key(3))

    def test_a_lost_peer_cancels_and_the_slot_is_held_until_the_put_has_ended(self) -> None:
        core = opened("a")
        core.handle(Granted("a", key(3), 1), now_s=0)
        effects = core.handle(PeerLost("a", "deadline"), now_s=1)
        assert [type(effect) for effect in effects] == [Note, Abort]
        assert core.sole
        assert core.handle(PutEnded("a", key(3), False, "cancelled"), now_s=2) == [Release(key(3))]
        assert core.handle(PeerBack("a"), now_s=3) == [OpenTarget("a", 0)]

    def test_a_snapshot_that_disappears_in_mid_put_is_cancelled(self) -> None:
        core = opened("a")
        core.handle(Granted("a", key(3), 1), now_s=0)
        effects = core.handle(Slots((snapshot(4), snapshot(5)), W), now_s=1)
        assert effects == [Abort("a", key(3), 1)]
        effects = core.handle(PutEnded("a", key(3), True, "was through already"), now_s=2)
        assert effects[0] == Release(key(3))
        assert effects[-1] == Begin("a", key(4), snapshot(4))

    def test_a_target_taken_away_is_forgotten_once_its_put_has_ended(self) -> None:
        core = opened("a")
        core.handle(Granted("a", key(3), 1), now_s=0)
        assert core.handle(Targets(("b",)), now_s=1) == [Abort("a", key(3), 1), OpenTarget("b", 0)]
        core.handle(PutEnded("a", key(3), False, "cancelled"), now_s=2)
        assert [state.node for state in core.states(now_s=2)] == ["b"]
        with pytest.raises(LocalProtocolError, match="not begun"):
            core.handle(PutEnded("a", key(3), False, "twice"), now_s=3)


class TestRefusals:
    def test_busy_is_tried_again_soon_and_then_less_often(self) -> None:
        core, now_s, waits = opened("a"), 0.0, []
        for _ in range(8):
            effects = core.handle(BeginRefused("a", key(3), "busy", "full"), now_s=now_s)
            assert effects == [Release(key(3))]
            wake_s = core.wake_at_s
            assert wake_s is not None
            waits.append(wake_s - now_s)
            assert core.handle(Tick(), now_s=(now_s + wake_s) / 2) == []
            now_s = wake_s
            assert core.handle(Tick(), now_s=now_s)[-1] == Begin("a", key(3), snapshot(3))
        assert waits[:3] == pytest.approx([0.05, 0.1, 0.2])
        assert waits[-1] == pytest.approx(CONFIG.busy_max_s)

    def test_unknown_is_reopened_at_once_but_only_once(self) -> None:
        core = opened("a")
        effects = core.handle(BeginRefused("a", key(3), "unknown", "restarted"), now_s=0)
        assert effects == [Release(key(3)), OpenTarget("a", 0)]
        core.handle(TargetOpened("a", 0, 2, ()), now_s=0)
        effects = core.handle(BeginRefused("a", key(3), "unknown", "again"), now_s=0)
        assert effects == [Release(key(3))]

    def test_who_does_not_know_the_lease_holds_nothing_until_it_tells(self) -> None:
        """It was restarted, perhaps on a machine that has nothing of what it told before."""
        driven = driven_to("a")
        driven.feed(table(2, 3, 4))
        assert driven.core.current_up_to("a") == 4
        driven.core.handle(Slots(tuple(snapshot(t) for t in range(2, 6)), W), now_s=0)
        driven.core.handle(BeginRefused("a", key(5), "unknown", "restarted"), now_s=0)
        assert driven.core.current_up_to("a") == -1
        assert driven.core.replicated == Interval(-1, -1)

    def test_another_boot_that_answers_holds_nothing_that_the_one_before_told(self) -> None:
        """A machine was replaced, and its new daemon opened the newest generation before anybody
        noticed: what the old machine had held of older generations went on to count, and the floor
        was announced on it (simulation, seed 100596).
        """
        core = Replicator(CONFIG)
        core.handle(Targets(("a",)), now_s=0)
        core.handle(Slots((snapshot(3), snapshot(4)), W), now_s=0)
        core.handle(TargetOpened("a", 0, 1, (snapshot(3), snapshot(4)), "boot 1"), now_s=0)
        assert core.replicated == Interval(4, 4)
        grown = replace(snapshot(5), generation=1)
        effects = core.handle(Slots((snapshot(3), snapshot(4), grown), W), now_s=1)
        assert effects == [OpenTarget("a", 1)]
        effects = core.handle(TargetOpened("a", 1, 2, (), "boot 2"), now_s=1)
        assert core.replicated == Interval(-1, -1)
        assert effects == [OpenTarget("a", 0)]  # it is told of 3 and 4 once more
        core.handle(TargetOpened("a", 0, 3, (snapshot(3), snapshot(4)), "boot 2"), now_s=1)
        assert core.replicated == Interval(4, 4)

    def test_held_counts_as_sealed_and_stale_is_passed_over(self) -> None:
        core = opened("a")
        effects = core.handle(BeginRefused("a", key(3), "held", ""), now_s=0)
        assert effects[-1] == Begin("a", key(4), snapshot(4))
        effects = core.handle(BeginRefused("a", key(4), "stale", ""), now_s=0)
        assert [type(effect) for effect in effects] == [Release, Note]
        assert core.wake_at_s is None

    def test_a_target_that_knows_of_another_history_is_named_once(self) -> None:
        """A node that was away came back with a history that counts, while this job trains on:
        its replicas were refused without a word.
        """
        core = opened("a")
        notes = []
        for iteration in (3, 4):
            effects = core.handle(BeginRefused("a", key(iteration), "stale", ""), now_s=0)
            notes += [effect for effect in effects if isinstance(effect, Note)]
        assert [(note.level, note.kind) for note in notes] == [("warning", "replication_stale")]
        assert "a refuses iteration 3" in notes[0].message

    def test_a_snapshot_that_is_gone_does_not_make_the_target_wait(self) -> None:
        """A ring with no slot to spare overwrites its oldest snapshot at each iteration; a target
        that had to begin anew waited up to ten seconds before each try, for a snapshot that was
        then gone as well, and the floor stood still (simulation, seed 101703).
        """
        core = opened("a")
        effects = core.handle(BeginRefused("a", key(3), "gone", "the slot was reused"), now_s=0)
        assert Begin("a", key(4), snapshot(4)) in effects
        effects = core.handle(BeginRefused("a", key(4), "gone", "the slot was reused"), now_s=0)
        assert effects == [Release(key(4))]
        assert core.wake_at_s is None  # there is nothing left to send
        effects = core.handle(Slots((snapshot(5), snapshot(6)), W), now_s=0)
        assert Begin("a", key(5), snapshot(5)) in effects

    def test_want_of_memory_is_told_once_and_does_not_hold_the_floor_back(self) -> None:
        core = Replicator(CONFIG)
        core.handle(Targets(("a",)), now_s=0)
        core.handle(Slots((snapshot(3),), W), now_s=0)
        effects = core.handle(OpenRefused("a", 0, "quota", "1 GiB short"), now_s=0)
        assert [effect.level for effect in effects if isinstance(effect, Note)] == ["warning"]
        assert core.sole
        assert core.handle(Tick(), now_s=CONFIG.quota_s) == [OpenTarget("a", 0)]
        assert core.handle(OpenRefused("a", 0, "quota", "still"), now_s=6) == []
        core.handle(Tick(), now_s=100)
        core.handle(TargetOpened("a", 0, 1, ()), now_s=100)
        assert core.replicated.last == -1

    @pytest.mark.parametrize("code", ["busy", "quota", "other"])
    def test_where_another_generation_is_refused_the_open_one_goes_on(self, code: str) -> None:
        """The target counted as closed, so the next snapshot of the generation that was open raised
        "begin is not legal in state closed" in the daemon.
        """
        core = opened("a", table=(3,))
        core.handle(Granted("a", key(3), "g"), now_s=0)
        core.handle(PutEnded("a", key(3), True, ""), now_s=0)
        core.handle(SealedThere("a", key(3)), now_s=0)
        assert core.handle(Slots((snapshot(3), replace(snapshot(4), generation=1)), W), now_s=1) == [
            OpenTarget("a", 1)
        ]
        core.handle(OpenRefused("a", 1, code, "not now"), now_s=1)
        assert (
            core.handle(Slots((snapshot(3), snapshot(4)), W), now_s=1) == []
        )  # it waits before it tries again
        effects = core.handle(Tick(), now_s=10)
        if code == "quota":  # what it holds is asked anew
            assert effects == [OpenTarget("a", 0)]
            effects = core.handle(TargetOpened("a", 0, 1, (snapshot(3),)), now_s=10)
        assert Begin("a", key(4), snapshot(4)) in effects

    @pytest.mark.parametrize("why", ["no memory", "stalled"])
    def test_what_a_target_held_when_it_ceased_to_count_is_asked_anew(self, why: str) -> None:
        """Without it the floor went on, so the host gave its older ring away, and of the newer one
        it told what that holds: a suffix of which half was gone counted as complete (simulation,
        seeds 11445 and 16406).
        """
        core = opened("a", table=(3, 4))
        for iteration in (3, 4):
            core.handle(Granted("a", key(iteration), "g"), now_s=0)
            core.handle(PutEnded("a", key(iteration), True, ""), now_s=0)
            core.handle(SealedThere("a", key(iteration)), now_s=0)
        assert core.replicated == Interval(4, 4)
        grown = replace(snapshot(5), generation=1)
        core.handle(Slots((snapshot(3), snapshot(4), grown), W), now_s=1)
        now_s = 2.0
        if why == "no memory":
            core.handle(OpenRefused("a", 1, "quota", ""), now_s=now_s)
        else:
            while not core.sole:
                now_s += 60
                core.handle(Tick(), now_s=now_s)
        there: set[int] = set()  # what the host has now
        for _ in range(20):
            now_s += 60
            todo = core.handle(Tick(), now_s=now_s)
            while todo:
                effect = todo.pop(0)
                if isinstance(effect, OpenTarget):
                    todo += core.handle(TargetOpened("a", effect.generation, 2, ()), now_s=now_s)
                elif isinstance(effect, Begin):
                    todo += core.handle(Granted("a", effect.key, "h"), now_s=now_s)
                elif isinstance(effect, Put):
                    todo += core.handle(PutEnded("a", effect.key, True, ""), now_s=now_s)
                elif isinstance(effect, Seal):
                    there.add(effect.key.iteration)
                    todo += core.handle(SealedThere("a", effect.key), now_s=now_s)
                last = core.replicated.last
                assert core.sole or last < 0 or {last - 1, last} <= there
        assert core.replicated == Interval(5, 5)
        assert there == {4, 5}

    def test_after_three_wrong_digests_the_local_copy_is_suspected_and_passed_over(self) -> None:
        core, now_s = opened("a"), 0.0
        for attempt in range(1, 4):
            core.handle(Granted("a", key(3), attempt), now_s=now_s)
            core.handle(PutEnded("a", key(3), True, ""), now_s=now_s)
            effects = core.handle(SealRefused("a", key(3), "digest", "differs"), now_s=now_s)
            assert [effect.level for effect in effects if isinstance(effect, Note)] == (
                ["error"] if attempt == 3 else []
            )
            now_s += 30
            effects = core.handle(Tick(), now_s=now_s)
        assert effects[-1] == Begin("a", key(4), snapshot(4))

    def test_what_could_not_be_computed_there_is_sent_again_at_once_and_then_after_a_pause(self) -> None:
        """The shell puts the image then, which is not computed; a peer that says so again is not believed."""
        core = opened("a")
        for attempt, effects in enumerate(([Begin("a", key(3), snapshot(3))], [])):
            core.handle(Granted("a", key(3), attempt), now_s=0)
            core.handle(PutEnded("a", key(3), True, ""), now_s=0)
            found = core.handle(SealRefused("a", key(3), "recompute", "other bits"), now_s=0)
            assert [each for each in found if isinstance(each, Begin)] == effects
        assert core.wake_at_s is not None

    def test_a_failed_put_gives_the_grant_back_and_is_tried_again(self) -> None:
        core = opened("a")
        core.handle(Granted("a", key(3), "g"), now_s=0)
        effects = core.handle(PutEnded("a", key(3), False, "deadline"), now_s=0)
        assert effects == [Release(key(3)), Abort("a", key(3), "g")]
        assert core.wake_at_s == pytest.approx(CONFIG.retry_s)

    def test_a_question_that_nobody_answers_is_asked_anew(self) -> None:
        core = opened("a")
        assert core.wake_at_s == CONFIG.answer_s
        assert core.handle(Tick(), now_s=CONFIG.answer_s) == [Release(key(3))]
        assert core.handle(Tick(), now_s=CONFIG.answer_s + 1) == [OpenTarget("a", 0)]

    def test_a_target_that_gets_nowhere_does_not_hold_the_floor_back_for_ever(self) -> None:
        core, now_s = opened("a", "b"), 0.0
        kinds = []
        while now_s < CONFIG.stalled_s + 5:
            for node in ("a", "b"):
                kinds += core.handle(BeginRefused(node, key(3), "busy", "full"), now_s=now_s)
            now_s += 1.0
            kinds += core.handle(Tick(), now_s=now_s)
        assert [e.kind for e in kinds if isinstance(e, Note)] == ["replication_stalled"] * 2
        assert core.sole


class TestStaleAnswers:
    def test_a_grant_that_nobody_waits_for_is_given_back(self) -> None:
        core = opened("a")
        core.handle(Granted("a", key(3), 1), now_s=0)
        assert core.handle(Granted("a", key(3), 1), now_s=0) == []  # the same answer twice
        assert core.handle(Granted("a", key(3), 2), now_s=0) == [Abort("a", key(3), 2)]
        assert core.handle(Granted("x", key(9), 3), now_s=0) == [Abort("x", key(9), 3)]

    def test_answers_to_other_questions_change_nothing(self) -> None:
        core = opened("a")
        for event in (
            SealedThere("a", key(3)),
            SealRefused("a", key(3), "digest", ""),
            BeginRefused("a", key(4), "held", ""),
            TargetOpened("a", 5, 1, (snapshot(3),)),
            OpenRefused("a", 0, "quota", ""),
            SealedThere("x", key(3)),
        ):
            assert core.handle(event, now_s=0) == []
        assert [state.phase for state in core.states(now_s=0)] == [Phase.BEGINNING]
        assert core.current_up_to("a") == -1


class TestEpochs:
    def test_another_epoch_asks_every_target_what_it_holds(self) -> None:
        """What it was believed to hold may be of the abandoned history, and was given away there."""
        driven = driven_to("a")
        driven.feed(table(2, 3, 4))
        driven.feed(Joined(1, 3))
        assert driven.core.current_up_to("a") == 3
        driven.sent.clear()
        driven.feed(Slots((snapshot(3), snapshot(4, epoch=1, start=3)), W))
        assert driven.sent == [("a", 4)]
        assert driven.core.replicated.last == 4

    def test_the_same_epoch_again_changes_nothing(self) -> None:
        driven = driven_to("a")
        driven.feed(Joined(1, 3))
        driven.feed(table(2, 3))
        assert driven.feed(Joined(1, 3)) == []
        assert driven.core.replicated.last == 3


def test_without_targets_the_primary_is_the_promised_copy() -> None:
    core = Replicator(CONFIG)
    assert core.sole
    assert core.replicated == Interval(-1, -1)
    assert core.current_up_to("a") == -1
    ring = [snapshot(t) for t in range(3, 9)]
    core.handle(Slots(tuple(ring), W), now_s=0)
    assert core.replicated == Interval(4, 8)
    core.handle(Slots(tuple(ring[2:]), W), now_s=0)
    assert core.replicated == Interval(6, 8)  # it has given 3 and 4 away
    core.handle(Joined(0, -1, span=4), now_s=0)
    assert core.replicated == Interval(8, 8)  # another rank needs four
    core.handle(Joined(0, -1, span=5), now_s=0)
    assert core.replicated == Interval(-1, -1)
    assert core.wake_at_s is None


def test_the_ring_keeps_its_aim_until_both_targets_hold_it() -> None:
    """With two targets it gave away what it liked, and the rank's word was what both hold: the loss of both
    was then the loss of that state.
    """
    driven = driven_to("a", "b")
    driven.deaf = {"b"}
    driven.feed(Agreed(-1, -1))
    driven.feed(table(2, 3, 4, 5))
    driven.feed(table(3, 4, 5, 6, 7, 8))
    assert driven.core.aim == Interval(4, 5)
    assert driven.core.word == Interval(4, -1)
    assert driven.sent == [("a", i) for i in range(3, 8)], "not much beyond the aim, also to the quick one"
    driven.deaf = set()
    driven.now_s += CONFIG.answer_s
    driven.feed(Tick())
    driven.now_s += CONFIG.retry_max_s
    driven.feed(Tick())
    assert driven.core.word == Interval(4, 5)
    driven.feed(table(4, 5, 6, 7, 8, 9))
    assert driven.core.word == Interval(5, 5), "the ring has given 3 away"
    driven.feed(Agreed(5, 5))
    assert driven.core.aim == Interval(5, 7), "it goes on from the floor"
    assert driven.core.word == Interval(5, 7)


def test_a_word_that_was_given_stays_until_the_others_have_told_what_they_know() -> None:
    """A rank vouched for iteration 4 and was cut off before it heard of the floor there. Its next
    target refused iteration 3 for its digest again and again; the rank chose another aim, and its
    ring gave away what the floor of the others needed (simulation, seed 100187).

    Now it keeps the aim and tells that no floor will be there. What comes back from the tree decides.
    """
    core = Replicator(CONFIG)
    core.handle(Targets(("a",)), now_s=0)
    core.handle(Slots((snapshot(3), snapshot(4)), W), now_s=0)
    core.handle(Agreed(-1, -1), now_s=0)
    core.handle(TargetOpened("a", 0, 1, (snapshot(3), snapshot(4))), now_s=0)
    assert core.word == Interval(4, 4)
    ring = Slots(tuple(snapshot(i) for i in (3, 4, 7, 8)), W)
    core.handle(ring, now_s=1)
    core.handle(PeerLost("a", "no answer"), now_s=1)
    core.handle(Targets(("b",)), now_s=1)
    assert core.word == Interval(4, -1)
    core.handle(TargetOpened("b", 0, 1, ()), now_s=1)
    now_s = 1.0
    for _ in range(CONFIG.digest_refusals):
        core.handle(Granted("b", key(3), "g"), now_s=now_s)
        core.handle(PutEnded("b", key(3), True, ""), now_s=now_s)
        core.handle(SealRefused("b", key(3), "digest", "another digest"), now_s=now_s)
        now_s += CONFIG.retry_max_s
        core.handle(Tick(), now_s=now_s)
    assert core.aim.last == 4, "its ring gives away what may be the floor of the others"
    assert core.word == Interval(5, -1)
    core.handle(Agreed(4, 5), now_s=now_s)  # it was announced
    assert core.aim == Interval(8, 8)
    assert core.word == Interval(8, -1)


def test_thousands_of_snapshots_leave_no_more_behind_than_ten() -> None:
    sizes = []
    driven = driven_to("a", "b")
    for iteration in range(1, 2000):
        driven.feed(table(*range(max(0, iteration - 5), iteration + 1)))
        held = [state.held for state in driven.core.states(now_s=0)]
        sizes.append(max(held))
    assert max(sizes[100:]) <= max(sizes[:10]) <= 6


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_bounds_are_positive(wrong: float) -> None:
    with pytest.raises(ValueError, match="busy_s must be positive"):
        ReplicationConfig(busy_s=wrong)


class Replication:
    """One rank with two operators, which are anchored in turns."""

    def __init__(self) -> None:
        self.core = Replicator()
        self.now_s = 0.0
        self.epoch, self.start = 0, -1

    def play(self, words: list[str]) -> list[str]:
        if words[0] == "wait":
            self.now_s += float(words[1])
        effects = self.core.handle(self.event(words), now_s=self.now_s)
        states = self.core.states(now_s=self.now_s)
        lines = [
            f"{t.node} {t.phase}: holds {t.held}, current to {t.current_up_to}"
            + ("" if t.counted else ", does not count")
            + (f", waits {t.waiting_s:g} s" if t.waiting_s else "")
            + (f" ({t.reason})" if t.reason else "")
            for t in states
        ]
        return [*map(shown, effects), *lines]

    def event(self, words: list[str]) -> Event:
        match words:
            case ["wait", _]:
                return Tick()
            case ["join", epoch, start]:
                self.epoch, self.start = int(epoch), int(start)
                return Joined(self.epoch, self.start)
            case ["targets", *nodes]:
                return Targets(tuple(nodes))
            case ["ring", *iterations]:
                return Slots(tuple(map(self.record, iterations)), 2, 6)
            case ["opened", node, boot, *held]:
                return TargetOpened(node, 0, 1, tuple(map(self.record, held)), boot)
            case ["open-refused", node, code]:
                return OpenRefused(node, 0, code, "said the test")
            case ["granted", node, iteration]:
                return Granted(node, self.key(iteration), f"grant-{node}-{iteration}")
            case ["begin-refused", node, iteration, code]:
                return BeginRefused(node, self.key(iteration), code, "said the test")
            case ["put-ended", node, iteration, *why]:
                return PutEnded(node, self.key(iteration), not why, " ".join(why))
            case ["sealed", node, iteration]:
                return SealedThere(node, self.key(iteration))
            case ["seal-refused", node, iteration, code]:
                return SealRefused(node, self.key(iteration), code, "said the test")
            case ["lost", node]:
                return PeerLost(node, "no heartbeat")
            case ["back", node]:
                return PeerBack(node)
        raise ValueError(words)

    def record(self, told: str) -> SlotRecord:
        iteration = int(told)
        made = SlotRecord(0, iteration % 6, SlotState.SEALED, iteration, iteration - 1, iteration)
        return replace(
            made,
            anchors=1 << iteration % 2,
            image_len=100,
            epoch=self.epoch,
            epoch_start=self.start,
        )

    def key(self, iteration: str) -> SnapshotKey:
        return key_of(self.record(iteration))


@pytest.mark.parametrize("name", scenarios("replication"))
def test_transcripts(name: str, transcript: Callable[[str, Driver], None]) -> None:
    transcript(name, Replication())


def test_an_event_that_is_not_legal_names_machine_node_state_and_event() -> None:
    """A seal that was never asked for must not count as a copy."""
    with pytest.raises(LocalProtocolError, match=r"replication \[node=b\]: event sealed .* state idle"):
        TRANSITIONS.after(Phase.IDLE, TargetEvent.SEALED, node="b")


def test_a_slot_that_nobody_reads_and_is_held_is_noticed() -> None:
    """The check must be able to fail: what is held for nobody is a slot that the ring has lost."""
    core = Replicator()
    core.handle(Targets(("b",)), now_s=0.0)
    core._turn.readers[key_of(Replication().record("3"))] = 1
    with pytest.raises(AssertionError, match="held for"):
        core.handle(Tick(), now_s=1.0)
