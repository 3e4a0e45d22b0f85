"""What a program forgot to pass is named, and nothing else."""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.utils.data import DataLoader, TensorDataset

from ckptd.client.capture.uncaptured.left_behind import LeftBehind, around_loop, variables_of
from ckptd.client.capture.whole_objects import WholeObject
from ckptd.client.data import Batches, BatchLedger
from ckptd.client.model.live_state import LiveState


class Job:
    """A model with what belongs to it, and a step."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.after: list[Callable[[], object]] = []

    def step(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        for call in self.after:
            call()

    def said(
        self,
        caplog: pytest.LogCaptureFixture,
        captured: tuple[Any, ...] = (),
        *,
        carried: tuple[str, ...] = (),
        trains: object = None,
        **variables: Any,
    ) -> str:
        """What is said when these variables are around the loop; ``trains``: its ``self``."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        updated = [p for group in self.optimizer.param_groups for p in group["params"]]
        if trains is not None:
            variables |= {"self": trains, **{f"self.{name}": value for name, value in vars(trains).items()}}
        looking: LeftBehind | None = LeftBehind(variables, captured, tensors, updated, carried=carried)
        for _ in range(6):
            if looking is not None:
                looking = looking.look()
            self.step()
        return caplog.text


@pytest.fixture
def job() -> Job:
    return Job()


def follow(mean: nn.Module, model: nn.Module) -> None:
    for mine, theirs in zip(mean.parameters(), model.parameters(), strict=True):
        mine.data.lerp_(theirs.data, 0.5)


