"""The tensors of a plan are found anew at each top, whatever was replaced since the one before; what was not
keeps its copies.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ckptd.client.capture.live_tensors import CopySplit, LiveSources, RestlessWeights
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import Operator, ParameterRows
from ckptd.client.model.snapshot_layout import CapturedOperators, StateTable, build_phase
from ckptd.core.snapshot_policy import OperatorKind


class Training:
    """A layer with a batch norm's buffers, after one step."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=False)
        self.train()
        binding = self.binding = LiveState(self.model, [self.optimizer], None)
        rows = tuple(ParameterRows(name) for name in binding.params)
        self.plan = build_phase(
            binding,
            [Operator("all", OperatorKind.DENSE, rows)],
            CapturedOperators((0,)),
            state=StateTable.of(binding),
            phase=0,
            compute_dtypes={},
            identity={"job": "j"},
            scalars_capacity=256,
        )
        self.sources = LiveSources(binding, self.plan)

    def train(self) -> None:
        self.model(torch.randn(3, 2)).sum().backward()
        self.optimizer.step()

    @property
    def weight(self) -> nn.Parameter:
        found = self.model[0].weight
        assert isinstance(found, nn.Parameter)
        return found

    def state(self, key: str) -> Tensor:
        found: Tensor = self.optimizer.state[self.weight][key]
        return found

    def copied(self) -> dict[str, Tensor]:
        """What a snapshot would hold now, by name."""
        items, packed = self.sources.items(), self.sources.packed_now()
        found = {name: item.tensor for item, (_, name) in zip(items, self.sources.named, strict=True)}
        return found | {name: item.tensor for item, name in self.sources.packed_separately(packed)}

    def replace_moment(self) -> tuple[str, Tensor]:
        made = self.optimizer.state[self.weight]["exp_avg"] = torch.full((2, 2), 7.0)
        return "optim/exp_avg/0.weight", made

    def replace_step(self) -> tuple[str, Tensor]:
        made = self.optimizer.state[self.weight]["step"] = self.state("step") + 1
        return "optim/step/0.weight", made

    def load_state(self) -> tuple[str, Tensor]:
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.optimizer.state[self.weight]["step"] += 5
        return "optim/step/0.weight", self.state("step")

    def move_weight(self) -> tuple[str, Tensor]:
        self.weight.data = torch.full((2, 2), 3.0)
        return "0.weight", self.weight

    def move_moment(self) -> tuple[str, Tensor]:
        self.state("exp_avg").data = torch.full((2, 2), 4.0)
        return "optim/exp_avg/0.weight", self.state("exp_avg")

    def replace_buffer(self) -> tuple[str, Tensor]:
        made = torch.full((2,), 9.0)
        self.model[1].running_mean = made
        return "buffer/1.running_mean", made


REPLACEMENTS = (
    Training.replace_moment,
    Training.replace_step,
    Training.load_state,
    Training.move_weight,
    Training.move_moment,
    Training.replace_buffer,
)


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_what_was_replaced_is_copied_from_its_new_place(
    replace: Callable[[Training], tuple[str, Tensor]],
) -> None:
    run = Training()
    run.copied()
    for _ in range(2):
        name, now = replace(run)
        copied = run.copied()
        found = next(t for n, t in copied.items() if n == name or n == name.removeprefix("buffer/"))
        assert found.data_ptr() == now.data_ptr()
        assert torch.equal(found, now)


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_what_is_replaced_after_copies_were_prepared_is_copied_from_its_new_place(
    replace: Callable[[Training], tuple[str, Tensor]],
) -> None:
    """They are prepared beside training, which goes on meanwhile."""
    run = Training()
    run.copied()
    run.sources = LiveSources(run.binding, run.plan)
    run.sources.prepare()
    name, now = replace(run)
    copied = run.copied()
    found = next(t for n, t in copied.items() if n == name or n == name.removeprefix("buffer/"))
    assert found.data_ptr() == now.data_ptr()
    assert torch.equal(found, now)


def test_copies_that_were_prepared_are_those_of_the_top() -> None:
    run = Training()
    sources = LiveSources(run.binding, run.plan)
    items, packed = sources.prepare(), sources.packed_now()
    split = CopySplit(sources, items, packed, set())
    run.train()
    assert split.is_of(sources.items(), sources.packed_now(), set())


def test_what_stays_keeps_its_copies_and_their_split() -> None:
    run = Training()
    items, packed = run.sources.items(), run.sources.packed_now()
    split = CopySplit(run.sources, items, packed, set())
    with torch.no_grad():
        run.weight.add_(1)
    assert split.is_of(run.sources.items(), run.sources.packed_now(), set())
    run.replace_step()
    assert not split.is_of(run.sources.items(), run.sources.packed_now(), set())


def test_a_state_that_goes_is_missing() -> None:
    run = Training()
    run.copied()
    assert not run.sources.missing()
    run.optimizer.state.clear()
    copied = run.copied()
    assert not [name for name in copied if name.startswith("optim/")]
    assert "0.weight" in run.sources.absent
    assert run.sources.missing()


def test_a_write_is_known_by_the_name_of_its_tensor() -> None:
    run = Training()
    split = CopySplit(run.sources, run.sources.items(), run.sources.packed_now(), set())
    since = split.versions()
    assert split.written(since) == set()
    with torch.no_grad():
        run.weight.add_(1)
        run.state("exp_avg").mul_(2)
    assert split.written(since) == {"0.weight", "optim/exp_avg/0.weight"}


class Updates:
    """Steps of a model whose weights are watched."""

    def __init__(self) -> None:
        self.layer = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.weights = RestlessWeights(LiveState(self.layer, [self.optimizer], None))
        self.weights.top()

    def step(
        self,
        *,
        before: Callable[[], object] = lambda: None,
        undo: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> bool:
        """Whether it is not known at the next top what has happened to the weights."""
        before()
        loss = self.layer(torch.ones(1, 2)).sum()
        self.weights.forward()
        loss.backward()
        undo()
        self.weights.before_update(0)
        self.optimizer.step()
        self.weights.after_update(0)
        after()
        return self.weights.top()

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        for param in self.layer.parameters():
            param.mul_(factor)


def test_an_optimizer_alone_moves_the_weights() -> None:
    job = Updates()
    for _ in range(3):
        assert not job.step()
    assert not job.weights.found


def test_a_decay_by_hand_after_the_step() -> None:
    """An average that follows it saw other weights in a replay."""
    job = Updates()
    job.step(after=lambda: job.scale(0.5))
    assert job.weights.found


def test_weights_by_data_move_no_version() -> None:
    job = Updates()
    job.step(after=lambda: [p.data.mul_(0.5) for p in job.layer.parameters()])
    assert job.weights.found


def test_a_forward_of_other_weights() -> None:
    """SAM moves them, and back before the update, by a rule that needs all gradients."""
    job = Updates()
    job.step(before=lambda: job.scale(2.0), undo=lambda: job.scale(0.5))
    assert job.weights.found


def test_weights_that_are_put_in_for_an_evaluation() -> None:
    """At some step: no elements were kept, so that step has no snapshot. From the next one on they are."""
    job = Updates()
    job.step()
    job.weights.samples = False
    job.step()

    def swap() -> None:
        job.scale(2.0)
        job.scale(0.5)

    assert job.step(after=swap)
    assert not job.step()
    assert not job.step(after=swap)
    assert not job.weights.found
    job.step(after=lambda: job.scale(0.5))
    assert job.weights.found
