"""A resume is rehearsed: what an optimizer keeps where no snapshot sees it is found in the first
snapshots, by a copy that a snapshot was loaded into and that steps otherwise.

Each optimizer here was captured without a word before, and went on otherwise after a failure.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ckptd.client import Checkpointer, RecoveryOptions, RunOptions, SnapshotOptions
from ckptd.client.model import snapshot_layout
from ckptd.client.recovery import rehearsal as rehearsal_module
from ckptd.client.recovery import start as start_module
from ckptd.client.recovery.global_recovery import recover_global
from tests.client.recovery import rehearsed_ranks
from tests.forked import Forked
from tests.habits.optimizers import MAKERS, package_of
from tests.long import long
from tests.ports import free_port

_STEPS = 0
DENSE = SnapshotOptions(policy="dense")


def counter() -> Callable[[], int]:
    count = 0

    def following() -> int:
        nonlocal count
        count += 1
        return count

    return following


class CountsInAClosure(torch.optim.SGD):
    """Its rate falls with a number that only a function knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.following = counter()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 0.1 / self.following()
        return super().step(closure)


class KeepsInItsClass(torch.optim.SGD):
    """Momentum in a table of the class, by the identity of a parameter."""

    moments: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                before = self.moments.setdefault(id(p), torch.zeros_like(p))
                p.sub_(before.mul_(0.9).add_(p.grad), alpha=0.1)


class KeepsInAGlobal(torch.optim.SGD):
    """Counts in a variable of its module."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        global _STEPS
        _STEPS += 1
        self.param_groups[0]["lr"] = 0.1 / _STEPS
        return super().step(closure)


class KeepsOnParameters(torch.optim.SGD):
    """The first gradient that it saw, as an attribute of the parameter: after a load it is another one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                if not hasattr(p, "first_grad"):
                    p.first_grad = p.grad.abs().add(0.1)
                p.sub_(p.grad / p.first_grad, alpha=0.01)


