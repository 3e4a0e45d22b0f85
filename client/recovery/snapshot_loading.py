"""Recorded tensors and optimizer state, loaded into the live training state.

`SnapshotLoader` loads the snapshots of a suffix one after the other, and knows which operators are
*active*: their anchors were reached. All other rows are *frozen*: of them only compute weights are
recorded, and loaded with each snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ckptd.client.capture.step_state import apply_packed, zero_grads
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.operators import Operator, ParameterRows, buffers_of_experts
from ckptd.client.model.snapshot_layout import (
    DTYPES,
    EntrySource,
    Rows,
    common,
    merge,
    rows_of_piece,
    rows_within,
)
from ckptd.client.optimizers.value_trees import part_of, plain_tensor
from ckptd.client.recovery.replica_broadcast import Piece, ReplicaBroadcast
from ckptd.core.snapshot_policy import PartialScope
from ckptd.cuda.engine import CopyEngine, CopyItem

_EVERY_KIND = frozenset({"param", "master", "optim", "buffer", "packed"})
# What older partial snapshots have of an expert that newer ones lack.
_KINDS = {
    PartialScope.BOTH: _EVERY_KIND,
    PartialScope.OPTIMIZER: frozenset({"optim"}),
    PartialScope.WEIGHTS: frozenset({"param", "master", "buffer"}),
}


class Activity:
    """The active operators of one rank, and the frozen rows; operators are bits, by number.

    Attributes:
        active: the operators whose anchors were reached.
        frozen_rows: by parameter.
        whole: everything was active from the start, on all ranks: nothing is frozen, not even what
            another rank updates.
    """

    def __init__(self, binding: LiveState, operators: Sequence[Operator]) -> None:
        self._binding, self._operators = binding, operators
        self.everything = (1 << len(operators)) - 1
        self.active = 0
        self.frozen_rows: Rows = {}
        self.whole = False

    def activate(self, anchors: int) -> int:
        """Activate these operators; returns those that were not active before."""
        fresh = anchors & ~self.active
        self.active |= anchors
        self._note_frozen()
        return fresh

    def begin(self, *, dense: bool) -> None:
        """The first snapshot is loaded; ``dense``: it anchors everything, on all ranks."""
        self.whole = dense
        self._note_frozen()

    def rows_of(self, operators: int) -> Rows:
        """The rows that these operators consist of."""
        rows: Rows = {}
        for i, op in enumerate(self._operators):
            if operators >> i & 1:
                for m in op.members:
                    rows.setdefault(m.param, []).append(m.range(self._binding.num_rows(m.param)))
        return {name: merge(ranges) for name, ranges in rows.items()}

    def never_frozen(self) -> Rows:
        """What every snapshot anchors, whatever operators it names (see ``LiveState.inseparable``)."""
        return {n: self._all_of(n) for n in self._binding.inseparable}

    def active_rows(self) -> Rows:
        """The rows whose whole state was loaded, or computed from such rows."""
        return {
            name: rows
            for name, rows in self.rows_of(self.active).items()
            if self.whole or name not in self._binding.elsewhere
        } | self.never_frozen()

    def is_frozen(self, name: str) -> bool:
        """Whether the whole parameter is frozen. A partly frozen fused tensor is stepped, and overwritten."""
        return self.frozen_rows.get(name, []) == self._all_of(name)

    @property
    def masters_unknown(self) -> bool:
        """Whether masters are frozen: then buffers may be wrong, too, as the scale of an FP8 weight is,
        which the loop computes from its master.
        """
        return not self._binding.masters.keys().isdisjoint(self.frozen_rows)

    def split_params(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters whose gradients are wanted, and those that are frozen as a whole.

        The gradient of one that no optimizer holds may be that of a master which we do not know as such.
        """
        active: list[Tensor] = []
        frozen: list[Tensor] = []
        for name, param in self._binding.params.items():
            if param.requires_grad and param.is_leaf:
                drops = name in self._binding.owner and self.is_frozen(name)
                (frozen if drops else active).append(param)
        return active, frozen

    def _note_frozen(self) -> None:
        self.frozen_rows = self.rows_of(self.everything & ~self.active)
        for name in () if self.whole else self._binding.elsewhere:
            self.frozen_rows[name] = self._all_of(name)
        for name in self.never_frozen():
            self.frozen_rows.pop(name, None)

    def _all_of(self, name: str) -> list[tuple[int, int]]:
        return [(0, self._binding.num_rows(name))]


