"""Replicas of boundary logs, decided: what is sent, which slot it gets, and when a replica may go (pure).

Who sends is a `Replicator` as for snapshots, with one difference: an iteration's log needs no
others, so a target needs whatever the primary holds, oldest first, and there is no suffix that
would come first. To the core each is therefore a snapshot that anchors the only operator and links
to nothing (`as_sent`). The floor of the run does not wait for logs.

The host follows the primary: what is older than the oldest log that the primary holds is given
away, and nothing else that counts. So a replica with as many slots as its primary has room for all
that the primary holds, and it is the trainer who decides what stays (`ckptd.core.slots.boundary`).
When the primary is lost, the replica stays as it is until the floor has left it behind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ckptd.core.replication.copies import Copies
from ckptd.core.replication.replicas import Admit, Deny
from ckptd.core.replication.replicator import Replicator
from ckptd.core.replication.target import Effect, Event, ReplicationConfig, ReplicationTarget
from ckptd.core.slots.boundary import choose_log_slot, logged_iterations, outdated
from ckptd.core.slots.ring import SlotRecord, epoch_table
from ckptd.core.slots.slots import Note

__all__ = [
    "LogReplicator",
    "admit_log",
    "as_sent",
    "as_whole",
    "oldest_held",
    "outdated_slots",
    "why_log_removable",
]

Key = tuple[int, int]
_NO_EPOCHS: Mapping[int, int] = {}
_PEER_LOST = "replication_peer_lost"


class _LogCopies(Copies):
    """Logs need no others: a target needs all of them."""

    def doubt_newer(self, target: ReplicationTarget, record: SlotRecord) -> None:
        """Nothing: a host gives away what is older than the primary's oldest, never what is newer."""

    def needed(self, target: ReplicationTarget) -> list[SlotRecord]:
        """Everything that is here."""
        return [self.local[iteration] for iteration in sorted(self.local)]


class LogReplicator(Replicator):
    """One rank's boundary log on its way to its targets; see the module."""

    def __init__(self, config: ReplicationConfig | None = None) -> None:
        super().__init__(config, copies=_LogCopies())

    def handle(self, event: Event, *, now_s: float) -> list[Effect]:
        """As `Replicator.handle`. That a peer is lost is told once, by the replicator of the snapshots."""
        effects = super().handle(event, now_s=now_s)
        return [_of_a_log(e) for e in effects if not (isinstance(e, Note) and e.kind == _PEER_LOST)]


def as_sent(records: Iterable[SlotRecord]) -> tuple[SlotRecord, ...]:
    """The sealed logs that count, as the replicator is to see them."""
    counting = logged_iterations(records).values()
    return tuple(as_whole(record) for record in counting if record.sealed)


def as_whole(record: SlotRecord) -> SlotRecord:
    """A log as a snapshot that needs no others."""
    return replace(record, anchors=1, previous=-1)


def oldest_held(records: Iterable[SlotRecord], generation: int) -> int:
    """The oldest iteration whose log counts and lies in this generation of the primary; -1: none."""
    counting = logged_iterations(records).values()
    return min((r.iteration for r in counting if r.generation == generation), default=-1)


def admit_log(
    incoming: SlotRecord,
    records: Iterable[SlotRecord],
    *,
    oldest: int,
    epochs: Mapping[int, int] = _NO_EPOCHS,
    busy: Collection[int] = (),
) -> Admit | Deny:
    """The slot of a replica for the log of an iteration.

    Args:
        incoming: its header; generation, index and state do not matter.
        records: the slots of the replica, all of one generation.
        oldest: what is older the primary has given away; -1: not told.
        epochs: the epochs known to this node and their starts.
        busy: slots (by index) that a reader holds.
    """
    table = list(records)
    known = epoch_table([*(r for r in table if r.sealed), incoming], epochs)
    if outdated(incoming, known):
        return Deny("stale", f"iteration {incoming.iteration} was run again since")
    for record in table:
        if record.sealed and _same_fill(record, incoming):
            if record.header_digest == incoming.header_digest:
                text = f"the log of iteration {record.iteration} is in slot {record.index}"
                return Deny("held", text)
            if record.index not in busy:
                return Admit(record.index, "what is here under this name is another image")
    if not table:
        return Deny("busy", "the replica has no slot that can be read")
    generation = table[0].generation
    choice = choose_log_slot(
        table,
        generation,
        needed_from=max(oldest, 0),
        busy={(generation, index) for index in busy},
        epochs=known,
    )
    if choice.record is None:
        return Deny("busy", f"the primary holds all of this, or it is being read (from {oldest} on)")
    return Admit(choice.record.index, choice.reason, choice.releases)


def outdated_slots(records: Iterable[SlotRecord], epochs: Mapping[int, int] = _NO_EPOCHS) -> list[int]:
    """The sealed slots, by index, with what was run again in a later epoch: to be freed."""
    table = [record for record in records if record.sealed]
    known = epoch_table(table, epochs)
    return [record.index for record in table if outdated(record, known)]


def why_log_removable(
    records: Iterable[SlotRecord],
    floor: int,
    *,
    epochs: Mapping[int, int] = _NO_EPOCHS,
    span: int = 1,
) -> str:
    """Why nothing will need this replica, or "". Who calls passes over those that a peer has open.

    A log has more slots than there are iterations between the start and the end of a suffix, so
    that none which ends at the floor or later begins so many iterations before it.

    Args:
        records: every slot of the replica.
        floor: of the run; -1: not known, and everything that counts stays.
    """
    table = list(records)
    sealed = [record for record in table if record.sealed]
    counting = logged_iterations(sealed, epochs)
    if not counting:
        return "it holds nothing that counts"
    newest = max(counting)
    if floor - max(len(table), span) > newest:
        return f"it ends at iteration {newest}, and every rank has a suffix up to {floor}"
    return ""


def _of_a_log(effect: Effect) -> Effect:
    if isinstance(effect, Note):
        return replace(effect, message=f"boundary log: {effect.message}")
    return effect


def _same_fill(a: SlotRecord, b: SlotRecord) -> bool:
    return (a.iteration, a.epoch, a.sequence) == (b.iteration, b.epoch, b.sequence)
