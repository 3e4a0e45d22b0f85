"""`ckptctl checkpoints gc` and `list` of elastic runs, whose worlds a real keeper has stored in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.storage.checkpoints.verifier import verify_store
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.persistence.test_keeper import Desk
from tests.ckptd.persistence.test_run_store import World, found
from tests.ckptd.stored import Ctl, age, keys_in

pytestmark = pytest.mark.usefixtures("no_configuration")

OLD = 30 * 3600.0  # older than the grace time
JOB = "job"

Make = Callable[..., None]


@pytest.fixture
def desk(folder: Path) -> Desk:
    """With the times of a daemon: it deletes nothing within a test."""
    return Desk(f"file://{folder}")


@pytest.fixture
def make(desk: Desk, tmp_path: Path) -> Iterator[Make]:
    """Stores dense checkpoints of a world that end there."""
    worlds: dict[int, World] = {}

    def checkpoints(number: int, *ends: int) -> None:
        if number not in worlds:
            worlds[number] = World(desk, tmp_path / "shm", f"run.w{number}")
        for end in ends:
            worlds[number].checkpoint(end)
        # The keeper collects after a checkpoint: it must not see some of the files aged and others not.
        desk.keeper._aside.submit(lambda: None).result(30)

    yield checkpoints
    for world in worlds.values():
        world.segment.close()


def whole(folder: Path) -> list[tuple[str, int]]:
    """What is left, of which every byte is as it was."""
    report = verify_store(open_store(f"file://{folder}"))
    assert report.ok, report.findings
    return sorted((run, checkpoint.end) for _, run, checkpoint in report.whole)


def spoil(folder: Path, run: str) -> None:
    """An object of each of its checkpoints is lost."""
    for path in (folder / JOB / run).rglob("*.safetensors"):
        path.unlink()


def test_so_many_checkpoints_are_kept_over_all_worlds(ctl: Ctl, desk: Desk, make: Make, folder: Path) -> None:
    """It kept the newest two of each world, and so twice as much as asked for with each change of the world."""
    make(3, 20, 24)
    make(5, 50, 54)
    make(7, 40)
    age(folder, OLD)
    told = ctl("gc", "--keep-last", "2", "--dry-run")
    assert "delete  1 manifest" in told
    assert "incarnation 7 replaced it" in told
    assert len(whole(folder)) == 5
    ctl("gc", "--keep-last", "2")
    assert whole(folder) == [("run.w5", 54), ("run.w7", 40)]
    assert found(desk) == ([7, 5], [(7, 40), (5, 54)]), "of world 3 the mark is gone, too"
    assert not [key for key in keys_in(open_store(f"file://{folder}")) if "w3" in key]
    make(7, 44)
    age(folder, OLD)
    ctl("gc", JOB, "run", "--keep-last", "1")
    assert whole(folder) == [("run.w7", 44)]
    assert found(desk) == ([7], [(7, 44)])
    assert not list((folder / JOB).glob("run.w5/**/*.*"))
    make(7, 48)  # whoever writes there goes on
    assert whole(folder) == [("run.w7", 44), ("run.w7", 48)]


def test_the_only_whole_state_stays_wherever_it_is(ctl: Ctl, make: Make, folder: Path) -> None:
    """The later world's checkpoint is damaged, or so young that a reader may be at the one before."""
    make(5, 50, 54)
    make(7, 40)
    age(folder, OLD)
    make(8, 60)
    told = ctl.json("gc", "--keep-last", "1", "--dry-run")["runs"]
    assert [each["run"] for each in told] == ["run.w8", "run.w7", "run.w5"]
    assert [len(each["manifests"]) for each in told] == [0, 0, 2], "world 7 has settled"
    spoil(folder, "run.w7")
    ctl("gc", "--keep-last", "1")
    told = ctl.json("list", JOB, "run", "--fast")["runs"]
    left = [(each["run"], [row["iteration"] for row in each["checkpoints"]]) for each in told]
    assert left == [("run.w8", [60]), ("run.w7", [40]), ("run.w5", [54])]
    spoil(folder, "run.w8")
    age(folder, OLD)
    ctl("gc", "--keep-last", "1", "--grace", "0", "--settle", "0")
    report = verify_store(open_store(f"file://{folder}"))
    assert [(run, each.end) for _, run, each in report.whole] == [("run.w5", 54)]


def test_a_world_that_is_named_is_collected_alone_by_what_there_is_of_the_others(
    ctl: Ctl, make: Make, folder: Path
) -> None:
    make(3, 20)
    make(5, 50)
    make(7, 40, 44)
    ctl("pin", JOB, "run.w3", "20")
    age(folder, OLD)
    (told,) = ctl.json("gc", JOB, "run.w5", "--keep-last", "1")["runs"]
    assert (told["run"], told["kept"], told["done"]) == ("run.w5", [], True)
    assert [each["key"] for each in told["names"]] == [
        "job/run.w5/run.json",
        "job/run/worlds/000000000005",
    ]
    assert whole(folder) == [("run.w3", 20), ("run.w7", 40), ("run.w7", 44)]
    assert "keep    iteration 20 (epoch 1): pinned" in ctl("gc", JOB, "run", "--dry-run")


def test_a_world_of_which_a_manifest_cannot_be_read_is_left_alone(ctl: Ctl, make: Make, folder: Path) -> None:
    make(5, 50)
    make(7, 40, 44)
    age(folder, OLD)
    (manifest,) = (folder / JOB).glob("run.w5/000000000050/commit-*/*.json")
    manifest.write_bytes(b"damaged")
    before = sorted(path for path in folder.rglob("*") if "w5" in str(path))
    told = ctl.json("gc", JOB, "run", "--keep-last", "1", code=4)["runs"]
    assert "its references are not known" in told[1]["refused"]
    assert [len(each["manifests"]) for each in told] == [1, 0]
    assert sorted(path for path in folder.rglob("*") if "w5" in str(path)) == before


def test_a_list_tells_from_which_world_a_job_goes_on(ctl: Ctl, make: Make, folder: Path) -> None:
    make(5, 50)
    make(7, 40)
    text = ctl("list", JOB, "run")
    assert "job/run.w7 (elastic run run, incarnation 7: a restore from storage uses it" in text
    assert "job/run.w5 (elastic run run, incarnation 5: incarnation 7 replaced it" in text
    (told,) = ctl.json("list", JOB, "run.w5")["runs"]
    assert (told["elastic"], told["standing"].split(";")[0]) == (
        "run",
        "incarnation 5: incarnation 7 replaced it",
    )
    for path in (folder / JOB).glob("run.w7/*/commit-*/*.json"):
        path.unlink()
    text = ctl("list", JOB)
    assert "incarnation 7; it has no committed checkpoint yet: a restore from storage uses" in text
    assert "incarnation 5: a restore from storage uses it" in text