class SnapshotLoader:
    """Loads snapshots into ``binding``, oldest first.

    Args:
        broadcast: between the ranks that share replicated operators; None if each rank has recorded
            all of its own.
        scope: of partial snapshots; None: of others.
    Attributes:
        bytes_loaded: from this rank's snapshots and from other ranks.
        anchored_at: of partial snapshots: the iteration from which each operator was loaded.
    """

    def __init__(
        self,
        binding: LiveState,
        operators: Sequence[Operator],
        engine: CopyEngine,
        broadcast: ReplicaBroadcast | None = None,
        scope: PartialScope | None = None,
    ) -> None:
        self.binding, self.operators, self._engine = binding, operators, engine
        self._scope = scope
        # What is captured of an operator that is not anchored.
        self._of_frozen = {"param", "optim"} if scope is PartialScope.WEIGHTS else {"param"}
        self.anchored_at: dict[int, int] = {}
        self._begun: set[str] = set()  # names of parameters of which partial snapshots gave some rows
        self.broadcast = broadcast or ReplicaBroadcast(-1, ())
        self.activity = Activity(binding, operators)
        self.bytes_loaded = 0

    def load(self, image: SnapshotImage, scalars: Mapping[str, Any], *, everything: bool) -> None:
        """Load the anchors of operators that are not active yet, and the compute weights of those that stay
        frozen. A collective call if ranks share operators.

        Args:
            everything: also load buffers, and what every snapshot anchors. Buffers that were computed while
                masters were frozen are loaded in any case.
        """
        activity, binding = self.activity, self.binding
        all_buffers = everything or activity.masters_unknown
        buffers = [*map(ParameterRows, binding.planned_buffers())] if all_buffers else []
        fresh = activity.activate(self.broadcast.anchors(image))
        wanted = activity.rows_of(fresh)
        if everything:
            wanted.update(activity.never_frozen())
        absent = set(scalars["absent"])
        self.bytes_loaded += self._restore(image, wanted, activity.frozen_rows, absent, buffers=buffers)
        absent |= self.broadcast.hand(
            lambda of: self._to_send(image, of, fresh, ~activity.active, scalars["absent"], None), self.take
        )
        for name in absent & wanted.keys() & binding.owner.keys():  # a process that restarts may have it
            binding.keeper(name).state.pop(binding.held(name), None)
        self._round_frozen_masters()
        kept = binding.owner.keys() - binding.elsewhere
        stateful = kept if self._scope is PartialScope.WEIGHTS else kept & wanted.keys()
        names = [n for n in binding.owner if n in stateful]
        self._load_scalar_state(image, scalars, [n for n in names if n not in absent])
        binding.kept.load(scalars.get("kept"), names)
        zero_grads(binding, scalars["grads"], binding.params if self._scope else wanted)
        self._note_anchors(image, fresh)
        self._begun.update(wanted)

    def fill(self, image: SnapshotImage, scalars: Mapping[str, Any], alone: int | None = None) -> None:
        """Load from an older partial snapshot what newer ones lack. A collective call as `load`.

        Args:
            alone: bitmap of the only operators to load; no other rank holds them: this is no collective call.
        """
        activity, binding, scope = self.activity, self.binding, self._scope
        fresh = activity.activate(self.broadcast.anchors(image) if alone is None else image.anchors & alone)
        wanted, absent = activity.rows_of(fresh), set(scalars["absent"])
        kinds = _KINDS[scope] if scope is not None else frozenset()
        experts = [op for i, op in enumerate(self.operators) if fresh >> i & 1]
        buffers = buffers_of_experts(experts, binding.planned_buffers(), binding.num_rows)
        self.bytes_loaded += self._restore(image, wanted, {}, absent, buffers=buffers, kinds=kinds)
        if alone is None:
            absent |= self.broadcast.hand(
                lambda of: self._to_send(image, of, fresh, 0, scalars["absent"], None, kinds), self.take
            )
        # Of a fused tensor, the newest snapshot with some of its rows has what is not per row.
        names = [n for n in wanted if n not in self._begun and n in binding.owner.keys() - binding.elsewhere]
        if scope is not PartialScope.WEIGHTS:
            for name in absent.intersection(names):
                binding.keeper(name).state.pop(binding.held(name), None)
            self._load_scalar_state(image, scalars, [n for n in names if n not in absent])
            binding.kept.load_entries(scalars.get("kept"), names)
        self._note_anchors(image, fresh)
        self._begun.update(wanted)

    def _note_anchors(self, image: SnapshotImage, fresh: int) -> None:
        if self._scope is not None:
            found = (i for i in range(len(self.operators)) if fresh >> i & 1)
            self.anchored_at.update(dict.fromkeys(found, image.iteration))

    def load_updated(self, image: SnapshotImage, optimizer: int) -> None:
        """Load the frozen weights that this optimizer would have updated; a collective call like `load`.

        Only these: an optimizer of this rank alone may step when those of other ranks do not.
        """
        owner, activity = self.binding.owner, self.activity
        owned = frozenset(n for n in owner if owner[n][0] == optimizer)
        frozen = {n: rows for n, rows in activity.frozen_rows.items() if n in owned}
        self._restore(image, {}, frozen, set())
        stepped = frozenset(
            i for i, op in enumerate(self.operators) if any(m.param in owned for m in op.members)
        )
        self.broadcast.hand(
            lambda of: self._to_send(image, of, 0, activity.everything, (), owned), self.take, among=stepped
        )
        self._round_frozen_masters()

    def pieces(self, source: EntrySource, wanted: Rows, also: Rows) -> list[EntrySource]:
        """The parts of an entry that cover wanted rows."""
        total = self.binding.num_rows(source.name)
        low, high = source.range(total)
        pieces = []
        for a, b in (*wanted.get(source.name, ()), *also.get(source.name, ())):
            start, stop = max(a, low), min(b, high)
            # A rank may have an empty shard: nothing to load, but the optimizer expects its (empty) state.
            if start < stop or total == 0:
                whole = source.start is None and (start, stop) == (0, total)
                rows = (None, None) if whole else (start, stop)
                pieces.append(replace(source, start=rows[0], stop=rows[1]))
        return pieces

    def take(self, piece: EntrySource, data: Tensor) -> None:
        """Write what another rank has recorded into the live tensors."""
        binding = self.binding
        if piece.kind == "optim":
            live = self._state_tensor(piece, data)
        else:
            live = (binding.params if piece.kind == "param" else binding.masters)[piece.name]
        with torch.no_grad():
            rows_of_piece(local(live), piece).copy_(data)
        self.bytes_loaded += data.numel() * data.element_size()

    def targets(
        self,
        image: SnapshotImage,
        source: EntrySource,
        entry: str,
        wanted: Rows,
        frozen: Rows,
        *,
        buffers: Sequence[ParameterRows],
    ) -> list[tuple[EntrySource, Tensor]]:
        """The parts of an entry to load, each with the live tensor that it is loaded into."""
        binding = self.binding
        if source.kind == "buffer":
            rows = [r for r in buffers if r.param == source.name]
            live = binding.buffers()[source.name] if rows else None
            return [(replace(source, start=r.start, stop=r.stop), live) for r in rows if live is not None]
        if source.kind == "param":
            return [(p, binding.params[source.name]) for p in self.pieces(source, wanted, frozen)]
        if source.kind == "master":
            # Of frozen masters, only those that another rank updates are in every snapshot.
            also = {n: rows for n, rows in frozen.items() if n in binding.elsewhere}
            return [(p, binding.masters[source.name]) for p in self.pieces(source, wanted, also)]
        if source.kind == "optim":
            pieces = self.pieces(source, wanted, frozen if "optim" in self._of_frozen else {})
            return [(p, self._state_tensor(source, image.tensor(entry))) for p in pieces]
        return []

    def _restore(
        self,
        image: SnapshotImage,
        wanted: Rows,
        frozen: Rows,
        absent: set[str],
        *,
        buffers: Sequence[ParameterRows] = (),
        kinds: frozenset[str] = _EVERY_KIND,
    ) -> int:
        """Copy anchors of ``wanted`` rows and compute weights of ``frozen`` ones; returns how many bytes.

        Args:
            absent: parameters that have no optimizer state: the image holds zeros in its place.
        """
        items = [
            _copy_item(image, piece, source, entry, live)
            for source, entry in image.sources()
            if source.kind in kinds
            if source.kind != "optim" or source.name not in absent
            for piece, live in self.targets(image, source, entry, wanted, frozen, buffers=buffers)
        ]
        self._engine.restore(items, image.memory, image.base)
        return sum(i.nbytes for i in items)

    def _to_send(
        self,
        image: SnapshotImage,
        operators: frozenset[int],
        fresh: int,
        frozen: int,
        absent: Sequence[str],
        only: frozenset[str] | None,
        kinds: frozenset[str] = _EVERY_KIND,
    ) -> tuple[list[Piece], set[str]]:
        """What an image holds of some operators, for the ranks that share them.

        Args:
            fresh: bitmap of operators whose anchors are sent.
            frozen: bitmap of operators whose compute weights are sent.
            only: the parameters whose compute weights are sent; None: all.
        Returns:
            The parts, and the parameters among them that have no optimizer state.
        """
        mask, rows_of = sum(1 << i for i in operators), self.activity.rows_of
        wanted, also = rows_of(fresh & mask), rows_of(frozen & mask & ~fresh)
        # The rows of a parameter that other operators froze are not ours to send.
        also = {
            n: common(rows, self.activity.frozen_rows.get(n, []))
            for n, rows in also.items()
            if only is None or n in only
        }
        pieces = [p for p in self._recorded_pieces(image, wanted, also, absent) if p[0].kind in kinds]
        return pieces, {n for n in absent if n in wanted}

    def _recorded_pieces(
        self, image: SnapshotImage, wanted: Rows, also: Rows, absent: Sequence[str]
    ) -> Iterator[Piece]:
        for source, entry in image.sources():
            if source.kind not in ("param", "master", "optim"):
                continue
            if source.kind == "optim" and source.name in absent:
                continue
            pieces = self.pieces(source, wanted, also if source.kind in self._of_frozen else {})
            if pieces:
                recorded = image.tensor(entry)
                yield from ((piece, rows_within(recorded, piece, source)) for piece in pieces)

    def _state_tensor(self, source: EntrySource, recorded: Tensor) -> Tensor:
        """The live optimizer state for a recorded tensor, created where it does not exist yet."""
        held = self.binding.held(source.name)
        state = self.binding.keeper(source.name).state[held]
        found = part_of(state, source.key)
        if not isinstance(found, Tensor):
            if source.start is None and recorded.shape != local(held).shape:
                found = torch.empty_like(recorded, device=held.device)
            else:
                model = local(held) if ":" in source.key else held
                # All rows of a whole tensor are about to be loaded: zeros would be written for nothing. But
                # of a weight of another class, only `zeros_like` gives what optimizers have.
                is_whole = source.start is None and plain_tensor(model)
                make = torch.empty_like if is_whole else torch.zeros_like
                found = make(model, dtype=recorded.dtype, requires_grad=False)
            # A part of a tensor that does not exist yet stands beside it until `KeptState` makes that of it.
            state[source.key] = found
        return found

    def _load_scalar_state(
        self, image: SnapshotImage, scalars: Mapping[str, Any], names: Sequence[str]
    ) -> None:
        """Load 0-dimensional and plain state of these parameters; the key order is the optimizer's own."""
        layout = image.state_layout()
        packed = {s.dtype: image.tensor(entry) for s, entry in image.sources() if s.kind == "packed"}
        for name in names:
            held, keeper = self.binding.held(name), self.binding.keeper(name)
            state = keeper.state[held]
            for key, (dtype, on_host) in layout["scalars"].get(name, {}).items():
                if not isinstance(part_of(state, key), Tensor):
                    device = "cpu" if on_host else held.device
                    state[key] = torch.zeros((), dtype=DTYPES[dtype], device=device)
            state.update(scalars["python"].get(name, {}))
            ordered = {k: state[k] for k in layout["keys"].get(name, ()) if k in state}
            keeper.state[held] = ordered | {k: v for k, v in state.items() if k not in ordered}
        apply_packed(self.binding, packed, names, layout["packed"])

    def _round_frozen_masters(self) -> None:
        """Set frozen masters to the rounded weight: the user's own copy-back then does not change it."""
        binding = self.binding
        with torch.no_grad():
            for name, ranges in self.activity.frozen_rows.items():
                if name not in binding.masters or name in binding.elsewhere:
                    continue
                master, param = local(binding.masters[name]), local(binding.params[name])
                for start, stop in ranges:
                    if param.ndim:
                        master[start:stop].copy_(param[start:stop])
                    else:
                        master.copy_(param)


def _copy_item(
    image: SnapshotImage, piece: EntrySource, source: EntrySource, entry: str, live: Tensor
) -> CopyItem:
    """The copy of ``piece`` out of an entry that may hold more rows."""
    stored = image.view.tensor(entry)
    offset, nbytes = stored.offset, stored.nbytes
    if piece.start is not None and piece.stop is not None:
        row_bytes = stored.nbytes // max(stored.shape[0], 1)
        offset += (piece.start - (source.start or 0)) * row_bytes
        nbytes = (piece.stop - piece.start) * row_bytes
    return CopyItem(local(live), piece.start, piece.stop, piece.dtype, offset, nbytes)
