"""What is promised of durable checkpoints, asked at every change of the store.

(s1) What a complete checkpoint names is there, as long as its manifests are; a key stands for one content.
(s2) A complete checkpoint goes only if a newer complete one is there: of its history, or of one that left it.
(s3) A recovery that needs the store goes back to its newest complete checkpoint, or to something later; and
     no run begins anew while there is one.
(s4) What is stored, and what a plan loads, is of one history, and bit for bit what was sealed.
(s5) What a daemon takes for durable was complete once.
(s6) When nothing happens any more, checkpoints are durable again; so is the newest snapshot when training
     ends.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ckptd.core.recovery.global_plan import RecoveryPlan
from ckptd.core.slots.slots import NO_EPOCHS, SlotRecord
from ckptd.persistence import keeper_wire as w
from ckptd.storage.checkpoints.manifest import RankManifest
from ckptd.storage.checkpoints.names import CheckpointId, ManifestName, parse
from tests.simulation.faulty_store import Bucket

__all__ = ["State", "StorageChecks"]

State = tuple[int, int]  # epoch, iteration: one state of all ranks


class StorageChecks:
    """The oracle; it sees everything."""

    seen: Counter[str]
    world_size: int
    bucket: Bucket
    states: dict[tuple[int, int, int, int], State]  # of each snapshot: rank, iteration, epoch, sequence
    pasts: dict[int, State | None]  # by epoch: the state from which it went on

    def _init_checks(self) -> None:
        self.manifests: dict[CheckpointId, dict[int, RankManifest]] = {}
        self.complete: set[CheckpointId] = set()  # and there
        self.durable: dict[CheckpointId, State] = {}  # ever, and which state each is
        self.named: dict[str, set[CheckpointId]] = {}  # by object: the complete checkpoints that need it

    # The store changes.

    def stored(self, key: str) -> None:
        name = parse(key)
        if not isinstance(name, ManifestName):
            return
        manifest = RankManifest.from_bytes(self.bucket.objects[key])
        assert manifest.key == key
        of = self.manifests.setdefault(name.checkpoint, {})
        of[name.rank] = manifest
        if len(of) == self.world_size and name.checkpoint not in self.complete:
            self.complete.add(name.checkpoint)
            self.durable[name.checkpoint] = self._state_of(manifest)
            self._check_history(of)
            for each in of.values():
                for stored in (stored for s in each.snapshots for stored in s.objects):
                    size = len(self.bucket.objects.get(stored.key, b""))
                    assert size == stored.size, f"(s1) {name.checkpoint} lacks {stored.key}"
                    self.named.setdefault(stored.key, set()).add(name.checkpoint)

    def deleted(self, keys: Sequence[str]) -> None:
        for key in keys:
            name = parse(key)
            if isinstance(name, ManifestName):
                self.manifests[name.checkpoint].pop(name.rank)
                if name.checkpoint in self.complete:
                    self._gone(name.checkpoint)
            else:
                needed = self.named.get(key)
                assert not needed, f"(s1) {key} is deleted, and {needed} need it"

    def _gone(self, checkpoint: CheckpointId) -> None:
        self.complete.discard(checkpoint)
        for needed in self.named.values():
            needed.discard(checkpoint)
        newer = [c for c in self.complete if _replaces(c, checkpoint)]
        assert newer, f"(s2) {checkpoint} is deleted, and nothing newer is complete"

    def newest_complete(self, begun: Mapping[int, int] = NO_EPOCHS) -> CheckpointId | None:
        """What a recovery must go back to if there is nothing else: what no history has left of which the store
        shows anything; if there is none, what no history has left of which anything is complete.

        Args:
            begun: histories that the machines know.
        """
        known = [CheckpointId(0, epoch, start, "") for epoch, start in begun.items()]
        shown = [*known, *(c for c, of in self.manifests.items() if of)]
        left = [c for c in self.complete if not any(_abandons(other, c) for other in shown)]
        less = [c for c in self.complete if not any(_abandons(o, c) for o in (*known, *self.complete))]
        found = max(left or less, key=lambda c: (c.end, c.epoch), default=None)
        newer = found is not None and max(c.end for c in less) > found.end
        self.seen["waived: left for a history of which nothing is complete"] += newer
        return found

    # Histories.

    def is_past(self, before: State, after: State) -> bool:
        """Whether the one state is the other one, or led to it."""
        at: State | None = after
        while at is not None:
            epoch, iteration = at
            if before[0] == epoch:
                return before[1] <= iteration
            at = self.pasts[epoch]
        return False

    def _check_history(self, manifests: Mapping[int, RankManifest]) -> None:
        self._check_one_history(
            {
                (rank, s.iteration): self.states[rank, s.iteration, s.epoch, s.sequence]
                for rank, manifest in manifests.items()
                for s in manifest.snapshots
            }
        )

    def _state_of(self, manifest: RankManifest) -> State:
        last = manifest.snapshots[-1]
        return self.states[manifest.rank, last.iteration, last.epoch, last.sequence]

    def check_plan(self, plan: RecoveryPlan) -> None:
        """(s4)"""
        self._check_one_history(
            {
                (rank, piece.record.iteration): self.state_of(rank, piece.record)
                for rank, pieces in plan.per_rank.items()
                for piece in pieces
            }
        )

    def state_of(self, rank: int, record: SlotRecord) -> State:
        return self.states[rank, *record.fill]

    def _check_one_history(self, found: Mapping[tuple[int, int], State]) -> None:
        by_iteration: dict[int, set[State]] = {}
        for (_, iteration), state in found.items():
            by_iteration.setdefault(iteration, set()).add(state)
        for iteration, states in by_iteration.items():
            assert len(states) == 1, f"(s4) mixed at {iteration}: {states}"
        path = [by_iteration[i].pop() for i in sorted(by_iteration)]
        for before, after in itertools.pairwise(path):
            assert self.is_past(before, after), f"(s4) {after} does not follow {before}"

    def check_return(self, wanted: CheckpointId | None, state: State | None) -> None:
        """(s3): ``wanted`` was the newest complete one when the recovery looked; None: it begins anew."""
        if wanted is not None:
            there = state is not None and self.is_past(self.durable[wanted], state)
            assert there, f"(s3) back to {state}, though {wanted} is durable"

    def heard(self, message: object) -> None:
        """(s5): what a keeper tells its daemon."""
        ends: Iterable[int] = ()
        match message:
            case w.Settled(end=end, epoch=epoch, complete=True):
                ends = [end]
                there = any((c.end, c.epoch) == (end, epoch) for c in self.durable)
                assert there, f"(s5) {end} of epoch {epoch} is taken for durable"
            case w.RunOpened(committed=end) if end >= 0:
                ends = [end]
        assert {*ends} <= {c.end for c in self.durable}, f"(s5) {ends} is taken for durable"


def _abandons(later: CheckpointId, checkpoint: CheckpointId) -> bool:
    return later.epoch > checkpoint.epoch and later.epoch_start < checkpoint.end


def _replaces(newer: CheckpointId, checkpoint: CheckpointId) -> bool:
    same = newer.end > checkpoint.end and newer.epoch >= checkpoint.epoch
    return same or _abandons(newer, checkpoint)
