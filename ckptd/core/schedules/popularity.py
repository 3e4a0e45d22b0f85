"""In which order operators are anchored: how popularity is measured, and when an order is stale.

Popular experts are anchored late: they stay frozen longest during replay, which is where replay saves.

Source: MoEvement (NSDI '26), 3.5 and appendix B.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from operator import attrgetter

from ckptd.core.schedules.policy import OperatorCost, OperatorKind

__all__ = ["Ordering", "needs_reorder", "order_operators", "update_popularity"]


class Ordering(StrEnum):
    """How the popularity of an expert is measured (paper 3.5 and appendix B)."""

    HARD = "hard"  # tokens routed to it
    SOFT = "soft"  # its gate probabilities, summed
    DECAYED = "decayed"  # tokens routed to it, as a moving average
    CAPACITY = "capacity"  # tokens routed to it per token of its capacity


def update_popularity(
    previous: Sequence[float], observed: Sequence[float], *, ordering: Ordering, alpha: float = 0.9
) -> list[float]:
    """Popularity after one more mini-batch.

    Args:
        observed: of this mini-batch, per operator: tokens routed to it, or for `Ordering.SOFT` its
            gate probabilities summed over the tokens.
        alpha: how much of the past `Ordering.DECAYED` keeps, 0 to 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}, must be 0 to 1")
    if ordering is Ordering.DECAYED:
        return [alpha * old + (1 - alpha) * new for old, new in zip(previous, observed, strict=True)]
    return [old + new for old, new in zip(previous, observed, strict=True)]


def order_operators(
    operators: Sequence[OperatorCost],
    popularity: Mapping[int, float] | Sequence[float],
    ordering: Ordering = Ordering.HARD,
    *,
    capacities: Sequence[float] | None = None,
) -> list[int]:
    """The order in which to anchor: dense parts and gates, then experts, the popular ones last.

    Popular experts then stay frozen longest during replay. The slices of a fused tensor stay
    together, because its weight gradient is skipped only while all of them are frozen: groups go by
    their mean popularity, the slices within a group by their own. Ties keep the order of the ids.

    Args:
        popularity: per operator id; only that of experts is looked at. A mapping may leave out
            operators: they count as never used.
        capacities: tokens that each operator takes per batch, for `Ordering.CAPACITY`.
    """
    weight = _weights(len(operators), popularity, ordering, capacities)
    front: list[int] = []
    experts: list[int] = []
    expert = OperatorKind.EXPERT
    for i, kind in enumerate(map(attrgetter("kind"), operators)):
        (experts if kind is expert else front).append(i)
    experts.sort(key=weight.__getitem__)
    return front + _blockwise(experts, list(map(attrgetter("group"), operators)), weight)


def needs_reorder(
    old: Sequence[float], new: Sequence[float], *, change: float = 0.10, share: float = 0.25
) -> bool:
    """Whether the activation frequency of enough experts changed enough (paper 3.5).

    Frequencies are shares of the total, so counters may have gone on or begun anew. True if at least
    ``share`` of the experts changed by more than ``change`` of their old frequency.
    """
    if len(old) != len(new):
        raise ValueError(f"popularity of {len(old)} experts before and {len(new)} now")
    total_old, total_new = math.fsum(old), math.fsum(new)
    if not old or total_old <= 0 or total_new <= 0:
        return False
    changed = sum(
        abs(after / total_new - before / total_old) > change * before / total_old
        for before, after in zip(old, new, strict=True)
    )
    return changed >= share * len(old)


def _blockwise(experts: list[int], group_of: Sequence[str | None], weight: Sequence[float]) -> list[int]:
    """``experts`` (sorted by weight), the members of each group brought together."""
    if set(group_of) <= {None}:
        return experts
    groups: dict[str, list[int]] = {}
    blocks: list[list[int]] = []
    for i in experts:
        group = group_of[i]
        if group is None:
            blocks.append([i])
        elif group in groups:
            groups[group].append(i)
        else:
            groups[group] = [i]
    blocks.extend(groups.values())
    mean = [sum(map(weight.__getitem__, block)) / len(block) for block in blocks]
    first = list(map(min, blocks))
    places = sorted(range(len(blocks)), key=lambda at: (mean[at], first[at]))
    return list(itertools.chain.from_iterable(blocks[at] for at in places))


def _weights(
    count: int,
    popularity: Mapping[int, float] | Sequence[float],
    ordering: Ordering,
    capacities: Sequence[float] | None,
) -> list[float]:
    if isinstance(popularity, Mapping):
        weight = [popularity.get(i, 0.0) for i in range(count)]
    else:
        weight = list(popularity)
    if len(weight) != count:
        raise ValueError(f"popularity of {len(weight)} operators, there are {count}")
    if ordering is Ordering.CAPACITY:
        if capacities is None or len(capacities) != count or min(capacities, default=1) <= 0:
            raise ValueError("ordering by capacity needs a positive capacity for every operator")
        weight = [used / limit for used, limit in zip(weight, capacities, strict=True)]
    if any(map(math.isnan, weight)):
        raise ValueError("the popularity of an operator is NaN")
    return weight
