"""Rules of durable checkpoints, each broken by itself, for `tests.simulation.storage_world`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from ckptd.core.persister import Persister
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.run_in_store import RunRetention
from ckptd.persistence.run_store import RunStore
from ckptd.persistence.tier import RankPersistence
from ckptd.storage.checkpoints import catalog, retention
from ckptd.storage.checkpoints.catalog import CheckpointState, StoredCheckpoint
from ckptd.storage.checkpoints.retention import Deletion
from tests.simulation.model import WorldConfig
from tests.simulation.mutations import Mutation
from tests.simulation.storage_world import play_storage

__all__ = ["STORAGE_MUTATIONS"]

Found = tuple[list[w.CommittedCheckpoint], int]
_GONE_BACK = frozenset({"gone back", "all memory lost", "machine lost", "machine cut from store"})
_LEFT = frozenset({"gone back", "all memory lost", "keeper dies", "machine cut from store", "requests fail"})


def _objects_first(self: RunRetention, *plan: Collection[Deletion], listed_s: float) -> None:
    _delete(self, *reversed(plan), listed_s=listed_s)  # type: ignore[arg-type]


_delete = RunRetention.delete


def _nothing_is_named(seen: catalog.Catalog, used: Collection[str], *rest: Any) -> list[Deletion]:
    return _orphans(seen, (), *rest)


_orphans = retention._orphans


def _some_are_enough(*args: Any) -> StoredCheckpoint:
    found = _checkpoint(*args)
    if found.state is CheckpointState.INCOMPLETE:
        return dataclasses.replace(found, state=CheckpointState.COMMITTED, missing=())
    return found


_checkpoint = catalog._checkpoint


def _of_what_is_offered(self: RunStore, ranks: Iterable[int], **how: Any) -> Found:
    """The highest epoch."""
    found, _ = _find(self, ranks, **how)
    return found, max((each.epoch for each in found), default=-1)


_find = RunStore.find


def _nothing(*_: object) -> None:
    return None


STORAGE_MUTATIONS: dict[str, Mutation] = {
    "objects go first": Mutation(
        "retention deletes manifests before what they name",
        ((RunRetention, "delete", _objects_first),),
        play=play_storage,
    ),
    "what is named goes": Mutation(
        "retention deletes nothing that a manifest names",
        ((retention, "_orphans", _nothing_is_named),),
        play=play_storage,
    ),
    "some manifests are enough": Mutation(
        "a checkpoint counts when all ranks have written their manifests",
        ((catalog, "_checkpoint", _some_are_enough),),
        play=play_storage,
    ),
    "epochs without a checkpoint are unknown": Mutation(
        "an epoch is above all that the store shows",
        ((RunStore, "find", _of_what_is_offered),),
        WorldConfig(among=_GONE_BACK),
        play_storage,
    ),
    "what was left is never offered": Mutation(
        "a run does not begin anew beside what is complete",
        ((RunStore, "_last_resort", lambda *_: ()),),
        WorldConfig(among=_LEFT),
        play_storage,
    ),
    "a dead keeper is believed": Mutation(
        "what a keeper stored and did not commit is unknown to the next one",
        ((Persister, "_forget", _nothing),),
        play=play_storage,
    ),
    "a rank is not opened again": Mutation(
        "the next keeper is told of every rank",
        ((RankPersistence, "keeper_died", _nothing),),
        play=play_storage,
    ),
}
