"""What a keeper offers of a store in which something is missing, cut short, or of somebody else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptd.memory.segment_file import Segment
from ckptd.persistence import keeper_wire as w
from ckptd.storage.checkpoints.names import RunName
from ckptd.storage.checkpoints.reader import read_manifest
from tests.ckptd.persistence.slots import descriptor, segment_store
from tests.ckptd.persistence.test_keeper import Desk, checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    made = segment_store(tmp_path / "shm").create(descriptor(), 6, 1 << 20)
    yield made
    made.close()


@pytest.fixture
def desk(folder: Path, segment: Segment) -> Desk:
    """A keeper that has found two checkpoints of its own, of iterations 4 and 8."""
    made = Desk(f"file://{folder}")
    made.open()
    for end in (4, 8):
        checkpoint(made, segment, end)
        assert made.wait_settled().complete
    assert [found.end for found in made.find(0)] == [8, 4]
    return made


def read(desk: Desk, name: str, segment: Segment) -> Any:
    """The first bytes of its newest snapshot, to anywhere."""
    return desk.ask(w.ReadRange, name, 1, 0, 4096, str(segment.path), 1 << 20)


def newest_object(folder: Path) -> Path:
    (found,) = (folder / "job" / "run" / f"{8:012d}").glob("rank-00000/*.safetensors")
    return found


@pytest.mark.parametrize("how", ["missing", "cut short"])
def test_a_checkpoint_of_which_something_is_gone_is_not_offered_again(
    desk: Desk, segment: Segment, folder: Path, how: str
) -> None:
    """It was, and so every plan of the recovery came to the same end, although there was an older one."""
    newest = desk.find(0)[0]
    if how == "missing":
        newest_object(folder).unlink()
    else:
        newest_object(folder).write_bytes(newest_object(folder).read_bytes()[:100])
    refused = read(desk, newest.name, segment)
    assert isinstance(refused, w.KeeperFailed)
    assert [found.end for found in desk.find(0)] == [4]
    assert any(told.kind == "checkpoint_damaged" for told in desk.told)


def test_where_nothing_can_be_used_that_is_said_and_looked_at_anew_when_asked_again(
    desk: Desk, segment: Segment, folder: Path
) -> None:
    """It was told that there is nothing, so a job began anew; and for the keeper's life it was
    never looked at again.
    """
    names = [found.name for found in desk.find(0)]
    objects = {path: path.read_bytes() for path in folder.rglob("rank-00000/*.safetensors")}
    for path in objects:
        path.unlink()
    for name in names:
        assert isinstance(read(desk, name, segment), w.KeeperFailed)
    refused = desk.ask(w.FindStored, "job", "run", [0])
    assert isinstance(refused, w.KeeperFailed)
    assert "can be used" in refused.reason
    for path, data in objects.items():
        path.write_bytes(data)
    assert [found.end for found in desk.find(0)] == [8, 4]


def test_a_checkpoint_of_another_run_is_not_offered(desk: Desk, folder: Path) -> None:
    """Whoever copies two runs of one name into one folder must not get one that is mixed of both."""
    newest = desk.find(0)[0]
    store = desk.keeper._store
    stray = replace(read_manifest(store, newest.name), run_id="0123456789abcdef")
    store.delete([newest.name])
    store.put(stray.key, [memoryview(stray.to_bytes())])
    assert [found.end for found in desk.find(0)] == [4]
    assert any("run 0123456789abcdef" in told.message for told in desk.told)


def test_without_its_identity_a_run_is_found_all_the_same(desk: Desk, folder: Path) -> None:
    (folder / RunName("job", "run").key).unlink()
    again = Desk(f"file://{folder}")
    assert [found.end for found in again.find(0)] == [8, 4]


def test_who_goes_on_from_storage_gets_room_to_store(desk: Desk) -> None:
    """A ring that holds one suffix and two slots more has none left for snapshots while the next
    one is uploaded.
    """
    assert [found.num_slots for found in desk.find(0)] == [6, 6]
