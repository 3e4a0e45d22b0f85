"""How many nodes were alive when: a recorded trace, and which node it is that goes.

A file has rows ``time,number``; the number holds from then on. A row with the number of the row
before it ends the time that this one stood, as in the traces of Bamboo, which have two rows for
each change; several changes may bear the same time, and happen in their order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Change", "Membership", "Trace", "memberships", "parse"]


@dataclass(frozen=True, slots=True)
class Change:
    """So many nodes are alive from ``at_s`` on."""

    at_s: float
    nodes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Changes in order of time, and when the record ends. Before the first there is no node."""

    changes: tuple[Change, ...]
    end_s: float

    @property
    def most(self) -> int:
        """The most nodes that are ever alive."""
        return max((change.nodes for change in self.changes), default=0)

    def at_most(self, nodes: int) -> Trace:
        """The same where never more than so many are used."""
        capped = (Change(change.at_s, min(change.nodes, nodes)) for change in self.changes)
        return Trace(tuple(_only_changes(capped)), self.end_s)

    def scaled(self, nodes: int) -> Trace:
        """The same with so many nodes where it has the most, and in proportion, to the nearest, elsewhere.

        Raises:
            ValueError: it never has a node.
        """
        if not self.most:
            raise ValueError("the trace has no node")
        kept = (
            Change(change.at_s, (2 * change.nodes * nodes + self.most) // (2 * self.most))
            for change in self.changes
        )
        return Trace(tuple(_only_changes(kept)), self.end_s)

    def busiest_s(self, span_s: float, *, fewest: int, stand_s: float) -> float:
        """Where the stretch of so many seconds begins in which most happens.

        That is at a change to ``fewest`` nodes or more, the first of those with the most changes
        that stand for ``stand_s`` within it.

        Raises:
            ValueError: there is none so long before the end.
        """
        starts = [c.at_s for c in self.changes if c.nodes >= fewest and c.at_s + span_s <= self.end_s]
        if not starts:
            raise ValueError(f"{span_s:g} s with {fewest} nodes at the begin: not in this trace")

        def standing(start_s: float) -> int:
            times = [c.at_s for c in self.changes if start_s <= c.at_s < start_s + span_s]
            return sum(b - a >= stand_s for a, b in pairwise([*times, start_s + span_s]))

        return max(starts, key=standing)

    def stretch(self, from_s: float, to_s: float, *, speed: float = 1.0) -> Trace:
        """A part of it, begun at 0 with the nodes of that time and run ``speed`` times as fast: for
        a run with real processes.

        Raises:
            ValueError: a part that is not in the trace, or a speed that is not above 0.
        """
        if not (0 <= from_s < to_s <= self.end_s and 0 < speed < math.inf):
            raise ValueError(
                f"from {from_s:g} to {to_s:g} s at speed {speed:g}: the trace has 0 to {self.end_s:g} s"
            )
        before = [change.nodes for change in self.changes if change.at_s <= from_s]
        inner = [
            Change((change.at_s - from_s) / speed, change.nodes)
            for change in self.changes
            if from_s < change.at_s < to_s
        ]
        first = [Change(0.0, before[-1])] if before else []
        return Trace(tuple(_only_changes([*first, *inner])), (to_s - from_s) / speed)


@dataclass(frozen=True, slots=True)
class Membership:
    """These nodes are gone, or these have come; a node that comes is a new one."""

    at_s: float
    lost: frozenset[int]
    came: tuple[int, ...]


def parse(text: str, *, unit_s: float = 1.0) -> Trace:
    """Read a trace whose times are in units of ``unit_s`` seconds.

    Raises:
        ValueError: a row that is no time and number, a time before the row above, no row at all; names the row.
    """
    changes: list[Change] = []
    last_s = 0.0
    for number, row in enumerate(text.splitlines(), start=1):
        if not row.strip():
            continue
        fields = row.split(",")
        try:
            at_s, nodes = float(fields[0]) * unit_s, int(fields[1])
        except (ValueError, IndexError) as error:
            raise ValueError(f"row {number} is {row!r}: a time and a number of nodes") from error
        if len(fields) != 2 or not 0 <= at_s < math.inf or nodes < 0:
            raise ValueError(f"row {number} is {row!r}: a time and a number of nodes of 0 or more")
        if at_s < last_s:
            raise ValueError(f"row {number} is {row!r}: before the row above it")
        last_s = at_s
        changes.append(Change(at_s, nodes))
    if not changes:
        raise ValueError("the trace is empty")
    return Trace(tuple(_only_changes(changes)), last_s)


def _only_changes(changes: Iterator[Change] | list[Change]) -> Iterator[Change]:
    nodes = 0
    for change in changes:
        if change.nodes != nodes:
            yield change
        nodes = change.nodes


def memberships(trace: Trace, seed: int) -> tuple[Membership, ...]:
    """Which nodes go and come: those that go are drawn at random from the live ones, as their
    number is all that a trace tells.
    """
    draw = random.Random(seed)
    alive: list[int] = []
    next_node = 0
    out = []
    for change in trace.changes:
        if change.nodes < len(alive):
            lost = frozenset(draw.sample(alive, len(alive) - change.nodes))
            alive = [node for node in alive if node not in lost]
            out.append(Membership(change.at_s, lost, ()))
        else:
            came = tuple(range(next_node, next_node + change.nodes - len(alive)))
            next_node += len(came)
            alive += came
            out.append(Membership(change.at_s, frozenset(), came))
    return tuple(out)
