"""One run in a store, for the store keeper of one node: who owns its names, what can be restored, and the
incarnations of an elastic run (`StoredWorlds`). docs/format.md.

Each incarnation of an elastic run is a run of its own (`ckptd.storage.checkpoints.retention`), with its own
`RunStore`; the store keys call it a world. Its trainers attach with a topology that identifies it, which
is in every segment's descriptor, so a restarted daemon knows it too. The mark of an incarnation is stored
before the manifest of rank 0, so that a start finds every committed checkpoint.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping

from ckptd.core.slots.segment_format import WORLD_TOPOLOGY, SlotHeader, decode_descriptor, pack_slot_header
from ckptd.core.slots.slots import SlotState
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.rank_store import TOOL, Agreement, RankStore
from ckptd.persistence.run_in_store import RunInStore, RunRetention, Seen, SharedLook, Surveyed, newest_ns
from ckptd.storage.checkpoints.catalog import (
    Catalog,
    CheckpointState,
    StoredCheckpoint,
    Views,
    build_catalog,
    see,
)
from ckptd.storage.checkpoints.manifest import RankManifest, StoredSnapshot
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
from ckptd.storage.checkpoints.sealed_json import ManifestError, RunIdentity
from ckptd.storage.stores.objects import (
    Damaged,
    ObjectExists,
    ObjectMissing,
    ObjectStore,
    StoreError,
)

_OFFERED = 3  # checkpoints offered to a recovery: the newest, and fallbacks
_OFFERED_WORLDS = 16  # the same for a start of an elastic run
_MAX_OFFERED = 16  # checkpoints whose manifests are kept
_MAX_TURNS = 64


class FencedOff(RuntimeError):
    """The store shows this later epoch, which is unknown here: another job uses the names, or a start
    of this one went on elsewhere."""

    def __init__(self, epoch: int, text: str) -> None:
        super().__init__(text)
        self.epoch = epoch


class NothingUsable(StoreError):
    """The store contains checkpoints of the run, but none of them can be used."""


class _OfAnotherRun(ManifestError):
    """The manifest has the names of this run, but belongs to another one."""


class RunStore:
    """One run, except for the uploads of its ranks (`RankStore`). Thread-safe."""

    def __init__(self, at: RunInStore, policy: RetentionPolicy) -> None:
        self.at = at
        self._lock = threading.Lock()
        self._iterations: dict[int, threading.Lock] = {}
        self._identity: RunIdentity | None = None
        self._epochs: dict[int, int] = {}
        self._ranks: dict[int, RankStore] = {}
        self._shared = SharedLook()
        self._offered: dict[str, RankManifest] = {}
        self._offers: OrderedDict[CheckpointId, set[str]] = (
            OrderedDict()
        )  # their keys, the last offered at the end
        self._doubted: set[CheckpointId] = set()
        self._passed_over: set[CheckpointId] = set()  # not offered to recoveries
        self._complete: deque[tuple[int, int]] = deque(maxlen=16)
        self.retention = RunRetention(at, policy, look=lambda: self._look().own, doubted=self._doubted)

    # -- ranks -----------------------------------------------------------------------------------

    def open(self, message: w.OpenRank) -> int:
        """Join the run with a rank; returns the end of the newest committed checkpoint (-1: none).

        Raises:
            FencedOff: the store shows a later history, which this job does not know.
            StoreError, ManifestError: the store cannot be read.
        """
        rank, epoch = message.rank.rank, message.epoch
        with self._lock:
            self._epochs[epoch] = message.epoch_start
        identity = self._claim()
        views = self._look()
        self._check_epochs(views.own, epoch)
        last = [_key_of(checkpoint, rank) for checkpoint in (views.base_of(rank), views.committed_base())]
        opened = self._make_rank(rank, identity, *last)
        with self._lock:
            self._ranks[rank] = opened
        return -1 if views.own.newest is None else views.own.newest.id.end

    def _make_rank(self, rank: int, identity: RunIdentity, base: str, committed: str) -> RankStore:
        try:
            return RankStore(
                self.at,
                rank,
                run_id=identity.run_id,
                base=base,
                committed=committed,
                look=self._look_to_commit,
                neighbours=lambda: self._others(rank),
                state_of=self._state_of,
            )
        except (ManifestError, ObjectMissing, SnapshotDamaged) as error:
            if not base and not committed:
                raise
            self.at.report("warning", "store_damaged", f"{error}; everything is uploaded anew")
            return self._make_rank(rank, identity, "", "")

    def rank(self, rank: int) -> RankStore | None:
        """The rank, if it was opened."""
        with self._lock:
            return self._ranks.get(rank)

    @property
    def num_ranks(self) -> int:
        with self._lock:
            return len(self._ranks)

    def turn(self, iteration: int) -> threading.Lock:
        """Held while a snapshot of this iteration is stored, so that ranks reuse each other's tensors."""
        with self._lock:
            while len(self._iterations) > _MAX_TURNS:
                oldest = min(self._iterations)
                if oldest == iteration or self._iterations[oldest].locked():
                    break
                del self._iterations[oldest]
            return self._iterations.setdefault(iteration, threading.Lock())

    def _others(self, rank: int) -> list[RankStore]:
        with self._lock:
            return [other for number, other in self._ranks.items() if number != rank]

    def _claim(self) -> RunIdentity:
        """The identity of the run with these names; created if there is none."""
        if self._identity is None:
            found = read_identity(self.at.store, self.at.job, self.at.run)
            if found is None:
                mine = RunIdentity(self.at.job, self.at.run, secrets.token_hex(8), self.at.wall_ns(), TOOL)
                try:
                    key = RunName(self.at.job, self.at.run).key
                    self.at.store.put(key, [memoryview(mine.to_bytes())], if_absent=True)
                except ObjectExists:
                    pass  # another rank has created it
                found = read_identity(self.at.store, self.at.job, self.at.run)
            if found is None:
                raise ManifestError(f"run.json of {self.at.title} vanished as soon as it was written")
            self._identity = found
        return self._identity

    # -- what is there ---------------------------------------------------------------------------

    def _look(self) -> Views:
        return self._look_knowing(self._known_epochs(), self.at.store)

    def _look_to_commit(self, end: int, fresh: bool) -> Seen:
        """List the run for the commit of a checkpoint, once for all ranks of this node.

        Gives up after a minute, when the listing would be too old. Raises FencedOff for a later history.
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
        """List one iteration only, because a large run has many objects."""
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
        """Whether every rank has committed the checkpoint, and else what is missing.

        Raises:
            FencedOff: the store shows a later history.
        """
        if (end, epoch) in self._complete:  # found for another rank of this node
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

    def _state_of(self, checkpoint: CheckpointId) -> Agreement:
        """Whether every rank has written its manifest of this checkpoint."""
        same = [c for c in self._catalog_of(checkpoint.end).checkpoints if c.id.epoch == checkpoint.epoch]
        if any(c.id == checkpoint and c.complete for c in same):
            return Agreement.YES
        return Agreement.OTHERWISE if any(c.id != checkpoint for c in same) else Agreement.NOT_YET

    def find(
        self,
        ranks: Iterable[int] | None,
        *,
        begun: Mapping[int, int],
        left_out: frozenset[tuple[int, int]] = frozenset(),
    ) -> tuple[list[w.CommittedCheckpoint], int]:
        """These ranks' part of the newest committed checkpoints, and the run's highest epoch (-1: none).

        If nothing is committed, the newest complete one counts of those that were abandoned for histories
        without a complete one. A job must not begin anew beside it.

        Args:
            ranks: None: all.
            begun: the epochs that the run's nodes know, with their starts; the same on all nodes.
            left_out: iteration and epoch of quarantined snapshots; checkpoints with one of them are skipped.
        Raises:
            NothingUsable: the run has checkpoints, but none can be used. A job must not take this for an
                empty store and begin anew.
        """
        offered: list[w.CommittedCheckpoint] = []
        unusable: list[str] = []
        left = _OFFERED
        catalog = self._look_knowing(begun, self.at.store).own
        for checkpoint in catalog.committed or self._last_resort(catalog):
            if left == 0:
                break
            if checkpoint.id in self._passed_over:
                unusable.append(f"checkpoint {checkpoint.id} is damaged")
                continue
            try:
                of = range(checkpoint.world_size) if ranks is None else ranks
                found = [self._offer(checkpoint, rank) for rank in of]
            except _OfAnotherRun as error:
                self.at.report("error", "checkpoint_damaged", f"{checkpoint.id} is not ours: {error}")
                continue
            except (ManifestError, ObjectMissing) as error:
                text = f"checkpoint {checkpoint.id} cannot be used: {error}"
                unusable.append(text)
                self.at.report("error", "checkpoint_damaged", text)
                continue
            if any(self._holds_any(stored.name, left_out) for stored in found):
                continue
            offered += found
            left -= 1
        if unusable and not offered:
            self.trust_again()
            text = f"nothing stored of {self.at.title} can be used: {'; '.join(unusable)}"
            self.at.report("error", "storage_unusable", text)
            raise NothingUsable("", text)
        # The next history is above all of these, so whatever they have left can be told from its own.
        return offered, catalog.highest_epoch

    def _last_resort(self, catalog: Catalog) -> tuple[StoredCheckpoint, ...]:
        found = catalog.last_resort[:1]
        for checkpoint in found:
            text = f"{checkpoint.id} is offered, for nothing else of {self.at.title} is complete"
            self.at.report("warning", "abandoned_offered", f"{text} ({checkpoint.reason})")
        return found

    def _holds_any(self, name: str, snapshots: frozenset[tuple[int, int]]) -> bool:
        manifest = self._offered[name]
        return any((s.iteration, s.epoch) in snapshots for s in manifest.snapshots)

    def offer(self, end: int, ranks: Iterable[int]) -> list[w.CommittedCheckpoint]:
        """These ranks' part of the committed checkpoint with this end; NothingUsable if there is none."""
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
                self.at.report("error", "checkpoint_damaged", text)
        raise NothingUsable("", f"checkpoint {end} of {self.at.title}: {why}")

    def offered(self) -> tuple[Catalog, frozenset[CheckpointId]]:
        """The run's catalog, and the checkpoints that are not offered because they are damaged."""
        return self._look().own, frozenset(self._passed_over)

    def trust_again(self) -> None:
        """Offer all checkpoints again: the damage may have been temporary."""
        self._passed_over.clear()

    def _offer(self, checkpoint: StoredCheckpoint, rank: int) -> w.CommittedCheckpoint:
        if rank not in checkpoint.manifests:
            raise ManifestError(f"it is of {checkpoint.world_size} ranks, without rank {rank}")
        key = checkpoint.manifests[rank].key
        manifest = self._offered.get(key) or read_manifest(self.at.store, key)
        identity = self._identity or read_identity(self.at.store, self.at.job, self.at.run)
        if identity is not None and manifest.run_id != identity.run_id:
            raise _OfAnotherRun(f"{key}: it is of run {manifest.run_id}, not {identity.run_id}")
        self._keep_offered(checkpoint.id, key, manifest)
        return w.CommittedCheckpoint(
            name=key,
            rank=rank,
            end=manifest.end,
            epoch=checkpoint.id.epoch,
            world_size=manifest.world_size,
            window=manifest.window,
            slot_bytes=manifest.slot_bytes,
            # The restarted rank needs room for the next suffix while this one is held, as before.
            num_slots=max(manifest.num_slots, len(manifest.snapshots) + 1),
            descriptor=manifest.descriptor,
            lengths=[s.image_len for s in manifest.snapshots],
            headers=[pack_slot_header(_slot_header(s)) for s in manifest.snapshots],
            anchors=[s.anchor_bitmap for s in manifest.snapshots],
            digests=[s.image_digest for s in manifest.snapshots],
        )

    def _keep_offered(self, checkpoint: CheckpointId, key: str, manifest: RankManifest) -> None:
        """Keep a manifest until many other checkpoints were offered: each recovery finds new ones."""
        with self._lock:
            self._offered[key] = manifest
            self._offers.setdefault(checkpoint, set()).add(key)
            self._offers.move_to_end(checkpoint)
            while len(self._offers) > _MAX_OFFERED:
                _, keys = self._offers.popitem(last=False)
                for each in keys:
                    del self._offered[each]

    def read(self, name: str, index: int, offset: int, into: memoryview) -> None:
        """Read bytes of an offered snapshot's image, without verifying them.

        Raises:
            LookupError: this process did not offer it.
            StoreError: the store cannot be read.
        """
        manifest = self._offered[name]
        snapshot = manifest.snapshots[index]
        try:
            read_image_bytes(self.at.store, snapshot, offset, into, map_fn=self.at.map_fn)
        except (ObjectMissing, Damaged):
            self.doubt(name)  # the daemon cannot distinguish this from an unreachable store
            raise

    def doubt(self, name: str) -> None:
        """A checkpoint is damaged: do not offer it any more. Its other parts can still be read."""
        manifest = self._offered.get(name)
        if manifest is None:
            return
        self._passed_over.add(manifest.checkpoint)
        if manifest.checkpoint not in self._doubted:
            self._doubted.add(manifest.checkpoint)
            text = f"checkpoint {manifest.checkpoint} of {self.at.title} is damaged ({name})"
            self.at.report("error", "checkpoint_damaged", text)


def _key_of(checkpoint: StoredCheckpoint | None, rank: int) -> str:
    """The key of a rank's manifest; "" if it has none."""
    info = None if checkpoint is None else checkpoint.manifests.get(rank)
    return "" if info is None else info.key


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


class StoredWorlds:
    """The incarnations of elastic runs: marks, finds and collects them. Thread-safe.

    Args:
        run_of: returns the run with these names.
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
        """Mark the run in the store if it is an incarnation; called before a manifest of rank 0."""
        name = _name(job, run)
        if name is None or name in self._marked:
            return
        if decode_descriptor(descriptor).topology == WORLD_TOPOLOGY:
            self._store.put(name.key, [])
            self._marked.add(name)

    def find(self, message: w.FindWorlds) -> w.FoundWorlds:
        """The newest committed checkpoints of all incarnations."""
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
        """Collect the incarnations before this run, which has committed a checkpoint; no-op for other runs.

        After a StoreError the next call continues.
        """
        name = _name(job, run)
        numbers = [] if name is None else self._numbers(job, name.run)
        if name is None or name.number not in numbers:
            return  # an ordinary run with the name of an incarnation
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
        """The numbers of all marked incarnations, the latest first."""
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
