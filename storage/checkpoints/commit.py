"""When a rank may write its manifest, and what it may refer to in it. ``docs/format.md`` section 7.

Whoever collects garbage sees what the store shows; a writer knows, beside that, the history that it is part
of, of which the store may show nothing yet. What a writer refers to must stay in *both* views: in the
store's, nothing newer may have replaced it, or it could be deleted at this very moment, and rightly.

What is decided here holds for a while only (`RetentionPolicy.settle_ns`): whoever was allowed to commit
does it within half of that time after the listing was begun, and within half of `RetentionPolicy.grace_ns`
after the first object was put; or looks again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ckptd.storage.checkpoints.catalog import (
    Catalog,
    CheckpointState,
    StoredCheckpoint,
    build_catalog,
)
from ckptd.storage.checkpoints.names import CheckpointId
from ckptd.storage.stores.objects import ObjectInfo

__all__ = ["Views", "see"]


@dataclass(frozen=True, slots=True)
class Views:
    """One listing of a run as everybody sees it (``shown``) and as a writer does (``own``)."""

    shown: Catalog
    own: Catalog

    def base_of(self, rank: int) -> StoredCheckpoint | None:
        """The checkpoint whose manifest by this rank tells what need not be uploaded again.

        None if there is none that is sure to stay: then everything is uploaded.
        """
        last = self.own.last_of(rank)
        return last if last is not None and last.id in self._staying() else None

    def refusal(self, checkpoint: CheckpointId, relied: Collection[str]) -> str:
        """Why a rank must not write its manifest of ``checkpoint``; "" if it may.

        Args:
            relied: the keys of the manifests because of which something was not uploaded again.
        """
        left = self.own.leaving(checkpoint.epoch, checkpoint.end)
        if left is not None:
            return f"a later history began at iteration {left.start}"
        newest = self.own.newest
        if newest is not None and newest.id.end >= checkpoint.end and newest.id != checkpoint:
            return f"{newest.id} is committed"
        staying = self._staying()
        sure = {
            info.key
            for c in self.own.checkpoints
            if c.id in staying
            for info in c.manifests.values()
        }
        lost = sorted(set(relied) - sure)
        return f"what was not uploaded again may be deleted ({lost[0]})" if lost else ""

    def _staying(self) -> set[CheckpointId]:
        """What nobody may delete: what is stale in neither view, and was not replaced in anybody's.

        A collector may still act on a listing in which what is stale by now was not: therefore what is
        complete counts as a replacement, stale or not, unless whoever sees the one sees the other as stale.
        """
        complete = [c.id for c in self.shown.checkpoints if c.complete]
        stale = {
            c.id
            for c in (*self.shown.checkpoints, *self.own.checkpoints)
            if c.state is CheckpointState.STALE
        }
        return {
            c.id
            for c in self.own.checkpoints
            if c.id not in stale and not any(_may_replace(other, c.id) for other in complete)
        }


def _may_replace(newer: CheckpointId, older: CheckpointId) -> bool:
    abandoned = newer.epoch < older.epoch and older.epoch_start < newer.end
    return newer.end > older.end and not abandoned


def see(
    listing: Iterable[ObjectInfo], job: str, run: str, *, known_epochs: Mapping[int, int]
) -> Views:
    """Both views of one listing; ``known_epochs`` as in `build_catalog`, the writer's own among them."""
    infos = list(listing)
    return Views(
        build_catalog(infos, job, run),
        build_catalog(infos, job, run, known_epochs=known_epochs),
    )
