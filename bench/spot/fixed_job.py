"""One rank of a training with expert parallelism of a fixed size for `bench.spot.real`: plain
torch, without ckptd.

Groups of ``--group`` ranks share the experts evenly, and the groups share the batch. Ranks that
fill no group wait. Every so many steps the state goes to disk, while training waits, and every
start begins with the newest one. When torchrun asks the ranks to end, because hosts came, they save
first: nothing is repeated then.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bench.spot.jobs import Log, Saves, Training, agreed, meet, options
from examples.moe_elastic.model import EXPERTS, Model

__all__ = ["Exchange", "GroupExperts", "Groups", "main"]


class Groups:
    """Which ranks train, and with whom this one shares experts and holds the same ones; making it
    is a collective call of all ranks.

    Args:
        size: ranks of a group; it divides the number of experts.
    """

    def __init__(self, size: int) -> None:
        if size < 1 or EXPERTS % size:
            raise ValueError(f"groups of {size} ranks do not share {EXPERTS} experts evenly")
        self.size, self.rank = size, dist.get_rank()
        self.ranks = dist.get_world_size() // size * size
        self.place = self.rank % size
        groups = [list(range(first, first + size)) for first in range(0, self.ranks, size)]
        alike = [list(range(place, self.ranks, size)) for place in range(size)]
        # Every rank makes every group, and gets a handle of those that it is in.
        self.all = dist.new_group(list(range(self.ranks))) if self.ranks else None
        self.shared = self._mine(groups)
        self.alike = self._mine(alike) if self.ranks else None

    def _mine(self, every: list[list[int]]) -> Any:
        made = [(ranks, dist.new_group(ranks)) for ranks in every]
        return next((group for ranks, group in made if self.rank in ranks), None)

    @property
    def trains(self) -> bool:
        return self.rank < self.ranks

    def layer(self, name: str, make_expert: Callable[[int], nn.Module]) -> nn.Module:
        """A mixture layer with this rank's share of the experts."""
        return GroupExperts(make_expert, self.place, self.size, self.shared)

    def sum_gradients(self, model: nn.Module) -> None:
        """Sum the gradients of the dense part over all ranks, those of experts over the ranks that
        hold them; a collective call.
        """
        for inside, group in ((False, self.all), (True, self.alike)):
            grads = [
                param.grad
                for name, param in model.named_parameters()
                if (".experts." in name) == inside and param.grad is not None
            ]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=group)
            parts = torch.split(flat, [grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))
        for module in model.modules():
            if isinstance(module, GroupExperts):
                module.forget_idle()


class Exchange(torch.autograd.Function):
    """Rows to the ranks of a group, and their gradients back: ``[sum(sends), H]`` to ``[sum(takes), H]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], takes: list[int], group: Any) -> Tensor:
        ctx.sends, ctx.takes, ctx.group = sends, takes, group
        return _swap(rows, sends, takes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap(grads, ctx.takes, ctx.sends, ctx.group), None, None, None


def _exchanged(rows: Tensor, sends: list[int], takes: list[int], group: Any) -> Tensor:
    found: Tensor = Exchange.apply(rows, sends, takes, group)  # type: ignore[no-untyped-call]
    return found


def _swap(rows: Tensor, sends: list[int], takes: list[int], group: Any) -> Tensor:
    got = rows.new_empty(sum(takes), rows.shape[1])
    dist.all_to_all_single(got, rows.contiguous(), takes, sends, group=group)
    return got


class GroupExperts(nn.Module):
    """The experts of a layer, shared evenly by the ranks of a group; all of them call it, with any
    number of tokens.
    """

    def __init__(self, make_expert: Callable[[int], nn.Module], place: int, size: int, group: Any) -> None:
        super().__init__()
        self._size, self._each, self._group = size, EXPERTS // size, group
        own = range(place * self._each, (place + 1) * self._each)
        self.experts = nn.ModuleDict({str(number): make_expert(number) for number in own})

    def forget_idle(self) -> None:
        """Experts that got no token on any rank have no gradient, instead of one of zeros: the
        optimizer leaves them as they are.
        """
        for expert in self.experts.values():
            grads = [param.grad for param in expert.parameters() if param.grad is not None]
            if not any(grad.any() for grad in grads):
                expert.zero_grad()

    def forward(self, tokens_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """``[T, H]``: for every token the sum of its experts' outputs by weight."""
        chosen = experts_TK.flatten()
        order = chosen.argsort(stable=True)
        rows = tokens_TH.repeat_interleave(experts_TK.shape[1], 0)[order]
        counts = chosen.bincount(minlength=EXPERTS).view(self._size, self._each)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self._group)
        sends, takes = counts.sum(1).tolist(), coming.sum(1).tolist()
        inside = _exchanged(rows, sends, takes, self._group)
        # By source, and of one source by expert.
        whose = torch.arange(self._each).repeat(self._size).repeat_interleave(coming.flatten())
        by_expert = whose.argsort(stable=True)
        parts = torch.split(inside[by_expert], coming.sum(0).tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)])
        back = _exchanged(done[by_expert.argsort()], takes, sends, self._group)
        outputs = back[order.argsort()].view(*experts_TK.shape, -1)
        found: Tensor = (outputs * weights_TK.unsqueeze(-1)).sum(1)
        return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--group", type=int, default=2, help="ranks that share the experts")
    args = parser.parse_args()
    log = meet(args)
    groups = Groups(args.group)
    if not groups.trains:
        log.write("idle")
        while True:  # until torchrun ends it
            signal.pause()
    train(args, log, groups)


def train(args: argparse.Namespace, log: Log, groups: Groups) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    saves = Saves(args.saves, log.life)
    training = Training(Model(groups, seed=7), args)
    step = agreed(saves.newest(), groups.all)
    if step:
        training.load(saves.read(step))
    log.write("ready", step=step, ranks=groups.ranks, source="disk" if step else "nothing", why="")
    part = groups.rank if groups.rank < groups.size else None  # one group has the whole state
    while True:
        loss = training.forward_backward(step, groups.rank, groups.ranks)
        told = torch.stack([loss, torch.tensor(float(bool(asked)), dtype=loss.dtype)])
        dist.all_reduce(told, group=groups.all)
        groups.sum_gradients(training.model)
        training.update()
        log.write("step", step=step, loss=float(told[0]))
        step += 1
        ends = float(told[1]) > 0
        if ends or step % args.every == 0:
            log.write("saved", seconds=saves.write(step, part, training.state(), groups.all))
        if ends:
            _wait_for(asked, args.patience_s)


def _wait_for(asked: list[int], patience_s: float) -> None:
    """End when torchrun asks this rank, too: one that ended before would look as if the job was over."""
    deadline = time.monotonic() + patience_s
    while not asked and time.monotonic() < deadline:
        time.sleep(0.02)
    sys.exit(0 if asked else 1)


if __name__ == "__main__":
    main()
