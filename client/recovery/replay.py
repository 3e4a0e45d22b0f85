"""Sparse-to-dense replay: from a suffix of sparse snapshots to the exact dense state (DESIGN §7;
MoEvement §3.3).

``Replay`` loads the suffix's first snapshot, then lets the user's own loop run the steps in
between. At each boundary it

1. checks what was recomputed against what was recorded, bit for bit: compute weights (and, where an
   anchor was recorded again, all of it) of operators already active, optimizer state, random state,
   parameter-group options;
2. loads the recorded compute weights of operators still frozen;
3. activates the operators whose anchors this snapshot holds.

After W-1 steps every operator is active and the state is dense. Where replay begins one snapshot
earlier than that takes, as it does wherever that snapshot is to be had, the newest one is computed
as a whole, and compared: with a window of 1 too. What is frozen keeps no optimizer state: its
gradients are taken away before the optimizer's step; rows of a fused tensor of which other rows are
active are overwritten instead.

What several ranks have alike is in the snapshots of one of them, which hands it to the others each
time that something is loaded (``ckptd.client.recovery.replica_broadcast``): all of them are at the
same boundary, or after the same optimizer's step.

What another rank updates and sends (``LiveState.elsewhere``) stays frozen here until the end,
whatever was anchored: that rank has a schedule of its own, and sends the old weights for as long as
the operator is frozen there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ckptd.client import values
from ckptd.client.capture.comparison import (
    Differences,
    batch_differences,
    describe,
    live_tensor,
    optimizer_differences,
    same_bits,
    scalar_differences,
)
from ckptd.client.capture.step_state import Stateful, apply_groups, zero_grads
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.data.ledger import BATCHES
from ckptd.client.log_lines import get_logger
from ckptd.client.model.freezing import BackwardLimiter, Tape
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.operators import Operator
from ckptd.client.model.replicated_params import checksum
from ckptd.client.model.snapshot_layout import EntrySource, Rows, common, rows_of_piece, rows_within
from ckptd.client.recovery.activation import Activity
from ckptd.client.recovery.optimizer_restore import (
    load_scalar_state,
    round_frozen_masters,
    state_tensor,
)
from ckptd.client.recovery.replay_progress import ReplayEvent, ReplayProgress, ReplayState
from ckptd.client.recovery.replica_broadcast import Piece, ReplicaBroadcast
from ckptd.client.rng_state import restore_rng
from ckptd.core.state_machine import validated
from ckptd.cuda.engine import CopyEngine, CopyItem

__all__ = ["Replay", "ReplayMismatch"]

logger = get_logger(__name__)


class ReplayMismatch(RuntimeError):
    """A replayed iteration did not reproduce what was recorded: not deterministic, or silently corrupted."""


class Replay:
    """Drives one recovery.

    Args:
        images: the suffix, oldest first, already verified.
        stateful: the user's objects by name.
        tape: supplies recorded values during replayed steps.
        freezing: ``drop`` or ``inputs`` (see ``client.freeze``); it is ``none`` from when it shows
            that nothing is frozen.
        handing: between the ranks that have something alike; None if each has recorded all of its own.
        begins_dense: the oldest image anchors everything, on all ranks: nothing is frozen, not even
            what another rank updates.
    """

    def __init__(
        self,
        binding: LiveState,
        operators: Sequence[Operator],
        engine: CopyEngine,
        images: Sequence[SnapshotImage],
        *,
        stateful: Mapping[str, Stateful],
        tape: Tape,
        freezing: str,
        handing: ReplicaBroadcast | None = None,
        begins_dense: bool = False,
    ) -> None:
        self._binding, self._operators, self._engine = binding, operators, engine
        self._handing = handing or ReplicaBroadcast(-1, ())
        self._images, self._stateful, self._tape = list(images), stateful, tape
        self.freezing = freezing
        self._progress = ReplayProgress([image.iteration for image in self._images])
        self._begins_dense = begins_dense
        self._activity = Activity(binding, operators)
        self._known_scalars: dict[int, dict[str, Any]] = {}
        self._limiter = BackwardLimiter(self._activity.split_params)
        self._first_forward_done = False
        self.compared = 0
        self.mismatches: list[str] = []
        self.bytes_loaded = 0

    @property
    def start(self) -> int:
        """The first iteration to run."""
        return self._progress.start

    @property
    def end(self) -> int:
        """The iteration from which on the state is dense."""
        return self._progress.end

    @property
    def reached(self) -> int:
        """The boundary up to which everything was replayed and compared; the first iteration where
        nothing was yet.
        """
        return self._progress.reached

    @property
    def next_iteration(self) -> int:
        """The boundary at which ``advance`` is due; -1 once the state is dense."""
        return self._progress.next_iteration

    @property
    def oldest_scalars(self) -> dict[str, Any]:
        """The step scalars of the suffix's first snapshot."""
        return self._scalars(0)

    @property
    def newest_scalars(self) -> dict[str, Any]:
        """The step scalars of the suffix's last snapshot."""
        return self._scalars(len(self._images) - 1)

    @property
    def bucket_layouts(self) -> dict[str, list[list[int]]]:
        """How DDP reduced gradients; the first snapshots of a run may have been taken before that
        was known.
        """
        found: dict[str, list[list[int]]] = self._scalars(0).get("buckets", {})
        if not found and any(isinstance(m, DistributedDataParallel) for m in self._binding.model.modules()):
            found = self.newest_scalars.get("buckets", {})  # waits until that snapshot is here
        return found

    @property
    def buffer_senders(self) -> list[str] | None:
        """The DDP wrappers that are about to broadcast buffers where replay begins; None: not recorded."""
        found: list[str] | None = self._scalars(0).get("senders")
        return found

    @property
    def begun(self) -> bool:
        """Whether the loop has begun to run it."""
        return self._progress.begun

    @property
    def dense(self) -> bool:
        """Whether every operator is active."""
        return self._progress.at_end

    @validated
    def load_state(self) -> None:
        """Load the oldest snapshot's group options and the user's state; forget what the optimizers keep."""
        self._progress.on(ReplayEvent.LOAD_STATE)
        scalars = self._scalars(0)
        for keeper in self._binding.keepers:
            keeper.state.clear()
        for name in self._binding.params:
            self._binding.params[name].grad = None
            if name in self._binding.masters:
                self._binding.masters[name].grad = None
        apply_groups(self._binding, scalars["groups"])
        for name, item in self._stateful.items():
            if name != BATCHES or name in scalars["state"]:  # absent in what 0.4 recorded
                item.load_state_dict(values.unpack(scalars["state"][name]))
        # A scheduler's load may touch the groups; the recorded options are the truth.
        apply_groups(self._binding, scalars["groups"])

    @validated
    def load_tensors(self) -> None:
        """Load the oldest snapshot's anchors and every other operator's compute weights; a
        collective call if ranks share some.
        """
        self._progress.on(ReplayEvent.LOAD_TENSORS)
        self._load(self._images[0], self._scalars(0), everything=True)
        self._activity.begin(dense=self._begins_dense)
        if not self._activity.frozen_rows:
            self.freezing = "none"

    @validated
    def begin_first_step(self) -> None:
        """The loop is about to run the first step: random state as it was at the top of it."""
        restore_rng(self._scalars(0)["rng"])
        self._first_forward_done = False
        if not self.dense:
            self._play()
            if self.freezing == "inputs" and self._activity.frozen_rows:
                self._limiter.start()
        self._progress.on(ReplayEvent.BEGIN)  # last: a loop that fails here begins it once more

    def first_forward(self) -> None:
        """The first forward of the resumed run: undo what creating a data iterator drew from the
        generators.
        """
        if not self._first_forward_done:
            self._first_forward_done = True
            recorded = self._scalars(0).get("rng_forward")
            if recorded is not None:
                restore_rng(recorded)

    def before_optimizer_step(self) -> None:
        """Take the gradients of frozen tensors away."""
        if self.dense:
            return
        for name, held in self._binding.named_held():
            if self._activity.is_frozen(name):
                held.grad = None

    def after_optimizer_step(self, optimizer: int) -> None:
        """Give what this optimizer would have updated the weights it had after this step, where
        they are frozen.

        A later forward of the same step (another optimizer's turn, a validation pass) then sees
        what it saw the first time.
        """
        if self.dense:
            return
        image = self._images[self._progress.position + 1]
        owner = self._binding.owner
        frozen = {
            n: rows
            for n, rows in self._activity.frozen_rows.items()
            if n in owner and owner[n][0] == optimizer
        }
        items = [
            self._item(image, piece, source, entry, live)
            for source, entry in image.sources()
            if source.kind in ("param", "master")
            for piece, live in self._targets(image, source, entry, {}, frozen, set(), False)
        ]
        self._engine.restore(items, image.memory, image.base)
        owned = frozenset(n for n in owner if owner[n][0] == optimizer)
        # Only what it updates: an optimizer of this rank's own may step when those of other ranks do not.
        stepped = frozenset(
            i for i, op in enumerate(self._operators) if any(m.param in owned for m in op.members)
        )
        self._handing.hand(
            lambda of: self._to_hand(image, of, 0, self._activity.everything, owned),
            self._take,
            among=stepped,
        )
        round_frozen_masters(self._binding, self._activity.frozen_rows)

    @validated
    def advance(self) -> Differences:
        """The top of the next step: compare, load, activate. After the last snapshot the state is dense.

        Returns:
            What was recomputed otherwise than it was recorded. It is in the log, too; whoever calls
                decides what follows.
        """
        self._progress.on(ReplayEvent.ADVANCE)
        at = self._progress.position
        image, scalars = self._images[at], self._scalars(at)
        found = self._compare(image, scalars)
        self._load(image, scalars, everything=False)
        if self.dense:
            # What a rank was handed it has not recorded, so it could compare nothing.
            for text in self._handing.unlike(self._checksum):
                found.add(text)
            self._limiter.stop()
            self._tape.play(None)
        else:
            self._play()
        if found:
            self._report(found.texts, image.iteration)
        return found

    def active_rows(self) -> Rows:
        """The rows of which everything is loaded, or was computed from what was."""
        activity = self._activity
        return {
            name: rows
            for name, rows in activity.rows_of(activity.active).items()
            if activity.whole or name not in self._binding.elsewhere
        } | activity.never_frozen()

    @validated
    def abandon(self) -> None:
        """Undo every patch."""
        self._progress.on(ReplayEvent.ABANDON)
        self._limiter.stop()
        self._tape.play(None)

    def _validate(self) -> None:
        """At the newest snapshot every operator is active, and what is over leaves no patch (DESIGN §7)."""
        self._progress.validate()
        activity, state = self._activity, self._progress.state
        if state is ReplayState.DENSE:
            missing = activity.everything & ~activity.active
            assert not missing, f"dense, and the operators {missing:b} have no anchor"
        if state in (ReplayState.DENSE, ReplayState.ABANDONED):
            assert not self._tape.playing, f"{state}, and recorded values are played"
        if activity.whole:
            assert not activity.frozen_rows, "begun dense, and something is frozen"

    def _scalars(self, position: int) -> dict[str, Any]:
        if position not in self._known_scalars:
            self._known_scalars[position] = self._images[position].scalars()
        return self._known_scalars[position]

    # -- loading ---------------------------------------------------------------------------------

    def _play(self) -> None:
        at = self._progress.position
        image, following = self._images[at], self._images[at + 1]
        tape = self._scalars(at + 1)["tape"]
        if self._activity.whole and following.iteration - image.iteration > 1:
            tape = []  # it is of the last of these iterations; all of it is computed again
        self._tape.play([(kind, value) for kind, value in tape])

    def _load(self, image: SnapshotImage, scalars: dict[str, Any], *, everything: bool) -> None:
        """Load anchors of operators not yet active, compute weights of those still frozen."""
        activity = self._activity
        fresh = activity.activate(image.view.anchors)
        wanted = activity.rows_of(fresh)
        if everything:
            wanted.update(activity.never_frozen())
        absent = set(scalars["absent"])
        items = [
            self._item(image, piece, source, entry, live)
            for source, entry in image.sources()
            for piece, live in self._targets(
                image, source, entry, wanted, activity.frozen_rows, absent, everything
            )
        ]
        self._engine.restore(items, image.memory, image.base)
        self.bytes_loaded += sum(i.nbytes for i in items)
        absent |= self._handing.hand(
            lambda of: self._to_hand(image, of, fresh, ~activity.active, None), self._take
        )
        round_frozen_masters(self._binding, self._activity.frozen_rows)
        kept = self._binding.owner.keys() - self._binding.elsewhere
        names = [n for n in wanted if n in kept and n not in absent]
        load_scalar_state(self._binding, image, scalars, names)
        self._binding.kept.load(scalars.get("kept"), [n for n in wanted if n in kept])
        zero_grads(self._binding, scalars["grads"], wanted)

    def _to_hand(
        self,
        image: SnapshotImage,
        operators: frozenset[int],
        fresh: int,
        frozen: int,
        only: frozenset[str] | None,
    ) -> tuple[list[Piece], set[str]]:
        """What an image holds of some operators, for the ranks that have them too: of ``fresh``
        ones anchors, of ``frozen`` ones compute weights (bitmaps over operators); and which
        parameters have no optimizer state.
        """
        mask, rows_of = sum(1 << i for i in operators), self._activity.rows_of
        wanted, also = rows_of(fresh & mask), rows_of(frozen & mask & ~fresh)
        if only is not None:
            also = {name: rows for name, rows in also.items() if name in only}
        # What of a parameter is frozen by its own operators only; the other rows are not ours to hand over.
        also = {n: common(rows, self._activity.frozen_rows.get(n, [])) for n, rows in also.items()}
        absent: list[str] = [] if only is not None else self._absent_of(image)
        pieces: list[Piece] = []
        for source, entry in image.sources():
            if source.kind not in ("param", "master", "optim"):
                continue
            if source.kind == "optim" and source.name in absent:
                continue  # there was none: what the image holds in its place is zeros
            of = also if source.kind == "param" else {}
            recorded = None
            for piece in self._pieces(source, wanted, of):
                recorded = image.tensor(entry) if recorded is None else recorded
                pieces.append((piece, rows_within(recorded, piece, source)))
        return pieces, {name for name in absent if name in wanted}

    def _absent_of(self, image: SnapshotImage) -> list[str]:
        position = self._images.index(image)
        found: list[str] = self._scalars(position)["absent"]
        return found

    def _take(self, piece: EntrySource, data: Tensor) -> None:
        """Put what another rank has recorded into the live tensors."""
        binding = self._binding
        if piece.kind == "optim":
            live = state_tensor(binding, piece, data)
        else:
            live = (binding.params if piece.kind == "param" else binding.masters)[piece.name]
        with torch.no_grad():
            rows_of_piece(local(live), piece).copy_(data)
        self.bytes_loaded += data.numel() * data.element_size()

    def _targets(
        self,
        image: SnapshotImage,
        source: EntrySource,
        entry: str,
        wanted: Rows,
        frozen: Rows,
        absent: set[str],
        everything: bool,
    ) -> list[tuple[EntrySource, Tensor]]:
        """Which parts of an entry are loaded now, and into which live tensors."""
        binding = self._binding
        if source.kind == "buffer":
            return [(source, binding.buffers()[source.name])] if everything else []
        if source.kind == "param":
            return [(p, binding.params[source.name]) for p in self._pieces(source, wanted, frozen)]
        if source.kind == "master":
            # Of the frozen, only what comes from elsewhere has a master in every snapshot.
            also = {n: rows for n, rows in frozen.items() if n in binding.elsewhere}
            pieces = self._pieces(source, wanted, also)
            return [(p, binding.masters[source.name]) for p in pieces]
        if source.kind == "optim" and source.name not in absent:
            pieces = self._pieces(source, wanted, {})
            return [(p, state_tensor(binding, source, image.tensor(entry))) for p in pieces]
        return []

    def _item(
        self,
        image: SnapshotImage,
        piece: EntrySource,
        source: EntrySource,
        entry: str,
        live: Tensor,
    ) -> CopyItem:
        """Copy of ``piece`` out of an entry that may hold more rows than are wanted."""
        stored = image.view.tensor(entry)
        offset, nbytes = stored.offset, stored.nbytes
        if piece.start is not None and piece.stop is not None:
            row_bytes = stored.nbytes // max(stored.shape[0], 1)
            offset += (piece.start - (source.start or 0)) * row_bytes
            nbytes = (piece.stop - piece.start) * row_bytes
        return CopyItem(local(live), piece.start, piece.stop, piece.dtype, offset, nbytes)

    def _pieces(self, source: EntrySource, wanted: Rows, also: Rows) -> list[EntrySource]:
        """The parts of an entry that cover wanted rows."""
        total = self._binding.num_rows(source.name)
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

    # -- comparing -------------------------------------------------------------------------------

    def _compare(self, image: SnapshotImage, scalars: dict[str, Any]) -> Differences:
        found = Differences()
        batch_differences(self._stateful, scalars, found)
        activity, absent = self._activity, set(scalars["absent"])
        active_rows = self.active_rows()
        for source, entry in image.sources():
            if source.kind == "packed":
                continue
            live = live_tensor(self._binding, source)
            if live is None:
                continue
            recorded = image.tensor(entry)
            pieces = [source] if source.kind == "buffer" else self._pieces(source, active_rows, {})
            for piece in pieces:
                self.compared += 1
                now, before = rows_of_piece(live, piece), rows_within(recorded, piece, source)
                if not same_bits(now, before):
                    found.add_tensors(describe(self._operators, piece), before, now)
        complete = {n for n in active_rows if n not in activity.frozen_rows and n not in absent}
        self.compared += optimizer_differences(self._binding, image, complete, found)
        scalar_differences(self._binding, self._stateful, scalars, found)
        # What it keeps for all parameters together may come of frozen ones, too, which were not updated.
        if not self._activity.frozen_rows and (other := self._binding.kept.difference(scalars.get("kept"))):
            found.add(other)
        return found

    def _checksum(self, operators: frozenset[int]) -> str:
        names = self._activity.rows_of(sum(1 << i for i in operators))
        return checksum(self._binding, [n for n in self._binding.params if n in names])

    def _report(self, found: list[str], iteration: int) -> None:
        text = (
            f"replay of iteration {iteration - 1} did not reproduce the values recorded at iteration "
            f"{iteration}: "
            f"{found[0]}" + (f" and {len(found) - 1} more" if len(found) > 1 else "") + ". "
            "Either the step is not deterministic (other thread count, non-deterministic kernels, "
            "data that is not in state=) or memory was corrupted"
        )
        self.mismatches.append(text)
        logger.error("%s", text)
