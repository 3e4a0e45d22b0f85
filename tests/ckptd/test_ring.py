"""The slot ring: which suffix is found, and which slot is never given away."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import LocalProtocolError
from ckptd.ring import (
    TRANSITIONS,
    NoSuffix,
    Remedy,
    SlotChoice,
    SlotRecord,
    SlotState,
    Suffix,
    check_transition,
    choose_slot,
    droppable_generations,
    find_suffix,
    missing_operators,
    slots_for_window,
    truncate,
)

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
    if new in TRANSITIONS[old]:
        check_transition(old, new)
    else:
        with pytest.raises(LocalProtocolError, match=f"from {old.name.lower()} to"):
            check_transition(old, new)


def test_nothing_but_a_digest_makes_a_slot_visible() -> None:
    assert [old for old in SlotState if SEALED in TRANSITIONS[old]] == [FILLED]
    assert [old for old in SlotState if FILLED in TRANSITIONS[old]] == [FILLING]


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
    ),
    max_size=9,
).map(lambda records: [replace(r, index=i, sequence=i) for i, r in enumerate(records)])


def brute_suffixes(records: list[SlotRecord]) -> list[tuple[SlotRecord, ...]]:
    """Every complete run of linked records, by definition, without walking."""
    last: dict[int, SlotRecord] = {}
    for record in records:
        if record.sealed and record.sequence >= last.get(record.iteration, record).sequence:
            last[record.iteration] = record
    runs = []
    for size in range(1, len(last) + 1):
        for chosen in itertools.combinations(
            sorted(last.values(), key=lambda r: r.iteration), size
        ):
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


@settings(max_examples=300, deadline=None)
@given(RECORDS, st.sets(st.integers(0, 8)), st.integers(0, 1))
def test_choose_slot_on_any_table(records: list[SlotRecord], read: set[int], gen: int) -> None:
    """Whatever the table: what is given was free to give, and no promise is hurt by it."""
    busy = {(gen, index) for index in read}
    choice = choose_slot(records, NUM_OPERATORS, busy=busy, generation=gen)
    assert choice.reason
    if choice.index is None:
        assert choice.remedy is not Remedy.NONE
        return
    given_away = records[choice.index]
    assert given_away.generation == gen
    assert given_away.key not in busy
    check_transition(given_away.state, FILLING)
    assert (choice.releases is None) is not given_away.sealed
    before = find_suffix(records, NUM_OPERATORS)
    left = [r for r in records if r is not given_away]
    if isinstance(before, Suffix):
        after = find_suffix(left, NUM_OPERATORS)
        assert isinstance(after, Suffix)
        assert after.records == before.records


@settings(max_examples=200, deadline=None)
@given(RECORDS, st.integers(0, 2))
def test_dropping_generations_hurts_no_promise(records: list[SlotRecord], current: int) -> None:
    dropped = droppable_generations(records, NUM_OPERATORS, current)
    assert current not in dropped
    left = [r for r in records if r.generation not in dropped]
    before, after = (find_suffix(r, NUM_OPERATORS) for r in (records, left))
    if isinstance(before, Suffix):
        assert isinstance(after, Suffix)
        assert after.records == before.records
    else:
        assert {r.key for r in records if r.sealed} == {r.key for r in left if r.sealed}
