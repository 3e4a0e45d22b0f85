"""Files as objects: durable, atomic, and nothing left behind by writers that fail or die."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ckptd.storage.stores.objects import (
    ContainerMissing,
    NoSpace,
    ObjectExists,
    ObjectMissing,
    ObjectStore,
    Range,
    StoreRefused,
)
from ckptd.storage.stores.open_store import open_store

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "base"))


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _put(store: ObjectStore, key: str, data: bytes) -> None:
    store.put(key, [memoryview(data)])


def test_a_put_ends_with_file_and_folders_on_disk(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def note(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", note)
    _put(store, "a/b/object", b"x")
    base = str(tmp_path / "base")
    assert [base, f"{base}/a"] == synced[:2]  # the new folders' names
    assert synced[2].startswith(f"{base}/a/b/.ckptd-")
    assert synced[3:] == [f"{base}/a/b"]


def _full_after(calls: int) -> Callable[[int, Sequence[memoryview], int], int]:
    """A `pwritev` whose disk is full after so many calls; it writes a little each time."""
    real = os.pwritev
    left = calls

    def pwritev(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, [buffers[0][:1000]], offset)

    return pwritev


@pytest.mark.parametrize("if_absent", [False, True])
def test_a_full_disk_leaves_nothing(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, if_absent: bool
) -> None:
    _put(store, "a/old", b"old")
    monkeypatch.setattr(os, "pwritev", _full_after(3))
    with pytest.raises(NoSpace) as caught:
        store.put("a/new", [memoryview(bytes(MIB))], if_absent=if_absent)
    assert not caught.value.retriable
    assert _files(tmp_path / "base") == ["a/old"]


def test_short_writes_go_on(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(5500)
    view = memoryview(data)
    monkeypatch.setattr(os, "pwritev", _full_after(100))
    store.put("a", [view[:1], view[1:2500], view[2500:2500], view[2500:]])
    assert store.read("a", limit=5500) == data


def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from ckptd.storage.stores.objects import NoSpace\n"
        "from ckptd.storage.stores.open_store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "store.put('kept', [memoryview(b'kept')])\n"
        "try:\n    store.put('big', [memoryview(bytes(1 << 20))] * 8)\n"
        "except NoSpace:\n    print(*(info.key for info in store.list('')), store.abort_uploads('', 0))\n"
    )
    script = 'mount -t tmpfs -o size=4m none "$1" && exec "$2" -c "$3" "$1"'
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    mounted = ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, program]
    done = subprocess.run(mounted, capture_output=True, text=True, timeout=60, check=False)
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr}")
    assert done.stdout.split() == ["kept", "0"], done.stderr


def test_a_put_leaves_nothing_in_the_page_cache(store: ObjectStore, tmp_path: Path) -> None:
    """A checkpoint that stays there pushes the training data out: a terabyte a day of what nobody
    reads again.
    """
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(MIB))
    if _cached(plain, 0) == 0:
        pytest.skip("this file system does not tell what is cached")
    held = []
    for turn in range(3):
        _put(store, f"a/{turn}", os.urandom(40 * MIB))
        path = tmp_path / "base" / "a" / str(turn)
        held.append(sum(_cached(path, at) > 0 for at in range(0, 40 * MIB, MIB)))
    # The kernel keeps what its journal or another core has in hand at that moment: of one put now
    # and then, of all three never.
    assert min(held) <= 2, held


def _cached(path: Path, offset: int) -> int:
    """How many bytes can be read here without going to the disk; 0 as well where the file system
    does not tell.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        # Else the kernel reads ahead, although it is told not to wait, and the next look finds what
        # this one has brought.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return os.preadv(file, [bytearray(4096)], offset, os.RWF_NOWAIT)
    except OSError:
        return 0
    finally:
        os.close(file)


def test_readers_see_the_old_object_or_the_new_one(store: ObjectStore) -> None:
    contents = [bytes([n]) * (MIB + n) for n in range(2)]
    _put(store, "a", contents[0])
    ended = threading.Event()
    seen: list[bytes] = []

    def read() -> None:
        while not ended.is_set():
            seen.append(store.read("a", limit=2 * MIB))

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(40):
        _put(store, "a", contents[n % 2])
    ended.set()
    reader.join()
    assert set(seen) <= set(contents)


