"""Objects of ``state=`` without ``state_dict``: captured as a whole, or refused by a path."""

from __future__ import annotations

import random
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ckptd.client import values
from ckptd.client.capture.whole_objects import WholeObject, why_not_whole
from ckptd.client.model.live_state import LiveState


class Pair(NamedTuple):
    first: int
    second: Any


class Keeps:
    def __init__(self, model: nn.Module, **others: Any) -> None:
        self.model, self.lr, self.count = model, 0.1, 0
        self.by_parameter: dict[Any, float] = dict.fromkeys(model.parameters(), 0.0)
        self.by_identity = {id(p): 0.0 for p in model.parameters()}
        self.pairs: deque[Pair] = deque(maxlen=3)
        self.generator = random.Random(1)
        for name, value in others.items():
            setattr(self, name, value)


def bind(model: nn.Module) -> LiveState:
    return LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)], None)


def whole(value: Any, model: nn.Module) -> WholeObject:
    item = WholeObject("own", value)
    item.know(bind(model), [])
    return item


def carry(item: WholeObject, into: WholeObject) -> None:
    into.load_state_dict(values.unpack(values.pack(item.state_dict())))


def test_an_object_comes_back_in_place() -> None:
    there, here = nn.Linear(2, 2), nn.Linear(2, 2)
    before, after = Keeps(there), Keeps(here)
    items = whole(before, there), whole(after, here)
    before.count = 3
    before.pairs.extend([Pair(1, np.ones(2)), Pair(2, [torch.ones(2)])])
    before.by_parameter[there.weight] = before.by_identity[id(there.bias)] = 2.0
    drawn = [before.generator.random(), before.generator.random()][1:]
    replay = after.pairs
    carry(*items)
    assert (after.count, after.model, after.pairs) == (3, here, replay)
    assert [type(pair) for pair in replay] == [Pair, Pair]
    assert torch.equal(replay[1].second[0], torch.ones(2))
    assert (after.by_parameter[here.weight], after.by_identity[id(here.bias)]) == (2.0, 2.0)
    assert after.generator.random() == before.generator.random() != drawn[0]


def test_what_has_not_changed_is_the_scripts() -> None:
    """A run whose script was edited has the new number, as it has new attributes of modules."""
    model = nn.Linear(2, 2)
    before, after = Keeps(model), Keeps(model)
    after.lr = 0.5
    items = whole(before, model), whole(after, model)
    before.count = 1
    carry(*items)
    assert (after.lr, after.count) == (0.5, 1)


def test_going_back_in_a_process() -> None:
    """To before the first change of a number, which no snapshot of then has."""
    model = nn.Linear(2, 2)
    own = Keeps(model)
    item = whole(own, model)
    recorded = values.unpack(values.pack(item.state_dict()))
    own.count, own.lr = 3, 0.5
    again = whole(own, model)
    again.begin_as(item)
    again.load_state_dict(recorded)
    assert (own.count, own.lr) == (0, 0.1)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda value: value.append(2.5)),
        ({"best": 1.0}, lambda value: value.update(best=0.5, seen=(1, 2))),
        ({1}, lambda value: value.add(2)),
        (deque([1], maxlen=2), lambda value: value.extend([2, 3])),
        (np.zeros(2), lambda value: value.__iadd__(1)),
        (torch.zeros(2), lambda value: value.add_(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers(value: Any, change: Any) -> None:
    model, here = nn.Linear(2, 2), type(value)(value) if not isinstance(value, np.ndarray) else np.zeros(2)
    here = torch.zeros(2) if isinstance(value, torch.Tensor) else here
    items = whole(value, model), whole(here, model)
    change(value)
    carry(*items)
    assert values.equal(here, value) if isinstance(value, np.ndarray | torch.Tensor) else here == value


def test_generators() -> None:
    for make in (lambda: torch.Generator().manual_seed(1), lambda: np.random.default_rng(1)):
        model, before, after = nn.Linear(2, 2), make(), make()
        items = whole(before, model), whole(after, model)

        def draw(generator: Any) -> float:
            drawn = (
                torch.rand(1, generator=generator)
                if isinstance(generator, torch.Generator)
                else generator.random()
            )
            return float(drawn)

        first = draw(before)
        carry(*items)
        assert draw(after) == draw(before) != first


def test_what_cannot_be_held_is_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(values.UnsupportedValue, match=r"state\['own'\].rows .*position cannot be told"):
        whole(Keeps(model, rows=iter(range(3))), model)
    item = whole(keeps := Keeps(model), model)
    keeps.pairs.append(SimpleNamespace(made=1))  # type: ignore[arg-type]
    with pytest.raises(
        values.UnsupportedValue, match=r"state\['own'\].pairs\[0\].*SimpleNamespace, made in a step"
    ):
        item.state_dict()


def test_what_nobody_can_change_in_place() -> None:
    assert "keep it in a dict" in why_not_whole("best", 1.0)
    assert "pass objects with state_dict()" in why_not_whole("rows", iter([1]))
    assert why_not_whole("kept", {}) == ""


def test_a_replay_does_not_compare_it() -> None:
    assert not WholeObject("own", {}).reproducible


def averager() -> Any:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    made: Any = PeriodicModelAverager.__new__(PeriodicModelAverager)  # its own __init__ needs a process group
    made.process_group, made.step, made.period, made.warmup_steps = None, 0, 4, 2
    return made


def hook_state() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

    return PostLocalSGDState(None, None, 3)


def local_sgd() -> Any:
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed (extra test)")
    from accelerate.local_sgd import LocalSGD

    made = LocalSGD(accelerate.Accelerator(cpu=True), nn.Linear(2, 2), 8)
    made.model_sync_obj = nullcontext()  # as within `with`
    return made


def test_error_feedback_comes_back() -> None:
    """PowerSGD's was named, and not captured: the replay after a failure differed."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    binding = LiveState(nn.Linear(2, 2), [], None)
    first, second = (WholeObject("hook", PowerSGDState(None)) for _ in range(2))
    for each in (first, second):
        each.know(binding, ())
    first.value.error_dict[0], first.value.iter = torch.ones(3), 7
    first.value.rng.randint(9)
    second.load_state_dict(values.unpack(values.pack(first.state_dict())))
    assert second.value.iter == 7
    assert torch.equal(second.value.error_dict[0], torch.ones(3))
    assert second.value.rng.randint(1000) == first.value.rng.randint(1000)


@pytest.mark.parametrize(
    ("make", "counts"), [(averager, "step"), (hook_state, "iter"), (local_sgd, "num_steps")]
)
def test_what_libraries_count_of_local_sgd(make: Any, counts: str) -> None:
    """These objects have no ``state_dict``: after a resume, ranks averaged at other steps, in silence."""
    before, after = make(), make()
    items = whole(before, nn.Linear(2, 2)), whole(after, nn.Linear(2, 2))
    assert why_not_whole("local", before) == ""
    setattr(before, counts, 13)
    carry(*items)
    assert getattr(after, counts) == 13
