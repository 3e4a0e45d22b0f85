"""A start: find the run's snapshots, check that they are of this model, and follow their replay through
the user's own loop (`ReplayPart`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ckptd.client import values
from ckptd.client.capture.comparison import Differences
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.daemon_link.run_inventory import RunView
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.log_lines import get_logger
from ckptd.client.model.freezing import Tape
from ckptd.client.model.operators import Operator
from ckptd.client.model.replicated_params import EVERY_RANK, ReplicatedParams
from ckptd.client.options import PartialOptions, RecoveryOptions
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery.audit_mode import StepAudit, compute_as_recorded
from ckptd.client.recovery.global_recovery import Recovered, recover_global
from ckptd.client.recovery.localized_recovery import (
    LocalizedStart,
    begin_localized,
    recovered_locally,
)
from ckptd.client.recovery.replay import Replay
from ckptd.client.recovery.replica_broadcast import arrange
from ckptd.client.recovery.snapshot_loading import SnapshotLoader
from ckptd.client.recovery.verification import Verification
from ckptd.client.schedule.partial_schedule import experts_alone, parts_of_experts
from ckptd.client.schedule.snapshot_plan import (
    SnapshotPlan,
    captured_once,
    plan_from_payload,
    signature,
    signature_difference,
)
from ckptd.client.stats import Stats
from ckptd.client.training_state import TrainingState
from ckptd.core.partial_experts import Selection
from ckptd.core.recovery.recovery_phases import RecoveryPhase
from ckptd.core.slots.ring import NoSuffix, Suffix, find_suffix
from ckptd.core.slots.segment_format import HINT_DROP_GRADIENTS
from ckptd.cuda.engine import CopyEngine
from ckptd.errors import AttachRefused

logger = get_logger(__name__)

_SEAL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Resumption:
    """A run that can go on.

    Attributes:
        phase: of its newest snapshot.
        unverified: why the newest snapshot is loaded and not compared; "" if it is compared.
        new_from: no snapshot shows that this iteration, or a later one, was done before.
        apart: after a localized recovery: which rank begins where.
    """

    replay: Replay
    plan: SnapshotPlan
    phase: int
    reason: str
    sharing: ReplicatedParams
    verification: Verification | StepAudit
    unverified: str
    new_from: int
    apart: LocalizedStart | None = None


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
        subject: as it is built now. A replay gives replicated operators to all ranks that share them,
            whether or not they have the same values now.
        audit: the folder of the audit for which this process was started; None: it trains.
        partial: of partial snapshots; None: the policy is another one.
    Attributes:
        freezing: that of the subject, or ``drop`` if an earlier trainer left that hint.
    """

    def __init__(
        self,
        subject: TrainingState,
        engine: CopyEngine,
        tape: Tape,
        options: RecoveryOptions,
        audit: Path | None = None,
        partial: PartialOptions | None = None,
    ) -> None:
        self._audit = audit
        self._subject, self._engine, self._tape, self._options = subject, engine, tape, options
        self._partial = partial
        self.freezing, self.freezing_reason = subject.freezing

    def find(self, memory: RankMemory, ranks: Collectives, *, whole: bool = False) -> Resumption | None:
        """The newest state that every rank can be brought back to; None to start from the
        beginning. A collective call.

        Args:
            whole: as of `recover_global`.
        Raises:
            ValueError: the iteration to go back to cannot be had.
            AttachRefused: the snapshots are of another model, or the daemon refuses; nothing was lost.
            DaemonUnavailable: a daemon is away, or another rank cannot go on.
        """
        verify_iterations, at = self._settle(memory, ranks)
        begun = self._begin_localized(memory, ranks, at, verify_iterations)
        localized = begun if isinstance(begun, LocalizedStart) else None
        if localized is not None:
            found = recovered_locally(localized)
        else:
            seen = begun if isinstance(begun, RunView) else None
            recovered = recover_global(
                memory,
                ranks,
                at,
                verify_iterations=verify_iterations,
                seen=seen,
                whole=whole,
                apart=bool(self._alone(self._subject.operators)),
            )
            if isinstance(recovered, str):
                if self._audit is not None:
                    raise ValueError(f"{memory.identity}: there is no step to audit: {recovered}")
                memory.forget_everything()
                return None
            found = recovered
        if memory.chosen not in (-1, found.images[-1].iteration):
            logger.warning(
                "resume_at=%d was for an earlier start; this one goes on from the newest state. To go back "
                "there once more, start once without it",
                memory.chosen,
            )
        with contextlib.ExitStack() as undo:
            if localized is not None:
                undo.callback(localized.close)
            if self._audit is not None:
                compute_as_recorded(memory.table.segments[-1].descriptor)
            plan, changed = self._agree_on_snapshots(memory, ranks)
            with ranks.all_or_none():
                alone = localized is not None and not localized.replays
                replay = self._begin_replay(found, plan, ranks, alone=alone)
                memory.phases.reach(RecoveryPhase.FIRST_BYTES)
            undo.pop_all()
        return Resumption(
            replay,
            plan,
            found.images[-1].phase,
            found.reason,
            self._subject.sharing,
            self._verification_of(memory, ranks, found, replay.start, changed),
            "snapshots are partial" if plan.lossy else found.unverified,
            found.new_from,
            localized,
        )

    def _settle(self, memory: RankMemory, ranks: Collectives) -> tuple[int, int | None]:
        """How many iterations are verified, and the iteration to go back to; a collective call."""
        options = self._options

        def settled() -> tuple[int, int, bool]:
            memory.settle_filled(_SEAL_WAIT_S)
            wish = -1 if options.resume_at is None else options.resume_at
            # Nothing leads from one partial snapshot to the next.
            return 0 if _lossy(memory) else options.verify_iterations, wish, _restarted()

        told = ranks.agree(settled, tuple[int, int, bool])
        at = _wanted_iteration([wish for _, wish, _ in told])
        memory.chosen = -1 if at is None else at
        if any(restarted for _, _, restarted in told):
            at = None
        return min(verified for verified, _, _ in told), at

    def _begin_replay(
        self, found: Recovered, plan: SnapshotPlan, ranks: Collectives, *, alone: bool
    ) -> Replay:
        """Waits for the first snapshot; replay waits for the others."""
        if not plan.lossy:
            images = found.images
            replay = self.replay_of(images, plan, ranks, alone=alone, dense=found.dense)
        else:
            # Each expert from the newest snapshot that has it; nothing is replayed.
            images, older = found.images[-1:], found.images[-2::-1]
            replay = self.replay_of(
                images, plan, ranks, alone=alone, dense=True, older=older, apart=found.apart
            )
        _ = images[0].view
        return replay

    def _verification_of(
        self, memory: RankMemory, ranks: Collectives, found: Recovered, start: int, changed: str
    ) -> Verification | StepAudit:
        """Raises ValueError if this is an audit, and no step can be audited."""
        subject = self._subject
        if self._audit is None:
            return Verification(
                memory,
                ranks,
                found.replayed,
                on_mismatch=self._options.on_mismatch,
                changed=changed,
                stateful=subject.stateful,
                device=subject.device,
            )
        if found.unverified:
            raise ValueError(f"{memory.identity}: there is no step to audit: {found.unverified}")
        return StepAudit(self._audit, subject.identity, start, changed)

    def _agree_on_snapshots(self, memory: RankMemory, ranks: Collectives) -> tuple[SnapshotPlan, str]:
        """The plan of the newest snapshots, and how this machine differs from theirs; a collective call."""
        plan, changed = None, ""

        def looked() -> tuple[int, bool]:
            nonlocal plan, changed
            plan, changed = self._plan_of(memory), _changed_since(memory)
            return memory.hint, plan.lossy

        seen = ranks.agree(looked, tuple[int, bool])
        if len({lossy for _, lossy in seen}) > 1:  # some would replay, and wait for the others in vain
            partial = [rank for rank, (_, lossy) in enumerate(seen) if lossy]
            raise AttachRefused(
                "policies_differ",
                f"the newest snapshots of ranks {partial} are partial, and those of the others are not",
                "recovery=RecoveryOptions(resume_at=...) goes back to an earlier iteration "
                "(`ckptctl iterations`); nothing was changed",
            )
        self._heed([hint for hint, _ in seen])
        assert plan is not None
        return plan, changed

    def _begin_localized(
        self, memory: RankMemory, ranks: Collectives, at: int | None, verify_iterations: int
    ) -> LocalizedStart | RunView | None:
        subject = self._subject
        if subject.identity.world_size == 1:
            return None
        same = subject.sharing.ranks_with_same_operators(subject.operators, subject.identity.rank)
        if memory.descriptor is not None and not captured_once(memory.descriptor.client):
            same = ()  # by their wrappers they are, but values were not compared, or differed
        return begin_localized(memory, ranks, same, at=at, verify_iterations=verify_iterations)

    def _heed(self, hints: Sequence[int]) -> None:
        """Freeze like the most careful rank: what it computes from all gradients includes the others'."""
        if any(hint & HINT_DROP_GRADIENTS for hint in hints) and self.freezing == "inputs":
            self.freezing = "drop"
            self.freezing_reason = "an earlier replay with 'inputs' did not reproduce what was recorded"

    def _plan_of(self, memory: RankMemory) -> SnapshotPlan:
        """The plan of the newest snapshots."""
        subject, newest = self._subject, memory.table.segments[-1]
        payload = values.unpack(newest.descriptor.client)
        recorded = payload["signature"]
        subject.binding.add_groups(payload.get("groups", {}))
        if difference := signature_difference(recorded, signature(subject.binding)):
            job, run = subject.identity.job, subject.identity.run
            raise AttachRefused(
                "model_changed",
                f"the snapshots of job {job}, run {run} are of another model: {difference}",
                "if the program makes parameters, buffers or groups while it trains, make them before "
                f"Checkpointer; else pass run= a new name, or `ckptctl forget {job} {run}`",
            )
        return plan_from_payload(
            subject.binding,
            newest.descriptor.client,
            subject.identity.metadata(),
            newest.geometry,
            subject.sharing,
        )

    def replay_of(
        self,
        images: Sequence[SnapshotImage],
        plan: SnapshotPlan,
        ranks: Collectives,
        *,
        alone: bool = False,
        dense: bool = False,
        older: Sequence[SnapshotImage] = (),
        apart: Sequence[SnapshotImage] = (),
    ) -> Replay:
        """A replay of these snapshots, oldest first; a collective call if there are several ranks.

        Args:
            alone: the images have everything that this rank has; it receives nothing from others.
            dense: the oldest one anchors everything, on all ranks.
            older: partial snapshots before the only one of ``images``, newest first.
            apart: further ones, for experts of which no other rank has a replica.
        Raises:
            ValueError: no rank that this rank can reach has recorded what both share.
        """
        subject, broadcast = self._subject, None
        if subject.identity.world_size > 1:
            suffix = (*images, *older) if plan.selection is not Selection.TURNS else ()
            broadcast = arrange(subject.sharing, plan.operators, plan.owners, ranks, suffix)
        mine = sum(1 << i for i in self._alone(plan.operators, plan.owners))
        every = [*((image, None) for image in older), *((image, mine) for image in apart)]
        return Replay(
            SnapshotLoader(
                subject.binding, plan.operators, self._engine, None if alone else broadcast, plan.scope
            ),
            images,
            stateful=subject.stateful,
            tape=self._tape,
            freezing=self.freezing,
            begins_dense=dense,
            older=sorted(every, key=lambda found: -found[0].iteration),
        )

    def _alone(self, operators: Sequence[Operator], owners: Sequence[int] = ()) -> frozenset[int]:
        """The experts that no other rank has; none if the policy has whole snapshots."""
        if self._partial is None:
            return frozenset()
        subject = self._subject
        shared = {i for indices in subject.sharing.groups(operators).values() for i in indices}
        shared.update(i for i, owner in enumerate(owners) if owner != EVERY_RANK)
        parts = parts_of_experts(subject.binding, operators)
        num_experts = self._partial.num_experts
        return experts_alone(operators, subject.identity.world_size, num_experts, parts) - shared


