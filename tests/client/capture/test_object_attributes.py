"""Which attributes are captured, and that they come back."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ckptd.client import values
from ckptd.client.capture.object_attributes import ObjectAttributes, of_modules, of_trainer


class Net(nn.Module):
    """A user's module."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        vars(self).update(attributes)


class Trainer:
    """A user's trainer."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def net(**attributes: Any) -> Any:
    return Net(**attributes)


def trainer(**attributes: Any) -> Any:
    return Trainer(**attributes)


def through_a_snapshot(watched: ObjectAttributes) -> Any:
    return values.unpack(values.pack(watched.state_dict()))


def resumed(model: Any, recorded: Any) -> Any:
    of_modules(model).load_state_dict(recorded)
    return model


def test_what_never_changes_is_not_captured() -> None:
    watched = of_modules(net(calls=0, names=["a"], table={"b": [1, 2]}, half=0.5, tensor=torch.ones(2)))
    assert watched.state_dict() == {}
    assert watched.describe() == ""


def test_numbers_texts_and_histories_come_back() -> None:
    model = net(calls=0, mode="warm", best=None, history=[], counts={})
    watched, listener = of_modules(model), model.history
    model.calls, model.mode, model.best = 7, "cold", float("nan")
    model.history += [0.5, 0.25]
    model.counts["a"] = [1, (2, 3)]
    fresh = net(calls=0, mode="warm", best=None, history=[], counts={})
    held = fresh.history
    resumed(fresh, through_a_snapshot(watched))
    assert (fresh.calls, fresh.mode, repr(fresh.best)) == (7, "cold", "nan")
    assert fresh.history == [0.5, 0.25]
    assert fresh.history is held  # filled, so that others who hold it see it
    assert fresh.counts == {"a": [1, (2, 3)]}
    assert model.history is listener


def test_containers_keep_their_kind() -> None:
    made = {"sums": defaultdict(list), "last": deque(maxlen=2), "seen": set[int]()}
    model, fresh = (net(sums=defaultdict(list), last=deque(maxlen=2), seen=set()) for _ in range(2))
    watched = of_modules(model)
    model.sums["loss"].append(1.5)
    model.last.extend([1, 2, 3])
    model.seen.add(4)
    resumed(fresh, through_a_snapshot(watched))
    for name, kind in made.items():
        assert getattr(fresh, name) == getattr(model, name)
        assert type(getattr(fresh, name)) is type(kind)
    fresh.sums["other"].append(1)  # still makes lists
    fresh.last.append(5)
    assert list(fresh.last) == [3, 5]


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: random.Random(1), lambda g: g.random()),
        (lambda: np.random.default_rng(1), lambda g: g.random()),
        (lambda: torch.Generator().manual_seed(1), lambda g: float(torch.rand(1, generator=g))),
    ],
    ids=["random", "numpy", "torch"],
)
def test_a_generator_that_a_module_keeps_goes_on(make: Any, draw: Any) -> None:
    model, fresh = net(rng=make()), net(rng=make())
    watched = of_modules(model)
    draw(model.rng)
    resumed(fresh, through_a_snapshot(watched))
    assert draw(fresh.rng) == draw(model.rng)


def test_a_small_tensor_that_is_no_buffer_comes_back() -> None:
    model, fresh = net(mean=torch.zeros(3)), net(mean=torch.zeros(3))
    watched, held = of_modules(model), fresh.mean
    model.mean.mul_(0.5).add_(2)
    resumed(fresh, through_a_snapshot(watched))
    assert torch.equal(fresh.mean, model.mean)
    assert fresh.mean is held


def test_an_attribute_that_a_step_makes_first() -> None:
    model, fresh = net(), net()
    watched = of_modules(model)
    model.calls = 1
    resumed(fresh, through_a_snapshot(watched))
    assert fresh.calls == 1


def test_the_names_of_modules_are_those_without_wrappers() -> None:
    model: Any = nn.Sequential(net(calls=0))
    watched = of_modules(torch.nn.DataParallel(model))
    model[0].calls = 3
    assert through_a_snapshot(watched).keys() == {"0"}
    assert watched.captured() == ["0.calls"]


def test_going_back_in_the_same_process() -> None:
    """What had not changed when the snapshot was taken is as at the start."""
    model = net(calls=0, history=[])
    watched = of_modules(model)
    early = through_a_snapshot(watched)
    model.calls = 5
    model.history.append(1)
    watched.state_dict()
    watched.load_state_dict(early)
    assert (model.calls, model.history) == (0, [])


class Layer(nn.Linear):
    """Of a user, on a library's class, which writes attributes, too."""

    calls = 0


