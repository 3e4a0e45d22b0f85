"""One rank's replication as its shell performs it: what a peer granted is used or given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest

from ckptd.config.settings import DaemonConfig
from ckptd.core.replication.replicator import Replicator
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import SlotHeader, slot_lock_byte, slot_view
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.memory.slot_digests import Vouched
from ckptd.node_context import NodeContext
from ckptd.peers.peer_link import PeerLink
from ckptd.peers.sender import RankReplication, SnapshotRing
from ckptd.recompute.gradient_puts import GradientOffer
from ckptd.transport import peer_messages as p
from ckptd.transport.verbs import Completion, Done, Fault
from tests.ckptd.memory.fresh import put_header
from tests.ckptd.recomputed import step_of
from tests.ckptd.running import descriptor
from tests.ckptd.snapshots import snapshot_of

MIB = 1 << 20
KEY = RankKey("job", "run", 0)
GRANT = p.SlotGranted(77, 1, bytes(16), 1 << 20)


@dataclass
class Asked:
    message: p.PeerMessage
    done: Callable[[Any], None]
    failed: Callable[[str, str], None]


@dataclass
class Put:
    """A transfer that ends when the test says so."""

    done: Done
    offset: int = 0
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    def end(self, fault: Fault | None = None) -> None:
        self.done(Completion(fault, "", 0, 0, 0.0))


@dataclass
class Link:
    """A peer that answers when the test says so."""

    boot_id: str = "b1"
    asked: list[Asked] = field(default_factory=list)
    told: list[p.PeerMessage] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)

    def ask(
        self,
        message: p.PeerMessage,
        expect: type,
        done: Callable[[Any], None],
        failed: Callable[[str, str], None],
        *,
        timeout_s: float = 10.0,
    ) -> None:
        self.asked.append(Asked(message, done, failed))

    def tell(self, message: p.PeerMessage) -> None:
        self.told.append(message)

    def put(
        self, source: memoryview, target: object, *, offset: int = 0, deadline_s: float, done: Done
    ) -> Put:
        self.puts.append(Put(done, offset))
        return self.puts[-1]

    @property
    def aborted(self) -> list[int]:
        return [m.ticket for m in self.told if isinstance(m, p.AbortSlot)]


DIGEST = "blake3:" + 64 * "a"


@dataclass
class Vouching:
    """Makes digests at once, or when the test says so."""

    at_once: bool = True
    waiting: list[Vouched] = field(default_factory=list)

    def want(self, segment: Segment, index: int, header: SlotHeader, done: Vouched) -> None:
        if self.at_once:
            done(DIGEST, "")
        else:
            self.waiting.append(done)


@dataclass
class Sender:
    store: SegmentStore
    segment: Segment
    link: Link
    rank: RankReplication
    vouching: Vouching
    events: EventLog

    def until_begin(self) -> Asked:
        self.rank.set_targets(["away"])
        self.rank.changed()
        opening = self.link.asked[-1]
        assert isinstance(opening.message, p.OpenReplica)
        opening.done(p.ReplicaOpened(5, ()))
        beginning = self.link.asked[-1]
        assert isinstance(beginning.message, p.BeginSlot)
        return beginning

    def until_put(self) -> Put:
        self.until_begin().done(GRANT)
        return self.link.puts[-1]

    def until_seal(self) -> Asked:
        self.until_put().end()
        sealing = self.link.asked[-1]
        assert isinstance(sealing.message, p.SealSlot)
        return sealing

    @property
    def holds_slot(self) -> bool:
        return locks.is_locked(self.segment.fd, slot_lock_byte(0), exclusive=True)


class Standing:
    """A run of epoch 1 that agreed on nothing yet."""

    def joined(self) -> tuple[int, int, int]:
        return 1, -1, 3

    def promised(self) -> tuple[int, int, int, int]:
        return -1, -1, 3, 0

    def progressed(self, rank: int) -> None:
        """Nobody is told."""


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    """One sealed snapshot, to be sent to one target."""
    store = SegmentStore(tmp_path, 40 * MIB, "here", mlock="off", hugepages="off")
    told = msgspec.structs.replace(
        descriptor(world_size=2, topology="dp2"),
        node_id="here",
        created_at_ns=1,
        window=1,
        num_operators=1,
    )
    segment = store.create(told, 3, MIB)
    snapshot = snapshot_of(4)
    segment.image(0, snapshot.header)[:] = snapshot.image
    put_header(segment.buffer, segment.geometry, 0, snapshot.header)
    link, vouching, events = Link(), Vouching(), EventLog(100)
    rank = RankReplication(
        KEY,
        Replicator(),
        SnapshotRing(store, KEY),
        NodeContext(DaemonConfig(peer_deadline_s=5.0), store, events, Mock(), clock=lambda: 100.0),
        Standing(),
        link=lambda node: cast("PeerLink", link),
        vouch=vouching.want,
    )
    yield Sender(store, segment, link, rank, vouching, events)
    rank.close()


def test_a_replica_is_asked_for_with_the_span_and_our_boot(sender: Sender) -> None:
    sender.until_begin()
    opening = sender.link.asked[0].message
    assert isinstance(opening, p.OpenReplica)
    assert (opening.span, opening.boot_id, opening.num_slots) == (3, "b1", 3)


def test_closing_gives_back_the_slot_that_is_being_filled(sender: Sender) -> None:
    put = sender.until_put()
    sender.rank.close()
    assert sender.link.aborted == [77]
    assert put.cancelled
    assert sender.holds_slot, "it may still be read"
    put.end(Fault.CANCELLED)
    assert not sender.holds_slot


def test_a_grant_that_comes_after_the_end_is_given_back(sender: Sender) -> None:
    beginning = sender.until_begin()
    sender.rank.close()
    assert sender.link.aborted == []
    assert not sender.holds_slot
    beginning.done(GRANT)
    assert sender.link.aborted == [77]
    assert not sender.link.puts


def test_closing_while_the_peer_verifies_gives_back_what_it_may_not_have_heard_of(
    sender: Sender,
) -> None:
    sender.until_seal()
    sender.rank.close()
    assert sender.link.aborted == [77]


def test_a_slot_whose_seal_is_not_answered_is_given_back(sender: Sender) -> None:
    sender.until_seal().failed("deadline", "no answer: deadline")
    assert sender.link.aborted == [77]


def test_what_was_sealed_is_not_aborted(sender: Sender) -> None:
    sender.until_seal().done(p.PeerDone())
    sender.rank.close()
    assert sender.link.aborted == []


def test_a_generation_that_its_trainer_gave_back_is_not_sent_any_more(sender: Sender) -> None:
    """Also if it was the only one."""
    put = sender.until_put()
    sender.store.remove(sender.segment)
    sender.rank.changed()
    assert put.cancelled
    assert sender.link.aborted == [77]
    put.end(Fault.CANCELLED)
    asked = len(sender.link.asked)
    sender.rank.changed()
    assert len(sender.link.asked) == asked, "there is nothing to send"


def test_the_digest_is_made_while_the_image_travels_and_goes_with_the_seal(sender: Sender) -> None:
    """Neither waits for the other, and the slot stays as it is until both are over."""
    sender.vouching.at_once = False
    put = sender.until_put()
    (vouched,) = sender.vouching.waiting
    put.end()
    assert not any(isinstance(a.message, p.SealSlot) for a in sender.link.asked)
    assert sender.holds_slot
    vouched(DIGEST, "")
    sealing = sender.link.asked[-1].message
    assert sealing == p.SealSlot(77, DIGEST)
    assert not sender.holds_slot


def test_the_core_is_told_which_boot_of_a_peer_has_answered(sender: Sender) -> None:
    """What another boot told does not count then; see `ckptd.core.replication.replicator`."""
    sender.rank.set_targets(["away"])
    sender.rank.changed()
    sender.link.asked[-1].done(p.ReplicaOpened(5, (), "boot 2"))
    (state,) = sender.rank.core.states(now_s=100.0)
    assert state.boot_id == "boot 2"


def test_a_put_that_fails_does_not_wait_for_its_digest(sender: Sender) -> None:
    sender.vouching.at_once = False
    put = sender.until_put()
    put.end(Fault.DEADLINE)
    assert sender.link.aborted == [77]
    assert not sender.holds_slot
    sender.vouching.waiting[0](DIGEST, "")
    assert not any(isinstance(a.message, p.SealSlot) for a in sender.link.asked)


def test_what_this_node_cannot_vouch_for_is_not_sealed_elsewhere(sender: Sender) -> None:
    """Its own copy does not match its digests: the slot that was granted is given back, and the
    snapshot is suspected as after a peer's refusals.
    """
    sender.vouching.at_once = False
    put = sender.until_put()
    put.end()
    sender.vouching.waiting[0]("", "iteration 4 does not match")
    assert sender.link.aborted == [77]
    assert not any(isinstance(a.message, p.SealSlot) for a in sender.link.asked)
    (state,) = sender.rank.core.states(now_s=100.0)
    assert "digest: iteration 4 does not match" in state.reason


# -- gradients instead of images (docs/recompute.md) -----------------------------------------------


@pytest.fixture
def with_gradients(sender: Sender) -> Sender:
    """The same with a snapshot that has gradients behind its image."""
    step, segment = step_of("AdamW", lr=3e-3), sender.segment
    slot_view(segment.buffer, segment.geometry, 0)[:] = step.slot
    put_header(segment.buffer, segment.geometry, 0, step.after.header)
    return sender


def until_seal_of_gradients(sender: Sender) -> Asked:
    beginning = sender.until_begin()
    assert isinstance(beginning.message, p.BeginSlot)
    assert beginning.message.base == 7
    assert beginning.message.gradient_bytes > 0
    beginning.done(msgspec.structs.replace(GRANT, recomputes=True))
    ended = 0
    while ended < len(sender.link.puts):
        sender.link.puts[ended].end()
        ended += 1
    assert min(put.offset for put in sender.link.puts) > 0, "not the image, which begins at 0"
    return sender.link.asked[-1]


def test_a_peer_that_computes_gets_the_gradients(with_gradients: Sender) -> None:
    sealing = until_seal_of_gradients(with_gradients)
    assert sealing.message == p.SealSlot(77, DIGEST, recompute=True)
    sealing.done(p.PeerDone())
    assert with_gradients.events.counters["gradient_puts"] == 1
    assert with_gradients.events.counters["gradient_put_bytes"] > 0
    assert with_gradients.link.aborted == []


def test_a_peer_that_cannot_says_why_and_gets_the_image(with_gradients: Sender) -> None:
    with_gradients.until_begin().done(msgspec.structs.replace(GRANT, why_whole="no torch here"))
    (put,) = with_gradients.link.puts
    assert put.offset == 0
    put.end()
    assert with_gradients.link.asked[-1].message == p.SealSlot(77, DIGEST)
    (event,) = with_gradients.events.page(0, 10).events
    assert event.kind == "gradients_declined"
    assert (
        "away does not compute iteration 8 from gradients, so it goes whole: no torch here" in event.message
    )


def test_a_snapshot_that_could_not_be_computed_goes_whole(with_gradients: Sender) -> None:
    until_seal_of_gradients(with_gradients).failed(
        "recompute", "computed with other bits than the sender's: x"
    )
    assert with_gradients.link.aborted == [77]
    again = with_gradients.link.asked[-1]
    assert isinstance(again.message, p.BeginSlot)
    assert (again.message.base, again.message.gradient_bytes) == (-1, 0)
    again.done(GRANT)
    assert with_gradients.link.puts[-1].offset == 0


def test_a_peer_that_computes_too_slowly_gets_the_image(with_gradients: Sender) -> None:
    """Its answer is not "recompute" but none in time; offered again and again, nothing would ever arrive."""
    until_seal_of_gradients(with_gradients).failed("deadline", "no answer: deadline")
    (event,) = (e for e in with_gradients.events.page(0, 10).events if e.kind == "gradients_declined")
    assert "no answer" in event.message
    with_gradients.rank.peer_restarted("away")
    with_gradients.link.asked[-1].done(p.ReplicaOpened(6, ()))
    again = with_gradients.link.asked[-1].message
    assert isinstance(again, p.BeginSlot)
    assert (again.base, again.gradient_bytes) == (-1, 0)


def test_gradients_that_gain_nothing_are_not_put(
    with_gradients: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is known when they are packed, after the peer was asked."""
    monkeypatch.setattr(GradientOffer, "pieces", ())
    with_gradients.until_begin().done(msgspec.structs.replace(GRANT, recomputes=True))
    (put,) = with_gradients.link.puts
    assert put.offset == 0
    put.end()
    assert with_gradients.link.asked[-1].message == p.SealSlot(77, DIGEST)
