"""A rank's memory from one trainer to the next: what is recovered, and which history begins with it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.daemon_link.rank_memory import MemoryNeed, RankMemory
from ckptd.client.daemon_link.session import Session
from ckptd.client.identity import Identity
from ckptd.client.options import DaemonOptions
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery.global_recovery import Recovered, recover_global
from ckptd.client.stats import Stats
from ckptd.core.slots.segment_format import RingHint, read_slot_header, slot_lock_byte, write_ring_hint
from ckptd.core.slots.slots import SlotState
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.transport.messages import (
    Done,
    Events,
    Forget,
    GetEvents,
    Join,
    Member,
    NodeCard,
    RefusalCode,
    RunSeen,
)
from ckptd.transport.wire import ControlClient, RefusedError
from tests.ckptd.running import MIB, eventually, fill
from tests.client.rank_threads import outcomes

Found = Recovered | str


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]


alone = Collectives.alone()


@contextmanager
def attached(endpoint: str, run: str, rank: int = 0, world_size: int = 1) -> Iterator[RankMemory]:
    memory = RankMemory(
        Identity("job", run, rank, world_size),
        DaemonOptions(endpoint=endpoint, timeout_s=20),
        MemoryNeed(MIB, "for a test"),
        topology="dp1",
        version="test",
        stats=Stats(),
    )
    try:
        yield memory
    finally:
        memory.close()


def reserved(memory: RankMemory) -> MappedSegment:
    while True:
        try:
            return memory.reserve(MIB, 4, window=2, num_operators=2, payload=b"\x80")
        except TimeoutError:  # on a busy machine
            eventually(lambda: not memory.session.reserving, "its memory is made")


@contextmanager
def two_ranks(endpoint: str, run: str) -> Iterator[list[RankMemory]]:
    with ExitStack() as stack:
        yield [stack.enter_context(attached(endpoint, run, rank, 2)) for rank in range(2)]


def together(memories: Sequence[RankMemory]) -> list[Found | Exception]:
    """What the recovery of all ranks returned or raised."""
    return outcomes([partial(recover_global, memory) for memory in memories])


def events(endpoint: str, run: str, kind: str) -> list[tuple[str, str]]:
    """Level and message, of this run's or ("") of those that belong to no rank."""
    with ControlClient(endpoint, timeout_s=20) as client:
        page = client.ask(GetEvents(limit=10_000), Events)
    return [(e.level, e.message) for e in page.events if (e.run, e.kind) == (run, kind)]


def forget(endpoint: str, run: str) -> None:
    with ControlClient(endpoint, timeout_s=20) as client:
        client.ask(Forget("job", run), Done)


def record(memory: RankMemory, iteration: int) -> None:
    """A sealed snapshot of the memory's epoch, in the slot of that number."""
    segment = memory.table.segments[-1]
    as_daemon: Segment = segment  # type: ignore[assignment]
    fill(as_daemon, iteration % 4, iteration, anchors=1 << iteration % 2)
    header = segment.header(iteration % 4)
    assert header is not None
    told = replace(header, epoch=memory.table.epoch, epoch_start=memory.table.epoch_start)
    segment.write_header(iteration % 4, told)
    segment.seal(iteration % 4)


def recovered(memory: RankMemory, ranks: Collectives = alone) -> int:
    """The iteration that the memory was recovered at."""
    found = recover_global(memory, ranks)
    assert not isinstance(found, str), found
    return found[0][-1].iteration


def history(memory: RankMemory) -> tuple[int, int]:
    assert (memory.table.epoch, memory.table.epoch_start) == (memory.epoch, memory.epoch_start)
    return memory.epoch, memory.epoch_start


def test_every_recovery_begins_an_epoch(endpoint: str, run: str) -> None:
    """Epochs count recoveries, whatever any clock says."""
    with attached(endpoint, run) as memory:
        assert recover_global(memory, alone) == "no node holds a snapshot of rank 0 (world size 1)"
        first, start = history(memory)
        assert first >> 12 == 1
        assert start == -1
        reserved(memory)
        assert history(memory) == (first, -1)
        for iteration in (3, 4, 5):
            record(memory, iteration)
    with attached(endpoint, run) as memory:
        assert recovered(memory) == 5
        second, start = history(memory)
        assert second >> 12 == 2
        assert start == 5
        record(memory, 6)
        reserved(memory)
        assert history(memory) == (second, 5), "another generation goes on in the same epoch"
    with attached(endpoint, run) as memory:
        assert recovered(memory) == 6
        third, start = history(memory)
        assert third >> 12 == 3
        assert start == 6


