"""A replicator whose peers answer at once, so that a test sees in which order snapshots go where."""

from __future__ import annotations

from collections.abc import Iterable

from ckptd.core.replication.replicator import Replicator
from ckptd.core.replication.target import (
    Begin,
    BeginRefused,
    Effect,
    Event,
    Granted,
    OpenRefused,
    OpenTarget,
    Put,
    PutEnded,
    Seal,
    SealedThere,
    TargetOpened,
    Targets,
)
from ckptd.core.slots.slots import Note, SlotRecord, SnapshotKey, key_of

__all__ = ["Driven"]


class Driven:
    """A replicator whose peers do what they are asked, and keep what they were sent.

    Attributes:
        deaf: nodes that answer nothing.
        refuse: the code with which all refuse a lease; empty: they give one.
        begun, sent: iterations, and (node, iteration) of what was sealed there, in order.
    """

    def __init__(self, core: Replicator, *nodes: str) -> None:
        self.core, self.now_s = core, 0.0
        self.held: dict[str, dict[SnapshotKey, SlotRecord]] = {node: {} for node in nodes}
        self.deaf: set[str] = set()
        self.refuse = ""
        self.begun: list[int] = []
        self.sent: list[tuple[str, int]] = []
        self.notes: list[Note] = []
        self.feed(Targets(nodes))

    def keeps(self, node: str, records: Iterable[SlotRecord]) -> None:
        """What this peer has held all along."""
        self.held[node] = {key_of(record): record for record in records}

    def feed(self, event: Event) -> list[Effect]:
        """The effects of the event, after the peers have answered them."""
        effects = self.core.handle(event, now_s=self.now_s)
        for effect in effects:
            self._answer(effect)
        return effects

    def _answer(self, effect: Effect) -> None:
        match effect:
            case OpenTarget(node) | Begin(node) if node in self.deaf:
                pass
            case OpenTarget(node, generation) if self.refuse:
                self.feed(OpenRefused(node, generation, self.refuse, "said the test"))
            case OpenTarget(node, generation):
                self.feed(TargetOpened(node, generation, 1, tuple(self.held[node].values())))
            case Begin(node, key, record):
                self.begun.append(key.iteration)
                self._begin(node, key, record)
            case Put(node, key):
                self.feed(PutEnded(node, key, True, ""))
            case Seal(node, key):
                self.sent.append((node, key.iteration))
                self.feed(SealedThere(node, key))
            case Note():
                self.notes.append(effect)

    def _begin(self, node: str, key: SnapshotKey, record: SlotRecord) -> None:
        if key in self.held[node]:
            self.feed(BeginRefused(node, key, "held", "it is here"))
        else:
            self.held[node][key] = record
            self.feed(Granted(node, key, "grant"))
