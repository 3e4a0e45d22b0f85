"""The start of a localized recovery, over two real ranks of one node: what does not hold must end
in the recovery of all, not in an error.
"""

from __future__ import annotations

import mmap
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from ckptd.client import values
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.daemon_link.run_inventory import RunView
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.parking.park_memory import CopiedImage, ParkedCopy, parked_records
from ckptd.client.pipeline.log_reader import LogFacts, log_payload
from ckptd.client.pipeline.upstream_feed import FedLogs
from ckptd.client.ranks.collectives import Collectives, TryAgain
from ckptd.client.recovery import localized_recovery
from ckptd.client.recovery.global_recovery import recover_global
from ckptd.client.recovery.localized_recovery import LocalizedStart, begin_localized, end_localized
from ckptd.core.recovery.localized_plan import LocalizedPlan, RankKind
from ckptd.core.recovery.snapshot_tables import SnapshotCopy, SnapshotToLoad
from ckptd.core.slots.segment_format import HINT_APART, HINT_APART_AGAIN
from ckptd.core.slots.slots import SlotState
from ckptd.cuda.engine import HostMemory
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.storage.image import ImageLayout, ImageView
from ckptd.storage.image_format import TensorEntry
from ckptd.transport.messages import SegmentInfo
from tests.ckptd.nodes import PATIENT_S, Net
from tests.ckptd.running import MIB, eventually, fill
from tests.client.daemon_link.test_rank_memory import attached, events, record
from tests.client.rank_threads import outcomes
from tests.client.recovery.test_start import payload

__all__: list[str] = []

CUT_OFF = 4


# As of stages that send DTensors.
UNKNOWN_SHAPES: dict[int, Any] = {0: None}


def park(memory: RankMemory, iteration: int, phase: int = 0, stages: dict[int, Any] = UNKNOWN_SHAPES) -> None:
    """A sealed parked state of the memory's epoch."""
    found = {"phases": [[0], [1]], "stride": 1, "stages": stages}
    scalars = values.pack(found, "step scalars")
    told: Any = (("ckptd.scalars", "U8", (len(scalars),), scalars),)
    asked = memory.reserve_auxiliary("parked", MIB, 2, payload(4), window=2, num_operators=2)
    segment: Any = memory.add_auxiliary(asked.result(60))
    fill(segment, 0, iteration, anchors=3, tensors=told, scalars_len=len(scalars))
    header = segment.header(0)
    of_now = replace(header, epoch=memory.epoch, epoch_start=memory.epoch_start, phase=phase)
    segment.write_header(0, of_now)
    segment.seal(0)


def recorded(ranks: list[RankMemory], *, parked: Sequence[RankMemory] = ()) -> None:
    """A suffix up to where the step was cut off; some were parked there."""
    outcomes([partial(recover_global, memory) for memory in ranks])
    for memory in ranks:
        memory.reserve(MIB, 4, window=2, num_operators=2, payload=payload(4))
        for iteration in (CUT_OFF - 1, CUT_OFF):
            record(memory, iteration)
            segment = memory.table.segments[-1]
            header = segment.header(iteration % 4)
            assert header is not None
            segment.write_header(iteration % 4, replace(header, phase=iteration % 2))
    for memory in parked:
        park(memory, CUT_OFF)


def log(memory: RankMemory, facts: LogFacts) -> None:
    """A sealed boundary log of the iterations before, which tells these facts."""
    asked = memory.reserve_auxiliary("log", MIB, 2, log_payload(4096, facts))
    segment: Any = memory.add_auxiliary(asked.result(60))
    for index, iteration in enumerate((CUT_OFF - 2, CUT_OFF - 1)):
        fill(segment, index, iteration, anchors=0)
        header = segment.header(index)
        of_now = replace(header, epoch=memory.epoch, epoch_start=memory.epoch_start)
        segment.write_header(index, of_now)
        segment.seal(index)


def damage(memory: RankMemory) -> None:
    """Flip a byte in what this rank has parked."""
    (record,) = parked_records(memory)
    slot = memory.parks.of(record).slot(record.index)
    slot[record.image_len - 1] ^= 1


@contextmanager
def living_on(run: str, *endpoints: str) -> Iterator[list[RankMemory]]:
    """One life; rank r is on the node with the r-th endpoint."""
    count = len(endpoints)
    with ExitStack() as stack:
        yield [
            stack.enter_context(attached(endpoint, run, rank, count))
            for rank, endpoint in enumerate(endpoints)
        ]


