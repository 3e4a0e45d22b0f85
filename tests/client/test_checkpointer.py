"""The public face: bad arguments are named before anything starts, off is a no-op, and nothing stays behind."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptd.client import Checkpointer, DaemonOptions, PartialOptions, RecoveryOptions, SnapshotOptions
from ckptd.client.capture import recorder
from ckptd.client.capture.live_tensors import CopySplit
from ckptd.client.capture.object_attributes import of_trainer
from ckptd.client.capture.slot_writer import Capture
from ckptd.client.capture.step_state import HoldsGradients
from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.optimizers.foreign_optimizers import ForeignOptimizers
from ckptd.client.rng_state import capture_rng
from ckptd.core.recovery.recovery_phases import phases_in_metrics
from ckptd.core.slots.slots import SlotState
from ckptd.cuda import engine
from ckptd.errors import AttachRefused, DaemonUnavailable
from tests.e2e.patience import let_memory_come
from tests.option_groups import grouped

AdamW = torch.optim.AdamW


class MoE(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.gate = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        weights = torch.softmax(self.gate(x), -1)
        each = torch.stack([expert(x) for expert in self.experts], -1)
        return (each * weights[..., None, :]).sum(-1)


TOKENS = torch.tensor([0, 1, 2, 3, 4])


def train(ckpt: Checkpointer, model: nn.Module, optimizer: Any, total: int) -> list[int]:
    """The user's loop; returns the steps that were run. On a busy machine these tiny steps outrun the
    daemon, which makes memory.
    """
    steps = []
    for step in ckpt.steps(total):
        let_memory_come(ckpt)
        model(TOKENS).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(step)
    return steps


@pytest.fixture
def model() -> MoE:
    torch.manual_seed(0)
    return MoE()


@pytest.fixture
def make(endpoint: str) -> Iterator[Callable[..., Checkpointer]]:
    """Checkpointers of a run of the test's own; closed at its end."""
    run, open_ones = uuid.uuid4().hex[:8], []

    def create(model: nn.Module, optimizer: Any, state: Any = None, **options: Any) -> Checkpointer:
        options = {"job": "unit", "run": run, "daemon": endpoint, "window": 2, **options}
        open_ones.append(Checkpointer(model, optimizer, state, **grouped(**options)))
        return open_ones[-1]

    yield create
    for ckpt in open_ones:
        ckpt.close()


# -- bad arguments -------------------------------------------------------------------------------


class NoState:
    def __init__(self, **kept: Any) -> None:
        vars(self).update(kept)


class BadState:
    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"socket": object()}}

    def load_state_dict(self, state: Any) -> None: ...


