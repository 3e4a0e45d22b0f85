"""A fetch as its holders see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from ckptd.events import EventLog
from ckptd.fetching import FetchJob
from ckptd.peer_link import PeerLink
from ckptd.ring import SlotState
from ckptd.segment_format import pack_slot_header
from ckptd.segments import SegmentStore
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import FetchPiece, FetchSource
from ckptd.transport.verbs import Completion, Done, Fault, RegionKey
from ckptd.workers import Workers
from tests.ckptd.running import descriptor, eventually
from tests.ckptd.snapshots import snapshot_of

MIB = 1 << 20
SNAPSHOT = snapshot_of(4)


@dataclass
class Holder:
    """Grants reads; what is got of the first ``ended`` of them is refused, as if they had been ended."""

    ended: int = 0
    boot_id: str = "b1"
    opened: list[p.OpenRead] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)

    def ask(
        self,
        message: p.PeerMessage,
        expect: type,
        done: Callable[[Any], None],
        failed: Callable[[str, str], None],
        *,
        timeout_s: float = 10.0,
    ) -> None:
        assert isinstance(message, p.OpenRead)
        self.opened.append(message)
        header = pack_slot_header(SNAPSHOT.header)
        done(p.ReadOpened(len(self.opened), bytes(16), len(SNAPSHOT.image), header))

    def tell(self, message: p.PeerMessage) -> None:
        assert isinstance(message, p.CloseRead)
        self.closed.append(message.region)

    def get(
        self, source: RegionKey, target: memoryview, *, offset: int, deadline_s: float, done: Done
    ) -> None:
        fault = Fault.REGION if source.region <= self.ended else None
        if fault is None:
            target[:] = SNAPSHOT.image[offset : offset + len(target)]
        self.later.append(lambda: done(Completion(fault, "", len(target), 0, 0.0)))

    later: list[Callable[[], None]] = field(default_factory=list)


@pytest.fixture
def store(tmp_path: Path) -> SegmentStore:
    return SegmentStore(tmp_path, 40 * MIB, "here", mlock="off", hugepages="off")


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("test", 1, 100, lambda: None)
    yield workers
    workers.close(5.0)


def test_a_holder_that_took_us_for_lost_is_asked_again(
    store: SegmentStore, workers: Workers
) -> None:
    """It ended our reads while we heard of nothing. What it opens for us is of this boot."""
    told = msgspec.structs.replace(
        descriptor(), node_id="here", created_at_ns=1, window=1, num_operators=1
    )
    segment = store.create(told, 2, MIB)
    holder, over = Holder(ended=2), list[str]()
    source = FetchSource("away", "a.seg", 0)
    job = FetchJob(
        segment,
        [FetchPiece(pack_slot_header(SNAPSHOT.header), (source,))],
        node="here",
        link=lambda node: cast("PeerLink", holder),
        local=lambda name: segment if name == segment.path.name else None,
        verifiers=workers,
        map_fn=None,
        events=EventLog(100),
        clock=lambda: 100.0,
        finished=over.append,
    )
    job.start()

    def finished() -> bool:
        while holder.later:
            holder.later.pop(0)()
        workers.collect()
        return bool(over)

    eventually(finished, "the fetch ends")
    assert over == [""]
    assert [message.boot_id for message in holder.opened] == ["b1"] * 3
    assert holder.closed == [3]
    header = segment.header(0)
    assert header is not None
    assert header.state is SlotState.SEALED
    assert bytes(segment.image(0, header)) == SNAPSHOT.image
