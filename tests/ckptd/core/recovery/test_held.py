"""Which history of a run counts, and what is held of it."""

from __future__ import annotations

from ckptd.core.recovery.held import HeldRecords, history_of
from ckptd.core.slots.slots import SlotRecord, SlotState


def held_by(node: str, *snapshots: tuple[int, int]) -> HeldRecords:
    """Of rank 0, by iteration and epoch."""
    records = tuple(
        SlotRecord(0, index, SlotState.SEALED, iteration=iteration, epoch=epoch)
        for index, (iteration, epoch) in enumerate(snapshots)
    )
    return HeldRecords(node, f"{node}.seg", True, 0, 1, "ops", 128, records)


def test_what_is_held_of_another_history_is_left_out() -> None:
    """Two halves of a job went on from iteration 3 by themselves. `ckptctl whatif`, `drill` and
    `saved_iterations` took the snapshots of both for one history, and could tell of iterations that
    no start would go back to.
    """
    base, lower, higher = 1 << 12, (2 << 12) + 1, (2 << 12) + 2
    here = held_by("a", (3, base), (4, lower), (5, lower))
    there = held_by("b", (3, base), (4, higher))
    epochs = [(base, -1, -1), (lower, 3, base), (higher, 3, base)]
    history = history_of([here, there], epochs)
    assert history.others == {lower}
    assert history.begun == {base: -1, higher: 3}
    left = history.held([here, there])
    assert [[(r.iteration, r.epoch) for r in h.records] for h in left] == [
        [(3, base)],
        [(3, base), (4, higher)],
    ]


def test_where_there_is_one_history_nothing_is_left_out() -> None:
    base = 1 << 12
    here = held_by("a", (3, base))
    history = history_of([here], [(base, -1, -1)])
    assert history.held([here]) == (here,)
    assert history_of([], []).held([]) == ()
