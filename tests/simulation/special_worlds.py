"""Worlds in which one kind of trouble is common: lost machines, ranks without a target, falls back."""

from __future__ import annotations

import dataclasses

from ckptd.core.recovery.global_plan import RecoveryPlan
from tests.simulation.model import DEADLINE_S, Node, Trainer, WorldConfig
from tests.simulation.replication_world import World, played

__all__ = [
    "LOSSES",
    "FallsBack",
    "Losses",
    "OwnCopies",
    "Splits",
    "play_fall_back",
    "play_own_copies",
    "play_row",
    "play_split",
]


LOSSES = (("slow", 1), ("away", 1), ("cut", 1), ("fast", 1), ("slow", 2), ("fast", 2))
"""Rows and replicas. A machine that was away has no copy of what two others agreed on meanwhile."""
_CHAOS_S = 55.0
_FIRST_S = 6.0  # by then there is a floor


class Losses(World):
    """Each rank has a copy on every machine: if any one of them is left, there is a plan.

    Two machines with one replica of each rank, or three with two. The promise of DESIGN 5, invariant 2, asked
    in the strictest way: after every event of the world, for each machine, were all others lost now with
    everything in them, would all ranks find a common start at the floor or later? Each row is one kind of trouble that lasts longer than rings have slots for:

        slow   replication takes several iterations per snapshot
        away   one daemon is down for longer than its deadline, and comes back
        cut    the daemons do not hear one another, and then they do
        fast   nothing, and no chain breaks: no snapshot may be left out

    Trainers go on all the while; chains break here and there, and memory for more slots may be refused.
    """

    def __init__(self, seed: int, row: str, config: WorldConfig | None = None, *, replicas: int = 1) -> None:
        self.row, self.num_replicas = row, replicas
        told = config or WorldConfig()
        super().__init__(seed, dataclasses.replace(told, chaos_s=_CHAOS_S))
        for node in self.nodes.values():
            node.capacity = None

    def _make_nodes(self) -> None:
        self.alone, self.replicas = False, self.num_replicas
        for number in range(self.num_replicas + 1):
            self.nodes[f"n{number}"] = Node(f"n{number}", {})
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
                self._leave(name)

    def _leave(self, name: str) -> None:
        plan, _ = self.plan_without(self.nodes.keys() - {name})
        self.seen["losses asked"] += 1
        assert isinstance(plan, RecoveryPlan), f"with {name} alone everything is lost: {plan.reason}"
        assert plan.end >= self.highest, f"with {name} alone floor {self.highest} is lost: {plan.reason}"


def play_row(seed: int, row: str, config: WorldConfig | None = None, *, replicas: int = 1) -> Losses:
    """The world of this seed and row, played to its end."""
    return played(
        Losses(seed, row, config, replicas=replicas), f"row {row}, {replicas} replicas, seed {seed}"
    )


_OWN_CHAOS_S = 12.0
_DELAYS_S = (0.1, 2.0)
_REFUSED = 0.4  # so that rings are crowded


class OwnCopies(World):
    """Ranks without a target: each vouches by its own ring, over links that are slow and unequal.

    Here a ring gives away what its daemon has just vouched for, and a node counts suffixes before it has
    heard of the span, in one seed of ten or twenty; in `tests.simulation.replication_world` in one of several
    hundred. The promise and its checks are the same.
    """

    def __init__(self, seed: int, config: WorldConfig | None = None) -> None:
        told = config or WorldConfig()
        super().__init__(seed, dataclasses.replace(told, chaos_s=_OWN_CHAOS_S))
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
    return played(OwnCopies(seed, config), f"seed {seed}")


_FALL_BACK_CHAOS_S = 45.0
_FIRST_FAULT_S = 8.0  # by then there is a floor
_QUICK_DELAYS_S = (0.1, 0.3)  # so that a snapshot is suspected before the trainers die again


class FallsBack(World):
    """A job that goes back, over and over, before its new history has a floor.

    Three machines with two replicas of each rank, transfers that are damaged once the trainers have died, chains
    that break, and memory for no more slots: what the job went back to is older than the newest complete suffix
    of most rings, newer than the floor, and no aim any more of a rank of which a target does not take it.
    """

    breaks = 0.15

    def __init__(self, seed: int, config: WorldConfig | None = None) -> None:
        told = config or WorldConfig()
        super().__init__(seed, dataclasses.replace(told, chaos_s=_FALL_BACK_CHAOS_S))
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
        """The trainers die, and the network damages what it carries for as long as the job goes on."""
        if self.now_s < _FIRST_FAULT_S:
            self.later(_FIRST_FAULT_S, self.fault)
            return
        for node in self.nodes.values():
            node.corrupts, node.delay_s = True, self.rng.choice(_QUICK_DELAYS_S)
        self.stop_job("a trainer died")
        self.later(self.rng.uniform(9.0, 16.0), self.fault)


def play_fall_back(seed: int, config: WorldConfig | None = None) -> FallsBack:
    """The world of this seed, played to its end."""
    return played(FallsBack(seed, config), f"seed {seed}")


_SPLIT_CHAOS_S = 40.0
_FOR_GOOD_S = 100.0  # longer than the world lasts


class Splits(World):
    """A job that goes on twice from one past, by machines that do not know of one another's epoch.

    One machine is cut off, and the others begin an epoch without it. Then one of these is lost and the other
    one cut off, and the first goes on from what it has. When the last one is back, there are two histories.
    """

    breaks = 0.0

    def __init__(self, seed: int, config: WorldConfig | None = None) -> None:
        told = config or WorldConfig()
        super().__init__(seed, dataclasses.replace(told, chaos_s=_SPLIT_CHAOS_S))
        for node in self.nodes.values():
            node.capacity = None

    def _make_nodes(self) -> None:
        self.alone, self.replicas = False, 2
        for name in ("n0", "n1", "n2"):
            self.nodes[name] = Node(name, {})

    def _make_ranks(self) -> None:
        self.homes = {0: "n0", 1: "n1"}
        windows = [self.rng.randint(1, 3) for _ in self.homes]
        self.span = max(windows)
        self.trainers = {rank: Trainer(window, 0) for rank, window in enumerate(windows)}

    def play(self) -> None:
        at_s = self.rng.uniform(6.0, 9.0)
        self.later(at_s, lambda: self.cut_off("n2", _FOR_GOOD_S, False))
        at_s += self.rng.uniform(0.5, 6.0)
        self.later(at_s, lambda: self.stop_job("a trainer died"))
        at_s += self.rng.uniform(4.0, 10.0)
        self.later(at_s, self.change_sides)
        self.later(at_s + self.rng.uniform(8.0, 14.0), self.meet)
        self.run_until(self.config.chaos_s)
        self.settle()

    def change_sides(self) -> None:
        """Those who know the newest epoch are lost or away, and who does not is back."""
        self.heal("n2")
        self.cut_off("n1", _FOR_GOOD_S, True)
        self.destroy("n0")

    def meet(self) -> None:
        """The other history is back, and the job starts once more."""
        self.heal("n1")
        self.stop_job("a trainer died")


def play_split(seed: int, config: WorldConfig | None = None) -> Splits:
    """The world of this seed, played to its end."""
    return played(Splits(seed, config), f"split seed {seed}")
