"""Boundary logs among nodes: a peer reads one as it reads snapshots, and nobody is made to keep one as a replica."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ckptd.memory.ring import SlotState
from ckptd.memory.sealer import Verdict, seal_slot
from ckptd.memory.segment_format import (
    decode_descriptor,
    encode_descriptor,
    origin_of,
    unpack_slot_header,
)
from ckptd.storage.image import verify
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import GetHoldings, Holdings
from tests.ckptd.hosted import MIB, Setting, hosted
from tests.ckptd.puppet import open_replica
from tests.ckptd.running import descriptor, fill, state_of


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    with hosted(tmp_path) as setting:
        yield setting


def test_a_peer_is_told_of_a_log_apart_and_reads_it(setting: Setting) -> None:
    log = setting.store.create(descriptor(kind="log"), 2, MIB)
    sent = bytes(range(64))
    fill(log, 1, 7, anchors=0, tensors=(("activation/0/0/0/0", "U8", (64,), sent),))
    assert seal_slot(log, 1).verdict is Verdict.SEALED
    told = setting.ask(GetHoldings("job", "run"))
    assert isinstance(told, Holdings)
    assert told.segments == ()
    ((held,),) = [segment.slots for segment in told.logs]
    header = unpack_slot_header(held.header)
    assert header is not None
    assert header.iteration == 7
    opened = setting.ask(p.OpenRead("job", "run", told.logs[0].name, held.slot, header.sequence))
    assert isinstance(opened, p.ReadOpened)
    image = memoryview(bytes(setting.fabric.regions[opened.region].buffer))
    verify(image, header.header_digest)
    assert sent in bytes(image)
    setting.ask(p.CloseRead(opened.region))
    described = setting.ask(p.GetDescriptor("job", "run", told.logs[0].name))
    assert isinstance(described, p.Descriptor)
    assert decode_descriptor(described.descriptor).is_log
    assert state_of(log, 1) is SlotState.SEALED


def test_a_log_is_not_taken_in_as_a_replica(setting: Setting) -> None:
    """A replica's name says nothing of its kind: recovery would take it for snapshots."""
    message = open_replica("away")
    log = msgspec.structs.replace(decode_descriptor(message.descriptor), kind="log")
    refused = setting.ask(
        msgspec.structs.replace(message, descriptor=encode_descriptor(log), origin=origin_of(log))
    )
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "bad_message"
    assert "boundary logs are not replicated" in refused.message
    assert list(setting.replicas) == []
