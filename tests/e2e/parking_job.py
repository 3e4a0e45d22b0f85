"""A small training of one stage, or of two that pass activations and gradients by hand, which
hangs, dies or is told to park.

What it is at the top of each step it writes to a file, so that a test can compare what was parked with it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.capture.step_state import Stateful
from ckptd.client.rng_state import capture_rng
from tests.e2e.patience import let_them_come

if TYPE_CHECKING:
    from ckptd.client import Checkpointer

__all__ = ["READY", "Job", "Plot", "act", "unlike"]

WIDE = 8
# In these steps it waits for the daemon, which makes memory more slowly than such steps pass: at
# `READY` it can be parked.
_MEASURED, READY = 4, 10


class Net(nn.Module):
    """With all that a forward changes: running statistics, a counter, random numbers."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.norm, self.drop = nn.BatchNorm1d(WIDE), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        found: Tensor = self.b(self.drop(self.norm(self.a(x))))
        return found


class Data:
    """Batches by their number."""

    def __init__(self) -> None:
        self.position = 0

    def batch(self) -> Tensor:
        self.position += 1
        return torch.randn(4, WIDE, generator=torch.Generator().manual_seed(self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Job:
    """A training whose every part a park must hold: AdamW, a schedule, data, random numbers."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.data = Data()
        self.state: dict[str, Stateful] = {"scheduler": self.scheduler, "data": self.data}

    def forward_and_backward(self) -> None:
        self.model(self.data.batch()).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def everything(self) -> dict[str, Any]:
        """All that must be equal, by name."""
        found: dict[str, Any] = {n: t.detach().clone() for n, t in self.model.state_dict().items()}
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state[param].items():
                found[f"{name}.{key}"] = value.detach().clone()
        found["groups"] = [
            {k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups
        ]
        found["state"] = {name: item.state_dict() for name, item in self.state.items()}
        found["rng"] = capture_rng()
        return found


def unlike(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names of what is not the same bits."""

    def same(x: Any, y: Any) -> bool:
        both = isinstance(x, Tensor) and isinstance(y, Tensor)
        return torch.equal(x, y) if both else bool(x == y)

    return sorted(n for n in a.keys() | b.keys() if not same(a.get(n), b.get(n)))


@dataclass(frozen=True, slots=True)
class Plot:
    """What is to happen. Steps are given where it does; -1: nowhere.

    ``hang_at``: rank 0 stops there, so that the others hang waiting for it. ``wait_at``: it goes on
    when it is told.
    ``handler``: the user has a SIGTERM handler and a wakeup descriptor. ``gate_at``: a copy for a
    park never ends from there on.
    """

    folder: Path
    run: str
    daemon: str
    rank: int = 0
    world_size: int = 1
    total: int = 14
    hang_at: int = -1
    die_at: int = -1
    wait_at: int = -1
    fork_at: int = -1
    gate_at: int = -1
    handler: bool = False
    step_ms: float = 40.0
    options: dict[str, Any] = field(default_factory=dict)


def act(plot: Plot) -> None:
    """Train as the plot says; ends with 0 unless something else was to happen."""
    log = os.open(plot.folder / f"log-{plot.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if plot.world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{plot.folder}/store",
            rank=plot.rank,
            world_size=plot.world_size,
        )
    if plot.handler:
        _the_users_signals(plot.folder)
    from ckptd.client import Checkpointer
    from tests.option_groups import grouped

    job = Job(plot.rank)
    ckpt = Checkpointer(
        job.model,
        job.optimizer,
        job.state,
        **grouped(
            job="e2e",
            run=plot.run,
            rank=plot.rank,
            world_size=plot.world_size,
            daemon=plot.daemon,
            window=2,
            **plot.options,
        ),
    )
    _train(plot, job, ckpt)
    ckpt.close()


def _train(plot: Plot, job: Job, ckpt: Checkpointer) -> None:
    log = ckpt.boundary_log()
    for step in ckpt.steps(plot.total):
        torch.save(job.everything(), plot.folder / f"top-{plot.rank}-{step}.pt")
        (plot.folder / f"at-{plot.rank}").write_text(str(step))
        time.sleep(plot.step_ms / 1e3)
        if _MEASURED <= step < READY:
            _let_memory_come(ckpt)
        if plot.gate_at == step:
            _never_copy_all(plot.folder)
        if plot.rank == 0:
            _happen(plot, step)
        if plot.world_size == 1:
            job.forward_and_backward()
        elif plot.rank == 0:
            out = job.model(job.data.batch())
            log.activation(out, micro_batch=0)
            dist.send(out.detach(), 1)
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            inputs = torch.empty(4, WIDE)
            dist.recv(inputs, 0)
            inputs.requires_grad_()
            job.model(inputs).square().mean().backward()
            assert inputs.grad is not None
            log.gradient(inputs.grad, micro_batch=0)
            dist.send(inputs.grad, 0)
        job.update()


def _let_memory_come(ckpt: Checkpointer) -> None:
    let_them_come(ckpt)
    coming = ckpt._loop.parking._slots._coming if ckpt._loop.parking is not None else None
    if coming is not None:
        coming.exception(20)


def _happen(plot: Plot, step: int) -> None:
    if step == plot.die_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == plot.hang_at:
        time.sleep(600)
    if step == plot.wait_at:
        until = time.monotonic() + 100
        while not (plot.folder / "go_on").exists() and time.monotonic() < until:
            time.sleep(0.05)
    if step == plot.fork_at:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(0.2)
        child.terminate()  # as a data loader ends its workers
        child.join(20)
        (plot.folder / "child").write_text(str(child.exitcode))


def _the_users_signals(folder: Path) -> None:
    """A handler that ends the process in its own way, and a wakeup descriptor, as an event loop has one."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(writer)

    def handler(*_: Any) -> None:
        (folder / "woken").write_bytes(os.read(reader, 16))
        sys.exit(3)

    signal.signal(signal.SIGTERM, handler)


def _never_copy_all(folder: Path) -> None:
    """From now on a copy for a park stops in its middle."""
    from ckptd.cuda import engine

    plain, copied = engine._to_host, list[int]()

    @functools.wraps(plain)
    def stops(item: engine.CopyItem, memory: engine.HostMemory, base: int) -> None:
        if threading.current_thread().name == "ckptd-park":
            copied.append(1)
            if len(copied) == 4:
                (folder / "copying").write_text("")
                time.sleep(600)
        plain(item, memory, base)

    engine._to_host = stops
