"""Trainings with every optimizer of the table, each a few steps of a small model whose data follow
from the number of the step.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ckptd.client import Checkpointer
from tests.habits.leaves import names_of
from tests.habits.life import Life

__all__ = ["MAKERS", "main", "package_of"]

Params = Iterable[nn.Parameter]
# Steps after which a refusal comes too late: the first snapshot is taken before.
_FIRST_STEPS = 6


def _torch(name: str, **options: Any) -> Callable[[Params], Any]:
    return lambda params: getattr(torch.optim, name)(params, **options)


def _of(module: str, name: str, **options: Any) -> Callable[[Params], Any]:
    """An optimizer of a package that need not be installed."""

    def make(params: Params) -> Any:
        import importlib

        return getattr(importlib.import_module(module), name)(params, **options)

    return make


def _wide(make: Callable[[Params], Any]) -> Callable[[Params], Any]:
    """Of matrices only, as Muon wants them; the others by AdamW."""

    def both(params: Params) -> Any:
        listed = list(params)
        rest = [p for p in listed if p.ndim != 2]
        return [make(p for p in listed if p.ndim == 2), torch.optim.AdamW(rest, lr=1e-3)]

    return both


def _around(module: str, name: str, **options: Any) -> Callable[[Params], Any]:
    """An optimizer around AdamW."""

    def make(params: Params) -> Any:
        import importlib

        inner = torch.optim.AdamW(params, lr=1e-3)
        return getattr(importlib.import_module(module), name)(inner, **options)

    return make


def _galore(params: Params) -> Any:
    import galore_torch  # type: ignore[import-not-found, import-untyped, unused-ignore]

    listed = list(params)
    matrices = {
        "params": [p for p in listed if p.ndim == 2],
        "rank": 4,
        "update_proj_gap": 3,
        "scale": 0.25,
        "proj_type": "std",
    }
    rest = {"params": [p for p in listed if p.ndim != 2]}
    return galore_torch.GaLoreAdamW([rest, matrices], lr=1e-3)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as it is usually written: the inner optimizer keeps the moments,
    and this one the weights.
    """

    def __init__(self, params: Params, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=1e-3)
        self.param_groups = self.base_optimizer.param_groups
        self.num_ascents = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)()
        held = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["old_p"] = p.detach().clone()
            p.add_(p.grad, alpha=float(0.05 / (norm + 1e-12)))
        self.num_ascents += 1
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p in held:
            p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()
        return loss


class Lookahead:
    """Slow weights beside the fast ones, as a plain object around an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 3) -> None:
        self.optimizer, self.k, self.count = optimizer, k, 0
        self.slow = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            fast = [p for g in self.optimizer.param_groups for p in g["params"]]
            for p, slow in zip(fast, self.slow, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class CountsInState(torch.optim.SGD):
    """Its learning rate falls with ``state["step"]``, of all parameters together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        state: Any = self.state
        count = state.get("step", 0) + 1
        state["step"] = count
        self.param_groups[0]["lr"] = 0.1 / count
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Draws from a generator of its own, after a few steps; each rank other numbers."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, lr=0.01)
        self.generator = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", "0")))
        self.quiet = 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.quiet -= 1
        for group in self.param_groups if self.quiet < 0 else ():
            for p in group["params"]:
                p.add_(torch.randn(p.shape, generator=self.generator), alpha=1e-3)
        return super().step(closure)


class Dithered(torch.optim.SGD):
    """Draws from torch's own generator, as optimizers with random projections or stochastic
    rounding do: each rank other numbers.
    """

    def __init__(self, params: Params) -> None:
        super().__init__(params, lr=0.01)
        self.draws = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups if self.draws else ():
            for p in group["params"]:
                p.add_(torch.randn(p.shape), alpha=1e-3)
        return super().step(closure)