def _lossy(memory: RankMemory) -> bool:
    """Whether this rank's newest snapshots are partial."""
    return memory.descriptor is not None and bool(values.unpack(memory.descriptor.client).get("scope"))


def _changed_since(memory: RankMemory) -> str:
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


def _restarted() -> bool:
    """Whether the launcher says that it starts the same again. Of several agents of torchrun each counts its
    own restarts, and a change of the nodes is none.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _wanted_iteration(wishes: Sequence[int]) -> int | None:
    """The iteration to which all ranks are told to go back, -1 being none."""
    if len({*wishes}) > 1:
        shown = {rank: None if wish < 0 else wish for rank, wish in enumerate(wishes)}
        raise ValueError(
            f"resume_at= must be the same on all ranks, and is, by rank, {shown}; nothing was changed"
        )
    return None if wishes[0] < 0 else wishes[0]


class ReplayPart:
    """The replay in the user's loop. Without one, each call returns at once.

    Attributes:
        replay: None where the state is dense.
        cut_off: the checkpointer was closed in the middle of it.
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._found: Resumption | None = None
        # Not `replay`: one of a single snapshot is over at the first top, before its first forward.
        self._unforwarded: Replay | None = None
        self._began_s = 0.0
        self.replay: Replay | None = None
        self.cut_off = False

    @property
    def frozen(self) -> bool:
        """Whether some operators are frozen."""
        return self.replay is not None and not self.replay.dense

    @property
    def before_first_forward(self) -> bool:
        """Whether the first forward of a resumed run is still to come."""
        return self._unforwarded is not None

    @property
    def took_s(self) -> float:
        """Seconds since the first step of the replay began."""
        return time.perf_counter() - self._began_s

    def span(self, step: int) -> tuple[int, int]:
        """The first step of a loop that asks for ``step``, and how far this run has come (-1: unknown)."""
        replay = self.replay
        return (step, -1) if replay is None or replay.begun else (replay.start, replay.end)

    def check_whole(self) -> None:
        """Check that the model is not in the middle of a replay that was given up.

        Raises:
            ValueError: it is.
        """
        if self.cut_off:
            raise ValueError(
                "this Checkpointer was closed in the middle of a replay: part of the model is not restored; "
                "create a new one, which begins the replay again"
            )

    def resume(self, found: Resumption) -> None:
        """The oldest snapshot is loaded; its replay begins at the loop's first top."""
        self._found = found
        self.replay = self._unforwarded = found.replay

    def top(self, step: int, sent: Differences) -> bool:
        """The top of a step; returns whether it is one of a replay.

        Args:
            sent: what the step before sent to other stages otherwise than when it ran first.
        Raises:
            ReplayMismatch: what was recomputed is not what was recorded, on any rank.
        """
        replay = self.replay
        if replay is not None and not replay.begun:
            # The first step after a restore: the loop, and the iterators it needs, exist now.
            replay.begin_first_step()
            self._began_s = time.perf_counter()
        elif replay is not None and step == replay.next_iteration:
            self._stats.replayed_steps += step - replay.reached
            assert self._found is not None
            self._found.verification.advance(replay, sent)
        return replay is not None

    def end(self) -> Resumption | None:
        """The state is dense; returns what was resumed, if this replay came from a restart."""
        self.replay = None
        found, self._found = self._found, None
        if found is not None:
            found.verification.reproduced()
        return found

    def before_optimizer_step(self) -> None:
        """An optimizer is about to change weights."""
        if self.replay is not None:
            self.replay.before_optimizer_step()

    def after_optimizer_step(self, optimizer: int) -> None:
        """Optimizer number ``optimizer`` has updated its parameters."""
        if self.replay is not None:
            self.replay.after_optimizer_step(optimizer)

    def first_forward(self) -> None:
        """A forward is about to run; only the first one counts."""
        replay, self._unforwarded = self._unforwarded, None
        if replay is not None:
            replay.first_forward()

    @contextlib.contextmanager
    def instead(self, replay: Replay) -> Iterator[None]:
        """The steps of the body are those of another replay, which is given up at the end."""
        self.replay = self._unforwarded = replay
        try:
            yield
        finally:
            replay.abandon()
            self.replay = self._unforwarded = None

    def abandon(self) -> None:
        """Undo the patches of a replay; a state that is still partly frozen is not the run's."""
        if self.replay is not None:
            self.replay.abandon()
            self.replay = self._unforwarded = None
            self.cut_off = True
