"""The slot ring: which suffix is found, and which slot is never given away."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.slots.ring import (
    NoSuffix,
    Remedy,
    SlotChoice,
    Suffix,
    choose_slot,
    droppable_generations,
    find_suffix,
    missing_operators,
    most_slots,
    newest_by_iteration,
    slots_for_window,
    truncate,
)
from ckptd.core.slots.slots import (
    TRANSITIONS,
    SlotEvent,
    SlotRecord,
    SlotState,
    check_transition,
    epoch_after,
    epoch_can_follow,
    epoch_table,
    is_stale,
    live,
    other_histories,
    stale_after,
)
from ckptd.errors import LocalProtocolError

FREE, FILLING, FILLED, SEALED, QUARANTINED = SlotState


def snap(
    iteration: int,
    anchors: int,
    *,
    index: int | None = None,
    previous: int | None = None,
    state: SlotState = SEALED,
    sequence: int | None = None,
    generation: int = 0,
    epoch: int = 0,
    epoch_start: int = -1,
) -> SlotRecord:
    """A record; unless said otherwise it continues the chain and its slot is its iteration."""
    return SlotRecord(
        generation=generation,
        index=iteration if index is None else index,
        state=state,
        iteration=iteration,
        previous=iteration - 1 if previous is None else previous,
        sequence=iteration if sequence is None else sequence,
        anchors=anchors,
        epoch=epoch,
        epoch_start=epoch_start,
    )


def free(index: int, generation: int = 0) -> SlotRecord:
    return SlotRecord(generation, index, FREE)


def run(first: int, last: int, window: int, *, generation: int = 0) -> list[SlotRecord]:
    """An unbroken chain in which iteration t anchors operator t % window."""
    chain = [snap(t, 1 << t % window, generation=generation) for t in range(first, last + 1)]
    return [replace(chain[0], previous=-1), *chain[1:]]


def found(records: list[SlotRecord], num_operators: int, end: int | None = None) -> Suffix:
    suffix = find_suffix(records, num_operators, end=end)
    assert isinstance(suffix, Suffix), suffix
    return suffix


@pytest.mark.parametrize(("old", "new"), list(itertools.product(SlotState, SlotState)))
def test_transitions(old: SlotState, new: SlotState) -> None:
    if new in TRANSITIONS.following(old):
        check_transition(old, new)
    else:
        with pytest.raises(LocalProtocolError, match=f"from {old.name.lower()} to"):
            check_transition(old, new)


def test_nothing_but_a_digest_makes_a_slot_visible() -> None:
    """What arrives from elsewhere was compared with its digests; what was quarantined was sealed once."""
    assert {key for key, after in TRANSITIONS.table.items() if after is SEALED} == {
        (FILLED, SlotEvent.SEAL),
        (FILLING, SlotEvent.ARRIVE),
        (QUARANTINED, SlotEvent.TAKE_BACK),
    }
    assert [old for old in SlotState if FILLED in TRANSITIONS.following(old)] == [FILLING]


def test_the_newest_suffix_is_as_short_as_can_be() -> None:
    suffix = found(run(0, 9, 3), 3)
    assert [r.iteration for r in suffix.records] == [7, 8, 9]
    assert (suffix.start, suffix.end) == (7, 9)
    assert "7 to 9" in suffix.reason


def test_an_asked_end_is_taken_exactly() -> None:
    records = run(0, 9, 3)
    assert found(records, 3, end=5).start == 3
    assert isinstance(find_suffix(records, 3, end=1), NoSuffix)
    assert isinstance(find_suffix(records, 3, end=10), NoSuffix)


def test_a_broken_chain_falls_back_to_the_newest_complete_end() -> None:
    records = run(0, 5, 3) + run(7, 8, 3)
    suffix = found(records, 3)
    assert (suffix.start, suffix.end) == (3, 5)
    assert "up to 8" in suffix.reason


def test_a_link_to_a_missing_snapshot_is_a_break() -> None:
    records = [r for r in run(0, 5, 3) if r.iteration != 4]
    assert found(records, 3).end == 3


@pytest.mark.parametrize("state", [FREE, FILLING, FILLED, QUARANTINED])
def test_only_sealed_slots_count(state: SlotState) -> None:
    records = run(0, 5, 3)
    records[5] = replace(records[5], state=state)
    assert found(records, 3).end == 4


def test_of_two_records_of_an_iteration_the_last_filled_counts() -> None:
    records = run(0, 3, 2)
    again = snap(2, 0b11, index=9, sequence=50, previous=-1)
    suffix = found([*records, again], 2, end=3)
    assert suffix.records == (again, records[3])
    assert found([*records, replace(again, sequence=-1)], 2, end=3).records == tuple(records[2:])


def test_links_in_a_circle_end() -> None:
    records = [snap(1, 1, previous=2), snap(2, 2, previous=1), snap(3, 1, previous=3)]
    assert isinstance(find_suffix(records, 3), NoSuffix)


def test_no_suffix_says_why() -> None:
    nothing = find_suffix([free(0)], 3)
    assert nothing == NoSuffix("no sealed snapshot")
    some = find_suffix(run(0, 1, 8), 8)
    assert isinstance(some, NoSuffix)
    assert "lack an anchor of 6 of 8 operators (ids 2, 3, 4, 5, 6, …)" in some.reason


def test_missing_operators_are_those_of_the_newest_chain() -> None:
    assert missing_operators(run(0, 1, 4), 4) == [2, 3]
    assert missing_operators([], 2) == [0, 1]
    assert missing_operators(run(0, 9, 4), 4) == []
    assert missing_operators(run(0, 9, 4), 4, end=2) == [3]
    assert missing_operators([snap(0, 1 << 99_999)], 100_000) == list(range(99_999))


def test_a_model_without_operators_needs_one_snapshot() -> None:
    assert found([snap(3, 0), snap(4, 0)], 0).records == (snap(4, 0),)


def test_free_slots_first_then_quarantined_then_the_oldest_unneeded() -> None:
    records = run(0, 5, 3)
    bad = snap(1, 0, index=8, state=QUARANTINED)
    assert choose_slot([*records, bad, free(7)], 3, generation=0).index == 7
    assert choose_slot([*records, bad], 3, generation=0).index == 8
    choice = choose_slot(records, 3, generation=0)
    assert (choice.index, choice.releases, choice.remedy) == (0, 0, Remedy.NONE)


def test_a_slot_that_is_read_is_passed_over() -> None:
    records = [*run(0, 5, 3), free(6), free(7)]
    busy = {(0, 6), (0, 7), (0, 0)}
    assert choose_slot(records, 3, busy=busy, generation=0).index == 1


def test_the_newest_suffix_is_never_given_away() -> None:
    choice = choose_slot(run(0, 2, 3), 3, generation=0)
    assert choice.index is None
    assert choice.remedy is Remedy.GROW
    assert "a new generation is needed" in choice.reason


def test_slots_of_other_generations_are_not_given_but_count() -> None:
    old = run(0, 2, 3)
    assert choose_slot([*old, free(0, 1)], 3, generation=1).index == 0
    grown = [*old, *(replace(r, generation=1) for r in run(3, 5, 3))]
    grown[3] = replace(grown[3], previous=2)
    assert choose_slot(grown, 3, generation=0).releases == 0
    assert choose_slot(grown, 3, generation=1).index is None
    assert choose_slot(old, 3, generation=1) == SlotChoice(
        None, "generation 1 has no slots", remedy=Remedy.GROW
    )


def test_the_chain_being_built_is_kept_beside_the_old_suffix() -> None:
    """After a skipped snapshot both must be held; the ring says that it is too small."""
    records = [*run(0, 2, 3), *run(4, 5, 3)]
    choice = choose_slot(records, 3, generation=0)
    assert (choice.index, choice.remedy) == (None, Remedy.GROW)
    done = [*records, snap(6, 1)]
    assert choose_slot(done, 3, generation=0).releases == 0


def test_a_chain_that_broke_before_it_was_complete_is_given_away() -> None:
    records = [*run(0, 2, 3), *run(4, 5, 3), *run(7, 7, 3)]
    assert choose_slot(records, 3, generation=0).releases == 4


def test_a_chain_whose_end_is_still_digested_is_not_given_away() -> None:
    """Found while writing: the next window had begun before the last digest of this one."""
    window = run(4, 6, 3)
    window[2] = replace(window[2], state=FILLED)
    records = [*run(0, 2, 3), *window, snap(7, 1, previous=-1, state=FILLED)]
    choice = choose_slot(records, 3, generation=0)
    assert choice.index is None
    assert choice.remedy is Remedy.WAIT


def test_waiting_helps_when_a_digest_or_a_reader_is_all_that_is_in_the_way() -> None:
    records = run(0, 3, 3)
    records[3] = replace(records[3], state=FILLED)
    choice = choose_slot(records, 3, generation=0)
    assert (choice.index, choice.remedy) == (None, Remedy.WAIT)
    assert "3 sealed, 1 filled, 0 filling" in choice.reason
    read = choose_slot(run(0, 3, 3), 3, busy={(0, 0)}, generation=0)
    assert (read.index, read.remedy) == (None, Remedy.WAIT)


def test_window_one_with_three_slots_is_a_triple_buffer() -> None:
    promised, digesting = snap(4, 1), snap(5, 1, state=FILLED)
    choice = choose_slot([promised, digesting, snap(3, 1)], 1, generation=0)
    assert choice.releases == 3


@pytest.mark.parametrize("window", range(1, 9))
@pytest.mark.parametrize("lag", [0, 1])
def test_an_unbroken_chain_never_runs_out_of_slots(window: int, lag: int) -> None:
    """W + 2 slots: the suffix, one filling, one digested (``lag`` snapshots behind)."""
    slots = {i: free(i) for i in range(slots_for_window(window))}
    promised: Suffix | NoSuffix = NoSuffix("")
    for t in range(5 * window):
        choice = choose_slot(slots.values(), window, generation=0)
        assert choice.index is not None, choice.reason
        slots[choice.index] = snap(t, 1 << t % window, index=choice.index, state=FILLING)
        during = find_suffix(slots.values(), window)
        if isinstance(promised, Suffix):
            assert during == promised
        slots[choice.index] = replace(slots[choice.index], state=FILLED)
        for index, record in slots.items():
            if record.state is FILLED and record.iteration <= t - lag:
                slots[index] = replace(record, state=SEALED)
        promised = find_suffix(slots.values(), window)
        if t - lag >= window - 1:
            assert isinstance(promised, Suffix)
            assert promised.end == t - lag


def test_truncate_frees_what_came_after_whatever_its_state() -> None:
    records = [
        *run(0, 5, 3),
        snap(6, 0, state=FILLED),
        snap(7, 0, state=FILLING),
        snap(8, 0, state=QUARANTINED),
        free(9),
    ]
    assert [r.iteration for r in truncate(records, 4)] == [5, 6, 7]
    for record in truncate(records, 4):
        check_transition(record.state, FREE)


def test_a_generation_is_dropped_once_a_newer_one_holds_a_suffix() -> None:
    old = run(0, 2, 3)
    for last in range(3, 6):
        grown = [*old, *run(3, last, 3, generation=1), free(9, 1)]
        grown[3] = replace(grown[3], previous=2)
        expected = {0} if last == 5 else set()
        assert droppable_generations(grown, 3, 1) == expected


def test_nothing_that_holds_a_snapshot_is_dropped_while_there_is_no_suffix() -> None:
    records = [snap(0, 1), free(0, 1), free(0, 2), snap(9, 0, state=FILLED, generation=3)]
    assert droppable_generations(records, 3, 2) == {1}
    assert droppable_generations([free(0, 1), free(0, 2)], 3, 2) == {1}


def test_a_generation_with_a_chain_being_built_stays() -> None:
    records = [*run(0, 2, 3), *run(5, 6, 3, generation=1), free(0, 2)]
    assert droppable_generations(records, 3, 2) == set()


# -- histories -----------------------------------------------------------------------------------


def test_a_ring_grows_as_the_longest_window_needs_and_for_what_the_run_went_back_to() -> None:
    """The rank's own window counted: one with a short window had no room for a target that was
    begun anew (simulation, seed 101703).
    """
    assert most_slots(4, 1, 2, returned=False) == 12
    assert most_slots(1, 4, 2, returned=False) == 12
    assert most_slots(1, 4, 2, returned=True) == 16


def test_what_a_later_epoch_left_behind_is_stale() -> None:
    old, new = run(0, 5, 1), [snap(4, 1, index=9, epoch=2, epoch_start=3)]
    table = epoch_table([*old, *new])
    assert table == {0: -1, 2: 3}
    assert [r.iteration for r in old if is_stale(r, table)] == [4, 5]
    assert not is_stale(new[0], table)
    assert live([*old, *new]) == [*old[:4], *new]
    assert live(old, {1: 2}) == old[:3]
    assert live(old, {0: 2}) == old, "an epoch does not outdate itself"


def test_the_earliest_of_the_later_epochs_counts() -> None:
    """Epoch 2 went on from 7, but epoch 1 had left the first history at 3 already."""
    epochs = {0: -1, 1: 3, 2: 7}
    assert stale_after(epochs) == {0: 3, 1: 7}
    assert is_stale(snap(5, 1), epochs)
    assert not is_stale(snap(5, 1, epoch=1, epoch_start=3), epochs)
    assert stale_after({}) == stale_after({4: 1}) == {}


@given(st.dictionaries(st.integers(0, 5), st.integers(-1, 9)), st.integers(0, 5), st.integers(0, 9))
def test_both_forms_of_staleness_agree(epochs: dict[int, int], epoch: int, iteration: int) -> None:
    epochs.setdefault(epoch, 0)
    record = snap(iteration, 1, epoch=epoch, epoch_start=epochs[epoch])
    assert is_stale(record, epochs) is (record not in live([record], epochs))


@pytest.mark.parametrize("state", SlotState)
def test_any_header_of_a_later_epoch_is_evidence(state: SlotState) -> None:
    begun = snap(4, 0, index=9, state=state, epoch=1, epoch_start=3)
    assert found([*run(0, 5, 2), begun], 2).end == (4 if state is SEALED else 3)


def test_a_suffix_never_rests_on_an_abandoned_history() -> None:
    """Snapshots 4 and 5 of the old history are still there; the new one has come to 4."""
    records = [*run(0, 5, 2), snap(4, 1, index=9, epoch=1, epoch_start=3)]
    assert [r.key for r in found(records, 2).records] == [(0, 3), (0, 9)]
    assert newest_by_iteration(records)[4].epoch == 1
    assert 5 not in newest_by_iteration(records)
    known = find_suffix(run(0, 5, 2), 2, epochs={1: 3})
    assert isinstance(known, Suffix)
    assert known.end == 3


def test_a_later_epoch_counts_whatever_its_sequence() -> None:
    """A node that lost its memory begins to count its fills at 1 again."""
    again = snap(3, 0b11, index=9, sequence=0, epoch=1, epoch_start=3)
    assert newest_by_iteration([*run(0, 3, 2), again])[3] == again


def test_stale_slots_are_given_away_first() -> None:
    records = [*run(0, 5, 2), snap(4, 1, index=8, epoch=1, epoch_start=3), free(9)]
    choice = choose_slot(records, 2, generation=0)
    assert (choice.index, choice.releases) == (4, 4)
    assert "abandoned history" in choice.reason
    choice = choose_slot(records, 2, busy={(0, 4), (0, 5)}, generation=0)
    assert choice.index == 9
    known = choose_slot([*run(0, 5, 2), free(9)], 2, generation=0, epochs={1: 4})
    assert (known.index, known.releases) == (5, 5)


def test_of_stale_slots_the_witnesses_go_last() -> None:
    """Epoch 1 is what shows that 4 of epoch 0 is stale: epoch 2 went on from 5 only."""
    records = [
        snap(4, 1, index=0),
        snap(6, 1, index=1, epoch=1, epoch_start=3),
        snap(7, 1, index=2, epoch=1, epoch_start=3),
        snap(6, 1, index=3, epoch=2, epoch_start=5),
    ]
    for expected in (0, 1, 2):
        choice = choose_slot(records, 1, generation=0)
        assert choice.index == expected
        records[expected] = snap(7 + expected, 1, index=expected, epoch=2, epoch_start=5)


def test_a_stale_slot_that_is_digested_or_read_is_worth_waiting_for() -> None:
    kept = run(0, 1, 2)
    for abandoned, busy in (
        (snap(2, 1, state=FILLED), set()),
        (snap(2, 1), {(0, 2)}),
    ):
        choice = choose_slot([*kept, abandoned], 2, busy=busy, generation=0, epochs={1: 1})
        assert (choice.index, choice.remedy) == (None, Remedy.WAIT)


def test_a_generation_of_stale_snapshots_is_dropped() -> None:
    old = run(3, 4, 2)
    new = [replace(r, epoch=1, epoch_start=2) for r in run(3, 3, 2, generation=1)]
    assert droppable_generations(old, 2, 1) == set()
    assert droppable_generations([*old, *new], 2, 1) == {0}
    assert droppable_generations(old, 2, 1, epochs={1: 2}) == {0}


# -- the floor -----------------------------------------------------------------------------------


def test_slack_is_what_the_floor_may_be_behind() -> None:
    assert slots_for_window(4) == 6
    assert slots_for_window(4, slack=2) == 8


def keys(*indices: int, generation: int = 0) -> set[tuple[int, int]]:
    return {(generation, index) for index in indices}


def test_what_is_protected_is_never_given_away() -> None:
    records = run(0, 5, 2)
    assert choose_slot(records, 2, generation=0, protected=keys(2, 3)).releases == 0
    full = choose_slot(records[2:], 2, generation=0, protected=keys(2, 3))
    assert (full.index, full.remedy) == (None, Remedy.WAIT)
    assert "the floor has not moved" in full.reason
    assert choose_slot(records[2:], 2, generation=0, protected=keys(3)).releases == 2


def test_how_many_slots_are_left_tells_when_it_is_time_to_grow() -> None:
    records = [*run(0, 4, 2), free(5), free(6)]
    assert choose_slot(records, 2, generation=0).left == 4  # 0 to 2 could go
    assert choose_slot(records, 2, generation=0, protected=keys(0, 1, 2)).left == 1
    last = choose_slot(records[:-1], 2, generation=0, protected=keys(0, 1, 2))
    assert (last.index, last.left) == (5, 0)


def test_without_a_floor_nothing_is_protected() -> None:
    assert choose_slot(run(0, 5, 2), 2, generation=0).releases == 0


def test_an_abandoned_history_goes_first() -> None:
    records = [*run(0, 5, 2), snap(4, 1, index=8, epoch=1, epoch_start=3)]
    assert choose_slot(records, 2, generation=0, protected=keys(0, 1, 2, 3)).releases == 4


def test_a_moving_floor_is_no_remedy_for_a_ring_that_is_too_small() -> None:
    """What is promised to the suffix alone fills it: only a new generation helps."""
    choice = choose_slot(run(0, 2, 3), 3, generation=0, protected=keys(0, 1, 2))
    assert (choice.index, choice.remedy) == (None, Remedy.GROW)


def test_a_generation_that_the_floor_needs_stays() -> None:
    records = [*run(0, 3, 2), *run(4, 7, 2, generation=1)]
    assert droppable_generations(records, 2, 1) == {0}
    assert droppable_generations(records, 2, 1, protected=keys(3)) == set()
    assert droppable_generations(records, 2, 1, protected=keys(4, generation=1)) == {0}


@pytest.mark.parametrize("window", range(1, 6))
@pytest.mark.parametrize("slack", range(4))
def test_a_replica_ring_takes_in_its_slack_before_the_floor_must_move(window: int, slack: int) -> None:
    """From a suffix that ends at the floor on: the slack and one more, then it waits; then one at a time."""
    slots = {i: free(i) for i in range(slots_for_window(window, slack))}
    floor, taken = window - 1, 0
    for t in range(6 * window):
        protect_from = floor - window + 1 if t > floor else 99
        while True:
            needed = {r.key for r in slots.values() if r.sealed and r.iteration >= protect_from}
            choice = choose_slot(slots.values(), window, generation=0, protected=needed)
            if choice.index is not None:
                break
            assert choice.remedy is Remedy.WAIT, choice.reason
            assert t - floor > slack + 1
            floor, protect_from = floor + 1, protect_from + 1
        slots[choice.index] = snap(t, 1 << t % window, index=choice.index)
        taken = max(taken, t - floor)
        held = {r.iteration for r in slots.values() if r.sealed}
        assert held >= set(range(protect_from, t + 1))
    assert taken == slack + 2


NUM_OPERATORS = 3

RECORDS = st.lists(
    st.builds(
        SlotRecord,
        generation=st.integers(0, 1),
        index=st.just(0),
        state=st.sampled_from([*SlotState, SEALED, SEALED, SEALED]),
        iteration=st.integers(0, 7),
        previous=st.integers(-1, 7),
        sequence=st.integers(0, 3),
        anchors=st.integers(0, 2**NUM_OPERATORS - 1),
        epoch=st.sampled_from([0, 0, 0, 1, 2]),
    ),
    max_size=9,
)
RECORDS = st.builds(
    lambda records, starts: [
        replace(r, index=i, sequence=i, epoch_start=(-1, *starts)[r.epoch]) for i, r in enumerate(records)
    ],
    RECORDS,
    st.tuples(st.integers(-1, 7), st.integers(-1, 7)),
)


def brute_suffixes(records: list[SlotRecord]) -> list[tuple[SlotRecord, ...]]:
    """Every complete run of linked records, by definition, without walking."""
    last: dict[int, SlotRecord] = {}
    for record in records:
        stale = any(r.epoch > record.epoch and r.epoch_start < record.iteration for r in records)
        known = last.get(record.iteration, record)
        newer = (record.epoch, record.sequence) >= (known.epoch, known.sequence)
        if record.sealed and newer and not stale:
            last[record.iteration] = record
    runs = []
    for size in range(1, len(last) + 1):
        for chosen in itertools.combinations(sorted(last.values(), key=lambda r: r.iteration), size):
            linked = all(b.previous == a.iteration for a, b in itertools.pairwise(chosen))
            covered = {op for r in chosen for op in range(NUM_OPERATORS) if r.anchors >> op & 1}
            if linked and len(covered) == NUM_OPERATORS:
                runs.append(chosen)
    return runs


@settings(max_examples=300, deadline=None)
@given(RECORDS)
def test_find_suffix_against_the_definition(records: list[SlotRecord]) -> None:
    runs = brute_suffixes(records)
    suffix = find_suffix(records, NUM_OPERATORS)
    if not runs:
        assert isinstance(suffix, NoSuffix)
        return
    best = max(runs, key=lambda chosen: (chosen[-1].iteration, -len(chosen)))
    assert isinstance(suffix, Suffix)
    assert suffix.records == best


def kept_whole(before: Suffix, after: Suffix | NoSuffix, left: list[SlotRecord]) -> None:
    """The suffix is still there, and the newest, unless a later one came to light.

    That happens where an iteration was recorded again in another generation, and the record that
    counted for it, on no complete chain, is what was given away.
    """
    assert set(before.records) <= set(left)
    assert isinstance(after, Suffix)
    assert after.records == before.records or after.end > before.end


@settings(max_examples=500, deadline=None)
@given(
    RECORDS,
    st.sets(st.integers(0, 8)),
    st.integers(0, 1),
    st.sets(st.tuples(st.integers(0, 1), st.integers(0, 8))),
)
def test_choose_slot_on_any_table(
    records: list[SlotRecord],
    read: set[int],
    gen: int,
    protected: set[tuple[int, int]],
) -> None:
    """Whatever the table: what is given was free to give, and no promise is hurt by it."""
    busy = {(gen, index) for index in read}
    choice = choose_slot(records, NUM_OPERATORS, busy=busy, generation=gen, protected=protected)
    assert choice.reason
    if choice.index is None:
        assert choice.remedy is not Remedy.NONE
        return
    given_away = records[choice.index]
    assert given_away.generation == gen
    assert given_away.key not in busy
    check_transition(given_away.state, FILLING)
    assert (choice.releases is None) is not given_away.sealed
    # An abandoned snapshot is of no use to the others either.
    useful = given_away.sealed and given_away in live(records)
    assert not (useful and given_away.key in protected)
    before = find_suffix(records, NUM_OPERATORS)
    left = [r for r in records if r is not given_away]
    # Its header may have been the last witness of its epoch; whoever fills the slot knows that epoch.
    if isinstance(before, Suffix) and epoch_table(left) == epoch_table(records):
        kept_whole(before, find_suffix(left, NUM_OPERATORS), left)


@settings(max_examples=200, deadline=None)
@given(RECORDS, st.integers(0, 2))
def test_dropping_generations_hurts_no_promise(records: list[SlotRecord], current: int) -> None:
    dropped = droppable_generations(records, NUM_OPERATORS, current)
    assert current not in dropped
    left = [r for r in records if r.generation not in dropped]
    epochs = epoch_table(records)
    before, after = (find_suffix(r, NUM_OPERATORS, epochs=epochs) for r in (records, left))
    if isinstance(before, Suffix):
        kept_whole(before, after, left)
    else:
        alive = {r.key for r in live(records) if r.sealed}
        assert alive <= {r.key for r in left}


# -- numbers of epochs ---------------------------------------------------------------------------


def test_an_epoch_is_above_every_known_one_whatever_was_drawn() -> None:
    first = epoch_after(-1, 4095)
    assert epoch_after(first, 0) > first
    assert epoch_after(epoch_after(first, 9), 0) > epoch_after(first, 4095)
    assert epoch_after(1_790_000_000, 0) > 1_790_000_000, "those of a run that counted by time"
    with pytest.raises(ValueError, match="no epoch follows"):
        epoch_after((1 << 32) - 1, 0)


def test_one_message_does_not_use_epochs_up() -> None:
    """Near 2^32 from a peer it would leave a run without a next one, and make all that is held stale."""
    assert not epoch_can_follow((1 << 32) - 1, -1)
    assert not epoch_can_follow((1 << 32) - 1, 5 << 12)
    assert epoch_can_follow(epoch_after(5 << 12, 3), 5 << 12)
    assert epoch_can_follow(1, 5 << 12), "an older one is no news"
    newest = -1
    for _ in range(3):
        newest = max(e for e in (1 << 32, 3 << 30, 1 << 30, 1 << 23, 1) if epoch_can_follow(e, newest))
    assert epoch_after(newest, 0) < 1 << 32


def numbered(*told: str) -> list[int]:
    """Epochs by name: "2b" is the second that follows a past of two."""
    return [(int(name[0]) << 12) + ord(name[1]) for name in told]


@pytest.mark.parametrize(
    ("epochs", "follows", "empty", "others"),
    [
        ("", {}, "", ""),
        ("0a 1a 2a", {}, "", ""),
        ("1a 2a 2b", {"2a": "1a", "2b": "1a"}, "", "2a"),  # of equally long ones the lot decides
        ("1a 2a 2b 3a", {"2a": "1a", "2b": "1a", "3a": "2a"}, "", "2b"),  # but a longer one counts
        (
            "1a 2a 2b 3a 3b",
            {"2a": "1a", "2b": "1a", "3a": "2b", "3b": "2a"},
            "",
            "2b 3a",
        ),
        # What lies between is known by its number alone; 2a is not of it.
        ("1a 2a 4a", {"2a": "1a", "4a": "3a", "3a": "2b"}, "", "2a"),
        ("1a 2a 3a", {"3a": "1a", "2a": "1a"}, "", "2a"),
        # Nothing is held of the last epoch of the one that counts: it says what is stale all the same.
        ("1a 2a", {"2a": "1a"}, "2a", ""),
        ("1a 2a 2b", {"2a": "1a", "2b": "1a"}, "2b", "2b"),
        # Somebody who is away may hold what the longer one has.
        ("0a 1a 2a", {"2a": "1b", "1b": "0a", "1a": "0a"}, "2a", "1a"),
    ],
)
def test_what_the_newest_epoch_does_not_go_back_to_is_another_history(
    epochs: str, follows: dict[str, str], empty: str, others: str
) -> None:
    before = {numbered(epoch)[0]: numbered(past)[0] for epoch, past in follows.items()}
    found = other_histories(numbered(*epochs.split()), before, empty=numbered(*empty.split()))
    assert sorted(found) == numbered(*others.split())


def test_where_nobody_is_missing_a_history_of_which_nothing_is_left_does_not_count() -> None:
    """A node that was cut off knows of a longer history than that of the running job (simulation, seed 3212)."""
    common, live, before, longer = numbered("0a", "1a", "1b", "2a")
    follows = {longer: before, before: common, live: common}
    epochs = [common, live, longer]
    assert other_histories(epochs, follows, empty=[longer], complete=True) == {longer}
    assert other_histories(epochs, follows, complete=True) == {live}
    assert other_histories([common, longer], follows, empty=[longer], complete=True) == set()
