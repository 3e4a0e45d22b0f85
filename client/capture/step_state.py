"""Step scalars: everything small that a bit-exact repeat of a step needs besides the tensors.

They hold random state, options, the user's objects, and what the step asked for. The training thread
gathers them at the top of the loop, so they are kept cheap: no synchronisation with a device except
within the user's own ``state_dict``.
"""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.capture.ddp_buckets import Buckets
from ckptd.client.capture.stage_shapes import StageShapes, shapes_of
from ckptd.client.model.freezing import Tape
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.snapshot_layout import SAFETENSORS_DTYPES
from ckptd.client.model.waiting_gradients import UnreducedGradients, WaitingGradients
from ckptd.client.optimizers.value_trees import part_of, plain
from ckptd.client.rng_state import capture_rng
from ckptd.client.schedule.expert_losses import RECORDED, ExpertLosses
from ckptd.client.schedule.snapshot_plan import SnapshotPlan

if TYPE_CHECKING:
    from ckptd.client.capture.program import Program

_grad_of = operator.attrgetter("grad")


class Stateful(Protocol):
    """What ``state=`` takes: a scheduler, a scaler, a data loader, anything with these two methods.

    An object whose state a repeat cannot reproduce (it holds clock times) has an attribute
    ``reproducible = False``: it is recorded and restored like the others, and not compared.
    """

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class HoldsGradients(ABC):
    """An object of ``state=`` that knows of gradients in places that no hook sees.

    A base class, not an attribute by name: objects of users come by ``state=``, too.
    """

    @property
    @abstractmethod
    def gradients_wait(self) -> bool:
        """True in the middle of an accumulation: this top gets no snapshot."""


def reproducible(item: Stateful) -> bool:
    """True if a repeat must arrive at the recorded state."""
    return bool(getattr(item, "reproducible", True))


class StepScalars:
    """Gathers the step scalars.

    Attributes:
        tape: records what the steps ask for.
        program: the program whose options, script and data the run follows.
        losses: what failures have lost of partial snapshots.
        waiting: the gradients that an optimizer holds while another one steps; None: nobody captures them.
    """

    def __init__(
        self,
        binding: LiveState,
        stateful: Mapping[str, Stateful],
        tape: Tape,
        buckets: Buckets,
        program: Program,
        losses: ExpertLosses,
    ) -> None:
        self._binding, self._stateful = binding, stateful
        self._holders = [item for item in stateful.values() if isinstance(item, HoldsGradients)]
        found = (item for item in stateful.values() if isinstance(item, WaitingGradients))
        self.waiting: WaitingGradients | None = next(found, None)
        self._unreduced = UnreducedGradients(binding.model)
        self._buckets = buckets
        self._stages: list[Any] = []
        self._stage_shapes: Mapping[int, StageShapes] = {}
        self.tape, self.program, self.losses = tape, program, losses

    def follow_stages(self, stages: Sequence[Any]) -> None:
        """Keep the shapes that these logged pipeline stages find out."""
        self._stages += stages

    def know_stages(self, shapes: Mapping[int, StageShapes]) -> None:
        """Take the shapes that stages found out in an earlier life."""
        self._stage_shapes = shapes

    @property
    def gradients_wait(self) -> bool:
        """True if an object of ``state=``, or FSDP2, holds gradients that the optimizer has not used yet."""
        return any(holder.gradients_wait for holder in self._holders) or self._unreduced.there_are

    def go_by(self, program: Program) -> None:
        """From now on the run follows this program."""
        self.program = program

    def gather(self, plan: SnapshotPlan, stride: int) -> dict[str, Any]:
        """The scalars of this top, after ``KeptState.look``; takes the tape.

        Args:
            stride: iterations between two snapshots.
        Raises:
            NotCapturable: an optimizer keeps something that no snapshot can hold.
        """
        kept = self._binding.kept
        stages = {int(stage.stage_index): stage for stage in self._stages}
        found = {
            "rng": capture_rng(),
            "groups": gather_groups(self._binding),
            "state": gather_state(self._stateful),
            "python": kept.python(),
            "kept": kept.gather(),
            "grads": grad_flags(self._binding),
            "tape": [list(pair) for pair in self.tape.take()],
            "buckets": self._buckets.layouts(),
            "senders": self._buckets.senders(),
            "phases": [list(p) for p in plan.schedule.phases],
            "stride": stride,
            "every": plan.every,
            "stages": {i: shapes_of(stage) or self._stage_shapes.get(i) for i, stage in stages.items()},
            "program": self.program,
        }
        if plan.lossy:
            found[RECORDED] = self.losses.record()
        return found

    def sample(self, num_operators: int, *, lossy: bool = False) -> dict[str, Any]:
        """Scalars of about the expected size.

        Args:
            lossy: of partial snapshots.
        Raises:
            NotCapturable: an optimizer keeps something that no snapshot can hold.
        """
        kept = self._binding.kept
        kept.look({name: self._binding.specs(name) for name in self._binding.owner})
        return {
            "rng": [capture_rng()] * 2,
            "groups": gather_groups(self._binding),
            "state": gather_state(self._stateful),
            "python": kept.python(),
            "kept": kept.gather(),
            "buckets": [list(range(len(self._binding.params)))],
            "phases": list(range(num_operators * 2)),
            RECORDED: [self.losses.record()] * 2 if lossy else None,
            "program": self.program,
        }


