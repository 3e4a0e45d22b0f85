"""`ckptctl checkpoints pin|unpin|rm|gc`: what goes, what stays, and that nothing that stays is ever damaged."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptd.ctl.command import CommandError
from ckptd.ctl.stores.store_access import OpenedStore, StorePlace
from ckptd.ctl.stores.store_changes import collect, pin, remove
from ckptd.memory.segment_file import Segment
from ckptd.storage.checkpoints.names import ManifestName, parse
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.checkpoints.retention import RetentionPolicy
from ckptd.storage.checkpoints.verifier import verify_store
from ckptd.storage.stores.objects import ObjectInfo, ObjectStore, Unavailable
from tests.ckptd.persistence.slots import descriptor, fill, segment_store
from tests.ckptd.persistence.test_keeper import Desk
from tests.ckptd.stored import (
    FROZEN,
    NAMES,
    Ctl,
    age,
    fill_store,
    keys_in,
    manifest_keys,
    needed_by,
    object_keys,
    whole_ends,
)
from tests.storage.memory_store import SECOND_NS, MemoryStore
from tests.storage.samples import JOB, RUN, Writer, window

AT_ONCE = ("--grace", "0", "--settle", "0")
HOUR = 3600.0
OLD = 30 * HOUR  # older than the grace time

pytestmark = pytest.mark.usefixtures("no_configuration")


@pytest.fixture
def store(store: ObjectStore, folder: Path) -> ObjectStore:
    """Checkpoints 11, 21 and 31 of two ranks, more than a day old."""
    age(folder, OLD)
    return store


def ends(store: ObjectStore) -> list[int]:
    return [c.id.end for c in read_catalog(store, *NAMES).checkpoints]


# -- pin -----------------------------------------------------------------------------------------


def test_a_pinned_checkpoint_stays_until_it_is_unpinned(ctl: Ctl, store: ObjectStore) -> None:
    assert ctl.json("pin", *NAMES, "11") | {"agreement": ""} == {
        "job": JOB,
        "run": RUN,
        "iteration": 11,
        "epoch": 7,
        "agreement": "",
        "pinned": True,
        "changed": True,
    }
    assert "is pinned, as before" in ctl("pin", *NAMES, "11")
    ctl("gc", "--keep-last", "1", *AT_ONCE)
    assert ends(store) == [31, 11]
    assert "pinned: run `ckptctl checkpoints unpin` first" in ctl("rm", *NAMES, "11", code=4)
    assert "unpin" in ctl("rm", *NAMES, "11", "--force", code=4)
    assert ctl("unpin", *NAMES, "11").endswith("is not pinned\n")
    assert "is not pinned, as before" in ctl("unpin", *NAMES, "11")
    ctl("gc", "--keep-last", "1", *AT_ONCE)
    assert ends(store) == [31]


def test_a_pin_whose_checkpoint_is_gone_can_be_taken_away(ctl: Ctl, store: ObjectStore) -> None:
    ctl("pin", *NAMES, "11")
    store.delete(manifest_keys(store, 11))
    assert ctl.json("unpin", *NAMES, "11")["changed"]
    assert read_catalog(store, *NAMES).pins == ()


class Racing(MemoryStore):
    """Somebody else removes a checkpoint as soon as something is put."""

    victims: Sequence[str] = ()

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        self.delete(self.victims)
        return super().put(key, parts, if_absent=if_absent)


def test_a_pin_that_came_too_late_is_none() -> None:
    store = Racing()
    fill_store(store)
    store.victims = manifest_keys(store, 11)
    place = OpenedStore(StorePlace("memory://test", {}, "auto"), store, map)
    with pytest.raises(CommandError, match="was removed before it was pinned"):
        pin(place, chosen(11))
    assert read_catalog(store, *NAMES).pins == ()


def chosen(iteration: int, *, force: bool = False) -> argparse.Namespace:
    return argparse.Namespace(
        job=JOB, run=RUN, iteration=iteration, epoch=None, agreement="", force=force, grace=OLD / 2
    )


# -- rm ------------------------------------------------------------------------------------------


def test_rm_removes_a_checkpoint_and_what_nobody_else_needs(
    ctl: Ctl, store: ObjectStore, folder: Path
) -> None:
    mine = needed_by(store, 21)
    others = needed_by(store, 11) | needed_by(store, 31)
    manifests = {info.key: info.size for info in store.list("") if "/000000000021/c" in info.key}
    only = {key: size for key, size in mine.items() if key not in others}
    done = ctl.json("rm", *NAMES, "21")
    assert (done["num_manifests"], done["num_objects"], done["left"]) == (2, len(only), 0)
    assert done["freed_bytes"] == sum(only.values()) + sum(manifests.values())
    assert set(object_keys(store)) == set(others)
    assert set(mine) & set(others), "the tensor that never changes is still there"
    assert whole_ends(folder) == [11, 31]
    assert read_catalog(store, *NAMES).foreign == ()


def test_the_newest_whole_one_goes_by_force_only(ctl: Ctl, store: ObjectStore, folder: Path) -> None:
    before = keys_in(store)
    assert "it is the newest whole checkpoint" in ctl("rm", *NAMES, "31", code=4)
    assert ctl.json("rm", *NAMES, "31", code=4)["exit_status"] == 4
    assert keys_in(store) == before
    ctl("rm", *NAMES, "31", "--force")
    assert whole_ends(folder) == [11, 21]
    assert set(object_keys(store)) == set(needed_by(store, 11) | needed_by(store, 21))


def test_a_damaged_newest_one_may_go_and_the_newest_whole_one_may_not(
    ctl: Ctl, store: ObjectStore, folder: Path
) -> None:
    (folder / object_keys(store, iteration=31)[0]).unlink()
    assert "it is the newest whole checkpoint" in ctl("rm", *NAMES, "21", code=4)
    ctl("rm", *NAMES, "31")
    assert whole_ends(folder) == [11, 21]


def test_one_that_may_be_being_written_goes_by_force_only(ctl: Ctl, store: ObjectStore) -> None:
    Writer(store, rank=0, world_size=2).commit(window(41))
    assert "a job may be writing it now" in ctl("rm", *NAMES, "41", code=4)
    ctl("rm", *NAMES, "41", "--force")
    assert ends(store) == [31, 21, 11]
    assert object_keys(store, iteration=41) == []


def test_what_a_running_job_may_refer_to_stays_for_gc(ctl: Ctl, store: ObjectStore, folder: Path) -> None:
    """The newest checkpoint was committed just now: a writer that has not seen it yet may still
    refer to the one before.
    """
    fill_store(store, [41])
    done = ctl.json("rm", *NAMES, "21")
    assert (done["num_manifests"], done["num_objects"]) == (2, 0)
    assert done["left"] == len(object_keys(store, iteration=21)) * 2
    assert "committed for less than 10 min" in done["reason"]
    assert "stay for now" in ctl("rm", *NAMES, "31")
    age(folder, HOUR)
    ctl("gc", "--grace", "10m")
    assert object_keys(store, iteration=21) == []
    assert whole_ends(folder) == [11, 41]


def test_what_is_younger_than_the_grace_time_stays_for_gc(ctl: Ctl, store: ObjectStore, folder: Path) -> None:
    """Committed by all long ago, and yet: a rank may have put this object again for what it is
    about to commit.
    """
    age(folder, -20 * HOUR)
    done = ctl.json("rm", *NAMES, "21")
    assert (done["num_manifests"], done["num_objects"], done["left"]) == (2, 0, 4)
    assert "younger than 24 h" in done["reason"]
    done = ctl.json("rm", *NAMES, "11", "--grace", "1h")
    assert done["left"] == 0
    assert len(object_keys(store, iteration=21)) == 2
    ctl("gc", "--grace", "1h")
    assert set(object_keys(store)) == set(needed_by(store, 31))
    assert whole_ends(folder) == [31]


def test_the_last_thing_that_is_left_goes_by_force_only(ctl: Ctl, store: ObjectStore, folder: Path) -> None:
    """Nothing is whole any more: what is damaged may be all that can be repaired."""
    for end in (11, 21, 31):
        (folder / object_keys(store, iteration=end)[0]).unlink()
    assert "may be the last usable state" in ctl("rm", *NAMES, "21", code=4)
    ctl("rm", *NAMES, "21", "--force")
    assert ends(store) == [31, 11]


def test_what_was_decided_long_ago_is_not_done_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers count on it: what they saw in the store stays for some minutes."""
    store = Slow()
    fill_store(store)
    store.now_ns += int(OLD) * SECOND_NS
    before = keys_in(store)
    place = OpenedStore(StorePlace("memory://test", {}, "auto"), store, map)
    args = argparse.Namespace(job=JOB, run=RUN, dry_run=False)
    monkeypatch.setattr("ckptd.ctl.stores.store_changes.time", store)
    with pytest.raises(CommandError, match="with objects left"):
        collect(place, args, RetentionPolicy(keep_last=1), lambda plan: None)
    with pytest.raises(CommandError, match="with objects left"):
        remove(place, chosen(21))
    assert keys_in(store) == before


