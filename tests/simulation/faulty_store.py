"""An object store that fails in parts, as one process sees it (`StoreClient`), and what is in it (`Bucket`).

A request takes effect at one time, or never; the answer may be lost, and then the effect may come later than
the error. A listing shows what took effect before it began; what changes while it is made, it may show or not.
It may end in the middle. A deletion of many may delete some. Nothing is promised of the clocks: the store's is
none of the machines'.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ckptd.storage.stores.objects import (
    NoSpace,
    ObjectInfo,
    Range,
    StoreError,
    StoreFacts,
    StoreRefused,
    Throttled,
    Unavailable,
    check_prefix,
)
from tests.simulation.played_threads import Threads
from tests.storage.memory_store import SECOND_NS, MemoryStore

__all__ = ["Bucket", "StoreClient", "Trouble"]

T = TypeVar("T")
_MOST_S = 170.0  # an attempt takes at most the time of three requests
_CLOCK_S = 1_700_000_000


class Watcher(Protocol):
    """Who is told of each change, once it is there."""

    def stored(self, key: str) -> None: ...

    def deleted(self, keys: Sequence[str]) -> None: ...


@dataclass
class Trouble:
    """How a store, or the way of one machine to it, fails for a while; shares of all requests."""

    away: bool = False  # nothing arrives
    refuses: bool = False  # credentials
    full: bool = False  # a quota: nothing can be put
    fails: float = 0.0  # does not arrive
    lost: float = 0.0  # takes effect, and the answer is lost
    late: float = 0.0  # takes effect after the error
    torn: float = 0.0  # listings that end in the middle, deletions that do some
    slow_s: float = 0.3  # most of the time of a request
    dies_in: int = 0  # requests, until the process that asks dies; 0: it does not


class Bucket(MemoryStore):
    """The objects; each change is told to the oracle."""

    def __init__(self, threads: Threads, watcher: Watcher, rng: random.Random) -> None:
        super().__init__()
        self.threads, self.watcher, self.rng = threads, watcher, rng
        self.trouble = Trouble()
        self.at_next: list[Callable[[], None]] = []  # what happens at the next request
        self.infos: dict[str, ObjectInfo] = {}  # of all objects, in the order of `objects`
        self.version = 0  # another one after each change

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        yield from [info for key, info in self.infos.items() if key.startswith(prefix)]

    def time_ns(self) -> int:
        """By the store's clock; in whole seconds, as S3 tells it."""
        return int(_CLOCK_S + self.threads.clock.now_s) * SECOND_NS

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        before, self.now_ns = self.objects.get(key), self.time_ns()
        info = self.infos[key] = super().put(key, parts, if_absent=if_absent)
        self.version += 1
        unlike = before is not None and before != self.objects[key]
        assert not unlike, f"(s1) {key} stands for two contents"
        self.watcher.stored(key)
        return info

    def delete(self, keys: Sequence[str]) -> None:
        there = [key for key in keys if key in self.objects]
        super().delete(there)
        self.version += 1
        for key in there:
            self.infos.pop(key, None)
        self.watcher.deleted(there)


class StoreClient:
    """The `ObjectStore` of one process.

    Args:
        own: the trouble that it has alone.
        die: ends the process.
    """

    def __init__(self, bucket: Bucket, own: Callable[[], Trouble], die: Callable[[], None]) -> None:
        self._bucket, self._trouble, self._die = bucket, own, die
        self._rng = bucket.rng

    @property
    def facts(self) -> StoreFacts:
        return self._bucket.facts

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        copied = [memoryview(b"".join(parts))]
        return self._request(key, lambda: self._bucket.put(key, copied, if_absent=if_absent), puts=True)

    def read(self, key: str, *, limit: int) -> bytes:
        return self._request(key, lambda: self._bucket.read(key, limit=limit))

    def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
        self._request(key, lambda: self._bucket.read_ranges(key, ranges))

    def info(self, key: str) -> ObjectInfo | None:
        return self._request(key, lambda: self._bucket.info(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        listed, version = self._request(prefix, lambda: ([*self._bucket.list(prefix)], self._bucket.version))
        self._wait()
        shown = listed if self._bucket.version == version else [*self._shown(listed, prefix)]
        self._rng.shuffle(shown)
        torn = self._rng.random() < self._share("torn")
        yield from shown[: self._rng.randrange(len(shown) + 1)] if torn else shown
        if torn:
            raise Unavailable(prefix, "the listing broke off")

    def _shown(self, listed: Sequence[ObjectInfo], prefix: str) -> Sequence[ObjectInfo]:
        """What a listing shows if it began with ``listed``, and something changed meanwhile."""
        before = {info.key: info for info in listed}
        after = {info.key: info for info in self._bucket.list(prefix)}
        shown = []
        for key in dict.fromkeys([*before, *after]):
            old, new = before.get(key), after.get(key)
            info = old if old == new or self._rng.random() < 0.5 else new
            if info is not None:
                shown.append(info)
        return shown

    def delete(self, keys: Sequence[str]) -> None:
        some = [key for key in keys if self._rng.random() < 0.5] if self._torn() else keys
        self._request(keys[0] if keys else "", lambda: self._bucket.delete(some))
        if len(some) < len(keys):
            raise Unavailable(keys[0], "some were not deleted")

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        return self._request(prefix, lambda: 0)

    def close(self) -> None:
        """Nothing to let go of."""

    def _dies(self) -> bool:
        """Whether this request is the last one of the process."""
        own = self._trouble()
        left, own.dies_in = own.dies_in, max(0, own.dies_in - 1)
        return left == 1

    def _end(self) -> None:
        self._bucket.threads.clock.later(0.0, self._die)
        self._bucket.threads.pause(_MOST_S)

    def _torn(self) -> bool:
        return self._rng.random() < self._share("torn")

    def _share(self, what: str) -> float:
        return float(max(getattr(self._trouble(), what), getattr(self._bucket.trouble, what)))

    def _wait(self, most_s: float = _MOST_S / 4) -> None:
        slow_s = min(self._share("slow_s"), most_s)
        self._bucket.threads.pause(self._rng.uniform(0.0, slow_s))

    def _request(self, key: str, effect: Callable[[], T], *, puts: bool = False) -> T:
        self._wait()
        while self._bucket.at_next:
            self._bucket.threads.clock.later(0.0, self._bucket.at_next.pop())
        dies = self._dies()
        if dies and self._rng.random() < 0.5:
            self._end()
        if self._share("away"):
            self._bucket.threads.pause(self._rng.uniform(5.0, 60.0))
            raise Unavailable(key, "no answer")
        if self._share("refuses"):
            raise StoreRefused(key, "expired credentials")
        if puts and self._share("full"):
            raise NoSpace(key, "a quota")
        draw = self._rng.random()
        fails, lost, late = (self._share(what) for what in ("fails", "lost", "late"))
        if draw < fails:
            raise self._rng.choice((Unavailable, Throttled))(key, "try again")
        if draw < fails + late:
            self._bucket.threads.clock.later(self._rng.uniform(0.0, _MOST_S / 2), lambda: _ignoring(effect))
            self._wait()
            raise Unavailable(key, "timed out")
        result = effect()
        if dies:
            self._end()
        self._wait()
        if draw < fails + late + lost:
            raise Unavailable(key, "the answer is lost")
        return result


def _ignoring(effect: Callable[[], object]) -> None:
    """Nobody waits for it any more."""
    try:
        effect()
    except StoreError:
        return