def test_attributes_of_libraries_are_theirs() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), Layer(2, 2))
    watched = of_modules(model)
    model[0].in_features = 3
    model[1].in_features = 4  # torch writes it
    model[1].training = False
    model[1].calls = 1
    assert watched.captured() == []
    watched.state_dict()
    assert watched.captured() == ["1.calls"]


def graph(model: Any) -> Tensor:
    found: Tensor = model.inner(torch.ones(2)).sum()
    return found


def objects() -> Iterator[object]:
    while True:
        yield object()


def test_what_each_step_makes_anew_is_left_out_alone() -> None:
    """The last loss of a gate, or an object: no state, and the count beside it is captured."""
    model = net(aux=None, last=None, calls=0)
    watched, made = of_modules(model), objects()
    for step in range(3):
        model.aux, model.last, model.calls = graph(model), next(made), step + 1
        found = watched.state_dict()
    assert found[""].keys() == {"calls"}
    assert [text.split()[0] for text in watched.left_out()] == ["aux", "last"]
    assert "a tensor of a graph" in watched.describe()


def _normalized() -> Any:
    return nn.Sequential(nn.Dropout(0.1), nn.BatchNorm1d(2), nn.LayerNorm(2))


def test_options_of_libraries_that_a_schedule_changes() -> None:
    """A dropout that rises, a momentum of batch norm that falls: a replay differed."""
    model, fresh = (_normalized() for _ in range(2))
    watched, other = of_modules(model), of_modules(fresh)
    assert watched.state_dict() == {}
    model[0].p, model[1].momentum = 0.3, 0.05
    found = watched.state_dict()
    assert {owner: {*names} for owner, names in found.items()} == {"0": {"p"}, "1": {"momentum"}}
    other.load_state_dict(found)
    assert (fresh[0].p, fresh[1].momentum) == (0.3, 0.05)


def test_a_flag_that_is_set_once_is_of_the_process() -> None:
    """``if not self.ready`` guards hooks, files and threads, which a new process lacks. One that changes again is state."""
    model = net(ready=False, warm=False, calls=0)
    watched = of_modules(model)
    for step in range(4):
        model.ready, model.warm, model.calls = True, step % 2 == 0, step + 1
        found = watched.state_dict()
    assert found[""].keys() == {"warm", "calls"}
    assert watched.left_out() == [
        "ready (a flag that was set once, which may tell what this process has done)"
    ]
    assert watched.set_once() == ["ready"]


def test_a_flag_that_changed_in_an_earlier_life_is_state() -> None:
    model, fresh = net(warm=False), net(warm=False)
    watched = of_modules(model)
    for step in range(3):
        model.warm = step % 2 == 0
        found = watched.state_dict()
    assert found == {"": {"warm": ["v", True]}}
    second = of_modules(fresh)
    second.load_state_dict(found)
    assert fresh.warm is True
    assert second.state_dict() == found


def test_a_size_is_not_restored_without_its_cache() -> None:
    model, other = net(size=0, cache=None, calls=0), net(calls=0)
    both = nn.ModuleList([model, other])
    watched = of_modules(both)
    model.size, model.cache, kept = 4, object(), []
    for step in range(4):
        model.calls = other.calls = step + 1
        kept.append(watched.state_dict())
    assert [found.keys() for found in kept] == [{"1"}] * 4
    assert "0.size (beside cache)" in watched.left_out()


def test_a_history_that_grows_too_long_takes_nothing_with_it() -> None:
    model = net(history=[], calls=0)
    watched = of_modules(model)
    model.history.append(0.5)
    model.calls = 1
    assert watched.state_dict()[""].keys() == {"history", "calls"}
    model.history += [0.5] * 100_000
    assert watched.state_dict()[""].keys() == {"calls"}
    assert [text.split()[0] for text in watched.left_out()] == ["history"]


