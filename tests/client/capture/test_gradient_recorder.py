"""Which gradients a slot gets behind its image: those that lead from the snapshot before to this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.client.capture import gradient_recorder
from ckptd.client.capture.gradient_recorder import GradientCopy, GradientRecorder
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import Operator, ParameterRows
from ckptd.client.model.snapshot_layout import (
    CapturedOperators,
    PhasePlan,
    StateTable,
    build_phase,
    gradient_room,
)
from ckptd.core.snapshot_policy import OperatorKind
from ckptd.cuda.engine import CpuEngine, HostMemory
from ckptd.storage.gradient_block import UpdateRecord, read_block

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


class Training:
    """Two layers under an optimizer, stepped by hand; operator 0 is the first layer, 1 the second."""

    def __init__(self, optimizer: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
        made: Any = torch.optim.AdamW if optimizer is None else optimizer
        self.optimizer: Any = made(self.model.parameters(), **({"lr": 1e-2} | options))
        self.step()
        self.binding = LiveState(self.model, [self.optimizer], None)
        self.recorder = GradientRecorder(self.binding)
        self.operators = [
            Operator(
                f"layer{i}", OperatorKind.DENSE, tuple(ParameterRows(n) for n in NAMES[2 * i : 2 * i + 2])
            )
            for i in range(2)
        ]

    def plan(self, *anchored: int) -> PhasePlan:
        return build_phase(
            self.binding,
            self.operators,
            CapturedOperators(anchored or (0, 1)),
            state=StateTable.of(self.binding),
            phase=0,
            compute_dtypes={},
            identity={"job": "j"},
            scalars_capacity=256,
        )

    def step(self) -> None:
        self.model(torch.randn(3, 6)).pow(2).sum().backward()
        if hasattr(self, "recorder"):
            self.recorder.hold(0)
        self.optimizer.step()

    def take(self, step: int, previous: int, plan: PhasePlan | None = None) -> GradientCopy | None:
        plan = self.plan() if plan is None else plan
        room = plan.layout.image_len + gradient_room(self.binding, plan)
        return self.recorder.take(step, plan, previous, room)

    def two_snapshots(self) -> Iterator[tuple[int, PhasePlan, GradientCopy]]:
        """Those of steps 4 and 5, of which there are gradients."""
        self.take(3, -1)
        for step in (4, 5):
            self.step()
            plan = self.plan()
            found = self.take(step, step - 1, plan)
            assert found is not None
            yield step, plan, found


def record_of(found: GradientCopy | None) -> UpdateRecord:
    """What a peer is told."""
    assert found is not None
    found.items()
    assert found._block is not None
    return found._block.record()


def updated(found: GradientCopy | None) -> dict[str, int]:
    """The offset of each parameter's gradient."""
    return {p.weight: p.gradient for p in record_of(found).parameters}


def test_one_step_between_two_snapshots_gives_its_gradients() -> None:
    training = Training(weight_decay=0.1)
    assert training.take(3, -1) is None, "there is no snapshot before"
    training.optimizer.zero_grad()
    training.step()
    record = record_of(training.take(4, 3))
    assert {p.weight for p in record.parameters} == set(NAMES)
    assert record.base == 3
    (group,) = record.groups
    assert (group.optimizer, group.options["weight_decay"], group.options["betas"]) == (
        "AdamW",
        0.1,
        [0.9, 0.999],
    )
    first = next(p for p in group.parameters if p.weight == "0.weight")
    assert first.states == {k: f"optim/{k}/0.weight" for k in ("exp_avg", "exp_avg_sq")}
    assert first.scalars == {"step": ("ckptd.optim_scalars/F32", 0)}


def test_the_options_are_those_of_the_step_not_of_the_top() -> None:
    training = Training()
    training.take(3, -1)
    training.step()
    training.optimizer.param_groups[0]["lr"] = 7.0
    assert record_of(training.take(4, 3)).groups[0].options["lr"] == 1e-2


def test_the_gradients_are_copied_behind_the_image_and_dropped() -> None:
    training = Training()
    training.take(3, -1)
    training.optimizer.zero_grad()
    training.step()
    wanted = {n: p.grad.clone() for n, p in training.model.named_parameters() if p.grad is not None}
    plan = training.plan()
    found = training.take(4, 3, plan)
    assert found is not None
    training.optimizer.zero_grad()  # drops them: the copy still has them
    slot = copied(training, plan, found)
    block = read_block(slot, plan.layout.image_len, iteration=4, sequence=9)
    assert block is not None
    for each in block.record.parameters:
        at = block.start + each.gradient
        size = wanted[each.weight].numel() * 4
        assert bytes(slot[at : at + size]) == wanted[each.weight].numpy().tobytes()
    assert found._block is not None
    assert not found._block.items
    assert not found._block.versions, "nothing holds the gradients any more"


def copied(training: Training, plan: PhasePlan, found: GradientCopy) -> memoryview:
    slot = memoryview(bytearray(plan.layout.image_len + gradient_room(training.binding, plan)))
    engine = CpuEngine(inline=True)
    errors: list[BaseException | None] = []
    engine.begin([], HostMemory(slot), 0, errors.append, found.items)
    engine.close()
    assert errors == [None]
    found.copied()
    found.write(slot, plan.layout.image_len, iteration=4, sequence=9)
    return slot


def test_gradients_that_were_zeroed_while_they_were_copied_are_none(caplog: pytest.LogCaptureFixture) -> None:
    """``set_to_none=False`` between the top and the end of the copy; later ones are copied at the top."""
    training = Training()
    for step, plan, found in training.two_snapshots():
        assert found.at_once == (step == 5)
        if step == 4:
            training.optimizer.zero_grad(set_to_none=False)
        slot = copied(training, plan, found)
        block = read_block(slot, plan.layout.image_len, iteration=4, sequence=9)
        assert (block is not None) == (step == 5)
    assert "set_to_none" in caplog.text


