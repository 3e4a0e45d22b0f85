"""Which rank captures what several ranks have alike: each operator once, bytes spread evenly.

Every member of a replicate group computes the answer by itself, so it follows from nothing but what
all members know: the names, sizes and phases of the operators that the group shares, and what each
member captures beside them. A snapshot of a rank takes, in phase p, the compute weights of all that
it captures and the rest of the anchors of what p anchors; operators are given away from the largest
to the smallest, each to the member whose snapshot of that phase is the smallest so far.

Source: MoC-System (ASPLOS '25), section 4: fully sharded checkpointing, "equal" where every member
starts from nothing, and "adaptive" where members that capture more of their own (experts that they
alone have) are given less. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["SharedOperator", "spread"]


@dataclass(frozen=True, slots=True)
class SharedOperator:
    """An operator that all members of a group have: what it takes anchored and not (bytes), and
    when it is anchored.
    """

    name: str
    anchor_bytes: int
    compute_bytes: int
    phase: int = 0


def spread(
    operators: Sequence[SharedOperator], members: Sequence[int], own_bytes: Mapping[int, int]
) -> list[int]:
    """The member that captures each operator.

    Args:
        operators: of one group; their names are distinct.
        members: the group's ranks.
        own_bytes: what each member's snapshots take beside this group's operators; 0 where not given.
    """
    ranks = sorted(members)
    # What a member's snapshots take in every phase, and what a phase adds to that.
    always = {rank: own_bytes.get(rank, 0) for rank in ranks}
    extra: dict[tuple[int, int], int] = {}
    found = [ranks[0]] * len(operators)
    order = sorted(range(len(operators)), key=lambda i: (-operators[i].anchor_bytes, operators[i].name))
    for index in order:
        operator = operators[index]
        phase = operator.phase
        chosen = min(ranks, key=lambda r: (always[r] + extra.get((r, phase), 0), r))
        found[index] = chosen
        always[chosen] += operator.compute_bytes
        extra[chosen, phase] = extra.get((chosen, phase), 0) + operator.anchor_bytes - operator.compute_bytes
    return found
