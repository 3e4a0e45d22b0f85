"""Slots that are lent: what ends them, and what does not."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.core.slots.slots import SlotState
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.peers.replica_leases import Loan, RegionLoans
from ckptd.peers.slot_grants import slot_file
from ckptd.storage.gradient_block import pack_pieces, read_block
from ckptd.storage.image import ImageView
from ckptd.transport import peer_messages as p
from ckptd.transport.fabric import short_cut
from ckptd.transport.fabric.regions import LocalRegion, Regions
from ckptd.transport.verbs import Access, Scope
from ckptd.workers import Workers
from tests.ckptd.hosted import MIB, Setting, hosted
from tests.ckptd.puppet import begin_slot
from tests.ckptd.recomputed import Step, step_of
from tests.ckptd.running import descriptor, eventually
from tests.ckptd.snapshots import snapshot_of, states_in


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    with hosted(tmp_path) as setting:
        yield setting


@contextmanager
def copying(region: LocalRegion, peer: str) -> Iterator[None]:
    """Another daemon of this host is in the middle of a chunk."""
    file = region.key.file
    assert file is not None
    fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        lease = short_cut._lease_byte(region.key, file, Access.WRITE, peer)
        with short_cut._copying(fd, lease) as allowed:
            assert allowed
            yield
    finally:
        os.close(fd)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Every open fails with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def locked(segment: Segment, index: int) -> bool:
    return locks.is_locked(segment.fd, slot_lock_byte(index), exclusive=True)


def held(segment: Segment) -> int:
    """How many descriptors of this process lead to its file."""
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(n) and os.path.samefile(n, segment.path) for n in names)


def test_peers_that_stopped_in_the_middle_of_a_copy_hold_up_nobody_elses_slot(
    tmp_path: Path,
) -> None:
    """As many of them as there are workers; the end of a healthy one's loan does not wait behind them."""
    store = SegmentStore(tmp_path, 40 * MIB, "here", mlock="off", hugepages="off")
    segment, regions = store.create(descriptor(window=1, num_operators=1), 4, MIB), Regions()
    settlers = Workers("settle", 2, 100, lambda: None)
    failures: list[BaseException] = []
    lending = RegionLoans(
        settlers, still_here=lambda s: True, failed=lambda what, error: failures.append(error)
    )

    def lend(index: int, peer: str) -> Loan:
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        assert locks.try_lock(fd, slot_lock_byte(index), exclusive=True)
        image = segment.image(index, snapshot_of(5).header)
        region = regions.register(image, Access.WRITE, Scope(peer), slot_file(segment, index))
        return Loan(segment, index, fd, region)

    def over(*indexes: int) -> bool:
        settlers.collect()
        lending.tick()
        return not any(locked(segment, index) for index in indexes)

    def region_of(loan: Loan) -> LocalRegion:
        assert isinstance(loan.region, LocalRegion)
        return loan.region

    try:
        a, b, c = (lend(index, peer) for index, peer in enumerate("abc"))
        with copying(region_of(a), "a"), copying(region_of(b), "b"):
            with copying(region_of(c), "c"):
                for loan in (a, b, c):
                    lending.end(loan, SlotState.FREE)
                assert lending.slots_of(segment) == {0, 1, 2}
            eventually(lambda: over(2) and settlers.pending == 0, "the healthy one's slot is free")
            assert lending.slots_of(segment) == {0, 1}
            assert locked(segment, 0)
            assert locked(segment, 1)
            assert settlers.pending == 0, "no worker waits for a copy"
        eventually(lambda: over(0, 1), "the others go on")
        assert lending.slots_of(segment) == set()
        assert not failures
    finally:
        settlers.close(5.0)