def test_gradients_that_were_zeroed_before_the_top_are_none(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    training.take(3, -1)
    training.step()
    training.optimizer.zero_grad(set_to_none=False)
    plan = training.plan()
    found = training.take(4, 3, plan)
    assert found is not None
    assert read_block(copied(training, plan, found), plan.layout.image_len, iteration=4, sequence=9) is None
    training.step()
    training.optimizer.zero_grad(set_to_none=False)
    assert updated(training.take(5, 4)) == {}
    assert "written to between the optimizer's step and the next top" in caplog.text


def test_a_parameter_without_a_gradient_stays_as_it_was() -> None:
    training = Training()
    training.take(3, -1)
    training.optimizer.zero_grad()
    training.model[1](torch.randn(3, 5)).pow(2).sum().backward()
    training.recorder.hold(0)
    training.optimizer.step()
    found = updated(training.take(4, 3))
    assert {name for name, offset in found.items() if offset < 0} == {"0.weight", "0.bias"}


@pytest.mark.parametrize("gap", ["skipped snapshot", "two steps", "no step", "broken chain", "dropped"])
def test_a_gap_gives_none(gap: str) -> None:
    training = Training()
    training.take(3, -1)
    for _ in range({"two steps": 2, "no step": 0}.get(gap, 1)):
        training.step()
    if gap == "dropped":
        training.recorder.drop()
    previous = {"skipped snapshot": 2, "broken chain": -1}.get(gap, 3)
    assert training.take(4, previous) is None
    training.step()
    assert training.take(5, 4) is not None, "the next snapshot continues this one"


def test_what_either_snapshot_lacks_goes_whole() -> None:
    """Algorithm 3 of MoEtion: gradients for what was selected before as well."""
    training = Training()
    training.take(3, -1, training.plan(0))
    training.step()
    assert set(updated(training.take(4, 3, training.plan(0, 1)))) == {"0.weight", "0.bias"}
    training.step()
    assert set(updated(training.take(5, 4, training.plan(1)))) == {"1.weight", "1.bias"}


class Mine(torch.optim.SGD):
    """An optimizer of the user."""


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(Mine, {"momentum": 0.9}), (torch.optim.RMSprop, {}), (torch.optim.Adagrad, {})],
)
def test_other_optimizers_go_whole_and_the_log_says_so_once(
    optimizer: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(optimizer, **options)
    training.take(3, -1)
    for step in (4, 5):
        training.step()
        assert training.take(step, step - 1) is None
    assert caplog.text.count("AdamW, Adam, SGD of torch.optim only") == 1


def test_a_step_that_may_skip_itself_goes_whole(caplog: pytest.LogCaptureFixture) -> None:
    """A fused optimizer under a GradScaler leaves weights as they are if a gradient is not finite."""
    training = Training(fused=True)
    training.take(3, -1)
    training.optimizer.grad_scale = torch.ones(())  # as GradScaler does
    training.step()
    assert training.take(4, 3) is None
    assert "GradScaler" in caplog.text


def test_options_that_no_peer_can_be_told_go_whole() -> None:
    training = Training(lr=torch.tensor(1e-2), foreach=False)
    training.take(3, -1)
    training.step()
    assert updated(training.take(4, 3)) == {}


def test_a_slot_without_room_gets_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    """A ring of an earlier start without gradients."""
    training = Training()
    training.take(3, -1)
    training.step()
    plan = training.plan()
    assert updated(training.recorder.take(4, plan, 3, plan.layout.image_len)) == {}
    assert "no room for 4 gradients" in caplog.text


def test_gradients_are_kept_only_of_what_can_go(caplog: pytest.LogCaptureFixture) -> None:
    """``zero_grad()`` is to free the memory of all others."""
    training = Training()
    training.optimizer.zero_grad()
    weight = training.model.get_parameter("0.weight")
    weight.data = weight.data.t().contiguous().t()
    training.step()
    assert training.recorder._steps == {0: None}, "there is no snapshot to go on from"
    training.take(3, -1)
    training.step()
    held = training.recorder._steps[0]
    assert held is not None
    assert held.gradients.keys() == set(NAMES[1:])
    assert set(updated(training.take(4, 3))) == set(NAMES[1:])
    assert not caplog.text


def test_nothing_is_kept_if_nothing_can_go(caplog: pytest.LogCaptureFixture) -> None:
    """Weights without optimizer state: their gradients take as many bytes."""
    training = Training(torch.optim.SGD)
    for step in (3, 4):
        assert training.take(step, step - 1) is None
        training.step()
        assert training.recorder._steps == {0: None}
    assert caplog.text.count("there is no weight with optimizer state") == 1


@pytest.mark.parametrize("part", ["_Block", "write_block"])
def test_what_is_for_peers_alone_does_not_cost_the_snapshot(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    for _, plan, found in training.two_snapshots():
        with monkeypatch.context() as broken:
            broken.setattr(gradient_recorder, part, lambda *_, **__: 1 // 0)
            slot = copied(training, plan, found)
        assert read_block(slot, plan.layout.image_len, iteration=4, sequence=9) is None
    assert caplog.text.count("ZeroDivisionError") == 1


def test_a_gradient_without_a_version_costs_neither_the_step_nor_the_snapshot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = Training()
    training.take(3, -1)
    with torch.inference_mode():
        gradient = torch.zeros(5)
    training.model.get_parameter("0.bias").grad = gradient
    training.recorder.hold(0)
    assert training.take(4, 3) is None
    assert "Inference tensors do not track version counter" in caplog.text
