"""Loops as people write them that change more than weights: buffers that grow, layers that are unfrozen, state
in objects of their own.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao import quantization
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from ckptd.client import Checkpointer
from tests.habits.leaves import names_of
from tests.habits.life import Life

__all__ = ["LOOPS", "main"]

WIDTH = 6
# The step at which a schedule changes what is trained.
_MILESTONE = 5


def points(life: Life, step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * life.rank + step))


def train(
    life: Life,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any] | None = None,
    *,
    before: Callable[[int], object] = lambda step: None,
    weight: Callable[[Tensor], Any] = lambda loss: 1.0,
    noise: Callable[[], Any] = lambda: 0.0,
    after: Callable[[int], object] = lambda step: None,
    extra: Callable[[], Any] = lambda: None,
    feedback: bool = False,
) -> None:
    """The usual loop; what it consists of is that of the row."""
    trained = model
    if life.ranks > 1:
        dist.init_process_group("gloo")
        trained = DistributedDataParallel(model)
        if feedback:
            kept = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3, min_compression_rate=0.5)
            trained.register_comm_hook(kept, powerSGD_hook.powerSGD_hook)
    ckpt = Checkpointer(trained, optimizer, state, **life.options())
    life.follow(ckpt)
    for step in ckpt.steps(life.steps):
        life.top(step)
        before(step)
        batch = points(life, step) + noise()
        life.batch(batch)
        optimizer.zero_grad()
        loss = (trained(batch) - batch).square().mean()
        (loss * weight(loss.detach())).backward()
        optimizer.step()
        after(step)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    modes = {name: m.training for name, m in model.named_modules()}
    final = {
        "model": model.state_dict(),
        "optimizer": optimizer,
        "flags": flags,
        "modes": modes,
        "extra": extra(),
    }
    life.end(final, names_of(model=model))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def perceptron() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, WIDTH)
    )


class Bank(nn.Module):
    """A memory of past outputs that begins empty, and a mean that is not there before the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.bank: Tensor
        self.mean: Tensor | None
        self.scale: Tensor
        self.register_buffer("bank", torch.zeros(0, WIDTH))
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if len(self.bank):
            y = y + 0.1 * self.bank.mean(0)
        self.bank = torch.cat([self.bank, y.detach()[:1]])[-12:]
        now = y.detach().mean()
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(WIDTH), persistent=False)
        self.scale = 0.9 * self.scale + 0.1 * y.detach().abs().mean(0)
        scaled: Tensor = y * (1 + self.mean) / (1 + self.scale)
        return scaled


def growing(life: Life) -> None:
    model = Bank()
    train(life, model, adamw(model), extra=lambda: model.scale)


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.first, self.last = (
            quantization.QuantStub(),
            nn.Linear(WIDTH, 16),
            nn.Linear(16, WIDTH),
        )
        self.dequant = quantization.DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.dequant(self.last(self.first(self.quant(x)).relu()))
        return found


def observed(life: Life) -> None:
    """Quantization-aware training: its observers get their shapes in the first forward, and rest later."""
    model = Quantized()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(model.train(), inplace=True)

    def before(step: int) -> None:
        if step == _MILESTONE:
            model.apply(quantization.disable_observer)

    train(life, model, adamw(model), before=before)


def unfrozen(life: Life) -> None:
    """Once, as a schedule does; batch norm is frozen at the same step."""
    model = perceptron()
    model[0].requires_grad_(False)

    def before(step: int) -> None:
        if step == _MILESTONE:
            model[0].requires_grad_(True)
            model[1].eval()

    train(life, model, adamw(model), before=before)


def group_added(life: Life) -> None:
    """The parameters get their group when they are unfrozen."""
    model = perceptron()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

    def before(step: int) -> None:
        if step == _MILESTONE:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})

    train(life, model, optimizer, before=before)


class Transition(NamedTuple):
    value: float
    seen: Any


class Own:
    """What a program may keep in an object without ``state_dict``."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.count, self.best = model, 0, math.inf
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.mean = copy.deepcopy(model)
        self.by_parameter = {p: torch.zeros_like(p) for p in model.parameters()}
        self.replay: deque[Transition] = deque(maxlen=5)
        self.generator = np.random.default_rng(3)

    def weight(self, loss: Tensor) -> float:
        self.count += 1
        self.best = min(self.best, loss.item())
        self.replay.append(Transition(loss.item(), np.ones(2) * self.count))
        picked = random.choice(self.replay)
        return (
            1
            + self.best
            + picked.value
            + float(picked.seen.sum()) / 100
            + float(self.generator.normal()) / 10
        )

    @torch.no_grad()
    def follow(self, step: int) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.data
            self.by_parameter[p] += p.data
        for mine, theirs in zip(self.mean.parameters(), self.model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


def own_objects(life: Life) -> None:
    model = perceptron()
    own, kept, norms, generator = (
        Own(model),
        {"best": math.inf, "bad": 0},
        [0.0],
        torch.Generator().manual_seed(7),
    )

    def weight(loss: Tensor) -> float:
        norms.append(loss.item())
        kept["bad"] = 0 if loss.item() < kept["best"] else kept["bad"] + 1
        kept["best"] = min(kept["best"], loss.item())
        return own.weight(loss) + kept["bad"] / 10 + float(np.percentile(norms, 40))

    def noise() -> Tensor:
        return 0.1 * torch.randn(8, WIDTH, generator=generator)

    state = {"own": own, "kept": kept, "norms": norms, "generator": generator}
    found = [
        own.shadow,
        own.mean.state_dict(),
        list(own.by_parameter.values()),
        own.replay,
        kept,
        norms,
        generator,
    ]
    train(life, model, adamw(model), state, weight=weight, noise=noise, after=own.follow, extra=lambda: found)


class Average(nn.Module):
    """An average in ``state=`` whose decay follows from a count that it keeps in an attribute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.mean, self.count = copy.deepcopy(model), 0

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        self.count += 1
        for mine, theirs in zip(self.mean.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 1 / self.count)


