"""The copies that a rehearsal steps: of the parameters, and of the optimizers as a resume makes them.

A resume begins with optimizers as the program makes them, and loads a snapshot into them. So they
are copied when a checkpointer is made, before the first step (`Pristine`), with what their code
keeps elsewhere. `Pristine.resumed` makes a state of these, of parameters of its own, and has a
`Replay` load a snapshot into it. `control` makes one of what is live, with all that is in memory:
where that one does not step as the live one does, copies tell nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckptd.client import values
from ckptd.client.capture.comparison import live_tensor, same_bits
from ckptd.client.capture.step_state import apply_groups, gather_groups
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.model.freezing import Tape
from ckptd.client.model.hooks import closure_of, with_closure
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.operators import Operator
from ckptd.client.model.snapshot_layout import EntrySource, Rows, common, merge, rows_of_piece
from ckptd.client.optimizers.optimizer_copies import CannotCopy, HiddenState, OptimizerCopier
from ckptd.client.optimizers.value_trees import plain, plain_tensor
from ckptd.client.recovery.activation import Activity
from ckptd.client.recovery.replay import Replay
from ckptd.cuda.engine import CopyEngine

__all__ = ["Pristine", "SteppedCopy", "anchored_names", "changed_since", "differences"]

_ALIGNMENT = 64
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# What torch's gradient scaler tells an optimizer for the time of one step.
_OF_A_SCALER = ("grad_scale", "found_inf")


class SteppedCopy:
    """A state like the live one, of which one optimizer's step is tried.

    Attributes:
        binding: its parameters and optimizers.
        rows: the rows of each parameter that count.
        whole: whether these are all that the live optimizers update.
        outside: what the optimizers' code keeps elsewhere, for this copy.
        scalars: those of the snapshot that was loaded; empty for a control.
    """

    def __init__(
        self, binding: LiveState, live: LiveState, rows: Rows, outside: list[Any], scalars: Any
    ) -> None:
        self.binding, self.rows, self.outside, self.scalars = binding, rows, outside, scalars
        updated = live.owner.keys() - live.elsewhere
        self.whole = all(rows.get(n) == [(0, live.num_rows(n))] for n in updated)

    def prepare(self, live: LiveState, index: int) -> None:
        """Gradients and options are those with which the live optimizer is about to step."""
        apply_groups(self.binding, gather_groups(live))
        for name, held in self.binding.named_held():
            grad = live.held(name).grad if name in self.rows else None
            held.grad = None if grad is None else _copy_of(grad)
        for name in _OF_A_SCALER:
            if name in vars(live.optimizers[index]):
                self.binding.optimizers[index].__dict__[name] = vars(live.optimizers[index])[name]

    def step(self, index: int, args: Any, kwargs: Any, loss: Any, hidden: HiddenState) -> None:
        """Step optimizer number ``index`` as the live one is about to.

        Args:
            args, kwargs: as the live one's pre-hook got them.
            loss: what its closure has returned.
        Raises:
            CannotCopy: it communicates, or evaluates its closure once more.
        """
        optimizer = self.binding.optimizers[index]
        calls: list[Any] = []

        def closure() -> Any:
            calls.append(loss)
            if len(calls) > 1:
                raise CannotCopy("it evaluates its closure several times in a step")
            return loss

        if closure_of(args, kwargs) is not None:
            args, kwargs = with_closure(args, kwargs, closure)
        with ExitStack() as stack:
            stack.enter_context(hidden.replaced(self.outside))
            if dist.is_available() and dist.is_initialized():
                stack.enter_context(_Alone())
            type(optimizer).step(optimizer, *args[1:], **kwargs)


class _Alone(TorchDispatchMode):
    """Nothing in the body communicates: other ranks do not join."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise CannotCopy("it communicates with other ranks within its step")
        return func(*args, **(kwargs or {}))


