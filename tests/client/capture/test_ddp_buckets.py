"""The layout in which DistributedDataParallel reduces gradients is learnt, and given to a new
process's wrapper.

That it decides about bits with three ranks is shown end to end (``tests/e2e/test_parallel_ddp.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.capture.ddp_buckets import Buckets, Layout, hook_states
from ckptd.client.ranks.collectives import Collectives
from tests.client.gloo_ranks import run_in_ranks

pytestmark = pytest.mark.usefixtures("alone")


class Crossed(nn.Module):
    """Uses its layers in another order than it has them: rebuilt buckets differ from the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in (2, 0, 3, 1):
            x = self.layers[i](x)
        return x


def make(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Crossed(), bucket_cap_mb=0.002, **options)


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1, 16)).sum().backward()


def in_use(wrapper: DistributedDataParallel) -> Layout:
    """The buckets of the reducer, asked of itself."""
    index = {id(p): i for i, p in enumerate(wrapper.parameters())}
    buckets = wrapper.reducer._get_zeros_like_grad_buckets()
    return [[index[id(p)] for p in bucket.parameters()] for bucket in buckets]


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}])
def test_a_new_wrapper_gets_the_buckets_of_the_old_one(options: dict[str, Any]) -> None:
    old = make(**options)
    recorded = Buckets(old)
    assert recorded.layouts() == {}
    train(old, 4)
    layouts = dict(recorded.layouts())
    assert layouts == {"": in_use(old)}
    new = make(**options)
    assert in_use(new) != in_use(old)
    buckets = Buckets(new)
    buckets.put_back(layouts, Collectives.alone())
    assert in_use(new) == in_use(old)
    assert buckets.layouts() == layouts
    assert all(p.grad is None for p in new.parameters())
    train(new, 4)  # it goes on as if it had trained before
    assert in_use(new) == in_use(old)


def test_without_rebuilding_there_is_nothing_to_record() -> None:
    wrapper = make(find_unused_parameters=True)
    buckets = Buckets(wrapper)
    train(wrapper, 4)
    assert buckets.layouts() == {}


def test_gradients_that_wait_are_kept() -> None:
    wrapper = make()
    first = next(iter(wrapper.parameters()))
    first.grad = torch.full_like(first, 3.0)
    Buckets(wrapper).put_back({"": [[7, 6, 5], [4, 3, 2, 1, 0]]}, Collectives.alone())
    assert first.grad is not None
    assert torch.equal(first.grad, torch.full_like(first, 3.0))


def test_another_number_of_parameters_is_told(caplog: pytest.LogCaptureFixture) -> None:
    wrapper = make()
    before = in_use(wrapper)
    with caplog.at_level(logging.WARNING):
        Buckets(wrapper).put_back({"": [[1, 0]]}, Collectives.alone())
    assert "2 parameters were reduced, 8 are now" in caplog.text
    assert in_use(wrapper) == before


def test_buckets_that_could_not_be_put_back_are_not_told_as_those_in_use() -> None:
    """They were, so every later snapshot held them, and every later resume warned of them anew."""
    wrapper = make()
    buckets = Buckets(wrapper)
    buckets.put_back({"": [[1, 0]]}, Collectives.alone())
    assert buckets.layouts() == {}
    train(wrapper, 4)
    assert buckets.layouts() == {"": in_use(wrapper)}


def test_a_rank_that_knows_no_layout_leaves_all_as_they_are() -> None:
    wrapper = make()
    before = in_use(wrapper)
    Buckets(wrapper).put_back({"": [[7, 6, 5], [4, 3, 2, 1, 0]]}, Collectives(lambda said: [b"\x80"]))
    assert in_use(wrapper) == before


def test_a_hook_with_state_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """If it is in no snapshot, because none can hold it."""
    wrapper = make()
    state = powerSGD_hook.PowerSGDState(None)
    wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    assert hook_states(wrapper) == {"ckptd.hook/": state}
    with caplog.at_level(logging.WARNING):
        Buckets(wrapper, [state])
        assert caplog.text == ""
        Buckets(wrapper)
    assert "powerSGD_hook keeps a PowerSGDState" in caplog.text


# Another order than a new wrapper's and than that of its backward pass.
SHUFFLED = [[6, 1, 7], [0, 3], [2, 5, 4]]


def on_the_gradient(parameter: nn.Parameter, told: Callable[[Any], None]) -> None:
    parameter.register_hook(told)


def after_the_gradient(parameter: nn.Parameter, told: Callable[[Any], None]) -> None:
    parameter.register_post_accumulate_grad_hook(told)


@pytest.mark.parametrize("install", [on_the_gradient, after_the_gradient])
def test_hooks_on_parameters_hear_nothing(install: Callable[..., None]) -> None:
    """They heard of a backward pass with zero gradients: one that steps an optimizer changed the
    weights just loaded.
    """
    wrapper = make()
    heard: list[Tensor] = []
    install(next(wrapper.parameters()), heard.append)
    Buckets(wrapper).put_back({"": SHUFFLED}, Collectives.alone())
    assert not heard
    assert in_use(wrapper) == SHUFFLED
    train(wrapper, 1)
    assert len(heard) == 1


