"""`ckptctl checkpoints list`, `show` and `verify`, on folders with real checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptd.ctl.stores.store_access import OpenedStore, StorePlace
from ckptd.ctl.stores.store_checks import check_run
from ckptd.storage.checkpoints.names import IncarnationName
from ckptd.storage.checkpoints.verifier import verify_store
from ckptd.storage.stores.objects import ObjectStore
from tests.ckptd.stored import (
    ENDS,
    FROZEN,
    NAMES,
    Ctl,
    age,
    fill_store,
    manifest_keys,
    needed_by,
    object_keys,
)
from tests.storage.memory_store import MemoryStore
from tests.storage.samples import JOB, RUN, Writer, window, write_identity

pytestmark = pytest.mark.usefixtures("no_configuration")


def flip(folder: Path, key: str) -> None:
    data = bytearray((folder / key).read_bytes())
    data[-100] ^= 1
    (folder / key).write_bytes(data)


# -- list ----------------------------------------------------------------------------------------


def test_a_list_is_newest_first_with_sizes_and_what_only_one_needs(
    ctl: Ctl, store: ObjectStore, folder: Path
) -> None:
    age(folder, 7200)
    (found,) = ctl.json("list")["runs"]
    rows = found["checkpoints"]
    assert [(row["iteration"], row["state"]) for row in rows] == [
        (end, "committed") for end in reversed(ENDS)
    ]
    needed = {end: needed_by(store, end) for end in ENDS}
    for row in rows:
        mine = needed[row["iteration"]]
        others = {key for end in ENDS if end != row["iteration"] for key in needed[end]}
        assert row["size_bytes"] == sum(mine.values())
        assert row["own_bytes"] == sum(size for key, size in mine.items() if key not in others)
        assert 0 < row["own_bytes"] < row["size_bytes"]
        assert (row["world_size"], row["epoch"], row["pinned"]) == (2, 7, False)
        assert 7200 <= row["age_s"] < 7500
    text = ctl("list", *NAMES)
    assert text.splitlines()[0].endswith(str(folder).replace(" ", "%20"))
    assert "2 h" in text or "120 min" in text


def test_a_list_tells_who_is_missing_what_is_stale_and_what_is_pinned(ctl: Ctl, store: ObjectStore) -> None:
    """The job was recovered at 11 and goes on as epoch 8: what epoch 7 had after that is of no use."""
    later = Writer(store, rank=1, world_size=2)
    later.commit(window(14, seeds=FROZEN, rank=1, epoch=8, epoch_start=11))
    ctl("pin", *NAMES, "11")
    rows = {row["iteration"]: row for row in ctl.json("list", JOB)["runs"][0]["checkpoints"]}
    assert [(end, row["state"]) for end, row in rows.items()] == [
        (31, "stale"),
        (21, "stale"),
        (14, "incomplete"),
        (11, "committed"),
    ]
    assert rows[14]["missing"] == [0]
    assert "a later history began at iteration 11" in rows[31]["reason"]
    assert [row["pinned"] for row in rows.values()] == [False, False, False, True]
    text = ctl("list", *NAMES)
    assert "1 of 2 ranks are missing: 0" in text


def test_a_list_without_names_shows_all_runs_of_all_jobs(ctl: Ctl, store: ObjectStore) -> None:
    fill_store(store, [5], job="other")
    runs = ctl.json("list")["runs"]
    assert [(run["job"], len(run["checkpoints"])) for run in runs] == [(JOB, 3), ("other", 1)]
    assert [run["job"] for run in ctl.json("list", "other")["runs"]] == ["other"]


def test_a_list_of_an_elastic_run_has_all_its_worlds(ctl: Ctl, store: ObjectStore) -> None:
    """The latest first. What is called like a world and is not marked as one is another run; marks
    are no runs, and nothing is amiss.
    """
    for info in list(store.list(f"{JOB}/{RUN}/")):
        for world in (5, 6, 7):
            key = info.key.replace(f"{JOB}/{RUN}/", f"{JOB}/elastic.w{world}/")
            store.put(key, [memoryview(store.read(info.key, limit=1 << 30))])
    for world in (5, 7):
        store.put(IncarnationName(JOB, "elastic", world).key, [])
    runs = ctl.json("list", JOB, "elastic", "--fast")["runs"]
    assert [run["run"] for run in runs] == ["elastic.w7", "elastic.w5"]
    assert [[row["iteration"] for row in run["checkpoints"]] for run in runs] == [list(reversed(ENDS))] * 2
    everything = [run["run"] for run in ctl.json("list", JOB, "--fast")["runs"]]
    assert everything == ["elastic.w7", "elastic.w5", "elastic.w6", RUN]
    marks = [f for f in verify_store(store).findings if "/worlds/" in f.key]
    assert marks == []


def test_a_fast_list_reads_no_manifest(ctl: Ctl, store: ObjectStore, folder: Path) -> None:
    for key in manifest_keys(store):
        (folder / key).write_bytes(b"damaged")
    rows = ctl.json("list", "--fast")["runs"][0]["checkpoints"]
    assert [row["iteration"] for row in rows] == [31, 21, 11]
    assert {row["size_bytes"] for row in rows} == {None}


def test_a_manifest_that_cannot_be_read_is_told_in_the_list(
    ctl: Ctl, store: ObjectStore, folder: Path
) -> None:
    damaged = manifest_keys(store, 21)[0]
    (folder / damaged).write_bytes(b"damaged")
    (run,) = ctl.json("list")["runs"]
    sizes = {row["iteration"]: row["size_bytes"] for row in run["checkpoints"]}
    assert (sizes[21], sizes[31]) == (None, sum(needed_by(store, 31).values()))
    assert {row["own_bytes"] for row in run["checkpoints"]} == {None}  # 21 may need anything
    assert list(run["unreadable"]) == [damaged]
    assert f"damaged: {damaged}" in ctl("list")


def test_an_empty_store_is_no_error(ctl: Ctl, folder: Path) -> None:
    folder.mkdir()
    assert "contains no checkpoints" in ctl("list")


# -- show ----------------------------------------------------------------------------------------


def test_show_tells_of_each_rank_what_it_uploaded_and_what_a_restore_replays(
    ctl: Ctl, store: ObjectStore
) -> None:
    found = ctl.json("show", *NAMES, "31")
    assert (found["start"], found["replayed"]) == (30, 1)
    sizes = {info.key: info.size for info in store.list("")}
    for rank in found["ranks"]:
        assert [s["iteration"] for s in rank["snapshots"]] == [30, 31]
        for snapshot in rank["snapshots"]:
            own = [k for k in snapshot["objects"] if f"{snapshot['iteration']:012d}/rank-" in k]
            assert snapshot["objects"] == {key: sizes[key] for key in snapshot["objects"]}
            assert snapshot["uploaded_bytes"] == sum(sizes[key] for key in own)
            assert snapshot["shared_bytes"] == 64 * 8 * 4  # expert.0.w, of iteration 10
            assert snapshot["num_anchors"] == 1
        assert rank["num_objects"] == 3
    text = ctl("show", *NAMES, "31", "--rank", "1")
    assert "a restore loads snapshots 30 to 31, and replays 1 iteration\n" in text
    assert object_keys(store, iteration=31)[1] in text
    assert object_keys(store, iteration=31)[0] not in text


def test_show_of_a_checkpoint_with_a_damaged_manifest_says_so(
    ctl: Ctl, store: ObjectStore, folder: Path
) -> None:
    (folder / manifest_keys(store, 31)[1]).write_bytes(b"damaged")
    text = ctl("show", *NAMES, "31", code=1)
    assert "DAMAGED: " in text
    assert "a restore does not use it: a manifest is damaged" in text


def test_of_several_that_end_alike_the_committed_one_is_shown(ctl: Ctl, store: ObjectStore) -> None:
    later = Writer(store, rank=0, world_size=2)
    later.commit(window(21, seeds=FROZEN, epoch=8, epoch_start=20))
    assert "several" in ctl("show", *NAMES, "21", code=2)  # stale, and incomplete
    Writer(store, rank=1, world_size=2).commit(window(21, rank=1, epoch=8, epoch_start=20))
    assert ctl.json("show", *NAMES, "21")["checkpoint"]["epoch"] == 8
    old = ctl.json("show", *NAMES, "21", "--epoch", "7")["checkpoint"]
    assert (old["epoch"], old["state"]) == (7, "stale")
    begin = old["agreement"][:6]
    assert ctl.json("show", *NAMES, "21", "--agreement", begin)["checkpoint"] == old | {
        "age_s": pytest.approx(old["age_s"], abs=60)
    }


# -- verify --------------------------------------------------------------------------------------


def test_what_is_whole_is_found_whole(ctl: Ctl, store: ObjectStore, folder: Path) -> None:
    newest = ctl.json("verify", *NAMES)
    assert (newest["ok"], newest["full"], newest["findings"]) == (True, True, [])
    assert [each["iteration"] for each in newest["whole"]] == [31]
    # What two ranks share may be read for each of them, when that is done at the same time.
    assert newest["read_bytes"] >= sum(needed_by(store, 31).values())
    assert [each["iteration"] for each in ctl.json("verify", *NAMES, "11")["whole"]] == [11]
    everything = ctl.json("verify", *NAMES, "--all")
    assert [each["iteration"] for each in everything["whole"]] == [31, 21, 11]
    out, err = ctl.run("verify", str(folder), "--json", code=0)
    assert (json.loads(out)["whole"], err) == (everything["whole"], "")


@pytest.mark.parametrize("command", ["newest", "all", "url"])
def test_a_flipped_bit_is_found_with_its_tensor_and_what_to_do(
    ctl: Ctl, store: ObjectStore, folder: Path, command: str
) -> None:
    victim = object_keys(store, iteration=31)[0]
    flip(folder, victim)
    line = {
        "newest": ("checkpoints", "verify", *NAMES, "--store", str(folder)),
        "all": ("checkpoints", "verify", *NAMES, "--all", "--store", str(folder)),
        "url": ("verify", str(folder)),
    }[command]
    found = json.loads(ctl.run(*line, "--json", code=1)[0])
    (error,) = [finding for finding in found["findings"] if finding["severity"] == "error"]
    assert (error["key"], error["tensor"] != "") == (victim, True)
    assert "restore it from an older version or a backup" in error["advice"]
    instead = "found no other whole checkpoint" if command == "newest" else "a restore uses iteration 21"
    assert instead in error["advice"]
    text = ctl.run(*line, code=1)[0]
    assert f"-> {error['advice']}" in text
    assert "DAMAGED: 1 error;" in text
    assert json.loads(ctl.run(*line, "--json", "--fast", code=0)[0])["read_bytes"] == 0


def test_fast_finds_what_is_missing_and_what_is_too_short(ctl: Ctl, store: ObjectStore, folder: Path) -> None:
    gone, short = object_keys(store, iteration=31)
    (folder / gone).unlink()
    (folder / short).write_bytes((folder / short).read_bytes()[:-1])
    found = ctl.json("verify", *NAMES, "--fast", code=1)
    whats = {finding["key"]: finding["what"] for finding in found["findings"]}
    assert whats[gone] == "it is missing"
    assert "but its manifest says" in whats[short]
    assert found["whole"] == []


def test_an_incomplete_checkpoint_is_damage_only_if_it_is_the_one_that_is_meant(
    ctl: Ctl, store: ObjectStore
) -> None:
    Writer(store, rank=0, world_size=2).commit(window(41))
    found = ctl.json("verify", *NAMES, "41", code=1)
    assert "`ckptctl checkpoints rm moe run-1 41`" in found["findings"][0]["advice"]
    (finding,) = ctl.json("verify", *NAMES, "--all")["findings"]
    assert (finding["severity"], "incomplete" in finding["what"]) == ("warning", True)


class Losing(MemoryStore):
    """Of which objects vanish while one is read."""

    victims: tuple[str, ...] = ()

    def read(self, key: str, *, limit: int) -> bytes:
        self.delete(self.victims)
        return super().read(key, limit=limit)


def test_what_a_job_removes_during_a_verification_is_not_damage() -> None:
    """A verification takes hours, and retention of a running job goes on: that is no loss. An
    object that is needed is.
    """
    store = Losing()
    fill_store(store)
    still = {key for end in (21, 31) for key in needed_by(store, end)}
    only = [key for key in needed_by(store, 11) if key not in still]
    place = OpenedStore(StorePlace("memory://test", {}, "auto"), store, map)
    store.victims = (*manifest_keys(store, 11), *only)
    found = check_run(place, *NAMES, full=True, quiet=True)
    assert (found.ok, [each.iteration for each in found.whole]) == (True, [31, 21])

    store.victims = (object_keys(store, iteration=31)[0],)
    found = check_run(place, *NAMES, full=True, quiet=True)
    assert not found.ok
    assert [each.iteration for each in found.whole] == [21]
    assert {f.key for f in found.findings if f.severity == "error"} == set(store.victims)


def test_a_run_without_its_identity_is_told(ctl: Ctl, store: ObjectStore, folder: Path) -> None:
    (folder / JOB / RUN / "run.json").unlink()
    (finding,) = ctl.json("verify", *NAMES)["findings"]
    assert (finding["severity"], "job and run of these checkpoints" in finding["advice"]) == (
        "warning",
        True,
    )
    write_identity(store)
    assert ctl.json("verify", *NAMES)["findings"] == []
