"""With whom ranks communicate: what lost ranks would have told, contradictions, and the wire."""

from __future__ import annotations

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.recovery.recovery_facts import (
    RankFacts,
    Relations,
    facts_from_logs,
    facts_from_wire,
    facts_of_log,
    facts_to_wire,
    relate,
)
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.errors import RemoteProtocolError


def grid(stages: int, replicas: int) -> dict[int, RankFacts]:
    """Pipelines side by side; rank = stage · replicas + replica."""
    facts = {}
    for rank in range(stages * replicas):
        first = rank - rank % replicas
        beside = (rank - replicas, rank + replicas)
        domain = tuple(range(first, first + replicas))
        neighbours = tuple(n for n in beside if 0 <= n < stages * replicas)
        facts[rank] = RankFacts(neighbours, domain, domain)
    return facts


def related(facts: dict[int, RankFacts], world_size: int) -> Relations:
    relations = relate(facts, world_size)
    assert isinstance(relations, Relations), relations
    return relations


def test_a_lost_rank_is_told_of_by_the_others() -> None:
    facts = grid(3, 2)
    whole = related(facts, 6)
    assert whole.unreported == ()
    del facts[2]
    relations = related(facts, 6)
    assert relations.domains == whole.domains == [(0, 1), (2, 3), (4, 5)]
    assert relations.domain_of == whole.domain_of
    assert relations.neighbours[2] == whole.neighbours[2] == (0, 4)
    assert relations.unreported == (2,)
    assert relations.have_same_operators(2, 3)
    assert relations.have_same_operators(3, 2)
    assert not relations.have_same_operators(2, 4)


def test_of_several_lost_ranks_nobody_knows_whether_they_communicate() -> None:
    """They start together, and so does whoever is in a domain with one of them."""
    facts = grid(4, 2)
    del facts[2], facts[5]
    relations = related(facts, 8)
    assert relations.domains == [(0, 1), (2, 3, 4, 5), (6, 7)]
    assert relations.domain_of == [0, 0, 1, 1, 1, 1, 2, 2]
    assert not relations.have_same_operators(2, 5)  # neither said so
    alone = related({0: RankFacts((1,), (0,))}, 3)
    assert alone.domains == [(0,), (1, 2)]


def test_who_is_joined_by_way_of_others_is_joined() -> None:
    """Each rank tells its own groups, of tensors and of replicas; that all of a stage are joined,
    none of them knows.
    """
    tensors, replicas = [(0, 1), (2, 3), (4, 5)], [(0, 2), (1, 3)]
    groups = {r: {m for g in tensors + replicas if r in g for m in g} for r in range(6)}
    facts = {r: RankFacts((), tuple(sorted(groups[r]))) for r in (0, 1, 3, 4, 5)}
    assert related(facts, 6).domains == [(0, 1, 2, 3), (4, 5)]
    one_way = {0: RankFacts((), (2,)), 1: RankFacts((), ()), 2: RankFacts((), (2,))}
    assert related(one_way, 3).domains == [(0, 2), (1,)]


def test_alike_is_what_nobody_contradicts() -> None:
    facts = {0: RankFacts((), (0, 1), (1,)), 1: RankFacts((), (0, 1), ())}
    assert not related(facts, 2).have_same_operators(0, 1)
    facts[1] = RankFacts((), (0, 1), (0,))
    assert related(facts, 2).have_same_operators(0, 1)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({}, "no rank reported with which ranks it communicates"),
        ({0: RankFacts((5,), (0,))}, "the facts name rank 5, beyond world size 3"),
        ({4: RankFacts((), (4,))}, "the facts name rank 4, beyond world size 3"),
        (
            {0: RankFacts((1,), (0,)), 1: RankFacts((), (1,))},
            "rank 0 reports that it exchanges boundaries with rank 1, but rank 1 reports the opposite",
        ),
    ],
)
def test_facts_that_cannot_be_are_refused(facts: dict[int, RankFacts], why: str) -> None:
    found = relate(facts, 3)
    assert isinstance(found, str)
    assert why in found


ascending = st.sets(st.integers(0, 200), max_size=12).map(lambda ranks: tuple(sorted(ranks)))


@given(st.dictionaries(st.integers(0, 200), st.builds(RankFacts, ascending, ascending, ascending)))
def test_the_wire_keeps_facts(facts: dict[int, RankFacts]) -> None:
    told = facts_from_wire([facts_to_wire(facts)])
    assert told == {
        rank: RankFacts(f.neighbours, tuple(sorted({*f.domain, rank})), tuple(sorted({*f.alike, rank})))
        for rank, f in facts.items()
    }


def test_equal_lists_are_sent_once_as_progressions_and_are_one_object() -> None:
    domain = tuple(range(3, 16_384, 8))
    facts = {
        rank: RankFacts((rank - 3,), domain, tuple(other for other in domain if other != rank))
        for rank in domain[:8]
    }
    payload = facts_to_wire(facts)
    assert len(payload) < 200
    nodes = [payload, facts_to_wire({11: RankFacts((), domain)})]
    told = facts_from_wire(nodes)
    assert told[3].domain is told[11].domain is told[19].alike
    assert told[11].alike == (11,)


