"""A small elastic training of two mixture layers: what every rank is at the top of each step it
writes to a file, for the tests to compare.

In double precision: another number of ranks adds up in another order, and the losses of a run are
to be compared with those of another one.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.optimizers.value_trees import flat_state
from ckptd.client.rng_state import capture_rng
from tests.e2e.elastic_optimizers import OPTIMIZERS, kept_by
from tests.e2e.elastic_states import joined_shards
from tests.e2e.elastic_watch import digests, hold_bringing, watch
from tests.e2e.patience import let_them_come, let_what_is_beside_come

if TYPE_CHECKING:
    from ckptd.client import Checkpointer
    from ckptd.client.elastic import ExpertShards
    from ckptd.client.elastic.job import ElasticJob

__all__ = ["EXPERTS", "LAYERS", "Part", "act"]

LAYERS, EXPERTS, WIDTH = 2, 6, 6
SAMPLES, BATCH = 50, 10
MAX_NORM = 9.0
_MEASURED = 4
_PATIENCE_S = 40.0


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank of one life is to do.

    Args:
        out: names its files: ``<out>-<rank>.jsonl`` with what happens, ``<out>-<rank>-<step>.pt`` with its state at the top of a step.
        die_at: it kills itself in the middle of that step, when every rank's snapshot of its top has its copy; with ``die_sole`` if it is the
            first rank that alone holds some expert.
        die_before_loading: it kills itself when the world is planned, and nothing of it loaded.
        keep: tops that are written.
        watched: it tells its phases, each of which takes up to ``phase_ms`` longer, and the digests
            of all tops, in ``<out>-<rank>.tops``.
        sharded: the experts' optimizer is on shards, and the experts have no buffers.
        masters: with ``sharded``: experts in bfloat16, shards in float32.
        place_every: with ``sharded``: after so many steps the experts are placed by load; 0: never.
        die_sending: with ``sharded``: the one that is to die does so when its shards are updated,
            and the others wait for their weights.
        joined: with ``sharded``: each rank tells of the shards all that they are together; a
            collective call at each top that is told.
        gate: a file, without which nothing is brought from storage.
        optimizer: which of `OPTIMIZERS`.
        options_of: whose options count, of ``Checkpointer``.
        spoil: with ``sharded``: rank 0 forgets, of one shard, a moment of what it has loaded.
    """

    folder: Path
    out: str
    run: str
    rank: int
    world_size: int
    total: int
    daemon: str | None = None
    slots: int = 3
    threshold: int = 1
    die_at: int = -1
    die_sole: bool = False
    die_before_loading: bool = False
    patient_until: int = 0
    keep: frozenset[int] = frozenset()
    seed: int = 0
    step_ms: float = 0.0
    watched: bool = False
    phase_ms: float = 0.0
    sharded: bool = False
    masters: bool = False
    place_every: int = 0
    die_sending: bool = False
    joined: bool = False
    gate: Path | None = None
    optimizer: str = ""
    spoil: bool = False
    options_of: Literal["recorded", "script"] = "recorded"
    options: dict[str, Any] = field(default_factory=dict)


class Noted(nn.Module):
    """An expert with a buffer of its own, which belongs to its state; for shards, which allow none,
    a parameter that never learns.
    """

    scale: Tensor

    def __init__(self, base: int, sharded: bool, number: int) -> None:
        super().__init__()
        number += base
        generator = torch.Generator().manual_seed(1000 + number)
        self.inner, self.outer = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 2)
        scale = torch.full((1,), 1.0 + number / 100)
        if sharded:
            self.scale = nn.Parameter(scale, requires_grad=False)
        else:
            self.register_buffer("scale", scale)
        self.double()

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.scale.dtype)
        found: Tensor = self.outer(torch.relu(self.inner(rows))) * self.scale
        return found


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.dense, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.moe = experts

    def forward(self, tokens: Tensor) -> Tensor:
        inside = torch.tanh(self.dense(tokens))
        weights, chosen = self.gate(inside).softmax(-1).topk(2)
        found: Tensor = inside + self.moe(inside, chosen, weights)
        return found


