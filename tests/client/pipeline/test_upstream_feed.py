"""Logs of neighbours, read by a rank that runs apart: real daemons on loopback, true bytes."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.daemon_link.rank_memory import MemoryNeed, RankMemory
from ckptd.client.daemon_link.retrieval import Arrivals
from ckptd.client.identity import Identity
from ckptd.client.options import DaemonOptions
from ckptd.client.pipeline import upstream_feed
from ckptd.client.pipeline.log_reader import LogFile
from ckptd.client.pipeline.upstream_feed import FedLogs, ValueLogs
from ckptd.client.stats import Stats
from ckptd.core.recovery.localized_plan import Feed, RankKind, RankPlan
from ckptd.core.recovery.snapshot_tables import SnapshotCopy, SnapshotToLoad
from ckptd.core.slots.boundary import RecordKey, SentKind, parse_record_name
from ckptd.core.slots.segment_format import unpack_slot_header
from ckptd.core.slots.slots import SlotState
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.holdings import fetch_piece, header_record
from ckptd.memory.segment_file import open_segment
from ckptd.transport.messages import GetStatus, NodeCard, RunSeen, SeeRun, Status
from tests.ckptd.nodes import PATIENT_S, PORT, Net, Node
from tests.ckptd.running import eventually, fill
from tests.ckptd.snapshots import states_in

__all__ = ["job", "pair"]


pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
SENT = RecordKey(SentKind.ACTIVATION, 0, 0)
BYTES = 100_000


@dataclass(frozen=True)
class Job:
    """A run of its own, whose ranks are on the nodes that a test says."""

    run: str

    @contextlib.contextmanager
    def rank(self, node: Node, rank: int, *, job: str = "job") -> Iterator[RankMemory]:
        memory = RankMemory(
            Identity(job, self.run, rank, 4),
            DaemonOptions(endpoint=node.endpoint, timeout_s=20),
            MemoryNeed(0, "for a test"),
            topology="pp4",
            version="test",
        )
        try:
            yield memory
        finally:
            memory.close()

    def logged(self, node: Node) -> tuple[dict[int, SnapshotToLoad], NodeCard]:
        """What a node holds of rank 0's log, and how it is reached."""
        with node.client() as client:
            seen = client.ask(SeeRun("job", self.run), RunSeen)
        (held,) = seen.holdings[0].logs
        assert held.rank == 0
        pieces = {}
        for slot in held.slots:
            header = unpack_slot_header(slot.header)
            assert header is not None
            record = header_record(header, held.generation, slot.slot, b"")
            pieces[header.iteration] = SnapshotToLoad(
                record, (SnapshotCopy(node.name, held.name, slot.slot),)
            )
        return pieces, NodeCard(node.name, f"tcp://{node.address}:{PORT}")

    def file(self, node: Node) -> Path:
        """Where rank 0's log lies on a node."""
        return node.segment_dir / f"job~{self.run}~r0~g0.boundary"

    def copies(self, node: Node) -> list[Path]:
        """What was brought to a node to be read."""
        return sorted(node.segment_dir.glob(f"job~{self.run}~*.fetched"))


@pytest.fixture
def job() -> Job:
    return Job(uuid.uuid4().hex[:8])


@pytest.fixture(scope="module")
def pair() -> Iterator[Net]:
    """Two nodes that stay as they are."""
    with Net(2, peer_access="trusted", peer_deadline_s=PATIENT_S).up() as net:
        yield net


def sent_in(rank: int, iteration: int, size: int = BYTES) -> Tensor:
    """What a rank sends in an iteration."""
    random = torch.Generator().manual_seed(1000 * rank + iteration)
    return torch.randint(256, (size,), generator=random, dtype=torch.uint8)


def state_in(segment: MappedSegment | LogFile, index: int) -> SlotState | None:
    header = segment.header(index)
    return None if header is None else header.state


