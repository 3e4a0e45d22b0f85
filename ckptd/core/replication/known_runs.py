"""What this node knows of runs in which it may have no ranks: their epochs and promises (`KnownRuns`), and
which nodes may act on them here (`RunAccess`). Pure.

A trusted key identifies a node; it does not say what the node may have (docs/replication.md section 8). A
request of a node about a run (to read, to replace, to end anything of it) is granted if the node is a member:
local ranks named it, a member named it, or the operator did. Anybody may bring a run here of which this node
holds nothing and knows no member.

Former members in a run's record count until the run has a floor without them: until then the run may have to
go on from what they hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from ckptd.core.replication.replicas import Promise
from ckptd.units import first_of

GUEST_S = 3600.0  # from a start until its ranks have joined: longer than they wait for each other
MAX_GUESTS = 1 << 16  # that one node names, of all runs
MAX_GUEST_RUNS = 256  # of which one other node names any
_MAX_EPOCHS = 256  # of a run, as in its record
_LOOK_EVERY_S = 60.0

RunName = tuple[str, str]  # job, run


class _Told(NamedTuple):
    """What peers told of an epoch, and the floor that goes on from epochs before it.

    That floor counts until one of the epoch itself is known, also if the latter is lower: the epoch may
    follow another history than the one of which the floor was.
    """

    epoch: int = -1
    promise: Promise = Promise()
    carried: int = -1
    span: int = 1

    def with_own(self, own: Promise) -> Promise:
        """The promise, with what this node's own ranks agreed on in the same epoch."""
        agreed = _newer(own, self.promise)
        return agreed if agreed.floor >= 0 else Promise(self.carried, agreed.horizon)


class KnownRuns:
    """Epochs and promises by run.

    Args:
        promise_of: what this node's own ranks agreed on: the epoch, the promise, and the span.
    """

    def __init__(self, promise_of: Callable[[str, str], tuple[int, Promise, int]]) -> None:
        self._promise_of = promise_of
        self._epochs: dict[RunName, dict[int, int]] = {}
        self._told: dict[RunName, _Told] = {}

    def note_epoch(self, job: str, run: str, epoch: int, start: int) -> bool:
        """A recovery began this epoch; returns whether that is new."""
        known = self._epochs.setdefault((job, run), {})
        if known.get(epoch) == start:
            return False
        known[epoch] = start
        while len(known) > _MAX_EPOCHS:
            del known[min(known)]
        before, promise, span = self._in_force(job, run)
        if epoch > before:
            floor = self._carried(job, run, before, promise.floor)
            self._told[job, run] = _Told(epoch, carried=floor, span=span if floor >= 0 else 1)
        return True

    def epochs(self, job: str, run: str) -> Mapping[int, int]:
        """The known epochs and their starts."""
        return self._epochs.get((job, run), {})

    def newest_epoch(self, job: str, run: str) -> int:
        """The highest known epoch; -1: none."""
        return max(self.epochs(job, run), default=-1)

    def learn(self, job: str, run: str, epoch: int, told: Promise, span: int) -> None:
        """A sender told the promise of this epoch. Of an older epoch only its floor counts."""
        known = self._told.get((job, run), _Told())
        if epoch > known.epoch:
            known = _Told(epoch)
        elif epoch < known.epoch:
            floor = self._carried(job, run, epoch, told.floor)
            if floor < 0:
                return
            known, told = known._replace(carried=max(known.carried, floor)), Promise()
        fresh = known._replace(promise=_newer(known.promise, told), span=max(known.span, span))
        self._told[job, run] = fresh

    def promise(self, job: str, run: str) -> tuple[Promise, int]:
        """The known promise of the latest epoch, and the span."""
        _, promise, span = self._in_force(job, run)
        return promise, span

    def forget_promises(self, of: Callable[[str, str], bool]) -> None:
        """Drop what peers told of these runs: this node holds nothing of them."""
        self._told = {run: told for run, told in self._told.items() if not of(*run)}

    def forget_epochs(self, of: Callable[[str, str], bool]) -> None:
        """Drop the epochs of these runs: this node holds nothing of them, and has no record of them."""
        self._epochs = {run: known for run, known in self._epochs.items() if not of(*run)}

    def _in_force(self, job: str, run: str) -> tuple[int, Promise, int]:
        """The latest epoch in which something was promised, the promise, and the span."""
        epoch, own, span = self._promise_of(job, run)
        told = self._told.get((job, run), _Told())
        if epoch > told.epoch:
            return epoch, own, span
        if told.epoch > epoch:
            return told.epoch, told.with_own(Promise()), told.span
        return epoch, told.with_own(own), max(span, told.span)

    def _carried(self, job: str, run: str, epoch: int, floor: int) -> int:
        """The floor that an older epoch's is in later ones: the same, if none of them began before it.

        Otherwise -1. Its horizon does not count: it would give away what a later floor needs.
        """
        starts = [start for later, start in self.epochs(job, run).items() if later > epoch]
        return floor if starts and floor <= min(starts) else -1