def test_starting_over_begins_an_epoch_at_the_beginning(endpoint: str, run: str) -> None:
    """What was there may still lie on a peer: it must not be taken for this history's."""
    with attached(endpoint, run) as memory:
        recover_global(memory, alone)
        memory.begin_epoch(40 << 12, 2)
        reserved(memory)
        record(memory, 3)
    with attached(endpoint, run) as memory:
        assert "no node holds a complete suffix" in str(recover_global(memory, alone))
        epoch, start = history(memory)
        assert (epoch >> 12, start) == (41, -1)
        memory.forget_everything()
        assert history(memory) == (epoch, -1)


def test_what_comes_after_the_restored_iteration_is_freed(endpoint: str, run: str) -> None:
    with attached(endpoint, run) as memory:
        recover_global(memory, alone)
        reserved(memory)
        for iteration in (3, 4, 6):
            record(memory, iteration)
    with attached(endpoint, run) as memory:
        assert recovered(memory) == 4
        states = {r.iteration: r.state for r in memory.table.records()}
        assert states[6] is SlotState.FREE
        assert states[4] is SlotState.SEALED


# -- not beginning anew when a node is merely late -----------------------------------------------


def take_part(memory: RankMemory, *others: str, rank: int = 0) -> None:
    """Tell the daemon that these nodes, which are not there, take part in the run."""
    here = Member(memory.session.card, (rank,))
    lent = (Member(NodeCard(name), ()) for name in others)
    memory.begin_epoch(memory.epoch + 1, -1, (here, *lent))


def recorded_by_rank_0(endpoint: str, run: str, *others: str) -> None:
    """Rank 0 has a complete suffix here; what rank 1 had lay elsewhere."""
    with attached(endpoint, run, 0, 2) as memory:
        take_part(memory, *others)
        reserved(memory)
        for iteration in (3, 4):
            record(memory, iteration)


def test_a_run_does_not_begin_anew_because_a_node_is_late(endpoint: str, run: str) -> None:
    """Days of training would be lost: what a rank misses may lie on the node that did not answer in time."""
    recorded_by_rank_0(endpoint, run, "late", "later")
    with two_ranks(endpoint, run) as memories:
        found = together(memories)
        assert all(isinstance(error, DaemonUnavailable) for error in found)
        assert str(found[0]) == str(found[1])
        assert "no node holds a snapshot of rank 1" in str(found[0])
        assert "nodes late, later took part in the run before" in str(found[0])
        assert f"`ckptctl forget job {run}`" in str(found[0])
        sealed = [r for r in memories[0].table.records() if r.state is SlotState.SEALED]
        assert {r.iteration for r in sealed} == {3, 4}, "nothing was freed"
    assert not events(endpoint, run, "starting_over")


def test_it_begins_anew_only_by_command_while_anything_is_complete(endpoint: str, run: str) -> None:
    """What rank 1 had is nowhere, but a person may know better; the operator is told that nobody is
    missing, and how to begin anew.
    """
    recorded_by_rank_0(endpoint, run)
    with two_ranks(endpoint, run) as memories:
        for error in together(memories):
            assert isinstance(error, DaemonUnavailable), error
            assert "no node holds a snapshot of rank 1" in str(error)
            assert "of rank 0 there are iterations 3 to 4" in str(error)
            node = memories[0].session.node_id
            _says_how_to_begin_anew(str(error), run, node)
    forget(endpoint, run)
    with two_ranks(endpoint, run) as memories:
        assert together(memories) == ["no node holds a snapshot of ranks 0, 1 (world size 2)"] * 2
        assert len({history(memory) for memory in memories}) == 1