class Slow(MemoryStore):
    """Reading takes a minute and a half; it is the clock, too."""

    elapsed_s = 0.0

    def monotonic(self) -> float:
        return self.elapsed_s

    def read(self, key: str, *, limit: int) -> bytes:
        self.elapsed_s += 90.0
        return super().read(key, limit=limit)


def test_an_object_stays_where_a_manifest_that_may_need_it_cannot_be_read(
    ctl: Ctl, store: ObjectStore, folder: Path
) -> None:
    damaged = manifest_keys(store, 11)[0]
    content = (folder / damaged).read_bytes()
    (folder / damaged).write_bytes(b"damaged")
    objects = object_keys(store)
    done = ctl.json("rm", *NAMES, "21", "--force")
    assert (done["num_manifests"], done["num_objects"]) == (2, 0)
    assert damaged in done["reason"]
    assert object_keys(store) == objects
    (folder / damaged).write_bytes(content)
    assert whole_ends(folder) == [11, 31]


class Dying(MemoryStore):
    """Fails after so many deletions of single keys."""

    deletions = 1 << 30

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self.deletions == 0:
                raise Unavailable(key, "it went away")
            self.deletions -= 1
            super().delete([key])


@pytest.mark.parametrize("steps", range(8))
def test_a_removal_that_is_cut_short_damages_nothing(steps: int) -> None:
    """Whenever it dies: what is committed is whole, and gc finds the rest."""
    store = Dying()
    fill_store(store)
    store.now_ns += int(OLD) * SECOND_NS
    place = OpenedStore(StorePlace("memory://test", {}, "auto"), store, map)
    store.deletions = steps + 1  # one is of the object that tells the time
    with contextlib.suppress(Unavailable):
        remove(place, chosen(21))
    store.deletions = 1 << 30
    report = verify_store(store)
    assert report.ok, report.findings
    store.now_ns += 86_400 * SECOND_NS
    policy = RetentionPolicy(keep_last=1, grace_ns=SECOND_NS, settle_ns=SECOND_NS)
    args = argparse.Namespace(job=JOB, run=RUN, dry_run=False)
    collect(place, args, policy, lambda plan: None)
    assert set(object_keys(store)) == set(needed_by(store, 31))


