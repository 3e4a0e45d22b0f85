"""Logs of neighbours, read by a rank that runs apart: real daemons on loopback, true bytes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from ckptd.client import fed_logs
from ckptd.client.fed_logs import FedLogs
from ckptd.client.identity import Identity
from ckptd.client.memory import RankMemory
from ckptd.client.segment import MappedSegment
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.memory.boundary import RecordKey, SentKind, parse_record_name
from ckptd.memory.ring import SlotState
from ckptd.memory.segment_format import unpack_slot_header
from ckptd.memory.segments import open_segment
from ckptd.recovery.holdings import header_record
from ckptd.recovery.plan import Piece, Source
from ckptd.transport.messages import GetStatus, NodeCard, RunSeen, SeeRun, Status
from tests.ckptd.nodes import Net, Node
from tests.ckptd.running import eventually, fill, state_of
from tests.ckptd.snapshots import states_in

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
SENT = RecordKey(SentKind.ACTIVATION, 0, 0)
BYTES = 100_000


@contextlib.contextmanager
def rank_of(node: Node, rank: int, *, job: str = "job", run: str = "run") -> Iterator[RankMemory]:
    memory = RankMemory(
        Identity(job, run, rank, 4),
        lambda: node.endpoint,
        needed_bytes=0,
        needed_text="for a test",
        topology="pp4",
        version="test",
        timeout_s=20,
    )
    try:
        yield memory
    finally:
        memory.close()


def sent_in(rank: int, iteration: int, size: int = BYTES) -> Tensor:
    """What a rank sends in an iteration."""
    random = torch.Generator().manual_seed(1000 * rank + iteration)
    return torch.randint(256, (size,), generator=random, dtype=torch.uint8)


def log(memory: RankMemory, *iterations: int, size: int = BYTES) -> MappedSegment:
    """A log in which these iterations are sealed by the daemon."""
    rank, slot_bytes = memory.identity.rank, size + MIB
    segment = memory.add_log(memory.reserve_log(slot_bytes, len(iterations), b"\x80").result(60))
    for index, iteration in enumerate(iterations):
        data = sent_in(rank, iteration, size).numpy().tobytes()
        name = f"activation/{SENT.stage}/0/0/0"
        assert parse_record_name(name) == SENT
        fill(segment, index, iteration, anchors=0, tensors=((name, "U8", (size,), data),))  # type: ignore[arg-type]
        memory.session.filled(segment.generation, index, iteration)
        eventually(
            lambda i=index: state_of(segment, i) is SlotState.SEALED,  # type: ignore[misc, arg-type]
            f"iteration {iteration} is sealed",
        )
    return segment


def logged(node: Node, *, rank: int = 0) -> tuple[dict[int, Piece], NodeCard]:
    """What a node holds of a rank's log, and how it is reached."""
    with node.client() as client:
        seen = client.ask(SeeRun("job", "run"), RunSeen)
        card = NodeCard(node.name, f"tcp://{node.address}:29471")
    (held,) = [segment for segment in seen.holdings[0].logs if segment.rank == rank]
    pieces = {}
    for slot in held.slots:
        header = unpack_slot_header(slot.header)
        assert header is not None
        record = header_record(header, held.generation, slot.slot, b"")
        pieces[header.iteration] = Piece(record, (Source(node.name, held.name, slot.slot),))
    return pieces, card


def also_on(node: Node, pieces: dict[int, Piece]) -> dict[int, Piece]:
    """The same pieces, with copies of the same file on this node as well, which come after the others."""
    return {
        i: Piece(
            piece.record,
            (*piece.sources, *(Source(node.name, s.segment, s.index) for s in piece.sources)),
        )
        for i, piece in pieces.items()
    }


def copies(node: Node) -> list[Path]:
    return sorted(node.segment_dir.glob("*.fetched"))


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
    curve: bool,
) -> None:
    """In batches: no more than two are here at a time, and none when it is through."""
    with Net(2, curve=curve).up() as net:
        with rank_of(net[0], 0) as sender:
            log(sender, *range(3, 10))
            card = sender.session.card
        pieces, _ = logged(net[0])
        assert sorted(pieces) == list(range(3, 10))
        with rank_of(net[1], 1) as reader:
            fed = FedLogs(reader.session, {0: pieces}, (card,), batch_bytes=250_000)
            for iteration in range(3, 10):
                found = fed(0, iteration)
                assert list(found) == [SENT]
                assert torch.equal(found[SENT], sent_in(0, iteration))
                assert torch.equal(fed(0, iteration)[SENT], found[SENT]), "as often as one likes"
                assert 1 <= len(copies(net[1])) <= 3, "two, and one that is just given back"
            with pytest.raises(KeyError, match="iteration 3 is not fed"):
                fed(0, 3)
            with pytest.raises(KeyError, match="nothing is fed from rank 2; neighbours are: 0"):
                fed(2, 5)
            fed.close()
            eventually(lambda: not copies(net[1]), "all copies are given back")
            assert used(net[1]) == 0
            assert (len(reader.logs), len(list(reader._segments))) == (0, 0)
        assert not net[1].saw("fetch_failed")


