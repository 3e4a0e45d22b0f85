"""The rules by which a rank may write its manifest and refer to objects. ``docs/format.md`` section 7.

A garbage collector sees only the store. A writer also knows its own history, which the store may not show
yet. An object that a writer refers to must stay in *both* views: if a newer checkpoint has replaced it in
the store's view, a collector may be deleting it now.

A decision is valid for a limited time (`RetentionPolicy.settle_ns`): a writer commits within half of that
time after the start of the listing, and within half of `RetentionPolicy.grace_ns` after its first upload;
or lists again.
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
    """One listing of a run as every process sees it (``shown``), and as the writer sees it (``own``)."""

    shown: Catalog
    own: Catalog

    def base_of(self, rank: int) -> StoredCheckpoint | None:
        """The checkpoint whose objects this rank need not upload again.

        None if no checkpoint is sure to stay: then everything is uploaded.
        """
        last = self.own.last_of(rank)
        return last if last is not None and last.id in self._staying() else None

    def refusal(self, checkpoint: CheckpointId, relied: Collection[str]) -> str:
        """The reason why a rank must not write its manifest of ``checkpoint``; "" if it may.

        Args:
            relied: the keys of the manifests whose objects the rank did not upload again.
        """
        left = self.own.leaving(checkpoint.epoch, checkpoint.end)
        if left is not None:
            return f"a later history began at iteration {left.start}"
        newest = self.own.newest
        if newest is not None and newest.id.end >= checkpoint.end and newest.id != checkpoint:
            return f"{newest.id} is committed"
        staying = self._staying()
        sure = {info.key for c in self.own.checkpoints if c.id in staying for info in c.manifests.values()}
        lost = sorted(set(relied) - sure)
        return f"objects that it refers to may be deleted: {lost[0]} was replaced" if lost else ""

    def _staying(self) -> set[CheckpointId]:
        """The checkpoints that no collector may delete: stale in neither view, and replaced in no view.

        A collector may still act on an older listing, in which a stale checkpoint was not stale yet.
        Therefore every complete checkpoint counts as a replacement, stale or not, unless each view that
        shows the one shows the other as stale.
        """
        complete = [c.id for c in self.shown.checkpoints if c.complete]
        stale = {
            c.id for c in (*self.shown.checkpoints, *self.own.checkpoints) if c.state is CheckpointState.STALE
        }
        return {
            c.id
            for c in self.own.checkpoints
            if c.id not in stale and not any(_may_replace(other, c.id) for other in complete)
        }


def _may_replace(newer: CheckpointId, older: CheckpointId) -> bool:
    abandoned = newer.epoch < older.epoch and older.epoch_start < newer.end
    return newer.end > older.end and not abandoned


def see(listing: Iterable[ObjectInfo], job: str, run: str, *, known_epochs: Mapping[int, int]) -> Views:
    """Both views of one listing; ``known_epochs`` as in `build_catalog`, the writer's own among them."""
    infos = list(listing)
    return Views(
        build_catalog(infos, job, run),
        build_catalog(infos, job, run, known_epochs=known_epochs),
    )
