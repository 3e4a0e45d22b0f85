"""What all stores have in common: checks of keys and sizes, the probe, threads that fill buffers."""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from urllib.parse import urlsplit, urlunsplit

from ckptd.storage.stores.cutting import RangeRequest, flat, plan_reads, total
from ckptd.storage.stores.objects import (
    RESERVED,
    Damaged,
    ObjectExists,
    ObjectInfo,
    Range,
    StoreFacts,
    Unavailable,
    check_key,
    check_prefix,
    is_reserved,
)

__all__ = ["StoreBase", "public_url", "run_all"]

_PROBE = f"{RESERVED}probe-"


class StoreBase(ABC):
    """The seam's promises, kept once; what a backend does itself begins with an underscore."""

    def __init__(
        self, backend: str, url: str, *, piece_bytes: int, multipart: bool, conditional: bool | None
    ) -> None:
        """``conditional``: whether creating is exclusive; None: the store must be asked."""
        self._backend = backend
        self._url = public_url(url)
        self._piece_bytes = piece_bytes
        self._multipart = multipart
        self._conditional = conditional
        self._probing = threading.Lock()

    def __repr__(self) -> str:
        """Which store it is; nothing secret."""
        return f"<{self._backend} store {self._url}>"

    @property
    def facts(self) -> StoreFacts:
        """What the store is; asks it, once, whether a conditional create is one."""
        return StoreFacts(self._backend, self._url, self._is_conditional(), self._multipart)

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        """See `ObjectStore.put`."""
        check_key(key)
        views = flat(parts)
        size = total(views)
        if if_absent and not self._is_conditional() and self._info(key) is not None:
            raise ObjectExists(key, "exists already")
        self._put(key, views, size, if_absent=if_absent)
        stored = self._info(key)
        if stored is None:
            raise Unavailable(key, "was put, and the store does not show it")
        if stored.size != size:
            raise Damaged(key, f"{size} bytes were put, the store has {stored.size}")
        return stored

    def read(self, key: str, *, limit: int) -> bytes:
        """See `ObjectStore.read`."""
        return self._read(check_key(key), limit)

    def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
        """See `ObjectStore.read_ranges`."""
        pieces = plan_reads(ranges, self._piece_bytes)
        check_key(key)
        if pieces:
            self._read_pieces(key, pieces)

    def info(self, key: str) -> ObjectInfo | None:
        """See `ObjectStore.info`."""
        return self._info(check_key(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        found = self._list(check_prefix(prefix))
        return (each for each in found if not is_reserved(each.key))

    def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        checked = [check_key(key) for key in keys]
        if checked:
            self._delete(checked)

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        """See `ObjectStore.abort_uploads`."""
        return self._abort_uploads(check_prefix(prefix), older_than_s)

    @abstractmethod
    def close(self) -> None:
        """See `ObjectStore.close`."""

    # --- what a backend does ---

    @abstractmethod
    def _put(self, key: str, views: Sequence[memoryview], size: int, *, if_absent: bool) -> None:
        """Store it; where creating is exclusive, ``if_absent`` decides in the store itself."""

    @abstractmethod
    def _read(self, key: str, limit: int) -> bytes: ...

    @abstractmethod
    def _read_pieces(self, key: str, pieces: Sequence[RangeRequest]) -> None: ...

    @abstractmethod
    def _info(self, key: str) -> ObjectInfo | None: ...

    @abstractmethod
    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Reserved names may be among them."""

    @abstractmethod
    def _delete(self, keys: Sequence[str]) -> None: ...

    @abstractmethod
    def _abort_uploads(self, prefix: str, older_than_s: float) -> int: ...

    # --- the probe ---

    def _is_conditional(self) -> bool:
        with self._probing:
            if self._conditional is None:
                self._conditional = self._probe()
            return self._conditional

    def _probe(self) -> bool:
        """Whether a second create is refused: some servers ignore the condition, and say nothing."""
        key = f"{_PROBE}{secrets.token_hex(8)}"
        self._put(key, [memoryview(b"1")], 1, if_absent=True)
        try:
            try:
                self._put(key, [memoryview(b"2")], 1, if_absent=True)
            except ObjectExists:
                return True
            return False
        finally:
            self._delete([key])


def public_url(url: str) -> str:
    """The URL without user, password, query and fragment; of what is no URL at most the scheme."""
    try:
        parts = urlsplit(url)
    except ValueError:
        scheme, found, _ = url.partition("://")
        return f"{scheme}://…" if found else "…"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def run_all(pool: Executor, jobs: Sequence[Callable[[], None]]) -> None:
    """Run the jobs; returns or raises only when none of them runs any more."""
    futures = [pool.submit(job) for job in jobs]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    for future in futures:
        if not future.cancelled():
            future.result()