def test_a_job_that_died_in_its_first_seconds_is_told_that_nothing_can_be_resumed(
    endpoint: str, run: str
) -> None:
    """Each rank has a complete suffix, and they have no iteration in common: there never was a
    floor. The refusal spoke of what stays and of nodes that refuse others, as if waiting could
    help; nobody is missing, and one command is all that there is to do.
    """
    recorded_by_both(endpoint, run, iterations=((3, 4), (6, 7)))
    with two_ranks(endpoint, run) as memories:
        for error in together(memories):
            assert isinstance(error, DaemonUnavailable), error
            assert "the ranks have no iteration in common" in str(error)
            assert "of rank 1 there are iterations 6 to 7" in str(error)
            _says_how_to_begin_anew(str(error), run, memories[0].session.node_id)
    forget(endpoint, run)
    with two_ranks(endpoint, run) as memories:
        assert together(memories) == ["no node holds a snapshot of ranks 0, 1 (world size 2)"] * 2


def _says_how_to_begin_anew(text: str, run: str, node: str) -> None:
    assert "no node is missing, and neither memory nor storage has a state from which" in text
    assert f"To begin anew, run `ckptctl forget job {run}` on node {node} and start again" in text
    assert "admit" not in text
    assert "back" not in text


def test_it_begins_anew_where_a_rank_never_had_anything_complete(endpoint: str, run: str) -> None:
    """It died so early that rank 0 had a whole suffix and rank 1 had none: there was nothing for
    all of them, and nothing is lost.
    """
    recorded_by_both(endpoint, run, iterations=((3, 4), (3,)))
    with two_ranks(endpoint, run) as memories:
        found = together(memories)
        assert all("no node holds a complete suffix" in str(why) for why in found), found
        assert all(isinstance(why, str) for why in found), found
    assert len(events(endpoint, run, "starting_over")) == 2


def test_a_run_that_never_got_anywhere_begins_anew_whoever_is_late(endpoint: str, run: str) -> None:
    with attached(endpoint, run) as memory:
        take_part(memory, "late")
        reserved(memory)
        record(memory, 3)  # half of what a suffix needs
    with attached(endpoint, run) as memory:
        assert "no node holds a complete suffix" in str(recover_global(memory, alone))
    ((level, text),) = events(endpoint, run, "starting_over")
    assert level == "warning"
    assert text.endswith("(node late did not answer)")


def test_a_new_run_is_no_news(endpoint: str, run: str) -> None:
    with attached(endpoint, run) as memory:
        assert isinstance(recover_global(memory, alone), str)
    assert not events(endpoint, run, "starting_over")


