"""Training jobs that cover what real ones do: precisions, optimizers, routing, schedulers, scalers,
buffers, checkpointing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, EXPERTS, LAYERS, BATCH, LENGTH = 31, 16, 4, 2, 3, 6


class ListExperts(nn.Module):
    """Top-2 of a ``ModuleList``, with a noisy gate and per-expert token selection (experts without
    tokens get no gradient).
    """

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(EXPERTS)
        )
        self.noise = noise
        self.bias: Tensor
        self.load: Tensor
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = self.gate(flat).float()
        if self.training and self.noise:
            scores = scores + torch.randn_like(scores) * self.noise
        chosen = torch.topk(scores + self.bias, 2, dim=-1).indices
        weights = torch.softmax(scores, -1).gather(1, chosen)
        self.load.copy_(torch.bincount(chosen.reshape(-1), minlength=EXPERTS).to(self.load))
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, slot = (chosen == index).nonzero(as_tuple=True)
            if rows.numel():
                out = out.index_add(
                    0,
                    rows,
                    (expert(flat[rows]) * weights[rows, slot, None].to(flat.dtype)).to(out.dtype),
                )
        return out.reshape(x.shape)


class FusedExperts(nn.Module):
    """Experts as ``[num_experts, …]`` parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24) * 0.2)
        self.up_bias = nn.Parameter(torch.zeros(EXPERTS, 24))
        self.down = nn.Parameter(torch.randn(EXPERTS, 24, WIDTH) * 0.2)

    def forward(self, flat: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        hidden = F.gelu(
            torch.einsum("td,edf->tef", flat, self.up.to(flat.dtype)) + self.up_bias.to(flat.dtype)
        )
        every = torch.einsum("tef,efd->ted", hidden, self.down.to(flat.dtype))
        picked = every.gather(1, chosen[:, :, None].expand(-1, -1, every.shape[-1]))
        return (picked * weights[:, :, None].to(flat.dtype)).sum(1)


class FusedMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = FusedExperts()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = torch.softmax(self.router(flat).float(), -1)
        weights, chosen = torch.topk(scores, 2, dim=-1)
        out: Tensor = self.experts(flat, chosen, weights)
        return out.reshape(x.shape)


class Block(nn.Module):
    def __init__(self, fused: bool, noise: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.moe = FusedMoE() if fused else ListExperts(noise)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = x + self.drop(self.mix(h)) + self.moe(h)
        return out


class Model(nn.Module):
    def __init__(
        self,
        *,
        fused: bool = False,
        tied: bool = False,
        noise: float = 0.3,
        ckpt_mode: str = "",
        batch_norm: bool = False,
        counting: bool = False,
    ) -> None:
        super().__init__()
        self.forwards, self.drawn = 0, [1.0] if counting else []
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(fused, noise) for _ in range(LAYERS))
        self.bn = nn.BatchNorm1d(WIDTH) if batch_norm else None
        self.head = nn.Linear(WIDTH, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.ckpt_mode = ckpt_mode

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.ckpt_mode:
                x = checkpoint(block, x, use_reentrant=self.ckpt_mode == "reentrant")
            else:
                x = block(x)
        if self.bn is not None:
            x = self.bn(x.transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(x)
        return logits * self.of_attributes() if self.drawn and self.training else logits

    def of_attributes(self) -> float:
        """A factor that follows from attributes which change with each forward."""
        if self.forwards % 3 == 0:
            self.drawn.append(float(torch.rand(())))
        self.forwards += 1
        return 1 + sum(self.drawn) / (9 + self.forwards)


class Data:
    """A position in an endless stream of random tokens, each batch a function of the position only."""

    device = "cpu"  # where batches go to

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def __next__(self) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + self.position)
        self.position += 1
        return torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator).to(self.device)


# One training step of a job; it calls its last argument at points where it may be killed.
Body = Callable[["Job", int, Callable[[str], None]], None]


@dataclass
class Job:
    """One training job: how to step it, and what has state."""

    model: nn.Module
    optimizers: list[Any]
    state: dict[str, Any]
    body: Body
    options: dict[str, Any] = field(default_factory=dict)
    ckpt: Any = None
    on_start: Callable[[Job], None] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def start(self, ckpt: Any) -> None:
        if self.on_start is not None:
            self.on_start(self)

    def step(self, step: int, at: Callable[[str], None]) -> None:
        self.body(self, step, at)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().reshape(-1, VOCAB), batch[:, 1:].reshape(-1))