def test_a_scheduler_and_an_average(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    mean, scheduler = copy.deepcopy(job.model), torch.optim.lr_scheduler.StepLR(job.optimizer, 2)
    job.after = [scheduler.step, lambda: follow(mean, job.model)]
    told = job.said(caplog, ema=mean, sched=scheduler)
    assert "NOT CAPTURED: ema (Linear), sched (StepLR): it changes while it trains, and begins anew" in told
    assert 'state={"ema": ema, "sched": sched}' in told
    assert "a large module with the model: Checkpointer(nn.ModuleDict({...}), ...)" in told


def test_what_is_captured_is_not_named(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Nor what is inside of it, such as the schedulers of which one is made."""
    first, second = (torch.optim.lr_scheduler.ConstantLR(job.optimizer) for _ in range(2))
    both = torch.optim.lr_scheduler.SequentialLR(job.optimizer, [first, second], [3])
    mean = copy.deepcopy(job.model)
    job.after = [both.step, lambda: follow(mean, job.model)]
    told = job.said(
        caplog, (both, mean), mean=mean, both=both, first=first, net=job.model, optimizer=job.optimizer
    )
    assert told == ""


def test_what_does_not_change_is_not_named(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """A teacher, a loss without tensors, a part and a wrapper of the model."""
    around = nn.Sequential(job.model)
    assert job.said(caplog, teacher=nn.Linear(2, 2), loss=nn.MSELoss(), whole=around, n=3, text="a") == ""


def test_a_second_optimizer(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    other = nn.Linear(2, 2)
    second = torch.optim.SGD(other.parameters(), lr=0.1)

    def step() -> None:
        other(torch.ones(1, 2)).sum().backward()
        second.step()

    job.after = [step]
    told = job.said(caplog, critic=other, second=second)
    assert "critic (Linear), second (SGD)" in told
    assert "Checkpointer(model, [first, second])" in told


def test_an_optimizer_of_the_model_that_was_mistaken_for_another(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """`Checkpointer` got the optimizer of a model that was made anew since: nothing was captured or said."""
    trains = torch.optim.AdamW(job.model.parameters())
    job.optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    job.after = [trains.step]
    told = job.said(caplog, optimizer=job.optimizer, second=trains)
    assert "NOT CAPTURED: second (AdamW)" in told
    assert told.rstrip().endswith(
        "Pass all optimizers of the model in a list: Checkpointer(model, [first, second])"
    )


def test_a_gradient_scaler(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)

    def update() -> None:
        scaler.scale(torch.ones(()))
        scaler.unscale_(job.optimizer)
        scaler.update()

    job.after = [update]
    told = job.said(caplog, scaler=scaler, off=off)
    assert "NOT CAPTURED: scaler (GradScaler)" in told


def test_an_iterator_of_a_loader(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Unless its sampler is captured, or nothing is read from it."""
    data = TensorDataset(torch.arange(9))
    followed, other, still = DataLoader(data), DataLoader(data), DataLoader(data)
    rows, more, none = iter(followed), iter(other), iter(still)
    job.after = [lambda: next(rows), lambda: next(more)]
    told = job.said(caplog, (followed.sampler,), rows=rows, more=more, none=none, followed=followed)
    assert "NOT CAPTURED: more (SingleProcessDataLoaderIter): it changes" in told
    assert "Pass the loader, not its iterator, to ckpt.batches(loader), which gives the same batches" in told


class Meter:
    """What a program may keep in an object of its own."""

    def __init__(self) -> None:
        self.shadow = {"weight": torch.zeros(2)}

    def update(self) -> None:
        self.shadow["weight"] = self.shadow["weight"] + 1


def test_what_the_program_keeps(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Not what stays as it is, nor the global generators."""
    meter, norms, fixed, noise = Meter(), [0.0], [1.0], np.random.default_rng(1)
    job.after = [meter.update, lambda: norms.append(1.0), noise.normal]
    told = job.said(
        caplog, meter=meter, norms=norms, noise=noise, fixed=fixed, everybodys=torch.default_generator
    )
    assert "NOT CAPTURED: meter (Meter), norms (list), noise (Generator): it changes while it trains" in told
    assert (
        'If it matters, pass Checkpointer(..., state={"meter": meter, "norms": norms, "noise": noise}' in told
    )


def test_what_counts_steps_of_local_sgd(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    state = PostLocalSGDState(None, None, 3)
    job.after = [lambda: state.maybe_increase_iter(SimpleNamespace(is_last=lambda: True))]
    assert "NOT CAPTURED: hook (PostLocalSGDState)" in job.said(caplog, hook=state)


def test_variables_that_are_carried_over(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Not times, nor what is captured."""
    kept = {"best": 1.0}
    variables = {"best": 1.0, "bad": 0, "began": time.perf_counter(), "kept": kept}
    told = job.said(caplog, (kept,), carried=(*variables, "unset"), **variables)
    assert "NOT CAPTURED: bad (int), best (float): a step takes it over from the one before" in told
    assert 'kept = {...}, Checkpointer(..., state={"kept": kept})' in told


class Counts:
    def __init__(self) -> None:
        self.steps, self.mean, self.history = 0, None, [0.0]
        self.lr = 0.1

    def update(self) -> None:
        self.steps += 1
        self.mean = 0.5  # type: ignore[assignment]
        self.history.append(1.0)


@pytest.mark.parametrize("captured", [False, True])
def test_an_object_that_trains(job: Job, caplog: pytest.LogCaptureFixture, captured: bool) -> None:
    """Nobody can set a number in place, so the object is what to pass."""
    own = Counts()
    job.after = [own.update]
    told = job.said(caplog, (own,) if captured else (), trains=own)
    expected = "NOT CAPTURED: self (Counts: steps, mean, history): it changes while it trains"
    assert told == "" if captured else expected in told
    assert captured or 'pass Checkpointer(..., state={"self": self})' in told


def test_generators_that_a_loader_reaches(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """They are captured with its position; the same for what an object in ``state=`` keeps."""
    generator, own = torch.Generator(), Counts()
    batches = Batches(
        DataLoader(TensorDataset(torch.arange(9)), shuffle=True, generator=generator), BatchLedger()
    )
    job.after = [lambda: torch.rand(1, generator=generator), own.update]
    binding = LiveState(job.model, [job.optimizer], None)
    history = own.history
    looking = around_loop(sys._getframe(), (batches, WholeObject("own", own), job.after), binding)
    for _ in range(6):
        if looking is not None:
            looking = looking.look()
        job.step()
    assert caplog.text == ""
    assert len(history) > 1


def test_what_is_only_shown_is_not_named(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """A list of losses that is printed was named; a list that something else reads still is."""
    binding = LiveState(job.model, [job.optimizer], None)
    losses, read = [0.0], [0.0]
    looking = around_loop(sys._getframe(), (job.after, job), binding)
    for _ in range(6):
        if looking is not None:
            looking = looking.look()
        job.step()
        losses.append(1.0)
        read.append(1.0)
        print(sum(losses))  # noqa: T201
    job.after.extend(read)  # type: ignore[arg-type]
    assert "NOT CAPTURED: read (list): it changes while it trains" in caplog.text
    assert "losses" not in caplog.text


class Around:
    """An optimizer around another one, as a plain object."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1


def test_what_is_around_an_optimizer(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """It was passed, and is captured with the optimizer."""
    around = Around(job.optimizer)
    job.after = [around.step]
    binding = LiveState(job.model, [job.optimizer], None, [around])
    looking = around_loop(sys._getframe(), (job.after, job), binding)
    for _ in range(6):
        if looking is not None:
            looking = looking.look()
        job.step()
    assert caplog.text == ""


def test_what_began_as_none(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """None and small numbers are one object everywhere: what kept one of them hid all variables that began so."""
    captured = SimpleNamespace(nothing=None, no=0)
    told = job.said(caplog, (captured,), carried=("hidden", "bad"), hidden=None, bad=0)
    assert "NOT CAPTURED: bad (int), hidden (NoneType): a step takes it over" in told


def test_an_average_that_begins_late(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Of the last part of a run: the first looks saw nothing of it."""
    mean, made_late = copy.deepcopy(job.model), copy.deepcopy(job.model)
    looking: LeftBehind | None = LeftBehind({"mean": mean}, (), [*job.model.parameters()], ())
    around: dict[str, Any] = {"mean": mean}
    for step in range(40):
        assert looking is not None
        looking = looking.look(lambda: around)
        if step > 10:
            around["swa"] = made_late
        job.step()
        if step > 5:
            follow(mean, job.model)
        if step > 20:
            follow(made_late, job.model)
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    assert "NOT CAPTURED: mean (Linear)" in told[0]
    assert "NOT CAPTURED: swa (Linear)" in told[1]


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def test_iterators_that_no_variable_holds(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Of a loop over a loader, around ``next(steps)``; and one inside of a generator."""
    loader = DataLoader(TensorDataset(torch.ones(9, 2)))
    hidden, data = [iter(loader)], endless(DataLoader(TensorDataset(torch.ones(9, 2))))
    job.after = [lambda: next(hidden[0]), lambda: next(data)]
    told = job.said(caplog, data=data)
    assert told.count("an iterator over TensorDataset (SingleProcessDataLoaderIter)") == 2
    assert "data (generator)" in told


def test_batches_have_an_iterator_of_their_own(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    ledger = BatchLedger()
    batches = Batches(DataLoader(TensorDataset(torch.ones(9, 2))), ledger)
    ledger.begin(0)
    job.after = [lambda: next(batches)]
    assert job.said(caplog, (batches, batches.loader), batches=batches) == ""


@pytest.mark.parametrize(
    "iterator", [itertools.cycle([1, 2]), itertools.count(), iter([1] * 9), enumerate("a" * 9)]
)
def test_other_iterators(job: Job, caplog: pytest.LogCaptureFixture, iterator: Iterator[Any]) -> None:
    job.after = [lambda: next(iterator)]
    told = job.said(caplog, data=iterator)
    assert f"NOT CAPTURED: data ({type(iterator).__name__}): it changes" in told


class Unusable(nn.Module):
    def named_parameters(self, *_: Any, **__: Any) -> Any:
        raise ValueError("not yet")


def test_an_object_that_cannot_be_looked_at_ends_nothing(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert "were not looked at: ValueError: not yet" in job.said(
        caplog, odd=Unusable(), lazy=nn.LazyLinear(3)
    )


def frames() -> Iterator[dict[str, Any]]:
    yield variables_of(sys._getframe(1))


class Trainer:
    def __init__(self) -> None:
        self.ema = "an average"

    def fit(self) -> dict[str, Any]:
        local = "a scheduler"
        for found in frames():
            return {**found, "same": local}
        return {}


def test_variables_are_those_of_the_function_with_the_loop() -> None:
    found = Trainer().fit()
    assert (found["local"], found["self.ema"]) == ("a scheduler", "an average")


def test_variables_of_a_library_are_not_looked_at() -> None:
    scope: dict[str, Any] = {"__name__": "transformers.trainer", "frames": frames}
    exec("ema = 1\nfor found in frames(): break", scope)  # noqa: S102 - code of a module of that name
    assert scope["found"] == {}


def test_a_progress_bar_between() -> None:
    scope: dict[str, Any] = {"__name__": "tqdm.std", "frames": frames}
    exec("def bar():\n    for each in frames():\n        yield each", scope)  # noqa: S102 - the same
    ema = "an average"
    for found in scope["bar"]():
        assert found["ema"] == ema


def test_a_model_that_hides_its_methods_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Megatron-Core's wrapper has a list called ``buffers``."""
    caplog.set_level("INFO")
    odd: Any = SimpleNamespace(optimizers=[], params={}, masters={}, buffers=[])
    assert around_loop(sys._getframe(), (), odd) is None
    assert "were not looked at: TypeError: 'list' object is not callable" in caplog.text