def log(memory: RankMemory, *iterations: int, size: int = BYTES) -> MappedSegment:
    """A log in which these iterations are sealed by the daemon."""
    rank, slot_bytes = memory.identity.rank, size + MIB
    asked = memory.reserve_auxiliary("log", slot_bytes, len(iterations), b"\x80")
    segment = memory.add_auxiliary(asked.result(60))
    for index, iteration in enumerate(iterations):
        data = sent_in(rank, iteration, size).numpy().tobytes()
        name = f"activation/{SENT.stage}/0/0/0"
        assert parse_record_name(name) == SENT
        fill(segment, index, iteration, anchors=0, tensors=((name, "U8", (size,), data),))  # type: ignore[arg-type]
        memory.session.filled(segment.generation, index, iteration)
        eventually(
            lambda i=index: state_in(segment, i) is SlotState.SEALED,  # type: ignore[misc]
            f"iteration {iteration} is sealed",
        )
    return segment


def also_on(node: Node, pieces: dict[int, SnapshotToLoad]) -> dict[int, SnapshotToLoad]:
    """The same pieces, with copies of the same file on this node as well, which come after the others."""
    return {
        i: SnapshotToLoad(
            piece.record,
            (*piece.sources, *(SnapshotCopy(node.name, s.segment, s.index) for s in piece.sources)),
        )
        for i, piece in pieces.items()
    }


def used(node: Node) -> int:
    with node.client() as client:
        return client.ask(GetStatus(), Status).used_bytes


def damage(path: Path, index: int) -> None:
    """Change a byte of what was sent in the iteration in this slot."""
    segment = open_segment(path)
    header = segment.header(index)
    assert header is not None
    segment.image(index, header)[header.image_len - 1] ^= 1
    segment.close()


@pytest.mark.parametrize("curve", [False, True])
def test_a_rank_reads_what_another_one_logged_on_a_node_whose_trainers_are_gone(
    job: Job, curve: bool
) -> None:
    """In batches: no more than two are here at a time, and none when it is through."""
    with Net(2, curve=curve, peer_access="trusted", peer_deadline_s=PATIENT_S).up() as net:
        with job.rank(net[0], 0) as sender:
            log(sender, *range(3, 10))
            card = sender.session.card
        pieces, _ = job.logged(net[0])
        assert sorted(pieces) == list(range(3, 10))
        with job.rank(net[1], 1) as reader:
            fed = FedLogs(reader.session, {0: pieces}, (card,), batch_bytes=250_000)
            for iteration in range(3, 10):
                found = fed(0, iteration)
                assert list(found) == [SENT]
                assert torch.equal(found[SENT], sent_in(0, iteration))
                assert torch.equal(fed(0, iteration)[SENT], found[SENT]), "as often as one likes"
                assert 1 <= len(job.copies(net[1])) <= 3, "two, and one that is just given back"
            with pytest.raises(KeyError, match="of iteration 3 is not available"):
                fed(0, 3)
            with pytest.raises(KeyError, match="rank 2 is not fed from logs; fed neighbours: 0"):
                fed(2, 5)
            fed.close()
            eventually(lambda: not job.copies(net[1]), "all copies are given back")
            assert used(net[1]) == 0
            assert (len(reader.logs), len(list(reader._segments))) == (0, 0)
        assert not net[1].saw("fetch_failed")


def test_what_is_read_ahead_is_given_back_when_recovery_ends_early(job: Job, pair: Net) -> None:
    with job.rank(pair[0], 0) as sender:
        log(sender, *range(4))
    pieces, card = job.logged(pair[0])
    with job.rank(pair[1], 1) as reader:
        fed = FedLogs(reader.session, {0: pieces}, (card,), batch_bytes=1)
        assert torch.equal(fed(0, 1)[SENT], sent_in(0, 1)), "the first is passed over"
        fed.close()
        fed.close()
        eventually(lambda: not job.copies(pair[1]), "nothing is left")
    with job.rank(pair[1], 1) as reader:
        fed = FedLogs(reader.session, {0: pieces}, (card,))
        assert torch.equal(fed(0, 2)[SENT], sent_in(0, 2))
        assert len(job.copies(pair[1])) == 1, "all fit into one"
    eventually(lambda: not job.copies(pair[1]), "they go with their reader, whatever it forgets")


