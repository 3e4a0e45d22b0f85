"""Partial snapshots of one rank: its turns among the experts of a layer, and how long windows may be.

`ckptd.core.partial_experts` has the rules. All ranks follow them with the same numbers, so that their windows
are equal without a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import Operator
from ckptd.client.model.replicated_params import EVERY_RANK, NOTHING_SHARED, ReplicatedParams
from ckptd.client.options import MAX_WINDOW, PartialOptions, SnapshotOptions
from ckptd.core.durable_experts import DurableTurns, turns_of
from ckptd.core.partial_experts import (
    Selection,
    experts_of_layers,
    plan_partial,
    rotation,
    turns_of_owners,
    window_for,
    window_within,
)
from ckptd.core.snapshot_policy import OperatorCost, PartialScope, Schedule


def scope_of(options: SnapshotOptions) -> PartialScope | None:
    """What partial snapshots hold of selected experts only; None for other policies."""
    of_experts = options.of_experts
    return None if of_experts is None else PartialScope(of_experts.scope)


def check_experts(operators: Sequence[Operator], options: SnapshotOptions) -> None:
    """Check that the model has the experts that the options name.

    Raises:
        ValueError: it has none, or fewer in a layer, or too few for the window.
    """
    of_experts = options.of_experts
    if of_experts is None:
        return
    layers = experts_of_layers([op.expert for op in operators])
    if not layers:
        raise ValueError(
            f"policy={options.policy!r} leaves experts out of snapshots, and no experts were found in this "
            "model (ckpt.describe() lists operators; LayoutOptions(operators=...) names others): use "
            "'sliding'"
        )
    name, found = max(layers.items(), key=lambda item: item[1])
    total = of_experts.num_experts or found
    if total < found:
        raise ValueError(
            f"num_experts={total}: {name} has {found} experts on this rank alone; pass the number of the "
            "whole layer, or None if each rank has all of them"
        )
    for layer, here in layers.items():
        if of_experts.experts is not None and of_experts.experts > (of_experts.num_experts or here):
            raise ValueError(
                f"experts={of_experts.experts}: {layer} has {here} experts; pass at most as many, or "
                "num_experts= if other ranks have more of them"
            )
    if options.window is not None and options.window > total:
        raise ValueError(
            f"window={options.window}: {name} has {total} experts, and a snapshot has at least one of them "
            "(K = E / window); pass at most as many, or num_experts= if other ranks have more of them"
        )
    if of_experts.persist_experts is not None and of_experts.persist_experts > total:
        raise ValueError(
            f"persist_experts={of_experts.persist_experts}: {name} has {total} experts; pass at most "
            "as many, or num_experts= if other ranks have more of them"
        )


def durable_turns(options: SnapshotOptions, operators: Sequence[Operator]) -> DurableTurns | None:
    """How many experts a durable checkpoint stores; None: all."""
    found = options.of_experts
    if found is None or found.persist_experts is None:
        return None
    return DurableTurns(found.persist_experts, experts_of_layer(options, operators), found.lost_tokens_limit)


def experts_of_layer(options: SnapshotOptions, operators: Sequence[Operator]) -> int:
    """E of the largest layer, on all ranks (0: the model has none); partial snapshots only."""
    found = options.of_experts
    assert found is not None, "the policy leaves no experts out"
    return found.num_experts or max(experts_of_layers([op.expert for op in operators]).values(), default=0)


def durable_text(turns: DurableTurns, window: int) -> str:
    """What durable checkpoints have of experts, in words."""
    phases = turns_of(turns.experts, turns.of, window)
    if phases == window:
        return f"a durable checkpoint stores all {turns.of} experts of a layer"
    limit = (
        ""
        if turns.limit is None
        else (f"; as many more as keep a PLT of {turns.limit:.2%} after a recovery from storage")
    )
    return (
        f"A DURABLE CHECKPOINT STORES {phases} OF {window} PARTS of the experts (persist_experts="
        f"{turns.experts} of {turns.of} in a layer) and takes the others from earlier ones, so each expert "
        f"is stored at least once in {-(-window // phases) + 1} checkpoints{limit}"
    )


def experts_alone(
    operators: Sequence[Operator], world_size: int, num_experts: int | None, parts: Collection[int] = ()
) -> frozenset[int]:
    """The experts that certainly no other rank has, unless it is declared that some are shared.

    Args:
        num_experts: of a layer, on all ranks; None: unknown. Of layers with fewer nothing is certain.
        parts: operators that are a part of an expert, of which other ranks have the rest.
    """
    here = experts_of_layers([op.expert for op in operators])
    alone = {name for name, number in here.items() if world_size == 1 or number * world_size == num_experts}
    experts = ((i, operators[i].expert) for i in _whole_experts(operators, parts))
    return frozenset(i for i, expert in experts if expert is not None and expert[0] in alone)


def parts_of_experts(binding: LiveState, operators: Sequence[Operator]) -> set[int]:
    """The operators that are a part of an expert, of which other ranks have the rest: its tensors are sharded
    along another dimension than that of the experts.
    """
    found = set()
    for i, op in enumerate(operators):
        for member in op.members if op.expert is not None else ():
            placements = getattr(binding.params[member.param], "placements", ())
            if any(p.is_shard() and (member.start is None or not p.is_shard(0)) for p in placements):
                found.add(i)
    return found


def _whole_experts(operators: Sequence[Operator], parts: Collection[int]) -> frozenset[int]:
    """Of an expert in several parts here, each part may have another owner."""
    number = Counter(op.expert for op in operators)
    return frozenset(
        i
        for i, op in enumerate(operators)
        if op.expert is not None and number[op.expert] == 1 and i not in parts
    )


@dataclass(frozen=True)
class PartialTurns:
    """The turns of this rank's experts.

    Args:
        rank: this one's number among those that hold different experts; ranks with consecutive numbers hold
            consecutive experts.
    """

    options: PartialOptions
    operators: Sequence[Operator]
    rank: int
    world_size: int

    @classmethod
    def of(
        cls,
        options: SnapshotOptions,
        operators: Sequence[Operator],
        rank: int,
        world_size: int,
        sharing: ReplicatedParams = NOTHING_SHARED,
    ) -> PartialTurns | None:
        """None for other policies."""
        found = options.of_experts
        place = _place(rank, operators, sharing)
        return None if found is None else cls(found, operators, place, world_size)

    @property
    def selection(self) -> Selection:
        """Which experts a snapshot has."""
        return Selection(self.options.selection)

    @property
    def selects(self) -> bool:
        """Whether the script asks for experts by tokens at risk."""
        return self.selection is not Selection.TURNS

    @property
    def num_experts(self) -> int:
        """The experts of the largest layer, on all ranks."""
        return self.options.num_experts or max(self._here.values())

    @property
    def window(self) -> int | None:
        """The window of the user's K; None: not chosen."""
        selected = self.options.experts
        return None if selected is None else min(MAX_WINDOW, window_for(self.num_experts, selected))

    @property
    def longest(self) -> int:
        """The window in which each snapshot has one expert of a layer."""
        return min(MAX_WINDOW, self.num_experts)

    def window_within(self, iteration: int, lost_iterations: float, wanted: int, *, every: int) -> int:
        """The longest window up to ``wanted`` with which a failure now keeps the PLT within the limit.

        Args:
            every: iterations between two snapshots.
        """
        limit = self.options.lost_tokens_limit
        if limit is None:
            return wanted
        return window_within(limit, iteration, lost_iterations=lost_iterations, every=every, longest=wanted)

    def schedule(
        self,
        operators: Sequence[Operator],
        costs: Sequence[OperatorCost],
        *,
        fixed_bytes: int,
        budget_bytes: int | None,
        window: int | None,
        whole: Sequence[tuple[int, Collection[int]]] = (),
    ) -> Schedule:
        """The smallest window whose largest snapshot fits the budget, or this window.

        Args:
            operators: as the plan cuts them.
            whole: as of `plan_partial`.
        """
        experts = [op.expert for op in operators]
        total = self.options.num_experts
        first = 0 if total is None else self.rank * max(self._here.values()) % total
        for candidate in range(1, self.longest + 1) if window is None else [window]:
            phases = rotation(experts, candidate, first=first, num_experts=total)
            schedule = plan_partial(
                costs, phases, candidate, fixed_bytes=fixed_bytes, budget_bytes=budget_bytes, whole=whole
            )
            if schedule.fits:
                break
        return schedule

    def of_owners(
        self, schedule: Schedule, owners: Sequence[int], shared: Sequence[Collection[int]]
    ) -> Schedule:
        """The same with turns of experts that several ranks hold by their owners, as `turns_of_owners`."""
        if not owners:
            return schedule
        phases: list[list[int]] = [[] for _ in range(schedule.window)]
        for i, phase in enumerate(turns_of_owners(schedule.phase_of, owners, shared, schedule.window)):
            phases[phase].append(i)
        return replace(schedule, phases=tuple(map(tuple, phases)))

    def selectable(
        self, operators: Sequence[Operator], owners: Sequence[int], parts: Collection[int] = ()
    ) -> frozenset[int]:
        """The experts of which one rank can decide when they are captured: it owns them, or it is certain
        that no other rank has them.

        Args:
            owners: as of a plan: the rank that captures each operator, if several hold it.
            parts: operators that are a part of an expert, of which other ranks have the rest.
        """
        if not self.selects:
            return frozenset()
        alone = experts_alone(operators, self.world_size, self.options.num_experts, parts)
        shared = frozenset(i for i, owner in enumerate(owners) if owner != EVERY_RANK)
        return alone | shared & _whole_experts(operators, parts)

    @property
    def _here(self) -> dict[str, int]:
        return experts_of_layers([op.expert for op in self.operators])


def _place(rank: int, operators: Sequence[Operator], sharing: ReplicatedParams) -> int:
    """This rank's number among those that hold different experts: equal on ranks that hold the same."""
    groups = sharing.groups([op for op in operators if op.expert is not None])
    if not groups:
        return rank
    ranks = max(groups, key=lambda group: len(groups[group])).ranks
    adjacent = ranks[-1] - ranks[0] == len(ranks) - 1
    return ranks[0] // len(ranks) if adjacent else ranks[0]
