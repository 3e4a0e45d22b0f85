"""Four ways to train through a trace; the numbers are those of `bench.spot.model`.

- **ours**: elastic placement; an expert that lost every replica comes from a snapshot that another
  node keeps, and only if that is lost, too, from storage;
- **Lazarus alone**: the same placement without snapshots: when an expert lost every replica, the
  job starts again from its last checkpoint;
- **fixed, checkpoints**: expert parallelism in groups of one size (as DeepSpeed's): the loss of a
  node that trains starts the job again from its last checkpoint;
- **fixed, reconfigured**: the same groups, but while some live node is left for each place in a
  group, those that train go on, rearranged.

What they have in common: whoever starts again uses all nodes there are; nodes that come are used
after a while (`Gather`), which costs no completed iteration; what a pause was to bring about is in
place when it is over, and not before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from bench.spot.model import Job, fixed_straggler, placed
from bench.spot.simulation import Halt, Mode, Switch, View
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement
from ckptd.core.elastic.expert_transfers import plan_transfers
from ckptd.core.elastic.mapping import held_now, map_nodes

__all__ = ["Elastic", "Fixed", "Gather"]


class Gather:
    """When nodes that came are used: ``gather_s`` after the last one, at most ``most_s`` after the
    first, as `ckptd.core.elastic.rebalance_policy` has it.
    """

    def __init__(self, gather_s: float, most_s: float) -> None:
        self._gather_s, self._most_s = gather_s, most_s
        self._first_s = self._last_s = -math.inf

    def came(self, now_s: float) -> None:
        """A node came."""
        if self.due_s == math.inf:
            self._first_s = now_s
        self._last_s = now_s

    def used(self) -> None:
        """None is waited for any more."""
        self._first_s = self._last_s = -math.inf

    @property
    def due_s(self) -> float:
        """When they are used; infinite: none came."""
        if self._last_s == -math.inf:
            return math.inf
        return min(self._last_s + self._gather_s, self._first_s + self._most_s)


class _Base:
    """What all have in common.

    Args:
        every: iterations between checkpoints.
        blocking: whether training waits while one is written.
        overhead: of every iteration, as a part of it.
    """

    def __init__(self, job: Job, *, every: int, blocking: bool, overhead: float) -> None:
        self.job = job
        self.every, self.blocking, self.overhead = every, blocking, overhead
        self.gather = Gather(job.gather_s, job.gather_most_s)
        self.nodes: tuple[int, ...] = ()  # that train, or are about to
        self.durable = 0
        self.rollbacks = 0
        self._iteration_s = math.inf
        self._ready_s = 0.0

    # --- for the simulation ----------------------------------------------------------------------------------

    def react(self, view: View) -> Switch | Halt | None:
        if view.came:
            self.gather.came(view.now_s)
        if view.mode is Mode.TRAIN:
            self._note_durable(view.completed)
        self._ready_s = view.ready_s
        if self.nodes and not view.lost & set(self.nodes):
            due = self.gather.due_s <= view.now_s and view.mode is Mode.TRAIN
            if not due:
                return None
            if not self.gains(view.alive):
                self.gather.used()
                return None
        answer = self.rebuild(view)
        if isinstance(answer, Switch):
            self._iteration_s = answer.iteration_s
        else:
            self.nodes = ()
        return answer

    def settled(self, now_s: float) -> None:
        """Nothing is left to do."""

    def wake_s(self) -> float:
        return max(self.gather.due_s, self._ready_s) if self.nodes else math.inf

    # --- for each strategy -----------------------------------------------------------------------------------

    def gains(self, alive: frozenset[int]) -> bool:
        """Whether more of these nodes could train than do."""
        raise NotImplementedError

    def rebuild(self, view: View) -> Switch | Halt:
        """Go on with the nodes that there are."""
        raise NotImplementedError

    # --- helpers ---------------------------------------------------------------------------------------------

    def every_iteration_s(self, nodes: int, straggler: float) -> float:
        """With snapshots and checkpoints."""
        own = self.job.iteration_s(nodes, straggler) * (1 + self.overhead)
        return own + (self.job.save_s / self.every if self.blocking else 0.0)

    def start_again(self, view: View, nodes: int, slots: int) -> tuple[float, int]:
        """Seconds, and the iteration, of a start from storage."""
        job = self.job
        detect_s = job.detect_s if view.lost else 0.0
        return detect_s + job.process_s + job.groups_s + job.load_s(nodes, slots), self.durable

    def _note_durable(self, completed: int) -> None:
        late = 0 if self.blocking else math.ceil(self.job.save_s / self._iteration_s)
        whole = (completed - late) // self.every * self.every
        self.durable = min(max(self.durable, whole), max(completed, 0))


class Elastic(_Base):
    """Replicas by load on any number of nodes: ours, with the snapshot tier, or Lazarus alone, without it."""

    def __init__(self, job: Job, *, snapshots: bool) -> None:
        overhead = job.snapshot_overhead if snapshots else 0.0
        every = 50 if snapshots else 250
        super().__init__(job, every=every, blocking=not snapshots, overhead=overhead)
        self.snapshots = snapshots
        self.from_snapshots = 0
        self._held_nodes: tuple[int, ...] = ()
        self._held: ExpertPlacement | None = None
        self._next: ExpertPlacement | None = None

    def gains(self, alive: frozenset[int]) -> bool:
        return len(alive) > len(self.nodes)

    def settled(self, now_s: float) -> None:
        self._held_nodes, self._held = self.nodes, self._next

    def rebuild(self, view: View) -> Switch | Halt:
        job, nodes = self.job, tuple(sorted(view.alive))
        if len(nodes) * job.slots < job.experts:
            return Halt(f"{len(nodes)} nodes hold {len(nodes) * job.slots} of {job.experts} experts")
        self.gather.used()
        plan, straggler = placed(job, len(nodes))
        iteration_s = self.every_iteration_s(len(nodes), straggler)
        source = self._source(view.alive)
        if source == "storage" or self._held is None:
            pause_s, resume = self.start_again(view, len(nodes), job.slots)
            self._next, why = plan, "from storage" if self._held else "started"
            self.rollbacks += self._held is not None
        else:
            moved_s = self._move(plan, nodes)
            process_s = job.process_s if self.snapshots else 0.0
            detect_s = job.detect_s if view.lost else 0.0
            pause_s = detect_s + process_s + job.groups_s + job.plan_s + moved_s
            resume, why = view.completed, "placed anew"
            if source == "snapshots":
                self.from_snapshots += 1
                resume = max(0, resume - 1)
                pause_s += (job.window - 1) * job.replay_cost * iteration_s
                why = "from snapshots"
        self.nodes = nodes
        return Switch(pause_s, resume, len(nodes), iteration_s, why)

    def _source(self, alive: frozenset[int]) -> str:
        """Where experts come from: "replicas", "snapshots" or "storage"."""
        if self._held is None:
            return "storage"
        there = np.array([node in alive for node in self._held_nodes])
        holds_LNE = self._held.counts > 0
        if holds_LNE[:, there].any(axis=1).all():
            return "replicas"
        if not self.snapshots:
            return "storage"
        return "snapshots" if (holds_LNE | self._copies(holds_LNE))[:, there].any(axis=1).all() else "storage"

    @staticmethod
    def _copies(holds_LNE: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whose snapshots a node keeps: each expert is captured by its first holder, whose ring one
        node has a copy of.

        That node is half-way round in the order of the plan: experts overlap among neighbours.
        """
        captured = holds_LNE & (np.cumsum(holds_LNE, axis=1) == 1)
        return np.asarray(np.roll(captured, holds_LNE.shape[1] // 2, axis=1))

    def _move(self, plan: ExpertPlacement, nodes: tuple[int, ...]) -> float:
        """Seconds until all have what they are to hold."""
        assert self._held is not None
        was = [self._held_nodes.index(n) if n in self._held_nodes else -1 for n in nodes]
        cluster = Cluster.uniform(len(nodes), self.job.slots)
        sizes = np.full((self.job.layers, self.job.experts), int(self.job.expert_bytes))
        held = held_now(self._held, was)
        self._next = map_nodes(plan, held, cluster, sizes).apply(plan)
        speeds = [int(self.job.node_bytes_per_s)] * len(nodes)
        return plan_transfers(self._next, held, cluster, sizes, bytes_per_s=speeds).predicted_s


class Fixed(_Base):
    """Groups of ``group`` nodes that share the experts evenly; nodes that fill no group are idle.

    Args:
        reconfigures: whether those that train go on without the lost ones while each place in a group has a live node.
    """

    def __init__(self, job: Job, *, group: int, reconfigures: bool) -> None:
        if job.experts % group or job.experts // group > job.slots:
            raise ValueError(f"groups of {group} nodes do not share {job.experts} experts evenly")
        every = 250 if reconfigures else 50
        super().__init__(job, every=every, blocking=True, overhead=0.0)
        self.group, self.reconfigures = group, reconfigures
        self.each = job.experts // group  # experts of a node in each layer
        self._straggler = fixed_straggler(job.loads_LE, group)
        self._places: dict[int, int] = {}  # of nodes that hold something
        self._next: dict[int, int] = {}

    def gains(self, alive: frozenset[int]) -> bool:
        return len(alive) // self.group > len(self.nodes) // self.group

    def settled(self, now_s: float) -> None:
        self._places = dict(self._next)

    def rebuild(self, view: View) -> Switch | Halt:
        job = self.job
        live = {node: place for node, place in self._places.items() if node in view.alive}
        whole = set(live.values()) == set(range(self.group))
        begun = bool(self.nodes) or bool(self._places)
        # After a loss only those that train go on; when nodes have come, everybody.
        some = live if self.reconfigures and whole and view.lost else view.alive
        number = len(some) // self.group * self.group
        if not number:
            some, number = view.alive, len(view.alive) // self.group * self.group
        if not number:
            return Halt(f"{len(view.alive)} nodes are no group of {self.group}")
        self.gather.used()
        self._next = self._assigned(live, some, number)
        changed = any(self._places.get(node) != place for node, place in self._next.items())
        resume = view.completed
        if not begun:
            pause_s, resume = self.start_again(view, number, self.each)
            why = "started"
        elif whole and self.reconfigures:
            moved_s = job.layers * self.each * job.expert_bytes / job.node_bytes_per_s
            detect_s = job.detect_s if view.lost else 0.0
            pause_s = detect_s + job.groups_s + job.plan_s + (moved_s if changed else 0.0)
            why = "reconfigured"
        elif view.lost or view.mode is not Mode.TRAIN:
            pause_s, resume = self.start_again(view, number, self.each)
            self.rollbacks, why = self.rollbacks + 1, "from storage"
        else:  # planned: it saves first
            pause_s, _ = self.start_again(view, number, self.each)
            pause_s += job.save_s
            self.durable = resume
            why = "restarted for more nodes"
        self.nodes = tuple(self._next)
        return Switch(pause_s, resume, number, self.every_iteration_s(number, self._straggler), why)

    def _assigned(self, live: dict[int, int], some: Iterable[int], number: int) -> dict[int, int]:
        """A place for each of ``number`` nodes: as many as can keep theirs."""
        wanted = number // self.group
        kept: dict[int, int] = {}
        left = []
        for node in sorted(some):
            place = live.get(node, -1)
            if place >= 0 and list(kept.values()).count(place) < wanted:
                kept[node] = place
            else:
                left.append(node)
        lacking = [
            place for place in range(self.group) for _ in range(wanted - list(kept.values()).count(place))
        ]
        return kept | dict(zip(left, lacking, strict=False))
