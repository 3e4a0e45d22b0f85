"""What an optimizer does, found by experiment: is one parameter's update independent of the others,
and one row's of the rest?

Nothing here knows an optimizer by name. A clone of the optimizer (same class, same options, tiny
parameters of the same rank, dtype and device) is stepped several times while something that should
not matter is changed: the other parameters' gradients, whether they have any, their number, and the
other rows of the same tensor. What must not change is compared bit for bit: the weights and all
optimizer state. The clone never touches the user's parameters, state, or random generators.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.log_lines import get_logger
from ckptd.client.optimizers.optimizer_copies import CannotCopy, HiddenState, OptimizerCopier
from ckptd.client.optimizers.value_trees import plain_tensor, strides_of
from ckptd.client.rng_state import capture_rng, restore_rng

__all__ = [
    "ProbeResult",
    "StateSpec",
    "fits",
    "observe_state",
    "probe_optimizer",
    "state_keeper",
    "state_specs",
    "unwrap_optimizer",
]

logger = get_logger(__name__)

_STEPS = 3
_ROWS = 4
_SHAPE = (_ROWS, 6, 8, 3, 2)
_BYSTANDER = (5, 7, 2, 2, 2)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One entry of an optimizer's per-parameter state.

    ``kind``: ``like`` (a tensor of the parameter's shape), ``scalar`` (0-dimensional tensor),
    ``tensor`` (another shape), ``python`` (no tensor, or one whose strided memory is not all there
    is of it), ``none`` (None so far: the tensor appears later or never).
    """

    key: str
    kind: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    on_host: bool = False

    @property
    def is_tensor(self) -> bool:
        """Whether a plan captures it as a tensor."""
        return self.kind in ("like", "scalar", "tensor")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """``independent``: per parameter. ``rowwise``: per row along dimension 0. ``reason`` says what
    was seen.
    """

    independent: bool
    rowwise: bool
    reason: str
    state: tuple[StateSpec, ...]


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside a wrapper that keeps it in ``.optimizer`` (Accelerate and others).

    Raises:
        ValueError: there is none.
    """
    seen = 0
    while not _is_whole(optimizer):
        if seen == 4 or not hasattr(optimizer, "optimizer"):
            raise ValueError(
                f"{type(optimizer).__name__} is not a torch.optim.Optimizer and holds none in `.optimizer`; "
                "pass the optimizer itself (or a list of them)"
            )
        optimizer, seen = optimizer.optimizer, seen + 1
    return optimizer


def _is_whole(optimizer: Any) -> TypeGuard[torch.optim.Optimizer]:
    """Whether this is a torch optimizer, and not a wrapper that passes for one (Accelerate's) but
    was never set up as one.
    """
    return isinstance(optimizer, torch.optim.Optimizer) and (
        "param_groups" in vars(optimizer) or not hasattr(optimizer, "optimizer")
    )


def state_keeper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that keeps the state: this rank's part of a ``ZeroRedundancyOptimizer``, else
    the optimizer itself.

    Raises:
        ValueError: its updates happen within the backward pass, where no step can be told from the next.
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
    """Step clones of ``optimizer`` on tiny parameters of this rank and dtype, with the options of
    ``group``.
    """
    saved = capture_rng()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            return _probe(optimizer, group, ndim, dtype, device)
    except Exception as error:  # noqa: BLE001
        # The user's optimizer ran inside the clone: whatever it raises means that it cannot be
        # examined this way.
        why = _why(error)
        reason = f"{type(optimizer).__name__} cannot be stepped on a stand-in of rank {ndim}: {why}"
        return ProbeResult(False, False, reason, ())
    finally:
        restore_rng(saved)


def _why(error: Exception) -> str:
    if isinstance(error, CannotCopy):
        return str(error)
    if isinstance(error, TypeError) and "closure" in str(error):
        return "its step() needs a closure, which may evaluate all parameters together"
    return f"{type(error).__name__}: {error}"


def _probe(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    ndim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ProbeResult:
    def run(bystanders: str, rows: str = "same") -> tuple[Tensor, dict[str, Any]]:
        return _run(optimizer, group, ndim, dtype, device, bystanders, rows)

    weight, state = run("base")
    specs = state_specs(weight, state)
    name = type(optimizer).__name__
    for change, words in (
        ("other", "other parameters' gradients"),
        ("none", "whether other parameters have gradients"),
        ("absent", "which other parameters there are"),
    ):
        difference = _difference((weight, state), run(change), slice(None))
        if difference:
            return ProbeResult(
                False,
                False,
                f"{name}: the update of one parameter depends on {words} ({difference} differs)",
                specs,
            )
    if ndim < 2:
        return ProbeResult(True, _rowwise(weight, specs, run, ndim), "independent per parameter", specs)
    rowwise = _rowwise(weight, specs, run, ndim)
    return ProbeResult(
        True,
        rowwise,
        "independent per row" if rowwise else f"{name}: independent per parameter, not per row",
        specs,
    )


def _rowwise(
    weight: Tensor,
    specs: Sequence[StateSpec],
    run: Callable[..., tuple[Tensor, dict[str, Any]]],
    ndim: int,
) -> bool:
    if ndim == 0 or any(s.kind == "tensor" for s in specs):
        return False
    base = run("base")
    return all(not _difference(base, run("base", rows), slice(0, 1)) for rows in ("other", "zero", "large"))


def _run(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    ndim: int,
    dtype: torch.dtype,
    device: torch.device,
    bystanders: str,
    rows: str,
) -> tuple[Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(20260731)

    def draw(shape: tuple[int, ...], scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype=dtype, device=device)

    subject = torch.nn.Parameter(draw(_SHAPE[:ndim], 0.5))
    before, after = (
        torch.nn.Parameter(draw(_BYSTANDER[:ndim], 0.5)),
        torch.nn.Parameter(draw(_BYSTANDER[:ndim], 0.5)),
    )
    gradients = [[draw(tuple(p.shape), 0.1) for p in (before, subject, after)] for _ in range(_STEPS)]
    if rows != "same" and ndim:
        with torch.no_grad():
            subject[1:] = {
                "other": subject[1:] * -1.7,
                "zero": subject[1:] * 0,
                "large": subject[1:] * 1e3,
            }[rows]
            for _, g, _ in gradients:
                g[1:] = {"other": g[1:] * -2.3, "zero": g[1:] * 0, "large": g[1:] * 1e3}[rows]
    held = [subject] if bystanders == "absent" else [before, subject, after]
    clone = clone_optimizer(optimizer, group, held)
    torch.manual_seed(7)
    with HiddenState([optimizer]).aside():
        for g_before, g_subject, g_after in gradients:
            subject.grad = g_subject.clone()
            if bystanders == "base":
                before.grad, after.grad = g_before.clone(), g_after.clone()
            elif bystanders == "other":
                before.grad, after.grad = g_before * -3, g_after * 40
            else:
                before.grad = after.grad = None
            type(clone).step(clone)
    return subject.detach(), dict(clone.state.get(subject, {}))


def clone_optimizer(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and options over ``params``, without state, hooks, or ties to
    the original.
    """
    # Its groups, which hold the original's parameters, are put in place below.
    clone = OptimizerCopier({id(optimizer.param_groups): []}).optimizer(optimizer, state=False)
    options = {
        k: v.clone() if isinstance(v, Tensor) else copy.copy(v) for k, v in group.items() if k != "params"
    }
    if isinstance(options.get("lr"), float | int) and options["lr"] == 0:
        options["lr"] = 1e-3  # a warm-up that starts at zero would hide every dependence
    clone.param_groups = [{**options, "params": params}]
    return clone


def state_specs(param: Tensor, state: dict[str, Any]) -> tuple[StateSpec, ...]:
    """Classify the entries of one parameter's optimizer state."""
    specs = []
    for key, value in state.items():
        if value is None:
            specs.append(StateSpec(key, "none"))
        elif not isinstance(value, Tensor) or not _strided(value):
            specs.append(StateSpec(key, "python"))
        elif value.ndim == 0:
            specs.append(StateSpec(key, "scalar", value.dtype, on_host=value.device.type == "cpu"))
        elif value.shape == param.shape:
            specs.append(StateSpec(key, "like", value.dtype))
        else:
            specs.append(StateSpec(key, "tensor", value.dtype, tuple(value.shape)))
    return tuple(specs)


def fits(value: Any, spec: StateSpec, param: Tensor) -> bool:
    """Whether an entry of the state of ``param`` is such a tensor as ``spec`` says."""
    if not spec.is_tensor or not isinstance(value, Tensor):
        return False
    here, held = _shard(value), _shard(param)
    wanted = held.shape if spec.kind == "like" else spec.shape or ()
    if not (_strided(here) and here.dtype is spec.dtype and here.shape == wanted):
        return False
    # As a fresh process makes it: `empty_like` of the parameter, or contiguous.
    return strides_of(here) == (strides_of(held) if spec.kind == "like" else [])


def _shard(tensor: Tensor) -> Tensor:
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _strided(tensor: Tensor) -> bool:
    return plain_tensor(_shard(tensor))


def observe_state(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    param: Tensor,
    otherwise: tuple[StateSpec, ...] = (),
) -> tuple[StateSpec, ...]:
    """The state that this optimizer will keep for ``param``, by stepping a clone once on a stand-in
    of its true shape.

    Needs memory for a few tensors of that size; used only where the state's shapes are not the parameter's.

    Args:
        otherwise: what is taken for it where such a stand-in cannot be stepped.
    """
    saved = capture_rng()
    try:
        stand_in = torch.nn.Parameter(torch.zeros_like(param, requires_grad=False))
        clone = clone_optimizer(optimizer, group, [stand_in])
        stand_in.grad = torch.ones_like(param)
        with HiddenState([optimizer]).aside():
            type(clone).step(clone)
        return state_specs(stand_in, dict(clone.state.get(stand_in, {})))
    except Exception as error:  # noqa: BLE001 - the user's optimizer: the first update will tell
        logger.info("what %s keeps is seen after its first update: %s", type(optimizer).__name__, error)
        return otherwise
    finally:
        restore_rng(saved)


def _difference(a: tuple[Tensor, dict[str, Any]], b: tuple[Tensor, dict[str, Any]], rows: slice) -> str:
    """The name of the first thing that differs within ``rows``; empty if all is identical to the bit."""
    weight_a, weight_b = a[0], b[0]
    if not _same_bits(
        weight_a[rows] if weight_a.ndim else weight_a, weight_b[rows] if weight_b.ndim else weight_b
    ):
        return "the weight"
    if a[1].keys() != b[1].keys():
        return "the set of state entries"
    for key, value in a[1].items():
        other = b[1][key]
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            part = rows if value.ndim and value.shape == weight_a.shape else slice(None)
            if value.shape != other.shape or not _same_bits(
                value[part] if value.ndim else value, other[part] if other.ndim else other
            ):
                return f"state {key!r}"
        elif type(value) is not type(other) or not _equal(value, other):
            return f"state {key!r}"
    return ""


def _equal(a: Any, b: Any) -> bool:
    """Of plain values, tensors in them included. What else there is cannot be compared, so it is
    taken for different.
    """
    try:
        return values.equal(a, b)
    except values.UnsupportedValue:
        return False


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(values.bytes_of(a), values.bytes_of(b))
