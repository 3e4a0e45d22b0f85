"""What all ranks learn at the start of a recovery, and that they learn of a failure together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from ckptd.client.daemon_link.run_inventory import RankNote, RunView, see_run
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.recovery.global_plan import RecoveryPlan, plan_recovery
from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.recovery.recovery_facts import RankFacts, facts_to_wire
from ckptd.core.slots.segment_format import SlotHeader, pack_slot_header
from ckptd.core.slots.slots import SlotState
from ckptd.errors import DaemonUnavailable, RemoteProtocolError
from ckptd.holdings import newest_history
from ckptd.transport.messages import (
    HeldSegment,
    HeldSlot,
    Holdings,
    Member,
    NodeCard,
    RunRecord,
    RunSeen,
)
from tests.client.rank_threads import outcomes


@dataclass
class Asks:
    """A session whose daemon sees this, or is away."""

    card: NodeCard
    sees: RunSeen | Exception
    known: list[tuple[str, ...]] = field(default_factory=list)

    def see_run(
        self, job: str, run: str, known: tuple[str, ...], *, storage: bool = False, patient: bool = False
    ) -> RunSeen:
        assert (job, run) == ("job", "run")
        self.known.append(known)
        if isinstance(self.sees, Exception):
            raise self.sees
        return self.sees


def member(name: str, *ranks: int) -> Member:
    return Member(NodeCard(name), ranks)


def seen(
    *nodes: str, members: tuple[Member, ...] = (), silent: tuple[str, ...] = (), epoch: int = -1
) -> RunSeen:
    """What the daemon of the first node tells; the others answered it."""
    return RunSeen(
        tuple(Holdings(node, (), epoch) for node in nodes),
        tuple(NodeCard(node) for node in nodes[1:]),
        members,
        silent,
    )


def views(*sessions: Asks, notes: Sequence[RankNote] = ()) -> list[RunView | Exception]:
    def ask(rank: int, ranks: Collectives) -> RunView:
        note = notes[rank] if notes else None
        return see_run(sessions[rank], "job", "run", ranks, note=note)

    return outcomes([lambda e, r=r: ask(r, e) for r in range(len(sessions))])  # type: ignore[misc]


def view(*sessions: Asks, notes: Sequence[RankNote] = ()) -> RunView:
    """The one that all ranks have."""
    found = views(*sessions, notes=notes)
    assert isinstance(found[0], RunView), found[0]
    assert all(other == found[0] for other in found)
    return found[0]


def test_one_rank_per_node_asks_and_all_hear_it() -> None:
    a, b = NodeCard("a"), NodeCard("b")
    sessions = [Asks(a, seen("a")), Asks(a, seen("a")), Asks(b, seen("b", "idle"))]
    found = view(*sessions)
    assert found.cards == (a, a, b)
    assert found.idle == (NodeCard("idle"),)
    assert found.silent == ()
    assert [s.known for s in sessions] == [[("a", "b")], [], [("a", "b")]]
    assert found.members == (
        Member(a, (0, 1), (0, 0)),
        Member(b, (2,), (0,)),
        Member(NodeCard("idle"), ()),
    )


def test_who_took_part_and_does_not_answer_is_silent() -> None:
    """Whoever knows of them: here the daemon of node a has just been restarted, and only that of b remembers."""
    before = (member("a", 0), member("b"), member("gone", 1), member("idle"), member("lent"))
    found = view(
        Asks(NodeCard("a"), seen("a")),
        Asks(NodeCard("b"), seen("b", "idle", members=before, silent=("lent", "asked"))),
    )
    assert found.silent == ("asked", "gone", "lent")


def test_who_answered_anybody_is_not_silent() -> None:
    before = (member("x"), member("y"))
    found = view(
        Asks(NodeCard("a"), seen("a", "x", members=before, silent=("y",))),
        Asks(NodeCard("b"), seen("b", "y", members=before, silent=("x",))),
    )
    assert found.silent == ()


def test_an_epoch_in_which_nothing_was_sealed_is_known() -> None:
    found = view(
        Asks(NodeCard("a"), seen("a", epoch=3)),
        Asks(NodeCard("b"), seen("b", "idle", epoch=5 << 12)),
    )
    assert found.known_epoch == 5 << 12
    assert found.next_epoch(2) == (6 << 12) + found.drawn
    assert found.next_epoch(9 << 12) == (10 << 12) + found.drawn


def test_an_epoch_that_only_storage_shows_is_passed_and_not_followed() -> None:
    """Nothing of it may be complete, so the run goes on from an earlier one."""
    stored = Holdings(STORE_NODE, (), 5 << 12)
    told = seen("a", epoch=3 << 12)
    found = view(Asks(NodeCard("a"), msgspec.structs.replace(told, holdings=(*told.holdings, stored))))
    assert (found.known_epoch, found.stored_epoch) == (3 << 12, 5 << 12)
    assert found.last_epoch(2 << 12) == 3 << 12
    assert found.next_epoch(2 << 12) == (6 << 12) + found.drawn


def test_an_epoch_is_a_number_above_all_that_are_known_and_a_lot() -> None:
    """No clock: one that was ten minutes ahead made a healthy history stale."""
    epochs = [RunView((), (), (), drawn=drawn, known_epoch=-1).next_epoch(-1) for drawn in (0, 7)]
    assert epochs == [4096, 4103]
    after = RunView((), (), (), drawn=1, known_epoch=4103).next_epoch(4096)
    assert after == 8193, "after either of them"
    with pytest.raises(ValueError, match=r"no epoch follows .*`ckptctl forget`"):
        RunView((), (), (), known_epoch=(1 << 32) - 1).next_epoch(-1)


def held_by(node: str, epoch: int, *iterations: int) -> HeldSegment:
    slots = tuple(
        HeldSlot(
            i,
            pack_slot_header(SlotHeader(SlotState.SEALED, iteration, iteration - 1, sequence=1, epoch=epoch)),
            b"\1",
        )
        for i, iteration in enumerate(iterations)
    )
    return msgspec.structs.replace(segment_of(0, f"s{epoch}", bytes(112)), slots=slots)


@pytest.mark.parametrize("lost_branch", [(2 << 12) + 1, (2 << 12) + 9])
def test_two_histories_that_did_not_know_of_each_other_are_not_mixed(lost_branch: int) -> None:
    """Nodes a and b recovered without c, and c without them: both took the next number, one from
    iteration 10, the other from 15. By number alone the snapshots of c up to 15 would count as the
    past of what began at 15.
    """
    base, kept, newest = 1 << 12, (2 << 12) + 5, 3 << 12

    def told(node: str, *epochs: tuple[int, int, int]) -> RunRecord:
        return RunRecord("job", "run", members=(member(node, 0),), epochs=epochs)

    ab = told("a", (base, -1, -1), (kept, 15, base), (newest, 17, kept))
    c = told("c", (base, -1, -1), (lost_branch, 10, base))
    segments = (held_by("a", base, 14, 15), held_by("a", kept, 16, 17), held_by("a", newest, 18))
    theirs = (held_by("c", base, 10), held_by("c", lost_branch, 11, 12, 13, 14, 15))
    found = view(
        Asks(NodeCard("a"), RunSeen((Holdings("a", segments, newest, record=ab),), ())),
        Asks(NodeCard("c"), RunSeen((Holdings("c", theirs, lost_branch, record=c),), ())),
    )
    assert found.others == {lost_branch}
    left = {(r.epoch, r.iteration) for h in found.held for r in h.records}
    assert left == {(base, 10), (base, 14), (base, 15), (kept, 16), (kept, 17), (newest, 18)}
    assert found.next_epoch(newest) >> 12 == 4


def test_an_epoch_of_which_nothing_was_recorded_does_not_end_a_history_that_goes_on() -> None:
    """Node c was cut off when it had written the number of an epoch down; the others, who never
    heard of it, drew a lower one and trained on. When c came back its number counted, everything
    that the job had recorded was another history, and the run would have begun anew.
    """
    base, live, drawn = 1 << 12, (2 << 12) + 5, (2 << 12) + 9
    ab = RunRecord("job", "run", members=(member("a", 0),), epochs=((base, -1, -1), (live, 3, base)))
    c = RunRecord("job", "run", members=(member("c"),), epochs=((base, -1, -1), (drawn, -1, base)))
    here = (held_by("a", base, 2, 3), held_by("a", live, 4, 5))
    found = view(
        Asks(NodeCard("a"), RunSeen((Holdings("a", here, live, record=ab),), ())),
        Asks(NodeCard("c"), RunSeen((Holdings("c", (), drawn, record=c),), ())),
    )
    assert found.others == {drawn}
    assert {r.epoch for h in found.held for r in h.records} == {base, live}
    assert found.begun == {base: -1, live: 3}
    assert found.next_epoch(live) >> 12 == 3


def test_only_the_last_start_of_the_history_that_counts_has_gone_back() -> None:
    base, live, drawn = 1 << 12, (2 << 12) + 5, (2 << 12) + 9
    ab = RunRecord("job", "run", live, 3, epochs=((base, -1, -1), (live, 3, base)), chosen=3)
    c = RunRecord("job", "run", drawn, 9, epochs=((base, -1, -1), (drawn, 9, base)), chosen=9)
    old = RunRecord("job", "run", base, -1, epochs=((base, -1, -1),), chosen=1)
    here = (held_by("a", base, 2, 3), held_by("a", live, 4, 5))
    found = view(
        Asks(NodeCard("a"), RunSeen((Holdings("a", here, live, record=ab),), ())),
        Asks(NodeCard("b"), RunSeen((Holdings("b", (), base, record=old),), ())),
        Asks(NodeCard("c"), RunSeen((Holdings("c", (), drawn, record=c),), ())),
    )
    assert found.others == {drawn}
    assert [found.still_wanted(at) for at in (1, 9, 3, None)] == [1, 9, None, None]
    assert view(Asks(NodeCard("n"), seen("n"))).still_wanted(3) == 3, "nobody knows of an earlier start"


def test_what_an_epoch_left_behind_does_not_come_back_with_the_loss_of_that_epoch() -> None:
    """Epoch 2 began at iteration 5, and all nodes that hold its snapshots are away; a record tells
    of it. Node a has iterations 6 and 7 of epoch 1. Had epoch 3 gone on from 7, a node that came
    back with iterations 6 and 7 of epoch 2 would have had the newer ones: 8 would follow another 7
    than its own. The hosts of replicas, which know of epoch 2 by the same record, call 6 and 7 of
    epoch 1 stale.
    """
    first, second = 1 << 12, 2 << 12
    told = RunRecord(
        "job",
        "run",
        members=(member("a"), member("gone", 0)),
        epochs=((first, -1, -1), (second, 5, first)),
    )
    here = Holdings("a", (held_by("a", first, 4, 5, 6, 7),), second, record=told)
    found = view(Asks(NodeCard("a"), RunSeen((here,), (), silent=("gone",))))
    assert found.begun == {first: -1, second: 5}
    plan = plan_recovery(found.usable, 1, epochs=found.epochs)
    assert isinstance(plan, RecoveryPlan)
    assert (plan.end, plan.epoch) == (5, second)
    assert newest_history(RunSeen((here,), (), silent=("gone",))).history.begun == found.begun, (
        "as a drill and `ckptctl whatif` see it"
    )


def test_a_daemon_that_is_away_is_every_ranks_error() -> None:
    """The others would wait for this rank in the next exchange until their process group times out."""
    away = DaemonUnavailable("no answer within 10 s", operation="see run")
    found = views(Asks(NodeCard("a"), seen("a")), Asks(NodeCard("b"), away))
    assert [str(error) for error in found] == [
        "recover: rank 1 on node b: see run: no answer within 10 s"
    ] * 2
    assert all(isinstance(error, DaemonUnavailable) for error in found)


def segment_of(rank: int, name: str, slot_header: bytes, facts: bytes = b"") -> HeldSegment:
    """With one slot."""
    return HeldSegment(
        name=name,
        rank=rank,
        own=False,
        origin="",
        generation=0,
        world_size=2,
        window=1,
        num_operators=1,
        operators_id="t",
        slot_bytes=1,
        num_slots=1,
        slots=(HeldSlot(0, slot_header, b""),),
        facts=facts,
    )


def sealed(iteration: int) -> bytes:
    return pack_slot_header(SlotHeader(state=SlotState.SEALED, iteration=iteration, sequence=1))


def test_a_node_that_tells_what_cannot_be_is_every_ranks_error() -> None:
    lies = RunSeen((Holdings("b", (segment_of(0, "s", bytes(112)),)),), ())
    first, second = views(Asks(NodeCard("a"), seen("a")), Asks(NodeCard("b"), lies))
    assert isinstance(first, DaemonUnavailable)
    assert "rank 1 on node b: plan recovery [node=b" in str(first)
    assert isinstance(second, RemoteProtocolError)


def test_a_log_tells_the_facts_of_a_rank_that_has_lost_its_own() -> None:
    """Rank 1 trained elsewhere before. With whom it has all operators alike counts as it is built now, too."""
    a, b, alike = NodeCard("a"), NodeCard("b"), (0, 1)
    told = facts_to_wire({1: RankFacts((0,), (1,), (1, 2))})
    log, state = segment_of(1, "log", sealed(8), told), segment_of(0, "parked", sealed(9))
    here = RunSeen((Holdings("a", (), logs=(log,), parked=(state,)),), ())
    own = RankFacts((1,), (0,), (0,))
    notes = [RankNote(facts=own), RankNote(alike=alike)]
    found = view(Asks(a, here), Asks(b, seen("b")), notes=notes)
    assert found.facts == {0: own, 1: RankFacts((0,), (1,), (1,))}
    speaks = RankFacts((), (1,), (1,))
    notes[1] = RankNote(facts=speaks)
    found = view(Asks(a, here), Asks(b, seen("b")), notes=notes)
    assert found.facts[1] == speaks, "nobody knows better than the rank itself"


def test_alone_the_daemons_absence_is_told_as_it_is() -> None:
    with pytest.raises(DaemonUnavailable, match=r"^see run: away$"):
        see_run(
            Asks(NodeCard("a"), DaemonUnavailable("away", operation="see run")),
            "job",
            "run",
            Collectives.alone(),
        )