def test_a_log_on_this_node_is_read_where_it_is_and_its_owner_passes_over_it(job: Job, pair: Net) -> None:
    """Its owner may be running again meanwhile, and needs slots."""
    with job.rank(pair[0], 0) as sender, job.rank(pair[0], 1) as reader:
        segment = log(sender, 3, 4, 5)
        pieces, card = job.logged(pair[0])
        before = used(pair[0])
        fed = FedLogs(reader.session, {0: pieces}, (card,))
        assert torch.equal(fed(0, 4)[SENT], sent_in(0, 4))
        free = [segment.try_lock_slot(index) for index in range(3)]
        assert free == [True, False, False], "3 is over, 4 and 5 are still held"
        fed.close()
        assert segment.try_lock_slot(1)
        assert segment.try_lock_slot(2)
        assert used(pair[0]) == before
        assert job.copies(pair[0]) == []
        assert not [e for e in pair[0].events("fetched") if e.run == job.run]


def test_a_forked_worker_does_not_keep_the_slots_of_others(job: Job, pair: Net) -> None:
    """It shares the locks and the memory of the process that it was forked from, and may live for
    the whole training.
    """
    with (
        job.rank(pair[0], 0) as sender,
        job.rank(pair[0], 1) as reader,
        job.rank(pair[1], 2) as away,
    ):
        segment = log(sender, 3)
        pieces, card = job.logged(pair[0])
        fed, brought = (
            FedLogs(reader.session, {0: pieces}),
            FedLogs(away.session, {0: pieces}, (card,)),
        )
        assert torch.equal(brought(0, 3)[SENT], sent_in(0, 3))
        ends, begun = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.write(begun[1], b"!")
            os.read(ends[0], 1)
            os._exit(0)
        try:
            os.read(begun[0], 1)
            mapped = [Path(f"/proc/{pid}/maps").read_text() for pid in (os.getpid(), child)]
            copy = f"~{job.run}~r2~c"  # others' copies, of earlier tests, may still be mapped
            assert [copy in text for text in mapped] == [True, False]
            assert not segment.try_lock_slot(0)
            fed.close()
            # The daemon, which has sent it, may be reading it a little longer.
            eventually(lambda: segment.try_lock_slot(0), "the slot is free")
            brought.close()
        finally:
            os.write(ends[1], b"!")
            os.waitpid(child, 0)


def test_what_is_overwritten_here_is_asked_of_other_nodes(job: Job, pair: Net) -> None:
    with job.rank(pair[0], 0) as sender:
        log(sender, 3, 4)
    pieces, card = job.logged(pair[0])
    elsewhere = also_on(pair[1], pieces)
    with job.rank(pair[1], 0) as other:  # as many slots, other iterations
        log(other, 7, 8)
    with job.rank(pair[1], 1) as reader:
        fed = FedLogs(reader.session, {0: elsewhere}, (card,))
        assert torch.equal(fed(0, 3)[SENT], sent_in(0, 3))
        fed.close()


def test_what_is_damaged_here_is_taken_from_another_copy(job: Job) -> None:
    """And quarantined by its own daemon: no plan names it again."""
    with Net(2, peer_access="trusted").up() as net:
        with job.rank(net[1], 0) as sender:
            log(sender, 3, 4)
        pieces, card = job.logged(net[1])
        net[0].kill()
        shutil.copy(job.file(net[1]), job.file(net[0]))
        net[0].launch()
        pieces = also_on(net[0], pieces)
        damage(job.file(net[0]), 0)
        with job.rank(net[0], 1) as reader:
            fed = FedLogs(reader.session, {0: pieces}, (card,))
            assert job.copies(net[0]) == [], "all of it is held here"
            assert torch.equal(fed(0, 3)[SENT], sent_in(0, 3))
            assert torch.equal(fed(0, 4)[SENT], sent_in(0, 4))
            fed.close()
        eventually(
            lambda: states_in(job.file(net[0]))[0] is SlotState.QUARANTINED,
            "it is quarantined",
        )
        assert net[0].saw("digest_mismatch", "the log of rank 0 of iteration 3 is damaged on this node")


@pytest.mark.parametrize("here", [False, True])
def test_what_is_damaged_in_the_only_copy_is_said_to_be_missing(job: Job, pair: Net, here: bool) -> None:
    with job.rank(pair[0], 0) as sender:
        log(sender, 3, 4)
    pieces, card = job.logged(pair[0])
    damage(job.file(pair[0]), 1)
    with job.rank(pair[0 if here else 1], 1) as reader:
        fed = FedLogs(reader.session, {0: pieces}, (card,), batch_bytes=1)
        assert torch.equal(fed(0, 3)[SENT], sent_in(0, 3)), "the others are not lost by it"
        with pytest.raises(DaemonUnavailable, match="iteration 4 could not be brought here"):
            fed(0, 4)
        fed.close()
    eventually(lambda: states_in(job.file(pair[0]))[1] is SlotState.QUARANTINED, "it is quarantined")


