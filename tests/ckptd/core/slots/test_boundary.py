"""Names of records, and which slot of a boundary log is given away: never one that a recovery may need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.slots.boundary import (
    RecordKey,
    SentKind,
    choose_log_slot,
    logged_iterations,
    needed_from,
    outdated,
    padding_name,
    parse_record_name,
    record_name,
    slots_for_log,
)
from ckptd.core.slots.slots import SlotRecord, SlotState, is_stale

COUNTS = st.integers(0, 10**9 - 1)


@given(st.sampled_from(SentKind), COUNTS, COUNTS, COUNTS, COUNTS)
def test_names_round_trip(kind: SentKind, stage: int, micro_batch: int, index: int, nth: int) -> None:
    key = RecordKey(kind, stage, micro_batch, index, nth)
    assert parse_record_name(record_name(key)) == key


def test_names_are_the_specified_ones() -> None:
    assert record_name(RecordKey(SentKind.GRADIENT, 3, 1, 2)) == "gradient/3/1/2/0"
    assert padding_name(7) == "padding/7"
    assert parse_record_name("padding/7") is None


@pytest.mark.parametrize(
    "name", ["", "activation/1/2/3", "weight/0/0/0/0", "activation/-1/0/0/0", "gradient/0/0/0/0/"]
)
def test_foreign_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no record of a boundary log"):
        parse_record_name(name)


def record(
    index: int,
    iteration: int,
    state: SlotState = SlotState.SEALED,
    *,
    generation: int = 0,
    epoch: int = 0,
    start: int = -1,
    sequence: int | None = None,
    anchors: int = 0,
    previous: int = -1,
) -> SlotRecord:
    return SlotRecord(
        generation,
        index,
        state,
        iteration=iteration,
        previous=previous,
        sequence=iteration + 1 if sequence is None else sequence,
        epoch=epoch,
        epoch_start=start,
        anchors=anchors,
    )


def free(index: int) -> SlotRecord:
    return SlotRecord(0, index, SlotState.FREE)


# -- what counts -----------------------------------------------------------------------------------


def test_a_recovery_outdates_what_was_sent_from_its_iteration_on() -> None:
    """The snapshot of that iteration, which is the state before it, is not outdated by the same recovery."""
    epochs = {0: -1, 9: 5}
    assert [outdated(record(0, i), epochs) for i in (4, 5, 6)] == [False, True, True]
    assert [is_stale(record(0, i), epochs) for i in (4, 5, 6)] == [False, False, True]
    assert not outdated(record(0, 6, epoch=9), epochs)


def test_the_newest_complete_log_of_an_iteration_counts() -> None:
    records = [
        record(0, 4, sequence=1),
        record(1, 4, sequence=2),
        record(2, 5, SlotState.FILLED),
        record(3, 6, SlotState.FILLING),
        record(4, 7, SlotState.QUARANTINED),
        record(5, 3, epoch=8, start=3, sequence=9),  # outdates 4 and 5 of epoch 0
    ]
    assert logged_iterations(records) == {3: records[5]}
    assert logged_iterations(records[:5]) == {4: records[1], 5: records[2]}
    assert logged_iterations(records[:5], {7: 5}) == {4: records[1]}


# -- what is needed --------------------------------------------------------------------------------


def chain(first: int, last: int, window: int) -> list[SlotRecord]:
    """Snapshots of a sliding window."""
    return [
        record(i % 8, i, anchors=1 << i % window, previous=i - 1, generation=5)
        for i in range(first, last + 1)
    ]


def test_needed_is_the_older_of_the_own_suffix_and_the_promised_one() -> None:
    snapshots = chain(3, 9, 3)
    assert needed_from(snapshots, 3) == 7
    assert needed_from(snapshots, 3, promised={(5, 5), (5, 6)}) == 5
    assert needed_from(chain(3, 4, 3), 3) is None


# -- choosing --------------------------------------------------------------------------------------


def test_the_order_in_which_slots_are_given() -> None:
    empty, old, spare, held = (
        free(0),
        record(1, 8, epoch=0),
        record(2, 3),
        record(3, 6, epoch=4, start=7, sequence=20),
    )
    epochs = {4: 7}
    records = [held, spare, old, empty]
    given_ = []
    while (choice := choose_log_slot(records, 0, needed_from=5, epochs=epochs)).record is not None:
        given_.append((choice.record.index, choice.releases))
        records.remove(choice.record)
    assert given_ == [(0, None), (1, None), (2, 3)]
    assert choice.reason == "every slot is needed from iteration 5 on, or being read"


def test_a_slot_that_is_read_or_filled_is_passed_over_and_other_generations_are_not_filled() -> None:
    records = [
        record(0, 1),
        record(1, 2, SlotState.FILLING),
        record(2, 3),
        record(0, 0, generation=1),
    ]
    choice = choose_log_slot(records, 0, needed_from=9, busy={(0, 0)})
    assert choice.record == records[2]
    assert choose_log_slot(records, 0, needed_from=9, busy={(0, 0), (0, 2)}).record is None


def test_what_is_filled_and_not_sealed_yet_is_given_only_if_nobody_needs_it() -> None:
    records = [record(0, 4, SlotState.FILLED), record(1, 5)]
    assert choose_log_slot(records, 0, needed_from=4).record is None
    assert choose_log_slot(records, 0, needed_from=5).record == records[0]


def test_while_nothing_can_be_recovered_the_oldest_goes() -> None:
    records = [record(0, 5), record(1, 4)]
    assert choose_log_slot(records, 0, needed_from=None).record == records[1]


def skipped(window: int, num_slots: int, behind: int) -> list[int]:
    """The iterations that find no slot in an unbroken run whose newest snapshots are not sealed yet."""
    log = [free(i) for i in range(num_slots)]
    without = []
    for now in range(8 * window + 20):
        sealed = chain(max(0, now - behind - 4 * window), now - behind, window)
        needed = needed_from(sealed, window)
        held = [r for r in log if r.sealed]
        reading = min(held, key=lambda r: r.iteration).key if len(held) == num_slots else (0, -1)
        choice = choose_log_slot(log, 0, needed_from=needed, busy={reading})
        if choice.record is None:
            without.append(now)
            continue
        log[choice.record.index] = record(choice.record.index, now)
        if needed is not None:
            assert set(range(needed, now + 1)) <= set(logged_iterations(log)) | set(without)
    return without


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("slack", [0, 2])
def test_as_many_slots_as_are_asked_for_are_enough_and_one_less_is_not(window: int, slack: int) -> None:
    """The snapshot of the iteration that runs is not sealed, ranks are behind by the slack, and the
    oldest slot is being read.
    """
    enough = slots_for_log(window, 1, slack)
    assert enough == window + 3 + slack
    assert skipped(window, enough, 2 + slack) == []
    assert skipped(window, enough - 1, 2 + slack) != []
