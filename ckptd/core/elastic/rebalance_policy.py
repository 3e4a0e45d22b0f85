"""The policy for placing experts anew: when nodes came or went, or the load has changed enough
(docs/elastic.md, section 8).

A state machine: events in, one decision out, with its reason; no clock (times are arguments) and no
planner. Ranks that handle the same events with the same times decide the same; without a common
clock one rank sends its time. New nodes are waited for, so that a burst of arrivals costs one
interruption (Lazarus §6.4 waits two minutes); meanwhile the load decides nothing, as the placement
changes soon anyway. With too few slots the fault threshold is lowered step by step.

States and events; any other pair is a bug of the caller and raises `LocalProtocolError`:

=============  =========================  ==================  =====================
state          NodesSeen                  StepDone            Placed
=============  =========================  ==================  =====================
STEADY         KEEP, WAIT, PLACE, REFUSE  KEEP, PLACE         -
GATHERING      KEEP, WAIT, PLACE, REFUSE  WAIT, PLACE         -
PLACING        WAIT, PLACE, REFUSE        -                   KEEP, WAIT, PLACE
HALTED         PLACE, REFUSE              -                   -
=============  =========================  ==================  =====================

After PLACE the state is PLACING until `Placed`; after REFUSE it is HALTED; after WAIT it is
GATHERING, or still PLACING.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from ckptd.core.elastic.allocation import reachable_threshold
from ckptd.core.elastic.elastic_types import Cluster
from ckptd.errors import LocalProtocolError


class Action(StrEnum):
    """The answer to an event."""

    KEEP = "keep"
    WAIT = "wait"
    PLACE = "place"
    REFUSE = "refuse"


class _State(StrEnum):
    STEADY = "steady"
    GATHERING = "gathering"
    PLACING = "placing"
    HALTED = "halted"


@dataclass(frozen=True, slots=True)
class TimesConfig:
    """The thresholds of `PlacementTimes`."""

    threshold: int = 2
    """Minimum number of distinct nodes of every expert."""
    every_steps: int = 0
    """Place anew after so many steps even if it hardly pays; 0: only when it pays."""
    check_steps: int = 50
    """Steps between two looks at the load."""
    horizon_steps: int = 1000
    """Steps for which the load is expected to stay as it is."""
    margin: float = 0.5
    """The part of the cost by which the gain must exceed it: forecasts are inexact."""
    gather_s: float = 120.0
    """Time without a new node before the new ones are used."""
    gather_most_s: float = 600.0
    """Longest wait of the first new node."""

    def __post_init__(self) -> None:
        if self.threshold < 1 or self.check_steps < 1 or self.horizon_steps < 1:
            raise ValueError(
                f"threshold={self.threshold}, check_steps={self.check_steps}, "
                f"horizon_steps={self.horizon_steps}: each must be at least 1"
            )
        if self.every_steps < 0:
            raise ValueError(f"every_steps={self.every_steps}; 0 turns it off")
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"margin={self.margin}; it is a part of the cost, such as 0.5")
        if not 0 <= self.gather_s <= self.gather_most_s < math.inf:
            raise ValueError(
                f"gather_s={self.gather_s}, gather_most_s={self.gather_most_s}: the second is the limit of "
                "the first"
            )


@dataclass(frozen=True, slots=True)
class Forecast:
    """The effect of a new placement for the measured load.

    Args:
        expert_s: the part of a step's time that grows with the tokens of the busiest rank.
        straggler_now, straggler_after: the busiest rank over the mean, without and with it.
        remaining_steps: until the end of training.
        move_s: the cost: transfers, and the time for which training stops.
    Raises:
        ValueError: a number below zero, infinite or NaN.
    """

    expert_s: float
    straggler_now: float
    straggler_after: float
    remaining_steps: int
    move_s: float

    def __post_init__(self) -> None:
        numbers = (self.expert_s, self.straggler_now, self.straggler_after, self.move_s)
        if not all(math.isfinite(n) and n >= 0 for n in (*numbers, self.remaining_steps)):
            raise ValueError(f"{self}: each is a number of 0 or more")
        if not self.straggler_now:
            raise ValueError(f"{self}: a straggler factor is 1 where all is even, and never 0")

    def gain_s(self, horizon_steps: int) -> float:
        """The time saved within the horizon; negative if it gets worse."""
        saved = 1 - self.straggler_after / self.straggler_now
        return self.expert_s * saved * min(self.remaining_steps, horizon_steps)


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """The present nodes.

    Args:
        nodes: their names, in the cluster's order. A node that came back without what it held must
            have another name.
        cluster: their slots; None: no node has one.
    """

    nodes: tuple[str, ...]
    cluster: Cluster | None

    def __post_init__(self) -> None:
        number = self.cluster.num_nodes if self.cluster else 0
        if len(self.nodes) != number or len(set(self.nodes)) != number:
            raise ValueError(f"nodes {self.nodes} of a cluster of {number}: each is named, once")


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step is over; with a forecast if :meth:`PlacementTimes.wants_forecast`."""

    step: int
    forecast: Forecast | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """The placement of the last PLACE is in use from this step on."""

    step: int