@pytest.mark.parametrize("second", [True, False])
def test_a_node_that_dies_while_it_delivers(job: Job, second: bool) -> None:
    """The other one that has it goes on; if there is none, that is said before long."""
    size = 12 * MIB
    with Net(3, proxied=True, peer_access="trusted").up() as net:
        with job.rank(net[0], 0) as sender:
            log(sender, 3, 4, size=size)
            cards = [sender.session.card]
        pieces, _ = job.logged(net[0])
        if second:
            net[2].kill()
            shutil.copy(job.file(net[0]), job.file(net[2]))
            net[2].launch()
            pieces = also_on(net[2], pieces)
            with job.rank(net[2], 3) as other:
                cards.append(other.session.card)
        seen = [_card_from(net, "n1", card) for card in cards]
        for node in (net[0], net[2]):
            net.path(net[1], node).bytes_per_s = 2 * MIB
        with job.rank(net[1], 1) as reader:
            fed = FedLogs(reader.session, {0: pieces}, tuple(seen))
            (batch,) = fed._feeds[0]._batches
            assert batch.info is not None
            number = batch.info.generation
            copy = LogFile(Path(batch.info.path))
            eventually(lambda: state_in(copy, 0) is SlotState.FILLING, "it begins")
            net[0].kill()
            net.path(net[1], net[2]).bytes_per_s = None
            if second:
                for iteration in (3, 4):
                    assert torch.equal(fed(0, iteration)[SENT], sent_in(0, iteration, size))
                assert reader.session.fetch_state(number).by_node["n2"] > 0
            else:
                with pytest.raises(DaemonUnavailable, match="could not be brought here"):
                    fed(0, 3)
            fed.close()


def test_a_daemon_that_is_restarted_is_asked_again(job: Job) -> None:
    """What it had brought stays readable; what was on its way it has forgotten."""
    size = 12 * MIB
    with Net(2, proxied=True, peer_access="trusted").up() as net:
        with job.rank(net[0], 0) as sender:
            log(sender, *range(3, 7), size=size)
            card = _card_from(net, "n1", sender.session.card)
        pieces, _ = job.logged(net[0])
        net.path(net[1], net[0]).bytes_per_s = 2 * MIB
        with job.rank(net[1], 1) as reader, ThreadPoolExecutor(1) as pool:
            fed = FedLogs(reader.session, {0: pieces}, (card,), batch_bytes=2 * size + MIB)
            (batch,) = fed._feeds[0]._batches
            assert batch.info is not None
            copy = LogFile(Path(batch.info.path))
            eventually(lambda: state_in(copy, 0) is SlotState.FILLING, "it is on its way")
            found = pool.submit(fed, 0, 3)
            net[1].kill()
            net[1].launch()
            net.path(net[1], net[0]).bytes_per_s = None
            assert torch.equal(found.result(60)[SENT], sent_in(0, 3, size))
            (batch,) = [b for b in fed._feeds[0]._batches if 4 in b.iterations]
            assert batch.info is not None
            copy = LogFile(Path(batch.info.path))
            eventually(lambda: state_in(copy, 1) is SlotState.SEALED, "the next one is here")
            net[1].kill()
            assert torch.equal(fed(0, 4)[SENT], sent_in(0, 4, size))
            net[1].launch()
            for iteration in (5, 6):
                assert torch.equal(fed(0, iteration)[SENT], sent_in(0, iteration, size))
            fed.close()


def _card_from(net: Net, name: str, card: NodeCard) -> NodeCard:
    return msgspec.convert(net.seen_from(name, msgspec.to_builtins(card)), NodeCard)


