"""What a rank persists, event by event, and against a ring that goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.persister import (
    TRANSITIONS,
    Cadence,
    Commit,
    CommitFailed,
    Committed,
    Durable,
    Effect,
    Event,
    Fenced,
    Flush,
    Forgotten,
    Persister,
    PersistEvent,
    PersistPhase,
    SlotReused,
    SlotTables,
    SnapshotStored,
    Store,
    StoreFailed,
)
from ckptd.core.replication.replicas import spanning_suffix
from ckptd.core.slots.ring import choose_slot, newest_by_iteration
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
from tests.transcripts import Driver, scenarios, shown

W = 2


def snapshot(iteration: int, *, linked: bool = True, epoch: int = 0, start: int = -1) -> SlotRecord:
    """A sealed snapshot of a rank with two operators, anchored in turns."""
    return SlotRecord(
        generation=0,
        index=iteration % 8,
        state=SlotState.SEALED,
        iteration=iteration,
        previous=iteration - 1 if linked else -1,
        sequence=iteration + 1,
        image_len=100,
        anchors=1 << iteration % W,
        phase=iteration % W,
        epoch=epoch,
        epoch_start=start,
    )


def persister(every: int = 4) -> Persister:
    core = Persister(Cadence(every=every), parallel=1)
    core.handle(Joined(0, -1), now_s=0.0)
    return core


def slots(*iterations: int, total: int = 8, epoch: int = 0, start: int = -1) -> SlotTables:
    found = tuple(snapshot(i, epoch=epoch, start=start) for i in iterations)
    return SlotTables(found, W, total)


def of(kind: type[Effect], effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def key(iteration: int) -> SnapshotKey:
    return key_of(snapshot(iteration))


def stored(iteration: int) -> SnapshotStored:
    return SnapshotStored(key(iteration), 100)


def test_the_suffix_of_a_due_iteration_is_held_stored_in_order_and_committed() -> None:
    core = persister()
    assert core.handle(slots(1, 2, 3), now_s=1.0) == []
    effects = core.handle(slots(1, 2, 3, 4), now_s=2.0)
    assert [e.key.iteration for e in of(Hold, effects)] == [3, 4]  # type: ignore[union-attr]
    assert of(Store, effects) == [Store(key(3), snapshot(3), (key(4),))]
    effects = core.handle(stored(3), now_s=3.0)
    assert effects == [Release(key(3)), Store(key(4), snapshot(4))]
    effects = core.handle(stored(4), now_s=4.0)
    assert effects == [Release(key(4)), Commit(4, 4, (key(3), key(4)))]
    assert core.handle(Committed(key(4)), now_s=5.0) == []
    state = core.state()
    assert (state.under_way, state.uploaded_bytes) == (-1, 200)
    assert state.last_s == 3.0
    assert core.idle


def test_newer_snapshots_are_named_that_anchor_what_one_has() -> None:
    """The newest in any case: it has weights, too, of what it does not anchor."""
    core = persister(every=6)
    anchors = {3: 0b111001, 4: 0b001010, 5: 0b010001, 6: 0b000100}
    records = tuple(replace(snapshot(i), anchors=which) for i, which in anchors.items())
    effects = core.handle(SlotTables(records, 6, 8), now_s=0.0)
    for iteration, newer in {3: (6, 5, 4), 4: (6,), 5: (6,), 6: ()}.items():
        (asked,) = of(Store, effects)
        assert isinstance(asked, Store)
        assert (asked.key, asked.newer) == (key(iteration), tuple(map(key, newer)))
        effects = core.handle(stored(iteration), now_s=0.0)


def test_what_is_stored_is_not_stored_again() -> None:
    core = persister(every=1)
    core.handle(slots(1, 2), now_s=0.0)
    for i in (1, 2):
        core.handle(stored(i), now_s=0.0)
    core.handle(Committed(key(2)), now_s=0.0)
    effects = core.handle(slots(1, 2, 3), now_s=0.0)
    assert of(Hold, effects) == [Hold(key(3), snapshot(3))]
    assert of(Store, effects) == [Store(key(3), snapshot(3))]


def test_what_was_stored_for_one_checkpoint_alone_is_stored_again() -> None:
    core = persister(every=1)
    core.handle(slots(1, 2), now_s=0.0)
    core.handle(stored(1), now_s=0.0)
    only = replace(stored(2), for_later=False)
    (commit,) = of(Commit, core.handle(only, now_s=0.0))
    assert commit == Commit(2, 1, (key(1), key(2)))
    core.handle(Committed(key(2)), now_s=0.0)
    effects = core.handle(slots(1, 2, 3), now_s=0.0)
    assert [hold.key for hold in of(Hold, effects)] == [key(2), key(3)]  # type: ignore[union-attr]
    # A late answer about the last checkpoint says nothing of this one's snapshots that were not asked for.
    core = persister(every=1)
    assert core.handle(only, now_s=0.0) == []
    assert of(Hold, core.handle(slots(1, 2), now_s=0.0)) == [Hold(key(i), snapshot(i)) for i in (1, 2)]


def test_who_stores_learns_of_all_snapshots_of_a_checkpoint_that_every_rank_may_begin() -> None:
    core = persister(every=2)
    (asked,) = of(Store, core.handle(slots(1, 2), now_s=0.0))
    assert isinstance(asked, Store)
    assert asked.checkpoint == ((key(1), snapshot(1).phase), (key(2), snapshot(2).phase))
    core = persister(every=4)
    core.handle(slots(1, 2, 3), now_s=0.0)
    (asked,) = of(Store, core.handle(Flush(), now_s=0.0))
    assert isinstance(asked, Store)
    assert asked.checkpoint == ()


def test_one_checkpoint_at_a_time_and_then_the_newest_that_is_due() -> None:
    core = persister(every=1)
    core.handle(slots(1, 2), now_s=0.0)
    assert core.handle(slots(1, 2, 3), now_s=0.0) == []
    assert core.state().skipped == 1
    core.handle(stored(1), now_s=0.0)
    core.handle(stored(2), now_s=0.0)
    # 3 was skipped: the others may have skipped it, too.
    assert core.handle(Committed(key(2)), now_s=0.0) == []
    effects = core.handle(slots(2, 3, 4), now_s=0.0)
    assert [e.key.iteration for e in of(Hold, effects)] == [3, 4]  # type: ignore[union-attr]


def test_a_suffix_whose_snapshots_are_still_digested_is_waited_for() -> None:
    core = persister()
    assert core.handle(slots(2, 4), now_s=0.0) == []
    assert of(Hold, core.handle(slots(2, 3, 4), now_s=0.0))


def test_a_broken_chain_is_not_persisted() -> None:
    core = persister()
    records = (snapshot(3), snapshot(4, linked=False))
    assert core.handle(SlotTables(records, W, 8), now_s=0.0) == []
    assert core.idle


def test_a_slot_that_the_trainer_took_gives_the_checkpoint_up() -> None:
    core = persister()
    core.handle(slots(3, 4), now_s=0.0)
    effects = core.handle(SlotReused(key(3)), now_s=0.0)
    assert [e.kind for e in of(Note, effects)] == ["persist_abandoned"]  # type: ignore[union-attr]
    assert {e.key.iteration for e in of(Release, effects)} == {3, 4}  # type: ignore[union-attr]
    assert core.idle


def test_a_crowded_ring_is_let_go_and_the_third_checkpoint_is_firm() -> None:
    core = persister()
    for end in (4, 8):
        core.handle(slots(end - 1, end, total=5), now_s=0.0)
        effects = core.handle(slots(end - 1, end, end + 1, end + 2, total=5), now_s=0.0)
        assert of(Release, effects), "two held beside a newest suffix of two leave one of five slots"
    effects = core.handle(slots(11, 12, total=5), now_s=0.0)
    assert [e.kind for e in of(Note, effects)] == ["persist_firm"]  # type: ignore[union-attr]
    assert core.handle(slots(11, 12, 13, 14, total=5), now_s=0.0) == []


def test_a_ring_with_room_keeps_the_checkpoint() -> None:
    core = persister()
    core.handle(slots(3, 4, total=6), now_s=0.0)
    assert core.handle(slots(3, 4, 5, 6, total=6), now_s=0.0) == []


def test_a_store_that_fails_is_left_alone_for_a_while_that_doubles() -> None:
    core = persister()
    core.handle(slots(3, 4), now_s=0.0)
    effects = core.handle(StoreFailed(key(3), "access denied"), now_s=10.0)
    assert "access denied" in of(Note, effects)[0].message  # type: ignore[union-attr]
    assert core.handle(slots(7, 8), now_s=14.0) == []
    assert of(Store, core.handle(Tick(), now_s=15.0))
    # Nothing is being committed: but it is our checkpoint.
    core.handle(CommitFailed(key(8), "another"), now_s=15.0)
    assert core.handle(slots(11, 12), now_s=24.0) == []
    assert of(Store, core.handle(Tick(), now_s=25.0))


def test_the_end_of_training_is_persisted_although_the_store_failed_then() -> None:
    """Nothing falls due any more after the end of a run: what failed in an outage was never tried again."""
    core = persister(every=100)
    core.handle(slots(5, 6, 7), now_s=0.0)
    core.handle(Flush(), now_s=0.0)
    core.handle(StoreFailed(key(6), "the store is away"), now_s=1.0)
    assert not core.idle
    assert core.handle(slots(5, 6, 7), now_s=2.0) == []
    assert of(Store, core.handle(Tick(), now_s=6.0)) == [Store(key(6), snapshot(6), (key(7),))]
    core.handle(stored(6), now_s=7.0)
    assert of(Commit, core.handle(stored(7), now_s=7.0))
    core.handle(Committed(key(7)), now_s=8.0)
    assert core.idle


def test_a_due_checkpoint_that_failed_is_due_until_something_newer_is() -> None:
    """Its trainer may have been killed meanwhile."""
    core = persister()
    core.handle(slots(3, 4, 5), now_s=0.0)
    core.handle(StoreFailed(key(3), "the store is away"), now_s=1.0)
    assert of(Store, core.handle(Tick(), now_s=6.0)) == [Store(key(3), snapshot(3), (key(4),))]
    core.handle(StoreFailed(key(3), "the store is away"), now_s=7.0)
    core.handle(slots(3, 4, 5, 6, 7, 8), now_s=8.0)
    assert of(Store, core.handle(Tick(), now_s=20.0)) == [Store(key(7), snapshot(7), (key(8),))]


def test_the_end_of_training_is_persisted_although_who_stores_died_then() -> None:
    """It is not asked of anybody before we are told of the slots again: then somebody is there to ask."""
    core = persister(every=100)
    core.handle(slots(6, 7), now_s=0.0)
    core.handle(Flush(), now_s=0.0)
    assert of(Store, core.handle(Forgotten(), now_s=1.0)) == []
    assert of(Store, core.handle(Tick(), now_s=2.0)) == []
    assert of(Store, core.handle(slots(6, 7), now_s=3.0)) == [Store(key(6), snapshot(6), (key(7),))]


def test_a_flush_survives_the_death_of_who_stores_while_it_waits_for_its_turn() -> None:
    """It was dropped as if there were nothing to flush, because nothing was known of the slots at
    that moment.
    """
    core = persister()
    core.handle(slots(3, 4, 5), now_s=0.0)
    core.handle(Flush(), now_s=0.0)  # 4 is under way
    core.handle(Forgotten(), now_s=1.0)
    assert not core.idle
    assert of(Store, core.handle(slots(3, 4, 5), now_s=2.0)) == [Store(key(4), snapshot(4), (key(5),))]
    core.handle(StoreFailed(key(4), "the store is away"), now_s=3.0)  # now it waits for its time
    core.handle(Forgotten(), now_s=4.0)
    assert not core.idle
    core.handle(slots(3, 4, 5), now_s=5.0)
    assert of(Store, core.handle(Tick(), now_s=8.0)) == [Store(key(4), snapshot(4), (key(5),))]


def test_a_flush_stays_due_although_one_of_its_slots_was_lost() -> None:
    """Nothing falls due after it: what was newest then was never persisted."""
    core = persister(every=100)
    core.handle(slots(5, 6, 7), now_s=0.0)
    core.handle(Flush(), now_s=0.0)
    effects = core.handle(SlotReused(key(6)), now_s=1.0)
    assert {e.key.iteration for e in of(Release, effects)} == {6, 7}  # type: ignore[union-attr]
    assert of(Hold, effects) == []  # not at once: it may be lost again and again
    assert not core.idle
    core.handle(slots(7, 8, 9), now_s=2.0)
    effects = core.handle(Tick(), now_s=6.0)
    assert [e.key.iteration for e in of(Hold, effects)] == [8, 9]  # type: ignore[union-attr]


def test_a_flush_that_was_asked_for_in_another_history_is_over_with_it() -> None:
    """Whoever goes on from there flushes what it has, in the end."""
    core = persister(every=100)
    core.handle(Flush(), now_s=0.0)
    core.handle(Joined(1, 3), now_s=0.0)
    assert core.idle
    assert core.handle(slots(4, 5, epoch=1, start=3), now_s=0.0) == []


def test_a_fence_stops_all_uploads_until_another_epoch_is_joined() -> None:
    """It was taken for a store that refuses: tried again after a while, for ever, and slots were
    held for it each time.
    """
    core = persister()
    core.handle(slots(3, 4), now_s=0.0)
    core.handle(Flush(), now_s=0.0)
    effects = core.handle(Fenced("another job is here"), now_s=1.0)
    assert {e.key.iteration for e in of(Release, effects)} == {3, 4}  # type: ignore[union-attr]
    (note,) = of(Note, effects)
    assert (note.kind, note.level) == ("persist.fenced", "error")  # type: ignore[union-attr]
    assert core.idle
    assert core.state().reason == "another job is here"
    for event in (
        Fenced("another job is here"),  # told by every checkpoint that is looked after
        stored(3),
        Flush(),
        slots(3, 4, 7, 8),
        Forgotten(),
        Joined(0, -1),
        slots(3, 4, 7, 8),
        Tick(),
    ):
        assert core.handle(event, now_s=1000.0) == []
    assert core.idle
    core.handle(Joined(1, 8), now_s=1001.0)
    effects = core.handle(slots(3, 4, 7, 8), now_s=1001.0)
    assert [e.key.iteration for e in of(Hold, effects)] == [7, 8]  # type: ignore[union-attr]


def test_what_all_ranks_have_counts_when_what_this_one_wrote_last_is_abandoned() -> None:
    """Checkpoint 4 was taken for one that this rank had not written, and would have been stored again."""
    core = persister()
    core.handle(Durable(4), now_s=0.0)
    core.handle(slots(7, 8), now_s=0.0)
    for i in (7, 8):
        core.handle(stored(i), now_s=0.0)
    core.handle(Committed(key(8)), now_s=0.0)
    core.handle(Joined(1, 6), now_s=1.0)
    assert core.state().committed == 4
    assert core.handle(slots(3, 4), now_s=1.0) == []
    core.handle(Flush(), now_s=1.0)
    assert core.idle


def test_a_manifest_of_another_history_does_not_count_in_this_one() -> None:
    """The answer came after the epoch's end: the same iteration, done anew, passed for stored
    before its first byte was.
    """
    core = persister()
    core.handle(slots(3, 4), now_s=0.0)
    for i in (3, 4):
        core.handle(stored(i), now_s=0.0)  # and the manifest is being written
    core.handle(Joined(1, 2), now_s=1.0)
    renewed = slots(3, 4, epoch=1, start=2)
    assert of(Store, core.handle(renewed, now_s=2.0))
    assert core.handle(Committed(key(4)), now_s=3.0) == []
    assert core.handle(CommitFailed(key(4), "a later history began"), now_s=3.0) == []
    assert core.state().under_way == 4
    for record in renewed.records:
        effects = core.handle(SnapshotStored(key_of(record), 100), now_s=4.0)
    assert [e.end for e in of(Commit, effects)] == [4]  # type: ignore[union-attr]


def test_committed_is_what_all_ranks_have() -> None:
    """A rank's own manifest was shown as committed, whatever the others had."""
    core = persister()
    core.handle(slots(3, 4), now_s=0.0)
    for i in (3, 4):
        core.handle(stored(i), now_s=0.0)
    core.handle(Committed(key(4)), now_s=1.0)
    assert (core.state().committed, core.state().lag_iterations) == (-1, 5)
    assert core.handle(slots(3, 4), now_s=2.0) == []  # all the same: our part is there
    core.handle(Durable(4), now_s=3.0)
    assert (core.state().committed, core.state().lag_iterations) == (4, 0)
    core.handle(Joined(1, 2), now_s=4.0)
    assert core.state().committed == -1
    assert of(Store, core.handle(slots(3, 4, epoch=1, start=2), now_s=5.0))


