"""What happens at a start: find the run's snapshots, check that they are this model's, and prepare
their replay.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from ckptd.client import values
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.log_lines import get_logger
from ckptd.client.model.freezing import Tape
from ckptd.client.model.replicated_params import ReplicatedParams
from ckptd.client.options import RecoveryOptions
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery.global_recovery import recover_global
from ckptd.client.recovery.localized_recovery import (
    LocalizedStart,
    begin_localized,
    recovered_locally,
)
from ckptd.client.recovery.mismatch_causes import likely_causes
from ckptd.client.recovery.replay import Replay
from ckptd.client.recovery.replica_broadcast import ReplicaBroadcast, arrange
from ckptd.client.recovery.verification import Verification
from ckptd.client.schedule.snapshot_plan import (
    SnapshotPlan,
    captured_once,
    plan_from_payload,
    signature,
    signature_difference,
)
from ckptd.client.training_state import TrainingState
from ckptd.core.slots.ring import NoSuffix, Suffix, find_suffix
from ckptd.core.slots.segment_hints import HINT_DROP_GRADIENTS
from ckptd.cuda.engine import CopyEngine
from ckptd.errors import AttachRefused

__all__ = ["Recovery", "Resumption", "newest_window"]

logger = get_logger(__name__)

_SEAL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Resumption:
    """A run that can go on: how to replay it, under which plan, the phase of its newest snapshot,
    and who shares what by structure.
    """

    replay: Replay
    plan: SnapshotPlan
    phase: int
    reason: str
    sharing: ReplicatedParams
    verification: Verification
    unverified: str  # why the newest snapshot is loaded and not compared; "" where it is compared
    apart: LocalizedStart | None = None  # after a localized recovery: who begins where


def newest_window(memory: RankMemory, ranks: Collectives) -> Suffix:
    """The newest complete suffix that every rank's ring holds; a collective call.

    Raises:
        ValueError: there is none; on every rank.
    """
    records = memory.table.records()
    newest = find_suffix(records, memory.num_operators)
    ends = ranks.gather(_bounds(newest), tuple[int, int])
    if min(end for _, end in ends) >= 0:
        # A rank may be a snapshot ahead of the others.
        newest = find_suffix(records, memory.num_operators, end=min(end for _, end in ends))
    starts = {start for start, _ in ranks.gather(_bounds(newest), tuple[int, int])}
    if isinstance(newest, NoSuffix):
        text = f"there is no complete window to verify yet: {newest.reason}"
        raise ValueError(text)  # noqa: TRY004 - a state of the run, not a wrong type
    if len(starts) > 1:
        raise ValueError(
            f"the ranks hold no window in common yet: theirs begin at {sorted(starts)} (-1: none)"
        )
    return newest


def _bounds(suffix: Suffix | NoSuffix) -> tuple[int, int]:
    """Start and end; -1 where there is none."""
    return (-1, -1) if isinstance(suffix, NoSuffix) else (suffix.start, suffix.end)


class Recovery:
    """Makes replays of this rank's snapshots.

    Args:
        subject: as it is built now. What several ranks have alike is given to all of them by a
            replay, whether or not they have the same values now. Its freezing falls back to
            ``drop`` where an earlier trainer left that hint.
    """

    def __init__(
        self,
        subject: TrainingState,
        engine: CopyEngine,
        tape: Tape,
        options: RecoveryOptions,
    ) -> None:
        self._at = _wanted_iteration(options.resume_at)
        self._binding, self._engine, self._identity = subject.binding, engine, subject.identity
        self._stateful, self._tape, self._on_mismatch = subject.stateful, tape, options.on_mismatch
        self._operators, self._sharing = subject.operators, subject.sharing
        self._device = subject.device
        self._verify_iterations = options.verify_iterations
        self.freezing, self.freezing_reason = subject.freezing

    def find(self, memory: RankMemory, ranks: Collectives) -> Resumption | None:
        """The newest state that every rank can be brought back to; None to start from the
        beginning. A collective call.

        Raises:
            ValueError: the iteration to go back to cannot be had.
            AttachRefused: the snapshots are of another model, or it is refused by the daemon;
                nothing was lost.
            DaemonUnavailable: a daemon is away, or another rank cannot go on.
        """
        with ranks.all_or_none():
            memory.settle_filled(_SEAL_WAIT_S)
        # What is parked is newer than what was asked for.
        apart = None if self._at is not None else self._apart(memory, ranks)
        found = (
            recover_global(memory, ranks, self._at, verify_iterations=self._verify_iterations)
            if apart is None
            else recovered_locally(apart)
        )
        if isinstance(found, str):
            memory.forget_everything()
            return None
        with ExitStack() as undo:
            if apart is not None:
                undo.callback(apart.close)
            self._heed(ranks.gather(memory.hint, int))
            with ranks.all_or_none():
                plan = self._plan_of(memory)
                changed = self._changed_since(memory)
            images = found.images
            with ranks.all_or_none():
                alone = apart is not None and not apart.replays
                replay = self.replay_of(images, plan, ranks, alone=alone, dense=found.dense)
                # What is loaded first must have arrived. The rest is waited for in replay.
                _ = images[0].view
            undo.pop_all()
        verification = Verification(
            memory,
            ranks,
            found.replayed,
            on_mismatch=self._on_mismatch,
            changed=changed,
            causes=partial(likely_causes, changed=changed, stateful=self._stateful, device=self._device),
        )
        return Resumption(
            replay,
            plan,
            images[-1].phase,
            found.reason,
            self._sharing,
            verification,
            found.unverified,
            apart,
        )

    def _apart(self, memory: RankMemory, ranks: Collectives) -> LocalizedStart | None:
        """A collective call."""
        if self._identity.world_size == 1:
            return None
        alike = self._sharing.ranks_with_same_operators(self._operators, self._identity.rank)
        if memory.descriptor is not None and not captured_once(memory.descriptor.client):
            alike = ()  # by their wrappers they are, but values were not compared, or differed
        return begin_localized(memory, ranks, alike, verify_iterations=self._verify_iterations)

    def _heed(self, hints: Sequence[int]) -> None:
        """Freeze otherwise if any rank left the hint: what one computes from all gradients, it
        computes from the others', too.
        """
        if any(hint & HINT_DROP_GRADIENTS for hint in hints) and self.freezing == "inputs":
            self.freezing = "drop"
            self.freezing_reason = "an earlier replay with 'inputs' did not reproduce what was recorded"

    def _plan_of(self, memory: RankMemory) -> SnapshotPlan:
        newest = memory.table.segments[-1]
        self._check_signature(newest.descriptor.client)
        return plan_from_payload(
            self._binding,
            newest.descriptor.client,
            self._identity.metadata(),
            newest.geometry,
            self._sharing,
        )

    def replay_of(
        self,
        images: Sequence[SnapshotImage],
        plan: SnapshotPlan,
        ranks: Collectives,
        *,
        alone: bool = False,
        dense: bool = False,
    ) -> Replay:
        """A replay of these snapshots, oldest first; a collective call if there are several ranks.

        Args:
            alone: the images have everything that this rank has; nobody hands it anything.
            dense: the oldest one anchors everything, on all ranks.
        Raises:
            ValueError: what this rank shares with others was recorded by none that it can reach now.
        """
        handing: ReplicaBroadcast | None = None
        if self._identity.world_size > 1:
            handing = arrange(self._sharing, plan.operators, plan.owners, ranks)
            if alone:
                handing = None
        return Replay(
            self._binding,
            plan.operators,
            self._engine,
            images,
            stateful=self._stateful,
            tape=self._tape,
            freezing=self.freezing,
            handing=handing,
            begins_dense=dense,
        )

    def _check_signature(self, payload: bytes) -> None:
        recorded = values.unpack(payload)
        job, run = self._identity.job, self._identity.run
        difference = signature_difference(recorded["signature"], signature(self._binding))
        if difference:
            raise AttachRefused(
                "model_changed",
                f"the snapshots of job {job}, run {run} are of another model: {difference}",
                f"pass run= a new name, or `ckptctl forget {job} {run}`",
            )

    def _changed_since(self, memory: RankMemory) -> str:
        """How this machine differs from the one that took the newest snapshots, in what can change bits."""
        recorded = values.unpack(memory.table.segments[-1].descriptor.client)
        changed = [
            f"{what}: {before} when the snapshots were taken, {now} now"
            for what, before, now in (
                ("torch", recorded["torch"], str(torch.__version__)),
                ("intra-op threads", recorded["threads"], torch.get_num_threads()),
            )
            if before != now
        ]
        for text in changed:
            logger.warning("%s; this can change bits (replay verifies itself)", text)
        return "; ".join(changed)


def _wanted_iteration(resume_at: int | None) -> int | None:
    """Where this start goes back to; None: the newest."""
    if resume_at is None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return resume_at
    logger.warning("resume_at=%d was for the first start; this one goes on from the newest state", resume_at)
    return None
