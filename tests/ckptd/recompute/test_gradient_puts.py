"""What a sender offers, to whom, and when it gives up; and several pieces as one transfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckptd.core.slots.segment_format import slot_view
from ckptd.core.slots.slots import SnapshotKey
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.recompute import gradient_puts
from ckptd.recompute.gradient_puts import GradientOffers, PutOfPieces, offer_of
from ckptd.transport.verbs import Completion, Done, Fault, RegionKey
from tests.ckptd.memory.fresh import put_header
from tests.ckptd.recomputed import Step, step_of
from tests.ckptd.running import descriptor

MIB = 1 << 20
REGION = RegionKey(1, bytes(16), MIB)


@pytest.fixture(scope="module")
def step() -> Step:
    return step_of("AdamW", lr=3e-3)


@pytest.fixture
def segment(tmp_path: Path, step: Step) -> Segment:
    """Slot 0 has the snapshot with its gradients, slot 1 without."""
    made = SegmentStore(tmp_path, 40 * MIB, "here", mlock="off", hugepages="off").create(descriptor(), 4, MIB)
    slot_view(made.buffer, made.geometry, 0)[:] = step.slot
    slot_view(made.buffer, made.geometry, 1)[: len(step.after.image)] = step.after.image
    for index in range(2):
        put_header(made.buffer, made.geometry, index, step.after.header)
    return made


def key(sequence: int) -> SnapshotKey:
    return SnapshotKey(0, 8, 1, sequence)


def test_an_offer_has_the_base_and_fewer_bytes_than_a_third_of_the_image(
    segment: Segment, step: Step
) -> None:
    header = step.after.header
    offer = offer_of(segment, 0, header)
    assert offer is not None
    assert offer.base == step.before.header.iteration
    assert offer.put_bytes < header.image_len / 3
    assert max(at + len(piece) for at, piece in offer.pieces) <= header.image_len + offer.bytes_behind
    assert offer_of(segment, 1, header) is None


def test_damaged_gradients_are_not_offered(segment: Segment, step: Step) -> None:
    """The image goes, whose digests are compared anyway."""
    slot = slot_view(segment.buffer, segment.geometry, 0)
    stop = step.slot.rstrip(b"\0").__len__()
    slot[stop - 1] ^= 1
    assert offer_of(segment, 0, step.after.header) is None


def test_a_snapshot_that_could_not_be_computed_goes_whole_at_once_and_others_later(segment: Segment) -> None:
    """Twice as many are left out after each failure; one success, and all are offered again."""
    offers = GradientOffers()
    assert offers.of("n", key(1), segment, 0) is not None
    assert offers.failed("n", key(1), "other bits: the digest of 'a'") == "other bits: the digest of 'a'"
    assert offers.of("n", key(1), segment, 0) is None
    assert offers.of("other", key(1), segment, 0) is not None
    assert [offers.of("n", key(n), segment, 0) is None for n in range(2, 5)] == [True, True, False]
    assert offers.failed("n", key(4), "other bits: the digest of 'b'") == "", "the same reason is said once"
    assert [offers.of("n", key(n), segment, 0) is None for n in range(5, 10)] == [True] * 4 + [False]
    offers.accepted("n")
    assert offers.of("n", key(10), segment, 0) is not None


def test_a_snapshot_that_is_left_out_counts_once_and_is_not_looked_at(segment: Segment) -> None:
    """Its slot may be asked for several times, while the peer has none."""
    offers = GradientOffers()
    offers.failed("n", key(1), "other bits")
    assert [offers.of("n", key(n), segment, 0) for n in (1, 2, 2, 2, 3)] == [None] * 5
    assert offers._made is None
    assert offers.of("n", key(4), segment, 0) is not None


def test_a_peer_that_always_declines_costs_little(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is offered the next snapshot at once, then fewer of them; and none is packed for it."""

    def pack(*_: object) -> list[tuple[int, memoryview]]:
        raise AssertionError("nobody has taken it")

    monkeypatch.setattr(gradient_puts, "pack_pieces", pack)
    offers, offered = GradientOffers(), []
    for n in range(60):
        if offers.of("n", key(n), segment, 0) is not None:
            offered.append(n)
            offers.declined("n", "no torch")
    assert offered == [0, 1, 3, 7, 15, 31, 47]
    offers.accepted("n")
    assert offers.of("n", key(60), segment, 0) is not None


def test_gradients_that_take_more_bytes_than_the_image_do_not_go(
    segment: Segment, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = memoryview(bytes(step.after.header.image_len))
    monkeypatch.setattr(gradient_puts, "pack_pieces", lambda *_: [(0, piece)])
    offer = offer_of(segment, 0, step.after.header)
    assert offer is not None
    assert offer.pieces == ()


def test_a_segment_that_was_given_back_is_not_kept_mapped(segment: Segment) -> None:
    """The pieces of an offer are views of it."""
    offers = GradientOffers()
    offers.of("n", key(1), segment, 0)
    offers.let_go()
    assert offers._made is not None
    segment.close()
    offers.let_go()
    assert offers._made is None


def test_a_reason_to_decline_is_said_once() -> None:
    offers = GradientOffers()
    told = [offers.declined("n", reason) for reason in ("starts", "starts", "no torch", "no torch")]
    assert told == ["starts", "", "no torch", ""]
    offers.accepted("n")
    assert offers.declined("n", "no torch") == "", "a ring that lags behind has gaps all the time"


@dataclass
class Link:
    """Puts that end when the test says so."""

    puts: list[tuple[int, bytes]] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    cancelled: int = 0

    def put(
        self, source: memoryview, target: RegionKey, *, offset: int = 0, deadline_s: float, done: Done
    ) -> Link:
        self.puts.append((offset, bytes(source)))
        self.done.append(done)
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def wait(self, timeout_s: float) -> Completion:
        raise TimeoutError

    def end(self, fault: Fault | None = None) -> None:
        self.done[-1](Completion(fault, "", len(self.puts[-1][1]), 1, 0.5))


def put(pieces: list[bytes], done: Callable[[Completion], None]) -> tuple[Link, PutOfPieces]:
    link = Link()
    places = [(100 * i, memoryview(piece)) for i, piece in enumerate(pieces)]
    return link, PutOfPieces(link, REGION, places, deadline_s=5.0, done=done)


def test_pieces_go_one_after_the_other_and_end_together() -> None:
    ends: list[Completion] = []
    link, _ = put([b"one", b"", b"three"], ends.append)
    link.end()
    assert ends == []
    link.end()
    assert link.puts == [(0, b"one"), (200, b"three")]
    assert [(c.ok, c.size_bytes, c.retries, c.seconds) for c in ends] == [(True, 8, 2, 1.0)]


def test_a_piece_that_fails_ends_all() -> None:
    ends: list[Completion] = []
    link, _ = put([b"one", b"two"], ends.append)
    link.end(Fault.DEADLINE)
    assert len(link.puts) == 1
    assert [c.fault for c in ends] == [Fault.DEADLINE]


def test_nothing_begins_after_a_cancel() -> None:
    """Also if the piece that was under way was complete by then."""
    ends: list[Completion] = []
    link, transfer = put([b"one", b"two"], ends.append)
    transfer.cancel()
    assert link.cancelled == 1
    link.end()
    assert len(link.puts) == 1
    assert [c.fault for c in ends] == [Fault.CANCELLED]