def test_who_stores_is_new_to_each_epoch_and_nothing_passes_for_stored() -> None:
    core = persister()
    core.handle(slots(3, 4), now_s=0.0)
    core.handle(stored(3), now_s=0.0)
    core.handle(Joined(1, 4), now_s=1.0)
    effects = core.handle(slots(3, 4), now_s=2.0)
    assert of(Store, effects) == [Store(key(3), snapshot(3), (key(4),))]


def test_news_of_something_else_changes_nothing() -> None:
    core = persister()
    core.handle(slots(3, 4), now_s=0.0)
    for event in (
        SlotReused(key(1)),
        StoreFailed(key(1), "x"),
        CommitFailed(key(3), "x"),
        Committed(key(3)),
    ):
        assert core.handle(event, now_s=0.0) == []
    assert core.state().under_way == 4


def test_another_epoch_gives_up_what_is_under_way() -> None:
    core = persister()
    core.handle(slots(3, 4), now_s=0.0)
    effects = core.handle(Joined(1, 3), now_s=0.0)
    assert {e.key.iteration for e in of(Release, effects)} == {3, 4}  # type: ignore[union-attr]
    renewed = (snapshot(3), replace(snapshot(4, epoch=1, start=3), sequence=9))
    effects = core.handle(SlotTables(renewed, W, 8), now_s=0.0)
    assert [e.key.epoch for e in of(Hold, effects)] == [0, 1]  # type: ignore[union-attr]


