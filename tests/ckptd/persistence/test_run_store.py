"""Worlds of elastic runs through a store keeper, over a real folder: marked, found, collected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.core.slots.segment_format import WORLD_TOPOLOGY, encode_descriptor
from ckptd.memory.segment_file import Segment
from ckptd.persistence import keeper_wire as w
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.persistence.slots import WINDOW, descriptor, fill, segment_store
from tests.ckptd.persistence.test_keeper import Desk


class World:
    """A world of one rank, as its daemon stores it."""

    def __init__(self, desk: Desk, folder: Path, run: str, topology: str = WORLD_TOPOLOGY) -> None:
        told = msgspec.structs.replace(descriptor(), run=run, topology=topology)
        self._desk, self._run = desk, run
        self.segment: Segment = segment_store(folder / run).create(told, 6, 1 << 20)
        self.name = w.RankName("job", run, 0)
        assert isinstance(desk.ask(w.OpenRank, self.name, 1, -1), w.RunOpened)

    def checkpoint(self, end: int) -> None:
        """Durable, and seen to be complete."""
        snapshots = [fill(self.segment, i % 6, i) for i in (end - 1, end)]
        for each in snapshots:
            path = str(self.segment.path)
            self._desk.ask(w.StoreSlot, self.name, each, path, each.iteration % 6)
        told, geometry = self.segment.descriptor, self.segment.geometry
        raw = encode_descriptor(told)
        size, slots = geometry.slot_bytes, geometry.num_slots
        reply = self._desk.ask(w.CommitRank, self.name, 1, end, 1, snapshots, raw, size, WINDOW, slots)
        assert isinstance(reply, w.Answer), reply
        settled = self._desk.wait_settled()
        assert (settled.rank.run, settled.end, settled.complete) == (self._run, end, True)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(f"file://{tmp_path / 'store'}", settle_s=0.0)


@pytest.fixture
def made(desk: Desk, tmp_path: Path) -> Iterator[Any]:
    worlds: list[World] = []

    def make(run: str, **options: str) -> World:
        worlds.append(World(desk, tmp_path / "shm", run, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.segment.close()


def found(desk: Desk, *, again: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
    """The worlds that are known, and which checkpoints of them are whole."""
    reply = desk.ask(w.FindWorlds, "job", "run", again)
    assert isinstance(reply, w.FoundWorlds), reply
    assert all(sum(one.sizes) > 0 for one in reply.checkpoints)
    return reply.numbers, [(one.world, one.end) for one in reply.checkpoints]


def test_worlds_are_found_the_latest_first_and_what_is_called_like_one_is_not(desk: Desk, made: Any) -> None:
    """An ordinary run may bear such a name, too."""
    assert found(desk) == ([], [])
    made("run.w5").checkpoint(50)
    made("run.w6", topology="dp1").checkpoint(4)
    made("run.w7").checkpoint(8)
    assert found(desk) == ([7, 5], [(7, 8), (5, 50)])
    offered = desk.ask(w.OfferStored, "job", "run.w5", 50, [0])
    assert [(one.rank, one.end) for one in offered.checkpoints] == [(0, 50)]
    refused = desk.ask(w.OfferStored, "job", "run.w5", 49, [0])
    assert isinstance(refused, w.KeeperFailed)
    assert "not committed" in refused.reason


def test_what_a_start_has_found_to_be_damaged_is_passed_over_until_the_next_one(
    desk: Desk, made: Any, tmp_path: Path
) -> None:
    """A manifest that cannot be read is found when the checkpoint is opened; a start asks again,
    and the next start looks anew.
    """
    world = made("run.w5")
    world.checkpoint(4)
    world.checkpoint(8)
    (manifest,) = (tmp_path / "store").glob("job/run.w5/000000000008/commit-*/*.json")
    manifest.write_text(manifest.read_text().replace("8", "9", 1))
    assert found(desk)[1] == [(5, 8), (5, 4)]
    refused = desk.ask(w.OfferStored, "job", "run.w5", 8, [0])
    assert isinstance(refused, w.KeeperFailed)
    assert "cannot be used" in refused.reason
    reply = desk.ask(w.FindWorlds, "job", "run", True)
    assert [(one.world, one.end) for one in reply.checkpoints] == [(5, 4)]
    assert [tuple(which) for which in reply.damaged] == [(5, 8)]
    assert found(desk)[1] == [(5, 8), (5, 4)]


def test_an_earlier_world_goes_when_a_later_one_can_do_without_it(
    desk: Desk, made: Any, tmp_path: Path
) -> None:
    """Not with the first checkpoint of the later one, while two are to be kept; objects go after
    the grace time, which is a day.
    """
    made("run.w5").checkpoint(50)
    ordinary = made("run.w6", topology="dp1")
    ordinary.checkpoint(4)
    later = made("run.w7")
    later.checkpoint(40)
    assert found(desk)[1] == [(7, 40), (5, 50)], "the last two of all worlds"
    later.checkpoint(44)
    desk.hear_until(lambda: any(told.kind == "retained" for told in desk.told))
    assert found(desk)[1] == [(7, 44), (7, 40)]
    keys = [info.key for info in open_store(f"file://{tmp_path / 'store'}").list("job/")]
    assert any(key.startswith("job/run.w6/") and "/commit-" in key for key in keys)
    left = [key for key in keys if key.startswith("job/run.w5/")]
    assert {key.rpartition(".")[2] for key in left} == {"safetensors", "json"}
    assert not any("/commit-" in key for key in left)