def average(life: Life) -> None:
    model = perceptron()
    mean = Average(model)
    found = mean.mean.state_dict()
    train(
        life, model, adamw(model), {"mean": mean}, after=lambda step: mean.follow(model), extra=lambda: found
    )


def second_stage(life: Life) -> None:
    """Another optimizer takes over, and nobody tells: snapshots end, and what they hold is right."""
    model = perceptron()
    first = adamw(model)
    ckpt = Checkpointer(model, first, **life.options())
    life.follow(ckpt)
    optimizer = first
    for step in ckpt.steps(life.steps):
        life.top(step)
        if step == _MILESTONE + 6:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        batch = points(life, step)
        life.batch(batch)
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    life.end({"model": model.state_dict(), "optimizer": optimizer}, names_of(model=model))


def compressed(life: Life) -> None:
    """On two ranks, by PowerSGD: what it leaves out of a gradient it adds to the next one."""
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
    train(life, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), feedback=True)


def decayed_by_hand(life: Life) -> None:
    """An average of one's own follows; with W = 3 a replay decayed frozen weights once more."""
    model = perceptron()
    mean = Average(model)
    found = mean.mean.state_dict()

    @torch.no_grad()
    def after(step: int) -> None:
        for parameter in model.parameters():
            parameter.mul_(0.99)
        mean.follow(model)

    train(life, model, adamw(model), {"mean": mean}, after=after, extra=lambda: found)


def perturbed(life: Life) -> None:
    """SAM with its base optimizer: a second forward of weights that are moved along all gradients."""
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ckpt = Checkpointer(model, optimizer, **life.options())
    life.follow(ckpt)
    for step in ckpt.steps(life.steps):
        life.top(step)
        batch = points(life, step)
        life.batch(batch)
        (model(batch) - batch).square().mean().backward()
        with torch.no_grad():
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.norm(torch.stack([grad.norm() for grad in grads]))
            before = [p.detach().clone() for p in model.parameters()]
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.add_(grad * (0.05 / norm))
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        for parameter, was in zip(model.parameters(), before, strict=True):
            parameter.data = was
        optimizer.step()
        optimizer.zero_grad()
    life.end({"model": model.state_dict(), "optimizer": optimizer}, names_of(model=model))


def pruned(life: Life) -> None:
    """Snapshots end at that step: a life that comes back begins before it, and prunes again."""
    model = perceptron()

    def before(step: int) -> None:
        if step == _MILESTONE + 6:
            prune.l1_unstructured(model[0], "weight", 0.3)

    train(life, model, adamw(model), before=before)


def dropout_that_rises(life: Life) -> None:
    model = perceptron()
    dropout = model[3]
    assert isinstance(dropout, nn.Dropout)

    def before(step: int) -> None:
        if step % 4 == 3:
            dropout.p += 0.05

    train(life, model, adamw(model), before=before)


def adversaries(life: Life, *, add_up: bool) -> None:
    """The generator steps at every fifth step; its gradients add up until then, or stay after it."""
    generator, critic = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    first, second = (torch.optim.AdamW(module.parameters(), lr=1e-3) for module in model.values())
    ckpt = Checkpointer(model, [first, second], **life.options())
    life.follow(ckpt)
    for step in ckpt.steps(life.steps):
        life.top(step)
        real = points(life, step)
        life.batch(real)
        fake = generator(torch.randn(8, WIDTH))
        second.zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean()).backward()
        second.step()
        if add_up or step % 5 == 4:
            if not add_up:
                first.zero_grad()
            (-critic(fake).mean()).backward()
        if step % 5 == 4:
            first.step()
            if add_up:
                first.zero_grad()
    life.end({"model": model.state_dict(), "optimizers": [first, second]}, names_of(model=model))


LOOPS: dict[str, Callable[[Life], None]] = {
    "buffers that grow": growing,
    "observers of quantization": observed,
    "unfrozen at a step": unfrozen,
    "a group added at a step": group_added,
    "objects of one's own": own_objects,
    "an average that counts": average,
    "a second optimizer takes over": second_stage,
    "compressed gradients": compressed,
    "decayed by hand": decayed_by_hand,
    "perturbed before the update": perturbed,
    "pruned at a step": pruned,
    "a dropout that rises": dropout_that_rises,
    "gradients that add up": functools.partial(adversaries, add_up=True),
    "gradients that stay": functools.partial(adversaries, add_up=False),
}


def main(argv: Sequence[str]) -> None:
    life = Life(argv)
    LOOPS[life.row](life)
