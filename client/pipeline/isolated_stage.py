"""``IsolatedStage``: a rank runs iterations that its pipeline neighbours do not run with it (localized
recovery, DESIGN §8).

After a localized restart each rank has a *base*, the first iteration that it runs. The ranks with base
*b* <= *i* run iteration *i*. Tensors that the others would send are read from their boundary logs of
*i*; tensors for them are dropped. From `resume` on all ranks run every iteration, and the stages are as
before.

Tensors pass the boundary log before they are dropped, so that they are logged, or compared with the log.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.capture.stage_shapes import StageShapes, without_rehearsal
from ckptd.client.model.hooks import layered
from ckptd.client.model.live_state import local
from ckptd.core.slots.boundary import RecordKey, SentKind
from ckptd.errors import CorruptionError

# All tensors that one rank sent in one iteration.
Records = Mapping[RecordKey, Tensor]

# The sender of a stage's receive operations in one direction, relative to the stage.
_RECEIVES = {
    "get_fwd_recv_ops": (SentKind.ACTIVATION, -1, "args_recv_info"),
    "get_bwd_recv_ops": (SentKind.GRADIENT, +1, "grad_recv_info"),
}
_SENDS = ("get_fwd_send_ops", "get_bwd_send_ops")


Owner = TypeVar("Owner")


def hooked(
    stage: Any, name: str, owner: Owner, react: Callable[[Owner, Any, str, int, list[Any]], list[Any]]
) -> AbstractContextManager[None]:
    """While entered, ``react(owner, stage, name, micro_batch, operations)`` replaces what a method of a stage
    returns: send or receive operations of a micro-batch.
    """
    # Weak: stages may outlive a checkpointer that was not closed, with its memory and logs.
    reference = weakref.ref(owner)

    def hook(below: Callable[[int], list[Any]], micro_batch: int) -> list[Any]:
        operations = below(micro_batch)  # also removes the entries that the stage keeps for them
        alive = reference()
        return operations if alive is None else react(alive, stage, name, micro_batch, operations)

    return layered(stage, name, hook)


class IsolatedStage:
    """The ranks that run each iteration, and the logs of the others.

    Args:
        stages: of ``torch.distributed.pipelining``; ``stand_in_for`` adds more. Install the hooks of
            ``ckptd.client.pipeline.stage_hooks`` first, so that the log sees the dropped tensors.
        rank: this rank's number in the job; all ranks here are numbers in the job.
        bases: the first iteration of each rank. A rank that is not named starts at ``resume``.
        resume: the iteration from which all ranks run together.
        logs: returns the tensors that a rank sent in an iteration; may block, and may raise any error.
        shapes: the shapes of stages by index, as ``stage_shapes.shapes_of`` found them: with them, stages do
            not rehearse. Either all ranks of a restart pass them or none, including those that never run
            isolated.
        shared: returns some rank's log of an iteration, for shared values while no neighbour's log is
            read; None: only the neighbours' logs contain them.
    Raises:
        ValueError: a base is after ``resume``.
    """

    def __init__(
        self,
        stages: Iterable[Any],
        rank: int,
        bases: Mapping[int, int],
        resume: int,
        logs: Callable[[int, int], Records],
        *,
        shapes: Mapping[int, StageShapes | None] = MappingProxyType({}),
        shared: Callable[[int], Records] | None = None,
    ) -> None:
        if late := [r for r, base in bases.items() if base > resume]:
            raise ValueError(
                f"rank {late[0]} starts at {bases[late[0]]}, after resume={resume}, from which all "
                "ranks run together"
            )
        self.rank, self.bases, self.resume = rank, dict(bases), resume
        self._logs, self._shapes, self._shared = logs, dict(shapes), shared
        self._iteration: int | None = None
        self._fed: dict[int, Records] = {}
        self._rounds: dict[tuple[SentKind, int, int, int], int] = {}
        self._feeding, self._rehearsed = ExitStack(), ExitStack()
        self.stand_in_for(stages)

    # -- the life of a step ----------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether all ranks run together again."""
        return self._iteration is not None and self._iteration >= self.resume

    def begin(self, iteration: int) -> None:
        """Mark the top of an iteration."""
        self._iteration = iteration
        self._rounds.clear()
        self._fed.clear()
        if self.over:
            self._feeding.close()

    def runs(self, rank: int) -> bool:
        """Whether that rank runs this iteration; True outside iterations, and for negative (unknown) ones."""
        if self._iteration is None or rank < 0:
            return True
        return self.bases.get(rank, self.resume) <= self._iteration

    def close(self) -> None:
        """Restore the stages' methods; stages with known shapes still do not rehearse."""
        self._feeding.close()
        self._rehearsed.close()
        self._fed.clear()

    # -- stages ----------------------------------------------------------------------------------

    def stand_in_for(self, stages: Iterable[Any]) -> None:
        """Feed these stages, too; stages with known shapes do not rehearse.

        Raises:
            ValueError: shapes are known of other stages but not of these; the ranks would wait for
                each other.
        """
        found = list(stages)
        if self._shapes:
            unknown = [s.stage_index for s in found if self._shapes.get(int(s.stage_index)) is None]
            if unknown:
                raise ValueError(
                    f"the shapes of stage {unknown[0]} were not recorded (recorded: {_known(self._shapes)}): "
                    "log the same stages as before"
                )
            for stage in found:
                shapes = self._shapes[int(stage.stage_index)] or {}
                self._rehearsed.enter_context(without_rehearsal(stage, shapes))
        if self.over:
            return
        for stage in found:
            for name in _RECEIVES:
                self._feeding.enter_context(hooked(stage, name, self, IsolatedStage.received))
            for name in _SENDS:
                self._feeding.enter_context(hooked(stage, name, self, IsolatedStage.sending))

    def received(self, stage: Any, name: str, micro_batch: int, operations: Sequence[Any]) -> list[Any]:
        """Fill the buffers of receive operations from ranks that do not run; returns the other operations."""
        kind, step, infos = _RECEIVES[name]
        sender = int(stage.stage_index) + step
        _check_adjacent(stage, getattr(stage, infos).get(micro_batch, ()), sender)
        left = []
        for index, operation in enumerate(operations):
            if self.runs(operation.peer):
                left.append(operation)
            else:
                self.feed(operation.tensor, kind, sender, micro_batch, index, operation.peer)
        return left

    def sending(self, stage: Any, name: str, micro_batch: int, operations: Sequence[Any]) -> list[Any]:
        """Drop the send operations to ranks that do not run."""
        return [operation for operation in operations if self.runs(operation.peer)]

    # -- what was sent ---------------------------------------------------------------------------

    def feed(
        self,
        buffer: Tensor,
        kind: SentKind,
        stage: int,
        micro_batch: int,
        index: int,
        source: int,
    ) -> bool:
        """Fill ``buffer`` with the tensor that ``source`` sent. Returns False without a change if that rank
        runs this iteration and sends it.

        Args:
            stage: the sender's stage.
        Raises:
            CorruptionError: its log has no such record, or one of another shape or dtype.
        """
        if self.runs(source):
            return False
        where = (kind, stage, micro_batch, index)
        nth = self._rounds.get(where, 0)
        self._rounds[where] = nth + 1
        key = RecordKey(*where, nth)
        record = self._records(source).get(key)
        target = local(buffer)
        if record is None:
            raise self._missing(key, source, "it is not in the log")
        if record.shape != target.shape or record.dtype != target.dtype:
            what = (
                f"{record.dtype} {list(record.shape)} was sent, but {target.dtype} "
                f"{list(target.shape)} is expected"
            )
            raise self._missing(key, source, what)
        with torch.no_grad():
            # Like a receive: hidden from autograd. The buffer is a leaf that requires grad.
            target.data.copy_(record)
        return True

    def shared_value(self, name: str, number: int) -> tuple[Any] | None:
        """The shared value ``number`` of this iteration, from the first run; None if all ranks run it now.

        Raises:
            CorruptionError: no log contains it, or it has another name there.
        """
        iteration = self._iteration
        if iteration is None or iteration >= self.resume:
            return None
        key = RecordKey(SentKind.VALUE, 0, number)
        sources = [source for source in self._fed if key in self._fed[source]]
        if sources:
            source, record = sources[0], self._fed[sources[0]][key]
        elif self._shared is not None:
            found = self._shared(iteration).get(key)
            if found is None:
                raise self._missing(key, -1, f"shared value {name!r} is not in the log")
            source, record = -1, found
        else:
            raise self._missing(key, -1, f"no log that is read contains shared value {name!r}")
        recorded_name, value = values.unpack(record.numpy().tobytes())
        if recorded_name != name:
            what = (
                f"shared value {number} of the step is {recorded_name!r} in the log, but "
                f"{name!r} is requested"
            )
            raise self._missing(key, source, what)
        return (value,)

    def _records(self, source: int) -> Records:
        assert self._iteration is not None
        if source not in self._fed:
            self._fed[source] = self._logs(source, self._iteration)
        return self._fed[source]

    def _missing(self, key: RecordKey, source: int, what: str) -> CorruptionError:
        ids: dict[str, object] = {"rank": self.rank, "iteration": self._iteration}
        if source >= 0:
            ids["neighbour"] = source
        ids |= {"kind": str(key.kind), "stage": key.stage, "micro_batch": key.micro_batch}
        ids |= {"index": key.index, "round": key.round}
        return CorruptionError(
            what,
            operation="run isolated",
            ids=ids,
            hint="Start again without localized recovery: all ranks then replay",
        )


def _known(shapes: Mapping[int, StageShapes | None]) -> list[int]:
    return sorted(index for index, found in shapes.items() if found is not None)


def _check_adjacent(stage: Any, infos: Iterable[Any], sender: int) -> None:
    """Check that the stage receives only from adjacent stages. Records are numbered over all tensors that a
    stage sends; this is the receiver's order only if the stage sends to one stage.
    """
    sources = (getattr(info, "source", None) for info in infos)
    others = sorted(int(source) for source in sources if source is not None and source != sender)
    if others:
        raise CorruptionError(
            f"stage {stage.stage_index} receives from stage {others[0]}, which is not adjacent",
            operation="run isolated",
            ids={"stage": stage.stage_index},
            hint="Localized recovery does not support pipelines with skip connections",
        )
