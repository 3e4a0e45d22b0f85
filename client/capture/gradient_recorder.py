"""Gradients for peers: those of the last step, into the slot of the snapshot that follows it
(docs/recompute.md).

Before an optimizer's step the training thread notes which gradients there are and with which options the
step is made. That copies nothing: gradients are held, and stay as they are, since ``zero_grad()`` drops
them. At the next top they are copied behind the image, beside training like everything else. A gradient
that was written to before its copy was complete (``zero_grad(set_to_none=False)``, buckets of DDP) makes
the block useless. The snapshot goes whole then, and from the next one on the training thread copies
gradients at the top.

A peer can compute what the snapshot before holds as well: weight and state of a parameter, whole, on the
CPU, of an optimizer that it knows, updated once in between. Everything else goes as it is in the image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.snapshot_layout import (
    SAFETENSORS_DTYPES,
    EntrySource,
    PhasePlan,
    computable,
    entry_name,
    whole_states,
)
from ckptd.cuda.engine import CopyItem
from ckptd.storage.gradient_block import (
    OPTIMIZERS,
    UpdatedGroup,
    UpdatedParameter,
    UpdateRecord,
    aligned,
    first_gradient,
    record_bytes_max,
    write_block,
)

logger = get_logger(__name__)

_T = TypeVar("_T")


class GradientCopy:
    """The gradients of one snapshot on their way into its slot.

    What is to be copied is found when the copies are made, which is beside training, unless they are made
    at once. No method raises: what is for peers alone does not cost a snapshot.

    Args:
        late: called if a gradient was written to before its copy was complete.
        failed: called with an error, after which there is no block.

    Attributes:
        at_once: True if the training thread must make the copies at the top.
    """

    def __init__(
        self,
        find: Callable[[], _Block],
        at_once: bool,
        late: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._find: Callable[[], _Block] | None = find
        self._late, self._failed, self.at_once = late, failed, at_once
        self._block: _Block | None = None
        self._usable = False

    def items(self) -> list[CopyItem]:
        """The copies, once; their offsets count from the beginning of the slot."""
        find, self._find = self._find, None  # it holds the gradients
        assert find is not None
        self._block = self._tried(find)
        self._usable = self.at_once
        return [] if self._block is None else self._block.items

    def copied(self) -> None:
        """The copies are complete: was a gradient written to before?"""
        block = self._block
        if block is None:
            return
        if not self.at_once:
            self._usable = all(tensor._version == version for tensor, version in block.versions)
            if not self._usable:
                self._late()
        block.items, block.versions = [], []  # gradients are not kept longer

    def write(self, slot: memoryview, image_len: int, *, iteration: int, sequence: int) -> None:
        """Complete the block behind the image, unless it is useless."""
        block, names = self._block, {"iteration": iteration, "sequence": sequence}
        if block is not None and block.moves and self._usable:
            self._tried(lambda: write_block(slot, image_len, block.record(), block.end, **names))

    def _tried(self, work: Callable[[], _T]) -> _T | None:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the snapshot goes to peers whole
            self._block = None
            self._failed(error)
            return None


@dataclass(slots=True)
class _HeldStep:
    """One step of an optimizer: its gradients with their versions, and the options of its groups."""

    gradients: dict[str, tuple[Tensor | None, int]]
    options: list[dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class _Whole:
    """What a snapshot holds whole: the image's tensor of each state, and parameters by optimizer."""

    states: Mapping[str, dict[str, str]]
    names: Mapping[int, list[str]]

    @classmethod
    def of(cls, binding: LiveState, plan: PhasePlan) -> _Whole:
        states = {n: found for n, found in whole_states(plan).items() if computable(binding.held(n))}
        names: dict[int, list[str]] = {}
        for name in states:
            names.setdefault(binding.owner[name][0], []).append(name)
        return cls(states, names)


_NOTHING = _Whole({}, {})


