"""Finds by experiment whether an optimizer updates each parameter, and each row of one, independently.

Nothing here knows an optimizer by name. A clone of the optimizer (same class, same options, tiny parameters
of the same rank, dtype and device) is stepped several times while something that should not matter changes:
the other parameters' gradients, whether they have any, their number, and the other rows of the same tensor.
The weights and all optimizer state are compared bit for bit. The clone never touches the user's parameters,
state, or random generators.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.log_lines import get_logger
from ckptd.client.optimizers.optimizer_copies import CannotCopy, HiddenState, OptimizerCopier
from ckptd.client.optimizers.value_trees import flat_state, plain_tensor, strides_of
from ckptd.client.rng_state import capture_rng, restore_rng

logger = get_logger(__name__)

_STEPS = 3
_ROWS = 4
_SHAPE = (_ROWS, 6, 8, 3, 2)
_BYSTANDER = (5, 7, 2, 2, 2)
# Factors of the other rows' weights and gradients.
_OTHER_ROWS = {"other": (-1.7, -2.3), "zero": (0, 0), "large": (1e3, 1e3)}


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One entry of an optimizer's per-parameter state.

    ``kind``: ``like`` (a tensor of the parameter's shape), ``scalar`` (0-dimensional tensor), ``tensor``
    (another shape), ``python`` (no tensor, or one with more than strided memory), ``none`` (None so far:
    the tensor appears later or never). A tensor that is made of others has an entry for each of these.
    """

    key: str
    kind: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    on_host: bool = False

    @property
    def is_tensor(self) -> bool:
        """True if a plan captures it as a tensor."""
        return self.kind in ("like", "scalar", "tensor")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Whether updates are ``independent`` per parameter, and ``rowwise`` per row along dimension 0.

    ``reason`` says what was seen.
    """

    independent: bool
    rowwise: bool
    reason: str
    state: tuple[StateSpec, ...]


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside a wrapper that keeps it in ``.optimizer`` (Accelerate and others) or in
    ``.optim`` (torch's ``PostLocalSGDOptimizer``).

    Raises:
        ValueError: there is none.
    """
    seen = 0
    while not _is_whole(optimizer):
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "optim", None)
        if seen == 4 or inner is None:
            raise ValueError(
                f"{type(optimizer).__name__} is not a torch.optim.Optimizer and holds none in `.optimizer` "
                "or `.optim`; pass the optimizer itself (or a list of them)"
            )
        optimizer, seen = inner, seen + 1
    return optimizer


def _is_whole(optimizer: Any) -> TypeGuard[torch.optim.Optimizer]:
    """False for a wrapper that is an ``Optimizer``, but was never initialized as one."""
    return isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer)


