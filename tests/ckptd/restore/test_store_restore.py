"""A real daemon brings checkpoints of runs to which nobody is attached into its memory, or says why
it cannot.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from ckptd.core.slots.segment_format import WORLD_TOPOLOGY, encode_descriptor
from ckptd.core.slots.slots import SlotState
from ckptd.memory.segment_file import open_segment
from ckptd.persistence import keeper_wire as w
from ckptd.storage.image import verify
from ckptd.transport.messages import (
    BringStored,
    Brought,
    DurableWorlds,
    Events,
    GetDurableWorlds,
    GetEvents,
)
from ckptd.transport.wire import RefusedError
from tests.ckptd.persistence.slots import WINDOW, descriptor, fill, segment_store
from tests.ckptd.persistence.test_keeper import Desk
from tests.ckptd.running import DaemonProcess, running_daemon

pytestmark = pytest.mark.slow

RANKS, WORLD = 2, 1_700_000_000
RUN = f"run.w{WORLD}"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints of a world of two ranks, at 4 and 8; images are kept beside it."""
    folder = tmp_path_factory.mktemp("stored")
    desk = Desk(f"file://{folder / 'store'}")
    for rank in range(RANKS):
        told = msgspec.structs.replace(descriptor(rank, world_size=RANKS), run=RUN, topology=WORLD_TOPOLOGY)
        segment = segment_store(folder / f"shm-{rank}").create(told, 6, 1 << 20)
        name = w.RankName("job", RUN, rank)
        assert isinstance(desk.ask(w.OpenRank, name, 1, -1), w.RunOpened)
        for end in (4, 8):
            keys = [fill(segment, i % 6, i, seed=100 * rank + i) for i in (end - 1, end)]
            for key in keys:
                desk.ask(w.StoreSlot, name, key, str(segment.path), key.iteration % 6)
            raw = encode_descriptor(told)
            done = desk.ask(w.CommitRank, name, RANKS, end, 1, keys, raw, 1 << 20, WINDOW, 6)
            assert isinstance(done, w.Answer), done
            header = segment.header(end % 6)
            assert header is not None
            (folder / f"{rank}-{end}").write_bytes(segment.image(end % 6, header))
        segment.close()
    return folder


def brought(process: DaemonProcess, end: int, ranks: Sequence[int] = range(RANKS)) -> Brought:
    """What comes of it in the end."""
    until = time.monotonic() + 30
    with process.client() as client:
        while (told := client.ask(BringStored("job", RUN, end, tuple(ranks)), Brought)).state == "running":
            assert time.monotonic() < until, told
            time.sleep(0.02)
    return told


def held(process: DaemonProcess) -> dict[tuple[int, int], bytes]:
    """The sealed images in its memory, by rank and iteration."""
    found = {}
    for path in process.segment_dir.glob(f"job~{RUN}~*"):
        segment = open_segment(path, readonly=True)
        for index, header in segment.headers():
            if header.state is SlotState.SEALED:
                image = segment.image(index, header)
                verify(image, header.header_digest)
                found[segment.descriptor.rank, header.iteration] = bytes(image)
                image.release()
        segment.close()
    return found


def test_what_is_durable_is_told_and_brought_bit_for_bit(stored: Path) -> None:
    """Also what is asked for in the place of another checkpoint: the memory of that one is given back."""
    with running_daemon(store=f"file://{stored / 'store'}") as process:
        with process.client() as client:
            message = GetDurableWorlds("job", "run", "this")
            while (told := client.ask(message, DurableWorlds)).running:
                time.sleep(0.02)
        assert told.configured
        assert told.worlds == (WORLD,)
        assert [(c.world, c.iteration) for c in told.checkpoints] == [(WORLD, 8), (WORLD, 4)]
        assert all(len(c.sizes) == RANKS for c in told.checkpoints)
        last = brought(process, 8, [1])
        assert (last.state, last.reason) == ("done", "")
        assert last.bytes_done == last.bytes_total == (stored / "1-8").stat().st_size
        assert held(process) == {(1, 8): (stored / "1-8").read_bytes()}
        assert brought(process, 4).state == "done"
        images = held(process)
        assert images.pop((1, 8)), "that was over, and may be used"
        assert images == {(r, 4): (stored / f"{r}-4").read_bytes() for r in range(RANKS)}


def test_what_cannot_be_had_is_told_with_its_reason_and_leaves_nothing_behind(stored: Path) -> None:
    with running_daemon(store=f"file://{stored / 'store'}") as process:
        none = brought(process, 5)
        assert none.state == "failed"
        assert "checkpoint 5 of job/run.w" in none.reason
        assert brought(process, 8, [0, 7]).state == "failed"
        assert held(process) == {}
    with running_daemon(store=f"file://{stored / 'store'}", memory="1MiB") as process:
        refused = brought(process, 8)
        assert refused.state == "refused"
        assert "the quota is 1 MiB" in refused.reason
        with process.client() as client:
            events = client.ask(GetEvents(limit=1000), Events).events
        assert any(event.kind == "refused.quota" for event in events)


def test_a_daemon_without_a_store_says_so() -> None:
    with running_daemon() as process, process.client() as client:
        told = client.ask(GetDurableWorlds("job", "run", "this"), DurableWorlds)
        assert told == DurableWorlds(configured=False)
        with pytest.raises(RefusedError, match="no store is configured here"):
            client.ask(BringStored("job", RUN, 8, (0,)), Brought)