@pytest.mark.parametrize("gone", [True, False])
def test_a_slot_whose_file_cannot_be_opened_is_refused_and_not_passed_over_in_silence(
    setting: Setting, gone: bool
) -> None:
    """The peer would wait ten seconds for an answer."""
    lease, snapshot = setting.open().lease, snapshot_of(5)
    setting.fill(lease, snapshot)
    segment = setting.only
    read = p.OpenRead("job", "run", segment.path.name, 0, snapshot.header.sequence)
    begin = begin_slot(lease, snapshot_of(6))
    before = held(segment)
    if gone:
        segment.path.unlink()
        replies = [setting.ask(read, "q"), setting.ask(begin)]
    else:
        with no_descriptors():
            replies = [setting.ask(read, "q"), setting.ask(begin)]
        assert held(segment) == before
        assert isinstance(setting.ask(read, "q"), p.ReadOpened)
        assert isinstance(setting.ask(begin), p.SlotGranted)
    assert all(isinstance(reply, p.PeerRefused) for reply in replies), replies
    codes = [reply.code for reply in replies if isinstance(reply, p.PeerRefused)]
    assert codes == ["unknown" if gone else "busy"] * 2


@pytest.mark.parametrize("error", [OSError("mine"), ValueError("mine")])
def test_what_fails_after_a_slot_was_locked_leaves_it_free(
    setting: Setting, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, snapshot = setting.open().lease, snapshot_of(5)
    setting.fill(lease, snapshot)
    segment = setting.only
    read = p.OpenRead("job", "run", segment.path.name, 0, snapshot.header.sequence)
    begin = begin_slot(lease, snapshot_of(6))
    before = held(segment)

    def fail(*args: object, **options: object) -> LocalRegion:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(setting.fabric, "register", fail)
        for message in (read, begin):
            if isinstance(error, OSError):
                assert isinstance(setting.ask(message), p.PeerRefused)
            else:
                with pytest.raises(ValueError, match="mine"):
                    setting.ask(message)
    assert held(segment) == before
    assert not locked(segment, 0)
    assert not locked(segment, 1)
    assert states_in(segment.path)[1] is SlotState.FREE
    setting.begin(lease, snapshot_of(6))


# -- gradients instead of images (docs/recompute.md) -----------------------------------------------


@pytest.fixture(scope="module")
def step() -> Step:
    return step_of("AdamW", lr=3e-3)


def offer(lease: int, step: Step) -> p.BeginSlot:
    """Asks for a slot for the second snapshot of a step, with its gradients."""
    behind = len(step.slot) - len(step.after.image)
    message = begin_slot(lease, step.after)
    return msgspec.structs.replace(message, gradient_bytes=behind, base=step.before.header.iteration)


def put_gradients(setting: Setting, granted: p.SlotGranted, step: Step, *, flip: bool = False) -> None:
    """What the sender puts; ``flip``: with one bit of a gradient changed."""
    header, slot = step.after.header, memoryview(bytearray(step.slot))
    block = read_block(slot, header.image_len, iteration=header.iteration, sequence=header.sequence)
    assert block is not None
    if flip:
        slot[block.start + 64 + 2] ^= 0x40
    buffer = setting.fabric.regions[granted.region].buffer
    for offset, piece in pack_pieces(slot, ImageView(slot[: header.image_len]), block):
        buffer[offset : offset + len(piece)] = piece


@pytest.fixture(scope="module")
def computing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """A host with a process that computes; it imports torch, so one serves the tests of a module."""
    with hosted(tmp_path_factory.mktemp("computing"), computes=True) as setting:
        yield setting


def opened(setting: Setting, step: Step, run: str) -> int:
    """A lease on a replica that holds the base."""
    lease = setting.open(run=run).lease
    setting.fill(lease, step.before)
    setting.until(lambda: setting.recomputation is not None and not setting.recomputation.why_not(), "torch")
    return lease


def test_a_snapshot_is_computed_from_gradients_with_the_bits_of_its_sender(
    computing: Setting, step: Step
) -> None:
    lease = opened(computing, step, "computed")
    granted = computing.ask(offer(lease, step))
    assert isinstance(granted, p.SlotGranted)
    assert granted.recomputes
    assert granted.length == len(step.slot)
    put_gradients(computing, granted, step)
    sealed = computing.ask(p.SealSlot(granted.ticket, step.after.digest, recompute=True))
    assert isinstance(sealed, p.PeerDone), sealed
    found = next(s for s in computing.replicas if s.key.run == "computed")
    headers = {h.iteration: (i, h) for i, h in found.headers() if h.state is SlotState.SEALED}
    assert found.image(*headers[step.after.header.iteration]) == step.after.image
    assert found.kept_digest(*headers[step.after.header.iteration]) == step.after.digest
    assert computing.events.counters["replica.recomputed"] == 1


def test_other_bits_are_never_sealed_and_the_image_comes_instead(computing: Setting, step: Step) -> None:
    lease = opened(computing, step, "other-bits")
    granted = computing.ask(offer(lease, step))
    assert isinstance(granted, p.SlotGranted)
    put_gradients(computing, granted, step, flip=True)
    refused = computing.ask(p.SealSlot(granted.ticket, step.after.digest, recompute=True))
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "recompute"
    assert "other bits than the sender's: the digest of" in refused.message
    (found,) = (s for s in computing.replicas if s.key.run == "other-bits")
    assert {h.iteration for _, h in found.headers() if h.state is SlotState.SEALED} == {7}
    assert not computing.events.counters["event.replica_damaged"]
    computing.fill(lease, step.after)
    assert {h.iteration for _, h in found.headers() if h.state is SlotState.SEALED} == {7, 8}


def test_after_a_gap_the_image_is_needed(computing: Setting, step: Step) -> None:
    """The base was never here; and what was to be an image is not computed."""
    lease = opened(computing, step, "gap")
    granted = computing.ask(msgspec.structs.replace(offer(lease, step), base=6))
    assert isinstance(granted, p.SlotGranted)
    assert not granted.recomputes
    assert "the snapshot from which it would be computed is not here" in granted.why_whole
    assert granted.length == len(step.after.image)
    refused = computing.ask(p.SealSlot(granted.ticket, step.after.digest, recompute=True))
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "bad_message"
    computing.fabric.regions[granted.region].buffer[:] = step.after.image
    assert isinstance(computing.ask(p.SealSlot(granted.ticket, step.after.digest)), p.PeerDone)


def test_the_base_is_not_given_away_while_it_is_computed_from(computing: Setting, step: Step) -> None:
    """Four slots: the base, the one that is computed, and two that others fill; then none is left."""
    lease = opened(computing, step, "busy")
    computed = computing.ask(offer(lease, step))
    assert isinstance(computed, p.SlotGranted)
    others = [computing.ask(begin_slot(lease, snapshot_of(20 + i))) for i in range(3)]
    assert [type(each) for each in others] == [p.SlotGranted, p.SlotGranted, p.PeerRefused]
    put_gradients(computing, computed, step)
    assert isinstance(
        computing.ask(p.SealSlot(computed.ticket, step.after.digest, recompute=True)), p.PeerDone
    )


def test_a_replica_that_goes_meanwhile_is_no_reason_to_send_the_image(setting: Setting) -> None:
    """Nothing could not be computed: the sender is to open the replica again."""
    answers: list[p.PeerReply] = []
    setting.host._tickets._not_computed(12345, answers.append, "its process for this is gone")
    (refused,) = answers
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "unknown"


def test_gradients_that_do_not_fit_are_refused_and_a_host_that_computes_nothing_says_so(
    setting: Setting, step: Step
) -> None:
    lease = setting.open().lease
    setting.fill(lease, step.before)
    refused = setting.ask(msgspec.structs.replace(offer(lease, step), gradient_bytes=2 * MIB))
    assert isinstance(refused, p.PeerRefused)
    assert "do not fit" in refused.message
    granted = setting.ask(offer(lease, step))
    assert isinstance(granted, p.SlotGranted)
    assert (granted.recomputes, granted.why_whole) == (False, "nothing is computed from gradients here")
