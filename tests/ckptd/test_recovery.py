"""The recovery plan: against brute force over every small case, and on the wire."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import RemoteProtocolError
from ckptd.recovery import (
    NoRecovery,
    RankInventory,
    RecoveryPlan,
    from_wire,
    plan_recovery,
    to_wire,
)
from ckptd.ring import SlotRecord, SlotState, choose_slot, slots_for_window


def snap(
    iteration: int,
    anchors: int,
    *,
    previous: int | None = None,
    state: SlotState = SlotState.SEALED,
) -> SlotRecord:
    return SlotRecord(
        generation=0,
        index=iteration,
        state=state,
        iteration=iteration,
        previous=iteration - 1 if previous is None else previous,
        sequence=iteration,
        anchors=anchors,
    )


def rank(window: int, first: int, last: int, *, missing: int = -1) -> RankInventory:
    """A rank that anchors operator t % window at iteration t."""
    records = [snap(t, 1 << t % window) for t in range(first, last + 1) if t != missing]
    return RankInventory(window, tuple(records))


def planned(inventories: Mapping[int, RankInventory]) -> RecoveryPlan:
    plan = plan_recovery(inventories, len(inventories))
    assert isinstance(plan, RecoveryPlan), plan
    return plan


def refused(inventories: Mapping[int, RankInventory], world_size: int) -> str:
    plan = plan_recovery(inventories, world_size)
    assert isinstance(plan, NoRecovery), plan
    return plan.reason


def test_one_rank_resumes_from_its_newest_suffix() -> None:
    plan = planned({0: rank(3, 0, 9)})
    assert (plan.start, plan.end, plan.replayed) == (7, 9, 2)
    assert [r.iteration for r in plan.per_rank[0]] == [7, 8, 9]
    assert plan.reason == "every rank can start at iteration 7 and is exact at 9"


def test_the_rank_that_is_behind_decides_the_end() -> None:
    plan = planned({0: rank(3, 0, 9), 1: rank(3, 0, 8)})
    assert (plan.start, plan.end) == (6, 8)
    assert "up to 9 are not complete on every rank" in plan.reason


def test_the_rank_with_the_longest_window_decides_the_start() -> None:
    plan = planned({0: rank(1, 2, 9), 1: rank(4, 2, 9)})
    assert (plan.start, plan.end) == (6, 9)
    assert [r.iteration for r in plan.per_rank[0]] == [6, 7, 8, 9]


def test_a_short_rank_must_still_hold_the_common_start() -> None:
    """Rank 0 alone could resume at 9, but rank 1 starts at 6, which rank 0 has no more."""
    assert "common start" in refused({0: rank(1, 8, 9), 1: rank(4, 2, 9)}, 2)
    plan = planned({0: rank(1, 5, 9, missing=7), 1: rank(2, 2, 9)})
    assert (plan.start, plan.end) == (8, 9)


def test_dense_ranks_resume_where_all_have_a_snapshot() -> None:
    ranks = {r: RankInventory(1, tuple(snap(t, 1, previous=-1) for t in (0, 4, 8))) for r in (0, 1)}
    assert (planned(ranks).start, planned(ranks).end) == (8, 8)


def test_refusals_name_the_rank() -> None:
    assert refused({}, 0) == "world size 0"
    assert refused({1: rank(1, 0, 1)}, 3) == "no inventory of ranks 0, 2 (world size 3)"
    assert refused({0: rank(1, 0, 1), 5: rank(1, 0, 1)}, 1) == (
        "inventories of rank 5, beyond world size 1"
    )
    nothing = {0: rank(2, 0, 3), 1: RankInventory(2, ())}
    assert refused(nothing, 2) == "rank 1: no sealed snapshot"
    partly = {0: rank(2, 0, 3), 1: rank(4, 0, 1)}
    assert "rank 1: the snapshots up to iteration 1 lack an anchor of 2 of 4" in refused(partly, 2)
    apart = {0: rank(1, 0, 3), 1: rank(1, 6, 9)}
    assert "no iteration in common (rank 0: 0 to 3, rank 1: 6 to 9)" in refused(apart, 2)


def ring_after(window: int, last: int) -> RankInventory:
    """What a ring of the advised size holds once snapshot ``last`` is being filled."""
    slots = {i: SlotRecord(0, i, SlotState.FREE) for i in range(slots_for_window(window))}
    for t in range(last + 1):
        index = choose_slot(slots.values(), window, generation=0).index
        assert index is not None
        state = SlotState.FILLING if t == last else SlotState.SEALED
        slots[index] = replace(snap(t, 1 << t % window, state=state), index=index)
    return RankInventory(window, tuple(slots.values()))


@pytest.mark.parametrize("window", range(1, 7))
@pytest.mark.parametrize("last", [20, 21])
def test_ranks_one_snapshot_apart_still_have_a_common_suffix(window: int, last: int) -> None:
    """Rank 0 is filling one snapshot more than rank 1 when all are killed."""
    plan = planned({0: ring_after(window, last), 1: ring_after(window, last - 1)})
    assert (plan.start, plan.end) == (last - 1 - window, last - 2)


def brute(inventories: Mapping[int, RankInventory]) -> tuple[int, int] | None:
    """The best (end, start) over all pairs, by definition."""
    iterations = {r.iteration for inventory in inventories.values() for r in inventory.records}
    return max(
        (
            (end, start)
            for end in iterations
            for start in iterations
            if all(spans(inventory, start, end) for inventory in inventories.values())
        ),
        default=None,
    )


def spans(inventory: RankInventory, start: int, end: int) -> bool:
    """Whether some linked sealed records lead from start to end and anchor everything."""
    held = [r for r in inventory.records if r.sealed and start <= r.iteration <= end]
    for size in range(1, len(held) + 1):
        for chosen in itertools.combinations(sorted(held, key=lambda r: r.iteration), size):
            ends = (chosen[0].iteration, chosen[-1].iteration) == (start, end)
            linked = all(b.previous == a.iteration for a, b in itertools.pairwise(chosen))
            covered = {i for r in chosen for i in range(16) if r.anchors >> i & 1}
            if ends and linked and covered >= set(range(inventory.num_operators)):
                return True
    return False


def check(inventories: Mapping[int, RankInventory]) -> bool:
    """Compare with brute force; whether there was a plan."""
    plan = plan_recovery(inventories, len(inventories))
    best = brute(inventories)
    if isinstance(plan, NoRecovery):
        assert best is None, inventories
        assert plan.reason
        return False
    assert (plan.end, plan.start) == best, inventories
    assert plan.replayed == plan.end - plan.start
    for number, records in plan.per_rank.items():
        assert set(records) <= set(inventories[number].records)
        assert records[0].iteration == plan.start
        assert records[-1].iteration == plan.end
        assert all(b.previous == a.iteration for a, b in itertools.pairwise(records))
    return True


def test_every_small_case_against_brute_force() -> None:
    """Two ranks of two operators: each iteration of three absent, or anchoring 0, 1 or both."""
    tables = [
        RankInventory(2, tuple(snap(t, a) for t, a in enumerate(anchors) if a))
        for anchors in itertools.product(range(4), repeat=3)
    ]
    found = sum(check({0: a, 1: b}) for a, b in itertools.product(tables, repeat=2))
    assert 0 < found < len(tables) ** 2


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_random_cases_against_brute_force(seed: int) -> None:
    """More ranks, other windows, broken links, links that skip, unsealed slots."""
    rng = random.Random(seed)
    inventories = {}
    for number in range(rng.randint(1, 4)):
        operators = rng.randint(1, 3)
        records = [
            snap(
                t,
                rng.randrange(2**operators),
                previous=rng.choice([t - 1, t - 1, t - 1, t - 2, -1]),
                state=rng.choice([SlotState.SEALED] * 8 + [SlotState.FILLED]),
            )
            for t in range(6)
            if rng.random() < 0.9
        ]
        rng.shuffle(records)
        inventories[number] = RankInventory(operators, tuple(records))
    check(inventories)


RECORD = st.builds(
    SlotRecord,
    generation=st.integers(0, 9),
    index=st.integers(0, 99),
    state=st.sampled_from(SlotState),
    iteration=st.integers(-1, 2**62),
    previous=st.integers(-1, 2**62),
    sequence=st.integers(0, 2**64 - 1),
    image_len=st.integers(0, 2**50),
    layout_id=st.integers(0, 2**64 - 1),
    anchors=st.integers(0, 2**100 - 1),
    phase=st.integers(0, 63),
)


@given(st.lists(RECORD, max_size=5))
def test_inventories_travel(records: list[SlotRecord]) -> None:
    inventory = RankInventory(100, tuple(records))
    assert from_wire(to_wire(inventory)) == inventory


def wire(**changes: object) -> bytes:
    """An inventory of one record on the wire, some of its fields changed."""
    fields: dict[str, object] = {"g": 0, "i": 0, "state": 3, "t": 5, "p": 4, "s": 1, "n": 1}
    fields |= {"layout": 1, "anchors": b"\x01", "phase": 0}
    return msgspec.msgpack.encode([3, [list({**fields, **changes}.values())]])


def test_the_wire_form_is_pinned() -> None:
    assert from_wire(wire()) == RankInventory(
        3, (SlotRecord(0, 0, SlotState.SEALED, 5, 4, 1, 1, 1, 1, 0),)
    )


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "truncated"),
        (b"\xc1", "cannot be read"),
        (msgspec.msgpack.encode([-1, []]), "num_operators is -1"),
        (msgspec.msgpack.encode([3]), "cannot be read"),
        (wire(state=9), "9 is not a valid SlotState"),
        (wire(t="now"), "Expected `int`"),
        (wire(anchors=b"\x08"), "iteration 5 anchors operators beyond the 3"),
        (wire(more=1), "cannot be read"),
    ],
)
def test_what_is_not_an_inventory_is_the_peers_error(payload: bytes, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        from_wire(payload)
