"""``IsolatedStage``: a rank runs iterations that its neighbours in the pipeline do not run with it
(localized recovery, DESIGN §8).

After a localized restart each rank has a *base*, the iteration that it runs first. In iteration *i*
a rank with base *b* <= *i* is there; what the others would have sent is taken from their boundary
logs of *i*, and what would be sent to them is dropped. From `resume` on everybody is there, and
nothing of this is left in the stages.

What would be sent passes the boundary log first, so that it is logged, or compared with what was
logged before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.capture.stage_shapes import StageShapes, without_rehearsal
from ckptd.client.model.function_patches import layered
from ckptd.client.model.live_state import local
from ckptd.core.slots.boundary import RecordKey, SentKind
from ckptd.errors import CorruptionError

__all__ = ["IsolatedStage", "Records"]

# All that one rank sent in one iteration.
Records = Mapping[RecordKey, Tensor]

# By whom a stage's receive operations of one direction were sent, counted from the stage itself.
_RECEIVES = {
    "get_fwd_recv_ops": (SentKind.ACTIVATION, -1, "args_recv_info"),
    "get_bwd_recv_ops": (SentKind.GRADIENT, +1, "grad_recv_info"),
}
_SENDS = ("get_fwd_send_ops", "get_bwd_send_ops")


class IsolatedStage:
    """Who is there in which iteration, and the logs of those who are not.

    Args:
        stages: of ``torch.distributed.pipelining``; more may follow with ``stand_in_for``. Listen to them before
            (``ckptd.client.pipeline.stage_hooks``), so that the log sees what is dropped here.
        rank: this rank's number in the job, as all ranks here are.
        bases: the iteration that each rank runs first. A rank that is not named begins at ``resume``.
        resume: the iteration from which on all ranks run together.
        logs: what a rank sent in an iteration; it may block, and raise what it likes.
        shapes: of stages by their index, as ``stage_shapes.shapes_of`` found them: with them,
            stages do not rehearse. All ranks of a restart must do this or none, also those that
            never run apart.
        shared: some rank's log of an iteration, where shared values are looked up as long as no
            neighbour's log is read; None: they are with the neighbours only.
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
                f"rank {late[0]} begins at {bases[late[0]]}, after all run together at {resume}"
            )
        self.rank, self.bases, self.resume = rank, dict(bases), resume
        self._logs, self._shapes, self._shared = logs, dict(shapes), shared
        self._iteration: int | None = None
        self._fed: dict[int, Records] = {}
        self._rounds: dict[tuple[SentKind, int, int, int], int] = {}
        self._feeding, self._rehearsed = ExitStack(), ExitStack()
        self.fed_bytes = 0
        self.stand_in_for(stages)

    # -- the life of a step ----------------------------------------------------------------------

    @property
    def base(self) -> int:
        """The iteration that this rank runs first."""
        return self.bases.get(self.rank, self.resume)

    @property
    def over(self) -> bool:
        """Whether all ranks run together again."""
        return self._iteration is not None and self._iteration >= self.resume

    def begin(self, iteration: int) -> None:
        """The top of an iteration."""
        self._iteration = iteration
        self._rounds.clear()
        self._fed.clear()
        if self.over:
            self._feeding.close()

    def runs(self, rank: int) -> bool:
        """Whether that rank runs this iteration, too; outside of iterations, and for negative
        numbers (unknown ranks), it does.
        """
        if self._iteration is None or rank < 0:
            return True
        return self.bases.get(rank, self.resume) <= self._iteration

    def close(self) -> None:
        """Leave the stages as they were, but for what they need not rehearse."""
        self._feeding.close()
        self._rehearsed.close()
        self._fed.clear()

    # -- stages ----------------------------------------------------------------------------------

    def stand_in_for(self, stages: Iterable[Any]) -> None:
        """Feed these stages, too; and they do not rehearse, where shapes are known.

        Raises:
            ValueError: shapes are known of other stages, but not of these: the ranks would wait for each other.
        """
        found = list(stages)
        if self._shapes:
            unknown = [s.stage_index for s in found if self._shapes.get(int(s.stage_index)) is None]
            if unknown:
                raise ValueError(
                    f"nothing is recorded of the shapes of stage {unknown[0]}; there are {_known(self._shapes)}: "
                    "log the same stages as before"
                )
            for stage in found:
                shapes = self._shapes[int(stage.stage_index)] or {}
                self._rehearsed.enter_context(without_rehearsal(stage, shapes))
        if self.over:
            return
        # Weak: stages outlive a checkpointer that nobody closed, and logs are large.
        reference = weakref.ref(self)
        for stage in found:
            for name in _RECEIVES:
                self._feeding.enter_context(
                    layered(stage, name, partial(_receiving, reference, stage, name))
                )
            for name in _SENDS:
                self._feeding.enter_context(layered(stage, name, partial(_sending, reference)))

    def received(
        self, stage: Any, name: str, micro_batch: int, operations: Sequence[Any]
    ) -> list[Any]:
        """Fill the buffers of receive operations from ranks that are not there; the other operations."""
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
        """Put into ``buffer`` what ``source`` sent; False, and nothing is done, if that rank is
        there to send it.

        Args:
            stage: the sender's.
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
            what = f"{record.dtype} {list(record.shape)} was sent, {target.dtype} {list(target.shape)} is expected"
            raise self._missing(key, source, what)
        with torch.no_grad():
            # As a receive would: autograd is not to see it. The buffer is a leaf that requires grad.
            target.data.copy_(record)
        self.fed_bytes += record.numel() * record.element_size()
        return True

    def shared_value(self, name: str, number: int) -> tuple[Any] | None:
        """The ``number``-th shared value of this iteration, as it was when all ranks ran it; None
        if all run it now.

        Raises:
            CorruptionError: no log has it, or it has another name there.
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
            raise self._missing(key, -1, f"nobody whose log is read knows shared value {name!r}")
        recorded_name, value = values.unpack(record.numpy().tobytes())
        if recorded_name != name:
            what = f"shared value {number} of the step was {recorded_name!r}, {name!r} is asked for"
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
            operation="run apart",
            ids=ids,
            hint="Start again without localized recovery: all ranks then replay",
        )


def _known(shapes: Mapping[int, StageShapes | None]) -> list[int]:
    return sorted(index for index, found in shapes.items() if found is not None)


def _receiving(
    reference: weakref.ref[IsolatedStage],
    stage: Any,
    name: str,
    below: Callable[[int], list[Any]],
    micro_batch: int,
) -> list[Any]:
    operations = below(micro_batch)
    apart = reference()
    if apart is None:
        return operations
    return apart.received(stage, name, micro_batch, operations)


def _sending(
    reference: weakref.ref[IsolatedStage], below: Callable[[int], list[Any]], micro_batch: int
) -> list[Any]:
    operations = below(micro_batch)  # also takes from the stage what it keeps for them
    apart = reference()
    if apart is None:
        return operations
    return [operation for operation in operations if apart.runs(operation.peer)]


def _check_adjacent(stage: Any, infos: Iterable[Any], sender: int) -> None:
    """Records of a stage are numbered over all that it sends: where it sends to one stage only,
    that is the receiver's order.
    """
    told = (getattr(info, "source", None) for info in infos)
    others = sorted(int(source) for source in told if source is not None and source != sender)
    if others:
        raise CorruptionError(
            f"stage {stage.stage_index} receives from stage {others[0]}, which is not next to it",
            operation="run apart",
            ids={"stage": stage.stage_index},
            hint="Pipelines with skip connections cannot recover one stage alone",
        )
