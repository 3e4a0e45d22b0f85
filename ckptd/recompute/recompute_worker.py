"""The process that computes snapshots from gradients: ``python -m ckptd.recompute.recompute_worker``.

A daemon never imports torch, so this process does. It reads requests from standard input, one JSON object a
line, and answers each with one line on standard output; the first line says whether torch is there. It
keeps nothing between requests: the base is a sealed slot of a replica, the gradients are in the slot to
fill, and the daemon compares what comes out with the digests of the sender. ``docs/recompute.md`` section 3
has the lines.

The step itself is that of `torch.optim`: the same class with the same options, on tensors whose memory is
the slot.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from ckptd.storage.gradient_block import (
    OPTIMIZERS,
    GradientBlock,
    UpdatedGroup,
    UpdatedParameter,
    gradient_range,
    unpack_pieces,
)
from ckptd.storage.image import ImageView
from ckptd.storage.image_format import ImageError
from ckptd.transport.fabric.short_cut import note_filling

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_THREADS = os.cpu_count() or 1
_STEP = "step"  # the only state of these optimizers that is no tensor of the weight's dtype and shape


class CannotRecompute(Exception):
    """The snapshot does not follow from the base and the gradients; the text says why."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of a mapped segment: its bytes, and the length and the names of its snapshot."""

    memory: memoryview
    image_len: int
    iteration: int
    sequence: int

    @property
    def view(self) -> ImageView:
        return ImageView(self.memory[: self.image_len])


def recompute(base: Slot, slot: Slot) -> int:
    """Fill in the tensors that follow from the base and the gradients in ``slot``.

    Returns:
        The bytes that were computed.
    Raises:
        CannotRecompute: nothing is to be shown of the slot.
    """
    try:
        names = {"iteration": slot.iteration, "sequence": slot.sequence}
        block = unpack_pieces(slot.memory, slot.image_len, **names)
        if block.record.base != base.iteration:
            text = f"the gradients continue iteration {block.record.base}, the base is of {base.iteration}"
            raise CannotRecompute(text)
        torch.set_num_threads(min(block.record.threads, _MAX_THREADS))
        step = _Step(base, slot, block)
        return sum(step.group(group) for group in block.record.groups)
    except ImageError as error:
        raise CannotRecompute(str(error)) from error