def state_keeper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that keeps the state: this rank's part of a ``ZeroRedundancyOptimizer``, or itself.

    Raises:
        ValueError: it updates weights within the backward pass, where steps cannot be distinguished.
    """
    if not any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        return optimizer
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise ValueError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates weights within the backward pass, "
            "where no snapshot boundary can be; pass overlap_with_ddp=False and call step()"
        )
    part: torch.optim.Optimizer = optimizer.optim  # type: ignore[attr-defined]
    return part


def probe_optimizer(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    *,
    ndim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ProbeResult:
    """Step clones of ``optimizer``, with the options of ``group``, on tiny parameters like the real ones."""
    with _same_rng():  # its own errors are not the optimizer's
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                return _Experiment(optimizer, group, ndim, dtype, device).result()
        except Exception as error:  # noqa: BLE001
            # The user's optimizer ran inside the clone: whatever it raises, it cannot be examined this way.
            if isinstance(error, CannotCopy):
                why = str(error)
            elif isinstance(error, TypeError) and "closure" in str(error):
                why = "its step() needs a closure, which may evaluate all parameters together"
            else:
                why = f"{type(error).__name__}: {error}"
    reason = f"{type(optimizer).__name__} cannot be stepped on a stand-in of rank {ndim}: {why}"
    return ProbeResult(False, False, reason, ())


@contextmanager
def _same_rng() -> Iterator[None]:
    saved = capture_rng()
    try:
        yield
    finally:
        restore_rng(saved)


@dataclass(frozen=True, slots=True)
class _Outcome:
    weight: Tensor
    state: dict[str, Any]

    def difference(self, other: _Outcome, rows: slice) -> str:
        """The first difference within ``rows``; empty if all is identical to the bit."""
        if not _same_bits(self.weight, other.weight, rows):
            return "the weight"
        if self.state.keys() != other.state.keys():
            return "the set of state entries"
        for key, value in self.state.items():
            there = other.state[key]
            if isinstance(value, Tensor) and isinstance(there, Tensor):
                part = rows if value.shape == self.weight.shape else slice(None)
                same = value.shape == there.shape and _same_bits(value, there, part)
            else:
                same = type(value) is type(there) and _equal(value, there)
            if not same:
                return f"state {key!r}"
        return ""


@dataclass(frozen=True, slots=True)
class _Experiment:
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    ndim: int
    dtype: torch.dtype
    device: torch.device

    def result(self) -> ProbeResult:
        base = self.run("base")
        specs = state_specs(base.weight, base.state)
        name = type(self.optimizer).__name__
        for change, words in (
            ("other", "other parameters' gradients"),
            ("none", "whether other parameters have gradients"),
            ("absent", "which other parameters there are"),
        ):
            if difference := base.difference(self.run(change), slice(None)):
                reason = f"{name}: the update of one parameter depends on {words} ({difference} differs)"
                return ProbeResult(False, False, reason, specs)
        rowwise = self.ndim > 0 and all(s.kind != "tensor" for s in specs) and self.is_rowwise(base)
        if self.ndim < 2:
            reason = "independent per parameter"
        elif rowwise:
            reason = "independent per row"
        else:
            reason = f"{name}: independent per parameter, not per row"
        return ProbeResult(True, rowwise, reason, specs)

    def is_rowwise(self, base: _Outcome) -> bool:
        first = slice(0, 1)
        return all(not base.difference(self.run("base", rows), first) for rows in _OTHER_ROWS)

    def run(self, bystanders: str, rows: str = "same") -> _Outcome:
        """The outcome for one parameter beside two others.

        Args:
            bystanders: ``base``, or with ``other`` gradients, ``none``, or themselves ``absent``.
            rows: ``same``, or a key of ``_OTHER_ROWS`` for all rows but the first.
        """
        generator = torch.Generator().manual_seed(20260731)

        def real(value: Tensor) -> Tensor:
            return value.to(dtype=self.dtype, device=self.device)

        def draw(shape: tuple[int, ...], scale: float) -> Tensor:
            return real(torch.randn(shape, generator=generator) * scale)

        shapes = (_SHAPE[: self.ndim], _BYSTANDER[: self.ndim], _BYSTANDER[: self.ndim])
        subject, before, after = (torch.nn.Parameter(draw(shape, 0.5)) for shape in shapes)
        gradients = [[draw(tuple(p.shape), 0.1) for p in (before, subject, after)] for _ in range(_STEPS)]
        if rows != "same" and self.ndim:
            of_weight, of_gradient = _OTHER_ROWS[rows]
            with torch.no_grad():
                # In fp32, because there is no arithmetic in float8.
                subject[1:] = real(subject[1:].float() * of_weight)
                for _, g, _ in gradients:
                    g[1:] = real(g[1:].float() * of_gradient)
        held = [subject] if bystanders == "absent" else [before, subject, after]
        clone = clone_optimizer(self.optimizer, self.group, held)
        if self.device.type == "cpu":
            # For devices that are not in use torch would only note it, with a formatted stack for each.
            torch.default_generator.manual_seed(7)
        else:
            torch.manual_seed(7)
        with HiddenState([self.optimizer]).aside():
            for g_before, g_subject, g_after in gradients:
                subject.grad = g_subject.clone()
                if bystanders == "base":
                    before.grad, after.grad = g_before.clone(), g_after.clone()
                elif bystanders == "other":
                    before.grad, after.grad = real(g_before.float() * -3), real(g_after.float() * 40)
                else:
                    before.grad = after.grad = None
                type(clone).step(clone)
        return _Outcome(subject.detach(), flat_state(clone.state.get(subject, {})))


def clone_optimizer(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and options over ``params``, without state, hooks, or ties."""
    # Its groups, which hold the original's parameters, are replaced below.
    clone = OptimizerCopier({id(optimizer.param_groups): []}).optimizer(optimizer, state=False)
    options = {
        k: v.clone() if isinstance(v, Tensor) else copy.copy(v) for k, v in group.items() if k != "params"
    }
    if isinstance(options.get("lr"), float | int) and options["lr"] == 0:
        options["lr"] = 1e-3  # a warm-up that starts at zero would hide every dependence
    clone.param_groups = [{**options, "params": params}]
    return clone


