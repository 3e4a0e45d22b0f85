"""A store in memory that follows the seam, with a clock that tests turn, for tests of what lies above it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptd.storage.stores.objects import (
    Damaged,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    Range,
    StoreFacts,
    TooLarge,
    check_key,
    check_prefix,
)

SECOND_NS = 10**9


class MemoryStore:
    """Objects in a dict; ``now_ns`` is its clock, ``reads`` what was asked for."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.modified: dict[str, int] = {}
        self.now_ns = 1_000 * SECOND_NS
        self.reads: list[tuple[str, int, int]] = []

    @property
    def facts(self) -> StoreFacts:
        return StoreFacts("memory", "memory://test", conditional_create=True, multipart=False)

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        check_key(key)
        if if_absent and key in self.objects:
            raise ObjectExists(key, "it exists")
        self.objects[key] = b"".join(parts)
        self.modified[key] = self.now_ns
        return self._info(key)

    def read(self, key: str, *, limit: int) -> bytes:
        data = self._data(key)
        if len(data) > limit:
            raise TooLarge(key, f"{len(data)} bytes")
        return data

    def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
        data = self._data(key)
        for wanted in ranges:
            end = wanted.offset + len(wanted.into)
            self.reads.append((key, wanted.offset, len(wanted.into)))
            if end > len(data):
                raise Damaged(key, f"it ends at {len(data)}, before {end}")
            wanted.into[:] = data[wanted.offset : end]

    def info(self, key: str) -> ObjectInfo | None:
        return self._info(key) if key in self.objects else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        yield from [self._info(key) for key in self.objects if key.startswith(prefix)]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)
            self.modified.pop(key, None)

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        return -1

    def close(self) -> None:
        """Nothing to let go of."""

    def _info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self.objects[key]), self.modified[key], "")

    def _data(self, key: str) -> bytes:
        if key not in self.objects:
            raise ObjectMissing(key, "there is no such object")
        return self.objects[key]