def test_what_is_read_ahead_is_given_back_when_recovery_ends_early() -> None:
    with Net(2).up() as net:
        with rank_of(net[0], 0) as sender:
            log(sender, *range(4))
        pieces, card = logged(net[0])
        with rank_of(net[1], 1) as reader:
            fed = FedLogs(reader.session, {0: pieces}, (card,), batch_bytes=1)
            assert torch.equal(fed(0, 1)[SENT], sent_in(0, 1)), "the first is passed over"
            fed.close()
            fed.close()
            eventually(lambda: not copies(net[1]) and used(net[1]) == 0, "nothing is left")
        with rank_of(net[1], 1) as reader:
            fed = FedLogs(reader.session, {0: pieces}, (card,))
            assert torch.equal(fed(0, 2)[SENT], sent_in(0, 2))
            assert len(copies(net[1])) == 1, "all fit into one"
        eventually(lambda: not copies(net[1]), "they go with their reader, whatever it forgets")


def test_a_log_on_this_node_is_read_where_it_is_and_its_owner_passes_over_it() -> None:
    """Its owner may be running again meanwhile, and needs slots."""
    with Net(1).up() as net, rank_of(net[0], 0) as sender, rank_of(net[0], 1) as reader:
        segment = log(sender, 3, 4, 5)
        pieces, card = logged(net[0])
        before = used(net[0])
        fed = FedLogs(reader.session, {0: pieces}, (card,))
        assert torch.equal(fed(0, 4)[SENT], sent_in(0, 4))
        free = [segment.try_lock_slot(index) for index in range(3)]
        assert free == [True, False, False], "3 is over, 4 and 5 are still held"
        fed.close()
        assert segment.try_lock_slot(1)
        assert segment.try_lock_slot(2)
        assert used(net[0]) == before
        assert copies(net[0]) == []
        assert not net[0].events("fetched")


def test_a_forked_worker_does_not_keep_the_slots_of_others() -> None:
    """It shares the locks of the process that it was forked from, and may live for the whole training."""
    with Net(1).up() as net, rank_of(net[0], 0) as sender, rank_of(net[0], 1) as reader:
        segment = log(sender, 3)
        pieces, _ = logged(net[0])
        fed = FedLogs(reader.session, {0: pieces})
        ends, begun = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.write(begun[1], b"!")
            os.read(ends[0], 1)
            os._exit(0)
        try:
            os.read(begun[0], 1)
            assert not segment.try_lock_slot(0)
            fed.close()
            assert segment.try_lock_slot(0)
        finally:
            os.write(ends[1], b"!")
            os.waitpid(child, 0)


def test_what_is_overwritten_here_is_asked_of_other_nodes() -> None:
    with Net(2).up() as net:
        with rank_of(net[0], 0) as sender:
            log(sender, 3, 4)
        pieces, card = logged(net[0])
        elsewhere = also_on(net[1], pieces)
        with rank_of(net[1], 0) as other:  # as many slots, other iterations
            log(other, 7, 8)
        with rank_of(net[1], 1) as reader:
            fed = FedLogs(reader.session, {0: elsewhere}, (card,))
            assert torch.equal(fed(0, 3)[SENT], sent_in(0, 3))
            fed.close()


def test_what_is_damaged_here_is_taken_from_another_copy() -> None:
    """And quarantined by its own daemon: no plan names it again."""
    with Net(2).up() as net:
        with rank_of(net[1], 0) as sender:
            log(sender, 3, 4)
        pieces, card = logged(net[1])
        (path,) = net[1].segment_dir.glob("*.boundary")
        name = path.name
        net[0].kill()
        shutil.copy(path, net[0].segment_dir / name)
        net[0].launch()
        pieces = also_on(net[0], pieces)
        damage(net[0].segment_dir / name, 0)
        with rank_of(net[0], 1) as reader:
            fed = FedLogs(reader.session, {0: pieces}, (card,))
            assert copies(net[0]) == [], "all of it is held here"
            assert torch.equal(fed(0, 3)[SENT], sent_in(0, 3))
            assert torch.equal(fed(0, 4)[SENT], sent_in(0, 4))
            fed.close()
        eventually(
            lambda: states_in(net[0].segment_dir / name)[0] is SlotState.QUARANTINED,
            "it is quarantined",
        )
        assert net[0].saw("digest_mismatch", "what rank 0 sent in iteration 3 is damaged here")