def test_where_there_is_little_memory_batches_are_small_and_what_does_not_fit_is_refused(
    job: Job,
) -> None:
    size = 5 * MIB
    with Net(2, of={"n1": {"memory": "10MiB"}}, peer_access="trusted").up() as net:
        with job.rank(net[0], 0) as sender:
            log(sender, *range(3, 9), size=size)
        pieces, card = job.logged(net[0])
        with job.rank(net[1], 1) as reader:
            fed = FedLogs(reader.session, {0: pieces}, (card,))
            for iteration in range(3, 9):
                assert torch.equal(fed(0, iteration)[SENT], sent_in(0, iteration, size))
            fed.close()
            eventually(lambda: used(net[1]) == 0, "all is given back")
            log(reader, 3, size=size)
            with pytest.raises(AttachRefused, match="the quota is 10 MiB") as refused:
                FedLogs(reader.session, {0: pieces}, (card,))
            assert refused.value.code == "quota"
            assert job.copies(net[1]) == []


def test_a_rank_of_another_job_gets_nothing(job: Job, pair: Net) -> None:
    """Neither by the name that the log has, nor by the name that it would have in its own job."""
    with job.rank(pair[0], 0) as sender:
        log(sender, 3)
    pieces, card = job.logged(pair[0])
    (source,) = pieces[3].sources
    renamed = SnapshotCopy(source.node, source.segment.replace("job~", "spy~", 1), source.index)
    for node in (pair[0], pair[1]):
        with job.rank(node, 1, job="spy") as spy:
            for at, code in ((source, "bad_message"), (renamed, "not_found")):
                stolen = {0: {3: SnapshotToLoad(pieces[3].record, (at,))}}
                with pytest.raises(AttachRefused) as refused:
                    FedLogs(spy.session, stolen, (card,))
                assert refused.value.code == code


def test_a_copy_can_be_mapped_as_a_segment_whose_images_arrive(job: Job, pair: Net) -> None:
    """As a rank does that takes its tensors from what a peer has parked."""
    with job.rank(pair[0], 0) as sender:
        log(sender, 3)
    pieces, card = job.logged(pair[0])
    with job.rank(pair[1], 1) as reader:
        session, asked_s = reader.session, time.perf_counter()
        wanted = (fetch_piece(pieces[3], sealed_at_ns=time.time_ns()),)
        info = session.fetch_for_reading(0, "log", wanted, (card,)).result(60)
        segment = MappedSegment(info.path, info.generation)
        assert segment.descriptor.rank == 0
        arrivals = Arrivals(session, segment, Stats(), asked_s=asked_s)
        view = arrivals.image(0, pieces[3].record).view
        name = f"activation/{SENT.stage}/0/0/0"
        assert bytes(view.data(name)) == sent_in(0, 3).numpy().tobytes()
        segment.close()
        session.drop(info.generation)
        eventually(lambda: not job.copies(pair[1]), "it is given back")


def test_a_log_that_cannot_be_opened_here_is_brought_by_the_daemon(
    job: Job,
    pair: Net,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container may see other folders than its daemon, and only what it is given."""
    with job.rank(pair[0], 0) as sender, job.rank(pair[0], 1) as reader:
        log(sender, 3)
        pieces, _ = job.logged(pair[0])
        monkeypatch.setattr(reader.session, "segment_dir", "/nowhere")
        fed = FedLogs(reader.session, {0: pieces})
        assert torch.equal(fed(0, 3)[SENT], sent_in(0, 3))
        assert len(job.copies(pair[0])) == 1
        assert not upstream_feed._HELD
        fed.close()


def test_the_log_of_a_rank_that_is_no_neighbour_is_brought_when_it_is_wanted(job: Job, pair: Net) -> None:
    with job.rank(pair[0], 0) as sender:
        log(sender, 7, 8)
        card = sender.session.card
    pieces, _ = job.logged(pair[0])
    feeds = (Feed(0, 7, 8, (pieces[7],)),)
    values = (Feed(0, 8, 9, (pieces[8],)),)
    mine = RankPlan(RankKind.PARKED, 7, 7, (), feeds, values)
    with job.rank(pair[1], 1) as reader:
        fed = FedLogs(reader.session, mine.logs, (card,))
        logs = ValueLogs(reader.session, mine, fed, (card,))
        assert torch.equal(logs(7)[SENT], sent_in(0, 7)), "as it is fed"
        assert len(job.copies(pair[1])) == 1, "nothing more was asked for"
        for _ in range(2):
            assert torch.equal(logs(8)[SENT], sent_in(0, 8))
        assert len(job.copies(pair[1])) == 2
        assert logs(9) == {}
        logs.close()
        fed.close()
        eventually(lambda: not job.copies(pair[1]), "all copies are given back")