def test_the_end_of_training_persists_what_is_newest() -> None:
    core = persister(every=1000)
    core.handle(slots(3, 4, 5), now_s=0.0)
    effects = core.handle(Flush(), now_s=0.0)
    assert [e.key.iteration for e in of(Hold, effects)] == [4, 5]  # type: ignore[union-attr]
    for i in (4, 5):
        core.handle(stored(i), now_s=0.0)
    core.handle(Committed(key(5)), now_s=0.0)
    assert core.idle
    assert core.handle(Flush(), now_s=0.0) == []  # it is stored already
    assert core.idle


def test_what_all_ranks_have_in_storage_already_is_not_stored_again() -> None:
    core = persister()
    core.handle(Durable(4), now_s=0.0)
    assert core.state().committed == 4
    assert core.handle(slots(3, 4), now_s=0.0) == []
    assert of(Store, core.handle(slots(7, 8), now_s=0.0))


def test_who_stores_was_restarted_and_everything_is_stored_anew() -> None:
    core = persister(every=1)
    core.handle(slots(1, 2), now_s=0.0)
    core.handle(stored(1), now_s=0.0)
    core.handle(Forgotten(), now_s=0.0)
    effects = core.handle(slots(1, 2, 3), now_s=0.0)
    assert [e.key.iteration for e in of(Hold, effects)] == [2, 3]  # type: ignore[union-attr]