@pytest.mark.parametrize(
    "lists",
    [
        [[(5, 1, 2), (6, 1, 1)]],
        [[(0, 0, 2)]],
        [[(0, 1, 0)]],
        [[(0, 1 << 23, 4)]],
        [[(-1, 1, 1)]],
        [[(0, 1, (1 << 20) + 1)]],  # ten bytes that took 600 MiB, fuzzing found
        [[(0, 1, 1 << 16)], *[[(0, 1, 1 << 16)]] * 16],
        [],
    ],
)
def test_what_cannot_be_is_refused_on_the_wire(lists: list[list[tuple[int, int, int]]]) -> None:
    payload = msgspec.msgpack.encode([lists, [(0, 0, 0, 0)]])
    with pytest.raises(RemoteProtocolError, match="report of its ranks' communication"):
        facts_from_wire([payload])


def test_what_is_no_msgpack_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        facts_from_wire([b"\xc1"])


def test_lists_that_are_not_ascending_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 1\] are not ascending"):
        facts_to_wire({0: RankFacts((2, 1), (0,))})


OLD, NEW = RankFacts((1,), (0,), (0,)), RankFacts((1, 2), (0, 3), (0,))


def records(*iterations: int, epoch: int = 0, start: int = -1) -> tuple[SlotRecord, ...]:
    return tuple(
        SlotRecord(0, n, SlotState.SEALED, t, sequence=t, epoch=epoch, epoch_start=start)
        for n, t in enumerate(iterations)
    )


def log(name: str, told: RankFacts | None, filled: tuple[SlotRecord, ...]) -> HeldRecords:
    facts = b"" if told is None else facts_to_wire({0: told})
    return HeldRecords("n1", name, False, 0, 1, name, 4096, filled, facts)


PARKED_AT_9 = [HeldRecords("n0", "p", True, 1, 1, "", 4096, records(9))]


def test_the_log_that_was_filled_last_tells() -> None:
    logs = [log("newer", NEW, records(7, 8)), log("older", OLD, records(5, 6, 7))]
    assert facts_from_logs({0}, logs, PARKED_AT_9) == {0: NEW}
    assert facts_from_logs({0}, reversed(logs), PARKED_AT_9) == {0: NEW}


@pytest.mark.parametrize(("last", "counts"), [(8, True), (7, True), (6, False)])
def test_a_replica_that_was_left_behind_tells_nothing(last: int, counts: bool) -> None:
    """Its rank went on, perhaps with a log that tells more: taken at its word, ranks would be
    called apart which are not.
    """
    found = facts_from_logs({0}, [log("old", OLD, records(*range(last + 1)))], PARKED_AT_9)
    assert found == ({0: OLD} if counts else {})


def test_what_a_recovery_ran_again_tells_nothing() -> None:
    """An epoch that began at 8: what was sent in 8 before is not what its rank did last."""
    logs = [log("abandoned", OLD, records(8)), log("last", NEW, records(7))]
    parked = [*PARKED_AT_9, HeldRecords("n0", "q", True, 2, 1, "", 4096, records(9, epoch=1, start=8))]
    assert facts_from_logs({0}, logs, parked) == {0: NEW}


def test_who_speaks_for_itself_is_not_looked_at() -> None:
    bad = HeldRecords("n1", "x", False, 1, 1, "", 4096, records(8), b"garbage")
    assert facts_from_logs({0}, [bad, log("a", OLD, records(8))], PARKED_AT_9) == {0: OLD}
    assert facts_from_logs(set(), [bad], PARKED_AT_9) == {}


def test_where_nobody_is_parked_or_no_log_has_facts_nothing_is_told() -> None:
    logs = [log("a", OLD, records(8))]
    assert facts_from_logs({0}, logs, []) == {}
    assert facts_from_logs({0}, [log("a", None, records(8))], PARKED_AT_9) == {}


def test_facts_that_cannot_be_read_are_the_peers_error() -> None:
    bad = HeldRecords("n1", "x", False, 0, 1, "", 4096, records(8), b"garbage")
    with pytest.raises(RemoteProtocolError):
        facts_from_logs({0}, [bad], PARKED_AT_9)


def test_a_descriptor_tells_what_the_trainer_packed() -> None:
    told = {"neighbours": [1], "domain": [0], "alike": [], "reasons": ["because"]}
    payload = msgpack.packb({"data_offset": 64, "facts": told})
    assert facts_of_log(payload) == RankFacts((1,), (0,), ())
    assert facts_of_log(msgpack.packb({"data_offset": 64})) is None
    assert facts_of_log(b"") is None
    assert facts_of_log(msgpack.packb({"facts": {"neighbours": "?"}})) is None
