"""Which nodes may act on a run here (pure; docs/replication.md section 8).

A trusted key says who a node is, not what it may have. What a node asks of a run (to read, to
replace, to end anything of it) is granted if the node is a member: local ranks named it, a member
named it, or the operator did. A run of which this node holds nothing and knows nobody is anybody's
to bring here.

`former` members of a run's record count until the run has a floor without them: until then the run
may have to go on from what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

__all__ = ["GUEST_S", "MAX_GUESTS", "RunAccess"]

GUEST_S = 3600.0  # from a start until its ranks have joined: longer than they wait for each other
MAX_GUESTS = 1 << 16  # of one run

RunName = tuple[str, str]  # job, run


class _Card(Protocol):
    @property
    def node(self) -> str: ...


class KnownRun(Protocol):
    """What is recorded of a run, as far as it decides who may act on it."""

    @property
    def cards(self) -> Iterable[_Card]:
        """Its members, and those that were members before."""
        ...


class RunAccess:
    """Who may act on which run.

    Args:
        node: this node.
        everywhere: nodes that the operator named as peers: members of every run.
        record_of: what is recorded of a run; None: nothing.
        holds: whether anything of a run lies here.
        everybody: the operator lets every trusted node act on every run.
    """

    def __init__(
        self,
        node: str,
        everywhere: Iterable[str],
        *,
        record_of: Callable[[str, str], KnownRun | None],
        holds: Callable[[str, str], bool],
        everybody: bool = False,
    ) -> None:
        self._everywhere = {node, *everywhere}
        self._record_of, self._holds, self._everybody = record_of, holds, everybody
        self._guests: dict[RunName, dict[str, float]] = {}  # until when

    def admit(self, job: str, run: str, nodes: Iterable[str], *, now_s: float) -> None:
        """Nodes of a start that is under way may act on the run before its ranks have joined."""
        guests = {n: until_s for n, until_s in self._guests_of(job, run).items() if until_s > now_s}
        guests.update(dict.fromkeys(nodes, now_s + GUEST_S))
        newest = sorted(guests.items(), key=lambda guest: guest[1])[-MAX_GUESTS:]
        self._guests[job, run] = dict(newest)

    def forget(self, job: str, run: str) -> None:
        """The run is over, or was forgotten."""
        self._guests.pop((job, run), None)

    def objection(self, peer: str, job: str, run: str, *, now_s: float) -> str:
        """Why ``peer`` may not act on the run; "" if it may."""
        if self._everybody or peer in self._everywhere:
            return ""
        if self._guests_of(job, run).get(peer, now_s) > now_s:
            return ""
        members = self.members(job, run)
        if peer in members or not (members or self._holds(job, run)):
            return ""
        known = f"its members are {_named(sorted(members))}" if members else "its members are not known"
        return f"{peer} is no member of {job}/{run}: {known}"

    def members(self, job: str, run: str) -> set[str]:
        """The nodes that are recorded to take part, or to have taken part; empty: nobody is known."""
        record = self._record_of(job, run)
        return set() if record is None else {card.node for card in record.cards}

    def _guests_of(self, job: str, run: str) -> dict[str, float]:
        return self._guests.get((job, run), {})


def _named(nodes: list[str]) -> str:
    return ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