class Pristine:
    """Optimizers as the program has made them.

    Args:
        live: nothing is restored in it yet.
    Raises:
        CannotCopy: no copy tells what they do; with the reason.
    """

    def __init__(self, live: LiveState, hidden: HiddenState) -> None:
        _check_kinds(live)
        copier = OptimizerCopier({id(t): t for t in _tensors(live)}, whole=True)
        self._live, self._hidden = live, hidden
        self._optimizers = [copier.optimizer(o, state=False) for o in live.optimizers]
        self._given = [copier.value(g, type(g).__name__) for g in live.kept.given]
        self.outside = hidden.copied(copier)
        self._attributes = {
            id(t): copier.value(dict(vars(t)), "an attribute of a parameter")
            for t in _tensors(live)
            if vars(t)
        }

    def resumed(
        self,
        image: SnapshotImage,
        names: Collection[str],
        operators: Sequence[Operator],
        engine: CopyEngine,
    ) -> SteppedCopy:
        """What a resume from this snapshot makes of these parameters.

        Raises:
            CannotCopy: so it is, with the reason.
        """
        room = _Room(self._live, names, lambda tensor: self._attributes.get(id(tensor), {}))
        binding = room.binding(self._optimizers, self._given, state=False)
        load = _Load(binding, operators, engine, image, names)
        load.load_state()
        load.load_tensors()
        outside = [room.copier.value(value, "outside") for value in self.outside]
        return SteppedCopy(binding, self._live, load.rows, outside, load.oldest_scalars)

    def control(self, rows: Rows) -> SteppedCopy:
        """What is live, with all that is in memory.

        Raises:
            CannotCopy: so it is, with the reason.
        """
        live = self._live
        room = _Room(live, rows, vars)
        for name in live.owner.keys() - rows.keys():  # they are not updated here
            for part in live.state(name).values():
                room.copier.note(part, part)
        binding = room.binding(live.optimizers, live.kept.given, state=True)
        with torch.no_grad():
            for name in rows:
                for now, made in (
                    (live.params[name], binding.params[name]),
                    (live.held(name), binding.held(name)),
                ):
                    made.copy_(now)
        return SteppedCopy(binding, live, rows, self._hidden.copied(room.copier), {})


class _Room:
    """Parameters for a copy: of ``names`` some memory, of the others a shape."""

    def __init__(
        self,
        live: LiveState,
        names: Collection[str],
        attributes: Callable[[Tensor], dict[str, Any]],
    ) -> None:
        self._live = live
        self._model = nn.Module()
        made: dict[int, Tensor] = {}
        for name, param in live.params.items():
            made[id(param)] = _like(param, name in names)
            if not name.startswith("extra/"):
                _register(self._model, name, made[id(param)])
        for name, master in live.masters.items():
            made[id(master)] = _like(master, name in names)
        self.copier = OptimizerCopier(made, whole=True)
        for tensor in _tensors(live):
            kept = attributes(tensor)
            made[id(tensor)].__dict__.update(self.copier.value(kept, "an attribute of a parameter"))
        self._masters = {name: made[id(master)] for name, master in live.masters.items()}

    def binding(
        self, optimizers: Sequence[torch.optim.Optimizer], given: Sequence[Any], *, state: bool
    ) -> LiveState:
        """A state of copies of these optimizers."""
        copies = [self.copier.optimizer(o, state=state) for o in optimizers]
        wrapped = [self.copier.value(g, type(g).__name__) for g in given]
        made = LiveState(self._model, copies, self._masters, wrapped)
        if list(made.params) != list(self._live.params) or made.owner != self._live.owner:
            raise CannotCopy("its parameters have no names in common with those of its copy")
        return made


class _Load(Replay):
    """Loads what one snapshot holds of some parameters, and nothing else."""

    def __init__(
        self,
        binding: LiveState,
        operators: Sequence[Operator],
        engine: CopyEngine,
        image: SnapshotImage,
        names: Collection[str],
    ) -> None:
        super().__init__(binding, operators, engine, [image], stateful={}, tape=Tape(), freezing="none")
        self._only = set(names)
        self._loaded: Rows = {}

    @property
    def rows(self) -> Rows:
        """What was loaded. Of a parameter that several ranks have alike that may be a part: the other
        rows are in the snapshots of another rank.
        """
        active = self.active_rows()
        both = {n: common(active[n], merge(rows)) for n, rows in self._loaded.items() if n in active}
        return {name: rows for name, rows in both.items() if rows}

    def _targets(
        self, image: SnapshotImage, source: EntrySource, *args: Any
    ) -> list[tuple[EntrySource, Tensor]]:
        name = source.name
        if name not in self._only:
            return []
        found = super()._targets(image, source, *args)
        if source.kind == ("master" if name in self._binding.masters else "param"):
            total = self._binding.num_rows(name)
            self._loaded.setdefault(name, []).extend(piece.range(total) for piece, _ in found)
        return found


def anchored_names(live: LiveState, operators: Sequence[Operator], image: SnapshotImage) -> list[str]:
    """The parameters of which this snapshot holds all that their optimizer needs."""
    activity = Activity(live, operators)
    activity.activate(image.view.anchors)
    rows = activity.rows_of(activity.active) | activity.never_frozen()
    here = {source.name for source, _ in image.sources() if source.kind in ("param", "master")}
    return [n for n in live.owner if n in rows and n in here and n not in live.elsewhere]