@dataclass
class Ring:
    """A trainer's ring of W = 2 that goes on, passes over what is held, and never waits."""

    total: int
    table: list[SlotRecord] = field(default_factory=list)
    held: set[SnapshotKey] = field(default_factory=set)
    iteration: int = 0
    linked: bool = False
    missed: int = 0
    epoch: int = 0
    start: int = -1

    def __post_init__(self) -> None:
        self.table = [SlotRecord(0, i, SlotState.FREE) for i in range(self.total)]

    def step(self) -> SlotTables:
        self.iteration += 1
        busy = {r.key for r in self.table if r.sealed and key_of(r) in self.held}
        choice = choose_slot(self.table, W, busy=busy, generation=0)
        if choice.index is None:
            self.linked, self.missed = False, self.missed + 1
        else:
            made = snapshot(self.iteration, linked=self.linked, epoch=self.epoch, start=self.start)
            made = replace(made, index=choice.index)
            self.table[choice.index] = made
            self.linked = True
        return SlotTables(tuple(r for r in self.table if r.sealed), W, self.total)


@given(
    total=st.integers(4, 12),
    every=st.integers(1, 6),
    pace=st.lists(st.integers(0, 3), min_size=30, max_size=120),
)
def test_with_room_for_two_suffixes_training_is_never_held_up_and_all_that_is_committed_was_stored(
    total: int, every: int, pace: list[int]
) -> None:
    core, ring = persister(every), Ring(total)
    todo: list[Effect] = []
    there: set[SnapshotKey] = set()
    firm = False

    def perform(effects: list[Effect]) -> None:
        nonlocal firm
        for effect in effects:
            if isinstance(effect, Hold):
                if any(r.sealed and key_of(r) == effect.key for r in ring.table):
                    ring.held.add(effect.key)
            elif isinstance(effect, Release):
                ring.held.discard(effect.key)
            elif isinstance(effect, Note):
                firm |= effect.kind == "persist_firm"
            else:
                todo.append(effect)

    for now_s, uploads in enumerate(pace):
        perform(core.handle(ring.step(), now_s=now_s))
        for _ in range(uploads):
            if not todo:
                break
            effect = todo.pop(0)
            if isinstance(effect, Store):
                alive = any(r.sealed and key_of(r) == effect.key for r in ring.table)
                if alive:
                    there.add(effect.key)
                event = SnapshotStored(effect.key, 100) if alive else SlotReused(effect.key)
                perform(core.handle(event, now_s=now_s))
            elif isinstance(effect, Commit):
                assert set(effect.keys) <= there
                assert len(effect.keys) >= W
                perform(core.handle(Committed(effect.keys[-1]), now_s=now_s))
    if total >= 2 * W + 2:
        assert not firm
    if not firm:
        assert not ring.missed
    if core.idle:
        assert not ring.held, "a slot is held for nothing"


