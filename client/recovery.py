"""What happens at a start: find the run's snapshots, check that they are this model's, and prepare their replay."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ckptd.client import values
from ckptd.client.agreement import exchange
from ckptd.client.binding import Binding
from ckptd.client.freeze import Tape
from ckptd.client.identity import Identity
from ckptd.client.memory import RankMemory
from ckptd.client.operators import Operator
from ckptd.client.planning import Plan, plan_from_payload, signature, signature_difference
from ckptd.client.replay import Replay, ReplayMismatch, SnapshotImage
from ckptd.client.scalars import Stateful
from ckptd.cuda.engine import CopyEngine
from ckptd.errors import AttachRefused
from ckptd.ring import SlotState
from ckptd.segment_format import HINT_DROP_GRADIENTS

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
        """The newest state that every rank can be brought back to; None to start from the beginning.

        Raises:
            AttachRefused: the snapshots are of another model; nothing was lost.
        """
        memory.settle_filled(_SEAL_WAIT_S)
        found = memory.recover(lambda payload: exchange(self._identity, payload))
        if isinstance(found, str):
            _start_over(memory, found)
            return None
        images, reason = found
        if memory.hint == HINT_DROP_GRADIENTS and self.freezing == "inputs":
            self.freezing = "drop"
            self.freezing_reason = (
                "an earlier replay with 'inputs' did not reproduce what was recorded"
            )
        newest = memory.table.segments[-1]
        self._check_signature(newest.descriptor.client)
        plan = plan_from_payload(
            self._binding, newest.descriptor.client, self._identity.metadata(), newest.geometry
        )
        replay = self.replay_of(images, plan.operators)
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


def _start_over(memory: RankMemory, why: str) -> None:
    """Nothing can be recovered: normal for a new run, worth a word for an old one, an error where there is damage."""
    damaged = sum(r.state is SlotState.QUARANTINED for r in memory.table.records())
    if damaged:
        text = f"starting over from the beginning: {damaged} slots are damaged; {why}"
        logger.error("%s", text)
        memory.session.notice("error", "starting_over", text)
    elif memory.descriptor is not None:
        text = f"starting over from the beginning: {why}"
        logger.warning("%s", text)
        memory.session.notice("warning", "starting_over", text)
    else:
        logger.info("starting from the beginning: %s", why)
    memory.forget_everything()