Event: TypeAlias = NodesSeen | StepDone | Placed


@dataclass(frozen=True, slots=True)
class Decision:
    """An action and its reason, which is for the log and for people.

    Args:
        threshold: distinct nodes that every expert can have with the present slots, at most the
            configured threshold; 0: not even one.
    """

    action: Action
    reason: str
    threshold: int


class PlacementTimes:
    """Decides when to place anew; see the module.

    Args:
        nodes, cluster: of the first placement.
        num_experts: of the layer that has most.
        step: the first one.
    Raises:
        ValueError: nodes that do not fit the cluster, no expert, or fewer slots than experts.
    """

    def __init__(
        self,
        config: TimesConfig,
        nodes: tuple[str, ...],
        cluster: Cluster,
        *,
        num_experts: int,
        step: int = 0,
    ) -> None:
        if num_experts < 1:
            raise ValueError(f"num_experts={num_experts}")
        self._config = config
        self._num_experts = num_experts
        self._seen = NodesSeen(nodes, cluster)
        self._placed = frozenset(nodes)  # of the placement, or the next one while PLACING
        self._placed_step = step
        self._state = _State.STEADY
        self._came_s: tuple[float, float] | None = None  # when the first and the last new node came
        if not self._threshold():
            raise ValueError(self._lacking())

    def handle(self, event: Event, *, now_s: float) -> Decision:
        """Decide on an event.

        Raises:
            LocalProtocolError: the event is illegal in this state; see the table.
        """
        match event:
            case NodesSeen():
                return self._nodes_seen(event, now_s)
            case StepDone() if self._state in (_State.STEADY, _State.GATHERING):
                return self._step_done(event, now_s)
            case Placed() if self._state is _State.PLACING:
                return self._now_placed(event, now_s)
        raise LocalProtocolError(f"{type(event).__name__} while {self._state}", operation="placement times")

    def wants_forecast(self, step: int) -> bool:
        """True if the next :class:`StepDone` should have a forecast, which takes a plan to make."""
        since = step - self._placed_step
        if self._state is not _State.STEADY or since < 1:
            return False
        return since % self._config.check_steps == 0 or self._due(step)

    # --- nodes -------------------------------------------------------------------------------------------

    def _nodes_seen(self, event: NodesSeen, now_s: float) -> Decision:
        before, self._seen = frozenset(self._seen.nodes), event
        here = frozenset(event.nodes)
        if not self._threshold():
            self._state = _State.HALTED
            return self._decide(Action.REFUSE, self._lacking())
        if self._state is _State.HALTED:
            return self._place(f"enough nodes again: {self._capacity()}")
        gone = self._placed - here
        if gone:
            return self._place(f"gone: {_names(gone)}; left: {self._capacity()}")
        came = here - before
        if came:
            self._came_s = (self._came_s or (now_s,))[0], now_s
        return self._wait_or_keep(now_s)

    def _now_placed(self, event: Placed, now_s: float) -> Decision:
        self._placed_step = event.step
        self._state = _State.STEADY
        return self._wait_or_keep(now_s)

    def _wait_or_keep(self, now_s: float) -> Decision:
        """No node is gone; decide whether to wait for more."""
        new = frozenset(self._seen.nodes) - self._placed
        if self._state is _State.PLACING:
            return self._decide(Action.WAIT, "a placement is being applied")
        if not new:
            self._state = _State.STEADY
            self._came_s = None
            return self._decide(Action.KEEP, "the nodes are those of the placement")
        self._state = _State.GATHERING
        return self._gather(new, now_s)

    def _gather(self, new: frozenset[str], now_s: float) -> Decision:
        assert self._came_s is not None, "set when a new node comes"
        first_s, last_s = self._came_s
        due_s = min(last_s + self._config.gather_s, first_s + self._config.gather_most_s)
        if now_s >= due_s:
            return self._place(f"came: {_names(new)}; now: {self._capacity()}")
        return self._decide(
            Action.WAIT, f"came: {_names(new)}; used in {due_s - now_s:.0f} s unless more come"
        )

    # --- load --------------------------------------------------------------------------------------------

    def _step_done(self, event: StepDone, now_s: float) -> Decision:
        if self._state is _State.GATHERING:
            return self._wait_or_keep(now_s)
        if event.forecast is None:
            return self._decide(Action.KEEP, "the load was not looked at")
        gain_s = event.forecast.gain_s(self._config.horizon_steps)
        numbers = (
            f"straggler factor {event.forecast.straggler_now:.3f}, then "
            f"{event.forecast.straggler_after:.3f}: "
            f"saves {gain_s:.1f} s, costs {event.forecast.move_s:.1f} s"
        )
        if gain_s > event.forecast.move_s * (1 + self._config.margin):
            return self._place(f"it pays: {numbers}")
        if gain_s > 0 and self._due(event.step):
            return self._place(f"{self._config.every_steps} steps are over: {numbers}")
        return self._decide(Action.KEEP, f"it does not pay: {numbers}")

    def _due(self, step: int) -> bool:
        every = self._config.every_steps
        return every > 0 and step - self._placed_step >= every

    # --- decisions ---------------------------------------------------------------------------------------

    def _place(self, reason: str) -> Decision:
        self._state = _State.PLACING
        self._placed = frozenset(self._seen.nodes)
        self._came_s = None
        return self._decide(Action.PLACE, reason)

    def _decide(self, action: Action, reason: str) -> Decision:
        threshold = self._threshold()
        if action is Action.PLACE and threshold < self._config.threshold:
            reason += (
                f"; every expert on {threshold} node{'s' * (threshold != 1)} only, not on "
                f"{self._config.threshold}: the slots hold no more"
            )
        return Decision(action, reason, threshold)

    def _threshold(self) -> int:
        cluster = self._seen.cluster
        if cluster is None:
            return 0
        return reachable_threshold(cluster.slots, self._num_experts, self._config.threshold)

    def _capacity(self) -> str:
        return f"{self._there()} for {self._num_experts} experts"

    def _lacking(self) -> str:
        cluster = self._seen.cluster
        more = self._num_experts - (cluster.num_slots if cluster else 0)
        return (
            f"{self._there()}, and {self._num_experts} experts need one each: wait for nodes with {more} "
            "more, or give ranks more slots"
        )

    def _there(self) -> str:
        cluster = self._seen.cluster
        if cluster is None:
            return "no node has a slot"
        nodes = f"{cluster.num_nodes} node{'s' * (cluster.num_nodes != 1)}"
        return f"{nodes} with {cluster.num_slots} slots in a layer"


def _names(nodes: frozenset[str]) -> str:
    return ", ".join(sorted(nodes))