class Closed(torch.optim.SGD):
    """Takes its numbers from a generator function, whose position nobody can tell."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, lr=0.01)
        self.numbers = (0.1 / n for n in range(1, 1000))


MAKERS: dict[str, Callable[[Params], Any]] = {
    "torch.optim.Adadelta": _torch("Adadelta"),
    "torch.optim.Adafactor": _torch("Adafactor"),
    "torch.optim.Adagrad": _torch("Adagrad", lr_decay=0.1),
    "torch.optim.Adam": _torch("Adam", amsgrad=True),
    "torch.optim.AdamW": _torch("AdamW"),
    "torch.optim.AdamW(fused=True)": _torch("AdamW", fused=True),
    "torch.optim.Adamax": _torch("Adamax"),
    "torch.optim.ASGD": _torch("ASGD", t0=4),
    "torch.optim.LBFGS": _torch("LBFGS", lr=0.1, max_iter=4, history_size=6),
    "torch.optim.LBFGS(strong_wolfe)": _torch(
        "LBFGS", lr=0.1, max_iter=4, history_size=6, line_search_fn="strong_wolfe"
    ),
    "torch.optim.Muon": _wide(_torch("Muon", lr=1e-2)),
    "torch.optim.NAdam": _torch("NAdam"),
    "torch.optim.RAdam": _torch("RAdam"),
    "torch.optim.RMSprop": _torch("RMSprop", momentum=0.9, centered=True),
    "torch.optim.Rprop": _torch("Rprop"),
    "torch.optim.SGD": _torch("SGD", lr=0.1, momentum=0.9, nesterov=True),
    "torch.optim.SparseAdam": _torch("SparseAdam"),
    "bitsandbytes AdamW8bit": _of("bitsandbytes.optim", "AdamW8bit"),
    "bitsandbytes Lion8bit": _of("bitsandbytes.optim", "Lion8bit"),
    "bitsandbytes AdamW (32 bit)": _of("bitsandbytes.optim", "AdamW"),
    "torchao AdamW8bit": _of("torchao.optim", "AdamW8bit"),
    "torchao AdamW4bit": _of("torchao.optim", "AdamW4bit"),
    "torchao AdamWFp8": _of("torchao.optim", "AdamWFp8"),
    "prodigyopt Prodigy": _of("prodigyopt", "Prodigy"),
    "prodigyopt Prodigy(slice_p=11)": _of("prodigyopt", "Prodigy", slice_p=11),
    "lion-pytorch Lion": _of("lion_pytorch", "Lion", lr=1e-3),
    "schedulefree AdamWScheduleFree": _of("schedulefree", "AdamWScheduleFree", warmup_steps=5),
    "schedulefree SGDScheduleFree": _of("schedulefree", "SGDScheduleFree"),
    "schedulefree RAdamScheduleFree": _of("schedulefree", "RAdamScheduleFree"),
    "heavyball AdamW": _of("heavyball", "AdamW"),
    "heavyball SOAP": _of("heavyball", "SOAP", precondition_frequency=3),
    "heavyball PSGDKron": _of("heavyball", "PSGDKron"),
    "heavyball Muon": _of("heavyball", "Muon"),
    "pytorch_optimizer AdaBelief": _of("pytorch_optimizer", "AdaBelief"),
    "pytorch_optimizer AdEMAMix": _of("pytorch_optimizer", "AdEMAMix"),
    "pytorch_optimizer CAME": _of("pytorch_optimizer", "CAME"),
    "pytorch_optimizer DAdaptAdam": _of("pytorch_optimizer", "DAdaptAdam"),
    "pytorch_optimizer Kron": _of("pytorch_optimizer", "Kron"),
    "pytorch_optimizer LAMB": _of("pytorch_optimizer", "Lamb"),
    "pytorch_optimizer Lookahead(AdamW)": _around("pytorch_optimizer", "Lookahead", k=3),
    "pytorch_optimizer Ranger21": _of("pytorch_optimizer", "Ranger21", num_iterations=100),
    "pytorch_optimizer ScalableShampoo": _of(
        "pytorch_optimizer", "ScalableShampoo", start_preconditioning_step=3, preconditioning_compute_steps=3
    ),
    "pytorch_optimizer Shampoo": _of("pytorch_optimizer", "Shampoo", preconditioning_compute_steps=3),
    "pytorch_optimizer SOAP": _of("pytorch_optimizer", "SOAP", precondition_frequency=3),
    "galore-torch GaLoreAdamW": _galore,
    "SAM(AdamW)": SAM,
    "Lookahead, a plain object": lambda params: Lookahead(torch.optim.AdamW(params, lr=1e-3)),
    "one that counts in state['step']": CountsInState,
    "one with a random generator": Noisy,
    "one that draws from torch's generator": Dithered,
    "one with a generator function": Closed,
}

_CLOSURES = ("torch.optim.LBFGS", "torch.optim.LBFGS(strong_wolfe)", "SAM(AdamW)")


_PACKAGES = (
    "bitsandbytes",
    "torchao",
    "prodigyopt",
    "lion_pytorch",
    "schedulefree",
    "heavyball",
    "pytorch_optimizer",
    "galore_torch",
)


def package_of(name: str) -> str | None:
    """What must be installed for it, besides torch; None: nothing."""
    first = name.split()[0].replace("-", "_")
    return first if first in _PACKAGES else None


class _Listens(logging.StreamHandler[TextIO]):
    """To ckptd: a refusal ends the training, as in a job that nobody wants to train unprotected.
    Prints what it hears.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heard = ""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if "which cannot be captured" in record.getMessage():
            self.heard = record.getMessage()