def test_a_job_that_runs_goes_on_after_a_checkpoint_was_removed(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    """A store that a daemon's keeper writes: what it refers to next is still there."""
    desk = Desk(f"file://{folder}")
    segment = segment_store(tmp_path / "shm").create(descriptor(), 6, 1 << 20)
    desk.open()
    for end in (2, 4, 6):
        keep(desk, segment, end)
    age(folder, OLD)
    ctl = Ctl(capsys, str(folder))
    rows = ctl.json("list", "job", "run")["runs"][0]["checkpoints"]
    assert [row["iteration"] for row in rows] == [6, 4, 2]
    shown = ctl.json("show", "job", "run", "6")["ranks"][0]
    assert (shown["window"], shown["shared_bytes"] >= 300_000) == (2, True)
    assert ctl.json("rm", "job", "run", "4")["num_manifests"] == 1
    keep(desk, segment, 8)
    assert whole_ends(folder) == [6, 8]
    segment.close()


def keep(desk: Desk, segment: Segment, end: int) -> None:
    snapshots = [fill(segment, i % 6, i) for i in (end - 1, end)]
    for snapshot in snapshots:
        desk.put(segment, snapshot.iteration % 6, snapshot)
    desk.commit(segment, *snapshots)
    assert desk.wait_settled().complete
    desk.keeper._aside.submit(lambda: None).result(30)  # after what followed the manifest


# -- gc ------------------------------------------------------------------------------------------


def test_a_dry_run_tells_all_and_touches_nothing(ctl: Ctl, store: ObjectStore, folder: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    found = ctl.json("gc", "--dry-run", "--keep-last", "1", "--grace", "0")
    text = ctl("gc", "--dry-run", "--keep-last", "1", "--grace", "0")
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    (run,) = found["runs"]
    assert (found["dry_run"], run["done"], run["refused"]) == (True, False, "")
    assert [(kept["iteration"], kept["reason"]) for kept in run["kept"]] == [(31, "one of the last 1")]
    gone = {each["key"]: each for each in run["manifests"] + run["objects"]}
    assert set(gone) == set(manifest_keys(store, 11) + manifest_keys(store, 21)) | (
        set(object_keys(store)) - set(needed_by(store, 31))
    )
    assert run["freed_bytes"] == sum(each["size"] for each in gone.values())
    assert all("replaced by iteration 31" in each["reason"] for each in run["manifests"])
    assert "keep    iteration 31 (epoch 7): one of the last 1" in text
    assert "delete  4 manifests" in text
    assert "nothing was deleted" in text


def test_gc_does_what_the_dry_run_told(ctl: Ctl, store: ObjectStore, folder: Path) -> None:
    told = ctl.json("gc", "--dry-run", "--keep-last", "1", "--grace", "0")["runs"][0]
    text = ctl("gc", *NAMES, "--keep-last", "1", "--grace", "0")
    assert f"deleted {len(told['manifests']) + len(told['objects'])} keys" in text
    assert set(object_keys(store)) == set(needed_by(store, 31))
    assert whole_ends(folder) == [31]
    again = ctl.json("gc", "--keep-last", "1", "--grace", "0")["runs"][0]
    assert (again["manifests"], again["objects"], again["done"]) == ([], [], True)
    assert [key for key in keys_in(store) if parse(key) is None] == []


def test_gc_keeps_by_number_multiple_and_age(ctl: Ctl, store: ObjectStore, folder: Path) -> None:
    plan = ctl.json("gc", "--dry-run", "--keep-last", "2", "--grace", "0")["runs"][0]
    assert sorted(kept["iteration"] for kept in plan["kept"]) == [21, 31]
    plan = ctl.json("gc", "--dry-run", "--keep-last", "1", "--keep-every", "20")["runs"][0]
    assert sorted(kept["iteration"] for kept in plan["kept"]) == [11, 21, 31]
    age(folder, 10 * 86_400, *manifest_keys(store, 11))
    for text, expected in (("2d", [21, 31]), ("400h", [11, 21, 31]), ("0", [31]), ("90m", [31])):
        plan = ctl.json("gc", "--dry-run", "--keep-last", "1", "--keep-for", text)["runs"][0]
        assert sorted(kept["iteration"] for kept in plan["kept"]) == expected


def test_what_stays_is_as_configured_unless_it_is_given(
    ctl: Ctl, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_PERSIST_KEEP_LAST", "2")
    plan = ctl.json("gc", "--dry-run")["runs"][0]
    assert sorted(kept["iteration"] for kept in plan["kept"]) == [21, 31]


def test_what_is_younger_than_the_grace_time_is_left_alone(
    ctl: Ctl, store: ObjectStore, folder: Path
) -> None:
    orphan = Writer(store, rank=0, world_size=2)
    orphan.upload(window(15)[0])
    (key,) = object_keys(store, iteration=14)
    ctl("gc")
    assert key in keys_in(store)
    age(folder, OLD, key)
    ctl("gc")
    assert key not in keys_in(store)


def test_gc_deletes_nothing_of_a_run_of_which_a_manifest_cannot_be_read(
    ctl: Ctl, store: ObjectStore, folder: Path
) -> None:
    fill_store(store, job="other")
    age(folder, HOUR)
    damaged = manifest_keys(store, 21)[1]
    assert isinstance(parse(damaged), ManifestName)
    job = damaged.split("/")[0]
    (folder / damaged).write_bytes(b"damaged")
    before = [key for key in keys_in(store) if key.startswith(f"{job}/")]
    found = ctl.json("gc", "--keep-last", "1", "--grace", "0", code=4)
    refused = {run["job"]: run["refused"] for run in found["runs"]}
    assert damaged in refused[job]
    assert [key for key in keys_in(store) if key.startswith(f"{job}/")] == before
    (other,) = set(refused) - {job}
    assert refused[other] == ""
    assert [c.id.end for c in read_catalog(store, other, RUN).checkpoints] == [31]
    out, _ = ctl.run("checkpoints", "gc", "--store", ctl.store, code=4)
    assert "nothing is deleted" in out


def test_time_is_the_stores() -> None:
    """Our clock is years ahead of the store's (1970): what was written there a minute ago is not
    taken for old.
    """
    store = MemoryStore()
    fill_store(store)
    store.now_ns += 60 * SECOND_NS
    before = keys_in(store)
    place = OpenedStore(StorePlace("memory://test", {}, "auto"), store, map)
    args = argparse.Namespace(job=None, run=None, dry_run=False)
    policy = RetentionPolicy(keep_last=1, grace_ns=0)
    collect(place, args, policy, lambda plan: None)
    assert keys_in(store) == before
    store.now_ns += 600 * SECOND_NS
    collect(place, args, policy, lambda plan: None)
    assert ends(store) == [31]


def test_gc_ends_what_dead_writers_left_half_finished(ctl: Ctl, store: ObjectStore, folder: Path) -> None:
    left = folder / JOB / RUN / ".ckptd-0123456789abcdef"
    left.write_bytes(b"half of an object")
    os.utime(left, (1, 1))
    assert "ended 1 half-finished upload" in ctl("gc")
    assert not left.exists()


def test_a_stale_checkpoint_of_which_a_later_one_is_whole_may_be_removed(
    ctl: Ctl, store: ObjectStore, folder: Path
) -> None:
    """The job was recovered at 21, and epoch 8 has reached 25: 31 of epoch 7 is of no use any more."""
    for rank in (0, 1):
        writer = Writer(store, rank=rank, world_size=2)
        writer.commit(window(25, seeds=FROZEN, rank=rank, epoch=8, epoch_start=21))
    age(folder, OLD)
    ctl("rm", *NAMES, "31")
    assert ends(store) == [25, 21, 11]
    assert whole_ends(folder) == [11, 21, 25]
    assert object_keys(store, iteration=31) == []


def test_each_run_of_a_name_keeps_its_own(ctl: Ctl, store: ObjectStore, folder: Path) -> None:
    """Somebody removed ``run.json``, and the job began anew: what the run before had stored was
    "replaced" by what it has not to do with, and its newest checkpoint could be removed without
    being asked twice.
    """
    for rank in (0, 1):
        other = Writer(store, rank=rank, world_size=2, run_id="89abcdef")
        for end in (41, 51):
            other.commit(window(end, seeds=FROZEN, rank=rank))
    age(folder, OLD)
    ctl("gc", "--keep-last", "1", *AT_ONCE)
    assert ends(store) == [51, 31]
    for newest in ("31", "51"):
        assert "it is the newest whole checkpoint" in ctl("rm", *NAMES, newest, code=4)
    ctl("rm", *NAMES, "31", "--force")
    assert ends(store) == [51]
    assert set(object_keys(store)) == set(needed_by(store, 51))
