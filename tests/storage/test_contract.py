"""What every store promises (`ObjectStore`), tried with each of them; S3 is a real server."""

from __future__ import annotations

import itertools
import mmap
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptd.storage.stores.fsspec_store import FsspecStore
from ckptd.storage.stores.objects import (
    Damaged,
    ObjectExists,
    ObjectMissing,
    ObjectStore,
    Range,
    StoreError,
    TooLarge,
)
from ckptd.storage.stores.open_store import open_store
from ckptd.storage.stores.store_base import StoreOptions
from tests.storage.s3_server import S3Server

MIB = 1 << 20
PART = 5 * MIB
SIZES = {"part_bytes": PART, "threshold_bytes": PART}
STORES = ("local", "memory", "s3fs", "s3-obstore", "s3-by-files", "memory-obstore")


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    opened = _open(request.param, request)
    yield opened
    opened.close()


def _open(name: str, request: pytest.FixtureRequest) -> ObjectStore:
    if name == "local":
        folder: Path = request.getfixturevalue("tmp_path")
        return open_store(f"file://{folder}/base", SIZES)
    if name.startswith("memory"):
        backend = "obstore" if name == "memory-obstore" else "fsspec"
        return open_store(f"memory://{uuid.uuid4().hex}/base", SIZES, backend)
    server: S3Server = request.getfixturevalue("s3_server")
    url: str = request.getfixturevalue("s3_url")
    if name == "s3-obstore":
        return open_store(url, {**server.options, **SIZES}, "obstore")
    session = {"session": request.getfixturevalue("aws_session")}
    if name == "s3-by-files":
        own = {k: v for k, v in server.options.items() if k != "region"}
        return FsspecStore(url, StoreOptions.of({**SIZES, "fsspec": {**own, **session}}))
    return open_store(url, {**server.options, **SIZES, "fsspec": session}, "fsspec")


def _put(store: ObjectStore, key: str, data: bytes, **how: bool) -> None:
    info = store.put(key, [memoryview(data)], **how)
    assert (info.key, info.size) == (key, len(data))


def _keys(store: ObjectStore, prefix: str) -> list[str]:
    return sorted(info.key for info in store.list(prefix))


def _bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def _get(store: ObjectStore, key: str, size: int) -> bytes:
    data = bytearray(size)
    store.read_ranges(key, [Range(0, memoryview(data))])
    return bytes(data)


