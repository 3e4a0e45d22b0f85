"""Pipelines over real gloo processes that live twice: first all ranks run, then some go back and
run apart, fed from logs.

Both lives are in the same processes; of the first one only what a restart would have is handed on:
states, logs, and shapes.
"""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.capture.stage_shapes import StageShapes, shapes_of
from ckptd.client.pipeline.isolated_stage import IsolatedStage
from ckptd.client.pipeline.stage_hooks import listen
from ckptd.core.slots.boundary import RecordKey, SentKind
from ckptd.errors import CorruptionError
from tests.client.gloo_ranks import run_in_ranks

__all__ = ["BASE", "PIPELINES", "RESUME", "Outcome", "Pipeline", "Spoil", "run_ranks"]

# Iterations of the first life; those that go back run [BASE, RESUME) again, and all of them the rest.
BASE, RESUME, TOTAL = 2, 5, 7
MICRO, WIDE, VOCAB, LENGTH = 4, 8, 11, 5

Log = dict[int, dict[RecordKey, Tensor]]
# Changes the log of one rank before it is used.
Spoil = Callable[[int, Log], None]


@dataclass(frozen=True)
class Pipeline:
    """How a job is made: ``replicas`` pipelines beside each other, each of ``ranks`` ranks."""

    schedule: Any
    ranks: int = 4
    stages_each: int = 1
    replicas: int = 1
    rounds: int = 1
    static: bool = False

    @property
    def world_size(self) -> int:
        return self.ranks * self.replicas


PIPELINES = {
    "gpipe": Pipeline(ScheduleGPipe, rounds=2),
    "1f1b": Pipeline(Schedule1F1B),
    "pair": Pipeline(Schedule1F1B, ranks=2),
    "static": Pipeline(Schedule1F1B, ranks=3, static=True),
    "interleaved": Pipeline(ScheduleInterleaved1F1B, ranks=2, stages_each=2),
    "zero bubble": Pipeline(ScheduleInterleavedZeroBubble, ranks=2, stages_each=2),
    "replicas": Pipeline(Schedule1F1B, ranks=2, replicas=2),
}


@dataclass
class Outcome:
    """What came of one restart on one rank: what it ran, whose logs it read, and what was not as before."""

    ran: list[int] = field(default_factory=list)
    read: set[tuple[int, int]] = field(default_factory=set)
    unlike: list[str] = field(default_factory=list)
    error: str = ""


class Part(nn.Module):
    """One stage: two tensors cross each boundary, of which one needs no gradient."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDE) if index == 0 else None
        self.work = nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.Dropout(0.3))
        self.head = nn.Linear(WIDE, VOCAB) if index == count - 1 else None
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        self.calls += 1
        if self.embed is not None:
            scale = x.float().mean(-1, keepdim=True)
            x = self.embed(x)
        assert scale is not None
        x = x + self.work(x) * (1 + scale.unsqueeze(-1) / VOCAB)
        return (x, scale) if self.head is None else self.head(x)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), target.reshape(-1))


class Rank:
    """One rank's model, optimizer and schedule, made anew for each life."""

    def __init__(self, pipeline: Pipeline, seed: int, group: Any, twins: Any) -> None:
        self.pipeline, self.place = pipeline, dist.get_rank(group)
        count = pipeline.ranks * pipeline.stages_each
        indices = range(self.place, count, pipeline.ranks)
        parts = []
        for index in indices:
            torch.manual_seed(1000 * seed + index)
            part: nn.Module = Part(index, count)
            if pipeline.replicas > 1:
                part = DistributedDataParallel(part, process_group=twins)
            parts.append(part)
        self.model = nn.ModuleList(parts)
        device = torch.device("cpu")
        self.stages = [
            PipelineStage(
                *(part, index, count, device),
                group=group,
                **(examples(index, count) if pipeline.static else {}),
            )
            for part, index in zip(parts, indices, strict=True)
        ]
        given: Any = self.stages if pipeline.stages_each > 1 else self.stages[0]
        self.schedule = pipeline.schedule(given, n_microbatches=MICRO, loss_fn=loss_of)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        torch.manual_seed(7 + dist.get_rank())

    def step(self, iteration: int) -> None:
        """A step's body; the batch follows from the iteration and the replica."""
        for number in range(self.pipeline.rounds):
            replica = dist.get_rank() // self.pipeline.ranks
            generator = torch.Generator().manual_seed(100 * iteration + 10 * replica + number)
            batch = torch.randint(VOCAB, (MICRO, LENGTH + 1), generator=generator)
            inputs = (batch[:, :-1],) if self.place == 0 else ()
            last = self.place == self.pipeline.ranks - 1
            self.schedule.step(*inputs, target=batch[:, 1:] if last else None)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        found = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        return copy.deepcopy(found)

    def load(self, state: dict[str, Any]) -> None:
        given = copy.deepcopy(state)
        self.model.load_state_dict(given["model"])
        self.optimizer.load_state_dict(given["optimizer"])
        torch.set_rng_state(given["rng"])


def examples(index: int, count: int) -> dict[str, Any]:
    """Example inputs and outputs of one micro-batch: the schedule need not find them out."""
    between = (torch.zeros(1, LENGTH, WIDE, requires_grad=True), torch.zeros(1, 1))
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    logits = torch.zeros(1, LENGTH, VOCAB, requires_grad=True)
    return {
        "input_args": tokens if index == 0 else between,
        "output_args": logits if index == count - 1 else between,
    }