def test_a_communication_hook_hears_nothing_and_is_kept() -> None:
    """PowerSGD's iteration counter went on by one, after the user's ``state=`` had been loaded."""
    wrapper = make()
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=1000)
    wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    state.iter = 500
    buckets = Buckets(wrapper)
    buckets.put_back({"": SHUFFLED}, Collectives.alone())
    assert state.iter == 500
    assert in_use(wrapper) == SHUFFLED
    train(wrapper, 1)
    assert state.iter == 501
    # From its second iteration on it reduces by the order in which gradients became ready, and that
    # is what is told then.
    train(wrapper, 3)
    assert buckets.layouts() == {"": in_use(wrapper)}


def test_a_static_graph_with_a_communication_hook_is_left_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its first iteration would tell the hook another bucket's index than the run so far did;
    PowerSGD counts by that.
    """
    wrapper = make(static_graph=True)
    wrapper.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=1000), powerSGD_hook.powerSGD_hook
    )
    before = in_use(wrapper)
    Buckets(wrapper).put_back({"": SHUFFLED}, Collectives.alone())
    assert "a static graph with a communication hook" in caplog.text
    assert in_use(wrapper) == before


def test_a_backward_pass_that_fails_leaves_gradients_and_a_wrapper_that_trains() -> None:
    """Hooks on autograd's own nodes cannot be found. One raised: gradients were lost, and every
    later backward pass failed.
    """
    wrapper = make()
    first = next(iter(wrapper.parameters()))
    first.grad = torch.full_like(first, 3.0)
    view: Any = first.view_as(first)
    node = view.grad_fn.next_functions[0][0]

    def stop(*_: Any) -> None:
        raise ValueError("not now")

    handle = node.register_prehook(stop)
    Buckets(wrapper).put_back({"": SHUFFLED}, Collectives.alone())
    handle.remove()
    assert torch.equal(first.grad, torch.full_like(first, 3.0))
    assert in_use(wrapper) == SHUFFLED
    train(wrapper, 4)


@pytest.mark.parametrize("owner", [dist, DistributedDataParallel])
def test_a_torch_without_the_internals_is_told(
    owner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is begun that could not be ended."""
    wrapper = make()
    before = in_use(wrapper)
    names = ("_register_comm_hook", "_ddp_init_helper")
    for name in names:
        monkeypatch.delattr(owner, name, raising=False)
    Buckets(wrapper).put_back({"": SHUFFLED}, Collectives.alone())
    assert "this version of torch has no _" in caplog.text
    assert in_use(wrapper) == before


def test_a_new_reducer_that_fails_on_a_rank_is_kept_on_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrapper = make()
    next(wrapper.parameters()).register_hook(lambda gradient: gradient)
    before = in_use(wrapper)
    said: list[bytes] = []

    def exchange(mine: bytes) -> list[bytes]:
        said.append(mine)
        failed = {"": "MemoryError: no more"}
        return [msgspec.msgpack.encode(failed) if len(said) == 2 else mine]

    buckets = Buckets(wrapper)
    buckets.put_back({"": SHUFFLED}, Collectives(exchange))
    assert "MemoryError: no more" in caplog.text
    assert in_use(wrapper) == before
    assert buckets.layouts() == {}
    train(wrapper, 4)


def hooked_on_one_rank(rank: int) -> None:
    """Ends without destroying the group: where the wrapper holds it last, torch waits for the
    group's threads with the interpreter's lock held, which these may be waiting for (it hung every
    few runs, forked or spawned).
    """
    wrapper = make()
    heard: list[Tensor] = []
    if rank == 1:
        next(wrapper.parameters()).register_hook(heard.append)

    Buckets(wrapper).put_back({"": SHUFFLED}, Collectives.of_group(dist.group.WORLD))
    assert not heard
    assert in_use(wrapper) == SHUFFLED
    train(wrapper, 4)


def test_all_ranks_do_as_the_one_with_a_hook(tmp_path: Path) -> None:
    """Each would communicate otherwise than the other, and wait for it."""
    folder = tmp_path / "two"
    folder.mkdir()
    run_in_ranks(hooked_on_one_rank, 2, folder)


def test_a_wrapper_by_another_path_goes_on_broadcasting(caplog: pytest.LogCaptureFixture) -> None:
    """``torch.compile`` around it puts ``_orig_mod`` before its path: its broadcast was turned off
    on that ground.
    """
    model = nn.ModuleDict({"_orig_mod": make()})
    wrapper: Any = model["_orig_mod"]
    before = in_use(wrapper)
    buckets = Buckets(model)
    buckets.put_back({"": SHUFFLED}, Collectives.alone())
    assert "does not know the wrapper '_orig_mod'" in caplog.text
    assert in_use(wrapper) == before
    caplog.clear()
    buckets.send_next([""])
    assert wrapper.require_forward_param_sync
    assert "does not know the DistributedDataParallel wrapper '_orig_mod'" in caplog.text


def test_a_wrapper_that_was_added_goes_on_broadcasting() -> None:
    model = nn.ModuleDict({"old": make(), "new": make()})
    wrappers: Any = model
    buckets = Buckets(model)
    buckets.put_back({"old": SHUFFLED}, Collectives.alone())
    buckets.send_next([])
    assert not wrappers["old"].require_forward_param_sync
    assert wrappers["new"].require_forward_param_sync


def test_only_wrappers_that_broadcast_before_do() -> None:
    model = nn.ModuleDict({"quiet": make(), "sends": make()})
    buckets = Buckets(model)
    buckets.send_next(["sends"])
    assert buckets.senders() == ["sends"]