class Halves(torch.optim.SGD):
    """Depends on how many parameters there are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / len(group["params"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"policy": "slide"},
            "policy='slide': choose 'sliding', 'aligned', 'dense', 'partial' or 'selected'",
        ),
        ({"window": 0}, "window=0: a window has 1 to 64 snapshots"),
        ({"window": 65}, "window=65"),
        ({"every": 0}, "every=0"),
        ({"every": 2}, "every=2 with policy='sliding': only policy='dense'"),
        ({"on_mismatch": "ignore"}, "on_mismatch='ignore': choose 'raise' or 'warn'"),
        ({"freeze": "melt"}, "freeze='melt': choose 'auto', 'drop' or 'inputs'"),
        ({"ordering": "loud"}, "loud"),
        ({"state": {"x": 1.5}}, r"state\['x'\] is a float without state_dict\(\): .* keep it in a dict"),
        ({"state": {"x": NoState(rows=iter("ab"))}}, r"state\['x'\].rows .* position cannot be told"),
        (
            {"state": {"x": BadState()}},
            r"state\['x'\]\['inner'\]\['socket'\] is a builtins\.object",
        ),
        ({"operators": {"a": ["nope*"]}}, r"operators\['a'\]: pattern 'nope\*' matches no"),
        (
            {"masters": {"nope": torch.zeros(1)}},
            r"masters\['nope'\]: the model has no such parameter",
        ),
        ({"job": "a/b"}, "job='a/b': use 1 to 64 letters"),
        ({"run": ""}, "run=''"),
        ({"rank": 2, "world_size": 2}, r"rank=2 is not in \[0, world_size=2\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_named(model: MoE, endpoint: str, options: dict[str, Any], message: str) -> None:
    state = options.pop("state", None)
    optimizer = AdamW(model.parameters())
    with pytest.raises(ValueError, match=message):
        Checkpointer(model, optimizer, state, **grouped(daemon=endpoint, **options))


def test_an_optimizer_that_is_none(model: MoE, endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"Linear is not a torch\.optim\.Optimizer"):
        Checkpointer(model, nn.Linear(1, 1), daemon=endpoint)


def test_a_list_without_optimizers(model: MoE, endpoint: str) -> None:
    """It was accepted, and nothing was ever captured."""
    with pytest.raises(ValueError, match="the list of optimizers is empty: pass all optimizers"):
        Checkpointer(model, [], daemon=endpoint)


def test_a_model_that_is_none(model: MoE, endpoint: str) -> None:
    """The arguments the wrong way round ended in an AttributeError."""
    with pytest.raises(ValueError, match=r"model is of type AdamW, not a torch\.nn\.Module"):
        Checkpointer(AdamW(model.parameters()), model, daemon=endpoint)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model is of type list.*nn\.ModuleList"):
        Checkpointer([model], AdamW(model.parameters()), daemon=endpoint)  # type: ignore[arg-type]


def test_a_model_without_parameters_is_told(
    model: MoE, make: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
) -> None:
    """It was accepted without a word, and buffers of the real model were in no snapshot."""
    make(nn.ReLU(), AdamW(model.parameters()))
    assert "the model (ReLU) has no parameters: snapshots hold the" in caplog.text


def test_a_second_one_of_a_run_in_a_process_is_refused(
    model: MoE, make: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
) -> None:
    """It took the rank from the first one, which said that the daemon was away, and took it back."""
    optimizer = AdamW(model.parameters())
    ckpt = make(model, optimizer)
    with pytest.raises(
        AttachRefused, match=r"has a Checkpointer in this process already\. Close that one"
    ) as no:
        make(model, optimizer)
    assert no.value.code == "rank_taken"
    assert train(ckpt, model, optimizer, 3) == [0, 1, 2]
    assert "the daemon is away" not in caplog.text
    ckpt.close()
    make(model, optimizer).close()


@pytest.mark.parametrize("total", ["9", None, 2.5, -1])
def test_a_number_of_steps_that_is_none(total: Any, model: MoE, make: Callable[..., Checkpointer]) -> None:
    ckpt = make(model, AdamW(model.parameters()))
    with pytest.raises(ValueError, match=rf"steps\(total={total!r}\): pass a whole number of steps"):
        next(ckpt.steps(total))


def test_batches_of_what_has_none(model: MoE, make: Callable[..., Checkpointer]) -> None:
    with pytest.raises(ValueError, match=r"batches\(\) got 3, which has no batches"):
        make(model, AdamW(model.parameters())).batches(3)


def test_a_loop_that_steps_another_optimizer_is_told(
    model: MoE, make: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
) -> None:
    """No snapshot is taken before the optimizer's step, and nothing said so."""
    ckpt = make(model, AdamW(MoE().parameters()))
    for _ in ckpt.steps(90):
        pass
    assert "no snapshot in 100 steps" not in caplog.text
    for _ in ckpt.steps(110):
        pass
    assert "no snapshot in 100 steps: no optimizer that Checkpointer got has stepped; pass" in caplog.text