def plain_body(job: Job, step: int, at: Callable[[str], None]) -> None:
    loss = loss_of(job.model, next(job.state["data"]))
    loss.backward()
    at("backward")
    clip_grad_norm_(job.model.parameters(), 0.5)
    for optimizer in job.optimizers:
        optimizer.step()
    at("step")
    if "sched" in job.state:
        job.state["sched"].step()
    for block in getattr(job.model, "blocks", ()):
        if isinstance(
            block.moe, ListExperts
        ):  # auxiliary-loss-free balancing: a buffer updated after the step
            moe = block.moe
            moe.bias += 0.01 * torch.sign(moe.load.mean() - moe.load)
    for optimizer in job.optimizers:
        optimizer.zero_grad()


def make(
    optimizer: Callable[[list[nn.Parameter]], Any] | None = None,
    *,
    body: Callable[[Job, int, Callable[[str], None]], None] = plain_body,
    sched: bool = True,
    options: dict[str, Any] | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    **model_args: Any,
) -> Callable[[int], Job]:
    def build(seed: int) -> Job:
        torch.manual_seed(seed)
        model = Model(**model_args).to(Data.device)
        if prepare is not None:
            prepare(model)
        params = [p for p in model.parameters() if p.requires_grad]
        made = (
            optimizer(params)
            if optimizer is not None
            else torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1)
        )
        optimizers = made if isinstance(made, list) else [made]
        state: dict[str, Any] = {"data": Data()}
        if sched:
            state["sched"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 40)
        torch.manual_seed(99)  # the run's own randomness does not depend on the initialisation's seed
        return Job(model, optimizers, state, body, options=dict(options or {}))

    return build


def autocast_body(job: Job, step: int, at: Callable[[str], None]) -> None:
    with torch.autocast(Data.device, dtype=torch.bfloat16):
        loss = loss_of(job.model, next(job.state["data"]))
    loss.backward()
    at("backward")
    clip_grad_norm_(job.model.parameters(), 0.5)
    job.optimizers[0].step()
    at("step")
    job.optimizers[0].zero_grad()


def accumulate_body(job: Job, step: int, at: Callable[[str], None]) -> None:
    """Three micro-batches inside one loop step."""
    for _ in range(3):
        (loss_of(job.model, next(job.state["data"])) / 3).backward()
    at("backward")
    clip_grad_norm_(job.model.parameters(), 0.5)
    job.optimizers[0].step()
    at("step")
    job.optimizers[0].zero_grad(set_to_none=False)


def spread_body(job: Job, step: int, at: Callable[[str], None]) -> None:
    """One update every third loop step: most boundaries have pending gradients."""
    (loss_of(job.model, next(job.state["data"])) / 3).backward()
    at("backward")
    if step % 3 == 2:
        clip_grad_norm_(job.model.parameters(), 0.5)
        job.optimizers[0].step()
        job.optimizers[0].zero_grad()
    at("step")


def zero_first_body(job: Job, step: int, at: Callable[[str], None]) -> None:
    """The tutorial order: gradients of the last step are still there at the top of the loop."""
    job.optimizers[0].zero_grad()
    loss_of(job.model, next(job.state["data"])).backward()
    at("backward")
    total = torch.stack([p.grad.norm() for p in job.model.parameters() if p.grad is not None]).norm()
    assert torch.isfinite(total)
    job.optimizers[0].step()
    at("step")


def scaler_body(job: Job, step: int, at: Callable[[str], None]) -> None:
    scaler = job.state["scaler"]
    with torch.autocast(Data.device, dtype=torch.float16):
        loss = loss_of(job.model, next(job.state["data"]))
    if step in (5, 9):
        loss = loss * float("inf")  # these steps are skipped
    scaler.scale(loss).backward()
    at("backward")
    scaler.unscale_(job.optimizers[0])
    clip_grad_norm_(job.model.parameters(), 0.5)
    scaler.step(job.optimizers[0])
    scaler.update()
    at("step")
    job.optimizers[0].zero_grad()


def scaler_case(seed: int) -> Job:
    job = make(body=scaler_body, sched=False)(seed)
    job.state["scaler"] = torch.amp.GradScaler(Data.device, init_scale=1024.0, growth_interval=3)
    return job


def masters_case(seed: int, *, given: bool = False) -> Job:
    """bf16 weights, fp32 masters held by the user and given to the optimizer; copied back after each step."""
    job = make(sched=False)(seed)
    job.model.to(torch.bfloat16)
    names = dict(job.model.named_parameters())
    masters = {n: p.detach().float().clone().requires_grad_() for n, p in names.items()}
    job.optimizers = [torch.optim.AdamW(list(masters.values()), lr=3e-3)]

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        loss_of(job.model, next(job.state["data"])).backward()
        at("backward")
        for n, p in names.items():
            masters[n].grad = None if p.grad is None else p.grad.float()
        clip_grad_norm_(masters.values(), 0.5)
        job.optimizers[0].step()
        at("step")
        with torch.no_grad():
            for n, p in names.items():
                p.copy_(masters[n])
                p.grad = None
        job.optimizers[0].zero_grad()

    job.body = body
    if given:
        job.options["masters"] = masters
    return job


