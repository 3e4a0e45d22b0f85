"""Two machines, one replica of each rank on the other: the loss of either must leave a plan, at every event.

The promise of DESIGN 5, invariant 2, asked in the strictest way: after every event of the world,
for each machine, were it lost now with everything in it, would all ranks find a common start at the
floor or later? Each row is one kind of trouble that lasts longer than rings have slots for:

    slow   replication takes several iterations per snapshot
    away   one daemon is down for longer than its deadline, and comes back
    cut    the daemons do not hear one another, and then they do
    fast   nothing, and no chain breaks: no snapshot may be left out

Trainers go on all the while; chains break here and there, and memory for more slots may be refused.
"""

from __future__ import annotations

import dataclasses

from ckptd.core.recovery.global_plan import RecoveryPlan, plan_recovery
from tests.simulation.model import DEADLINE_S, Node, Trainer, WorldConfig
from tests.simulation.replication_world import World

__all__ = ["ROWS", "SingleLosses", "play_row"]

ROWS = ("slow", "away", "cut", "fast")
_CHAOS_S = 55.0
_FIRST_S = 6.0  # by then there is a floor


class SingleLosses(World):
    """One seed of one row."""

    def __init__(self, seed: int, row: str, config: WorldConfig | None = None) -> None:
        self.row = row
        told = config or WorldConfig()
        super().__init__(seed, dataclasses.replace(told, chaos_s=_CHAOS_S))
        for node in self.nodes.values():
            node.capacity = None

    def _make_nodes(self) -> None:
        self.alone, self.replicas = False, 1
        for name in ("n0", "n1"):
            self.nodes[name] = Node(name, {})
        if self.row == "fast":
            self.calm = True

    def _make_ranks(self) -> None:
        self.homes = {}
        for name in self.nodes:
            for _ in range(self.rng.randint(1, 2)):
                self.homes[len(self.homes)] = name
        longest = self.rng.randint(2, 4)
        alike = self.rng.random() < 0.7
        windows = [longest if alike else self.rng.randint(1, longest) for _ in self.homes]
        self.span = max(windows)
        self.trainers = {rank: Trainer(window, 0) for rank, window in enumerate(windows)}

    def fault(self) -> None:
        """Of its row, once; again and again with pauses where there is time."""
        if self.now_s < _FIRST_S:
            self.later(_FIRST_S, self.fault)
            return
        name = self.rng.choice(sorted(self.nodes))
        lasts_s = self.rng.uniform(2.0 * DEADLINE_S, 5.0 * DEADLINE_S)
        if self.row == "slow":
            for node in self.nodes.values():
                node.delay_s = self.rng.choice((0.7, 1.0, 1.5))
        elif self.row == "away":
            self.away(name, lasts_s)
        elif self.row == "cut":
            self.cut_off(name, lasts_s, False)
        if self.row != "fast":
            self.later(lasts_s + self.rng.uniform(0.5, 8.0), self.fault)

    def away(self, name: str, seconds: float) -> None:
        """Its daemon dies and stays away."""
        self.tell(f"{name}: daemon is down for {seconds:.1f} s")
        self._end_daemon(self.nodes[name])
        for segment in self.nodes[name].segments.values():
            for slot in segment.slots:
                slot.readers = 0
        self.later(seconds, lambda: self.start_daemon(name))
        self.links_changed()

    def watch(self) -> None:
        changed = self.changed
        super().watch()
        if changed and self.running and self.highest >= 0:
            for name in self.nodes:
                self._lose(name)

    def _lose(self, name: str) -> None:
        held, begun, _ = self.told([name])
        plan = plan_recovery(held, len(self.homes), epochs=begun)
        self.seen["losses asked"] += 1
        assert isinstance(plan, RecoveryPlan), f"without {name} everything is lost: {plan.reason}"
        assert plan.end >= self.highest, f"without {name} floor {self.highest} is lost: {plan.reason}"


def play_row(seed: int, row: str, config: WorldConfig | None = None) -> SingleLosses:
    """The world of this seed and row, played to its end; a broken promise carries both and the trace."""
    world = SingleLosses(seed, row, config)
    try:
        world.play()
    except Exception as error:
        error.add_note("\n".join(world.trace[-40:]))
        error.add_note(f"row {row}, seed {seed}, time {world.now_s:.3f}, {dict(world.seen)}")
        raise
    return world
