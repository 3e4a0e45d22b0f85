"""Ranks that hold the same parameters compare them while they train, by checksums in the job's store.

One rank captures such parameters for all, so after a failure all go on with its values. `FirstPlan`
compares them after the first update, and they may part later: local SGD that begins after a warm-up, a
micro-batch that was not synchronized, a bit that flips. No rank waits for another: what the others have
found is seen at a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.replicated_params import Replicas, ReplicatedParams, checksum
from ckptd.client.ranks.store_agreement import StoreAgreement
from ckptd.client.ranks.store_barrier import job_store

logger = get_logger(__name__)

# Steps of the first comparison, of the next ones at twice as many, and from there on between two: reading all
# parameters of a small model on a CPU takes up to half a step.
_FIRST, _EVERY = 16, 1024
_PARTS = 8


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the parameters of a group, and their checksum here."""

    names: Sequence[str]
    value: int

    def __str__(self) -> str:
        first, last = self.names[0], self.names[-1]
        return first if len(self.names) == 1 else f"{first} to {last} ({len(self.names)} parameters)"


@dataclass(frozen=True, slots=True)
class _Comparison:
    """What this rank has proposed at a step; ``waiting``: groups of which not all ranks have told theirs."""

    step: int
    agreement: StoreAgreement
    groups: dict[Replicas, list[_Part]]
    waiting: set[Replicas]

    def key(self, group: Replicas) -> str:
        return f"{self.step}-{group.key}"

    def unlike(self, group: Replicas) -> list[_Part] | None:
        """The parts that another rank has otherwise; None until all have told theirs."""
        found, parts = self.agreement.largest(self.key(group)), self.groups[group]
        if found is None:
            return None
        # All have the same number if the largest one, and the largest of the negative ones, are this rank's.
        pairs = zip(parts, found[::2], found[1::2], strict=True)
        return [part for part, most, least in pairs if (most, -least) != (part.value, part.value)]

    def forget(self) -> None:
        """Remove it from the store; all ranks of its groups have begun the next one."""
        for group, parts in self.groups.items():
            self.agreement.forget(self.key(group), len(parts) * 2, group.ranks)


class ReplicaWatch:
    """One rank's part in the comparisons."""

    def __init__(self, binding: LiveState, memory: RankMemory) -> None:
        self._binding, self._memory = binding, memory
        self._step = -1
        self._equal_at: dict[Replicas, int] = {}
        self._told: set[Replicas] = set()
        self._open: _Comparison | None = None
        self._before: _Comparison | None = None

    def look(self, step: int, sharing: ReplicatedParams) -> str:
        """Compare if it is time to; call it at the top of every step in which the ranks share parameters.

        Returns:
            Why one rank can no longer capture for the others; empty if it can.
        """
        reason = "" if self._open is None else self._answers(self._open)
        before = self._step if self._step >= 0 else step - 1
        self._step = step
        if step >= _FIRST and _number(step) != _number(before):
            self._begin(step, sharing)
        return reason

    def close(self) -> None:
        """Stop waiting for other ranks."""
        if self._open is not None:
            self._open.agreement.close()
            self._open = None

    def _begin(self, step: int, sharing: ReplicatedParams) -> None:
        self.close()  # ranks that did not come to it at that step never answer
        identity = self._memory.identity
        prefix = f"ckptd/{identity.job}/{identity.run}/{self._memory.epoch}/replicas"
        agreement = StoreAgreement(job_store(), identity, prefix=prefix)
        groups = {group: self._parts(names) for group, names in sharing.by_group().items()}
        self._open = _Comparison(step, agreement, groups, set(groups))
        for group, parts in groups.items():
            numbers = [number for part in parts for number in (part.value, -part.value)]
            agreement.propose(self._open.key(group), numbers, among=len(group.ranks))

    def _parts(self, names: Sequence[str]) -> list[_Part]:
        size = -(-len(names) // _PARTS)
        parts = [names[first : first + size] for first in range(0, len(names), size)]
        return [_Part(part, int(checksum(self._binding, part), 16) >> 1) for part in parts]

    def _answers(self, open_: _Comparison) -> str:
        reasons = []
        for group in [each for each in open_.groups if each in open_.waiting]:
            if (unlike := open_.unlike(group)) is not None:
                open_.waiting.discard(group)
                reasons.append(self._judge(open_, group, unlike))
        if not open_.waiting:
            self._open = None
            if self._before is not None and self._memory.identity.rank in {g.ranks[0] for g in open_.groups}:
                self._before.forget()
            self._before = open_
        return next(filter(None, reasons), "")

    def _judge(self, open_: _Comparison, group: Replicas, unlike: Sequence[_Part]) -> str:
        if not unlike:
            self._equal_at[group] = open_.step
            self._told.discard(group)
            return ""
        ranks = _listed(group.ranks)
        last = self._equal_at.get(group)
        since = "after the first update" if last is None else f"at step {last}"
        if 2 * len(unlike) > len(open_.groups[group]):
            return (
                f"ranks {ranks} train apart: parameters of which one rank captured the values for all "
                f"were equal {since}, and differ at step {open_.step} ({unlike[0]}, and others). From here "
                "on each rank captures its own; snapshots from before that may hold one rank's values for "
                "all. If ranks are meant to train apart (local SGD), begin with "
                "LayoutOptions(capture_once=False); if not, look for a step without synchronization"
            )
        if group not in self._told and self._memory.identity.rank == group.ranks[0]:
            self._told.add(group)
            text = (
                f"ranks {ranks} hold different values of {', '.join(map(str, unlike))}: equal {since}, "
                f"different at step {open_.step}. A bit has flipped in one of them, or one has computed "
                "wrong; after a failure all go on with the values of the rank that captures them"
            )
            logger.error("%s", text)
            self._memory.session.notice("error", "replicas_differ", text)
        return ""


def _number(step: int) -> int:
    """Which comparison a step is after."""
    return step.bit_length() if step < _EVERY else _EVERY.bit_length() - 1 + step // _EVERY


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, … ({len(ranks)})"