def test_an_error_while_other_optimizers_are_looked_at_ends_no_step(
    model: MoE,
    make: Callable[..., Checkpointer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The hook is called in every optimizer's step of the process."""

    def fails(self: ForeignOptimizers, optimizer: Any) -> None:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(ForeignOptimizers, "stepped", fails)
    optimizer = torch.optim.AdamW(model.parameters())
    assert train(make(model, optimizer), model, optimizer, 3) == [0, 1, 2]
    assert "whether AdamW is known was not found out: dictionary changed size" in caplog.text


def test_a_dependent_optimizer_is_refused_with_reason_and_way_out(model: MoE, endpoint: str) -> None:
    with pytest.raises(
        ValueError, match=r"Halves: the update .*depends on.*SnapshotOptions\(policy='dense'\)"
    ):
        Checkpointer(model, Halves(model.parameters(), lr=0.1), daemon=endpoint)


def test_a_dependent_optimizer_is_captured_densely_if_asked(
    model: MoE, make: Callable[..., Checkpointer]
) -> None:
    optimizer = Halves(model.parameters(), lr=0.1, momentum=0.9)
    ckpt = make(model, optimizer, policy="dense", window=None)
    assert train(ckpt, model, optimizer, 3) == [0, 1, 2]


def test_freezing_by_inputs_where_it_cannot_be_exact(endpoint: str) -> None:
    low = MoE().bfloat16()
    masters = [p.detach().float() for p in low.parameters()]
    with pytest.raises(ValueError, match="'inputs' would not be exact here: separate master weights"):
        Checkpointer(low, AdamW(masters), daemon=endpoint, recovery=RecoveryOptions(freeze="inputs"))


def test_parameters_on_a_device_without_an_engine(endpoint: str) -> None:
    meta = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match=r"2 parameters and buffers .* on the meta device .'weight'.: give"):
        Checkpointer(
            meta,
            AdamW(meta.parameters()),
            daemon=endpoint,
            snapshots=SnapshotOptions(policy="dense"),
        )


# -- off -----------------------------------------------------------------------------------------


class TestOff:
    def test_the_loop_runs_as_if_we_were_not_there(self, model: MoE) -> None:
        reference = copy.deepcopy(model)
        theirs = AdamW(reference.parameters())
        for _ in range(3):
            reference(TOKENS).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            theirs.step()
            theirs.zero_grad()
        optimizer = AdamW(model.parameters())
        ckpt = Checkpointer(model, optimizer, daemon=None)
        assert train(ckpt, model, optimizer, 3) == [0, 1, 2]
        assert all(map(torch.equal, model.parameters(), reference.parameters()))

    def test_nothing_is_looked_at_or_installed(self, model: MoE) -> None:
        """Not even arguments that would be refused: off means off."""
        threads = threading.active_count()
        ckpt = Checkpointer(model, "no optimizer", {"x": NoState()}, run="a/b", daemon=None)  # type: ignore[dict-item]
        assert ckpt.off
        assert not model._forward_pre_hooks
        assert threading.active_count() == threads

    def test_everything_still_answers(self, model: MoE) -> None:
        ckpt = Checkpointer(model, AdamW(model.parameters()), daemon=None)
        assert ckpt.describe() == "ckptd is off (daemon=None)"
        assert ckpt.stats()["snapshots"] == 0
        assert ckpt.resumed_from is None
        assert not ckpt.replaying
        value = object()
        assert ckpt.record("kind", value) is value
        loader = ckpt.batches([1, 2])
        assert [next(loader) for _ in range(3)] == [1, 2, 1]
        model(TOKENS).sum().backward()
        assert ckpt.clip_grad_norm_(model.parameters(), 1.0) > 0
        with pytest.raises(ValueError, match="running checkpointer"):
            ckpt.verify(lambda step: None)
        ckpt.close()


# -- on ------------------------------------------------------------------------------------------


class History:
    """A callback."""

    def __init__(self) -> None:
        self.steps: list[int] = []


class Counting(MoE):
    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = super().forward(tokens) / self.calls
        return out


@pytest.mark.parametrize("attributes", [True, False])
def test_attributes_that_change_are_captured_unless_it_is_turned_off(
    make: Callable[..., Checkpointer], attributes: bool
) -> None:
    model, history = Counting(), History()
    optimizer = AdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: history.steps.append(len(history.steps)))
    ckpt = make(model, optimizer, {"callbacks": of_trainer([history], model)}, attributes=attributes)
    train(ckpt, model, optimizer, 5)
    assert (model.calls, history.steps) == (5, [0, 1, 2, 3, 4])
    assert ("attributes captured: calls" in ckpt.describe()) == attributes
    assert ("attributes captured: History.steps" in ckpt.describe()) == attributes


def test_snapshots_without_attributes_are_resumed_from(make: Callable[..., Checkpointer]) -> None:
    """Those of earlier releases have none, of modules or of a library's callbacks."""
    model = MoE()
    optimizer = AdamW(model.parameters())
    first = make(model, optimizer, attributes=False)
    train(first, model, optimizer, 5)
    first.close()
    fresh, history = MoE(), History()
    again = AdamW(fresh.parameters())
    second = make(fresh, again, {"callbacks": of_trainer([history], fresh)})
    assert second.resumed_from is not None
    assert train(second, fresh, again, 7)[-1] == 6