@pytest.mark.parametrize("here", [False, True])
def test_what_is_damaged_in_the_only_copy_is_said_to_be_missing(here: bool) -> None:
    with Net(2).up() as net:
        with rank_of(net[0], 0) as sender:
            log(sender, 3, 4)
        pieces, card = logged(net[0])
        (path,) = net[0].segment_dir.glob("*.boundary")
        damage(path, 1)
        with rank_of(net[0 if here else 1], 1) as reader:
            fed = FedLogs(reader.session, {0: pieces}, (card,), batch_bytes=1)
            assert torch.equal(fed(0, 3)[SENT], sent_in(0, 3)), "the others are not lost by it"
            with pytest.raises(DaemonUnavailable, match="iteration 4 could not be brought here"):
                fed(0, 4)
            fed.close()
        eventually(lambda: states_in(path)[1] is SlotState.QUARANTINED, "it is quarantined")


@pytest.mark.parametrize("second", [True, False])
def test_a_node_that_dies_while_it_delivers(second: bool) -> None:
    """The other one that has it goes on; if there is none, that is said before long."""
    size = 12 * MIB
    with Net(3, proxied=True).up() as net:
        with rank_of(net[0], 0) as sender:
            log(sender, 3, 4, size=size)
            cards = [sender.session.card]
        pieces, _ = logged(net[0])
        (path,) = net[0].segment_dir.glob("*.boundary")
        if second:
            net[2].kill()
            shutil.copy(path, net[2].segment_dir / path.name)
            net[2].launch()
            pieces = also_on(net[2], pieces)
            with rank_of(net[2], 3) as other:
                cards.append(other.session.card)
        seen = [_card_from(net, "n1", card) for card in cards]
        for node in (net[0], net[2]):
            net.path(net[1], node).limit(4 * MIB)
        with rank_of(net[1], 1) as reader:
            fed = FedLogs(reader.session, {0: pieces}, tuple(seen))
            eventually(
                lambda: any(segment.stat().st_blocks for segment in copies(net[1])), "it begins"
            )
            net[0].kill()
            net.path(net[1], net[2]).limit(0)
            if second:
                for iteration in (3, 4):
                    assert torch.equal(fed(0, iteration)[SENT], sent_in(0, iteration, size))
            else:
                with pytest.raises(DaemonUnavailable, match="could not be brought here"):
                    fed(0, 3)
            fed.close()


def _card_from(net: Net, name: str, card: NodeCard) -> NodeCard:
    return msgspec.convert(net.seen_from(name, msgspec.to_builtins(card)), NodeCard)


def test_where_there_is_little_memory_batches_are_small_and_what_does_not_fit_is_refused() -> None:
    size = 5 * MIB
    with Net(2, of={"n1": {"memory": "18MiB"}}).up() as net:
        with rank_of(net[0], 0) as sender:
            log(sender, *range(3, 9), size=size)
        pieces, card = logged(net[0])
        with rank_of(net[1], 1) as reader:
            fed = FedLogs(reader.session, {0: pieces}, (card,))
            for iteration in range(3, 9):
                assert torch.equal(fed(0, iteration)[SENT], sent_in(0, iteration, size))
            fed.close()
            eventually(lambda: used(net[1]) == 0, "all is given back")
            log(reader, 3, size=12 * MIB)
            with pytest.raises(AttachRefused, match="the quota is 18 MiB") as refused:
                FedLogs(reader.session, {0: pieces}, (card,))
            assert refused.value.code == "quota"
            assert copies(net[1]) == []


def test_a_rank_of_another_job_gets_nothing() -> None:
    """Neither by the name that the log has, nor by the name that it would have in its own job."""
    with Net(2).up() as net:
        with rank_of(net[0], 0) as sender:
            log(sender, 3)
        pieces, card = logged(net[0])
        (source,) = pieces[3].sources
        renamed = Source(source.node, source.segment.replace("job~", "spy~", 1), source.index)
        for node in (net[0], net[1]):
            with rank_of(node, 1, job="spy") as spy:
                for at, code in ((source, "bad_message"), (renamed, "not_found")):
                    stolen = {0: {3: Piece(pieces[3].record, (at,))}}
                    with pytest.raises(AttachRefused) as refused:
                        FedLogs(spy.session, stolen, (card,))
                    assert refused.value.code == code


def test_a_log_that_cannot_be_opened_here_is_brought_by_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container may see other folders than its daemon, and only what it is given."""
    with Net(1).up() as net, rank_of(net[0], 0) as sender, rank_of(net[0], 1) as reader:
        log(sender, 3)
        pieces, _ = logged(net[0])
        monkeypatch.setattr(reader.session, "segment_dir", "/nowhere")
        fed = FedLogs(reader.session, {0: pieces})
        assert torch.equal(fed(0, 3)[SENT], sent_in(0, 3))
        assert len(copies(net[0])) == 1
        assert not fed_logs._HELD
        fed.close()