class Model(nn.Module):
    """Dense parts drawn from one seed, experts from their numbers."""

    def __init__(self, job: ElasticJob, seed: int, sharded: bool) -> None:
        super().__init__()
        layers = [
            job.layer(f"blocks.{i}.moe", functools.partial(Noted, 10 * i, sharded)) for i in range(LAYERS)
        ]
        # After the experts, of which each rank makes others. In a later life nothing right can come
        # from the initialisation.
        torch.manual_seed(seed if job.start else 11)
        self.blocks = nn.ModuleList(map(Block, layers))
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        found: Tensor = self.head(tokens)
        return found


class Log:
    def __init__(self, part: Part, ends: str = "jsonl") -> None:
        self._path = part.folder / f"{part.out}-{part.rank}.{ends}"

    def write(self, event: str, **told: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, "time_s": time.time(), **told}) + "\n")


def act(part: Part) -> None:
    """Train as one rank of a life; ends with 0 unless something else was to happen."""
    log = os.open(part.folder / f"{part.out}-{part.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    random.seed(part.seed)
    if part.watched:
        watch(Log(part), part.phase_ms, part.seed + part.rank)
    if part.gate is not None:
        hold_bringing(Log(part), part.gate)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{part.folder}/{part.out}-store",
        rank=part.rank,
        world_size=part.world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    again = True
    while again:
        again = _live(part, Log(part))
    dist.barrier()
    dist.destroy_process_group()


def _live(part: Part, log: Log) -> bool:
    """One world; whether another is to follow in this process."""
    from ckptd.client import RecoveryOptions, RunOptions, SnapshotOptions
    from ckptd.client.elastic.job import ElasticJob, GlobalBatches, PlacementOptions

    layers = {f"blocks.{i}.moe": EXPERTS for i in range(LAYERS)}
    job = ElasticJob(
        layers,
        slots=part.slots,
        run=RunOptions(name=part.run, job="e2e", rank=part.rank, world_size=part.world_size),
        daemon=part.daemon,
        placement=PlacementOptions(threshold=part.threshold, **part.options),
    )
    log.write(
        "world",
        number=job.plan.number,
        start=job.start,
        reason=job.plan.reason,
        held={name: job.experts(name) for name in layers},
    )
    model = Model(job, part.seed, part.sharded)
    shards = _shards_of(job, model, part) if part.sharded else None
    optimizer = OPTIMIZERS[part.optimizer](model.parameters())
    optimizers = [optimizer] if shards is None else [optimizer, shards.optimizer]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 5) for each in optimizers]
    state = {f"scheduler {i}": each for i, each in enumerate(schedulers)}
    if part.die_before_loading:
        os.kill(os.getpid(), signal.SIGKILL)
    # A rank that dies waits in its step for the copies of that step's snapshot. Copied beside
    # training, a snapshot is sealed only when its sources are looked at again before the
    # optimizer's step, and nobody comes there while the others wait for that rank.
    waits = part.patient_until > 0 or part.die_at >= 0
    ckpt = job.checkpointer(
        model,
        optimizer,
        state,
        snapshots=SnapshotOptions(policy="dense", inline_copy=True if waits else None),
        recovery=RecoveryOptions(param_groups=part.options_of),
    )
    job.check_replicas()
    if part.spoil and part.rank == 0 and shards is not None:
        next(iter(shards.optimizer.state.values()))["exp_avg"].zero_()
    log.write("loaded", seconds=job.seconds)
    data = torch.randn(SAMPLES, 3, WIDTH, generator=torch.Generator().manual_seed(5)).double()
    batches = GlobalBatches(SAMPLES, BATCH, seed=3)
    out, name, tops = part.folder, f"{part.out}-{part.rank}", Log(part, "tops")
    for step in job.steps(part.total):
        kept = step in part.keep or step == job.start
        all_of_it = everything(model, optimizer, state, shards) if kept or part.watched else {}
        if part.joined and all_of_it:
            all_of_it |= _joined(all_of_it.pop("shards"), part.world_size)
        if kept:
            torch.save(all_of_it, out / f"{name}-{step}.pt")
        if part.watched:
            now = digests(all_of_it)
            tops.write("top", world=job.plan.number, step=step, of=now)
            log.write("top", step=step, world=job.plan.number, floor=job.floor)
        else:
            log.write("top", step=step)
        time.sleep(part.step_ms / 1e3)
        if part.daemon is not None and job.start + _MEASURED <= step <= part.patient_until:
            let_them_come(ckpt)
            let_what_is_beside_come(ckpt)
            _keep_pace(ckpt, step)
        torch.rand(1 + part.rank)  # each rank's generators are its own
        samples = data[batches.mine(step, part.rank, part.world_size)]
        loss = (model(samples.flatten(0, 1)).view(-1, 3).sum(1) - samples.sum((1, 2))).square().sum() / BATCH
        if step == part.die_at and (not part.die_sole or part.rank == sole_holder(job)):
            _wait_for_copies(ckpt, step)
            if part.die_sending and shards is not None:
                shards.optimizer.register_step_post_hook(_die)
            else:
                _die()
        loss.backward()
        job.sum_gradients()
        norm = job.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if shards is not None:
            placed = part.place_every and step % part.place_every == part.place_every - 1
            shards.step(job.placements_by_load() if placed else None)
        for scheduler in schedulers:
            scheduler.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        log.write("step", step=step, loss=float(total), norm=float(norm))
    if part.total in part.keep:
        torch.save(everything(model, optimizer, state, shards), out / f"{name}-{part.total}.pt")
    job.check_replicas()
    job.close()
    log.write("over", again=job.again)
    return job.again