@pytest.fixture
def two_nodes() -> Iterator[tuple[str, str]]:
    with Net(2, peer_deadline_s=PATIENT_S).up() as net:
        yield net[0].endpoint, net[1].endpoint


@pytest.fixture
def run(endpoint: str, request: pytest.FixtureRequest) -> str:
    """A run whose two ranks are replicas; rank 0 was parked, in the phase that a test may say, rank
    1 was killed in the same step.
    """
    run = uuid.uuid4().hex[:8]
    with living_on(run, endpoint, endpoint) as memories:
        recorded(memories)
        park(memories[0], CUT_OFF, getattr(request, "param", 0))
    return run


@pytest.fixture
def ranks(endpoint: str, run: str) -> Iterator[list[RankMemory]]:
    with living_on(run, endpoint, endpoint) as memories:
        yield memories


Alike = Sequence[tuple[int, ...]]


def begin(ranks: list[RankMemory], alike: Alike = ((1,), (0,))) -> list[LocalizedStart | Exception | None]:
    def of(rank: int) -> Callable[[Collectives], LocalizedStart | None]:
        def work(job: Collectives) -> LocalizedStart | None:
            found = begin_localized(ranks[rank], job, alike[rank])
            return found if isinstance(found, LocalizedStart) else None

        return work

    return outcomes([of(rank) for rank in range(len(ranks))])


def kinds(starts: list[LocalizedStart]) -> list[str]:
    return [start.mine.kind for start in starts]


def started(found: list[LocalizedStart | Exception | None]) -> list[LocalizedStart]:
    assert all(isinstance(one, LocalizedStart) for one in found), found  # why not is in the log
    return [one for one in found if isinstance(one, LocalizedStart)]


def test_a_replica_that_was_killed_copies_from_the_one_that_was_parked(
    ranks: list[RankMemory],
) -> None:
    parked, copied = started(begin(ranks))
    assert (parked.mine.kind, copied.mine.kind) == (RankKind.PARKED, RankKind.COPIED)
    assert [image.iteration for start in (parked, copied) for image in start.images] == [4, 4]
    assert [memory.hint for memory in ranks] == [HINT_APART] * 2
    for memory, start in zip(ranks, (parked, copied), strict=True):
        end_localized(memory, start)
        assert start.images == []  # whoever still holds the start does not hold a model with it
    assert [memory.hint for memory in ranks] == [0, 0]


def test_ranks_that_changed_their_nodes_take_their_parked_states_along(
    two_nodes: tuple[str, str],
) -> None:
    """The launcher has numbered them anew. A snapshot comes with each, or nothing could be recorded after."""
    run, (first, second) = uuid.uuid4().hex[:8], two_nodes
    with living_on(run, first, second) as ranks:
        recorded(ranks, parked=ranks)
    with living_on(run, second, first) as ranks:
        starts = started(begin(ranks))
        assert kinds(starts) == [RankKind.MOVED] * 2
        for memory, start in zip(ranks, starts, strict=True):
            (image,) = start.images
            assert (image.iteration, image.view.anchors) == (CUT_OFF, 3)
            assert memory.descriptor is not None
            assert memory.descriptor.client == payload(4)
            assert memory.hint == HINT_APART
            eventually(lambda m=memory: record_at(m, CUT_OFF), "its ring has begun")  # type: ignore[misc]
            end_localized(memory, start)


def record_at(memory: RankMemory, iteration: int) -> bool:
    return any(r.iteration == iteration and r.sealed for r in memory.table.records())


def test_ranks_that_changed_their_nodes_are_who_they_were(two_nodes: tuple[str, str]) -> None:
    """Each tells with whom it communicates, as its log did on the other node. Else both were one
    domain, and would replay together.
    """
    run, (first, second) = uuid.uuid4().hex[:8], two_nodes
    facts = [LogFacts((1,), (0,)), LogFacts((0,), (1,))]
    with living_on(run, first, second) as ranks:
        recorded(ranks)
        for memory, told in zip(ranks, facts, strict=True):
            log(memory, told)
        park(ranks[0], CUT_OFF, stages={})
    with living_on(run, second, first) as ranks:
        starts = started(begin(ranks, ((), ())))
        assert kinds(starts) == [RankKind.MOVED, RankKind.REPLAYS]
        assert [feed.neighbour for feed in starts[1].mine.feeds] == [0]
        assert [memory.brought_facts for memory in ranks] == facts
        for memory, start in zip(ranks, starts, strict=True):
            end_localized(memory, start)