class Engine(HoldsGradients):
    """Updates in every second step, and keeps the gradients of the step before where no hook sees them."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._params, self._optimizer = list(model.parameters()), optimizer
        self._kept: list[Tensor | None] = []

    @property
    def gradients_wait(self) -> bool:
        return bool(self._kept)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def step(self) -> None:
        if not self._kept:
            self._kept = [p.grad for p in self._params]
        else:
            for param, kept in zip(self._params, self._kept, strict=True):
                if param.grad is not None and kept is not None:
                    param.grad += kept
            self._kept = []
            self._optimizer.step()
        self._optimizer.zero_grad()


def test_no_snapshot_while_an_object_of_state_holds_gradients(
    model: MoE, make: Callable[..., Checkpointer]
) -> None:
    optimizer = AdamW(model.parameters())
    engine = Engine(model, optimizer)
    ckpt = make(model, optimizer, {"engine": engine}, window=1)
    found = set()
    for _ in ckpt.steps(16):
        let_memory_come(ckpt)
        found.add(ckpt.stats()["snapshot_step"])
        model(TOKENS).square().mean().backward()
        engine.step()
    taken = found - {-1}
    assert taken
    assert all(step % 2 == 0 for step in taken)
    assert ckpt.stats()["pending_gradients"] > 0


def test_each_step_has_a_snapshot_where_gradients_wait(make: Callable[..., Checkpointer]) -> None:
    """The first optimizer steps at every fifth step: one step in five had a snapshot."""
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 3)})
    optimizers = [torch.optim.Adam(m.parameters()) for m in model.values()]
    ckpt = make(model, optimizers, window=1)
    found = set()
    for step in ckpt.steps(30):
        let_memory_come(ckpt)
        found.add(ckpt.stats()["snapshot_step"])
        for module in model.values():
            module(torch.ones(2, 3)).square().sum().backward()
        for optimizer in optimizers[0 if step % 5 == 4 else 1 :]:
            optimizer.step()
            optimizer.zero_grad()
    assert found >= set(range(20, 29))


class TestOn:
    def test_attaching_draws_no_random_number(self, model: MoE, make: Callable[..., Checkpointer]) -> None:
        optimizer = AdamW(model.parameters())
        before = capture_rng()
        make(model, optimizer)
        assert capture_rng() == before

    def test_attaching_changes_neither_weights_nor_optimizer(
        self, model: MoE, make: Callable[..., Checkpointer]
    ) -> None:
        optimizer = AdamW(model.parameters())
        before = [p.detach().clone() for p in model.parameters()]
        make(model, optimizer)
        assert all(map(torch.equal, model.parameters(), before))
        assert len(optimizer.state) == 0

    def test_describe_lists_every_operator_before_and_after_planning(
        self, model: MoE, make: Callable[..., Checkpointer]
    ) -> None:
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        before = ckpt.describe()
        for text in ("experts.0 ", "experts.1 ", "gate ", "embed ", "freezing in replay: inputs"):
            assert text in before
        assert "window: chosen after the first steps are measured" in before
        train(ckpt, model, optimizer, 6)
        assert "window: 2" in ckpt.describe()

    def test_verify_says_identical_and_puts_the_live_state_back(
        self, model: MoE, make: Callable[..., Checkpointer]
    ) -> None:
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        train(ckpt, model, optimizer, 8)
        before = [p.detach().clone() for p in model.parameters()]

        def body(step: int) -> None:
            model(TOKENS).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

        certificate = ckpt.verify(body)
        assert certificate.identical, str(certificate)
        assert "identical to the bit" in str(certificate)
        assert all(map(torch.equal, model.parameters(), before))

    def test_verify_finds_a_body_that_does_something_else(
        self, model: MoE, make: Callable[..., Checkpointer]
    ) -> None:
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        train(ckpt, model, optimizer, 8)

        def body(step: int) -> None:
            model(TOKENS + 0 * step).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        certificate = ckpt.verify(body)
        assert not certificate.identical
        assert "DIFFERENT" in str(certificate)

    def test_verify_needs_a_window(self, model: MoE, make: Callable[..., Checkpointer]) -> None:
        with pytest.raises(ValueError, match="no complete window to verify yet"):
            make(model, AdamW(model.parameters())).verify(lambda step: None)

    def test_a_run_that_is_further_than_total(self, model: MoE, make: Callable[..., Checkpointer]) -> None:
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        train(ckpt, model, optimizer, 8)
        ckpt.close()
        again = make(model, optimizer)
        assert again.resumed_from == 8
        with pytest.raises(ValueError, match=r"beyond total=3; pass run=.*one loop over all steps"):
            train(again, model, optimizer, 3)

    def test_a_loop_for_each_epoch_is_told_at_once(
        self, model: MoE, make: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
    ) -> None:
        """Not after the failure, when nothing of the run could be used."""
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        for total in (2, 4, 6):
            train(ckpt, model, optimizer, total)
        assert caplog.text.count("NOT RESUMABLE: steps(4) after steps(2)") == 1
        assert caplog.text.count("NOT RESUMABLE") == 1

    def test_a_loop_over_the_steps_of_each_epoch_is_told(
        self, model: MoE, make: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
    ) -> None:
        """`steps(len(loader))` in each epoch trains one epoch; the line asked for a new name of the run."""
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        assert [train(ckpt, model, optimizer, 2) for _ in range(2)] == [[0, 1], []]
        assert "steps(2): this loop runs no step, because all 2 have run: total counts" in caplog.text

    def test_an_optimizer_that_nobody_passed_ends_snapshots(
        self, model: MoE, make: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
    ) -> None:
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        train(ckpt, model, optimizer, 8)
        taken = ckpt.stats()["snapshots"]
        second = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(ckpt, model, second, 12)
        assert ckpt.stats()["snapshots"] == taken + 1  # of the top that ended the loop before
        assert "optimizer SGD updates the model's weights, and Checkpointer does not know it" in caplog.text

    def test_gradients_that_wait_longer_than_ever(
        self,
        model: MoE,
        make: Callable[..., Checkpointer],
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """An optimizer without state has taken over: nothing is lost, and nothing is protected any more."""
        monkeypatch.setattr(recorder, "_PENDING_LIMIT", 3)
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        train(ckpt, model, optimizer, 8)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in ckpt.steps(14):
            plain.zero_grad()
            model(TOKENS).square().mean().backward()
            plain.step()
        assert caplog.text.count("no snapshot since 3 steps") == 1

    def test_in_one_process_a_fresh_model_resumes_at_the_exact_bits(
        self, model: MoE, make: Callable[..., Checkpointer]
    ) -> None:
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        train(ckpt, model, optimizer, 8)
        ckpt.close()
        torch.manual_seed(5)
        other = MoE()
        others = AdamW(other.parameters())
        again = make(other, others)
        assert train(again, other, others, 10) == [6, 7, 8, 9]
        reference = AdamW(model.parameters())
        reference.load_state_dict(optimizer.state_dict())
        train(Checkpointer(model, reference, daemon=None), model, reference, 2)
        assert all(map(torch.equal, other.parameters(), model.parameters()))

    def test_where_copies_run_is_not_tried_again_after_a_restart(
        self, model: MoE, make: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        train(ckpt, model, optimizer, 60)
        found = re.findall(r"copies run (beside training|in the training thread) ", caplog.text)
        assert len(found) == 1
        ckpt.close()
        other = MoE()
        others = AdamW(other.parameters())
        again = make(other, others)
        train(again, other, others, 64)
        assert f"copies run {found[0]} (as the trainer before this one had measured)" in caplog.text
        assert again.stats()["inline_copy"] == (found[0] == "in the training thread")

    def test_each_start_tells_once_how_long_its_phases_took(
        self, model: MoE, make: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        assert not phases_in_metrics(ckpt.stats()), "it is not over"
        train(ckpt, model, optimizer, 8)
        first = phases_in_metrics(ckpt.stats())
        assert [*first][-4:] == ["attach", "inventory", "plan", "first_new_step"]
        assert caplog.text.count("the first new iteration is 0") == 1
        ckpt.close()
        other = MoE()
        others = AdamW(other.parameters())
        again = make(other, others)
        found, done = [], []
        for step in again.steps(10):
            other(TOKENS).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            others.step()
            others.zero_grad()
            found.append(phases_in_metrics(again.stats()))
            done.append(step)
        assert done == [6, 7, 8, 9]
        assert found[:2] == [{}, {}], "6 and 7 were done before"
        assert [*found[2]] == [
            *("attach", "inventory", "plan", "first_bytes", "loaded", "replayed", "first_new_step"),
        ]
        assert found[3] == found[2]
        assert caplog.text.count("the first new iteration is 8") == 1
        assert again.stats()["first_new_step_at"] > 0.0

    def test_another_models_snapshots_are_refused_with_the_first_differences(
        self, model: MoE, make: Callable[..., Checkpointer]
    ) -> None:
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        train(ckpt, model, optimizer, 6)
        ckpt.close()
        wider = MoE(6)
        with pytest.raises(
            AttachRefused,
            match=r"embed\.weight: float32\[5, 4\] in the snapshot, float32\[5, 6\] here",
        ):
            make(wider, AdamW(wider.parameters()))

    def test_another_number_of_threads_is_warned_about(
        self,
        model: MoE,
        make: Callable[..., Checkpointer],
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It changes the order of sums, so bits: the replay would say "mismatch" without saying why."""
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        train(ckpt, model, optimizer, 6)
        ckpt.close()
        threads = torch.get_num_threads()
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 7)
        with caplog.at_level(logging.WARNING):
            make(model, optimizer)
        assert f"intra-op threads: {threads} when the snapshots were taken, {threads + 7} now" in caplog.text

    def test_a_replay_that_differs_raises_and_names_the_operator(
        self, model: MoE, make: Callable[..., Checkpointer]
    ) -> None:
        from ckptd.client import ReplayMismatch

        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        train(ckpt, model, optimizer, 8)
        ckpt.close()
        again = make(model, optimizer)

        def other_loop() -> None:
            for _ in again.steps(10):
                (model(TOKENS) * 3).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        with pytest.raises(
            ReplayMismatch, match=r"iteration 6 did not reproduce .*operator .*not deterministic"
        ):
            other_loop()

    def test_a_replay_that_differs_may_go_on_if_asked(
        self, model: MoE, make: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
    ) -> None:
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        train(ckpt, model, optimizer, 8)
        ckpt.close()
        again = make(model, optimizer, on_mismatch="warn")
        steps = []
        for step in again.steps(10):
            (model(TOKENS) * 3).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(step)
        assert steps == [6, 7, 8, 9]
        assert "did not reproduce the values recorded" in caplog.text