class Shell:
    """Performs what the core wants as the shells do, with a store that answers when and how the test says."""

    def __init__(self, ring: Ring, every: int) -> None:
        self.core, self.ring = persister(every), ring
        self.asked: list[Store | Commit] = []
        self.there: set[SnapshotKey] = set()  # what who stores knows of
        self.written: set[int] = set()  # ends of manifests of this epoch
        self.epoch, self.start, self.now_s = 0, -1, 0.0

    def feed(self, event: Event) -> None:
        lost: list[SnapshotKey] = []
        for effect in self.core.handle(event, now_s=self.now_s):
            if isinstance(effect, Hold):
                held = self._alive(effect.key)
                (self.ring.held.add if held else lost.append)(effect.key)
            elif isinstance(effect, Release):
                self.ring.held.discard(effect.key)
            elif isinstance(effect, Store | Commit):
                self.asked.append(effect)
        for key in lost:
            self.feed(SlotReused(key))

    def answer(self, how: str) -> None:
        if not self.asked:
            return
        effect = self.asked.pop(0)
        if isinstance(effect, Store):
            if how == "well" and self._alive(effect.key):
                self.there.add(effect.key)
                self.feed(SnapshotStored(effect.key, 1))
            else:
                self.feed(StoreFailed(effect.key, how))
        elif how != "well":
            self.feed(CommitFailed(effect.keys[-1], how))
        elif effect.keys[-1].epoch != self.epoch:
            self.feed(Committed(effect.keys[-1]))  # it was being written when its epoch ended
        elif set(effect.keys) <= self.there:
            self.written.add(effect.end)
            self.feed(Committed(effect.keys[-1]))
        else:
            self.feed(Forgotten())

    def die(self) -> None:
        self.asked.clear()
        self.there.clear()
        self.feed(Forgotten())

    def join(self, back: int) -> None:
        """The last iterations are done anew. What who stores was asked before is answered all the
        same, later.
        """
        self.epoch, self.start = self.epoch + 1, max(-1, self.ring.iteration - back)
        self.there.clear()
        self.written.clear()
        self.ring.epoch, self.ring.start = self.epoch, self.start
        self.ring.iteration = max(self.start, 0)
        self.feed(Joined(self.epoch, self.start))

    def told(self) -> None:
        found = tuple(r for r in self.ring.table if r.sealed)
        self.feed(SlotTables(found, W, self.ring.total))

    def _alive(self, key: SnapshotKey) -> bool:
        return any(r.sealed and key_of(r) == key for r in self.ring.table)