def gather_state(stateful: Mapping[str, Stateful]) -> dict[str, bytes]:
    """The user's objects, packed at once: ``state_dict()`` may return live objects that change later.

    Raises:
        UnsupportedValue: naming the path of a value that no snapshot can hold.
    """
    return {name: values.pack(item.state_dict(), f"state[{name!r}]") for name, item in stateful.items()}


def gather_groups(binding: LiveState) -> list[list[dict[str, Any]]]:
    """A copy of the options of every parameter group (learning rate, betas, …), without the parameters.

    ``ckptd.client.optimizers.optimizer_audit`` handles functions and other objects.
    """
    return [
        [{k: _copy_of(v) for k, v in g.items() if k != "params" and plain(v)} for g in o.param_groups]
        for o in binding.optimizers
    ]


def _copy_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value


def apply_groups(binding: LiveState, groups: list[list[dict[str, Any]]]) -> None:
    """Write recorded group options into the live groups; fill tensors (a capturable ``lr``) in place.

    Raises:
        ValueError: another number of optimizers or groups.
    """
    live = [o.param_groups for o in binding.optimizers]
    if [len(g) for g in live] != [len(g) for g in groups]:
        raise ValueError(
            f"parameter groups per optimizer: {[len(g) for g in live]} here, "
            f"{[len(g) for g in groups]} in the snapshot"
        )
    for optimizer_groups, recorded in zip(live, groups, strict=True):
        for group, options in zip(optimizer_groups, recorded, strict=True):
            for key, value in options.items():
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    with torch.no_grad():
                        group[key].copy_(value)
                else:
                    group[key] = value


def apply_packed(
    binding: LiveState,
    packed: Mapping[torch.dtype, Tensor],
    names: Iterable[str],
    order: Mapping[str, list[list[str]]],
) -> None:
    """Write recorded 0-dimensional state into the live state of ``names``, where that state exists.

    ``order`` comes from the image's ``state_layout``: (parameter, key) per element, by dtype.
    """
    wanted = set(names)
    for dtype, stacked in packed.items():
        for i, (name, key) in enumerate(order.get(SAFETENSORS_DTYPES[dtype], ())):
            if name in wanted and isinstance(live := part_of(binding.state(name), key), Tensor):
                with torch.no_grad():
                    local(live).copy_(stacked[i])


def grad_flags(binding: LiveState) -> bytes:
    """One byte per parameter: 1 if it has a gradient tensor, plus 2 if its master has.

    A fresh process has no gradients, and optimizers skip parameters without one.
    """
    flags = _have_grad(binding.params.values())
    if not binding.masters:
        return flags
    of_masters = _have_grad(binding.masters_in_order)
    # Each as one number: no byte overflows.
    both = int.from_bytes(flags, "little") + 2 * int.from_bytes(of_masters, "little")
    return both.to_bytes(len(flags), "little")


def _have_grad(tensors: Iterable[Tensor]) -> bytes:
    return bytes(map(operator.is_not, map(_grad_of, tensors), repeat(None)))


def zero_grads(binding: LiveState, flags: bytes, names: Iterable[str]) -> None:
    """Give zero gradients to those of ``names`` that had a gradient at the snapshot and have none now."""
    wanted = set(names)
    for flag, (name, param) in zip(flags, binding.params.items(), strict=True):
        if name not in wanted:
            continue
        if flag & 1 and param.grad is None:
            param.grad = torch.zeros_like(param)
        if flag & 2 and binding.masters[name].grad is None:
            binding.masters[name].grad = torch.zeros_like(binding.masters[name])