def bf16_case(seed: int) -> Job:
    job = make(sched=False)(seed)
    job.model.to(torch.bfloat16)
    job.optimizers = [torch.optim.AdamW(job.model.parameters(), lr=3e-3)]
    return job


def mixed_optimizers(params: list[nn.Parameter]) -> list[Any]:
    matrices = [p for p in params if p.ndim == 2 and p.shape[0] != VOCAB]
    rest = [p for p in params if not any(p is m for m in matrices)]
    return [torch.optim.AdamW(rest, lr=3e-3), torch.optim.Muon(matrices, lr=0.02)]


def groups(params: list[nn.Parameter]) -> Any:
    decay = [p for p in params if p.ndim >= 2]
    return torch.optim.AdamW(
        [
            {"params": decay, "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=3e-3,
    )


def strided_weights(model: nn.Module) -> None:
    """Weights that are no one block of memory."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


def frozen_embedding(model: nn.Module) -> None:
    model.embed.weight.requires_grad_(False)  # type: ignore[union-attr]


class PlainAdam(torch.optim.Optimizer):
    """An optimizer from elsewhere: keeps ``step`` as a Python int and its state under names of its own."""

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
                    state.update(count=0, first=torch.zeros_like(p), second=torch.zeros_like(p))
                state["count"] += 1
                state["first"].lerp_(p.grad, 0.1)
                state["second"].lerp_(p.grad.square(), 0.01)
                p.sub_(
                    state["first"]
                    / (state["second"].sqrt() + 1e-8)
                    * group["lr"]
                    * min(1.0, state["count"] / 10)
                )


class LateState(PlainAdam):
    """Begins to keep another tensor at its sixth update, and uses it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if state.get("count", 0) >= 6:
                    state.setdefault("slow", p.clone()).lerp_(p, 0.1)
                    p.lerp_(state["slow"], 0.01)


def two_updates_body(job: Job, step: int, at: Callable[[str], None]) -> None:
    """One optimizer, two updates in a step: what lies between them is in no sparse snapshot."""
    for _ in range(2):
        loss_of(job.model, next(job.state["data"])).backward()
        at("backward")
        job.optimizers[0].step()
        job.optimizers[0].zero_grad()
    at("step")


def alternating_case(seed: int) -> Job:
    """Two optimizers that take turns within a step, each on a forward of its own, as adversarial
    training does.
    """
    job = make(sched=False)(seed)
    names = [n for n, _ in job.model.named_parameters()]
    params = dict(job.model.named_parameters())
    halves = [[params[n] for n in names[::2]], [params[n] for n in names[1::2]]]
    job.optimizers = [torch.optim.AdamW(half, lr=3e-3) for half in halves]

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        for optimizer in job.optimizers:
            loss_of(job.model, next(job.state["data"])).backward()
            at("backward")
            clip_grad_norm_(job.model.parameters(), 0.5)
            optimizer.step()
            job.model.zero_grad()
        at("step")

    job.body = body
    return job


def plateau_case(seed: int) -> Job:
    """A validation pass after each update drives the schedule: it must see updated weights in replay, too."""
    job = make(sched=False)(seed)
    job.state["sched"] = torch.optim.lr_scheduler.ReduceLROnPlateau(
        job.optimizers[0], patience=0, threshold=0.01
    )
    generator = torch.Generator().manual_seed(3)
    held_out = torch.randint(0, VOCAB, (4, LENGTH + 1), generator=generator).to(Data.device)

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        loss_of(job.model, next(job.state["data"])).backward()
        at("backward")
        job.optimizers[0].step()
        job.optimizers[0].zero_grad()
        job.model.eval()
        with torch.no_grad():
            value = loss_of(job.model, held_out).item()
        job.model.train()
        job.state["sched"].step(value)
        at("step")

    job.body = body
    return job


def forked_child_case(seed: int) -> Job:
    """A child forked in mid-training (as data loader workers are) that outlives the trainer by a while."""
    job = make()(seed)
    plain = job.body

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        if step == 8 and os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        plain(job, step, at)

    job.body = body
    return job


def large_table_case(seed: int, *, rows: int = 400_000) -> Job:
    """Much state and little work: copying a dense snapshot takes a good part of an iteration."""
    job = make(sched=False)(seed)
    job.model.embed = nn.Embedding(rows, WIDTH).to(Data.device)
    job.optimizers = [torch.optim.AdamW(job.model.parameters(), lr=3e-3)]
    # The first plan is dense, and its copies stall training for a good part of each step.
    job.options.update(max_overhead=100.0, inline_copy=True)
    return job


class Diary:
    """State that is live (``state_dict`` hands out its own list), grows, and can be told to fail."""

    def __init__(self, grow: int, fail_at: int = -1) -> None:
        self.grow, self.fail_at = grow, fail_at
        self.pages: list[list[int]] = []

    def state_dict(self) -> dict[str, Any]:
        if len(self.pages) == self.fail_at:
            raise RuntimeError("the user's own state_dict failed")
        return {"pages": self.pages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pages = state["pages"]


def diary_case(seed: int, *, grow: int, fail_at: int = -1) -> Job:
    """The diary is written to while the snapshot of this step is still being finished."""
    job = make()(seed)
    diary = job.state["diary"] = Diary(grow, fail_at)
    plain = job.body

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        diary.pages.append([step] * diary.grow)
        diary.pages[0][0] = step
        plain(job, step, at)

    job.body = body
    return job


def moved_storage_body(job: Job, step: int, at: Callable[[str], None]) -> None:
    """Weights get other storage under the same Parameter objects, as flattening utilities and offloading do."""
    plain_body(job, step, at)
    if step == 4:
        params = list(job.model.parameters())
        vector = nn.utils.parameters_to_vector(params)
        nn.utils.vector_to_parameters(vector * 0.9, params)


def uneven_case(seed: int) -> Job:
    """One optimizer steps every time, another every second time, on gradients that it accumulates."""
    job = make(sched=False)(seed)
    params = list(job.model.parameters())
    job.optimizers = [
        torch.optim.AdamW(params[::2], lr=3e-3),
        torch.optim.AdamW(params[1::2], lr=3e-3),
    ]

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        loss_of(job.model, next(job.state["data"])).backward()
        at("backward")
        for i, optimizer in enumerate(job.optimizers):
            if i == 0 or step % 2:
                optimizer.step()
                optimizer.zero_grad()
        at("step")

    job.body = body
    return job


def own_norm_body(job: Job, step: int, at: Callable[[str], None]) -> None:
    """Clipping by hand, which no tap of ours can see."""
    loss_of(job.model, next(job.state["data"])).backward()
    at("backward")
    grads = [p.grad for p in job.model.parameters() if p.grad is not None]
    total = torch.stack([g.norm() for g in grads]).norm()
    for g in grads:
        g.mul_(torch.clamp(0.3 / total, max=1.0))
    job.optimizers[0].step()
    at("step")
    job.optimizers[0].zero_grad()


def dataloader_case(seed: int, *, early: bool) -> Job:
    """torch's own DataLoader through torchdata's stateful one; its iterator is made before or
    inside the first step.
    """
    from torchdata.stateful_dataloader import StatefulDataLoader

    job = make(sched=True)(seed)
    data = torch.randint(0, VOCAB, (40, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    loader = StatefulDataLoader(data, batch_size=BATCH, shuffle=True, generator=None)
    job.state["data"] = loader

    def endless() -> Any:
        while True:
            yield from loader

    def start(job: Job) -> None:
        job.extra["it"] = iter(loader) if early else None
        job.extra["gen"] = endless()

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        if early:
            try:
                batch = next(job.extra["it"])
            except StopIteration:
                job.extra["it"] = iter(loader)
                batch = next(job.extra["it"])
        else:
            batch = next(job.extra["gen"])
        loss_of(job.model, batch).backward()
        at("backward")
        job.optimizers[0].step()
        at("step")
        job.state["sched"].step()
        job.optimizers[0].zero_grad()

    job.on_start, job.body = start, body
    return job


def batches_case(seed: int) -> Job:
    """The same loader through ``ckpt.batches``, which can also be rewound in process."""
    job = dataloader_case(seed, early=False)
    job.on_start = lambda job: job.extra.update(gen=job.ckpt.batches(job.state["data"]))
    return job


CASES: dict[str, Callable[[int], Job]] = {
    "plain": make(),
    "fused": make(fused=True),
    "drop": make(options={"freeze": "drop"}),
    "fused_drop": make(fused=True, options={"freeze": "drop"}),
    "tied": make(tied=True),
    "batch_norm": make(batch_norm=True),
    "frozen_param": make(prepare=frozen_embedding),
    "strided": make(prepare=strided_weights),
    "checkpoint": make(ckpt_mode="nonreentrant"),
    "reentrant": make(ckpt_mode="reentrant", prepare=None),
    "adamw_fused": make(lambda ps: torch.optim.AdamW(ps, lr=3e-3, fused=True)),
    "adamw_fused_slices": make(lambda ps: torch.optim.AdamW(ps, lr=3e-3, fused=True), fused=True),
    "tensor_lr": make(lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(3e-3), foreach=False)),
    "amsgrad": make(lambda ps: torch.optim.AdamW(ps, lr=3e-3, amsgrad=True)),
    "sgd": make(lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9)),
    "sgd_slices": make(lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9), fused=True),
    "nadam": make(lambda ps: torch.optim.NAdam(ps, lr=3e-3)),
    "radam": make(lambda ps: torch.optim.RAdam(ps, lr=3e-3)),
    "rmsprop": make(lambda ps: torch.optim.RMSprop(ps, lr=1e-3)),
    "adagrad": make(lambda ps: torch.optim.Adagrad(ps, lr=1e-2)),
    "adamax": make(lambda ps: torch.optim.Adamax(ps, lr=3e-3)),
    "rprop": make(lambda ps: torch.optim.Rprop(ps, lr=1e-3)),
    "asgd": make(lambda ps: torch.optim.ASGD(ps, lr=1e-2)),
    "adadelta": make(lambda ps: torch.optim.Adadelta(ps)),
    "adafactor": make(lambda ps: torch.optim.Adafactor(ps, lr=1e-2)),
    "adafactor_fused": make(lambda ps: torch.optim.Adafactor(ps, lr=1e-2), fused=True),
    "muon": make(mixed_optimizers),
    "own_optimizer": make(lambda ps: PlainAdam(ps, lr=3e-3), fused=True),
    "two_updates": make(body=two_updates_body, sched=False),
    "alternating": alternating_case,
    "plateau": plateau_case,
    "forked_child": forked_child_case,
    "large_table": large_table_case,
    "table": lambda seed: large_table_case(seed, rows=20_000),
    "moved_storage": make(body=moved_storage_body),
    "moved_storage_dense": make(body=moved_storage_body, options={"policy": "dense", "window": None}),
    "uneven": uneven_case,
    "live_state": lambda seed: diary_case(seed, grow=10),
    "growing_state": lambda seed: diary_case(seed, grow=9000),
    "failing_state": lambda seed: diary_case(seed, grow=10, fail_at=4),
    "late_state": make(lambda ps: LateState(ps, lr=3e-3)),
    "own_norm": make(body=own_norm_body, sched=False),
    "groups": make(groups),
    "attributes": make(counting=True),
    "autocast": make(body=autocast_body, sched=False),
    "autocast_fused": make(body=autocast_body, sched=False, fused=True),
    "scaler": scaler_case,
    "masters": masters_case,
    "masters_given": lambda seed: masters_case(seed, given=True),
    "bf16": bf16_case,
    "accumulate": make(body=accumulate_body, sched=False),
    "spread": make(body=spread_body, sched=False),
    "zero_first": make(body=zero_first_body, sched=False, options={"freeze": "drop"}),
    "loader_early": lambda seed: dataloader_case(seed, early=True),
    "loader_late": lambda seed: dataloader_case(seed, early=False),
    "batches": batches_case,
    "aligned": make(options={"policy": "aligned"}),
    "dense": make(options={"policy": "dense", "window": None}),
    "dense_every": make(options={"policy": "dense", "window": None, "every": 3}),
    "window1": make(options={"window": 1}),
    "window7": make(options={"window": 7}),
    "auto_window": make(options={"window": None}),
}


def find_case(name: str) -> Callable[[int], Job]:
    """The builder of a case; those named ``hf_…`` need transformers, and ``family/…`` a process
    group, imported only for them.

    Raises:
        ValueError: there is no such case.
    """
    known = CASES
    if "/" in name:
        from tests.e2e.parallel.registry import find_parallel_case

        return find_parallel_case(name)
    if name.startswith("cuda_"):
        from tests.e2e.cuda_cases import CUDA_CASES

        known = CUDA_CASES
    if name.startswith("hf_"):
        from tests.e2e.hf_cases import HF_CASES

        known = HF_CASES
    if name.startswith("precision_"):
        from tests.e2e.precision_cases import PRECISION_CASES

        known = PRECISION_CASES
    if name not in known:
        raise ValueError(f"no case {name!r}; there are {', '.join(sorted(known))}")
    return known[name]