class _Card(Protocol):
    @property
    def node(self) -> str: ...


class KnownRun(Protocol):
    """The record of a run, as far as it decides who may act on the run."""

    @property
    def cards(self) -> Iterable[_Card]:
        """Its present and former members."""
        ...


class RunAccess:
    """Which nodes may act on which run.

    Args:
        node: this node.
        everywhere: nodes that the operator named as peers: members of every run.
        record_of: the record of a run, or None.
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
        self._node = node
        # By run, and by the node that named them: until when. What one node names pushes out no other's.
        self._guests: dict[RunName, dict[str, dict[str, float]]] = {}
        self._named: dict[str, OrderedDict[RunName, None]] = {}  # by that node, the oldest first
        self._next_look_s = float("-inf")

    def admit(self, job: str, run: str, nodes: Iterable[str], *, now_s: float, by: str = "") -> None:
        """Let the nodes of a start act on the run before its ranks have joined.

        Args:
            by: the node that names them; "": this one, or its operator.
        """
        by, name = by or self._node, (job, run)
        fresh = dict.fromkeys(nodes, now_s + GUEST_S)
        if not fresh:
            return
        of_run = self._guests.setdefault(name, {})
        guests = {n: until_s for n, until_s in of_run.get(by, {}).items() if until_s > now_s} | fresh
        of_run[by] = dict(sorted(guests.items(), key=lambda guest: guest[1])[-MAX_GUESTS:])
        named = self._named.setdefault(by, OrderedDict())
        named[name] = None
        named.move_to_end(name)
        if by != self._node:
            while len(named) > MAX_GUEST_RUNS or self._count(by) > MAX_GUESTS:
                self._drop(next(iter(named)), by)

    def _count(self, by: str) -> int:
        return sum(len(self._guests[name][by]) for name in self._named[by])

    def _drop(self, name: RunName, by: str) -> None:
        del self._guests[name][by], self._named[by][name]
        if not self._guests[name]:
            del self._guests[name]
        if not self._named[by]:
            del self._named[by]

    def tick(self, now_s: float) -> None:
        """Forget those whose time is over."""
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_EVERY_S
        for name, of_run in list(self._guests.items()):
            for by, guests in list(of_run.items()):
                if max(guests.values()) <= now_s:
                    self._drop(name, by)

    def forget(self, job: str, run: str) -> None:
        """The run is over, or was forgotten."""
        for by in list(self._guests.get((job, run), ())):
            self._drop((job, run), by)

    def objection(self, peer: str, job: str, run: str, *, now_s: float) -> str:
        """The reason why ``peer`` may not act on the run; "" if it may."""
        if self._everybody or peer in self._everywhere:
            return ""
        of_run = self._guests.get((job, run), {})
        if any(guests.get(peer, now_s) > now_s for guests in of_run.values()):
            return ""
        members = self.members(job, run)
        if peer in members or not (members or self._holds(job, run)):
            return ""
        known = f"its members are {first_of(sorted(members), 8)}" if members else "its members are not known"
        return f"{peer} is no member of {job}/{run}: {known}"

    def members(self, job: str, run: str) -> set[str]:
        """The recorded present and former members; empty: none is known."""
        record = self._record_of(job, run)
        return set() if record is None else {card.node for card in record.cards}


def _newer(a: Promise, b: Promise) -> Promise:
    return Promise(max(a.floor, b.floor), max(a.horizon, b.horizon))