class _Step:
    """One step of all groups, on the memory of the slot."""

    def __init__(self, base: Slot, slot: Slot, block: GradientBlock) -> None:
        self._base, self._slot, self._block = base, slot, block
        self._from, self._to = base.view, slot.view

    def group(self, group: UpdatedGroup) -> int:
        """Step a group; returns the bytes of its tensors."""
        if group.optimizer not in OPTIMIZERS or not hasattr(torch.optim, group.optimizer):
            known = ", ".join(OPTIMIZERS)
            raise CannotRecompute(
                f"the optimizer {group.optimizer!r} is not known here (torch {torch.__version__}; "
                f"known: {known})"
            )
        names = [n for p in group.parameters for n in (p.weight, *p.states.values())]
        for name in names:
            self._copy(name)
        moving = [p for p in group.parameters if p.gradient >= 0]
        if moving:
            self._step(group, moving)
        return sum(self._to.tensor(name).nbytes for name in names)

    def _step(self, group: UpdatedGroup, moving: Iterable[UpdatedParameter]) -> None:
        states: list[tuple[Tensor, dict[str, Tensor]]] = []
        for each in moving:
            weight = torch.nn.Parameter(self._tensor(each.weight))
            begin, end = gradient_range(self._block, self._to, each)
            gradient = torch.frombuffer(self._slot.memory[begin:end], dtype=weight.dtype)
            weight.grad = gradient.view(weight.shape)
            if _STEP in each.states or each.scalars.keys() - {_STEP}:
                raise CannotRecompute(
                    f"{_STEP!r}, and no other state of {each.weight!r}, must be a packed value"
                )
            state = {key: self._state(name, weight) for key, name in each.states.items()}
            # The slot has the values after the step, those before it are in the base.
            state |= {key: self._scalar(*place) for key, place in each.scalars.items()}
            states.append((weight, state))
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in group.options.items()}
        try:
            made = getattr(torch.optim, group.optimizer)([{"params": [w for w, _ in states], **options}])
            for parameter, state in states:
                made.state[parameter].update(state)
            made.step()
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # Whatever torch has against the options: the sender sends everything then.
            raise CannotRecompute(f"{group.optimizer}: {type(error).__name__}: {error}") from error
        for parameter, state in states:
            if any(
                made.state[parameter][key].data_ptr() != tensor.data_ptr() for key, tensor in state.items()
            ):
                raise CannotRecompute(f"{group.optimizer} has put other tensors in place of its state")

    def _copy(self, name: str) -> None:
        if name not in self._from or name not in self._to:
            raise CannotRecompute(f"the base of iteration {self._base.iteration} does not have {name!r}")
        one, other = self._from.tensor(name), self._to.tensor(name)
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            raise CannotRecompute(
                f"{name!r} is {one.dtype}{one.shape} in the base, {other.dtype}{other.shape} now"
            )
        self._to.data(name)[:] = self._from.data(name)

    def _tensor(self, name: str) -> Tensor:
        entry = self._to.tensor(name)
        if entry.dtype not in DTYPES:
            raise CannotRecompute(f"{name!r} has dtype {entry.dtype}; known are {', '.join(DTYPES)}")
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        return torch.frombuffer(self._to.data(name), dtype=DTYPES[entry.dtype]).view(entry.shape)

    def _state(self, name: str, weight: Tensor) -> Tensor:
        """A state of a weight. Fused kernels of torch write beyond one that is smaller than the weight."""
        state = self._tensor(name)
        if (state.dtype, state.shape) != (weight.dtype, weight.shape):
            one, other = (f"{t.dtype}{tuple(t.shape)}" for t in (state, weight))
            raise CannotRecompute(f"{name!r} is {one}, its weight {other}")
        return state

    def _scalar(self, name: str, position: int) -> Tensor:
        if name not in self._from or self._from.tensor(name).dtype not in DTYPES:
            raise CannotRecompute(f"the base has no {name!r}")
        packed = torch.frombuffer(
            bytearray(self._from.data(name)), dtype=DTYPES[self._from.tensor(name).dtype]
        )
        if position >= len(packed):
            raise CannotRecompute(f"the base has {len(packed)} values in {name!r}, and no number {position}")
        return packed[position].clone()


# -- the process -----------------------------------------------------------------------------------


def _mapped(path: str) -> memoryview:
    """A whole segment file, unmapped with the last view: a removed replica must not keep its memory."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
    finally:
        os.close(fd)


def _slot(memory: memoryview, slot_bytes: int, told: dict[str, int]) -> Slot:
    at = told["offset"]
    return Slot(memory[at : at + slot_bytes], told["image_len"], told["iteration"], told["sequence"])


def _answer(line: str, daemon: int) -> dict[str, Any]:
    try:
        told = json.loads(line)
        path, size = told["path"], told["slot_bytes"]
        with _filling(path, told["slot"]["offset"], size):
            if os.getppid() != daemon:
                return {"failed": "the daemon that asked is gone"}
            memory = _mapped(path)
            done = recompute(_slot(memory, size, told["base"]), _slot(memory, size, told["slot"]))
    except CannotRecompute as error:
        return {"failed": str(error)}
    except Exception as error:  # noqa: BLE001 - see the next line
        # A peer chooses what is in the slot, and all peers share this process: none may end it.
        return {"failed": f"{type(error).__name__}: {error}"}
    return {"computed_bytes": done}


@contextmanager
def _filling(path: str, offset: int, length: int) -> Iterator[None]:
    """The slot is written to in the body.

    A daemon that is killed meanwhile has a successor, which must not give the slot to somebody else: it sees
    this lock. It was taken before the daemon that asked was seen alive, so no successor can have looked
    before.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        note_filling(fd, offset, length)
        yield
    finally:
        os.close(fd)


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer requests of the parent process until they end."""
    daemon = os.getppid()
    for line in requests:
        answers.write(json.dumps(_answer(line, daemon)) + "\n")
        answers.flush()


def _warm_up() -> None:
    """The first step of a process imports much of torch, which takes seconds: nobody waits for it now."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    for name in OPTIMIZERS:
        getattr(torch.optim, name)([parameter], lr=0.0).step()


def main() -> None:
    """Say that torch is there, then serve."""
    _warm_up()
    # What a library prints must not come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answers.write(json.dumps({"torch": str(torch.__version__)}) + "\n")
    answers.flush()
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