TROUBLE = ("well", "badly", "die", "wait")


@given(
    total=st.integers(4, 10),
    every=st.integers(1, 5),
    training=st.lists(st.sampled_from(("train", "train", "join", "rejoin", *TROUBLE)), max_size=60),
    after=st.lists(st.sampled_from(TROUBLE), max_size=20),
)
def test_whatever_goes_wrong_the_end_of_training_is_persisted_and_nothing_stays_held(
    total: int, every: int, training: list[str], after: list[str]
) -> None:
    shell = Shell(Ring(total), every)
    for what in (*training, *(["train"] * W), "flush", *after):
        shell.now_s += 1.0
        match what:
            case "train":
                shell.feed(shell.ring.step())
            case "join":
                shell.join(0)
            case "rejoin":
                shell.join(3)
            case "die":
                shell.die()
            case "flush":
                shell.told()
                shell.feed(Flush())
            case "wait":
                shell.now_s += 30.0
                shell.told()
            case _:
                shell.answer(what)
    for _ in range(12):  # the store is well again
        shell.now_s += 400.0
        shell.told()
        shell.feed(Tick())
        while shell.asked:
            shell.answer("well")
    newest = newest_by_iteration(shell.ring.table, {shell.epoch: shell.start})
    suffix = spanning_suffix(newest, W, 1)
    assert shell.core.idle
    assert not shell.ring.held
    if suffix is not None and suffix.records[-1].epoch == shell.epoch:
        assert suffix.end in shell.written


