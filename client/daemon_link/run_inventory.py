"""Who takes part in the run, and what their nodes hold: what every rank learns at the start of a recovery."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from ckptd.client.ranks.collectives import Collectives
from ckptd.core.recovery.held import STORE_NODE, HeldRecords, from_wire, to_wire
from ckptd.core.recovery.histories import history_of
from ckptd.core.recovery.log_facts import facts_from_logs
from ckptd.core.recovery.quarantine import reported_epochs, without_marked
from ckptd.core.recovery.recovery_facts import RankFacts, facts_from_wire, facts_to_wire
from ckptd.core.recovery.snapshot_sources import SnapshotCopy
from ckptd.core.slots.ring import SlotRecord, epoch_table
from ckptd.core.slots.slots import DRAWN_EPOCHS, epoch_after, least_starts
from ckptd.holdings import held_from_segments
from ckptd.transport.messages import Holdings, Member, NodeCard, ReplayFailure, RunSeen

__all__ = ["NodeRecord", "RankNote", "RunView", "SeesRun", "see_run"]


_EPOCHS_SENT = 32  # of each node: what is older has long been overwritten


class SeesRun(Protocol):
    """This rank's session with its daemon, as far as it is asked here."""

    card: NodeCard

    def see_run(self, job: str, run: str, known: tuple[str, ...], *, storage: bool = False) -> RunSeen: ...


@dataclass(frozen=True, slots=True)
class RunView:
    """The same on every rank."""

    cards: tuple[NodeCard, ...]  # by rank
    ring_bytes: tuple[int, ...]  # by rank: what its snapshots take
    held: tuple[HeldRecords, ...]
    idle: tuple[NodeCard, ...] = ()  # nodes that answered and have no rank now
    silent: tuple[str, ...] = ()  # nodes that took part before and did not answer
    drawn: int = 0  # by lot, by rank 0
    known_epoch: int = -1  # the highest that any node knows of; nothing may have been sealed in it yet
    parked: tuple[HeldRecords, ...] = ()
    logs: tuple[HeldRecords, ...] = ()
    facts: Mapping[int, RankFacts] = field(default_factory=dict)  # by rank, as far as there are any
    hints: tuple[int, ...] = ()  # by rank: what earlier trainers learned
    records: tuple[NodeRecord, ...] = ()  # what the nodes that answered know of the run
    # Epochs that the newest one does not go back to; nothing of them is told above.
    others: frozenset[int] = frozenset()
    failures: tuple[ReplayFailure, ...] = ()  # replays that did not reproduce, as any node knows
    # Where the epochs began of which the records tell. What an epoch left behind is not taken up
    # again because its own snapshots are lost: the node that has them may come back, and a suffix
    # would be put together from both.
    begun: Mapping[int, int] = field(default_factory=dict)

    def last_epoch(self, highest: int) -> int:
        """The highest that was seen, or of which a node knows; -1: none."""
        return max(highest, self.known_epoch)

    def next_epoch(self, highest: int) -> int:
        """Above every epoch that was seen or is known; and another one than whoever is away begins meanwhile.

        Raises:
            ValueError: there is no higher one.
        """
        return epoch_after(self.last_epoch(highest), self.drawn)

    @property
    def usable(self) -> tuple[HeldRecords, ...]:
        """What is held and not quarantined."""
        return without_marked(self.held, self.failures)

    @property
    def epochs(self) -> dict[int, int]:
        """Where epochs began of which something tells that is no usable snapshot: a record, a
        parked state, a log, what is quarantined.
        """
        beside = (*self.parked, *self.logs, *(self.held if self.failures else ()))
        records = (record for held in beside for record in held.records)
        return epoch_table(records, least_starts(self.begun, reported_epochs(self.failures)))

    @property
    def homes(self) -> dict[int, str]:
        """The node of each rank."""
        return {rank: card.node for rank, card in enumerate(self.cards)}

    @property
    def members(self) -> tuple[Member, ...]:
        """The nodes, in the order of their first ranks."""
        ranks: dict[str, list[int]] = {}
        for rank, card in enumerate(self.cards):
            ranks.setdefault(card.node, []).append(rank)
        working = [
            Member(self.cards[of[0]], tuple(of), tuple(self.ring_bytes[rank] for rank in of))
            for of in ranks.values()
        ]
        return (*working, *(Member(card, ()) for card in self.idle))

    def was_recoverable(self, complete: Collection[int]) -> bool | None:
        """Whether this run ever got to where all ranks could go back to; None: who answered cannot tell.

        Args:
            complete: ranks of which a suffix is held now.
        """
        newest = max((record.epoch for record in self.records), default=-1)
        newest_records = [record for record in self.records if record.epoch == newest >= 0]
        if any(record.recoverable for record in newest_records):
            return True
        # A rank of which no suffix was ever complete is enough: there was nothing for all.
        return False if any({*record.ranks} - {*complete} for record in newest_records) else None

    @property
    def is_known(self) -> bool:
        """Whether anybody who answered knows who took part."""
        return any(record.epoch >= 0 for record in self.records)

    @property
    def everybody(self) -> tuple[NodeCard, ...]:
        """How to reach each node."""
        return tuple(member.card for member in self.members)