def test_large_contents_that_stay_are_not_read_again() -> None:
    """A vocabulary costs no step."""
    model = net(vocabulary=[str(n) for n in range(300_000)], calls=0)
    watched = of_modules(model)
    model.calls = 1
    assert watched.state_dict()[""].keys() == {"calls"}
    assert watched.left_out() == []


def test_parameters_are_not_captured_twice() -> None:
    model = net(listed=None)
    model.listed = [model.inner.weight]
    watched = of_modules(model)
    with torch.no_grad():
        model.inner.weight.add_(1)
    assert watched.state_dict() == {}


class Broken(random.Random):
    def getstate(self) -> Any:
        raise RuntimeError("not now")


def test_what_cannot_be_read_does_not_end_the_training() -> None:
    model = net(rng=random.Random(1), calls=0)
    watched = of_modules(model)
    model.rng, model.calls = Broken(), 1
    assert watched.state_dict() == {}
    assert "rng (it cannot be read: not now)" in watched.left_out()


def test_addresses_and_times_are_left_out() -> None:
    model = net(pointer=0)
    watched = of_modules(model)
    model.pointer = torch.ones(1).data_ptr()
    assert watched.state_dict() == {}
    assert watched.left_out() == ["pointer (an address or a time)"]


# -- trainers and callbacks ----------------------------------------------------------------------------


def test_an_average_of_the_model_comes_back_in_place() -> None:
    """``.data`` changes no version of a tensor, and the change is noticed all the same."""
    model = nn.Linear(2, 2)
    old, fresh = (trainer(average=nn.Linear(2, 2), model=model) for _ in range(2))
    watched = of_trainer([old], model)
    assert watched.state_dict() == {}
    old.average.weight.data.mul_(0.5)
    held = fresh.average.weight
    of_trainer([fresh], model).load_state_dict(through_a_snapshot(watched))
    assert torch.equal(fresh.average.weight, old.average.weight)
    assert torch.equal(fresh.average.bias, old.average.bias)
    assert fresh.average.weight is held


def test_the_trained_model_is_not_captured_again() -> None:
    model = nn.Linear(2, 2)
    watched = of_trainer([trainer(net=model)], model)
    with torch.no_grad():
        model.weight.add_(1)
    assert watched.state_dict() == {}


def test_a_large_average_is_named_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    average = nn.Linear(2, 2)
    watched = ObjectAttributes({"EMA": trainer(average=average)}, tensors=8, trained=model)
    assert watched.state_dict() == {}
    average.weight.data.mul_(0.5)
    for _ in range(2):
        assert watched.state_dict() == {}
    assert len(caplog.records) == 1
    assert "EMA.average changes while it trains, and no snapshot has it (a Linear of 24 bytes" in caplog.text


def test_another_average_is_refused() -> None:
    model = nn.Linear(2, 2)
    old, fresh = trainer(average=nn.Linear(2, 2)), trainer(average=nn.Linear(3, 2))
    watched = of_trainer([old], model)
    old.average.weight.data.mul_(0.5)
    with pytest.raises(ValueError, match="a module of 2 tensors where this process has a Linear with others"):
        of_trainer([fresh], model).load_state_dict(through_a_snapshot(watched))


def test_two_callbacks_of_one_class() -> None:
    first, second = trainer(calls=0), trainer(calls=0)
    watched = of_trainer([first, second], nn.Linear(1, 1))
    second.calls = 2
    assert through_a_snapshot(watched).keys() == {"Trainer 2"}


def test_tensors_that_several_steps_learn_from() -> None:
    """Views of one batch, as a trainer that generates sequences keeps them; unchanged ones are read once."""
    old, fresh = (trainer(buffered=None, step=0) for _ in range(2))
    model = nn.Linear(1, 1)
    watched = of_trainer([old], model)
    old.buffered = [{"ids": part, "scores": None} for part in torch.arange(6).split(2)]
    first = watched.state_dict()["Trainer"]["buffered"]
    old.step = 1
    assert watched.state_dict()["Trainer"]["buffered"][1] is first[1]
    of_trainer([fresh], model).load_state_dict(through_a_snapshot(watched))
    assert [part["ids"].tolist() for part in fresh.buffered] == [[0, 1], [2, 3], [4, 5]]
    assert fresh.step == 1
