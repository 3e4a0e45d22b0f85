"""Ranks without a target: each vouches by its own ring, over links that are slow and unlike.

Here a ring gives away what its daemon has just vouched for, and a node counts suffixes before it
has heard of the span, in one seed of ten or twenty; in `tests.simulation.replication_world` in one
of several hundred. The promise is the same, asserted by the same checks.
"""

from __future__ import annotations

import dataclasses

from tests.simulation.model import Node, Trainer, WorldConfig
from tests.simulation.replication_world import World

__all__ = ["OwnCopies", "play_own_copies"]

_CHAOS_S = 12.0
_DELAYS_S = (0.1, 2.0)
_REFUSED = 0.4  # so that rings are crowded


class OwnCopies(World):
    """One seed."""

    def __init__(self, seed: int, config: WorldConfig | None = None) -> None:
        told = config or WorldConfig()
        super().__init__(seed, dataclasses.replace(told, chaos_s=_CHAOS_S))
        self.growth_refused = _REFUSED

    def _make_nodes(self) -> None:
        self.alone, self.replicas = False, 0
        for number in range(self.rng.randint(2, 5)):
            name = f"n{number}"
            self.nodes[name] = Node(name, {}, delay_s=self.rng.choice(_DELAYS_S))

    def _make_ranks(self) -> None:
        self.homes = {}
        for name in self.nodes:
            for _ in range(self.rng.randint(1, 2)):
                self.homes[len(self.homes)] = name
        windows = [self.rng.randint(1, 2) for _ in self.homes]
        self.span = max(windows)
        self.trainers = {rank: Trainer(window, 0) for rank, window in enumerate(windows)}

    def fault(self) -> None:
        """Links become slower, or quicker, again and again."""
        for node in self.nodes.values():
            node.delay_s = self.rng.choice(_DELAYS_S)
        self.later(self.rng.uniform(0.5, 3.0), self.fault)


def play_own_copies(seed: int, config: WorldConfig | None = None) -> OwnCopies:
    """The world of this seed, played to its end."""
    world = OwnCopies(seed, config)
    world.play()
    return world
