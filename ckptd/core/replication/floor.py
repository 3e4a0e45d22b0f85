"""The floor of a run: the newest iteration that every rank has on all its targets (docs/replication.md §6).

The nodes of a run, sorted by name, form a tree: node *i* is the parent of *i*·fan_out + 1 and so on. Each
node reports the smallest "replicated up to" of its subtree to its parent, the root announces the smallest of
all, and every node passes the announcement on. Messages may be lost, repeated, or reordered; the heartbeat
repairs what was lost.

Two rules keep that safe:

* **Upwards the newest report counts, not the largest.** What a rank has can shrink: a target dies and its
  substitute holds nothing yet, or a primary that was the only copy gives way to targets. To take the maximum
  would let the floor pass an iteration that was withdrawn before it was announced; to take whatever arrives
  last would let a late copy of an old report do the same. So each report carries a sequence that grows with
  every change during one life of its sender, and an older report is ignored. After a restart of the sender
  the sequence begins anew (`FloorTree.restarted`); the shell drops messages of a former life.
* **Downwards the largest counts.** Once a floor is announced, any node may give away older iterations, so the
  floor cannot be taken back. It never decreases within one membership. A node that missed an announcement, or
  was restarted, has an older floor and merely keeps more.

Beside the floor the tree agrees on two maxima, which only grow. The **horizon**: a target holds complete
suffixes that end at the iterations ``first`` to ``last`` without a gap, and one that was begun anew holds
none that ends before its ``first``; so the next floor is at least the largest ``first`` of all. The **span**:
the largest window of all ranks, since all load from one start. Until a node has heard of the span, it counts
suffixes that are too short. So each report carries the span with which it was **counted**, and the root
announces nothing on a report that was counted with a shorter one.

A horizon without the floor that was announced before it would permit nodes to give that floor away, and the
root may not know that floor: it was restarted, or a recovery began a new epoch with a new tree. So each
report **carries** the newest floor that is known in its subtree, with the epoch in which it was announced,
and the root adopts it before it announces anything. Of two epochs the later one counts: a floor of the
earlier one may lie beyond its end.

Hence the invariant: a floor never exceeds, for any rank, the newest iteration up to which this rank was ever
replicated. Nothing is announced before every node has reported: a node whose child is silent is silent
itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ckptd.errors import LocalProtocolError, RemoteProtocolError

FAN_OUT = 16
# What a subtree without ranks reports: larger than any iteration, and an i64 on the wire.
NO_RANKS = (1 << 63) - 1
ANY_SPAN = (1 << 16) - 1  # longer than any window


class Carried(NamedTuple):
    """A floor, and the epoch in which it was announced."""

    epoch: int
    floor: int


NOTHING_CARRIED = Carried(-1, -1)


class FloorKind(StrEnum):
    """The direction of a message: ``below`` to the parent, ``floor`` to a child."""

    BELOW = "below"
    FLOOR = "floor"


@dataclass(frozen=True, slots=True)
class FloorMessage:
    """A report or an announcement for one neighbour; ``sequence`` orders the reports of one sender."""

    to_node: str
    kind: FloorKind
    value: int
    sequence: int
    horizon: int = -1
    span: int = 1
    counted: int = ANY_SPAN
    carried: Carried = NOTHING_CARRIED


class _Standing(NamedTuple):
    """Of some ranks: the minima of ``below`` and ``counted``, the maxima of the rest."""

    below: int
    above: int
    span: int
    counted: int = ANY_SPAN
    carried: Carried = NOTHING_CARRIED


class FloorTree:
    """One node's part in agreeing on the floor of one run, for one membership.

    Every method returns the messages to send now: none unless something changed. Call `resend` once after
    the construction and then at each tick of the loop.

    Attributes:
        floor: the newest floor known here; -1: none yet.
        horizon: no iteration between floor and horizon will become the floor; -1: not known.
        span: the largest window of all ranks, as far as it is known here.
        members_id: identifies the tree; messages of another one are not for this one.
        parent: the receiver of the reports; None at the root.
        children: the receivers of the announcements.

    Args:
        members: ids of the run's nodes, in any order; repetitions do not matter.
        node: the id of this node, one of the members.
        ranks: the ranks of this node. Each begins at -1, so that no floor is announced before its first
            `set_rank`.
        fan_out: children per node.
        started: the first sequence, larger than any that this boot of the daemon has used.
        resend_s: the period of the heartbeat.
        epoch: the run's epoch.
        carried: the newest floor that this node knew before, if this epoch's history continues from there or
            later.
    Raises:
        ValueError: the node is not a member, or a number is out of range.
    """

    def __init__(
        self,
        members: Sequence[str],
        node: str,
        *,
        ranks: Iterable[int] = (),
        fan_out: int = FAN_OUT,
        started: int = 0,
        resend_s: float = 1.0,
        epoch: int = 0,
        carried: Carried = NOTHING_CARRIED,
    ) -> None:
        if fan_out < 1 or started < 0 or resend_s <= 0:
            raise ValueError(f"fan_out {fan_out}, started {started}, resend_s {resend_s}")
        ordered = sorted(set(members))
        if node not in ordered:
            raise ValueError(f"node {node!r} is not among the {len(ordered)} members of the run")
        index = ordered.index(node)
        first = index * fan_out + 1
        self._node = node
        self.parent = None if index == 0 else ordered[(index - 1) // fan_out]
        self.children = tuple(ordered[first : first + fan_out])
        self.members_id = _members_id(ordered, fan_out)
        self._ranks: dict[int, _Standing] = dict.fromkeys(ranks, _Standing(-1, -1, 1, 1))
        self._reports: dict[str, tuple[int, _Standing]] = {}  # child: (sequence, what it reported)
        self._epoch, self._carried = epoch, carried
        self.floor = -1
        self.horizon = -1
        self.span = 1
        self._sequence = started
        self._reported: _Standing | None = None  # what the sequence stands for
        self._resend_s = resend_s
        self._resent_s: float | None = None

    def set_rank(
        self, rank: int, replicated_up_to: int, *, first: int = -1, span: int = 1
    ) -> list[FloorMessage]:
        """A rank of this node is replicated up to an iteration, counted with `span`; -1: none yet.

        The value may decrease: that holds back the next floor, never the announced one.

        Args:
            first: the oldest iteration at which a suffix ends that all its promised copies hold.
            span: the rank's own window.
        """
        if not -1 <= replicated_up_to < NO_RANKS:
            raise LocalProtocolError(
                f"replicated up to {replicated_up_to}", operation="floor", ids={"rank": rank}
            )
        self._ranks[rank] = _Standing(replicated_up_to, first, span, self.span)
        return self._settle()

    def on_below(
        self,
        child: str,
        value: int,
        sequence: int,
        *,
        horizon: int = -1,
        span: int = 1,
        counted: int = ANY_SPAN,
        carried: Carried = NOTHING_CARRIED,
    ) -> list[FloorMessage]:
        """Take a child's report, unless a newer one of it is known.

        Raises:
            RemoteProtocolError: the sender is not a child of this node, or a number is out of range.
        """
        if child not in self.children:
            raise self._wrong(f"{child!r} is not a child of {self._node!r} in this tree", child)
        numbers_fit = min(sequence, span, counted) >= 0 and min(horizon, *carried) >= -1
        if not -1 <= value <= NO_RANKS or not numbers_fit:
            raise self._wrong(f"a report of {value}, sequence {sequence}", child)
        known = self._reports.get(child)
        if known is not None and sequence <= known[0]:
            return []
        self._reports[child] = (sequence, _Standing(value, horizon, span, counted, carried))
        return self._settle()

    def restarted(self, child: str) -> None:
        """A child was restarted: its sequence begins anew. Its last report counts until the next one."""
        if child in self._reports:
            self._reports[child] = (-1, self._reports[child][1])

    def on_floor(self, value: int, *, horizon: int = -1, span: int = 1) -> list[FloorMessage]:
        """Take the parent's announcement, as far as it is newer than what is known here.

        Raises:
            RemoteProtocolError: this node is the root, or a number is out of range.
        """
        if self.parent is None:
            raise self._wrong("the root of the tree was told a floor", "")
        if not -1 <= value < NO_RANKS or horizon < -1 or span < 0:
            raise self._wrong(f"a floor of {value}", self.parent)
        messages = self._raise_floor(value, horizon, span)
        return messages + self._settle() if messages else []

    def resend(self, *, now_s: float) -> list[FloorMessage]:
        """The heartbeat: all messages of this node, once per ``resend_s``; [] in between."""
        if self._resent_s is not None and now_s < self._resent_s + self._resend_s:
            return []
        self._resent_s = now_s
        messages = self._settle()
        standing = self._standing()
        if self.parent is not None and standing is not None and not messages:
            messages = self._report(self.parent, standing)
        if max(self.floor, self.horizon) >= 0:
            messages += self._announcements()
        return messages

    def _settle(self) -> list[FloorMessage]:
        """Report or announce, if every child has reported and something has changed."""
        standing = self._standing()
        if standing is None:
            return []
        if self.parent is None:
            counts = standing.below != NO_RANKS and standing.below >= standing.above
            counts = counts and standing.counted >= max(standing.span, self.span)
            floor = standing.below if counts else self.floor
            floor = max(floor, standing.carried.floor)
            return self._raise_floor(floor, standing.above, standing.span)
        if self._reported is not None and standing[:4] == self._reported[:4]:
            return []  # the carried floor came from the parent as a rule; the heartbeat reports it
        return self._report(self.parent, standing)

    def _standing(self) -> _Standing | None:
        """The standing of this subtree; None until every child has reported."""
        if len(self._reports) < len(self.children):
            return None
        known = [*self._ranks.values(), *(standing for _, standing in self._reports.values())]
        here = Carried(self._epoch, self.floor) if self.floor >= 0 else self._carried
        return _Standing(
            min((s.below for s in known), default=NO_RANKS),
            max([self.horizon, *(s.above for s in known)]),
            max([self.span, *(s.span for s in known)]),
            min((s.counted for s in known), default=ANY_SPAN),
            max([here, *(s.carried for s in known)]),
        )

    def _raise_floor(self, floor: int, horizon: int, span: int) -> list[FloorMessage]:
        before = (self.floor, self.horizon, self.span)
        self.floor = max(self.floor, floor)
        self.horizon, self.span = max(self.horizon, horizon), max(self.span, span)
        return self._announcements() if (self.floor, self.horizon, self.span) != before else []

    def _announcements(self) -> list[FloorMessage]:
        return [
            FloorMessage(child, FloorKind.FLOOR, self.floor, self._sequence, self.horizon, self.span)
            for child in self.children
        ]

    def _report(self, parent: str, told: _Standing) -> list[FloorMessage]:
        self._sequence += told != self._reported
        self._reported = told
        below, above, span, counted, carried = told
        return [FloorMessage(parent, FloorKind.BELOW, below, self._sequence, above, span, counted, carried)]

    def _wrong(self, what: str, sender: str) -> RemoteProtocolError:
        return RemoteProtocolError(
            what,
            operation="floor",
            ids={"from": sender, "members": self.members_id},
            hint="Check that all nodes run the same version of ckptd",
        )


def _members_id(ordered: Sequence[str], fan_out: int) -> str:
    """16 hex digits of the shape of the tree: its members and its fan-out."""
    text = "\0".join([str(fan_out), *ordered])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
