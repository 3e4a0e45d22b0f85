"""A small training run whose snapshots are exported, for the tests of exports and of starts from them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ckptd.client import Checkpointer
from ckptd.client.model.live_state import LiveState
from ckptd.client.schedule.snapshot_plan import export_facts
from ckptd.export.memory_source import SlotSource, open_slot
from ckptd.transport.messages import GetSnapshots, GetStatus, Snapshots, Status
from ckptd.transport.wire import ControlClient
from tests.ckptd.running import eventually
from tests.option_groups import grouped

State = dict[str, Tensor]


class Experts(nn.Module):
    """Two experts fused in one parameter, each of which every token visits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_experts = 2
        self.up = nn.Parameter(torch.randn(2, width, width) * 0.3)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("td,edf,te->tf", x, self.up, weights)


class MoE(nn.Module):
    """Fused experts, tied embeddings, a buffer that is saved and one that is not."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.gate = nn.Linear(width, 2)
        self.experts = Experts(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("cache", torch.arange(3.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        x = self.embed(tokens)
        x = x + self.experts(self.norm(x), torch.softmax(self.gate(x), -1))
        found: Tensor = self.head(x)
        return found


TOKENS = torch.tensor([0, 1, 2, 3, 4, 0, 2])


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step of a plain loop, whose data depend on its number."""
    loss = nn.functional.cross_entropy(model(TOKENS), (TOKENS + step) % 5)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def make_model(seed: int) -> MoE:
    torch.manual_seed(seed)
    return MoE()


def make_adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@dataclass
class Trained:
    """A run that has ended: what was live at the top of each iteration, and at the end."""

    run: str
    segment_dir: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    live: dict[int, State] = field(default_factory=dict)

    @contextmanager
    def snapshot(self, iteration: int) -> Iterator[SlotSource]:
        """It, with what a trainer tells of its model and optimizer."""
        told = export_facts(LiveState(self.model, [self.optimizer], None))
        with open_slot(self.segment_dir, iteration, run=self.run) as source:
            source.facts = replace(
                source.facts,
                transient=frozenset(told["transient_buffers"]),
                aliases=told["aliases"],
                groups={name: tuple(owner) for name, owner in told["groups"].items()},
            )
            yield source


def train(
    endpoint: str,
    total: int,
    *,
    model: nn.Module | None = None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = make_adamw,
    **options: Any,
) -> Trained:
    """Train under a daemon, which keeps the newest snapshots when this returns."""
    run = uuid.uuid4().hex[:8]
    model = model or make_model(0)
    optimizer = make_optimizer(model)
    with ControlClient(endpoint, timeout_s=20) as client:
        folder = Path(client.ask(GetStatus(), Status).segment_dir)
        trained = Trained(run, folder, model, optimizer)
        with Checkpointer(
            model, optimizer, **grouped(job="export", run=run, daemon=endpoint, **options)
        ) as ckpt:
            for step in ckpt.steps(total):
                trained.live[step] = {k: v.clone() for k, v in model.state_dict().items()}
                step_once(model, optimizer, step)
                # These steps take microseconds: on a busy machine a snapshot would find no slot
                # that is sealed already.
                eventually(partial(_all_sealed, client, run), "every filled slot is sealed")
    trained.live[total] = {k: v.clone() for k, v in model.state_dict().items()}
    return trained


def _all_sealed(client: ControlClient, run: str) -> bool:
    told = client.ask(GetSnapshots("export", run), Snapshots)
    states = {slot.state for rank in told.ranks for slot in rank.slots}
    return not states & {"filling", "filled"}


def same(one: State, other: State) -> bool:
    """Equal to the bit, under the same names."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