class TestLeavesNoTrace:
    def test_close_removes_hooks_and_taps_and_threads(
        self, model: MoE, make: Callable[..., Checkpointer]
    ) -> None:
        optimizer = AdamW(model.parameters())
        tap = torch.nn.utils.clip_grad._get_total_norm
        threads = {t for t in threading.enumerate() if t.name.startswith("ckptd")}
        ckpt = make(model, optimizer)
        train(ckpt, model, optimizer, 4)
        ckpt.close()
        for module in model.modules():
            assert not module._forward_pre_hooks
            assert not module._forward_hooks
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert torch.nn.utils.clip_grad._get_total_norm is tap
        assert {t for t in threading.enumerate() if t.name.startswith("ckptd")} == threads

    def test_a_failed_attach_says_what_to_do_and_leaves_nothing(self, model: MoE, tmp_path: Path) -> None:
        threads = {t for t in threading.enumerate() if t.name.startswith("ckptd")}
        with pytest.raises(DaemonUnavailable, match="ckptd run"):
            Checkpointer(
                model,
                AdamW(model.parameters()),
                daemon=DaemonOptions(endpoint=f"ipc://{tmp_path}/no.sock", timeout_s=0.1),
            )
        assert not model._forward_pre_hooks
        assert {t for t in threading.enumerate() if t.name.startswith("ckptd")} == threads

    def test_the_loop_may_go_on_after_close(self, model: MoE, make: Callable[..., Checkpointer]) -> None:
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        steps = []
        for step in ckpt.steps(6):
            model(TOKENS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(step)
            if step == 3:
                ckpt.close()
                ckpt.close()
        assert steps == list(range(6))

    def test_an_exception_in_a_replayed_step_leaves_no_patch_in_the_process(
        self, model: MoE, make: Callable[..., Checkpointer]
    ) -> None:
        """``backward`` is limited to the active parameters while replaying; left so, it would give
        every later model of this process no gradients.
        """
        optimizer = AdamW(model.parameters())
        with make(model, optimizer) as ckpt:
            train(ckpt, model, optimizer, 8)
        backward = torch.autograd.backward

        def fail_while_replaying(ckpt: Checkpointer) -> None:
            for _ in ckpt.steps(10):
                assert torch.autograd.backward is not backward
                raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"), make(model, optimizer) as ckpt:
            fail_while_replaying(ckpt)
        assert torch.autograd.backward is backward
        with pytest.raises(ValueError, match="closed in the middle of a replay"):
            train(ckpt, model, optimizer, 10)
        other = MoE()
        others = AdamW(other.parameters())
        with make(other, others) as again:
            assert train(again, other, others, 10) == [6, 7, 8, 9]

    def test_the_model_can_still_be_copied(self, model: MoE, make: Callable[..., Checkpointer]) -> None:
        """Averaged weights (EMA) begin with ``copy.deepcopy(model)``, which copies hooks and
        whatever they hold; and a copy's forward must not be taken for the model's own.
        """
        optimizer = AdamW(model.parameters())
        ckpt = make(model, optimizer)
        twin = copy.deepcopy(model)
        train(ckpt, model, optimizer, 3)
        twin(TOKENS)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged.update_parameters(model)

    def test_the_model_can_still_be_pickled(self, model: MoE, make: Callable[..., Checkpointer]) -> None:
        """``torch.save(model)`` pickles hooks too."""
        make(model, AdamW(model.parameters()))
        twin = pickle.loads(pickle.dumps(model))
        assert torch.equal(twin(TOKENS), model(TOKENS))


def test_leaving_the_loop_early_counts_the_body_that_was_done() -> None:
    """``break`` after an update, then a second loop: no step runs twice and none is left out."""
    model = nn.Linear(2, 2)
    ckpt = Checkpointer(model, torch.optim.SGD(model.parameters(), lr=0.1), daemon=None)
    seen = []
    for step in ckpt.steps(10):
        seen.append(step)
        if step == 4:
            break
    seen += list(ckpt.steps(10))
    assert seen == list(range(10))


def test_one_that_nobody_holds_lives_as_long_as_its_model(model: MoE, endpoint: str) -> None:
    """It says goodbye at the interpreter's end: a daemon must not take the end of a script that
    dropped it for a death.
    """
    optimizer = AdamW(model.parameters(), lr=0.01)
    options = grouped(job="unit", run=uuid.uuid4().hex[:8], daemon=endpoint, window=2)
    ckpt = Checkpointer(model, optimizer, **options)
    train(ckpt, model, optimizer, 4)
    dropped = weakref.ref(ckpt)
    del ckpt
    gc.collect()
    left = dropped()
    assert left is not None
    left.close()


# -- buffers that change without telling -----------------------------------------------------------


class Normalised(nn.Module):
    """Batch norm updates its statistics in the forward, and their version counters do not move."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, features)
        self.norm = nn.BatchNorm1d(features)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.norm(self.embed(tokens))
        return out


@pytest.mark.parametrize("small_bytes", [1 << 20, 0], ids=["small", "large"])
def test_a_buffer_that_a_kernel_changes_unseen_is_never_torn(
    make: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    """Copies are held back until the optimizer's step: whatever is copied beside training is copied too late."""
    held_back = threading.Event()
    copy_now = engine._to_host

    def late(*args: Any) -> None:
        if threading.current_thread().name == "ckptd-copy":
            held_back.wait(20)
        copy_now(*args)

    monkeypatch.setattr(engine, "_to_host", late)
    monkeypatch.setattr("ckptd.client.capture.slot_writer.SMALL_BUFFER_BYTES", small_bytes)
    torch.manual_seed(0)
    model = Normalised(4)
    optimizer = AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: held_back.set())  # before that of the checkpointer
    ckpt = make(model, optimizer, inline_copy=False)
    tops: dict[int, Tensor] = {}
    for step in ckpt.steps(9):
        tops[step] = dict(model.named_buffers())["norm.running_var"].clone()
        model(TOKENS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < 8:
            held_back.clear()
    memory = ckpt._memory
    assert memory is not None
    memory.settle_filled(5)
    sealed = [r for r in memory.table.records() if r.state is SlotState.SEALED and r.iteration in tops]
    assert len(sealed) >= 2
    for image in memory.images(sealed):
        (name,) = (n for n in image.view.names() if n.endswith("norm.running_var"))
        found = torch.frombuffer(bytearray(image.view.data(name)), dtype=torch.float32)
        assert torch.equal(found, tops[image.iteration]), image.iteration


def test_the_training_thread_plans_no_copies_of_selected_experts(
    model: MoE, make: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each snapshot has other experts than those before, so its copies are new. They are planned beside
    training, and the snapshot has the values of its top all the same.
    """
    planned_by: list[str] = []

    def noted(*arguments: Any) -> CopySplit:
        planned_by.append(threading.current_thread().name)
        return CopySplit(*arguments)

    monkeypatch.setattr("ckptd.client.capture.slot_writer.CopySplit", noted)
    optimizer = AdamW(model.parameters(), lr=0.01)
    of = PartialOptions(experts=1, lost_tokens_limit=None)
    ckpt = make(model, optimizer, policy="selected", window=None, partial=of, inline_copy=False)
    tops: dict[int, dict[str, Tensor]] = {}
    by_step: dict[int, list[str]] = {}
    for step in ckpt.steps(14):
        tops[step] = {name: param.detach().clone() for name, param in model.named_parameters()}
        by_step[step], planned_by = planned_by, []
        let_memory_come(ckpt)
        model(TOKENS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert ckpt._memory is not None
        assert ckpt._memory.session.flush(20)
    here = threading.current_thread().name
    assert here in {name for names in by_step.values() for name in names}, "the first ones"
    assert {name for step in range(10, 14) for name in by_step[step]} == {"ckptd-desk"}
    assert ckpt._memory is not None
    ckpt._memory.settle_filled(5)
    sealed = [r for r in ckpt._memory.table.records() if r.sealed and r.iteration in range(10, 14)]
    assert len(sealed) >= 2
    for image in ckpt._memory.images(sealed):
        for name in image.view.names():
            if name in tops[image.iteration]:
                found = torch.frombuffer(bytearray(image.view.data(name)), dtype=torch.float32)
                assert torch.equal(found, tops[image.iteration][name].view(-1)), (image.iteration, name)


@pytest.mark.parametrize("policy", ["partial", "selected", "sliding", "dense"])
def test_what_loses_updates_says_so_when_it_describes_itself(
    policy: str, model: MoE, make: Callable[..., Checkpointer]
) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01)
    ckpt = make(model, optimizer, policy=policy, window=None)
    train(ckpt, model, optimizer, 8)
    described = ckpt.describe()
    says_so = "PARTIAL SNAPSHOTS: a recovery loses updates of experts. window: " in described
    assert says_so == (policy in ("partial", "selected"))
    assert ("experts of this rank are selected by tokens at risk" in described) == (policy == "selected")
    assert (ckpt.stats()["selectable_experts"] > 0) == (policy == "selected")


class LateEngine(engine.CpuEngine):
    """Plays a device: the training thread does not wait, and of the third copy's error is told when
    the next one has begun.
    """

    host_waits = False

    def __init__(self) -> None:
        super().__init__(inline=True)
        self.begun = 0
        self.late: list[Any] = []

    def begin(self, items: Any, memory: Any, base: int, done: Any, *more: Any) -> None:
        self.begun += 1
        for tell in self.late:
            tell(RuntimeError("the device was lost for a moment"))
        self.late = [done] if self.begun == 3 else []
        told = (lambda error: None) if self.begun == 3 else done
        super().begin(items, memory, base, told, *more)


def test_an_error_that_a_device_tells_late_breaks_the_chain_once(
    model: MoE, make: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.client.checkpointer.make_engine", lambda *a, **k: LateEngine())
    optimizer = AdamW(model.parameters(), lr=0.01)
    ckpt = make(model, optimizer, inline_copy=False)
    train(ckpt, model, optimizer, 20)
    assert ckpt.stats()["failed"] == 1
    assert ckpt.stats()["chain_breaks"] == 1
    assert ckpt.stats()["snapshots"] >= 10


def test_generations_go_also_while_there_is_no_slot(
    model: MoE, make: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They went only after a snapshot: where old ones were all that stood in the way of a new one,
    no snapshot was ever taken again.
    """
    asked = []
    drop = RankMemory.drop_unneeded

    def noted(memory: RankMemory) -> list[MappedSegment]:
        asked.append(1)
        return drop(memory)

    monkeypatch.setattr(RankMemory, "drop_unneeded", noted)
    monkeypatch.setattr(Capture, "begin", lambda capture, *what: None)
    optimizer = AdamW(model.parameters(), lr=0.01)
    ckpt = make(model, optimizer)
    train(ckpt, model, optimizer, 4)
    assert ckpt.stats()["snapshots"] == 0
    assert len(asked) >= 3