def test_every_is_what_the_user_wants_while_the_store_sustains_it() -> None:
    cadence = Cadence(every=10)
    cadence.note_iterations(5, 5.0)
    cadence.note_upload(2.0)
    assert [i for i in range(41) if cadence.due(i)] == [10, 20, 30, 40]


def test_seconds_become_the_next_doubling_of_the_base() -> None:
    cadence = Cadence(every=10, every_s=60.0)
    cadence.note_iterations(100, 100.0)
    assert cadence.stride == 80  # 10, 20 and 40 s would be more often than is wanted


def test_a_slow_store_makes_strides_longer_and_a_fast_one_shorter_again() -> None:
    cadence = Cadence()
    cadence.note_iterations(10, 1.0)
    cadence.note_upload(1.0)
    slow = cadence.stride
    assert slow * 0.1 >= 1.25
    for _ in range(3):
        cadence.note_upload(0.01)
    assert cadence.stride == 1


def test_strides_do_not_go_to_and_fro() -> None:
    cadence = Cadence()
    cadence.note_iterations(1, 1.0)
    strides = []
    for upload_s in (3.1, 3.3, 3.0, 3.25, 3.1, 3.15, 3.05, 3.3):  # around what a stride of 4 allows
        cadence.note_upload(upload_s)
        strides.append(cadence.stride)
    assert len(set(strides[3:])) == 1


def test_nothing_is_due_at_the_beginning() -> None:
    assert not Cadence().due(0)


