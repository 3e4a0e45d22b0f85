"""The inventory at the start of a recovery, the same on every rank: who takes part in the run, and what their
nodes hold.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from ckptd.client.ranks.collectives import Collectives
from ckptd.core.recovery.held import STORE_NODE, HeldRecords, from_wire, history_of, to_wire
from ckptd.core.recovery.quarantine import reported_epochs, without_marked
from ckptd.core.recovery.recovery_facts import RankFacts, facts_from_logs, facts_from_wire, facts_to_wire
from ckptd.core.recovery.snapshot_tables import SnapshotCopy
from ckptd.core.slots.slots import DRAWN_EPOCHS, SlotRecord, epoch_after, epoch_table, least_starts
from ckptd.holdings import held_from_segments
from ckptd.transport.messages import Holdings, Member, NodeCard, ReplayFailure, RunSeen

_EPOCHS_SENT = 32  # of each node: what is older has long been overwritten


class SeesRun(Protocol):
    """The part of this rank's daemon session that is used here."""

    card: NodeCard

    def see_run(
        self, job: str, run: str, known: tuple[str, ...], *, storage: bool = False, patient: bool = False
    ) -> RunSeen: ...


class NodeRecord(msgspec.Struct, frozen=True):
    """What a node knows of the run, including its earlier lives.

    Args:
        epoch: the last in which it took part; -1: in none.
        ranks: that it had then.
        recoverable: whether a suffix of each of them, or of all ranks, was complete once.
        lost: it took part, and its record was damaged.
        holds: it holds something of the run, or knows of it, until the run is forgotten.
        epochs: the newest ones that it knows, where each began, and which one it follows (-1: unknown).
        chosen: the iteration to which the start of ``epoch`` was told to go back; -1: none.
    """

    node: str
    epoch: int = -1
    ranks: tuple[int, ...] = ()
    recoverable: bool = False
    lost: bool = False
    holds: bool = False
    epochs: tuple[tuple[int, int, int], ...] = ()
    chosen: int = -1


