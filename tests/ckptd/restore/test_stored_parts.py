"""A stored snapshot of which something is gone: the rest of it can be read, and who asked knows the
difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ckptd.memory.segment_file import Segment
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.store_link import StoreLink
from ckptd.storage.checkpoints.reader import read_manifest
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import GetHoldings, Holdings
from ckptd.transport.verbs import Completion, Fault, RegionKey
from tests.ckptd.persistence.slots import descriptor, segment_store
from tests.ckptd.persistence.test_keeper import Desk, checkpoint


class Child:
    """Puts to a keeper in this process what is asked, and answers at once."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    def next_id(self) -> int:
        return self.desk._ids + 1

    def ask(self, message: Any, done: Any, failed: Any) -> None:
        fields = [getattr(message, name) for name in message.__struct_fields__[1:]]
        reply = self.desk.ask(type(message), *fields)
        if isinstance(reply, w.KeeperFailed):
            failed(reply.code, reply.reason)
        else:
            done(reply)

    def tell(self, message: Any) -> None:
        self.desk.keeper.handle(message)


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    made = segment_store(tmp_path / "shm").create(descriptor(), 6, 1 << 20)
    yield made
    made.close()


@pytest.fixture
def desk(tmp_path: Path, segment: Segment) -> Desk:
    """A keeper that has committed a checkpoint of iterations 3 and 4, which share a tensor."""
    made = Desk(f"file://{tmp_path / 'store'}")
    made.open()
    checkpoint(made, segment, 4)
    assert made.wait_settled().complete
    return made


def test_what_is_left_of_a_snapshot_is_read_and_what_is_lost_is_told_to_be(
    tmp_path: Path, desk: Desk, segment: Segment
) -> None:
    """A missing object was told like a store that is away: the part was asked for three times, and
    then nothing any more.
    """
    link = StoreLink(
        cast("Any", Child(desk)),
        post=lambda call: call(),
        ranks_of=lambda job, run: [0],
        durable_of=lambda job, run: -1,
        segments=lambda: [segment],
        boot_id="b",
    )
    held: list[Holdings] = []
    link.ask(GetHoldings("job", "run"), Holdings, held.append, lambda *why: pytest.fail(str(why)))
    (stored,) = held[0].segments
    manifest = read_manifest(desk.keeper._store, stored.name)
    newest = manifest.snapshots[1]
    (own,) = [o for o in newest.objects if f"/{newest.iteration:012d}/" in o.key]
    (tmp_path / "store" / own.key).unlink()
    lost = next(e for e in newest.extents if newest.objects[e.object] is own)
    left = next(e for e in newest.extents if newest.objects[e.object] is not own)

    def read(offset: int) -> Completion:
        opened: list[p.ReadOpened] = []
        question = p.OpenRead("job", "run", stored.name, 1, newest.sequence, "b")
        link.ask(question, p.ReadOpened, opened.append, lambda *why: pytest.fail(str(why)))
        done: list[Completion] = []
        region = RegionKey(opened[0].region, opened[0].token, opened[0].length)
        target = segment.buffer[1 << 20 : (1 << 20) + 10]
        link.get(region, target, offset=offset, deadline_s=5.0, done=done.append)
        return done[0]

    for _ in range(2):  # the second time it is doubted already
        completion = read(lost.image_offset)
        assert (completion.fault, "ObjectMissing" in completion.detail) == (Fault.DAMAGED, True)
        assert read(left.image_offset).ok
        link.tell(p.DoubtSlot("job", "run", stored.name, 1, newest.sequence))
    assert isinstance(desk.ask(w.FindStored, "job", "run", [0]), w.KeeperFailed)  # it was the only one