class GradientRecorder:
    """Holds gradients from the optimizer's step to the next top."""

    def __init__(self, binding: LiveState) -> None:
        self._binding = binding
        # Since the snapshot before, by optimizer; None: no peer can compute it, or there were several.
        self._steps: dict[int, _HeldStep | None] = {}
        self._base, self._before = -1, _NOTHING
        self._plans: dict[int, tuple[PhasePlan, _Whole]] = {}
        self._at_once = False
        self._said: set[str] = set()

    def hold(self, optimizer: int) -> None:
        """Optimizer number ``optimizer`` is about to step."""
        again, self._steps[optimizer] = optimizer in self._steps, None
        if not again:
            try:
                self._steps[optimizer] = self._held_step(optimizer)
            except Exception as error:  # noqa: BLE001 - as in `GradientCopy`
                self._failed(error)

    def _held_step(self, optimizer: int) -> _HeldStep | None:
        names = self._before.names.get(optimizer)
        if not names:  # nothing that a peer could go on from: gradients would be kept in vain
            return None
        live = self._binding.optimizers[optimizer]
        name = type(live).__name__
        if getattr(live, "grad_scale", None) is not None:  # a fused step, which may skip itself
            self._say("peers get the whole state of a step that unscales gradients itself (GradScaler)")
            return None
        if name not in OPTIMIZERS or type(live) is not getattr(torch.optim, name):
            self._say(
                f"peers get the whole state of what {name} updates: they compute steps of "
                f"{', '.join(OPTIMIZERS)} of torch.optim only"
            )
            return None
        grads = {n: self._binding.held(n).grad for n in names}
        return _HeldStep(
            {n: (g, 0 if g is None else g._version) for n, g in grads.items()},
            [_plain_options(group) for group in live.param_groups],
        )

    def drop(self) -> None:
        """No snapshot is taken at this top: the next one does not follow from one step."""
        self._steps.clear()
        self._base, self._before = -1, _NOTHING

    def take(self, step: int, plan: PhasePlan, previous: int, slot_bytes: int) -> GradientCopy | None:
        """The gradients that lead from snapshot ``previous`` to that of ``step``; None: nothing is gained.

        Args:
            previous: the snapshot before in the chain; -1: none.
        """
        base, before, steps = self._base, self._before, self._steps
        here = self._whole(plan)
        self._base, self._before, self._steps = step, here, {}
        if previous < 0 or previous != base or not any(steps.values()):
            return None

        def find() -> _Block:
            block = _Block(self._binding, plan, previous, slot_bytes, checks=self._at_once)
            for name, states in here.states.items():
                number, group = self._binding.owner[name]
                held = steps.get(number)
                if name not in before.states or held is None or name not in held.gradients:
                    continue
                options = held.options[group]
                if options is not None:
                    block.add(name, states, (number, group), held.gradients[name], options)
            self._say_what_is_missing(block)
            return block

        return GradientCopy(find, self._at_once, self._late, self._failed)

    def _whole(self, plan: PhasePlan) -> _Whole:
        known = self._plans.get(plan.phase)
        if known is None or known[0] is not plan:
            known = self._plans[plan.phase] = plan, _Whole.of(self._binding, plan)
            if not known[1].states:
                self._say(
                    "peers get the whole state: there is no weight with optimizer state that is a plain, "
                    "contiguous tensor on the CPU, and whole in a snapshot"
                )
        return known[1]

    def _say_what_is_missing(self, block: _Block) -> None:
        if block.written:
            self._say(
                "gradients are written to between the optimizer's step and the next top, so peers get the "
                "whole state; zero_grad(set_to_none=True), the default, leaves them as they are"
            )
        if block.left_out:
            self._say(
                f"slots have no room for {block.left_out} gradients (of an earlier start without them, or of "
                "other experts): these parameters go to peers whole"
            )

    def _failed(self, error: Exception) -> None:
        self._say(f"gradients for peers, who get the whole state: {type(error).__name__}: {error}")

    def _late(self) -> None:
        if not self._at_once:
            self._at_once = True
            logger.warning(
                "gradients changed while they were copied for peers; from now on the training thread copies "
                "them at the top of each step, which takes longer. zero_grad(set_to_none=True), the default, "
                "leaves them as they are"
            )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)


class _Block:
    """Collects the parameters of one block.

    Attributes:
        end: bytes from the beginning of the block to the end of its last gradient.
        left_out: gradients without room; written: with ``checks``, those that were written to.
    """

    def __init__(
        self, binding: LiveState, plan: PhasePlan, base: int, slot_bytes: int, *, checks: bool
    ) -> None:
        self._binding, self._base, self._checks = binding, base, checks
        self._start = aligned(plan.layout.image_len)
        self._room = slot_bytes - self._start
        self._scalars = _scalars_of(plan)
        self._groups: dict[tuple[int, int], UpdatedGroup] = {}
        self._described = 0
        self.items: list[CopyItem] = []
        self.versions: list[tuple[Tensor, int]] = []
        self.end = first_gradient()
        self.left_out = self.written = 0
        self.moves = False

    def add(
        self,
        name: str,
        states: dict[str, str],
        owner: tuple[int, int],
        held: tuple[Tensor | None, int],
        options: dict[str, Any],
    ) -> None:
        """Add a parameter if a peer can compute its step."""
        gradient, version = held
        weight = self._binding.held(name)
        if not computable(weight):  # any more
            return
        offset = -1
        if gradient is not None:
            size = weight.numel() * weight.element_size()
            fits = computable(gradient) and gradient.dtype is weight.dtype
            written = self._checks and gradient._version != version
            self.written += written
            if written or not fits or not size:
                return
            described = self._described + record_bytes_max([name], 0) - record_bytes_max([], 0)
            around = record_bytes_max([], len(self._groups) + (owner not in self._groups))
            if self.end + aligned(size) + described + around > self._room:
                self.left_out += 1
                return
            self._described = described
            offset, self.end = self.end, self.end + aligned(size)
            self.items.append(
                CopyItem(gradient.detach(), None, None, weight.dtype, self._start + offset, size)
            )
            self.versions.append((gradient, version))
            self.moves = True
        entry = entry_name(EntrySource("master" if name in self._binding.masters else "param", name))
        group = self._groups.get(owner)
        if group is None:
            optimizer = type(self._binding.optimizers[owner[0]]).__name__
            group = self._groups[owner] = UpdatedGroup(optimizer, options, [])
        group.parameters.append(UpdatedParameter(entry, states, self._scalars.get(name, {}), offset))

    def record(self) -> UpdateRecord:
        """The description of the block."""
        groups = list(self._groups.values())
        return UpdateRecord(self._base, torch.get_num_threads(), str(torch.__version__), groups)


def _scalars_of(plan: PhasePlan) -> dict[str, dict[str, tuple[str, int]]]:
    """Where the packed state of each parameter lies."""
    found: dict[str, dict[str, tuple[str, int]]] = {}
    for dtype, places in plan.packed.items():
        entry = entry_name(EntrySource("packed", SAFETENSORS_DTYPES[dtype]))
        for position, (name, key) in enumerate(places):
            found.setdefault(name, {})[key] = entry, position
    return found


def _plain_options(group: dict[str, Any]) -> dict[str, Any] | None:
    """A copy of a group's options; None if there is one that a peer cannot be told (a tensor as ``lr``)."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, tuple | list) and all(isinstance(each, int | float) for each in value):
            found[key] = [float(each) for each in value]
        elif isinstance(value, float):
            found[key] = float(value)  # numpy's are floats, too
        elif value is None or type(value) in (bool, int, str):
            found[key] = value
        else:
            return None
    return found