@given(st.integers(1, 50), st.lists(st.integers(0, 8), min_size=2, max_size=5))
def test_ranks_with_different_strides_meet_at_the_longest(every: int, doublings: list[int]) -> None:
    ranks = []
    for j in doublings:
        cadence = Cadence(every=every)
        cadence.note_iterations(1, 1.0)
        cadence.note_upload(every * 2**j / 1.25)
        ranks.append(cadence)
    longest = max(cadence.stride for cadence in ranks)
    assert all(cadence.due(longest * n) for cadence in ranks for n in (1, 2, 7))


def test_a_fast_rank_follows_the_strides_of_the_others_and_tries_its_own_again() -> None:
    cadence = Cadence(every=10)
    cadence.note_left_alone(10)
    cadence.note_committed(20)
    cadence.note_left_alone(30)
    assert cadence.stride == 10  # once may be chance
    cadence.note_left_alone(50)
    assert cadence.stride == 20
    for n in range(16):
        assert cadence.stride == 20
        cadence.note_committed(20 * n)
    assert cadence.stride == 10


def test_what_longer_strides_would_not_have_avoided_changes_nothing() -> None:
    cadence = Cadence(every=10)
    for _ in range(5):
        cadence.note_left_alone(40)
    assert cadence.stride == 10


@pytest.mark.parametrize(("every", "every_s"), [(0, 0.0), (1, -1.0)])
def test_impossible_wishes_are_refused(every: int, every_s: float) -> None:
    with pytest.raises(ValueError, match="every"):
        Cadence(every, every_s)


class Persistence:
    """One rank with two operators that are anchored in turns, and a checkpoint every four iterations."""

    def __init__(self) -> None:
        self.core = Persister(Cadence(every=4), parallel=1)
        self.now_s = 0.0

    def play(self, words: list[str]) -> list[str]:
        if words[0] == "wait":
            self.now_s += float(words[1])
        effects = self.core.handle(self.event(words), now_s=self.now_s)
        state = self.core.state()
        line = str(self.core.phase)
        if state.under_way >= 0:
            line += f" {state.under_way}, {state.stored} of {state.of}"
        line += f"; durable {state.committed}" if state.committed >= 0 else ""
        return [*map(shown, effects), line]

    def event(self, words: list[str]) -> Event:
        match words:
            case ["wait", _]:
                return Tick()
            case ["join", epoch, start]:
                return Joined(int(epoch), int(start))
            case ["ring", slots, *iterations]:
                return SlotTables(tuple(map(self.record, iterations)), 2, int(slots))
            case ["stored", iteration]:
                return SnapshotStored(self.key(iteration), 100)
            case ["store-failed", iteration]:
                return StoreFailed(self.key(iteration), "said the store")
            case ["reused", iteration]:
                return SlotReused(self.key(iteration))
            case ["committed", iteration]:
                return Committed(self.key(iteration))
            case ["commit-failed", iteration]:
                return CommitFailed(self.key(iteration), "said the store")
            case ["durable", iteration]:
                return Durable(int(iteration))
            case ["fenced"]:
                return Fenced("another job writes there")
            case ["keeper-restarted"]:
                return Forgotten()
            case ["flush"]:
                return Flush()
        raise ValueError(words)

    def record(self, told: str) -> SlotRecord:
        iteration = int(told)
        made = SlotRecord(0, iteration % 8, SlotState.SEALED, iteration, iteration - 1, iteration)
        return replace(made, anchors=1 << iteration % 2, image_len=100)

    def key(self, iteration: str) -> SnapshotKey:
        return key_of(self.record(iteration))


@pytest.mark.parametrize("name", scenarios("persistence"))
def test_transcripts(name: str, transcript: Callable[[str, Driver], None]) -> None:
    transcript(name, Persistence())


def test_an_event_that_is_not_legal_names_machine_state_and_event() -> None:
    """A checkpoint must not be begun beside another one: its slots would be held twice."""
    with pytest.raises(LocalProtocolError, match=r"persistence: event begin .* in state committing"):
        TRANSITIONS.after(PersistPhase.COMMITTING, PersistEvent.BEGIN)