@dataclass(frozen=True, slots=True)
class RunView:
    """The inventory.

    Attributes:
        cards, ring_bytes, hints: by rank: its node, the size of its snapshots, what earlier trainers learned.
        held, parked, logs: snapshots, parked states and boundary logs, each segment once.
        idle: nodes that answered and have no rank now.
        silent: nodes that took part before and did not answer.
        drawn: a random number, from rank 0.
        durable: the newest checkpoint that all ranks have in storage, as far as any node saw it; -1: none. It
            may be of a history that does not count.
        known_epoch: the highest that any node knows; nothing may have been sealed in it yet.
        stored_epoch: the highest that storage shows; nothing of it may be complete. The next one must be
            above it, but need not follow it.
        facts: by rank, as far as there are any.
        records: of the nodes that answered.
        others: epochs that the newest one does not go back to; ``held``, ``parked`` and ``logs`` have
            nothing of them.
        failures: replays that did not reproduce, as any node knows.
        begun: where the epochs in the records began. What an epoch left behind does not count again
            when its own snapshots are lost: the node that has them may come back, and a suffix would be
            put together from both.
    """

    cards: tuple[NodeCard, ...]
    ring_bytes: tuple[int, ...]
    held: tuple[HeldRecords, ...]
    idle: tuple[NodeCard, ...] = ()
    silent: tuple[str, ...] = ()
    drawn: int = 0
    known_epoch: int = -1
    stored_epoch: int = -1
    durable: int = -1
    parked: tuple[HeldRecords, ...] = ()
    logs: tuple[HeldRecords, ...] = ()
    facts: Mapping[int, RankFacts] = field(default_factory=dict)
    hints: tuple[int, ...] = ()
    records: tuple[NodeRecord, ...] = ()
    others: frozenset[int] = frozenset()
    failures: tuple[ReplayFailure, ...] = ()
    begun: Mapping[int, int] = field(default_factory=dict)

    def last_epoch(self, highest: int) -> int:
        """The highest epoch that was seen, or that a node knows; -1: none."""
        return max(highest, self.known_epoch)

    def next_epoch(self, highest: int) -> int:
        """An epoch above all these, and probably not the one that an absent node begins meanwhile.

        Raises:
            ValueError: there is no higher one.
        """
        return epoch_after(max(self.last_epoch(highest), self.stored_epoch), self.drawn)

    @property
    def usable(self) -> tuple[HeldRecords, ...]:
        """The snapshots that are not quarantined."""
        return without_marked(self.held, self.failures)

    @property
    def newest(self) -> int:
        """The newest iteration of any rank's snapshot or parked state: all before it were done; -1: none."""
        held = (*self.held, *self.parked)
        return max((record.iteration for each in held for record in each.records), default=-1)

    @property
    def epochs(self) -> dict[int, int]:
        """Where epochs began, from all but usable snapshots: records, parked states, logs, quarantine."""
        more = (*self.parked, *self.logs, *(self.held if self.failures else ()))
        records = (record for held in more for record in held.records)
        return epoch_table(records, least_starts(self.begun, reported_epochs(self.failures)))

    def still_wanted(self, at: int | None) -> int | None:
        """The iteration to go back to, unless the last start was told the same: then it is done.

        A launcher starts the same command again after a failure, and few of them say so.
        """
        known = [(record.epoch, record.chosen) for record in self.records if record.epoch not in self.others]
        return None if at is None or max(known, default=(-1, -1))[1] == at else at

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

    @property
    def everybody(self) -> tuple[NodeCard, ...]:
        """The address of each node."""
        return tuple(member.card for member in self.members)

    def was_recoverable(self, complete: Collection[int]) -> bool | None:
        """Whether all ranks of this run could ever go back; None: the nodes that answered do not know.

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
        """Whether any node that answered knows who took part."""
        return any(record.epoch >= 0 for record in self.records)


class RankNote(msgspec.Struct, frozen=True):
    """What a rank contributes about itself.

    Args:
        ring_bytes: the size of its snapshots, as far as it is known.
        hint: what earlier trainers of it learned (``HINT_…``).
        facts: with whom it communicates in a step, as an earlier trainer observed; None: none did.
        alike: ranks whose operators all equal its own, as it is built now.
        unusable: copies of parked states that it could not have: damaged, or out of reach.
    """

    ring_bytes: int = 0
    hint: int = 0
    facts: RankFacts | None = None
    alike: tuple[int, ...] = ()
    unusable: tuple[SnapshotCopy, ...] = ()


class _Here(msgspec.Struct, frozen=True):
    """A rank and its note; ``seen``: its communication was observed, so facts are more than ``alike``."""

    card: NodeCard
    ring_bytes: int
    hint: int
    facts: bytes
    seen: bool
    unusable: tuple[SnapshotCopy, ...]


class _NodeInventory(msgspec.Struct, frozen=True):
    """What one rank reports of its node and of idle ones; ranks for whose node another one speaks report
    nothing. ``wanted``: nodes that took part before, or were asked.
    """

    drawn: int
    cards: list[NodeCard] = []
    held: list[bytes] = []
    epoch: int = -1
    stored_epoch: int = -1
    wanted: list[str] = []
    parked: list[bytes] = []
    logs: list[bytes] = []
    records: list[NodeRecord] = []
    failures: list[ReplayFailure] = []
    durable: int = -1


def see_run(
    session: SeesRun,
    job: str,
    run: str,
    ranks: Collectives,
    *,
    note: RankNote | None = None,
    storage: bool = False,
    patient: bool = False,
) -> RunView:
    """Every rank's node, and what all these nodes hold; one rank per node asks its daemon. A collective call.

    Args:
        note: of this rank.
        storage: include what is durable.
        patient: wait for nodes without a sign of life as long as for others.
    Raises:
        DaemonUnavailable: a node's daemon is away; on every rank.
        RemoteProtocolError: a node reports something impossible.
    """
    note, ranks = note or RankNote(), ranks.on_node(session.card.node)
    # Without an observation, only which ranks have the same operators is known.
    facts = facts_to_wire({ranks.rank: note.facts or RankFacts((), (), note.alike)})
    of_itself = _Here(session.card, note.ring_bytes, note.hint, facts, note.facts is not None, note.unusable)
    here = ranks.gather(of_itself, _Here)
    known = tuple(sorted({h.card.node for h in here}))
    speaks = min(r for r, h in enumerate(here) if h.card.node == session.card.node)
    drawn = secrets.randbelow(DRAWN_EPOCHS)

    def of_node() -> _NodeInventory:
        if ranks.rank != speaks:
            return _NodeInventory(drawn)
        return _inventory(session.see_run(job, run, known, storage=storage, patient=patient), drawn)

    return _view(here, ranks.agree(of_node, _NodeInventory))


def _inventory(seen: RunSeen, drawn: int) -> _NodeInventory:
    holdings = seen.holdings
    return _NodeInventory(
        drawn,
        cards=list(seen.cards),
        held=[to_wire(held_from_segments(h.node, h.segments)) for h in holdings],
        epoch=max((h.epoch for h in holdings if h.node != STORE_NODE), default=-1),
        stored_epoch=max((h.epoch for h in holdings if h.node == STORE_NODE), default=-1),
        wanted=[*(member.card.node for member in seen.members), *seen.silent],
        parked=[to_wire(held_from_segments(h.node, h.parked)) for h in holdings],
        logs=[to_wire(held_from_segments(h.node, h.logs)) for h in holdings],
        records=[_record_of(h) for h in holdings if h.node != STORE_NODE],
        failures=[failure for h in holdings for failure in h.failures],
        durable=max((h.durable for h in holdings), default=-1),
    )


def _record_of(held: Holdings) -> NodeRecord:
    record, anything = held.record, bool(held.segments or held.logs or held.parked)
    if record is None:
        return NodeRecord(held.node, holds=anything)
    ranks = tuple(r for m in record.members if m.card.node == held.node for r in m.ranks)
    known = record.lost or record.newest_epoch > record.forgotten
    epochs = record.epochs[-_EPOCHS_SENT:]
    return NodeRecord(
        held.node,
        record.epoch,
        ranks,
        record.recoverable,
        record.lost,
        known or anything,
        epochs,
        record.chosen,
    )


def _view(here: Sequence[_Here], everybody: Sequence[_NodeInventory]) -> RunView:
    cards = tuple(h.card for h in here)
    held = _once(theirs.held for theirs in everybody)
    parked = _without_unusable(_once(theirs.parked for theirs in everybody), here)
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
        idle=tuple(idle[name] for name in sorted(idle)),
        silent=silent,
        drawn=everybody[0].drawn,
        known_epoch=max(theirs.epoch for theirs in everybody),
        stored_epoch=max(theirs.stored_epoch for theirs in everybody),
        durable=max(theirs.durable for theirs in everybody),
        parked=parked,
        logs=logs,
        facts=_facts_of(here, logs, parked),
        hints=tuple(h.hint for h in here),
        records=tuple(records.values()),
        others=history.others,
        failures=tuple(dict.fromkeys(f for theirs in everybody for f in theirs.failures)),
        begun=history.begun,
    )


def _once(by_rank: Iterable[Sequence[bytes]]) -> tuple[HeldRecords, ...]:
    """What all nodes report, each segment once."""
    held: dict[tuple[str, str], HeldRecords] = {}
    for theirs in by_rank:
        for records in theirs:
            held.update({(h.node, h.segment): h for h in from_wire(records)})
    return tuple(held.values())


def _without_unusable(parked: tuple[HeldRecords, ...], here: Iterable[_Here]) -> tuple[HeldRecords, ...]:
    """A state that one rank could not use counts for none: the ranks of a domain begin at one iteration, so
    another plan is needed anyway.
    """
    unusable = {source for h in here for source in h.unusable}
    if not unusable:
        return parked

    def usable(held: HeldRecords) -> tuple[SlotRecord, ...]:
        return tuple(
            r for r in held.records if SnapshotCopy(held.node, held.segment, r.index) not in unusable
        )

    return tuple(replace(held, records=usable(held)) for held in parked)


def _facts_of(
    here: Sequence[_Here], logs: Sequence[HeldRecords], parked: Sequence[HeldRecords]
) -> Mapping[int, RankFacts]:
    """Facts of the ranks that have some, or lost them but not their logs. None: all may communicate."""
    found = facts_from_wire([h.facts for h in here])
    observed = {rank: facts for rank, facts in found.items() if here[rank].seen}
    for rank, facts in facts_from_logs(found.keys() - observed.keys(), logs, parked).items():
        # As it is built now, too.
        same = tuple(sorted({*facts.alike} & {*found[rank].alike}))
        observed[rank] = RankFacts(facts.neighbours, facts.domain, same)
    if observed:
        return observed
    everybody = tuple(range(len(here)))
    return {rank: RankFacts((), everybody, facts.alike) for rank, facts in found.items()}