class TestPut:
    def test_what_was_put_is_read(self, store: ObjectStore) -> None:
        _put(store, "a/b.bin", b"hello")
        assert store.read("a/b.bin", limit=5) == b"hello"

    def test_an_object_may_be_empty(self, store: ObjectStore) -> None:
        assert store.put("empty", []).size == 0
        assert store.put("also/empty", [memoryview(b""), memoryview(b"")]).size == 0
        assert store.read("empty", limit=0) == b""
        store.read_ranges("empty", [Range(0, memoryview(bytearray()))])
        assert _keys(store, "") == ["also/empty", "empty"]

    def test_parts_of_any_number_and_size_follow_each_other(self, store: ObjectStore) -> None:
        rng = random.Random(7)
        data = rng.randbytes(300_000)
        cuts = sorted(rng.randrange(len(data)) for _ in range(2000))
        ends = [0, 0, *cuts, len(data), len(data)]
        parts = [memoryview(data)[a:b] for a, b in itertools.pairwise(ends)]
        assert store.put("many", parts).size == len(data)
        assert store.read("many", limit=len(data)) == data

    def test_parts_may_have_items_of_any_type(self, store: ObjectStore) -> None:
        store.put("typed", [memoryview(bytearray(16)).cast("Q"), memoryview(b"x")])
        assert store.read("typed", limit=17) == bytes(16) + b"x"
        with pytest.raises(ValueError, match="one piece"):
            store.put("strided", [memoryview(b"abcdef")[::2]])

    @pytest.mark.parametrize("size", [PART - 1, PART, PART + 1, 2 * PART, 3 * PART + 1])
    def test_sizes_around_those_of_parts(self, store: ObjectStore, size: int) -> None:
        data = _bytes(size, seed=size)
        view = memoryview(data)
        third = size // 3
        store.put("big", [view[:7], view[7:third], view[third:]])
        assert _get(store, "big", size) == data
        assert [(info.key, info.size) for info in store.list("")] == [("big", size)]

    def test_a_put_replaces(self, store: ObjectStore) -> None:
        _put(store, "a", _bytes(PART + 10))
        _put(store, "a", b"short")
        assert store.read("a", limit=100) == b"short"

    def test_the_buffers_are_free_when_a_put_has_ended(self, store: ObjectStore) -> None:
        """The slots of a segment are unmapped and written again."""
        for size in (1000, 2 * PART):
            memory = mmap.mmap(-1, size)
            view = memoryview(memory)
            store.put("slot", [view[: size // 2], view[size // 2 :]])
            view.release()
            memory.close()  # BufferError if anybody still held it

    def test_the_info_is_that_of_the_object(self, store: ObjectStore) -> None:
        put = store.put("a/b", [memoryview(b"12345")])
        assert store.info("a/b") == put
        [listed] = store.list("a/")
        assert (listed.key, listed.size, listed.etag) == ("a/b", 5, put.etag)
        assert put.modified_ns > 1_600_000_000 * 10**9
        assert abs(listed.modified_ns - put.modified_ns) < 2 * 10**9


class TestIfAbsent:
    @pytest.mark.parametrize("size", [5, PART + 1])
    def test_the_first_one_stays(self, store: ObjectStore, size: int) -> None:
        _put(store, "once", _bytes(size, seed=1), if_absent=True)
        with pytest.raises(ObjectExists) as caught:
            store.put("once", [memoryview(_bytes(size, seed=2))], if_absent=True)
        assert caught.value.key == "once"
        assert not caught.value.retriable
        assert _get(store, "once", size) == _bytes(size, seed=1)
        assert _keys(store, "") == ["once"]

    def test_of_eight_writers_one_wins(self, store: ObjectStore) -> None:
        if not store.facts.conditional_create:
            pytest.skip("this store looks first")
        begin = threading.Barrier(8)

        def write(number: int) -> int:
            begin.wait()
            try:
                store.put("race", [memoryview(b"%d" % number)], if_absent=True)
            except ObjectExists:
                return -1
            return number

        with ThreadPoolExecutor(8) as pool:
            winners = [number for number in pool.map(write, range(8)) if number >= 0]
        assert len(winners) == 1
        assert store.read("race", limit=10) == b"%d" % winners[0]

    def test_the_probe_leaves_nothing(self, store: ObjectStore) -> None:
        assert store.facts is not None
        assert store.facts == store.facts
        assert _keys(store, "") == []
        assert store.abort_uploads("", 0.0) in (0, -1)


class TestRead:
    def test_a_limit_is_one(self, store: ObjectStore) -> None:
        _put(store, "manifest", bytes(1000))
        assert store.read("manifest", limit=1000) == bytes(1000)
        with pytest.raises(TooLarge, match="1000"):
            store.read("manifest", limit=999)

    def test_ranges_anywhere_and_in_any_order(self, store: ObjectStore) -> None:
        data = _bytes(3 * PART + 17)
        _put(store, "big", data)
        rng = random.Random(3)
        ranges = [(rng.randrange(len(data)), rng.randrange(1, 5000)) for _ in range(50)]
        ranges += [(0, 1), (len(data) - 1, 1), (PART - 3, 7), (1, 2 * PART + 1), (5, 0)]
        ranges += [(PART + 100 * i, 100) for i in range(30)]  # neighbours
        ranges = [(offset, min(size, len(data) - offset)) for offset, size in ranges]
        buffers = [bytearray(size) for _, size in ranges]
        store.read_ranges(
            "big",
            [Range(offset, memoryview(buffer)) for (offset, _), buffer in zip(ranges, buffers, strict=True)],
        )
        for (offset, size), buffer in zip(ranges, buffers, strict=True):
            assert buffer == data[offset : offset + size]

    def test_a_range_beyond_the_end_is_damage(self, store: ObjectStore) -> None:
        _put(store, "short", bytes(100))
        for offset, size in ((90, 11), (100, 1), (5000, 10)):
            with pytest.raises(Damaged) as caught:
                store.read_ranges("short", [Range(offset, memoryview(bytearray(size)))])
            assert caught.value.key == "short"

    def test_what_is_not_there_is_missing(self, store: ObjectStore) -> None:
        _put(store, "folder/object", b"x")
        for key in ("nothing", "folder", "folder/object/below", "no/such/folder"):
            assert store.info(key) is None
            with pytest.raises(ObjectMissing):
                store.read(key, limit=10)
            with pytest.raises(ObjectMissing):
                store.read_ranges(key, [Range(0, memoryview(bytearray(1)))])

    def test_buffers_must_be_writable(self, store: ObjectStore) -> None:
        with pytest.raises(ValueError, match="range"):
            store.read_ranges("a", [Range(0, memoryview(b"abc"))])
        with pytest.raises(ValueError, match="range"):
            store.read_ranges("a", [Range(-1, memoryview(bytearray(1)))])


class TestList:
    def test_everything_below_a_folder_and_nothing_beside_it(self, store: ObjectStore) -> None:
        for key in ("a/b/c", "a/b/d/e", "a/bc", "a/x", "b/b/c"):
            _put(store, key, b"1")
        assert _keys(store, "") == ["a/b/c", "a/b/d/e", "a/bc", "a/x", "b/b/c"]
        assert _keys(store, "a/b/") == ["a/b/c", "a/b/d/e"]
        assert _keys(store, "a/b/d/e/") == []
        assert _keys(store, "nothing/") == []

    def test_more_than_a_page(self, store: ObjectStore, request: pytest.FixtureRequest) -> None:
        keys = sorted(f"many/{i % 7}/{i}" for i in range(1100))
        s3 = store.facts.url.startswith("s3:")
        filler = _open("s3-obstore", request) if s3 else store  # the quickest
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: filler.put(key, [memoryview(b"x")]), keys))
        assert _keys(store, "many/") == keys
        store.delete(keys)
        assert _keys(store, "many/") == []

    def test_a_listing_is_never_stale(self, store: ObjectStore) -> None:
        assert _keys(store, "f/") == []
        _put(store, "f/1", b"x")
        assert _keys(store, "f/") == ["f/1"]
        _put(store, "f/2", b"x")
        assert _keys(store, "f/") == ["f/1", "f/2"]
        store.delete(["f/1"])
        assert _keys(store, "f/") == ["f/2"]
        assert store.info("f/1") is None


class TestDelete:
    def test_what_is_not_there_is_fine(self, store: ObjectStore) -> None:
        for key in ("a/1", "a/2", "b"):
            _put(store, key, b"x")
        store.delete(["a/1", "nothing", "no/folder/at/all", "b", "a/1"])
        assert _keys(store, "") == ["a/2"]
        store.delete([])
        store.delete(["nothing"])
        assert store.read("a/2", limit=1) == b"x"


BAD_KEYS = (
    "",
    "/a",
    "a/",
    "a//b",
    "../a",
    "a/../b",
    "a/./b",
    "ä",
    "a\nb",
    "a\\b",
    "a\x7f",
    "x" * 201,
    "a/" * 400 + "b",
    ".ckptd-x",
    "a/.ckptd-x/b",
)


class TestKeys:
    def test_impossible_keys_are_refused(self, store: ObjectStore) -> None:
        calls: list[Callable[[str], object]] = [
            lambda key: store.put(key, [memoryview(b"x")]),
            lambda key: store.read(key, limit=1),
            lambda key: store.read_ranges(key, [Range(0, memoryview(bytearray(1)))]),
            lambda key: store.info(key),
            lambda key: store.delete([key]),
        ]
        for key in BAD_KEYS:
            for call in calls:
                with pytest.raises(ValueError, match="key"):
                    call(key)

    def test_impossible_prefixes_are_refused(self, store: ObjectStore) -> None:
        for prefix in ("a", "/", "a//", "../", "ä/"):
            with pytest.raises(ValueError, match=r"prefix|key"):
                store.list(prefix)
            with pytest.raises(ValueError, match=r"prefix|key"):
                store.abort_uploads(prefix, 0.0)

    def test_every_printable_character_can_be_in_a_key(self, store: ObjectStore) -> None:
        signs = [chr(code) for code in range(32, 127) if chr(code) not in "/\\"]
        keys = sorted(f"signs/a{sign}b/c{sign}d" for sign in signs)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: _put(store, key, key.encode()), keys))
        assert _keys(store, "signs/") == keys
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(lambda key: store.read(key, limit=100).decode(), keys)] == keys
        store.delete(keys)
        assert _keys(store, "") == []