class NodeRecord(msgspec.Struct, frozen=True):
    """What a node knows of the run, of its earlier lives, too.

    Args:
        epoch: the last in which it took part; -1: in none.
        ranks: that it had then.
        recoverable: whether a suffix of each of them, or of all ranks, was complete once.
        lost: it took part, and its record was damaged.
        holds: something of the run is there, or known there, until it is forgotten.
        epochs: the newest ones that it knows, where each began, and which one it follows (-1: not told).
    """

    node: str
    epoch: int = -1
    ranks: tuple[int, ...] = ()
    recoverable: bool = False
    lost: bool = False
    holds: bool = False
    epochs: tuple[tuple[int, int, int], ...] = ()


class RankNote(msgspec.Struct, frozen=True):
    """What a rank tells of itself.

    Args:
        ring_bytes: what its snapshots take, as far as it is known.
        hint: what earlier trainers of it learned (``HINT_…``).
        facts: with whom it communicates in a step, as an earlier trainer has seen it; None: nobody has.
        alike: ranks with which it has all operators alike, as it is built now.
        unusable: copies of parked states that it could not have: damaged, or out of reach.
    """

    ring_bytes: int = 0
    hint: int = 0
    facts: RankFacts | None = None
    alike: tuple[int, ...] = ()
    unusable: tuple[SnapshotCopy, ...] = ()


class _Here(msgspec.Struct, frozen=True):
    """Where a rank is, and what it tells of itself; ``seen``: that it knows with whom it communicates."""

    card: NodeCard
    ring_bytes: int
    hint: int
    facts: bytes
    seen: bool
    unusable: tuple[SnapshotCopy, ...]


class _NodeInventory(msgspec.Struct, frozen=True):
    """What one rank tells of its node and of idle ones; of a node for which another rank speaks, nothing."""

    drawn: int
    cards: list[NodeCard] = []
    held: list[bytes] = []
    epoch: int = -1
    wanted: list[str] = []  # nodes that took part before, or were asked
    parked: list[bytes] = []
    logs: list[bytes] = []
    records: list[NodeRecord] = []
    failures: list[ReplayFailure] = []


def see_run(
    session: SeesRun,
    job: str,
    run: str,
    ranks: Collectives,
    *,
    note: RankNote | None = None,
    storage: bool = False,
) -> RunView:
    """Every rank's node, and what all these nodes hold; one rank per node asks its daemon. A collective call.

    Args:
        note: what this rank tells of itself.
        storage: whether to look at what is durable, too.
    Raises:
        DaemonUnavailable: a node's daemon is away; on every rank.
        RemoteProtocolError: a node tells what cannot be.
    """
    note, ranks = note or RankNote(), ranks.on_node(session.card.node)
    facts = _facts_to_wire(ranks.rank, note)
    seen = note.facts is not None
    of_itself = _Here(session.card, note.ring_bytes, note.hint, facts, seen, note.unusable)
    here = ranks.gather(of_itself, _Here)
    cards = tuple(h.card for h in here)
    speaks = min(r for r, card in enumerate(cards) if card.node == session.card.node)
    drawn = secrets.randbelow(DRAWN_EPOCHS)

    def of_node() -> _NodeInventory:
        if ranks.rank != speaks:
            return _NodeInventory(drawn)
        return _ask(session, job, run, cards, storage, drawn)

    return _view(here, ranks.agree(of_node, _NodeInventory))