def test_what_is_damaged_here_is_taken_from_another_twin(endpoint: str) -> None:
    """Of three replicas one was killed, and the state of another is damaged: both take the third one's."""
    run = uuid.uuid4().hex[:8]
    with living_on(run, *[endpoint] * 3) as ranks:
        recorded(ranks, parked=ranks[:2])
        damage(ranks[0])
    with living_on(run, *[endpoint] * 3) as ranks:
        starts = started(begin(ranks, ((1, 2), (0, 2), (0, 1))))
        assert kinds(starts) == [RankKind.COPIED, RankKind.PARKED, RankKind.COPIED]
        taken = [start.mine.pieces[0].sources[0].segment for start in starts]
        assert len({*taken}) == 1
        told = [text for _, text in events(endpoint, run, "parked_unusable")]
        assert any(
            text.startswith(f"planning without the parked state of iteration {CUT_OFF} (job~")
            and "is damaged" in text
            for text in told
        )


def test_what_is_damaged_on_the_other_node_is_taken_from_another_twin(
    two_nodes: tuple[str, str],
) -> None:
    run, (first, second) = uuid.uuid4().hex[:8], two_nodes
    with living_on(run, first, second) as ranks:
        recorded(ranks, parked=ranks)
        damage(ranks[1])
    with living_on(run, second, first) as ranks:
        starts = started(begin(ranks))
        assert kinds(starts) == [RankKind.MOVED, RankKind.COPIED]
        assert starts[1].mine.pieces[0].sources[0].segment.startswith(f"job~{run}~r0~")
        told = events(first, run, "parked_unusable")
        # The second time, unless its node had put it into quarantine by then.
        assert [level for level, _ in told] in (["warning"], ["warning", "error"])
        assert all("could not be brought here" in text for _, text in told)


