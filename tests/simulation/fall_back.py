"""A job that goes back, over and over, before its new history has a floor.

Three machines with two replicas of each rank, links that become slow when the trainers die, chains
that break, and memory for no more slots: what the job went back to is older than the newest
complete suffix of most rings, and newer than the floor.
"""

from __future__ import annotations

import dataclasses

from tests.simulation.model import Node, Trainer, WorldConfig
from tests.simulation.replication_world import World

__all__ = ["FallsBack", "play_fall_back"]

_CHAOS_S = 45.0
_FIRST_S = 8.0  # by then there is a floor
_SLOW_S = (1.0, 2.0, 3.0)


class FallsBack(World):
    """One seed."""

    breaks = 0.15

    def __init__(self, seed: int, config: WorldConfig | None = None) -> None:
        told = config or WorldConfig()
        super().__init__(seed, dataclasses.replace(told, chaos_s=_CHAOS_S))
        self.growth_refused = 1.0
        for node in self.nodes.values():
            node.capacity = None

    def _make_nodes(self) -> None:
        self.alone, self.replicas = False, 2
        for name in ("n0", "n1", "n2"):
            self.nodes[name] = Node(name, {}, delay_s=0.1)

    def _make_ranks(self) -> None:
        self.homes = dict(enumerate(self.nodes))
        windows = [self.rng.randint(3, 4) for _ in self.homes]
        self.span = max(windows)
        self.trainers = {rank: Trainer(window, 0) for rank, window in enumerate(windows)}

    def fault(self) -> None:
        """The trainers die, and the network is slow for as long as the job goes on."""
        if self.now_s < _FIRST_S:
            self.later(_FIRST_S, self.fault)
            return
        for node in self.nodes.values():
            node.delay_s = self.rng.choice(_SLOW_S)
        self.stop_job("a trainer died")
        self.later(self.rng.uniform(6.0, 14.0), self.fault)


def play_fall_back(seed: int, config: WorldConfig | None = None) -> FallsBack:
    """The world of this seed, played to its end; a broken promise carries the seed and the trace."""
    world = FallsBack(seed, config)
    try:
        world.play()
    except Exception as error:
        error.add_note("\n".join(world.trace[-40:]))
        error.add_note(f"seed {seed}, time {world.now_s:.3f}, {dict(world.seen)}")
        raise
    return world