def _ask(
    session: SeesRun, job: str, run: str, cards: tuple[NodeCard, ...], storage: bool, drawn: int
) -> _NodeInventory:
    known = tuple(sorted({card.node for card in cards}))
    seen = session.see_run(job, run, known, storage=storage)
    return _NodeInventory(
        drawn,
        list(seen.cards),
        [to_wire(held_from_segments(h.node, h.segments)) for h in seen.holdings],
        max((h.epoch for h in seen.holdings), default=-1),
        [*(member.card.node for member in seen.members), *seen.silent],
        [to_wire(held_from_segments(h.node, h.parked)) for h in seen.holdings],
        [to_wire(held_from_segments(h.node, h.logs)) for h in seen.holdings],
        [_record_of(h) for h in seen.holdings if h.node != STORE_NODE],
        [failure for h in seen.holdings for failure in h.failures],
    )


def _record_of(held: Holdings) -> NodeRecord:
    record, anything = held.record, bool(held.segments or held.logs or held.parked)
    if record is None:
        return NodeRecord(held.node, holds=anything)
    ranks = tuple(r for m in record.members if m.card.node == held.node for r in m.ranks)
    known = record.lost or record.newest_epoch > record.forgotten
    epochs = record.epochs[-_EPOCHS_SENT:]
    return NodeRecord(
        held.node, record.epoch, ranks, record.recoverable, record.lost, known or anything, epochs
    )


def _view(here: Sequence[_Here], everybody: Sequence[_NodeInventory]) -> RunView:
    cards = tuple(h.card for h in here)
    held = _once(theirs.held for theirs in everybody)
    parked = _without(_once(theirs.parked for theirs in everybody), here)
    logs = _once(theirs.logs for theirs in everybody)
    records = {r.node: r for theirs in everybody for r in theirs.records}
    epochs = [epoch for record in records.values() for epoch in record.epochs]
    # Several nodes may know of the same idle one.
    idle = {card.node: card for theirs in everybody for card in theirs.cards}
    wanted = {name for theirs in everybody for name in theirs.wanted}
    silent = tuple(sorted(wanted - set(idle) - {card.node for card in cards}))
    complete = not silent and not any(record.lost for record in records.values())
    history = history_of((*held, *parked, *logs), epochs, complete=complete)
    held, parked, logs = (history.held(each) for each in (held, parked, logs))
    return RunView(
        cards,
        tuple(h.ring_bytes for h in here),
        held,
        tuple(idle[name] for name in sorted(idle)),
        silent,
        everybody[0].drawn,
        max(theirs.epoch for theirs in everybody),
        parked,
        logs,
        _facts_of(here, logs, parked),
        tuple(h.hint for h in here),
        tuple(records.values()),
        history.others,
        tuple(dict.fromkeys(f for theirs in everybody for f in theirs.failures)),
        history.begun,
    )


def _once(by_rank: Iterable[Sequence[bytes]]) -> tuple[HeldRecords, ...]:
    """What all nodes tell, each segment once."""
    held: dict[tuple[str, str], HeldRecords] = {}
    for theirs in by_rank:
        for records in theirs:
            held.update({(h.node, h.segment): h for h in from_wire(records)})
    return tuple(held.values())


def _without(parked: Iterable[HeldRecords], here: Iterable[_Here]) -> tuple[HeldRecords, ...]:
    """What any rank could not use counts for none: the ranks of a domain begin at one iteration, so
    another plan is needed anyway.
    """
    unusable = {source for h in here for source in h.unusable}
    if not unusable:
        return tuple(parked)
    return tuple(
        replace(held, records=tuple(r for r in held.records if _place(held, r) not in unusable))
        for held in parked
    )


def _place(held: HeldRecords, record: SlotRecord) -> SnapshotCopy:
    return SnapshotCopy(held.node, held.segment, record.index)


def _facts_to_wire(rank: int, note: RankNote) -> bytes:
    """Where nobody has seen with whom it communicates, only with whom it has all operators alike."""
    return facts_to_wire({rank: note.facts or RankFacts((), (), note.alike)})


def _facts_of(
    here: Sequence[_Here], logs: Sequence[HeldRecords], parked: Sequence[HeldRecords]
) -> Mapping[int, RankFacts]:
    """Of the ranks that have some, or have lost them but not all their logs. If no rank has, they
    may all communicate with each other.
    """
    found = facts_from_wire([h.facts for h in here])
    seen = {rank: facts for rank, facts in found.items() if here[rank].seen}
    for rank, facts in facts_from_logs(found.keys() - seen.keys(), logs, parked).items():
        # As it is built now, too.
        alike = tuple(sorted({*facts.alike} & {*found[rank].alike}))
        seen[rank] = RankFacts(facts.neighbours, facts.domain, alike)
    if seen:
        return seen
    everybody = tuple(range(len(here)))
    return {rank: RankFacts((), everybody, facts.alike) for rank, facts in found.items()}
