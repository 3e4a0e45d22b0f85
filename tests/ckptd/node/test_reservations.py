"""What another rank has, in a copy that a trainer reads: the service in one process, with real
memory and no network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from ckptd.config.settings import DaemonConfig
from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import (
    SegmentDescriptor,
    SlotHeader,
    encode_descriptor,
    pack_slot_header,
    read_prologue,
)
from ckptd.core.slots.slots import SlotState
from ckptd.memory.segment_file import Segment
from ckptd.memory.slot_digests import SealVerdict, seal_slot
from ckptd.node.reservations import _slots_for
from ckptd.transport import messages as m
from tests.ckptd.node.one_service import OneService
from tests.ckptd.running import descriptor, eventually, fill, state_of

MIB = 1 << 20
# Whatever kinds there are: nothing here depends on them.
# Nobody fetches the backup of a server's KV: all devices map it.
KINDS = [kind for kind in get_args(get_type_hints(SegmentDescriptor)["kind"]) if kind != "kv"]
READER, OTHER = b"r0", b"r1"


class Setting(OneService):
    """Ranks 0 and 1 of a run on one node; rank 0 reads what rank 1 has."""

    def ask(self, message: m.Message, by: bytes = READER) -> m.Reply:
        return super().ask(message, by)

    def attach(self, by: bytes = READER) -> m.Attached:
        rank = 0 if by == READER else 1
        self.ask(m.Hello("1", os.getpid()), by)
        reply = self.ask(m.Attach("job", "run", rank, 2, f"stage{rank}", 1, MIB, "a test", (), by), by)
        assert isinstance(reply, m.Attached), reply
        return reply

    def make(self, kind: Any, *iterations: int, run: str = "run", slot_bytes: int = MIB) -> Segment:
        """A segment of rank 1 in which these are sealed."""
        told = descriptor(run=run, rank=1, world_size=2, topology="stage1", kind=kind)
        segment = self.store.create(told, len(iterations), slot_bytes)
        for index, iteration in enumerate(iterations):
            sent = (("activation/1/0/0/0", "U8", (64,), bytes([iteration] * 64)),)
            fill(segment, index, iteration, anchors=3, tensors=sent)
            assert seal_slot(segment, index).verdict is SealVerdict.SEALED
        return segment

    def copies(self) -> list[Path]:
        return sorted(self.store.folder.glob("*.fetched"))

    def read(self, kind: Any, *iterations: int) -> m.SegmentInfo:
        """What is told of a copy of a new segment of rank 1, when it is complete."""
        reply = self.ask(wanted(self.make(kind, *iterations)))
        assert isinstance(reply, m.Reserved), reply
        eventually(lambda: self.collected() and self.state(reply.segment) != "running", "it ends")
        return reply.segment

    def state(self, info: m.SegmentInfo) -> str:
        reply = self.ask(m.GetFetch(info.generation))
        assert isinstance(reply, m.FetchState), reply
        return reply.state


def wanted(segment: Segment, *, kind: str = "", rank: int = 1, name: str = "", node: str = "here") -> m.Fetch:
    """All slots of a segment, to be read."""
    pieces = tuple(
        m.FetchPiece(segment.raw_header(index), (m.FetchSource(node, name or segment.path.name, index),))
        for index in range(segment.geometry.num_slots)
    )
    return m.Fetch(pieces, (), kind or segment.descriptor.kind, rank)


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    with closing(Setting(tmp_path, DaemonConfig())) as found:
        found.attach()
        yield found


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_holds_what_the_other_rank_has_and_is_nobodys_memory(setting: Setting, kind: str) -> None:
    info = setting.read(kind, 5, 6)
    (source,) = setting.store.everything()
    assert setting.state(info) == "done"
    buffer = memoryview(Path(info.path).read_bytes())
    geometry, told = read_prologue(buffer)
    assert told == source.descriptor, "whoever reads such segments reads this one"
    for index in range(2):
        header = source.header(index)
        assert header is not None
        at = geometry.slot_offset(index)
        copied = buffer[at : at + header.image_len]
        assert copied == source.image(index, header)
    # Not told, not offered, and no generation of anybody.
    held = setting.peering.holdings("job", "run")
    assert source.path.name in str(held)
    assert Path(info.path).name not in str(held)
    again = setting.attach()
    assert (again.segments, again.logs) == ((), ())
    own = encode_descriptor(descriptor(world_size=2, topology="stage0"))
    reserved = setting.ask(m.Reserve(MIB, 1, own))
    assert isinstance(reserved, m.Reserved)
    assert reserved.segment.generation == 0


@pytest.mark.parametrize("node", ["here", "elsewhere", STORE_NODE])
def test_a_rank_fetches_from_segments_of_its_own_run_only(setting: Setting, node: str) -> None:
    """Otherwise the daemon would copy what the trainer may not read."""
    setting.attach(OTHER)
    theirs = setting.make("snapshots", 5, run="other")
    name = "job/other/000000000005/commit-0" if node == STORE_NODE else ""
    request = msgspec.structs.replace(wanted(theirs, name=name, node=node), kind="", rank=-1)
    refused = setting.ask(request, OTHER)
    assert isinstance(refused, m.Refused)
    assert refused.code is m.RefusalCode.BAD_MESSAGE
    assert refused.message == f"{name or theirs.path.name} on {node} is no segment of job/run rank 1"


def test_a_copy_counts_until_it_is_dropped(setting: Setting) -> None:
    info = setting.read("log", 5)
    (source,) = setting.store.everything()
    (copy,) = setting.copies()
    assert str(copy) == info.path
    assert setting.store.used_bytes == source.file_bytes + copy.stat().st_size
    assert sum(fact.total_bytes for fact in setting.store.facts()) == setting.store.used_bytes
    assert isinstance(setting.ask(m.Drop(info.generation)), m.Done)
    assert setting.copies() == []
    assert setting.store.used_bytes == source.file_bytes
    for message in (m.Drop(info.generation), m.GetFetch(info.generation)):
        refused = setting.ask(message)
        assert isinstance(refused, m.Refused)
        assert refused.code is m.RefusalCode.NOT_FOUND


def test_a_copy_is_its_readers_alone(setting: Setting) -> None:
    info = setting.read("log", 5)
    setting.attach(OTHER)
    refused = setting.ask(m.Drop(info.generation), OTHER)
    assert isinstance(refused, m.Refused)
    assert len(setting.copies()) == 1
    setting.ask(m.Detach(), OTHER)
    assert len(setting.copies()) == 1


@pytest.mark.parametrize("how", ["detached", "over", "died"])
def test_a_copy_goes_with_its_reader(setting: Setting, how: str) -> None:
    setting.read("log", 5)
    (source,) = setting.store.everything()
    if how == "died":
        (session,) = setting.service.sessions
        setting.service.trainers.gone(session, "a test says so")
    else:
        assert isinstance(setting.ask(m.Detach(final=how == "over")), m.Done)
    assert setting.copies() == []
    assert setting.store.used_bytes == source.file_bytes


@pytest.mark.parametrize("back", [False, True])
def test_a_copy_that_is_made_for_a_reader_that_has_left_is_removed(setting: Setting, back: bool) -> None:
    """It is for nobody, and nobody would ever drop it."""
    source = setting.make("log", 5)
    answers: list[m.Reply] = []
    setting.service.handle(READER, wanted(source), answers.append)
    (session,) = setting.service.sessions
    setting.service.trainers.gone(session, "a test says so")
    if back:
        setting.attach()
    eventually(lambda: setting.collected() and bool(answers), "an answer")
    (refused,) = answers
    assert isinstance(refused, m.Refused)
    assert refused.code is m.RefusalCode.NO_SESSION
    assert setting.copies() == []
    assert setting.store.used_bytes == source.file_bytes


def test_what_exceeds_the_quota_is_refused_with_numbers(setting: Setting) -> None:
    source = setting.make("log", 5, slot_bytes=40 * MIB)
    image = 30 * MIB
    fill(source, 0, 5, anchors=0, tensors=(("activation/1/0/0/0", "U8", (image,), b""),))
    assert seal_slot(source, 0).verdict is SealVerdict.SEALED
    refused = setting.ask(wanted(source))
    assert isinstance(refused, m.Refused)
    assert refused.code is m.RefusalCode.QUOTA
    assert "to read what job/run rank 1 has" in refused.message
    assert "the quota is 64 MiB" in refused.message
    assert setting.copies() == []
    assert setting.store.used_bytes == source.file_bytes


Change = Callable[[Setting], m.Fetch]
OUT_OF_PLACE: dict[str, tuple[Change, m.RefusalCode, str]] = {
    "no such rank": (
        lambda s: wanted(s.make("log", 5), rank=2),
        m.RefusalCode.BAD_MESSAGE,
        "rank 2 of a run with 2 ranks",
    ),
    "another rank's": (
        lambda s: wanted(s.make("log", 5), rank=0),
        m.RefusalCode.BAD_MESSAGE,
        "is no segment of job/run rank 0",
    ),
    "another run's": (
        lambda s: wanted(s.make("log", 5, run="other")),
        m.RefusalCode.BAD_MESSAGE,
        "job~other~r1~g0.boundary on here is no segment of job/run rank 1",
    ),
    "another kind": (
        lambda s: wanted(s.make("log", 5), kind="snapshots"),
        m.RefusalCode.BAD_MESSAGE,
        "has kind 'log', the request is for 'snapshots'",
    ),
    "not there": (
        lambda s: wanted(s.make("log", 5), name="job~run~r1~g7.boundary"),
        m.RefusalCode.NOT_FOUND,
        "no holder of job/run rank 1 answers",
    ),
    "a node that nobody knows": (
        lambda s: wanted(s.make("log", 5), node="away"),
        m.RefusalCode.NOT_FOUND,
        "away: its address is not known",
    ),
}


@pytest.mark.parametrize("case", OUT_OF_PLACE)
def test_what_is_out_of_place_is_refused(setting: Setting, case: str) -> None:
    change, code, text = OUT_OF_PLACE[case]
    refused = setting.ask(change(setting))
    assert isinstance(refused, m.Refused), refused
    assert refused.code is code
    assert text in refused.message
    assert setting.copies() == []


def test_a_damaged_slot_that_nobody_else_has_fails_the_fetch_and_is_quarantined(
    setting: Setting,
) -> None:
    """It is in no plan any more: the next one asks for more ranks to replay, and not for this."""
    source = setting.make("log", 5)
    header = source.header(0)
    assert header is not None
    source.image(0, header)[header.image_len - 1] ^= 1
    reply = setting.ask(wanted(source))
    assert isinstance(reply, m.Reserved)
    eventually(lambda: setting.state(reply.segment) == "failed", "it fails")
    state = setting.ask(m.GetFetch(reply.segment.generation))
    assert isinstance(state, m.FetchState)
    assert "iteration 5: no holder is left of here" in state.reason
    eventually(
        lambda: setting.collected() and state_of(source, 0) is SlotState.QUARANTINED,
        "it is quarantined",
    )


def test_a_damaged_header_is_refused(setting: Setting) -> None:
    source = setting.make("log", 5)
    header = bytearray(source.raw_header(0))
    header[20] ^= 1
    piece = m.FetchPiece(bytes(header), (m.FetchSource("here", source.path.name, 0),))
    refused = setting.ask(m.Fetch((piece,), (), "log", 1))
    assert isinstance(refused, m.Refused)
    assert "a slot header in the request is damaged" in refused.message


def test_an_image_that_no_slot_of_its_segment_can_hold_is_not_fetched(setting: Setting) -> None:
    source = setting.make("log", 5)
    header = source.header(0)
    assert header is not None
    huge = pack_slot_header(replace(header, image_len=2 * MIB))
    piece = m.FetchPiece(huge, (m.FetchSource("here", source.path.name, 0),))
    refused = setting.ask(m.Fetch((piece,), (), "log", 1))
    assert isinstance(refused, m.Refused)
    assert "slots of 1048576 bytes" in refused.message
    assert setting.copies() == []


def test_what_an_earlier_daemon_brought_is_removed(setting: Setting) -> None:
    info = setting.read("log", 5)
    setting.peering.adopt()
    assert not Path(info.path).exists()


def test_a_copy_in_the_middle_of_a_fetch_is_dropped(setting: Setting) -> None:
    """What its daemon still writes into is unmapped when that is over."""
    source = setting.make("log", *range(20))
    reply = setting.ask(wanted(source))
    assert isinstance(reply, m.Reserved)
    assert isinstance(setting.ask(m.Drop(reply.segment.generation)), m.Done)
    eventually(lambda: setting.collected() and setting.workers.pending == 0, "nobody works on it")
    setting.service.tick()
    assert setting.copies() == []
    assert setting.store.used_bytes == source.file_bytes
    page = setting.events.page(0, 1000).events
    assert {"fetch_ended", "fetched"} & {event.kind for event in page}, "it may have been as quick"
    assert [event for event in page if event.level != "info"] == [], "it is no failure"
    assert setting.peering.fetches.of(RankKey("job", "run", 0), reply.segment.generation) is None


@pytest.mark.parametrize(
    ("policy", "iterations", "sequences", "slots"),
    [
        ("partial", (4, 5, 6, 7), (4, 5, 6, 7), 6),
        ("partial", (1, 3, 6, 7), (1, 3, 6, 7), 10),
        ("partial", (1, 3, 4, 6, 7), (1, 3, 4, 6, 7), 10),
        ("partial", (1, 2, 3, 4), (1, 2, 5, 6), 6),  # a recovery went back from iteration 4 to 2
        ("sliding", (1, 3, 6, 7), (1, 3, 6, 7), 6),
        ("partial", range(1, 20, 2), range(1, 20, 2), 12),
    ],
)
def test_images_of_several_durable_checkpoints_leave_room_for_a_window_of_new_snapshots(
    policy: str, iterations: Sequence[int], sequences: Sequence[int], slots: int
) -> None:
    client = msgspec.msgpack.encode({"policy": policy, "operators": []})
    told = descriptor(window=4, client=client)
    pairs = zip(iterations, sequences, strict=True)
    headers = [SlotHeader(state=SlotState.SEALED, iteration=t, sequence=s) for t, s in pairs]
    assert _slots_for([m.FetchPiece(pack_slot_header(h), ()) for h in headers], told) == slots