def test_a_writer_that_is_killed_leaves_a_file_that_is_found(store: ObjectStore, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from ckptd.storage.stores.open_store import open_store\n"
        "real = os.fsync\n"
        "def fsync(file):\n"
        "    if '.ckptd-' in os.readlink(f'/proc/self/fd/{file}'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(file)\n"
        "os.fsync = fsync\n"
        "open_store(sys.argv[1]).put('a/b', [memoryview(bytes(1 << 20))])\n"
    )
    base = tmp_path / "base"
    done = subprocess.run([sys.executable, "-c", program, str(base)], timeout=60, check=False)
    assert done.returncode == -9
    assert len(_files(base)) == 1
    assert list(store.list("")) == []
    assert store.info("a/b") is None
    assert store.abort_uploads("", 3600.0) == 0
    assert store.abort_uploads("other/", 0.0) == 0
    assert store.abort_uploads("a/", 0.0) == 1
    assert _files(base) == []


def test_what_is_being_written_is_as_old_as_the_folder_says(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose clock was a day ahead took what others were writing in a shared folder for left
    behind, and removed it.
    """
    begun = tmp_path / "base" / ".ckptd-0123456789abcdef"
    begun.write_bytes(b"half of it")
    ahead_s = time.time() + 25 * 3600.0
    monkeypatch.setattr(time, "time", lambda: ahead_s)
    assert store.abort_uploads("", 24 * 3600.0) == 0
    assert _files(tmp_path / "base") == [begun.name]


def test_a_base_that_vanished_is_not_made_again(store: ObjectStore, tmp_path: Path) -> None:
    """It may be a mount: its objects would land on another disk."""
    _put(store, "a", b"x")
    (tmp_path / "base").rename(tmp_path / "away")
    calls: list[Callable[[], object]] = [
        lambda: _put(store, "a", b"x"),
        lambda: _put(store, "b/c", b"x"),
        lambda: store.read("a", limit=1),
        lambda: store.read_ranges("a", [Range(0, memoryview(bytearray(1)))]),
        lambda: store.info("a"),
        lambda: list(store.list("")),
        lambda: store.delete(["a"]),
        lambda: store.abort_uploads("", 0.0),
    ]
    for call in calls:
        with pytest.raises(ContainerMissing):
            call()
    assert not (tmp_path / "base").exists()


def test_what_others_put_there_is_an_object_too(store: ObjectStore, tmp_path: Path) -> None:
    _put(store, "a/b", b"x")
    shutil.copy(tmp_path / "base" / "a" / "b", tmp_path / "base" / "c")
    assert sorted(info.key for info in store.list("")) == ["a/b", "c"]


def test_an_object_in_the_way_of_a_folder(store: ObjectStore) -> None:
    _put(store, "a", b"x")
    with pytest.raises(StoreRefused, match="one name"):
        _put(store, "a/b", b"x")
    _put(store, "c/d", b"x")
    with pytest.raises(StoreRefused, match="one name"):
        _put(store, "c", b"x")
    store.delete(["c"])  # a folder: no such object
    assert store.read("c/d", limit=1) == b"x"


def test_no_permission(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreRefused):
        _put(store, "a", b"x")


def test_empty_folders_go_with_their_last_object(store: ObjectStore, tmp_path: Path) -> None:
    for key in ("a/b/c/1", "a/b/2"):
        _put(store, key, b"x")
    store.delete(["a/b/c/1"])
    assert not (tmp_path / "base/a/b/c").exists()
    store.delete(["a/b/2"])
    assert [*(tmp_path / "base").iterdir()] == []


def test_folders_that_come_and_go(store: ObjectStore) -> None:
    """Deleting the last object takes the folder from under a writer's feet."""
    until = time.monotonic() + 1.0

    def come_and_go(number: int) -> None:
        while time.monotonic() < until:
            _put(store, f"a/b/{number}", b"x")
            store.delete([f"a/b/{number}"])

    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            come_and_go(number)
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_links_creating_is_exclusive_among_processes(store: ObjectStore, tmp_path: Path) -> None:
    other = open_store(f"file://{tmp_path}/base")
    other.put("a", [memoryview(b"1")], if_absent=True)
    with pytest.raises(ObjectExists):
        store.put("a", [memoryview(b"2")], if_absent=True)
    assert _files(tmp_path / "base") == ["a"]


def test_large_reads_by_several_threads(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), {"part_bytes": 5 * MIB, "concurrency": 3})
    data = os.urandom(41 * MIB)
    _put(store, "big", data)
    into = bytearray(len(data) - 5)
    store.read_ranges("big", [Range(5, memoryview(into))])
    assert into == data[5:]
    store.close()


def test_paths(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    for url in (str(folder), f"file://{folder}", f"file://{folder}".replace(" ", "%20")):
        assert open_store(url).facts.url == f"file://{folder}"
    assert [*tmp_path.iterdir()] == [folder]
    for url in ("relative/path", "file://host/path", "file:relative"):
        with pytest.raises(ValueError, match=r"absolute|host"):
            open_store(url)


def test_a_missing_object_is_missing(store: ObjectStore) -> None:
    with pytest.raises(ObjectMissing):
        store.read("a/b", limit=1)
