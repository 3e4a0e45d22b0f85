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


def test_an_epoch_that_has_just_begun_counts_if_what_it_began_at_is_there() -> None:
    """A job had begun anew on nodes that knew of no other, and a node came back with iteration 12. The job went
    back to it, and freed what was newer; until its first snapshot the history that had begun anew was the one
    with records, and what it went back to did not count (simulation, split seed 35006).
    """
    base, mine, anew, next_one = 1 << 12, (2 << 12) + 7, (2 << 12) + 2, (3 << 12) + 1
    back, others = held_by("a", (11, base), (12, base)), held_by("b", (0, anew))
    epochs = [(base, -1, -1), (mine, 12, base), (anew, -1, base), (next_one, 12, mine)]
    for told in (epochs[:3], epochs):
        assert history_of([back, others], told, complete=True).others == {anew}
    lost = held_by("a", (11, base))
    assert history_of([lost, others], epochs, complete=True).others == {mine, next_one}, "nothing is left"


def test_where_there_is_one_history_nothing_is_left_out() -> None:
    base = 1 << 12
    here = held_by("a", (3, base))
    history = history_of([here], [(base, -1, -1)])
    assert history.held([here]) == (here,)
    assert history_of([], []).held([]) == ()
