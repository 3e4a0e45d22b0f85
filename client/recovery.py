"""What happens at a start: find the run's snapshots, check that they are this model's, and prepare their replay."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ckptd.client import values
from ckptd.client.agreement import all_or_none
from ckptd.client.binding import Binding
from ckptd.client.exchange import exchange
from ckptd.client.freeze import Tape
from ckptd.client.identity import Identity
from ckptd.client.memory import RankMemory
from ckptd.client.operators import Operator
from ckptd.client.planning import Plan, plan_from_payload, signature, signature_difference
from ckptd.client.replay import Replay, ReplayMismatch, SnapshotImage
from ckptd.client.scalars import Stateful
from ckptd.cuda.engine import CopyEngine
from ckptd.errors import AttachRefused
from ckptd.memory.segment_format import HINT_DROP_GRADIENTS

__all__ = ["Recovery", "Resumption"]

logger = logging.getLogger(__name__)

_SEAL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Resumption:
    """A run that can go on: how to replay it, under which plan, and the phase of its newest snapshot."""

    replay: Replay
    plan: Plan
    phase: int
    reason: str


class Recovery:
    """Makes replays of this rank's snapshots.

    Args:
        freezing: ``drop`` or ``inputs``; falls back to ``drop`` where an earlier trainer left that hint.
        freezing_reason: why, for ``describe()``.
        on_mismatch: ``raise`` or ``warn``.
    """

    def __init__(
        self,
        binding: Binding,
        engine: CopyEngine,
        *,
        identity: Identity,
        stateful: Mapping[str, Stateful],
        tape: Tape,
        freezing: str,
        freezing_reason: str,
        on_mismatch: str,
    ) -> None:
        self._binding, self._engine, self._identity = binding, engine, identity
        self._stateful, self._tape, self._on_mismatch = stateful, tape, on_mismatch
        self.freezing, self.freezing_reason = freezing, freezing_reason

    def find(self, memory: RankMemory) -> Resumption | None:
        """The newest state that every rank can be brought back to; None to start from the beginning. A collective call.

        Raises:
            AttachRefused: the snapshots are of another model, or it is refused by the daemon; nothing was lost.
            DaemonUnavailable: a daemon is away, or another rank cannot go on.
        """

        def meet(payload: bytes) -> list[bytes]:
            return exchange(self._identity, payload)

        with all_or_none(meet, memory.session.node_id):
            memory.settle_filled(_SEAL_WAIT_S)
        found = memory.recover(meet)
        if isinstance(found, str):
            memory.forget_everything()
            return None
        self._heed(meet(bytes([memory.hint])))
        with all_or_none(meet, memory.session.node_id):
            return self._resumption(memory, *found)

    def _heed(self, hints: Sequence[bytes]) -> None:
        """Freeze otherwise if any rank left the hint: what one computes from all gradients, it computes from the others', too."""
        if bytes([HINT_DROP_GRADIENTS]) in hints and self.freezing == "inputs":
            self.freezing = "drop"
            self.freezing_reason = (
                "an earlier replay with 'inputs' did not reproduce what was recorded"
            )

    def _resumption(
        self, memory: RankMemory, images: Sequence[SnapshotImage], reason: str
    ) -> Resumption:
        newest = memory.table.segments[-1]
        self._check_signature(newest.descriptor.client)
        plan = plan_from_payload(
            self._binding, newest.descriptor.client, self._identity.metadata(), newest.geometry
        )
        replay = self.replay_of(images, plan.operators)
        # What is loaded first must have arrived. The rest is waited for in replay.
        _ = images[0].view
        return Resumption(replay, plan, images[-1].phase, reason)

    def replay_of(
        self,
        images: Sequence[SnapshotImage],
        operators: Sequence[Operator],
        *,
        on_mismatch: str | None = None,
    ) -> Replay:
        """A replay of these snapshots, oldest first."""
        return Replay(
            self._binding,
            operators,
            self._engine,
            images,
            stateful=self._stateful,
            tape=self._tape,
            freezing=self.freezing,
            on_mismatch=on_mismatch or self._on_mismatch,
        )

    def advance(self, replay: Replay, memory: RankMemory) -> None:
        """The top of a replayed step; a mismatch under ``inputs`` leaves a hint for the next start.

        Raises:
            ReplayMismatch: what was recomputed is not what was recorded.
        """
        try:
            replay.advance()
        except ReplayMismatch:
            if replay.freezing == "inputs":
                # User code may read all gradients in a way that no tap sees; dropping them is exact for it.
                logger.error(
                    "the next start of this run replays with freezing 'drop' instead of 'inputs'"
                )
                memory.leave_hint(HINT_DROP_GRADIENTS)
            raise

    def _check_signature(self, payload: bytes) -> None:
        told = values.unpack(payload)
        job, run = self._identity.job, self._identity.run
        difference = signature_difference(told["signature"], signature(self._binding))
        if difference:
            raise AttachRefused(
                "model_changed",
                f"the snapshots of job {job}, run {run} are of another model: {difference}",
                f"pass run= a new name, or `ckptctl forget {job} {run}`",
            )
        for what, before, now in (
            ("torch", told["torch"], str(torch.__version__)),
            ("intra-op threads", told["threads"], torch.get_num_threads()),
        ):
            if before != now:
                logger.warning(
                    "%s: %s when the snapshots were taken, %s now; this can change bits (replay verifies itself)",
                    what,
                    before,
                    now,
                )