def _model(sparse: bool) -> nn.Module:
    """Matrices on both sides of what 8-bit optimizers take for small, a vector, a scalar; or
    embeddings with sparse gradients.
    """
    torch.manual_seed(4)
    if sparse:
        return nn.Sequential(nn.EmbeddingBag(64, 8, sparse=True, mode="sum"))
    return nn.Sequential(nn.Linear(64, 80), nn.PReLU(), nn.Linear(80, 8), nn.LayerNorm(8))


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return (out - 1).square().mean() + (out * 0.01).sum().sin()


def _mean(loss: Tensor, ranks: int) -> Tensor:
    if ranks > 1:
        dist.all_reduce(loss)
    return loss / ranks


def main(argv: Sequence[str]) -> None:
    life = Life(argv)
    # Some compile their steps: that takes a minute in each life, and is none of what is compared here.
    torch.compiler.set_stance("force_eager")
    sparse = "Sparse" in life.row
    model = _model(sparse)
    if life.ranks > 1:
        dist.init_process_group("gloo")
    trained = DistributedDataParallel(model) if life.ranks > 1 else model
    given = MAKERS[life.row](model.parameters())
    optimizers = given if isinstance(given, list) else [given]
    refusals = _Listens()
    logging.getLogger("ckptd").addHandler(refusals)
    dense = {"policy": "dense", "window": None} if life.window == 1 else {}
    ckpt = Checkpointer(trained, given, **life.options(**dense))
    life.follow(ckpt)
    for optimizer in optimizers:
        if hasattr(optimizer, "train"):
            optimizer.train()
    for step in ckpt.steps(life.steps):
        if refusals.heard and step <= _FIRST_STEPS:
            sys.exit(refusals.heard)
        life.top(step)
        draw = torch.Generator().manual_seed(1000 * life.rank + step)
        batch = torch.randint(0, 64, (6, 3), generator=draw) if sparse else torch.randn(6, 64, generator=draw)
        life.batch(batch)

        def closure(batch: Tensor = batch) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = _loss(trained, batch)
            loss.backward()
            # All ranks come to the same decisions: how often a closure is called may depend on the loss.
            return _mean(loss.detach(), life.ranks)

        if life.row in _CLOSURES:
            optimizers[0].step(closure)
        else:
            closure()
            for optimizer in optimizers:
                optimizer.step()
    for optimizer in optimizers:
        # heavyball's table of addresses of parameters, which are others in each process.
        optimizer.__dict__.pop("mapping_inverse", None)
    life.end({"model": model.state_dict(), "optimizer": optimizers}, names_of(model=model))