def test_what_one_rank_cannot_reach_is_wanted_by_no_plan_of_this_start(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three replicas one was killed, and cannot have the state of the twin that its plan names;
    the ranks told each other so, and nobody heard: each plan wanted that state again until all
    ranks recovered together, though another twin had the same.
    """
    run = uuid.uuid4().hex[:8]
    with living_on(run, *[endpoint] * 3) as ranks:
        recorded(ranks, parked=ranks[1:])
    out_of_reach: list[str] = []
    read = ParkedCopy.read

    def reach(session: Any, piece: SnapshotToLoad, cards: Any) -> SnapshotImage:
        segment = piece.sources[0].segment
        out_of_reach[:] = out_of_reach or [segment]
        if segment in out_of_reach:
            raise DaemonUnavailable("its node is out of reach", operation="read parked state")
        return read(session, piece, cards)

    monkeypatch.setattr("ckptd.client.recovery.localized_recovery.ParkedCopy.read", reach)
    with living_on(run, *[endpoint] * 3) as ranks:
        starts = started(begin(ranks, ((1, 2), (0, 2), (0, 1))))
        assert sorted(kinds(starts)) == [RankKind.COPIED, RankKind.COPIED, RankKind.PARKED]
        taken = {start.mine.pieces[0].sources[0].segment for start in starts}
        assert len(taken) == 1
        assert taken != {*out_of_reach}


def test_what_is_out_of_reach_for_a_moment_is_wanted_once_more(
    two_nodes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon with the state was restarted, or slow. Planned without it, its rank took a peer's state and its own
    random state of before, or replayed.
    """
    run, (first, second) = uuid.uuid4().hex[:8], two_nodes
    with living_on(run, first, second) as ranks:
        recorded(ranks, parked=ranks)
    failed: list[str] = []
    read = ParkedCopy.read

    def reach(session: Any, piece: SnapshotToLoad, cards: Any) -> SnapshotImage:
        if not failed:
            failed.append(session.node_id)
            raise DaemonUnavailable("no holder is left", operation="fetch")
        return read(session, piece, cards)

    monkeypatch.setattr("ckptd.client.recovery.localized_recovery.ParkedCopy.read", reach)
    with living_on(run, second, first) as ranks:
        starts = started(begin(ranks))
        assert kinds(starts) == [RankKind.MOVED] * 2
        told = [*events(first, run, "parked_unusable"), *events(second, run, "parked_unusable")]
        assert [level for level, _ in told] == ["warning"]
        for memory, start in zip(ranks, starts, strict=True):
            end_localized(memory, start)


def test_a_copy_that_the_daemon_has_just_sealed_is_read(endpoint: str) -> None:
    """It holds the slot for a moment longer. Who took that for a copy that is gone replayed."""

    class Lends:
        node_id, segment_dir, run = "here", "", ("job", "run")

        def fetch_for_reading(self, *_: object) -> Future[SegmentInfo]:
            asked = Future[SegmentInfo]()
            asked.set_result(SegmentInfo(segment.path, 1, MIB, 2))
            return asked

        def drop(self, generation: int) -> None:
            assert generation == 1

    with attached(endpoint, uuid.uuid4().hex[:8]) as memory:
        park(memory, CUT_OFF)
        segment: Any = memory.parks.newest
        (record,) = parked_records(memory)
        assert segment.try_lock_slot(0)
        piece = SnapshotToLoad(record, (SnapshotCopy("elsewhere", Path(segment.path).name, 0),))
        copied = ParkedCopy.read(Lends(), piece, ())  # type: ignore[arg-type]
        assert copied.iteration == CUT_OFF
        segment.unlock_slot(0)


def test_where_all_that_was_parked_is_damaged_all_recover_together(endpoint: str) -> None:
    """At the first start, not at the next: the trial ends with the recovery of all ranks."""
    run = uuid.uuid4().hex[:8]
    with living_on(run, endpoint, endpoint) as ranks:
        recorded(ranks, parked=ranks)
        for memory in ranks:
            damage(memory)
    with living_on(run, endpoint, endpoint) as ranks:
        assert begin(ranks) == [None, None]
        found = outcomes([partial(recover_global, memory) for memory in ranks])
        assert [isinstance(one, tuple) for one in found] == [True, True]


def test_a_copied_image_has_its_own_buffers_whatever_is_looked_at_first() -> None:
    peer, own = image_of(1.0, {"who": "peer", "absent": ["p"]}), image_of(2.0, {"who": "own"})
    copied = CopiedImage(peer, own)  # type: ignore[arg-type]
    assert copied.tensor("buffer/mean").tolist() == [2.0]
    assert copied.tensor("w").tolist() == [1.0]
    assert copied.scalars() == {"who": "own", "absent": ["p"]}


def image_of(value: float, scalars: dict[str, Any]) -> SnapshotImage:
    packed = values.pack(scalars, "step scalars")
    entries = [
        TensorEntry("w", "F32", (1,)),
        TensorEntry("buffer/mean", "F32", (1,)),
        TensorEntry("ckptd.scalars", "U8", (len(packed),)),
    ]
    layout = ImageLayout.build(entries, identity={}, num_operators=1, anchors=1)
    memory = memoryview(mmap.mmap(-1, layout.image_len))
    layout.write_header(memory, iteration=1, previous=0, scalars_len=len(packed))
    at = layout.offset_of("ckptd.scalars")
    memory[at : at + len(packed)] = packed
    image = SnapshotImage(1, ImageView(memory), HostMemory(memory), 0)
    for name in ("w", "buffer/mean"):
        image.tensor(name).fill_(value)
    return image


@pytest.mark.parametrize("error", [TimeoutError, OSError, KeyError])
def test_whatever_goes_wrong_on_one_rank_all_recover_together(
    ranks: list[RankMemory], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """It would go wrong in the same way at each start. The recovery of all ranks together needs
    nothing of it.
    """

    def broken(*_: object) -> None:
        raise error("of no use")

    monkeypatch.setattr("ckptd.client.recovery.localized_recovery.ParkedCopy.read", broken)
    assert begin(ranks) == [None, None]
    assert [memory.hint for memory in ranks] == [0, 0]


@pytest.mark.parametrize("run", [1], indirect=True)
def test_where_schedules_would_differ_all_recover_together(ranks: list[RankMemory]) -> None:
    """The ranks went over to another window, and the last that rank 1 has is from before."""
    assert begin(ranks) == [None, None]


def test_stages_whose_shapes_are_unknown_run_with_their_neighbours_only(
    ranks: list[RankMemory],
) -> None:
    """They would rehearse, and ask neighbours that are not there; where all begin together, they may."""

    def can(rank: int, job: Collectives) -> list[bool]:
        procedure = localized_recovery._LocalizedProcedure(ranks[rank], job, (1 - rank,), 0)
        view = procedure.inventory(ExitStack())
        plan = procedure.plan(view)
        assert isinstance(plan, LocalizedPlan)
        return [can_retrieve(procedure, view, begun(plan, first)) for first in (CUT_OFF, CUT_OFF - 1)]

    def begun(plan: LocalizedPlan, first: int) -> LocalizedPlan:
        """The same plan, but that rank 1 begins with this iteration, and rank 0 where it was cut off."""
        starts = {0: CUT_OFF, 1: first}
        return replace(
            plan, per_rank={r: structs.replace(p, start=starts[r]) for r, p in plan.per_rank.items()}
        )

    def can_retrieve(procedure: Any, view: RunView, plan: LocalizedPlan) -> bool:
        with ExitStack() as undo:
            try:
                procedure.retrieve(view, plan, undo)
            except TryAgain:
                return False
        return True

    found = outcomes([lambda e, r=r: can(r, e) for r in range(2)])  # type: ignore[misc]
    assert found[0] == [True, False]


def test_a_start_that_fails_in_the_end_gives_back_what_it_had(
    ranks: list[RankMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The locks on neighbours' logs, say, in a process that goes on without us."""
    closed = list[FedLogs]()
    monkeypatch.setattr(FedLogs, "close", lambda feeds: closed.append(feeds))

    def refuse(*_: object) -> None:
        raise AttachRefused("stale_epoch", "the run was recovered again")

    monkeypatch.setattr(ranks[1].session, "join", refuse)
    assert [type(one) for one in begin(ranks)] == [DaemonUnavailable, AttachRefused]
    assert len(closed) == 2


def test_a_hint_does_not_outlive_what_was_parked(endpoint: str) -> None:
    """Else the next localized recovery, which may be right, would be the last attempt."""
    with living_on(uuid.uuid4().hex[:8], endpoint, endpoint) as memories:
        outcomes([partial(recover_global, memory) for memory in memories])
        memories[1].reserve(MIB, 4, window=2, num_operators=2, payload=payload(4))
        memories[1].leave_hint(HINT_APART)
        assert begin(memories) == [None, None]
        assert memories[1].hint == 0


def test_what_a_dead_trainer_parked_and_nobody_has_sealed_yet_is_waited_for(endpoint: str) -> None:
    with attached(endpoint, uuid.uuid4().hex[:8]) as memory:
        asked = memory.reserve_auxiliary("parked", MIB, 2, payload(4), window=2, num_operators=2)
        segment: Any = memory.add_auxiliary(asked.result(60))
        fill(segment, 0, CUT_OFF, anchors=3)
        memory.settle_filled(0.01)
        assert segment.header(0).state is SlotState.SEALED


def test_after_two_that_came_to_no_end_all_recover_together(endpoint: str, run: str) -> None:
    hints = []
    for _ in range(3):
        with living_on(run, endpoint, endpoint) as memories:
            found = begin(memories)
            hints.append([memory.hint for memory in memories])
    assert found == [None, None]
    assert hints == [[HINT_APART] * 2, [HINT_APART | HINT_APART_AGAIN] * 2, [0, 0]]


def test_what_another_run_has_parked_is_not_read(endpoint: str, ranks: list[RankMemory]) -> None:
    """Segments are named by nodes. This one lies here, and is whole, but the daemon would not have
    given it either.
    """
    with attached(endpoint, uuid.uuid4().hex[:8]) as other:
        park(other, CUT_OFF)
        segment = other.parks.newest
        assert segment is not None
        (record,) = parked_records(other)
    source = SnapshotCopy(ranks[1].session.node_id, Path(segment.path).name, 0)
    with pytest.raises(AttachRefused, match="no segment of"):
        ParkedCopy.read(ranks[1].session, SnapshotToLoad(record, (source,)), ())


def test_one_rank_has_nobody_to_be_apart_from(endpoint: str) -> None:
    with attached(endpoint, uuid.uuid4().hex[:8]) as memory:
        assert isinstance(begin_localized(memory, Collectives.alone(), ()), RunView)