def _shards_of(job: ElasticJob, model: Model, part: Part) -> ExpertShards:
    if part.masters:
        for _, module in model.named_modules():
            if isinstance(module, Noted):
                module.bfloat16()
    masters = torch.float32 if part.masters else None
    return job.shards(model, lambda shards: torch.optim.AdamW(shards, lr=0.02), masters=masters)


def _joined(mine: dict[str, Any], world_size: int) -> dict[str, Any]:
    """What the shards of all ranks are together, by name."""
    told: list[dict[str, Any]] = [{} for _ in range(world_size)]
    dist.all_gather_object(told, mine)
    return joined_shards(told)


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sole_holder(job: ElasticJob) -> int:
    """The first rank that alone holds an expert."""
    for name in job.layers.names:
        replicas = job.replicas(name) > 0
        alone = replicas[:, replicas.sum(axis=0) == 1]
        if alone.any():
            return int(alone.any(axis=1).argmax())
    raise AssertionError("every expert has two holders")


def _keep_pace(ckpt: Checkpointer, step: int) -> None:
    """Let the copies of the snapshots before come: steps of milliseconds outrun them, and the next
    one would find no slot.
    """
    until = time.monotonic() + _PATIENCE_S
    assert ckpt._memory is not None
    while ckpt.stats()["snapshots"] > 1 and ckpt._memory.table.ring_hint.floor < step - 1:
        if time.monotonic() > until:
            return
        time.sleep(0.005)


def _wait_for_copies(ckpt: Checkpointer, step: int) -> None:
    until = time.monotonic() + _PATIENCE_S
    assert ckpt._memory is not None
    while ckpt._memory.table.ring_hint.floor < step:
        assert time.monotonic() < until, f"no floor at {step}: {ckpt._memory.table.ring_hint}, {ckpt.stats()}"
        time.sleep(0.01)


def everything(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], shards: ExpertShards | None
) -> dict[str, Any]:
    """All that must be equal wherever it is, by name; below ``shards`` what this rank has of what
    is cut over all.
    """
    found: dict[str, Any] = {n: t.detach().clone() for n, t in model.state_dict().items()}
    optimizers = [optimizer] if shards is None else [optimizer, shards.optimizer]
    found |= state_by_name(model, optimizer)
    if shards is not None:
        for name, layer in shards.layers.items():
            experts = {f"{name}.experts.{n}": e for n, e in layer.held_experts().items()}
            found |= {
                f"{at}.{n}": p.detach().clone() for at, e in experts.items() for n, p in e.named_parameters()
            }
        told = shards.get_extra_state()
        found["shards"] = {
            "numels": told["numels"],
            "parts": dict(shards.named_parameters()) | state_by_name(shards, shards.optimizer),
        }
    found["groups"] = [
        {k: v for k, v in g.items() if k != "params"} for o in optimizers for g in o.param_groups
    ]
    found["kept"] = [kept_by(o) for o in optimizers]
    found["state"] = {name: one.state_dict() for name, one in state.items()}
    found["rng"] = capture_rng()
    return found


def state_by_name(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps of a module's parameters."""
    return {
        f"{name}/{key}": copy.deepcopy(value)
        for name, param in module.named_parameters()
        for key, value in flat_state(optimizer.state.get(param, {})).items()
    }
