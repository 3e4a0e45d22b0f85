"""What a run with partial snapshots has lost: tokens whose updates of experts are gone, by expert.

An expert's count of *given* tokens grows with each step, and is recorded in every snapshot with the count of
those that were *lost*. A recovery at iteration e takes an expert from its snapshot of iteration i <= e. It
loses the tokens that the expert was given from i to e, less those of them that an earlier recovery has lost
already. Replicas of an expert count their own tokens; the sums over ranks are exact.

Source: MoC-System (ASPLOS '25), section 3.1.2. With the counts by expert a model can give more capacity to
experts that have lost much (MoEtion, section 6).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from ckptd.client.model.operators import Operator
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.schedule.measurements import TokenCounter
from ckptd.core.durable_experts import DurableTurns
from ckptd.core.partial_experts import LayerTokens, proportion_lost
from ckptd.core.snapshot_policy import PartialScope

RECORDED = "experts"
"""Its place in the step scalars; absent in snapshots that lose nothing."""

# Experts in the text of a recovery; `LostUpdates` has all.
_NAMED = 4
_WHAT = {
    PartialScope.BOTH: "weights and optimizer state",
    PartialScope.OPTIMIZER: "the optimizer state",
    PartialScope.WEIGHTS: "the weights",
}

Counts = dict[str, list[float]]  # by container, of each of its experts


class _RankLoss(msgspec.Struct, frozen=True):
    """Of one rank: by layer, tokens that were given and lost so far, and those lost by this recovery."""

    layers: dict[str, tuple[float, float, float]]
    experts: int
    older: int
    oldest: int


@dataclass(frozen=True, slots=True)
class LostUpdates:
    """What one recovery has lost.

    Attributes:
        tokens: by operator, the tokens of this rank whose updates of that expert are lost.
        iterations: by operator, the iteration from which an expert was recovered, if it is an older one.
        plt: the proportion of lost tokens of this recovery, on all ranks.
        cumulative_plt: the same of all recoveries of the run.
        text: all of that in words.
    """

    tokens: Mapping[str, int]
    iterations: Mapping[str, int]
    plt: float
    cumulative_plt: float
    text: str


class ExpertLosses:
    """Counts what is lost over the life of a run.

    Args:
        durable: what the user wants durable checkpoints to store of experts; None: all.
    Attributes:
        lost_iterations: the PLT so far in iterations of all experts' tokens.
        last: of the recovery with which this process began; None: it lost nothing.
        cumulative_plt: the proportion of lost tokens of all recoveries so far.
        captured: the tokens of each expert at the recovery: what it was given before is not at risk.
    """

    def __init__(self, counter: TokenCounter, durable: DurableTurns | None = None) -> None:
        self._counter, self._durable = counter, durable
        self._lost: Counts = {}
        self.lost_iterations = 0.0
        self.cumulative_plt = 0.0
        self.last: LostUpdates | None = None
        self.captured: dict[tuple[str, int], float] = {}

    def record(self) -> dict[str, Any]:
        """For a snapshot's step scalars; the counts of fused experts are tensors on their device."""
        durable = self._durable
        return {
            "given": self._counter.totals(),
            "lost": self._lost,
            "lost_iterations": self.lost_iterations,
            "plt": self.cumulative_plt,
            # For the store keeper (`ckptd.persistence.durable_plan`).
            "durable": durable and {"experts": durable.experts, "of": durable.of, "limit": durable.limit},
        }

    def resume(
        self,
        operators: Sequence[Operator],
        scalars: Mapping[int, Mapping[str, Any]],
        anchored: Mapping[int, int],
        ranks: Collectives,
        scope: PartialScope,
    ) -> LostUpdates:
        """What is lost by a recovery; a collective call.

        Args:
            scalars: the step scalars of the snapshots that were loaded, by iteration.
            anchored: the iteration from which each operator was loaded.
        """
        end = max(scalars)
        recorded = {iteration: _counts(found[RECORDED]) for iteration, found in scalars.items()}
        given, lost = recorded[end]
        self._counter.resume(given)
        tokens: dict[str, float] = {}
        seen: set[tuple[str, int]] = set()
        fresh: dict[str, float] = dict.fromkeys(given, 0.0)
        for i, op in enumerate(operators):
            if op.expert is None or op.expert in seen or op.expert[0] not in given:
                continue  # parts of an expert are of one iteration
            seen.add(op.expert)
            name, index = op.expert
            then_given, then_lost = recorded[anchored[i]]
            now = given[name][index] - lost[name][index]
            self.captured[op.expert] = given[name][index]
            # What an earlier recovery lost between these snapshots is lost already.
            gone = now - (then_given.get(name, given[name])[index] - then_lost.get(name, lost[name])[index])
            tokens[op.name] = gone
            lost[name][index] += gone
            fresh[name] += gone
        self._lost = lost
        older = {op.name: anchored[i] for i, op in enumerate(operators) if op.expert and anchored[i] < end}
        # Of experts that are captured in parts, each counts once.
        num_older = len({op.expert for op in operators if op.name in older})
        mine = _RankLoss(
            {name: (sum(given[name]), sum(lost[name]), fresh[name]) for name in given},
            len(seen),
            num_older,
            min(older.values(), default=end),
        )
        found = ranks.gather(mine, _RankLoss)
        return self._sum(end, found, tokens, older, scalars[end][RECORDED], scope)

    def _sum(
        self,
        end: int,
        found: Sequence[_RankLoss],
        tokens: Mapping[str, float],
        older: Mapping[str, int],
        recorded: Mapping[str, Any],
        scope: PartialScope,
    ) -> LostUpdates:
        cumulative = proportion_lost([_tokens(rank, 1) for rank in found])
        this = proportion_lost([_tokens(rank, 2) for rank in found])
        counted = any(given for rank in found for given, _, _ in rank.layers.values())
        oldest = min(rank.oldest for rank in found)
        if not counted:
            # Nobody counts in a compiled model; as if each iteration had given every expert the same.
            this = (end - oldest) / 2 / max(end, 1)
            cumulative = recorded["plt"] + this
        self.cumulative_plt = cumulative
        self.lost_iterations = cumulative * end
        gone = sum(layer[2] for rank in found for layer in rank.layers.values())
        amount = f"{gone:,.0f} tokens" if counted else "an estimate, since tokens cannot be counted here"
        whose = " of all ranks" if len(found) > 1 else ""
        text = (
            f"PARTIAL SNAPSHOTS: {_WHAT[scope]} of {sum(rank.older for rank in found)} of "
            f"{sum(rank.experts for rank in found)} experts{whose} are "
            f"those of earlier iterations, from {oldest} on; updates by {amount} are lost: PLT {this:.4%}, "
            f"with earlier failures {cumulative:.4%}"
        )
        counts = {name: int(lost) for name, lost in tokens.items() if lost}
        if most := sorted(counts, key=lambda name: (-counts[name], name))[:_NAMED]:
            text += "; here most by " + ", ".join(
                f"{name} ({counts[name]:,}, of iteration {older.get(name, end)})" for name in most
            )
        self.last = LostUpdates(counts, dict(older), this, cumulative, text)
        return self.last


