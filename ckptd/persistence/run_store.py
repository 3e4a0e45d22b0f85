"""One run in a store, as the keeper of one node sees it: whose names they are, what can be
restored, what may go (docs/format.md).
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import WORLD_TOPOLOGY, SlotHeader, decode_descriptor, pack_slot_header
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.rank_store import TOOL, RankStore
from ckptd.persistence.run_in_store import RunInStore, RunRetention, Seen, SharedLook, Surveyed, newest_ns
from ckptd.storage.checkpoints.catalog import (
    Catalog,
    CheckpointState,
    StoredCheckpoint,
    Views,
    build_catalog,
    see,
)
from ckptd.storage.checkpoints.manifest import ManifestError, RankManifest, StoredSnapshot
from ckptd.storage.checkpoints.names import (
    CheckpointId,
    IncarnationName,
    RunName,
    incarnation_of_run,
    incarnations_prefix,
    parse,
    run_of_incarnation,
    run_prefix,
)
from ckptd.storage.checkpoints.reader import (
    SnapshotDamaged,
    read_identity,
    read_image_bytes,
    read_manifest,
)
from ckptd.storage.checkpoints.retention import RetentionPolicy, StoredIncarnation, plan_incarnations
from ckptd.storage.checkpoints.sealed_json import RunIdentity
from ckptd.storage.stores.objects import (
    Damaged,
    ObjectExists,
    ObjectMissing,
    ObjectStore,
    StoreError,
)

__all__ = ["FencedOff", "RunStore", "StoredWorlds"]


_OFFERED = 3  # checkpoints that a recovery is told of: the newest, and what it falls back to


class FencedOff(RuntimeError):
    """Somebody else writes under these names: the store shows this later epoch, of which nothing is
    known here.
    """

    def __init__(self, epoch: int, text: str) -> None:
        super().__init__(text)
        self.epoch = epoch


class NothingUsable(StoreError):
    """Checkpoints of the run are there, and none of them can be used."""


class _OfAnotherRun(ManifestError):
    """It bears the names of this run, and belongs to another one."""


class RunStore:
    """Everything of one run but the uploads of its ranks.

    Args:
        at: its names, and how this node reads and writes it.
        policy: what may be deleted.
    """

    def __init__(self, at: RunInStore, policy: RetentionPolicy) -> None:
        self.at = at
        self._lock = threading.Lock()
        self._iterations: dict[int, threading.Lock] = {}
        self._identity: RunIdentity | None = None
        self._epochs: dict[int, int] = {}
        self._ranks: dict[int, RankStore] = {}
        self._shared = SharedLook()
        self._offered: dict[str, RankManifest] = {}
        self._doubted: set[CheckpointId] = set()
        self._passed_over: set[CheckpointId] = set()  # those that are not offered
        self._complete: deque[tuple[int, int]] = deque(maxlen=16)
        self.retention = RunRetention(at, policy, look=lambda: self._look().own, doubted=self._doubted)

    # -- ranks -----------------------------------------------------------------------------------

    def open(self, message: w.OpenRank) -> int:
        """Take part in the run; returns the newest checkpoint of it that all ranks have (-1: none).

        Raises:
            Fenced: a later history is known to the store, which this job knows nothing of.
            StoreError, ManifestError: the store cannot be read.
        """
        rank, epoch = message.rank.rank, message.epoch
        with self._lock:
            self._epochs[epoch] = message.epoch_start
        identity = self._claim()
        views = self._look()
        self._check_epochs(views.own, epoch)
        base = views.base_of(rank)
        opened = self._make_rank(rank, identity, "" if base is None else base.manifests[rank].key)
        with self._lock:
            self._ranks[rank] = opened
        return -1 if views.own.newest is None else views.own.newest.id.end

    def _make_rank(self, rank: int, identity: RunIdentity, base: str) -> RankStore:
        try:
            return RankStore(
                self.at,
                rank,
                run_id=identity.run_id,
                base=base,
                look=self._look_to_commit,
                neighbours=lambda: self._others(rank),
            )
        except (ManifestError, ObjectMissing, SnapshotDamaged) as error:
            if not base:
                raise
            self.at.tell("warning", "store_damaged", f"{error}; everything is uploaded anew")
            return self._make_rank(rank, identity, "")

    def rank(self, rank: int) -> RankStore | None:
        """What `open` has made."""
        with self._lock:
            return self._ranks.get(rank)

    @property
    def num_ranks(self) -> int:
        """How many were opened."""
        with self._lock:
            return len(self._ranks)

    def turn(self, iteration: int) -> threading.Lock:
        """Held while a snapshot of this iteration is stored: one rank after the other, so that they share."""
        with self._lock:
            while len(self._iterations) > 64:
                oldest = min(self._iterations)
                if oldest == iteration or self._iterations[oldest].locked():
                    break
                del self._iterations[oldest]
            return self._iterations.setdefault(iteration, threading.Lock())

    def _others(self, rank: int) -> list[RankStore]:
        with self._lock:
            return [other for number, other in self._ranks.items() if number != rank]

    def _claim(self) -> RunIdentity:
        """The identity under these names; ours, if they were free."""
        if self._identity is None:
            found = read_identity(self.at.store, self.at.job, self.at.run)
            if found is None:
                mine = RunIdentity(self.at.job, self.at.run, secrets.token_hex(8), self.at.wall_ns(), TOOL)
                try:
                    key = RunName(self.at.job, self.at.run).key
                    self.at.store.put(key, [memoryview(mine.to_bytes())], if_absent=True)
                except ObjectExists:
                    pass  # another rank of ours was quicker
                found = read_identity(self.at.store, self.at.job, self.at.run)
            if found is None:
                raise ManifestError(f"run.json of {self.at.title} vanished as soon as it was written")
            self._identity = found
        return self._identity

    # -- what is there ---------------------------------------------------------------------------

    def _look(self) -> Views:
        """What the store shows of the run, to everybody and to us."""
        return self._look_knowing(self._known_epochs(), self.at.store)

    def _look_to_commit(self, end: int, *, fresh: bool) -> Seen:
        """The same for a rank that is about to commit, once for all ranks of this node.

        It gives up after a minute: what it shows could not be acted upon any more.

        Raises:
            Fenced: a later history is there.
        """
        known = self._known_epochs()
        seen = self._shared.get(
            (end, frozenset(known.items())),
            lambda: self._look_knowing(known, self.at.prompt),
            sharers=self.num_ranks,
            fresh=fresh,
        )
        self._check_epochs(seen.views.own, max(known))
        return seen

    def _look_knowing(self, known: Mapping[int, int], store: ObjectStore) -> Views:
        listing = store.list(run_prefix(self.at.job, self.at.run))
        return see(listing, self.at.job, self.at.run, known_epochs=known)

    def _known_epochs(self) -> dict[int, int]:
        with self._lock:
            return dict(self._epochs)

    def _catalog_of(self, iteration: int) -> Catalog:
        """The same of one iteration (a large run has many objects)."""
        listing = self.at.store.list(f"{run_prefix(self.at.job, self.at.run)}{iteration:012d}/")
        return build_catalog(listing, self.at.job, self.at.run, known_epochs=self._known_epochs())

    def _check_epochs(self, catalog: Catalog, epoch: int) -> None:
        later = [number for number in catalog.epochs if number > epoch]
        if later:
            raise FencedOff(
                max(later),
                f"the store holds checkpoints of {self.at.title} of epoch {max(later)}, and this "
                "job is in epoch "
                f"{epoch}: another job writes under these names, or recovered this one; give one "
                "of them another run=",
            )

    def settled(self, end: int, epoch: int) -> tuple[bool, str]:
        """Whether every rank has the checkpoint, and what is missing.

        Raises:
            Fenced: a later history is there.
        """
        if (end, epoch) in self._complete:  # another rank of this node has seen it
            return True, ""
        catalog = self._catalog_of(end)
        self._check_epochs(catalog, max(self._epochs, default=epoch))
        found = [c for c in catalog.checkpoints if (c.id.end, c.id.epoch) == (end, epoch)]
        if any(c.state is CheckpointState.COMMITTED for c in found):
            self._complete.append((end, epoch))
            return True, ""
        if len(found) > 1:
            return False, f"the ranks do not agree: {', '.join(c.reason for c in found)}"
        return False, found[0].reason if found else "it is not listed"

    def find(
        self, ranks: Iterable[int], *, left_out: frozenset[tuple[int, int]] = frozenset()
    ) -> list[w.CommittedCheckpoint]:
        """The newest committed checkpoints, these ranks' part of them; none if the run has none.

        Args:
            left_out: iteration and epoch of quarantined snapshots: a checkpoint with one of them is
                passed over.
        Raises:
            NothingUsable: it has some, and none of them can be used. A job that took this for an
                empty store would begin anew.
        """
        offered: list[w.CommittedCheckpoint] = []
        unusable: list[str] = []
        left = _OFFERED
        for checkpoint in self._look().own.committed:
            if left == 0:
                break
            if checkpoint.id in self._passed_over:
                unusable.append(f"checkpoint {checkpoint.id} is damaged")
                continue
            try:
                found = [self._offer(checkpoint, rank) for rank in ranks]
            except _OfAnotherRun as error:
                self.at.tell("error", "checkpoint_damaged", f"{checkpoint.id} is not ours: {error}")
                continue
            except (ManifestError, ObjectMissing) as error:
                text = f"checkpoint {checkpoint.id} cannot be used: {error}"
                unusable.append(text)
                self.at.tell("error", "checkpoint_damaged", text)
                continue
            if any(self._holds_any(stored.name, left_out) for stored in found):
                continue
            offered += found
            left -= 1
        if unusable and not offered:
            self._passed_over.clear()  # what looked damaged for a while may be read by who asks next
            text = f"nothing stored of {self.at.title} can be used: {'; '.join(unusable)}"
            self.at.tell("error", "storage_unusable", text)
            raise NothingUsable("", text)
        return offered

    def _holds_any(self, name: str, snapshots: frozenset[tuple[int, int]]) -> bool:
        manifest = self._offered[name]
        return any((s.iteration, s.epoch) in snapshots for s in manifest.snapshots)

    def offer(self, end: int, ranks: Iterable[int]) -> list[w.CommittedCheckpoint]:
        """These ranks' part of the committed checkpoint that ends there.

        Raises:
            NothingUsable: it is not there (any more), or damaged.
        """
        why = "it is not committed, or was deleted"
        for checkpoint in self._look().own.committed:
            if checkpoint.id.end != end or checkpoint.id in self._passed_over:
                continue
            try:
                return [self._offer(checkpoint, rank) for rank in ranks]
            except (ManifestError, ObjectMissing) as error:
                self._passed_over.add(checkpoint.id)
                why = f"it cannot be used: {error}"
                text = f"checkpoint {checkpoint.id} of {self.at.title} cannot be used: {error}"
                self.at.tell("error", "checkpoint_damaged", text)
        raise NothingUsable("", f"checkpoint {end} of {self.at.title}: {why}")

    def offered(self) -> tuple[Catalog, frozenset[CheckpointId]]:
        """What there is, and which of it is passed over because it was found to be damaged."""
        return self._look().own, frozenset(self._passed_over)

    def trust_again(self) -> None:
        """What looked damaged for a while may be read by who asks next."""
        self._passed_over.clear()

    def _offer(self, checkpoint: StoredCheckpoint, rank: int) -> w.CommittedCheckpoint:
        if rank not in checkpoint.manifests:
            raise ManifestError(f"it is of {checkpoint.world_size} ranks, without rank {rank}")
        key = checkpoint.manifests[rank].key
        manifest = self._offered.get(key) or read_manifest(self.at.store, key)
        identity = self._identity or read_identity(self.at.store, self.at.job, self.at.run)
        if identity is not None and manifest.run_id != identity.run_id:
            raise _OfAnotherRun(f"{key}: it is of run {manifest.run_id}, not {identity.run_id}")
        self._offered[key] = manifest
        return w.CommittedCheckpoint(
            name=key,
            rank=rank,
            end=manifest.end,
            epoch=checkpoint.id.epoch,
            world_size=manifest.world_size,
            window=manifest.window,
            slot_bytes=manifest.slot_bytes,
            # Who goes on from it needs room for the next suffix while this one is held, as it had it before.
            num_slots=manifest.num_slots,
            descriptor=manifest.descriptor,
            lengths=[s.image_len for s in manifest.snapshots],
            headers=[pack_slot_header(_slot_header(s)) for s in manifest.snapshots],
            anchors=[s.anchors.to_bytes((s.num_operators + 7) // 8, "little") for s in manifest.snapshots],
            digests=[s.image_digest for s in manifest.snapshots],
        )

    def read(self, name: str, index: int, offset: int, into: memoryview) -> None:
        """Fill a buffer with bytes of an offered snapshot's image; whoever asked verifies them.

        Raises:
            LookupError: it was not offered by this process.
            StoreError: the store does not give them.
        """
        manifest = self._offered[name]
        snapshot = manifest.snapshots[index]
        try:
            read_image_bytes(self.at.store, snapshot, offset, into, map_fn=self.at.map_fn)
        except (ObjectMissing, Damaged):
            self.doubt(name)  # who asked cannot tell this from a store that is away
            raise

    def doubt(self, name: str) -> None:
        """What was read of a checkpoint is damaged: others are offered. Who has found it may read
        the rest of it.
        """
        manifest = self._offered.get(name)
        if manifest is None:
            return
        self._passed_over.add(manifest.checkpoint)
        if manifest.checkpoint not in self._doubted:
            self._doubted.add(manifest.checkpoint)
            text = f"checkpoint {manifest.checkpoint} of {self.at.title} is damaged ({name})"
            self.at.tell("error", "checkpoint_damaged", text)


def _slot_header(stored: StoredSnapshot) -> SlotHeader:
    return SlotHeader(
        state=SlotState.SEALED,
        iteration=stored.iteration,
        previous=stored.previous,
        image_len=stored.image_len,
        sequence=stored.sequence,
        layout_id=stored.layout_id,
        filled_at_ns=stored.filled_at_ns,
        phase=stored.phase,
        header_digest=stored.header_digest,
        epoch_start=stored.epoch_start,
        epoch=stored.epoch,
    )


_OFFERED_WORLDS = 16  # checkpoints that a start is told of: the newest, and what it falls back to


class StoredWorlds:
    """What several runs of one store have to do with each other.

    Args:
        run_of: the run of these names.
    """

    def __init__(
        self,
        store: ObjectStore,
        run_of: Callable[[str, str], RunStore],
        policy: RetentionPolicy,
    ) -> None:
        self._store, self._run_of, self._policy = store, run_of, policy
        self._marked: set[IncarnationName] = set()

    def mark(self, job: str, run: str, descriptor: bytes) -> None:
        """Before a rank's manifest: if its run is a world, the store shall show it.

        Raises:
            StoreError: the store does not take the mark.
        """
        name = _name(job, run)
        if name is None or name in self._marked:
            return
        if decode_descriptor(descriptor).topology == WORLD_TOPOLOGY:
            self._store.put(name.key, [])
            self._marked.add(name)

    def find(self, message: w.FindWorlds) -> w.FoundWorlds:
        """The newest committed checkpoints of all worlds.

        Raises:
            StoreError: the store cannot be read.
        """
        job, numbers = message.job, self._numbers(message.job, message.run)
        found: list[w.WholeWorld] = []
        damaged: list[tuple[int, int]] = []
        for number in numbers:
            run = self._run_of(job, run_of_incarnation(message.run, number))
            if not message.again:
                run.trust_again()
            catalog, passed_over = run.offered()
            for checkpoint in catalog.committed:
                if checkpoint.id in passed_over:
                    damaged.append((number, checkpoint.id.end))
                else:
                    sizes = _sizes(catalog, checkpoint)
                    found.append(w.WholeWorld(number, checkpoint.id.end, sizes))
            if len(found) >= _OFFERED_WORLDS:
                break
        return w.FoundWorlds(message.id, numbers, found[:_OFFERED_WORLDS], damaged)

    def retain(self, job: str, run: str) -> None:
        """A checkpoint of this run is complete: if it is a world, what is left of earlier ones may go.

        Raises:
            StoreError: the store cannot be read, or does not delete; what was begun goes on the next time.
        """
        name = _name(job, run)
        numbers = [] if name is None else self._numbers(job, name.run)
        if name is None or name.number not in numbers:
            return  # it is called like a world, and is none
        runs = {n: self._run_of(job, run_of_incarnation(name.run, n)) for n in numbers if n < name.number}
        if not runs:
            return
        newest = _world(self._run_of(job, run).retention.survey())
        seen = {number: each.retention.survey() for number, each in runs.items()}
        earlier = {number: _world(one) for number, one in seen.items()}
        now_ns = max(newest_ns(world.catalog) for world in (newest, *earlier.values()))
        for plan in plan_incarnations(newest, earlier, self._policy, now_ns=now_ns):
            runs[plan.number].retention.delete(
                plan.manifests, plan.objects, plan.names, listed_s=seen[plan.number].listed_s
            )

    def _numbers(self, job: str, run: str) -> list[int]:
        """Of all worlds that are marked, the latest first."""
        names = [parse(info.key) for info in self._store.list(incarnations_prefix(job, run))]
        return sorted({n.number for n in names if isinstance(n, IncarnationName)}, reverse=True)


def _name(job: str, run: str) -> IncarnationName | None:
    found = incarnation_of_run(run)
    return None if found is None else IncarnationName(job, *found)


def _sizes(catalog: Catalog, checkpoint: StoredCheckpoint) -> list[int]:
    return [
        sum(found.info.size for found in catalog.objects.get((rank, checkpoint.id.end), ()))
        for rank in range(checkpoint.world_size)
    ]


def _world(seen: Surveyed) -> StoredIncarnation:
    return StoredIncarnation(seen.catalog, seen.verified, seen.references)
