"""A store of elastic jobs for one test: what a daemon is told of it, and what lies there of which world."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ckptd.storage.checkpoints.catalog import Catalog
from ckptd.storage.checkpoints.names import IncarnationName, parse, run_of_incarnation
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.stores.objects import ObjectStore
from ckptd.storage.stores.open_store import open_store
from tests.e2e.bucket import OFTEN, Bucket

__all__ = ["WorldStore"]

_T = TypeVar("_T")
_JOB = "e2e"


class WorldStore:
    """
    Args:
        settings: of the daemons that store there.
        opened: the store, past any proxy.
    """

    def __init__(self, settings: dict[str, Any], opened: Callable[[], ObjectStore]) -> None:
        self.settings, self._opened = settings, opened

    @classmethod
    def folder(cls, path: Path) -> WorldStore:
        """One that all nodes share."""
        url = f"file://{path}"
        return cls({"store": url, **OFTEN}, lambda: open_store(url))

    @classmethod
    def bucket(cls, bucket: Bucket, **settings: Any) -> WorldStore:
        """A prefix in a real S3 server."""
        return cls(bucket.settings(**settings), bucket.open)

    def worlds(self, run: str) -> list[int]:
        """Those that are marked, the latest first."""
        return self._with(lambda store: _worlds(store, run))

    def catalog(self, run: str, world: int) -> Catalog:
        return self._with(lambda store: read_catalog(store, _JOB, run_of_incarnation(run, world)))

    def committed(self, run: str) -> list[int]:
        """The ends of the checkpoints of the latest world, newest first."""
        worlds = self.worlds(run)
        found = self.catalog(run, worlds[0]).committed if worlds else ()
        return [checkpoint.id.end for checkpoint in found]

    def newest(self, run: str) -> tuple[int, int]:
        """World and end of the checkpoint that a start would go on from; (-1, -1): there is none."""
        for world in self.worlds(run):
            for checkpoint in self.catalog(run, world).committed:
                return world, checkpoint.id.end
        return -1, -1

    def damage(self, run: str, world: int, end: int) -> str:
        """Flip a bit in what a rank of that world stored of that iteration; returns in which object."""
        catalog = self.catalog(run, world)
        keys = [o.info.key for (_, it), each in catalog.objects.items() if it == end for o in each]

        def flip(store: ObjectStore) -> None:
            data = bytearray(store.read(max(keys), limit=1 << 30))
            data[-100] ^= 1
            store.put(max(keys), [memoryview(bytes(data))])

        self._with(flip)
        return max(keys)

    def _with(self, work: Callable[[ObjectStore], _T]) -> _T:
        store = self._opened()
        try:
            return work(store)
        finally:
            store.close()


def _worlds(store: ObjectStore, run: str) -> list[int]:
    names = [parse(info.key) for info in store.list(f"{_JOB}/{run}/")]
    return sorted((n.number for n in names if isinstance(n, IncarnationName)), reverse=True)