class Kept:
    """A boundary log that lies in memory."""

    def __init__(self) -> None:
        self.log: Log = {}
        self.iteration = 0
        self._rounds: dict[RecordKey, int] = {}

    def begin(self, iteration: int) -> None:
        self.iteration = iteration
        self.log[iteration] = {}
        self._rounds.clear()

    def sent(
        self,
        kind: SentKind,
        stage: int,
        micro_batch: int,
        tensors: Sequence[Tensor],
        peers: Sequence[int] = (),
    ) -> None:
        for index, tensor in enumerate(tensors):
            first = RecordKey(kind, stage, micro_batch, index)
            nth = self._rounds.get(first, 0)
            self._rounds[first] = nth + 1
            key = RecordKey(kind, stage, micro_batch, index, nth)
            self.log[self.iteration][key] = tensor.detach().clone()

    def receives(self, peers: Sequence[int]) -> None:
        """Nothing is counted here."""


def unlike(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two states differ by a bit."""
    if isinstance(a, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [path]
    if isinstance(a, dict):
        keys = sorted(a.keys() | b.keys(), key=str)
        return [d for k in keys for d in unlike(a.get(k), b.get(k), f"{path}/{k}")]
    if isinstance(a, list):
        return [d for i, each in enumerate(a) for d in unlike(each, b[i], f"{path}/{i}")]
    return [] if a == b else [path]


def run_ranks(
    folder: Path,
    pipeline: str,
    restarts: Sequence[frozenset[int]],
    spoil: Spoil | None = None,
) -> list[list[Outcome]]:
    """Of each restart, by rank, what came of it; ``restarts`` tells which ranks go back to ``BASE``.

    Args:
        spoil: is called with each rank and its log before the first restart; it must be a function of a module.
    """
    world_size = PIPELINES[pipeline].world_size
    run_in_ranks(_process, world_size, folder, str(folder), pipeline, tuple(restarts), spoil)
    by_rank = [pickle.loads((folder / f"outcome-{r}").read_bytes()) for r in range(world_size)]
    return [[outcomes[i] for outcomes in by_rank] for i in range(len(restarts))]


def _process(
    rank: int, folder: str, name: str, restarts: Sequence[frozenset[int]], spoil: Spoil | None
) -> None:
    pipeline = PIPELINES[name]
    group, twins = _groups(pipeline)
    lives = _Lives(pipeline, group, twins, Path(folder), spoil)
    outcomes = [lives.restart(lost, seed) for seed, lost in enumerate(restarts, start=2)]
    (Path(folder) / f"outcome-{rank}").write_bytes(pickle.dumps(outcomes))
    if not any(outcome.error for outcome in outcomes):
        dist.barrier()
        dist.destroy_process_group()


def _groups(pipeline: Pipeline) -> tuple[Any, Any]:
    """Of the pipeline that this rank is in, and of those that hold the same stage."""
    if pipeline.replicas == 1:
        return dist.group.WORLD, None
    rows = [list(range(r * pipeline.ranks, (r + 1) * pipeline.ranks)) for r in range(pipeline.replicas)]
    group, _ = dist.new_subgroups_by_enumeration(rows)
    twins, _ = dist.new_subgroups_by_enumeration([list(c) for c in zip(*rows, strict=True)])
    return group, twins


class _Lives:
    """The first life is lived at once; each restart begins from what it left."""

    def __init__(self, pipeline: Pipeline, group: Any, twins: Any, folder: Path, spoil: Spoil | None) -> None:
        self.pipeline, self.group, self.twins, self.folder = pipeline, group, twins, folder
        first, kept = Rank(pipeline, 1, group, twins), Kept()
        self.states = []
        with listen(first.stages, kept):  # type: ignore[arg-type]
            for iteration in range(TOTAL):
                self.states.append(first.state())
                kept.begin(iteration)
                first.step(iteration)
            self.states.append(first.state())
        self.shapes: dict[int, StageShapes] = {}
        for stage in first.stages:
            found = shapes_of(stage)
            assert found is not None
            self.shapes[stage.stage_index] = found
        self.log = kept.log
        if spoil is not None:
            spoil(dist.get_rank(), self.log)
        torch.save(self.log, folder / f"log-{dist.get_rank()}.pt")
        dist.barrier()

    def restart(self, lost: frozenset[int], seed: int) -> Outcome:
        """Ranks in ``lost`` begin at ``BASE``, the others at ``RESUME``."""
        rank, outcome = dist.get_rank(), Outcome()
        life, kept = Rank(self.pipeline, seed, self.group, self.twins), Kept()
        base = BASE if rank in lost else RESUME
        life.load(self.states[base])

        def logs(neighbour: int, iteration: int) -> Mapping[RecordKey, Tensor]:
            outcome.read.add((neighbour, iteration))
            found: Log = torch.load(self.folder / f"log-{neighbour}.pt", weights_only=False)
            return found[iteration]

        with listen(life.stages, kept):  # type: ignore[arg-type]
            bases = dict.fromkeys(lost, BASE)
            apart = IsolatedStage(life.stages, rank, bases, RESUME, logs, shapes=self.shapes)
            try:
                for iteration in range(base, TOTAL):
                    apart.begin(iteration)
                    kept.begin(iteration)
                    life.step(iteration)
                    outcome.ran.append(iteration)
                    after = unlike(life.state(), self.states[iteration + 1])
                    outcome.unlike += [f"after {iteration}: {path}" for path in after]
                    sent = unlike(kept.log[iteration], self.log[iteration])
                    outcome.unlike += [f"sent in {iteration}: {path}" for path in sent]
            except (CorruptionError, RuntimeError) as error:
                # The second kind is what a rank meets when the other end of its connection goes.
                outcome.error = f"{error}\n{traceback.format_exc()}"
                return outcome
            finally:
                apart.close()
        dist.barrier()
        return outcome