def state_specs(param: Tensor, state: dict[str, Any]) -> tuple[StateSpec, ...]:
    """Classify the entries of one parameter's optimizer state (see `flat_state`)."""
    specs = []
    for key, value in state.items():
        if value is None:
            specs.append(StateSpec(key, "none"))
        elif not isinstance(value, Tensor) or not plain_tensor(_shard(value)):
            specs.append(StateSpec(key, "python"))
        elif value.ndim == 0:
            specs.append(StateSpec(key, "scalar", value.dtype, on_host=value.device.type == "cpu"))
        elif value.shape == param.shape:
            specs.append(StateSpec(key, "like", value.dtype))
        else:
            specs.append(StateSpec(key, "tensor", value.dtype, tuple(value.shape)))
    return tuple(specs)


def fits(value: Any, spec: StateSpec, param: Tensor) -> bool:
    """True if an entry of the state of ``param`` is such a tensor as ``spec`` describes."""
    if not spec.is_tensor or not isinstance(value, Tensor):
        return False
    here, held = _shard(value), _shard(param)
    wanted = held.shape if spec.kind == "like" else spec.shape or ()
    if not (plain_tensor(here) and here.dtype is spec.dtype and here.shape == wanted):
        return False
    # As a fresh process makes it: `empty_like` of the parameter, or contiguous.
    return strides_of(here) == (strides_of(held) if spec.kind == "like" else [])


def _shard(tensor: Tensor) -> Tensor:
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def observe_state(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    param: Tensor,
    otherwise: tuple[StateSpec, ...] = (),
) -> tuple[StateSpec, ...]:
    """The state that this optimizer keeps for ``param``: steps a clone once on a stand-in of its shape.

    Needs memory for a few tensors of that size; used only if the state's shapes are not the parameter's.

    Args:
        otherwise: the result if the stand-in cannot be stepped.
    """
    with _same_rng():
        try:
            stand_in = torch.nn.Parameter(torch.zeros_like(param, requires_grad=False))
            clone = clone_optimizer(optimizer, group, [stand_in])
            stand_in.grad = torch.ones_like(param)
            with HiddenState([optimizer]).aside():
                type(clone).step(clone)
            return state_specs(stand_in, flat_state(clone.state.get(stand_in, {})))
        except Exception as error:  # noqa: BLE001 - the user's optimizer: its first update will tell
            logger.info("what %s keeps is seen after its first update: %s", type(optimizer).__name__, error)
    return otherwise


def _equal(a: Any, b: Any) -> bool:
    """Equality of plain values with tensors; others cannot be compared, and count as different."""
    try:
        return values.equal(a, b)
    except values.UnsupportedValue:
        return False


def _same_bits(a: Tensor, b: Tensor, rows: slice) -> bool:
    here, there = (t[rows] if t.ndim else t for t in (a, b))
    if here.shape != there.shape or here.dtype != there.dtype:
        return False
    return torch.equal(values.bytes_of(here), values.bytes_of(there))