class MadeAnewAfterALoad(torch.optim.SGD):
    """A scale that follows from the first gradient after the beginning, or after a load: whether it
    is there is told by a function's attribute.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.scale = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not getattr(_mark, "begun", False):
            _mark.begun = True  # type: ignore[attr-defined]
            self.scale = float(self.param_groups[0]["params"][0].grad.norm()) + 0.1
        self.param_groups[0]["lr"] = 0.1 / self.scale
        return super().step(closure)


def _mark() -> None: ...


HIDDEN: list[tuple[type, str]] = [
    (CountsInAClosure, r"closure variable count of counter\.<locals>\.following"),
    (KeepsInItsClass, r"class attribute KeepsInItsClass\.moments"),
    (KeepsInAGlobal, r"global variable _STEPS of tests\.client\.recovery\.test_rehearsal"),
    (KeepsOnParameters, ""),
    (MadeAnewAfterALoad, r"attribute _mark\.begun"),
]


@pytest.fixture(autouse=True)
def fresh_state() -> None:
    """What the optimizers keep outside of themselves is that of a fresh process."""
    forget()


def forget() -> None:
    global _STEPS
    _STEPS = 0
    KeepsInItsClass.moments.clear()
    vars(_mark).clear()


class Life:
    """A training with or without ckptd, and what was said."""

    def __init__(
        self,
        make: Any,
        caplog: Any,
        *,
        daemon: str | None,
        run: str,
        snapshots: SnapshotOptions = DENSE,
        rehearse: bool = True,
        schedule: Any = None,
    ) -> None:
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.PReLU(), nn.Linear(5, 3))
        self.optimizer = make(self.model.parameters())
        self._caplog = caplog
        self._schedule: Any = None if schedule is None else schedule(self.optimizer)
        state: dict[str, Any] = {} if schedule is None else {"schedule": self._schedule}
        self.ckpt = Checkpointer(
            self.model,
            self.optimizer,
            state=state,
            run=RunOptions(name=run, job="unit"),
            daemon=daemon,
            snapshots=snapshots,
            recovery=RecoveryOptions(rehearse=rehearse),
        )

    def train(self, total: int, *, closure: bool = False) -> list[Tensor]:
        inner = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        for step in self.ckpt.steps(total):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))

            def loss(batch: Tensor = batch) -> Tensor:
                self.model.zero_grad()
                out: Tensor = self.model(batch).square().mean()
                out.backward()
                return out

            if closure:
                inner[0].step(loss)
            else:
                loss()
                for each in inner:
                    each.step()
            if self._schedule is not None:
                self._schedule.step()
        return [p.detach().clone() for p in self.model.parameters()]

    @property
    def refusals(self) -> list[str]:
        return [r.getMessage() for r in self._caplog.records if "which cannot be captured" in r.getMessage()]

    @property
    def said(self) -> str:
        return "\n".join(r.getMessage() for r in self._caplog.records)


@pytest.fixture
def live(endpoint: str, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Life]]:
    caplog.set_level(logging.INFO)
    lives: list[Life] = []
    run = uuid.uuid4().hex[:8]

    def begin(make: Any, **options: Any) -> Life:
        lives.append(Life(make, caplog, **{"daemon": endpoint, "run": run, **options}))
        return lives[-1]

    yield begin
    for each in lives:
        each.ckpt.close()


# The last one depends on the gradient of another parameter: dense snapshots only.
@pytest.mark.parametrize(
    ("kind", "where", "window"),
    [(*each, 1) for each in HIDDEN] + [(*each, 3) for each in HIDDEN[:-1]],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_what_no_snapshot_sees_is_refused(live: Any, kind: type, where: str, window: int) -> None:
    """The refusal names the class, what differs, and where it is kept; nothing is left to resume
    from, and training is what it is without ckptd.
    """
    snapshots = DENSE if window == 1 else SnapshotOptions(window=window)
    life = live(kind, snapshots=snapshots)
    weights = life.train(14)
    assert len(life.refusals) == 1, life.said
    told = life.refusals[0]
    assert re.match(
        rf"ckptd: optimizer {kind.__name__} keeps state which cannot be captured: .*the weight \d\.",
        told,
    )
    assert re.search(where, told), told
    assert "pass recovery=RecoveryOptions(rehearse=False)" in told
    taken = life.ckpt.stats()["snapshots"]
    assert taken <= 3 * window
    life.ckpt.close()
    forget()
    assert live(kind, snapshots=snapshots).ckpt.resumed_from is None
    forget()
    plain = live(kind, daemon=None).train(14)
    assert all(map(torch.equal, weights, plain))


def test_it_can_be_turned_off(live: Any) -> None:
    life = live(CountsInAClosure, rehearse=False)
    life.train(10)
    assert not life.refusals
    assert "rehears" not in life.said


QUICK = [
    name
    for name in MAKERS
    if package_of(name) is None and not name.endswith("generator function") and "Sparse" not in name
]
CLOSURES = ("torch.optim.LBFGS", "torch.optim.LBFGS(strong_wolfe)", "SAM(AdamW)")


@pytest.mark.parametrize("name", QUICK)
def test_what_is_captured_is_not_refused(live: Any, name: str) -> None:
    """No false alarm; and training is what it is without ckptd, to the bit."""
    life = live(MAKERS[name])
    torch.manual_seed(7)
    weights = life.train(8, closure=name in CLOSURES)
    assert not life.refusals
    assert ("resume rehearsed" in life.said) is (name not in CLOSURES), life.said
    assert life.ckpt.stats()["snapshots"] >= 4
    other = live(MAKERS[name], daemon=None)
    torch.manual_seed(7)
    assert all(map(torch.equal, weights, other.train(8, closure=name in CLOSURES)))
    if name in CLOSURES:
        assert re.search(r"no rehearsal of a resume .*: it (evaluates its closure|keeps)", life.said)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


# Two optimizers in a list, and a plain object: torch makes no scheduler for them.
NOT_SCHEDULED = (*CLOSURES, "torch.optim.Muon", "Lookahead, a plain object")


@pytest.mark.parametrize("name", [name for name in QUICK if name not in NOT_SCHEDULED])
def test_with_a_scheduler_it_is_rehearsed_too(live: Any, name: str) -> None:
    """A scheduler puts a `step` of its own on the optimizer. A copy had none, which counted as a difference: README's own
    loop was told that "a copy tells nothing".
    """
    life = live(MAKERS[name], schedule=cosine)
    torch.manual_seed(7)
    weights = life.train(12)
    assert not life.refusals
    assert "resume rehearsed" in life.said, life.said
    other = live(MAKERS[name], daemon=None, schedule=cosine)
    torch.manual_seed(7)
    assert all(map(torch.equal, weights, other.train(12)))


def test_with_a_scheduler_hidden_state_is_found_too(live: Any) -> None:
    life = live(CountsInAClosure, schedule=cosine)
    life.train(12)
    assert len(life.refusals) == 1, life.said


def test_a_step_with_a_closure_is_rehearsed(live: Any) -> None:
    """As Lightning steps every optimizer: the copy is given the loss, and evaluates nothing."""
    life = live(MAKERS["torch.optim.AdamW"])
    weights = life.train(8, closure=True)
    assert re.search(r"resume rehearsed: .* makes the same of 5 of 5 parameters", life.said)
    plain = live(MAKERS["torch.optim.AdamW"], daemon=None).train(8, closure=True)
    assert all(map(torch.equal, weights, plain))


def test_a_job_that_comes_back_does_not_wait_for_it(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is rehearsed after the first new step, with which the start is over. Iterations that are done
    again before it have snapshots, too.
    """

    def others_were_further(*args: Any, **options: Any) -> Any:
        found = recover_global(*args, **options)
        return found if isinstance(found, str) else found._replace(new_from=found.new_from + 3)

    first = live(MAKERS["torch.optim.AdamW"])
    first.train(6)
    first.ckpt.close()
    monkeypatch.setattr(start_module, "recover_global", others_were_further)
    life = live(MAKERS["torch.optim.AdamW"])
    before = len(life.said)
    life.train(14)
    said = life.said[before:]
    assert life.ckpt.resumed_from == 6
    assert 0 <= said.find("the first new iteration is 9") < said.find("resume rehearsed"), said


