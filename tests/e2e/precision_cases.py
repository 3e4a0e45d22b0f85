"""Jobs in low precision: weights, masters and moments of the configurations of MoEvement's table 7, FP8
with delayed scaling, and optimizer state that is made of several tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.e2e.cases import Job, loss_of, make

__all__ = ["CONFIGURATIONS", "PRECISION_CASES", "Configuration"]

FP8, FP16, FP32 = torch.float8_e4m3fn, torch.float16, torch.float32
_LOSS_SCALE = 2.0**12


class Configuration(NamedTuple):
    """The dtypes of a row of table 7; ``first`` and ``second`` are those of the moments."""

    compute: torch.dtype
    master: torch.dtype
    first: torch.dtype
    second: torch.dtype


CONFIGURATIONS = {
    "fp16": Configuration(FP16, FP16, FP16, FP16),
    "fp8_fp32": Configuration(FP8, FP32, FP32, FP32),
    "fp8_fp16": Configuration(FP8, FP16, FP32, FP32),
    "fp8_lm": Configuration(FP8, FP16, FP8, FP16),
    "fp8_masters": Configuration(FP8, FP8, FP8, FP16),
}


# -- values and scales -----------------------------------------------------------------------------


def scaled(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``values`` in ``dtype``, and the 0-dimensional scale by which they were divided; 1 unless it is FP8."""
    if dtype.itemsize > 1:
        return values.to(dtype), torch.ones(())
    scale = (values.abs().amax() / torch.finfo(dtype).max).clamp(min=1e-12)
    return (values / scale).to(dtype), scale


class LowAdam(torch.optim.Optimizer):
    """Adam whose weights and moments have a dtype each; what is FP8 has a scale beside it."""

    def __init__(self, params: Any, lr: float, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__(params, {"lr": lr, "dtypes": [first, second]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], group["lr"], group["dtypes"])

    def _update(self, p: Tensor, state: dict[str, Any], lr: float, dtypes: list[torch.dtype]) -> None:
        if not state:
            state["step"], state["scale"] = torch.zeros(()), scaled(p.float(), p.dtype)[1] ** 0
            for key, dtype in zip(("first", "second"), dtypes, strict=True):
                state[key], state[f"{key}_scale"] = torch.zeros_like(p, dtype=dtype), torch.ones(())
        grad = p.grad.float()  # type: ignore[union-attr]
        state["step"] += 1
        moments = []
        for key, value, weight in (("first", grad, 0.1), ("second", grad.square(), 0.01)):
            now = (state[key].float() * state[f"{key}_scale"]).lerp(value, weight)
            low, scale = scaled(now, state[key].dtype)
            state[key].copy_(low)
            state[f"{key}_scale"].copy_(scale)
            moments.append(now)
        change = moments[0] / (moments[1].sqrt() + 1e-8) * (lr * (state["step"] / 10).clamp(max=1))
        low, scale = scaled(p.float() * state["scale"] - change, p.dtype)
        p.copy_(low)
        state["scale"].copy_(scale)


class StoredLinear(nn.Module):
    """A linear layer whose weight is stored in ``dtype``, with its scale in a buffer."""

    scale: Tensor

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        weight, scale = scaled(linear.weight.detach(), dtype)
        self.weight = nn.Parameter(weight)
        self.bias = linear.bias
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.float() * self.scale, self.bias)


def replace_linears(model: nn.Module, make_one: Callable[[nn.Linear], nn.Module]) -> None:
    """Put what ``make_one`` makes of each linear layer in its place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, make_one(child))


def stored_case(seed: int, dtypes: Configuration, *, early: bool = False) -> Job:
    """Weights of linear layers in the compute dtype, masters in the optimizer; after each update the
    weights are made of the masters again. ``early``: before each forward, with masters that nobody declares.
    """
    job = make(sched=False)(seed)
    replace_linears(job.model, lambda linear: StoredLinear(linear, dtypes.compute))
    stored = {n: m for n, m in job.model.named_modules() if isinstance(m, StoredLinear)}
    masters = {
        f"{n}.weight": nn.Parameter(scaled(m.weight.detach().float() * m.scale, dtypes.master)[0])
        for n, m in stored.items()
    }
    held = [masters.get(n, p) for n, p in job.model.named_parameters()]
    job.optimizers = [LowAdam(held, 3e-3, dtypes.first, dtypes.second)]
    job.options["masters"] = {} if early else masters

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        if early:
            _store(stored, masters, job.optimizers[0])
        (loss_of(job.model, next(job.state["data"])) * _LOSS_SCALE).backward()
        at("backward")
        for n, m in stored.items():
            grad = m.weight.grad
            masters[f"{n}.weight"].grad = None if grad is None else grad.to(dtypes.master)
        job.optimizers[0].step()
        at("step")
        if not early:
            _store(stored, masters, job.optimizers[0])
        job.model.zero_grad()
        job.optimizers[0].zero_grad()

    job.body = body
    return job


@torch.no_grad()
def _store(
    stored: Mapping[str, StoredLinear], masters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    for name, linear in stored.items():
        master = masters[f"{name}.weight"]
        # A frozen master has no state while a window is replayed, and its weight is the recorded one.
        state = optimizer.state.get(master, {})
        if not state and master.dtype.itemsize == 1:
            continue
        low, scale = scaled(master.float() * state.get("scale", 1), linear.weight.dtype)
        linear.weight.copy_(low)
        linear.scale.copy_(scale)


class BufferedLinear(nn.Module):
    """A linear layer whose weight and scale are buffers; a leaf of each forward gets the weight's gradient."""

    scale: Tensor
    codes: Tensor
    used: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        codes, scale = scaled(linear.weight.detach(), FP8)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        used = (self.codes.float() * self.scale).requires_grad_()
        self.__dict__["used"] = used
        return nn.functional.linear(x, used, self.bias)


