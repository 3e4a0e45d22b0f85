"""A write that moves no version counter, between the top of a step and the optimizer's step, never
ends up in a sealed snapshot.

Copies are held back until such a write is over, so that what is copied beside training is copied
too late; a fresh model is then brought back from the newest complete window and trained on, and
must be the fault-free one to the bit.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_module

from ckptd.client import Checkpointer
from ckptd.client.model.live_state import local
from ckptd.client.options import OptionGroups
from ckptd.client.recovery.replay import ReplayMismatch
from ckptd.cuda import engine
from tests.option_groups import grouped

LOST, TOTAL, DECAY = 8, 12, 0.97
Write = Callable[[list[Tensor]], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def fast_ai(params: list[Tensor]) -> None:
    for p in params:
        p.data.mul_(DECAY)


def foreach(params: list[Tensor]) -> None:
    torch._foreach_mul_([p.data for p in params], DECAY)


def detached(params: list[Tensor]) -> None:
    for p in params:
        p.detach().mul_(DECAY)


def numpy_views(params: list[Tensor]) -> None:
    for p in params:
        view = p.detach().numpy()
        view *= DECAY


def third_party_thread(params: list[Tensor]) -> None:
    thread = threading.Thread(target=fast_ai, args=(params,))
    thread.start()
    thread.join()


def swapped_and_restored(params: list[Tensor]) -> None:
    """An evaluation with averaged weights: only the copy tells, the tensors are what they were."""
    kept = [p.data.clone() for p in params]
    for p in params:
        p.data.fill_(0.5)
    Held.let_go()
    for p, was in zip(params, kept, strict=True):
        p.data.copy_(was)


def to_local(params: list[Tensor]) -> None:
    with torch.no_grad():
        for p in params:
            p.to_local().mul_(DECAY)  # type: ignore[attr-defined]


class Held:
    """Holds the copying thread back until it is told that the write is over, and waits until it has copied."""

    over = threading.Event()
    wait: Callable[[], object] = staticmethod(lambda: None)

    @classmethod
    def let_go(cls) -> None:
        cls.over.set()
        cls.wait()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Held]]:
    copy_now = engine._to_host

    def late(*args: Any) -> None:
        if threading.current_thread().name == "ckptd-copy":
            Held.over.wait(5)
        copy_now(*args)

    monkeypatch.setattr(engine, "_to_host", late)
    Held.over.clear()
    yield Held
    Held.over.set()
    Held.wait = staticmethod(lambda: None)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def build(seed: int, mesh: Any = None) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    if mesh is not None:

        def shard(_: str, module: nn.Module, on: Any) -> None:
            for name, p in list(module.named_parameters(recurse=False)):
                placed = torch.distributed.tensor.distribute_tensor(p.detach(), on, [Replicate()])
                module.register_parameter(name, nn.Parameter(placed))

        distribute_module(model, mesh, shard)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def tokens(step: int) -> Tensor:
    return torch.randint(0, 20, (4,), generator=torch.Generator().manual_seed(step))


def body(model: Net, optimizer: torch.optim.Optimizer, step: int, write: Write | None) -> None:
    batch = tokens(step)
    if hasattr(next(model.parameters()), "to_local"):
        mesh: Any = next(model.parameters()).device_mesh  # type: ignore[attr-defined]
        batch = torch.distributed.tensor.DTensor.from_local(batch, mesh, [Replicate()])
    loss = model(batch).square().mean()
    loss.backward()
    if write is not None:
        write(list(model.parameters()))
    Held.let_go()
    optimizer.step()
    optimizer.zero_grad()
    if step not in (LOST - 1, TOTAL - 1):  # nothing comes after the last top that could let go
        Held.over.clear()


def everything(model: Net, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [v for p in model.parameters() for v in optimizer.state[p].values()]
    return [local(t).clone() for t in [*model.parameters(), *state]]


def options(endpoint: str, run: str) -> OptionGroups:
    return grouped(job="torn", run=run, daemon=endpoint, window=2, inline_copy=False, park=False)


def wait_for_copies(ckpt: Checkpointer) -> None:
    copying = ckpt._engine
    Held.wait = staticmethod(lambda: copying.wait())


def let_memory_come(ckpt: Checkpointer) -> None:
    memory = ckpt._memory
    if memory is not None:
        memory.session.flush(20)
        memory.settle_filled(20)


def train_and_lose(
    endpoint: str, run: str, write: Write | None, mesh: Any = None
) -> tuple[dict[str, float], list[Tensor]]:
    """Train for a while; what is kept is what a process that dies right then leaves. And the end
    without a fault.
    """
    model, optimizer = build(0, mesh)
    with Checkpointer(model, optimizer, **options(endpoint, run)) as ckpt:
        wait_for_copies(ckpt)
        for step in ckpt.steps(LOST):
            let_memory_come(ckpt)
            body(model, optimizer, step, write)
        stats = dict(ckpt.stats())
    for step in range(LOST, TOTAL):
        body(model, optimizer, step, write)
    return stats, everything(model, optimizer)


def resume(endpoint: str, run: str, write: Write | None, mesh: Any = None) -> tuple[list[Tensor], int]:
    """A fresh model goes on from what is kept, to the same end; and the first step that it ran."""
    model, optimizer = build(9, mesh)
    begun = -1
    Held.over.set()
    with Checkpointer(model, optimizer, **options(endpoint, run)) as ckpt:
        wait_for_copies(ckpt)
        for step in ckpt.steps(TOTAL):
            begun = step if begun < 0 else begun
            body(model, optimizer, step, write)
    return everything(model, optimizer), begun


@pytest.mark.parametrize(
    "write",
    [fast_ai, foreach, detached, numpy_views, third_party_thread, swapped_and_restored],
    ids=lambda w: w.__name__,
)
def test_a_write_before_the_optimizers_step(
    endpoint: str, held: type[Held], caplog: pytest.LogCaptureFixture, write: Write
) -> None:
    """fast.ai's weight decay and its kin: every tensor of the resumed run differed, and no mismatch
    was reported.

    All tensors are learnt in one snapshot, which is left out and said so once; those that follow
    hold the state of the top.
    """
    run = uuid.uuid4().hex[:8]
    with caplog.at_level(logging.WARNING):
        stats, expected = train_and_lose(endpoint, run, write)
    discarded = [r.getMessage() for r in caplog.records if "discarded" in r.getMessage()]
    assert stats["torn"] == len(discarded) == 1, discarded
    assert "embed.weight, layers.0.bias, layers.0.weight and 4 more changed" in discarded[0]
    assert stats["snapshots"] >= 3
    found, begun = resume(endpoint, run, write)
    assert 0 < begun < LOST
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_write_to_the_shard_of_a_dtensor(
    endpoint: str, held: type[Held], mesh: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """``to_local().mul_()`` counts in the local tensor, not in the DTensor, which was the one that
    was watched.
    """
    run = uuid.uuid4().hex[:8]
    with caplog.at_level(logging.WARNING):
        stats, expected = train_and_lose(endpoint, run, to_local, mesh)
    assert stats["torn"] == 1
    found, begun = resume(endpoint, run, to_local, mesh)
    assert 0 < begun < LOST
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nothing_is_discarded_where_nothing_is_written(endpoint: str, held: type[Held]) -> None:
    """Weights that are not numbers are equal to themselves."""
    model, optimizer = build(0)
    with torch.no_grad():
        model.embed.weight[0, 0] = float("nan")
    with Checkpointer(model, optimizer, **options(endpoint, uuid.uuid4().hex[:8])) as ckpt:
        for step in ckpt.steps(TOTAL):
            let_memory_come(ckpt)
            body(model, optimizer, step, None)
        assert ckpt.stats()["torn"] == 0
        assert ckpt.stats()["snapshots"] >= 3


def rows(params: list[Tensor]) -> None:
    """Three rows of which no sample is: positions are known to nobody who writes, here they are
    kept away by force.
    """
    params[0].data[5:8].mul_(0.5)


def test_rows_that_no_sample_meets_are_noticed_in_replay(
    endpoint: str, held: type[Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What samples miss is sealed; the replay does not reproduce it, and says which operator at
    which iteration.

    Where the operator is anchored before the newest snapshot, as here: what only that one holds is
    compared with nothing.
    """
    run = uuid.uuid4().hex[:8]
    with monkeypatch.context() as only:
        # Only the first and the last element of each tensor.
        only.setattr("ckptd.cuda.samples._FEWEST", 2)
        stats, _ = train_and_lose(endpoint, run, rows)
    assert stats["torn"] == 0
    with pytest.raises(ReplayMismatch, match=r"replay of iteration \d+.*operator"):
        resume(endpoint, run, rows)


def test_a_snapshot_is_given_to_the_daemon_while_the_step_goes_on(endpoint: str) -> None:
    """A host that was lost in the middle of a step took the snapshot of that step's top along,
    though its copies had long been complete: it was not sealed, and so not replicated, before the
    optimizer's step (`make demo-elastic` did a step twice where an expert had no other replica).

    What is written once the copies are complete tears nothing.
    """
    model, optimizer = build(0)
    given: list[float] = []
    with Checkpointer(model, optimizer, **options(endpoint, uuid.uuid4().hex[:8])) as ckpt:
        for step in ckpt.steps(TOTAL):
            let_memory_come(ckpt)
            assert ckpt._engine is not None
            ckpt._engine.wait()
            model(tokens(step)).square().mean().backward()
            let_memory_come(ckpt)
            given.append(ckpt.stats()["snapshots"])
            fast_ai(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        assert ckpt.stats()["torn"] == 0
    assert given[-4:] == [given[-1] - n for n in (3, 2, 1, 0)]
    assert given[-1] == ckpt.stats()["snapshots"] - 1  # that of the last top, after the loop