def test_memory_that_does_not_suffice_is_said(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both numbers; snapshots and training go on."""
    monkeypatch.setattr(rehearsal_module, "free_bytes", lambda device: 3)
    life = live(MAKERS["torch.optim.AdamW"])
    life.train(8)
    assert re.search(
        r"no rehearsal of a resume for optimizer AdamW, .*needs 0\.0 MiB on cpu, 0\.0 MiB may be used",
        life.said,
    )
    assert life.ckpt.stats()["snapshots"] >= 4
    assert not life.refusals


def test_free_memory_of_the_host_is_told() -> None:
    assert 1 << 20 < snapshot_layout.free_bytes(torch.device("cpu")) < 1 << 46


def begin(
    endpoint: str,
    run: str,
    what: str,
    folder: Path,
    rank: int = 0,
    ranks: int = 1,
    steps: int = 10,
    port: int = 0,
) -> Forked:
    env = {**os.environ, "DIED": str(folder / "died")}
    return Forked(rehearsed_ranks.main, endpoint, run, what, rank, ranks, steps, str(port), env=env)


def test_a_kill_in_the_middle_of_it_costs_nothing(endpoint: str, tmp_path: Path) -> None:
    """The trainer is killed by SIGKILL while a copy steps, right after the first snapshot: the next
    life goes on from that snapshot, and ends as one that nobody killed.
    """
    run = uuid.uuid4().hex[:8]
    first = begin(endpoint, run, "dies", tmp_path)
    _, said = first.communicate(timeout=280)
    assert first.returncode == -signal.SIGKILL, said
    lives = [begin(endpoint, run, "dies", tmp_path), begin("off", run, "dies", tmp_path)]
    ends = [(*life.communicate(timeout=280), life.returncode) for life in lives]
    assert [code for *_, code in ends] == [0, 0], ends
    resumed, plain = (json.loads(out.splitlines()[-1]) for out, *_ in ends)
    assert resumed["resumed"] is not None
    assert resumed["weights"] == plain["weights"]


@pytest.mark.parametrize("what", ["communicates", pytest.param("ddp", marks=long)])
def test_ranks_do_not_wait_for_a_copy(endpoint: str, tmp_path: Path, what: str) -> None:
    """A copy's step that communicated would hang, or mix up what the ranks send each other: it is
    kept from it, which is said. Ranks of DDP rehearse, each for itself.
    """
    ends: list[list[Any]] = []
    for daemon in (endpoint, "off"):
        run, port = uuid.uuid4().hex[:8], free_port()
        steps = ends[0][0]["steps"] if ends else 0
        ranks = [begin(daemon, run, what, tmp_path, rank, 2, steps, port) for rank in range(2)]
        told = [(*each.communicate(timeout=280), each.returncode) for each in ranks]
        assert [code for *_, code in told] == [0, 0], told
        ends.append([json.loads(out.splitlines()[-1]) for out, *_ in told])
        for _, said, _ in told if daemon == endpoint else ():
            skipped = re.search(
                r"no rehearsal of a resume for optimizer Communicates,.* within its step", said
            )
            assert (skipped is not None) is (what == "communicates"), said
            assert ("resume rehearsed" in said) is (what == "ddp"), said
            assert "which cannot be captured" not in said
    for one, other in zip(*ends, strict=True):
        assert one["weights"] == other["weights"]
