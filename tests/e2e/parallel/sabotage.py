"""For negative controls: a restore that leaves something out. ``job.py --leave-out <what>`` calls
one of these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ckptd.client.model.snapshot_layout import EntrySource, Rows
from ckptd.client.parking.park_memory import CopiedImage
from ckptd.client.pipeline.boundary_log import BoundaryLog
from ckptd.client.pipeline.upstream_feed import FedLogs
from ckptd.client.recovery import replay
from ckptd.client.recovery.replay import Replay
from ckptd.client.recovery.replica_broadcast import ReplicaBroadcast, Take
from ckptd.client.recovery.snapshot_loading import Activity, SnapshotLoader
from ckptd.core.slots.boundary import RecordKey, SentKind

__all__ = ["LEAVE_OUT"]


def _frozen_weights() -> None:
    """The recorded weights of one frozen parameter are never loaded: it keeps what the new process
    began with.
    """
    original = SnapshotLoader.pieces
    victims: list[str] = []

    def without(self: SnapshotLoader, source: EntrySource, wanted: Rows, also: Rows) -> list[EntrySource]:
        frozen, binding = self.activity.frozen_rows, self.binding
        if not victims:
            victims.extend(n for n in frozen if binding.num_rows(n) and n in binding.owner)
        if source.kind == "param" and source.name == victims[0]:
            wanted = {} if wanted.get(source.name) == frozen.get(source.name) else wanted
            also = {}
        return original(self, source, wanted, also)

    SnapshotLoader.pieces = without  # type: ignore[method-assign]


def _random_state() -> None:
    """The random generators are not set at the first replayed step."""

    def nothing(state: Any) -> None: ...

    replay.restore_rng = nothing  # type: ignore[attr-defined]


def _determinism() -> None:
    """Each replayed step ends with other weights than the last time it was replayed."""
    original = Replay.after_optimizer_step

    def noisy(self: Replay, optimizer: int) -> None:
        original(self, optimizer)
        noise = int.from_bytes(os.urandom(4), "little") * 1e-12
        with torch.no_grad():
            for param in self._binding.params.values():
                param.add_(noise)

    Replay.after_optimizer_step = noisy  # type: ignore[method-assign]


def _elsewhere() -> None:
    """What another rank updates is taken for this rank's: active, and compared, once this rank's
    anchor was reached.
    """
    for owner, name in ((Activity, "_note_frozen"), (Replay, "_compare")):
        setattr(owner, name, _believing_in_itself(getattr(owner, name)))


def _believing_in_itself(method: Callable[..., Any]) -> Callable[..., Any]:
    def without(self: Activity | Replay, *args: Any) -> Any:
        kept, self._binding.elsewhere = self._binding.elsewhere, frozenset()
        try:
            return method(self, *args)
        finally:
            self._binding.elsewhere = kept

    return without


def _handed_weights() -> None:
    """What this rank is handed of one frozen parameter is lost."""
    original = ReplicaBroadcast.hand
    victims: list[str] = []

    def without(self: ReplicaBroadcast, mine: Any, take: Take, **among: Any) -> set[str]:
        def some(source: EntrySource, data: Tensor) -> None:
            if source.kind == "param" and not victims:
                victims.append(source.name)
            if source.kind != "param" or source.name != victims[0]:
                take(source, data)

        return original(self, mine, some, **among)

    ReplicaBroadcast.hand = without  # type: ignore[method-assign]


def _one_record() -> None:
    """One activation of each iteration is not logged: the first of micro-batch 1."""
    original = BoundaryLog.sent

    def without(
        self: BoundaryLog,
        kind: SentKind,
        stage: int,
        micro_batch: int,
        tensors: Sequence[Tensor],
        peers: Sequence[int] = (),
    ) -> None:
        if (kind, micro_batch) != (SentKind.ACTIVATION, 1):
            original(self, kind, stage, micro_batch, tensors, peers)

    BoundaryLog.sent = without  # type: ignore[method-assign]


def _handed_state() -> None:
    """What this rank is handed of the optimizer's state when replay ends is damaged."""
    original = SnapshotLoader.take

    def damaged(self: SnapshotLoader, piece: EntrySource, data: Tensor) -> None:
        original(self, piece, data + 1 if _all_active(self) and piece.kind == "optim" else data)

    SnapshotLoader.take = damaged  # type: ignore[method-assign]


def _all_active(loader: SnapshotLoader) -> bool:
    return loader.activity.active == loader.activity.everything


def _group_options() -> None:
    """This rank finds out that it cannot load what it has recorded."""

    def refused(binding: Any, groups: Any) -> None:
        raise ValueError("these groups are not those")

    replay.apply_groups = refused  # type: ignore[attr-defined]


def _fed_record() -> None:
    """One activation or gradient of each iteration is not in what this rank is fed."""
    _feed(lambda record: None)


def _fed_bits() -> None:
    """One activation or gradient of each iteration that this rank is fed is not what was sent."""
    _feed(lambda record: record + 1)


def _feed(instead: Callable[[Tensor], Tensor | None]) -> None:
    original = FedLogs.__call__

    def fed(self: FedLogs, neighbour: int, iteration: int) -> dict[RecordKey, Tensor]:
        found = original(self, neighbour, iteration)
        key = min((key for key in found if key.kind is not SentKind.VALUE), key=str)
        record = instead(found.pop(key))
        return found if record is None else {**found, key: record}

    FedLogs.__call__ = fed  # type: ignore[method-assign]


def _parked_weight() -> None:
    """One parameter of the parked state is not loaded."""
    original = SnapshotLoader.targets
    victims: list[str] = []

    def without(self: SnapshotLoader, image: Any, source: EntrySource, *others: Any, **named: Any) -> Any:
        if source.kind == "param" and _all_active(self):
            victims.append(source.name)
            if source.name == victims[0]:
                return []
        return original(self, image, source, *others, **named)

    SnapshotLoader.targets = without  # type: ignore[method-assign]


def _own_buffers() -> None:
    """A rank that copies a peer's state keeps the peer's buffers, too."""
    CopiedImage._take_buffers = lambda self: None  # type: ignore[method-assign]


LEAVE_OUT: dict[str, Callable[[], None]] = {
    "frozen weights": _frozen_weights,
    "random state": _random_state,
    "determinism": _determinism,
    "elsewhere": _elsewhere,
    "handed weights": _handed_weights,
    "one record": _one_record,
    "group options": _group_options,
    "handed state": _handed_state,
    "fed record": _fed_record,
    "fed bits": _fed_bits,
    "parked weight": _parked_weight,
    "own buffers": _own_buffers,
}
