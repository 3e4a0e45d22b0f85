"""Sparse-to-dense replay: from a suffix of sparse snapshots to the exact dense state (DESIGN §7;
MoEvement §3.3).

``Replay`` loads the suffix's first snapshot, then lets the user's own loop run the steps in between.
At each boundary it

1. compares what was recomputed with what was recorded, bit for bit: compute weights of active operators
   (and the whole anchor, where one was recorded again), optimizer state, random state, parameter-group
   options, and buffers unless masters were frozen, from which the loop may compute them;
2. loads the recorded compute weights of operators that are still frozen, and such buffers;
3. activates the operators whose anchors this snapshot holds.

After W-1 steps every operator is active and the state is dense. Replay begins one snapshot earlier
wherever that snapshot can be had: the newest one is then recomputed as a whole, and compared, with a
window of 1 too. Frozen operators keep no optimizer state: their gradients are removed before the
optimizer's step. A fused tensor with some active rows is stepped, and its frozen rows are overwritten.

Replicated operators are in the snapshots of one rank, which sends them to the others whenever something
is loaded (`replica_broadcast`): all of these ranks are at the same boundary, or after the same
optimizer's step.

Operators that another rank updates and sends (``LiveState.elsewhere``) stay frozen here until the end,
whatever was anchored: that rank has a schedule of its own, and sends the old weights for as long as the
operator is frozen there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

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
from ckptd.client.capture.ddp_buckets import OF_A_HOOK
from ckptd.client.capture.object_attributes import ObjectAttributes
from ckptd.client.capture.step_state import Stateful, apply_groups
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.data.ledger import BATCHES
from ckptd.client.log_lines import get_logger
from ckptd.client.model.buffer_shapes import BUFFERS
from ckptd.client.model.freezing import BackwardLimiter, Tape
from ckptd.client.model.module_flags import FLAGS
from ckptd.client.model.replicated_params import checksum
from ckptd.client.model.snapshot_layout import rows_of_piece, rows_within
from ckptd.client.model.waiting_gradients import GRADIENTS, WaitingGradients
from ckptd.client.recovery.snapshot_loading import SnapshotLoader
from ckptd.client.rng_state import restore_rng
from ckptd.core.state_machine import MachineState, Transitions, validated
from ckptd.units import first_of

logger = get_logger(__name__)


class ReplayState(MachineState):
    """How far a replay is."""

    FOUND = "found", "the snapshots are verified; nothing is loaded"
    PREPARED = "prepared", "group options and the user's state are those of the oldest snapshot"
    LOADED = "loaded", "the tensors are, too; the loop has not begun"
    REPLAYING = "replaying", "the loop runs the iterations between the snapshots"
    DENSE = "dense", "the newest snapshot is reached: every operator is active"
    ABANDONED = "abandoned", "given up; no patch of it is left, and the model may be half restored"


class ReplayEvent(StrEnum):
    """What happens to a replay."""

    LOAD_STATE = "load state"
    LOAD_TENSORS = "load tensors"
    BEGIN = "begin"
    ADVANCE = "advance"
    REACH_END = "reach end"
    ABANDON = "abandon"


TRANSITIONS = Transitions(
    "replay",
    {
        (ReplayState.FOUND, ReplayEvent.LOAD_STATE): ReplayState.PREPARED,
        (ReplayState.PREPARED, ReplayEvent.LOAD_TENSORS): ReplayState.LOADED,
        (ReplayState.LOADED, ReplayEvent.BEGIN): ReplayState.REPLAYING,
        (ReplayState.REPLAYING, ReplayEvent.ADVANCE): ReplayState.REPLAYING,
        (ReplayState.REPLAYING, ReplayEvent.REACH_END): ReplayState.DENSE,
        # The user's program has caught the mismatch, and enters the loop again.
        (ReplayState.ABANDONED, ReplayEvent.ADVANCE): ReplayState.REPLAYING,
        # A failure at any point, the end of the checkpointer, or a verification that is over.
        **{(state, ReplayEvent.ABANDON): ReplayState.ABANDONED for state in ReplayState},
    },
)


class ReplayProgress:
    """The position of a replay among its snapshots. A replay of a single snapshot is dense from the start.

    Args:
        iterations: of the snapshots, oldest first.
    Attributes:
        position: the number of the snapshot that was reached; 0 until the first boundary.
    """

    def __init__(self, iterations: Sequence[int]) -> None:
        self._iterations = tuple(iterations)
        self.position = 0
        self.state = ReplayState.FOUND

    @property
    def start(self) -> int:
        """The first iteration to run."""
        return self._iterations[0]

    @property
    def end(self) -> int:
        """The first iteration with a dense state."""
        return self._iterations[-1]

    @property
    def reached(self) -> int:
        """The newest boundary that was replayed and compared; ``start`` before the first."""
        return self._iterations[self.position]

    @property
    def next_iteration(self) -> int:
        """The boundary at which ``ADVANCE`` is due; -1 once the state is dense."""
        return -1 if self.dense else self._iterations[self.position + 1]

    @property
    def begun(self) -> bool:
        """Whether the loop has begun to run it."""
        return self.state not in (ReplayState.FOUND, ReplayState.PREPARED, ReplayState.LOADED)

    @property
    def dense(self) -> bool:
        """Whether the newest snapshot is reached, so that every operator is active."""
        return self.position == len(self._iterations) - 1

    def on(self, event: ReplayEvent) -> None:
        """Make a transition; a replay that begins at the newest snapshot has reached its end."""
        self.state = TRANSITIONS.after(self.state, event, start=self.start, end=self.end)
        if event is ReplayEvent.ADVANCE:
            self.position += 1
        if self.state is ReplayState.REPLAYING and self.dense:
            self.on(ReplayEvent.REACH_END)

    def validate(self) -> None:
        """The snapshots are in order, and the state is dense at the newest of them."""
        ascending = list(self._iterations)
        assert ascending == sorted({*ascending}), f"not in order: {ascending}"
        if self.state in (ReplayState.REPLAYING, ReplayState.DENSE):
            assert (self.state is ReplayState.DENSE) == self.dense, f"{self.state} at {self.reached}"
        elif self.state is not ReplayState.ABANDONED:
            assert self.position == 0, f"{self.state} at {self.reached}"


class ReplayMismatch(RuntimeError):
    """A replayed iteration did not reproduce what was recorded: not deterministic, or silently corrupted."""


class Replay(ReplayProgress):
    """Drives one recovery.

    Args:
        loader: of the snapshots into the live state.
        images: the suffix, oldest first, already verified.
        stateful: the user's objects by name.
        tape: supplies recorded values during replayed steps.
        freezing: ``drop`` or ``inputs`` (see ``client.model.freezing``); becomes ``none`` once the first
            snapshot is loaded and nothing is frozen.
        begins_dense: the oldest image anchors everything, on all ranks: nothing is frozen, not even
            what another rank updates.
        older: of partial snapshots, those before the only one in ``images``, newest first: they have the
            experts that it lacks. With each, a bitmap of the only operators to take from it; None: all.
    Attributes:
        compared: how many tensors were.
        mismatches: what was recomputed otherwise than it was recorded, in words.
    """

    def __init__(
        self,
        loader: SnapshotLoader,
        images: Sequence[SnapshotImage],
        *,
        stateful: Mapping[str, Stateful],
        tape: Tape,
        freezing: str,
        begins_dense: bool = False,
        older: Sequence[tuple[SnapshotImage, int | None]] = (),
    ) -> None:
        super().__init__([image.iteration for image in images])
        self._loader, self._binding, self._activity = loader, loader.binding, loader.activity
        self._images, self._stateful, self._tape = list(images), stateful, tape
        self.freezing = freezing
        self._begins_dense, self._older = begins_dense, list(older)
        self._known_scalars: dict[int, dict[str, Any]] = {}
        self._limiter = BackwardLimiter(self._activity.split_params)
        self._first_forward_done = False
        self.compared = 0
        self.mismatches: list[str] = []

    @property
    def bytes_loaded(self) -> int:
        """From this rank's snapshots and from other ranks."""
        return self._loader.bytes_loaded

    @property
    def oldest_scalars(self) -> dict[str, Any]:
        """The step scalars of the suffix's first snapshot."""
        return self._scalars(0)

    @property
    def newest_scalars(self) -> dict[str, Any]:
        """The step scalars of the suffix's last snapshot; blocks until that has arrived."""
        return self._scalars(len(self._images) - 1)

    @property
    def bucket_layouts(self) -> dict[str, list[list[int]]]:
        """How DDP reduced gradients. The first snapshots of a run may be older than that knowledge."""
        found: dict[str, list[list[int]]] = self._scalars(0).get("buckets", {})
        if not found and any(isinstance(m, DistributedDataParallel) for m in self._binding.model.modules()):
            found = self.newest_scalars.get("buckets", {})
        return found

    @property
    def buffer_senders(self) -> list[str] | None:
        """The DDP wrappers that are about to broadcast buffers where replay begins; None: not recorded."""
        found: list[str] | None = self._scalars(0).get("senders")
        return found

    @property
    def sources(self) -> tuple[dict[int, dict[str, Any]], dict[int, int]]:
        """Of partial snapshots: step scalars by iteration, and the iteration from which each operator is."""
        every = (*self._images, *(image for image, _ in self._older))
        images = {image.iteration: image.scalars() for image in every}
        return images, self._loader.anchored_at

    @validated
    def load_state(self) -> None:
        """Load the oldest snapshot's group options and the user's state; clear the optimizers' state."""
        self.on(ReplayEvent.LOAD_STATE)
        scalars = self._scalars(0)
        for keeper in self._binding.keepers:
            keeper.state.clear()
        for name in self._binding.params:
            self._binding.params[name].grad = None
            if name in self._binding.masters:
                self._binding.masters[name].grad = None
        self._binding.drop_groups([len(groups) for groups in scalars["groups"]])
        apply_groups(self._binding, scalars["groups"])
        for name, item in self._stateful.items():
            # Absent in older snapshots.
            newer = name in (BATCHES, BUFFERS, FLAGS, GRADIENTS) or isinstance(item, ObjectAttributes)
            newer |= name.startswith(OF_A_HOOK)
            if name in scalars["state"] or not newer:
                item.load_state_dict(values.unpack(scalars["state"][name]))
        # A scheduler's load may touch the groups; the recorded options are the truth.
        apply_groups(self._binding, scalars["groups"])

    @validated
    def load_tensors(self) -> None:
        """Load the oldest snapshot's anchors and every other operator's compute weights; a collective call
        if ranks share operators.
        """
        self.on(ReplayEvent.LOAD_TENSORS)
        self._loader.load(self._images[0], self._scalars(0), everything=True)
        for image, alone in self._older:
            self._loader.fill(image, image.scalars(), alone)
        self._activity.begin(dense=self._begins_dense)
        if not self._activity.frozen_rows:
            self.freezing = "none"

    @validated
    def begin_first_step(self) -> None:
        """Begin the first step: the random state is that at its top."""
        restore_rng(self._scalars(0)["rng"])
        self._first_forward_done = False
        if not self.dense:
            self._play()
            if self.freezing == "inputs" and self._activity.frozen_rows:
                self._limiter.start()
        self._begin_step(self._scalars(0))
        self.on(ReplayEvent.BEGIN)  # last: a loop that fails here begins it once more

    def first_forward(self) -> None:
        """Undo what creating a data iterator drew from the generators, before the first forward."""
        if not self._first_forward_done:
            self._first_forward_done = True
            recorded = self._scalars(0).get("rng_forward")
            if recorded is not None:
                restore_rng(recorded)

    def before_optimizer_step(self) -> None:
        """Remove the gradients of frozen tensors."""
        self._binding.see_groups()  # the loop may add one again
        if self.dense:
            return
        for name, held in self._binding.named_held():
            if self._activity.is_frozen(name):
                held.grad = None

    def after_optimizer_step(self, optimizer: int) -> None:
        """Load the weights that frozen parameters of this optimizer had after this step.

        A later forward of the same step (another optimizer's turn, a validation pass) then sees
        what it saw the first time.
        """
        if not self.dense:
            self._loader.load_updated(self._images[self.position + 1], optimizer)

    @validated
    def advance(self) -> Differences:
        """The top of the next step: compare, load, activate. After the last snapshot the state is dense.

        Returns:
            What was recomputed otherwise than it was recorded. It is logged, too; the caller decides
                what follows.
        """
        self.on(ReplayEvent.ADVANCE)
        self._binding.see_groups()
        image, scalars = self._images[self.position], self._scalars(self.position)
        found = self._compare(image, scalars)
        self._loader.load(image, scalars, everything=False)
        if self.dense:
            # What a rank received it has not recorded, so it could compare nothing.
            for text in self._loader.broadcast.unlike(self._checksum):
                found.add(text)
            self._limiter.stop()
            self._tape.play(None)
        else:
            self._play()
        self._begin_step(scalars)
        if found:
            self._report(found.texts, image.iteration)
        return found

    def _begin_step(self, scalars: Mapping[str, Any]) -> None:
        gradients, recorded = self._stateful.get(GRADIENTS), scalars["state"].get(GRADIENTS)
        if isinstance(gradients, WaitingGradients):
            gradients.begin_as(None if recorded is None else values.unpack(recorded))

    @validated
    def abandon(self) -> None:
        """Undo every patch."""
        self.on(ReplayEvent.ABANDON)
        self._limiter.stop()
        self._tape.play(None)

    def _validate(self) -> None:
        """At the newest snapshot every operator is active, and the end leaves no patch (DESIGN §7)."""
        self.validate()
        activity, state = self._activity, self.state
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

    def _play(self) -> None:
        image, following = self._images[self.position], self._images[self.position + 1]
        tape = self._scalars(self.position + 1)["tape"]
        if self._activity.whole and following.iteration - image.iteration > 1:
            tape = []  # it is of the last of these iterations; all of it is computed again
        self._tape.play([(kind, value) for kind, value in tape])

    def _compare(self, image: SnapshotImage, scalars: dict[str, Any]) -> Differences:
        found = Differences()
        batch_differences(self._stateful, scalars, found)
        binding, frozen, absent = self._binding, self._activity.frozen_rows, set(scalars["absent"])
        active_rows = self._activity.active_rows()
        for source, entry in image.sources():
            live = None if source.kind == "packed" else live_tensor(binding, source)
            if live is None or (source.kind == "buffer" and self._activity.masters_unknown):
                continue
            recorded = image.tensor(entry)
            pieces = [source] if source.kind == "buffer" else self._loader.pieces(source, active_rows, {})
            for piece in pieces:
                self.compared += 1
                now, before = rows_of_piece(live, piece), rows_within(recorded, piece, source)
                if not same_bits(now, before):
                    what = describe(self._loader.operators, piece)
                    found.add_tensors(what, before, now, param=piece.name)
        complete = {n for n in active_rows if n not in frozen and n not in absent}
        self.compared += optimizer_differences(binding, image, complete, found)
        scalar_differences(binding, self._stateful, scalars, found)
        # What an optimizer keeps for all parameters may follow from frozen ones, which were not updated.
        if not frozen and (other := binding.kept.difference(scalars.get("kept"))):
            found.add(other)
        return found

    def _checksum(self, operators: frozenset[int]) -> str:
        names = self._activity.rows_of(sum(1 << i for i in operators))
        return checksum(self._binding, [n for n in self._binding.params if n in names])

    def _report(self, found: list[str], iteration: int) -> None:
        text = (
            f"replay of iteration {iteration - 1} did not reproduce the values recorded at iteration "
            f"{iteration}: {first_of(found, 1)}. Either the step is not deterministic (other thread count, "
            "non-deterministic kernels, data that is not in state=) or memory was corrupted"
        )
        self.mismatches.append(text)
        logger.error("%s", text)
