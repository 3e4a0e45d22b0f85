"""The layout in which DistributedDataParallel reduces gradients is learnt, and given to a new process's wrapper.

That it decides about bits with three ranks is shown end to end (``tests/e2e/test_parallel_ddp.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.buckets import Buckets, Layout


class Crossed(nn.Module):
    """Uses its layers in another order than it has them: rebuilt buckets differ from the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in (2, 0, 3, 1):
            x = self.layers[i](x)
        return x


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Crossed(), bucket_cap_mb=0.002, **options)


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1, 16)).sum().backward()


def meet(said: bytes) -> list[bytes]:
    return [said]


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
    buckets.put_back(layouts, meet)
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
    Buckets(wrapper).put_back({"": [[7, 6, 5], [4, 3, 2, 1, 0]]}, meet)
    assert first.grad is not None
    assert torch.equal(first.grad, torch.full_like(first, 3.0))


def test_another_number_of_parameters_is_told(caplog: pytest.LogCaptureFixture) -> None:
    wrapper = make()
    before = in_use(wrapper)
    with caplog.at_level(logging.WARNING):
        Buckets(wrapper).put_back({"": [[1, 0]]}, meet)
    assert "2 parameters were reduced, 8 are now" in caplog.text
    assert in_use(wrapper) == before


def test_a_rank_that_knows_no_layout_leaves_all_as_they_are() -> None:
    wrapper = make()
    before = in_use(wrapper)
    Buckets(wrapper).put_back({"": [[7, 6, 5], [4, 3, 2, 1, 0]]}, lambda said: [b"\x80"])
    assert in_use(wrapper) == before


def test_a_hook_with_state_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Error feedback and the like are in no snapshot unless they are in ``state=``."""
    wrapper = make()

    wrapper.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    with caplog.at_level(logging.WARNING):
        Buckets(wrapper)
    assert "powerSGD_hook keeps a PowerSGDState" in caplog.text