def differences(live: LiveState, copy: SteppedCopy, index: int) -> list[str]:
    """The paths of what optimizer number ``index`` has made otherwise in the copy.

    Raises:
        NotCapturable: it keeps what no snapshot can hold.
    """
    found: list[str] = []
    other = copy.binding
    for name, rows in copy.rows.items():
        if live.owner[name][0] != index:
            continue
        shape = live.held(name).shape
        if not _same(live.held(name), other.held(name), rows):
            found.append(f"the {'master' if name in live.masters else 'weight'} {name}")
        now, made = live.state(name), other.state(name)
        found += [f"state[{name}][{key!r}]" for key in now.keys() ^ made.keys()]
        for key in now.keys() & made.keys():
            a, b = now[key], made[key]
            if isinstance(a, Tensor) and isinstance(b, Tensor) and plain_tensor(a):
                same = plain_tensor(b) and _same(a, b, rows if a.shape == shape else None)
            else:
                same = not (plain(a) and plain(b)) or values.equal(a, b)
            found += [] if same else [f"state[{name}][{key!r}]"]
    for binding in (live, other):
        binding.kept.look(live.kept.specs)
    kept = live.kept.unlike(other.kept, index, None if copy.whole else copy.rows)
    return found + ([kept] if kept and kept not in found else [])


def changed_since(live: LiveState, image: SnapshotImage, copy: SteppedCopy) -> str:
    """The first thing of these parameters that is not as this snapshot has it; empty if all is."""
    for source, entry in image.sources():
        now = live_tensor(live, source) if source.kind != "packed" else None
        if now is None or source.kind == "buffer" or source.name not in copy.rows:
            continue
        if not same_bits(rows_of_piece(now, source), image.tensor(entry)):
            return f"{source.kind} {source.key} of {source.name}".replace("  ", " ")
    return live.kept.difference(copy.scalars.get("kept"), entries=copy.whole)


def _check_kinds(live: LiveState) -> None:
    for optimizer, keeper in zip(live.optimizers, live.keepers, strict=True):
        if keeper is not optimizer:
            raise CannotCopy("its state is spread over ranks, which communicate within its step")
    for name, held in live.named_held():
        if hasattr(held, "to_local"):
            raise CannotCopy(f"{name} is spread over ranks, which may communicate within its step")
        if not plain_tensor(held):
            raise CannotCopy(f"{name} is a {type(held).__name__}, of which no copy is made")


def _tensors(live: LiveState) -> Iterable[Tensor]:
    return [*live.params.values(), *live.masters.values()]


def _register(root: nn.Module, name: str, param: Tensor) -> None:
    *path, leaf = name.split(".")
    module = root
    for part in path:
        # Not by add_module, which refuses some names that a model may have.
        module = module._modules.setdefault(part, nn.Module()) or module
    module._parameters[leaf] = param  # type: ignore[assignment]


def _like(tensor: Tensor, real: bool) -> Tensor:
    made = _empty(tensor) if real else torch.empty_like(tensor, device="meta")
    made = made.detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _empty(tensor: Tensor) -> Tensor:
    """Memory of the same strides, as far from a multiple of 64 bytes: products of matrices may have
    other bits elsewhere.
    """
    here, size = local(tensor), tensor.element_size()
    extent = 1 + sum((n - 1) * s for n, s in zip(here.shape, here.stride(), strict=True))
    raw = torch.zeros(max(extent, 0) + _ALIGNMENT // size, dtype=here.dtype, device=here.device)
    shift = (here.data_ptr() - raw.data_ptr()) % _ALIGNMENT // size if here.numel() else 0
    return raw.as_strided(here.shape, here.stride(), shift)


def _copy_of(grad: Tensor) -> Tensor:
    if not plain_tensor(grad):
        return grad.detach().clone()
    with torch.no_grad():
        return _empty(grad).copy_(grad)


def _same(a: Tensor, b: Tensor, rows: list[tuple[int, int]] | None) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if rows is None or not a.ndim:
        return _same_bits(a, b)
    return all(_same_bits(a[i:j], b[i:j]) for i, j in rows)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN equals the same NaN; so integers of their bits are compared, not values."""
    kind = _INTEGERS.get(a.element_size(), torch.uint8)
    return torch.equal(*(values.bytes_of(t.detach()).view(kind) for t in (a, b)))