class TestThreads:
    def test_many_threads_share_a_store(self, store: ObjectStore) -> None:
        def work(number: int) -> None:
            key = f"thread/{number}"
            data = _bytes(MIB + number, seed=number)
            store.put(key, [memoryview(data)])
            assert _get(store, key, len(data)) == data
            assert key in _keys(store, "thread/")
            if number % 2:
                store.delete([key])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(24)))
        assert _keys(store, "thread/") == sorted(f"thread/{i}" for i in range(0, 24, 2))

    def test_others_run_while_a_call_waits(self, store: ObjectStore) -> None:
        if store.facts.url.startswith("memory:"):
            pytest.skip("nothing waits here")
        ticks = 0
        ended = threading.Event()

        def tick() -> None:
            nonlocal ticks
            while not ended.wait(0.0005):
                ticks += 1

        ticker = threading.Thread(target=tick)
        ticker.start()
        try:
            _put(store, "big", bytes(4 * PART))
        finally:
            ended.set()
            ticker.join()
        assert ticks > 2

    def test_closing_twice_is_fine(self, store: ObjectStore) -> None:
        _put(store, "a", b"x")
        store.close()
        store.close()


class TestCleaning:
    def test_nothing_half_finished_is_found_where_nothing_is(self, store: ObjectStore) -> None:
        _put(store, "a/b", bytes(PART + 1))
        assert store.abort_uploads("a/", 0.0) in (0, -1)
        assert _keys(store, "") == ["a/b"]

    def test_a_store_tells_who_it_is_and_no_secret(self, store: ObjectStore) -> None:
        assert store.facts.url.endswith(("/base", "/base/")) or "/tests/" in store.facts.url
        assert store.facts.backend in ("local", "fsspec", "obstore")
        for text in (repr(store), repr(store.facts)):
            assert "wordle" not in text

    def test_errors_can_be_pickled(self, store: ObjectStore) -> None:
        import pickle

        with pytest.raises(StoreError) as caught:
            store.read("nothing", limit=1)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))