def test_a_node_that_was_only_slow_is_waited_for_before_the_start_is_refused(
    endpoint: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It showed no sign of life, and has what is missing: the nodes are asked again, with more patience."""
    patience: list[bool] = []
    ask = Session.see_run

    def slow(self: Session, *args: Any, patient: bool = False, **options: Any) -> RunSeen:
        patience.append(patient)
        seen = ask(self, *args, patient=patient, **options)
        if patient:
            return seen
        (here,) = seen.holdings
        assert here.record is not None
        told = msgspec.structs.replace(here.record, recoverable=True)
        elsewhere = msgspec.structs.replace(here, segments=(), record=told)
        return msgspec.structs.replace(seen, holdings=(elsewhere,), silent=("slow",))

    with attached(endpoint, run) as memory:
        take_part(memory)
        reserved(memory)
        for iteration in (3, 4):
            record(memory, iteration)
    monkeypatch.setattr(Session, "see_run", slow)
    with attached(endpoint, run) as memory:
        assert recovered(memory) == 4
    assert patience == [False, False, True], "first what is durable is looked at"


def test_damage_here_is_no_reason_to_forget_what_a_late_node_may_hold(endpoint: str, run: str) -> None:
    """All that is here is damaged, and quarantined while the ranks plan; the late node may hold
    replicas of it.
    """
    with attached(endpoint, run) as memory:
        take_part(memory, "late")
        segment = reserved(memory)
        for iteration in (3, 4):
            record(memory, iteration)
            header = segment.header(iteration % 4)
            assert header is not None
            segment.slot(iteration % 4)[header.image_len - 1] ^= 1
    with attached(endpoint, run) as memory:
        with pytest.raises(DaemonUnavailable, match="node late took part in the run before"):
            recover_global(memory, alone)
        assert events(endpoint, run, "digest_mismatch")


# -- epochs --------------------------------------------------------------------------------------


def test_an_epoch_in_which_nothing_was_sealed_is_never_begun_twice(endpoint: str, run: str) -> None:
    """Its trainer died before its first snapshot was sealed."""
    with attached(endpoint, run) as memory:
        take_part(memory)
        memory.begin_epoch(40 << 12, -1, (Member(memory.session.card, (0,)),))
    with attached(endpoint, run) as memory:
        recover_global(memory, alone)
        epoch, start = history(memory)
        assert (epoch >> 12, start) == (41, -1)


def test_a_join_of_an_epoch_that_is_over_is_refused(endpoint: str, run: str) -> None:
    with attached(endpoint, run) as memory:
        members = (Member(memory.session.card, (0,)),)
        memory.begin_epoch(9, 4, members)
        with pytest.raises(AttachRefused, match="stale_epoch"):
            memory.begin_epoch(8, 6, members)
        assert history(memory) == (9, 4), "it has not begun"
    ((level, text),) = events(endpoint, run, "stale_epoch")
    assert level == "error"
    assert "snapshots are not replicated" in text


def test_a_join_that_is_refused_on_one_rank_stops_all(
    endpoint: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other would go on, and wait for this rank in its first collective."""

    def refuse(message: Join) -> None:
        raise AttachRefused(RefusalCode.STALE_EPOCH, "epoch 9 has begun", "end the other trainers")

    with two_ranks(endpoint, run) as memories:
        monkeypatch.setattr(memories[1].session, "join", refuse)
        first, second = together(memories)
        assert isinstance(first, DaemonUnavailable)
        assert "rank 1 on node" in str(first)
        assert "epoch 9 has begun. End the other trainers" in str(first)
        assert isinstance(second, AttachRefused)
        assert second.code == "stale_epoch"


def test_a_daemon_that_is_away_when_the_run_begins_is_told_later(
    endpoint: str, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    with attached(endpoint, run) as memory:
        memory.session.connected = False  # as its link says when the daemon does not answer
        memory.begin_epoch(9, 4, (Member(memory.session.card, (0,)),))
        assert history(memory) == (9, 4)
        assert "the daemon was not told who takes part in the run" in caplog.text
        eventually(
            lambda: any(f"job/{run}: epoch 9" in text for _, text in events(endpoint, "", "run_joined")),
            "it is told",
        )


def test_a_join_that_fails_for_another_reason_is_tried_again(
    endpoint: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(endpoint, run) as memory:
        client = memory.session._client
        assert client is not None
        request, refused = client.request, list[object]()

        def refuse_once(message: Any, **options: Any) -> Any:
            if isinstance(message, Join) and not refused:
                refused.append(message)
                raise RefusedError("internal", "a bug", "")
            return request(message, **options)

        monkeypatch.setattr(client, "request", refuse_once)
        memory.begin_epoch(9, 4, (Member(memory.session.card, (0,)),))
        assert refused
        eventually(
            lambda: any(f"job/{run}: epoch 9" in text for _, text in events(endpoint, "", "run_joined")),
            "it is told",
        )


# -- failing together ----------------------------------------------------------------------------


def recorded_by_both(
    endpoint: str, run: str, *, iterations: Sequence[Sequence[int]] = ((3, 4), (3, 4))
) -> None:
    with two_ranks(endpoint, run) as memories:
        assert all(isinstance(found, str) for found in together(memories))
        for memory, numbers in zip(memories, iterations, strict=True):
            reserved(memory)
            for iteration in numbers:
                record(memory, iteration)


def test_two_ranks_come_back_together(endpoint: str, run: str) -> None:
    recorded_by_both(endpoint, run)
    with two_ranks(endpoint, run) as memories:
        for found in together(memories):
            assert isinstance(found, tuple), found
            assert [image.iteration for image in found[0]] == [3, 4]
        assert history(memories[0]) == history(memories[1])


def test_whatever_goes_wrong_on_one_rank_is_raised_on_all(
    endpoint: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the vote and after it: verification, and the beginning of the new history."""
    recorded_by_both(endpoint, run)

    def broken(*_: object) -> None:
        raise OSError("bad memory")

    with two_ranks(endpoint, run) as memories:
        for owner, name in ((memories[1].retrieval, "_verify"), (memories[1], "_release")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, broken)
                if name == "_release":
                    record(memories[1], 6)  # is to be freed, since rank 0 has none
                first, second = together(memories)
            assert isinstance(first, DaemonUnavailable), name
            assert str(first).startswith("recover: rank 1 on node ")
            assert "bad memory" in str(first)
            assert isinstance(second, OSError), name


def test_memory_that_is_made_ahead_is_used_once_it_is_installed(endpoint: str, run: str) -> None:
    """A ring that grows meanwhile has a higher number; the newest is what was filled last, here and
    for the next trainer.
    """
    with attached(endpoint, run) as memory:
        memory.begin_epoch(1, -1)
        first = reserved(memory)
        record(memory, 5)
        ahead = memory.reserve(MIB, 6, window=3, num_operators=3, payload=b"\x80", ahead=True)
        assert memory.descriptor == first.descriptor
        grown = reserved(memory)
        assert ahead.generation < grown.generation
        assert memory.num_operators == 2
    with attached(endpoint, run) as memory:
        assert memory.num_operators == 2, "what is empty counts for nothing"


@contextmanager
def two_generations(endpoint: str, run: str) -> Iterator[tuple[RankMemory, MappedSegment]]:
    """The first one, of two, holds a suffix that this rank needs no more."""
    with attached(endpoint, run, 0, 2) as memory:
        memory.begin_epoch(1, -1)
        first = reserved(memory)
        for iteration in (3, 4):
            record(memory, iteration)
        reserved(memory)
        for iteration in (5, 6):
            record(memory, iteration)
        yield memory, first


def test_a_generation_stays_of_which_the_daemon_has_just_promised_something(
    endpoint: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer had found that nobody needs it, and the daemon promised iteration 4 before it
    heard of that: it was given back all the same.
    """
    lock_sealed = MappedSegment.lock_sealed

    def promised_before(segment: MappedSegment) -> list[int] | None:
        write_ring_hint(segment.buffer, RingHint(4, 4, 2, epoch=1, aim=4))
        return lock_sealed(segment)

    with two_generations(endpoint, run) as (memory, first):
        with monkeypatch.context() as patch:
            patch.setattr(MappedSegment, "lock_sealed", promised_before)
            assert memory.drop_unneeded() == []
        assert {r.iteration for r in memory.table.records() if r.sealed} == {3, 4, 5, 6}
        with locks.lock_file(first.path, slot_lock_byte(0), exclusive=False) as free:
            assert free, "its slots can be read again"
        write_ring_hint(first.buffer, RingHint())
        assert memory.drop_unneeded() == [first]


def test_a_generation_that_is_given_back_holds_nothing_from_then_on(endpoint: str, run: str) -> None:
    """The daemon hears of it later, and must not count on it until then; while somebody reads it, it stays."""
    with two_generations(endpoint, run) as (memory, first):
        with locks.lock_file(first.path, slot_lock_byte(0), exclusive=False) as reading:
            assert reading
            assert memory.drop_unneeded() == []
        with (
            open(first.path, "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as there,
        ):
            assert memory.drop_unneeded() == [first]
            with memoryview(there) as view:
                headers = [read_slot_header(view, first.geometry, i) for i in range(4)]
                assert {h.state for h in headers if h is not None} == {SlotState.FREE}


def test_memory_that_was_made_ahead_can_be_given_back(endpoint: str, run: str) -> None:
    with attached(endpoint, run) as memory:
        reserved(memory)
        ahead = memory.reserve(MIB, 6, window=3, num_operators=3, payload=b"\x80", ahead=True)
        memory.give_back(ahead)
    with attached(endpoint, run) as memory:
        assert memory.num_operators == 2
        assert len(memory.table.segments) == 1
