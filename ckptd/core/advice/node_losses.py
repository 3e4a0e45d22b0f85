"""Losses of several nodes at once: which of them replicas survive, and how often the others come. Pure.

With r replicas a state has r + 1 copies, on as many nodes. A loss of up to r nodes leaves one of them. A loss
of k > r nodes takes a state with all of its copies where it hits such a set of nodes. Nodes without labels
stand on a ring in the order of a hash, and each is followed by those that hold its replicas
(`ckptd.core.placement`). So whatever k nodes have in common, they are any k of the N places of that ring, and
no state is lost if no r + 1 of them follow each other. The survivors cut the ring into N - k runs of lost
nodes, each of at most r: of C(N, k) losses,

    N / (N - k) * [x^k] (1 + x + ... + x^r)^(N - k)

take no state. A loss that takes nodes of one labelled domain only, such as a rack, takes no state while there
are r + 1 domains.

Losses that take no state count among the failures of a job, others among its losses
(`ckptd.core.advice.outlook`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ckptd.core.advice.outlook import Conditions

REPLICAS_MAX = 16
"""As the daemon's setting allows."""


@lru_cache(maxsize=1024)
def chance_of_loss(nodes: int, lost: int, replicas: int) -> float:
    """The probability that the loss of ``lost`` of a job's nodes takes a state with all of its copies.

    Example:
        >>> chance_of_loss(4, 2, 1)  # 4 of 6 pairs are neighbours on the ring
        0.6666666666666666
    """
    left = nodes - lost
    if lost <= replicas:
        return 0.0
    if not left:
        return 1.0
    # The coefficient of x^lost in ((1 - x^(r + 1)) / (1 - x))^left.
    runs = sum(
        (-1 if n % 2 else 1) * math.comb(left, n) * math.comb(lost - n * (replicas + 1) + left - 1, left - 1)
        for n in range(min(left, lost // (replicas + 1)) + 1)
    )
    survived = nodes * runs // left
    every = math.comb(nodes, lost)
    return (every - survived) / every


@dataclass(frozen=True, slots=True)
class NodeLosses:
    """The losses of a job that take several nodes at once, and the numbers of replicas to choose from.

    Args:
        nodes: of the job.
        together: how many are lost at once, and the seconds between two such losses. They come beside other
            failures.
        storage_Bps: as of `Conditions`; needed where a number of replicas does not survive all of them.
        replicas: to choose from; (): all that differ in what they survive.

    Raises:
        ValueError: a loss takes no node, or more than there are; a time, or a number of replicas, cannot be.
    """

    nodes: int
    together: tuple[tuple[int, float], ...]
    storage_Bps: float = 0.0
    replicas: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for lost, mtbf_s in self.together:
            if not 1 <= lost <= self.nodes:
                raise ValueError(f"a loss of {lost} nodes at once, of {self.nodes} nodes of the job")
            if not (mtbf_s > 0 and math.isfinite(mtbf_s)):
                raise ValueError(f"{mtbf_s:g} s between losses of {lost} nodes; it must be above 0")
        if any(not 1 <= each < self.nodes for each in self.replicas):
            raise ValueError(
                f"{max(self.replicas)} replicas on other nodes, of {self.nodes} nodes: pass at least 1, and "
                "fewer than there are nodes"
            )

    @property
    def candidates(self) -> Sequence[int]:
        """The numbers of replicas to choose from; ascending."""
        if self.replicas:
            return self.replicas
        most = max((lost for lost, _ in self.together), default=1)
        return range(1, max(1, min(most, self.nodes - 1, REPLICAS_MAX)) + 1)

    def conditions(self, base: Conditions) -> Conditions:
        """The same conditions with these losses; those that the replicas survive are failures.

        Raises:
            ValueError: some are not survived, and the rate of storage is not known.
        """
        chances = [chance_of_loss(self.nodes, lost, base.replicas) for lost, _ in self.together]
        every = [mtbf_s for _, mtbf_s in self.together]
        failures = 1 / base.mtbf_s + sum((1 - p) / s for p, s in zip(chances, every, strict=True))
        losses = 1 / base.loss_mtbf_s + sum(p / s for p, s in zip(chances, every, strict=True))
        return replace(
            base,
            mtbf_s=1 / failures,
            loss_mtbf_s=1 / losses if losses else math.inf,
            storage_Bps=(base.storage_Bps or self.storage_Bps) if losses else 0.0,
        )
