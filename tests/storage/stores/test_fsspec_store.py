"""What any fsspec file system does as a store, and what the base does for all of them."""

from __future__ import annotations

import asyncio
import errno
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ckptd.storage.stores.fsspec_store import FsspecStore
from ckptd.storage.stores.objects import (
    Damaged,
    NoSpace,
    ObjectInfo,
    Range,
    StoreError,
    StoreRefused,
    Unavailable,
)
from ckptd.storage.stores.store_base import RangeRequest, StoreBase, StoreOptions, total


class Failing(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose reads and writes fail as the test says."""

    protocol = "failing"
    store: dict[str, Any] = {}  # noqa: RUF012 - as in its base: one for all
    error: Exception | None = None

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        if self.error is not None:
            raise self.error
        return super().cat_file(path, start, end, **kwargs)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode and self.error is not None:
            return _HalfWritten(super().open(path, mode), self.error)
        return super().open(path, mode, **kwargs)


class _HalfWritten:
    """A file whose second write fails; closing it would commit the first."""

    def __init__(self, file: Any, error: Exception) -> None:
        self._file = file
        self._error = error
        self._writes = 0

    def write(self, data: memoryview) -> None:
        self._writes += 1
        if self._writes > 1:
            raise self._error
        self._file.write(bytes(data))

    def close(self) -> None:
        self._file.close()


@pytest.fixture(autouse=True)
def _failing() -> Iterator[None]:
    fsspec.register_implementation("failing", Failing, clobber=True)
    yield
    Failing.error = None
    Failing.store.clear()


@pytest.fixture
def store() -> FsspecStore:
    return FsspecStore(f"failing://{uuid.uuid4().hex}", StoreOptions())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "full"), NoSpace),
        (PermissionError("no"), StoreRefused),
        (TimeoutError("late"), Unavailable),
        (RuntimeError("who knows"), Unavailable),
        (ConnectionResetError("gone"), Unavailable),
    ],
)
def test_errors_of_file_systems(store: FsspecStore, error: Exception, expected: type[StoreError]) -> None:
    store.put("a", [memoryview(b"abc")])
    Failing.error = error
    with pytest.raises(expected) as caught:
        store.read("a", limit=3)
    assert caught.value.__cause__ is error
    with pytest.raises(expected):
        store.put("b", [memoryview(b"1"), memoryview(b"2")])
    Failing.error = None
    assert [info.key for info in store.list("")] == ["a"]  # nothing half-written is left


def test_secrets_are_hidden_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    options = StoreOptions(key="who", secret="hush-hush")
    store = FsspecStore(f"failing://{uuid.uuid4().hex}", options)
    store.put("a", [memoryview(b"abc")])
    Failing.error = RuntimeError("cannot log in with hush-hush")
    with pytest.raises(Unavailable, match=r"log in with \*\*\*"):
        store.read("a", limit=3)


def test_answers_that_are_too_short(store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", [memoryview(b"abc")])
    monkeypatch.setattr(Failing, "cat_file", lambda *args, **kwargs: b"ab")
    with pytest.raises(Damaged):
        store.read("a", limit=3)


def test_a_range_that_fails_is_read_again(store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection that broke made the whole call fail: only the store for S3 asked again."""
    store.put("a", [memoryview(b"abc")])
    answers: list[Exception | bytes] = [ConnectionResetError("gone"), b"abc"]

    def answer(*args: Any, **kwargs: Any) -> bytes:
        match answers.pop(0):
            case bytes() as data:
                return data
            case error:
                raise error

    monkeypatch.setattr(Failing, "cat_file", answer)
    into = bytearray(3)
    store.read_ranges("a", [Range(0, memoryview(into))])
    assert into == b"abc"
    assert not answers


class Stalling(AsyncFileSystem):  # type: ignore[misc]
    """A file system that never answers, and tells when it is not waited for any more."""

    protocol = "stalling"
    given_up = threading.Event()

    async def _info(self, path: str, **kwargs: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up.set()


def test_a_file_system_that_does_not_answer_is_left_in_time() -> None:
    """The call waited for as long as the file system did, and what it had asked for went on."""
    fsspec.register_implementation("stalling", Stalling, clobber=True)
    store = FsspecStore("stalling://x", StoreOptions(request_timeout_s=0.2))
    with pytest.raises(Unavailable, match="no answer in time"):
        store.info("a")
    assert Stalling.given_up.is_set()
    store.close()


class InMemory(StoreBase):
    """A server that ignores conditions, or loses bytes, without a word."""

    def __init__(self, *, honours: bool, loses: int = 0) -> None:
        super().__init__("toy", "toy://", piece_bytes=100, multipart=False, conditional=None)
        self.objects: dict[str, bytes] = {}
        self.puts = 0
        self._honours = honours
        self._loses = loses

    def _put(self, key: str, views: Sequence[memoryview], size: int, *, if_absent: bool) -> None:
        from ckptd.storage.stores.objects import ObjectExists

        assert total(views) == size
        self.puts += 1
        if if_absent and self._honours and key in self.objects:
            raise ObjectExists(key, "exists already")
        data = b"".join(views)
        self.objects[key] = data[: len(data) - self._loses]

    def _read(self, key: str, limit: int) -> bytes:
        return self.objects[key]

    def _read_pieces(self, key: str, pieces: Sequence[RangeRequest]) -> None:
        raise NotImplementedError

    def _info(self, key: str) -> ObjectInfo | None:
        found = self.objects.get(key)
        return None if found is None else ObjectInfo(key, len(found), 0, "")

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(ObjectInfo(key, len(data), 0, "") for key, data in self.objects.items())

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def _abort_uploads(self, prefix: str, older_than_s: float) -> int:
        return -1

    def close(self) -> None:
        self.objects.clear()


@pytest.mark.parametrize("honours", [False, True])
def test_conditions_are_tried_not_believed(honours: bool) -> None:
    store = InMemory(honours=honours)
    assert store.puts == 0
    assert store.facts.conditional_create is honours
    assert store.facts.conditional_create is honours
    assert store.puts == 2  # once and for all
    assert store.objects == {}


def test_where_conditions_are_ignored_the_store_is_asked_first() -> None:
    from ckptd.storage.stores.objects import ObjectExists

    store = InMemory(honours=False)
    store.put("a", [memoryview(b"1")], if_absent=True)
    with pytest.raises(ObjectExists):
        store.put("a", [memoryview(b"2")], if_absent=True)
    assert store.objects == {"a": b"1"}


def test_a_put_is_checked_against_what_the_store_has() -> None:
    store = InMemory(honours=True, loses=1)
    with pytest.raises(Damaged, match="3 bytes were put, the store has 2"):
        store.put("a", [memoryview(b"abc")])


def test_what_is_the_stores_own_is_not_listed() -> None:
    store = InMemory(honours=True)
    store.objects = {".ckptd-probe-1": b"", "a/.ckptd-2": b"", "folder/": b"", "a/b": b""}
    assert [info.key for info in store.list("")] == ["a/b"]