def buffered_case(seed: int) -> Job:
    """FP8 weights in buffers, fp32 masters that the optimizer alone knows."""
    job = make(sched=False)(seed)
    before = {n: m.weight for n, m in job.model.named_modules() if isinstance(m, nn.Linear)}
    replace_linears(job.model, BufferedLinear)
    layers = {n: m for n, m in job.model.named_modules() if isinstance(m, BufferedLinear)}
    masters = {n: nn.Parameter(before[n].detach().clone()) for n in layers}
    job.optimizers = [LowAdam([*masters.values(), *job.model.parameters()], 3e-3, FP8, FP16)]

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        for layer in layers.values():
            layer.__dict__["used"] = torch.empty(0)
        loss_of(job.model, next(job.state["data"])).backward()
        at("backward")
        for n, layer in layers.items():
            masters[n].grad = layer.used.grad
        job.optimizers[0].step()
        at("step")
        for n, layer in layers.items():
            codes, scale = scaled(masters[n].detach(), FP8)
            layer.codes.copy_(codes)
            layer.scale.copy_(scale)
        job.model.zero_grad()
        job.optimizers[0].zero_grad()

    job.body = body
    return job


# -- FP8 in the forward ----------------------------------------------------------------------------


class _Rounded(torch.autograd.Function):
    """FP8 and back; the gradient passes through in e5m2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).clamp(-448, 448).to(FP8).float() / scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(torch.float8_e5m2).float(), None


class DelayedLinear(nn.Module):
    """A linear layer in FP8 with delayed scaling: scales follow from the largest values of the last calls."""

    history: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.register_buffer("history", torch.zeros(2, 3))
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.clone()
        if self.training:
            with torch.no_grad():
                self.history.copy_(self.history.roll(1, 1))
                self.history[:, 0] = torch.stack([x.abs().amax(), self.weight.abs().amax()])
                self.scale.copy_(448 / self.history.amax(1).clamp(min=1e-6))
        w = _Rounded.apply(self.weight, scale[1])
        return nn.functional.linear(_Rounded.apply(x, scale[0]), w, self.bias)


def delayed_case(seed: int) -> Job:
    return make(sched=False, prepare=lambda model: replace_linears(model, DelayedLinear))(seed)


# -- state that is made of several tensors ---------------------------------------------------------


class Blocks(Tensor):
    """A moment as FP8 codes with a scale for each block of values, behind a tensor without memory of its own."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=FP32)

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], _: None, size: Any, stride: Any) -> Blocks:
        return cls(parts["codes"], parts["scales"])

    @classmethod
    def __torch_dispatch__(cls, *called: Any) -> Any:
        if called[0] is not torch.ops.aten.view.default:  # as DTensor.from_local asks for
            raise NotImplementedError
        return Blocks(called[2][0].codes, called[2][0].scales)

    def load(self) -> Tensor:
        return (self.codes.float().view(len(self.scales), -1) * self.scales[:, None]).view(self.codes.shape)

    def store(self, values: Tensor) -> None:
        rows = values.reshape(len(self.scales), -1)
        self.scales.copy_((rows.abs().amax(1) / 448).clamp(min=1e-12))
        self.codes.copy_((rows / self.scales[:, None]).to(FP8).view(values.shape))


class BlockAdam(torch.optim.Optimizer):
    """Adam with moments in `Blocks`, of eight values each, where a parameter or a shard of it has so many."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["first"], state["second"] = self._zeros(p), self._zeros(p)
                state["step"] += 1
                here, grad = _shard(p), _shard(p.grad).float()
                first = _lerp(_shard(state["first"]), grad, 0.1)
                second = _lerp(_shard(state["second"]), grad.square(), 0.01)
                here.sub_(first / (second.sqrt() + 1e-8) * group["lr"] * (state["step"] / 10).clamp(max=1))

    @staticmethod
    def _zeros(p: Tensor) -> Tensor:
        here = _shard(p)
        if here.numel() < 16 or here.numel() % 8:
            return torch.zeros_like(p, dtype=FP32)
        made = Blocks(torch.zeros_like(here, dtype=FP8), torch.zeros(here.numel() // 8))
        if not isinstance(p, DTensor):
            return made
        placed = p.device_mesh, p.placements
        return DTensor.from_local(made, *placed, run_check=False, shape=p.shape, stride=p.stride())


def _shard(tensor: Any) -> Tensor:
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _lerp(moment: Tensor, towards: Tensor, weight: float) -> Tensor:
    if not isinstance(moment, Blocks):
        return moment.lerp_(towards, weight)
    now = moment.load().lerp(towards, weight)
    moment.store(now)
    return now


PRECISION_CASES: dict[str, Callable[[int], Job]] = {
    **{
        f"precision_{name}": lambda seed, dtypes=dtypes: stored_case(seed, dtypes)  # type: ignore[misc]
        for name, dtypes in CONFIGURATIONS.items()
    },
    "precision_early": lambda seed: stored_case(seed, CONFIGURATIONS["fp8_fp32"], early=True),
    "precision_buffers": buffered_case,
    "precision_delayed": delayed_case,
    "precision_moments": make(lambda ps: LowAdam(ps, 3e-3, torch.float8_e5m2, torch.bfloat16), sched=False),
    "precision_moments_fused": make(
        lambda ps: LowAdam(ps, 3e-3, torch.float8_e5m2, torch.bfloat16), sched=False, fused=True
    ),
    "precision_blocks": make(lambda ps: BlockAdam(ps, 3e-3), sched=False),
    "precision_blocks_fused": make(lambda ps: BlockAdam(ps, 3e-3), sched=False, fused=True),
}
