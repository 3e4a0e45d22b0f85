"""Replicas of boundary logs: what is sent, which slot it gets, and when a replica may go. Pure.

The sender is a `Replicator` as for snapshots, with one difference: the log of an iteration is complete by
itself. So a target needs every log that the primary holds, oldest first. To the core each log is a snapshot
that anchors the only operator and links to nothing (`as_sent`). The floor of the run does not wait for logs.

The host follows the primary: it gives away what is older than the oldest log of the primary, and nothing
else that counts. A replica with as many slots as its primary therefore has room for every log of the primary,
and the trainer alone decides what stays (`ckptd.core.slots.boundary`). When the primary is lost, the replica
stays as it is until the floor has passed it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ckptd.core.replication.replicas import Admit, Deny
from ckptd.core.replication.replicator import Replicator
from ckptd.core.replication.target import Effect, Event
from ckptd.core.slots.boundary import choose_log_slot, logged_iterations, outdated
from ckptd.core.slots.slots import NO_EPOCHS, Note, SlotRecord, epoch_table


class LogReplicator(Replicator):
    """Sends one rank's boundary log to its targets."""

    def __init__(self) -> None:
        super().__init__(independent=True)

    def handle(self, event: Event, *, now_s: float) -> list[Effect]:
        """As `Replicator.handle`, but that of the snapshots alone notes the loss of a peer."""
        effects: list[Effect] = []
        for effect in super().handle(event, now_s=now_s):
            if not isinstance(effect, Note):
                effects.append(effect)
            elif effect.kind != "replication_peer_lost":
                effects.append(replace(effect, message=f"boundary log: {effect.message}"))
        return effects


def as_sent(records: Iterable[SlotRecord]) -> tuple[SlotRecord, ...]:
    """The sealed logs that count, in the form that the replicator expects."""
    return tuple(as_whole(record) for record in logged_iterations(records).values() if record.sealed)


def as_whole(record: SlotRecord) -> SlotRecord:
    """A log in the form of a snapshot that is complete by itself."""
    return replace(record, anchors=1, previous=-1)


def oldest_held(records: Iterable[SlotRecord], generation: int) -> int:
    """The oldest iteration of this generation of the primary whose log counts; -1: none."""
    counting = logged_iterations(records).values()
    return min((r.iteration for r in counting if r.generation == generation), default=-1)


def admit_log(
    incoming: SlotRecord,
    records: Iterable[SlotRecord],
    *,
    oldest: int,
    epochs: Mapping[int, int] = NO_EPOCHS,
    busy: Collection[int] = (),
) -> Admit | Deny:
    """Choose the slot of a replica for the log of an iteration.

    Args:
        incoming: its header; generation, index and state do not matter.
        records: the slots of the replica, all of one generation.
        oldest: the primary has given away what is older; -1: not known.
        epochs: the epochs known to this node and their starts.
        busy: slots (by index) that a reader holds.
    """
    table = list(records)
    known = epoch_table([*(r for r in table if r.sealed), incoming], epochs)
    if outdated(incoming, known):
        return Deny("stale", f"iteration {incoming.iteration} was run again since")
    for record in table:
        if record.sealed and record.fill == incoming.fill:
            if record.header_digest == incoming.header_digest:
                return Deny("held", f"the log of iteration {record.iteration} is in slot {record.index}")
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


def outdated_slots(records: Iterable[SlotRecord], epochs: Mapping[int, int] = NO_EPOCHS) -> list[int]:
    """The sealed slots, by index, whose iteration was run again in a later epoch, to be freed."""
    table = [record for record in records if record.sealed]
    known = epoch_table(table, epochs)
    return [record.index for record in table if outdated(record, known)]


def why_log_removable(
    records: Iterable[SlotRecord],
    floor: int,
    *,
    epochs: Mapping[int, int] = NO_EPOCHS,
    span: int = 1,
) -> str:
    """The reason why this replica is not needed any more, or ""; the caller skips those that a peer has open.

    A log has more slots than there are iterations from the start to the end of a suffix. So no suffix that
    ends at the floor or later begins that many iterations before the floor.

    Args:
        records: every slot of the replica.
        floor: of the run; -1: not known, and everything that counts stays.
    """
    table = list(records)
    counting = logged_iterations([record for record in table if record.sealed], epochs)
    if not counting:
        return "it holds nothing that counts"
    newest = max(counting)
    if floor - max(len(table), span) > newest:
        return f"it ends at iteration {newest}, and every rank has a suffix up to {floor}"
    return ""