def _tokens(rank: _RankLoss, which: int) -> dict[str, LayerTokens]:
    return {name: LayerTokens(layer[0], layer[which]) for name, layer in rank.layers.items()}


def _counts(recorded: Mapping[str, Any]) -> tuple[Counts, Counts]:
    """Tokens that were given and lost, of a snapshot; nothing was lost before the first recovery."""
    given = {name: listed(counts) for name, counts in recorded["given"].items()}
    lost = {name: list(recorded["lost"].get(name) or [0.0] * len(counts)) for name, counts in given.items()}
    return given, lost


def listed(counts: Any) -> list[float]:
    """The counts of one container as numbers; of fused experts they are a tensor on its device."""
    return list(counts.tolist() if isinstance(counts, Tensor) else counts)


# -- making up for it -------------------------------------------------------------------------------


class CapacityBoost:
    """The capacity of each expert, larger while it has lost tokens to make up for (MoEtion, section 6).

    A model whose experts have a capacity asks for it in its gate. After a failure of a run with partial
    snapshots training is not exact anyway. Pass it in ``state=``, so that what is left of it survives a
    failure, and `add` what the recovery has lost::

        boost = CapacityBoost()
        ckpt = Checkpointer(model, optimizer, state={"boost": boost, ...},
                            snapshots=SnapshotOptions(policy="partial"))
        boost.add(ckpt.lost_updates)
        ...
        capacity = boost.capacity("layers.3.experts.7", base)          # in the gate
        boost.processed("layers.3.experts.7", num_tokens, base)

    Args:
        share: of its capacity that an expert gets more; MoEtion takes a tenth.
    Raises:
        ValueError: ``share`` is not above 0.
    """

    def __init__(self, share: float = 0.1) -> None:
        if not (share > 0 and math.isfinite(share)):
            raise ValueError(f"share={share:g}: pass the part of a capacity that is added, such as 0.1")
        self._share = share
        self._left: dict[str, int] = {}

    @property
    def left(self) -> Mapping[str, int]:
        """By expert, the tokens that it has still to make up for."""
        return self._left

    def add(self, lost: LostUpdates | None) -> None:
        """Note what a recovery has lost; None: nothing."""
        for name, tokens in ({} if lost is None else lost.tokens).items():
            self._left[name] = self._left.get(name, 0) + tokens

    def capacity(self, expert: str, base: int) -> int:
        """The tokens that an expert may take in this step.

        Args:
            expert: the name of its operator, as in ``ckpt.describe()``.
            base: its capacity otherwise.
        """
        return base + min(math.ceil(self._share * base), self._left.get(expert, 0))

    def processed(self, expert: str, tokens: int, base: int) -> None:
        """An expert has taken so many tokens: those beyond ``base`` make up for lost ones."""
        left = self._left.get(expert, 0) - max(0, tokens - base)
        if left > 0:
            self._left[expert] = left
        else:
            self._left.pop(expert, None)

    def state_dict(self) -> dict[str, Any]:
        """For a snapshot."""
        return dict(self._left)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As it was at the snapshot."""
        self._left = {name: int(tokens) for name, tokens in state.items()}
