"""What is recorded goes by the names of the model inside its wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import discover_operators
from ckptd.client.model.parameter_names import (
    is_compiled,
    named_buffers,
    named_modules,
    named_parameters,
    names_with_wrappers,
)
from ckptd.client.schedule.export_facts import export_facts


class Net(nn.Module):
    """Has a part of its own that is called ``module``, a buffer, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)])
        self.head = nn.Linear(2, 2)
        self.head.weight = self.module.weight


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped() -> nn.Module:
    net = Net()
    net.layers[0] = checkpoint_wrapper(net.layers[0])
    net.layers[1] = torch.compile(net.layers[1], backend="eager")  # type: ignore[assignment]
    return DistributedDataParallel(net)


@pytest.mark.parametrize("remove_duplicate", [True, False])
def test_a_bare_model_has_the_names_that_torch_gives(remove_duplicate: bool) -> None:
    net = Net()
    for ours, theirs in (
        (named_parameters, net.named_parameters),
        (named_buffers, net.named_buffers),
    ):
        found = list(ours(net, remove_duplicate=remove_duplicate))
        assert [n for n, _ in found] == [n for n, _ in theirs(remove_duplicate=remove_duplicate)]
    assert [n for n, _ in named_modules(net)] == [n for n, _ in net.named_modules()]


@pytest.mark.usefixtures("alone")
def test_wrappers_leave_no_trace_in_names() -> None:
    """Data parallelism around all, recomputation around one layer, compiling around another; a part
    named ``module`` stays.
    """
    model, bare = wrapped(), Net()
    assert "module.layers.0._checkpoint_wrapped_module.weight" in dict(model.named_parameters())
    assert [n for n, _ in named_parameters(model)] == [n for n, _ in bare.named_parameters()]
    assert [n for n, _ in named_buffers(model)] == [n for n, _ in bare.named_buffers()]
    assert [n for n, _ in named_modules(model)] == [n for n, _ in bare.named_modules()]
    plain = names_with_wrappers(model)
    assert plain["module.layers.1._orig_mod.bias"] == "layers.1.bias"
    operators = discover_operators(model, rows_allowed=lambda name: True)
    assert {m.param for op in operators for m in op.members} == set(plain.values())


@pytest.mark.usefixtures("alone")
def test_a_binding_finds_live_tensors_by_plain_names() -> None:
    model = wrapped()
    masters = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("head.bias")}
    rest = [p for n, p in model.named_parameters() if not n.endswith("head.bias")]
    binding = LiveState(model, [torch.optim.SGD([*rest, *masters.values()], lr=0.1)], masters)
    assert list(binding.masters) == ["head.bias"]  # given as `module.head.bias`
    places, leaf = binding.buffer_places()["layers.1.running_mean"]
    assert places[leaf] is binding.buffers()["layers.1.running_mean"]
    assert export_facts(binding)["aliases"] == {"head.weight": "module.weight"}


def test_compiling_around_all_is_told_from_compiling_a_part() -> None:
    assert is_compiled(torch.compile(Net(), backend="eager"))  # type: ignore[arg-type]
    part = Net()
    part.head = torch.compile(part.head, backend="eager")  # type: ignore[assignment]
    assert not is_compiled(part)
