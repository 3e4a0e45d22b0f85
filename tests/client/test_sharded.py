"""DTensors: which rows of a fused expert tensor are here, how parameters are placed, and what
cannot be captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.operators import ParameterRows, discover_operators
from ckptd.client.training_state import check_sharded, placement_lines

EXPERTS = 4


def imagined(rank: int) -> Iterator[None]:
    """A process group whose other ranks are imagined."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    yield
    dist.destroy_process_group()


@pytest.fixture
def second_of_three() -> Iterator[None]:
    yield from imagined(1)


@pytest.fixture
def last_of_three() -> Iterator[None]:
    yield from imagined(2)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.zeros(EXPERTS, 2, 3))
        self.down = nn.Parameter(torch.zeros(EXPERTS, 3, 2))
        self.few = nn.Parameter(torch.zeros(2, 2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.norm = nn.LayerNorm(2)


def shard(module: nn.Module, name: str, dim: int) -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    whole = module.get_parameter(name)
    parts = whole.detach().chunk(3, dim)
    mine = parts[dist.get_rank()] if dist.get_rank() < len(parts) else whole.detach()[:0]
    made = DTensor.from_local(
        mine, mesh, [Shard(dim)], shape=whole.shape, stride=whole.stride(), run_check=False
    )
    module.register_parameter(name, nn.Parameter(made))


@pytest.mark.usefixtures("second_of_three")
def test_experts_are_the_rows_of_the_local_shard() -> None:
    """Four experts on three ranks are cut 2, 2, 0; the second rank's rows 0 and 1 are experts 2 and 3.

    They were once taken for rows 0 to 3 of the shard: what lies behind it was copied, and
    overwritten at the restore.
    """
    net = Net()
    for name in ("up", "down"):
        shard(net.experts, name, 0)
    operators = discover_operators(net, rows_allowed=lambda name: True)
    experts = {op.name: op.members for op in operators if op.expert is not None}
    assert experts == {
        f"experts.{index}": (
            ParameterRows("experts.up", index - 2, index - 1),
            ParameterRows("experts.down", index - 2, index - 1),
        )
        for index in (2, 3)
    }


@pytest.mark.usefixtures("last_of_three")
def test_an_empty_shard_is_a_whole_operator() -> None:
    net = Net()
    for name in ("up", "down"):
        shard(net.experts, name, 0)
    assert local(net.experts.up).shape == (0, 2, 3)
    operators = discover_operators(net, rows_allowed=lambda name: True)
    names = ["experts.up", "experts.down"]
    assert [op.members for op in operators if op.name in names] == [(ParameterRows(n),) for n in names]


@pytest.mark.usefixtures("second_of_three")
def test_sharded_along_another_dimension_every_rank_has_rows_of_all_experts() -> None:
    net = Net()
    shard(net.experts, "up", 1)
    operators = discover_operators(net, rows_allowed=lambda name: True)
    assert [op.expert for op in operators if op.expert] == [("experts", i) for i in range(EXPERTS)]


@pytest.mark.usefixtures("second_of_three")
def test_placements_are_told_as_wrappers_tell_them() -> None:
    net = Net()
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    shard(net.experts, "up", 0)
    copied = DTensor.from_local(torch.zeros(2), mesh, [Replicate()], run_check=False)
    net.norm.weight = nn.Parameter(copied)
    binding = LiveState(net, [torch.optim.AdamW(net.parameters())], None)
    lines = placement_lines(binding)
    assert "parameters sharded along 0 over 3 ranks (dp): 1 (experts.up)" in lines
    assert "parameters replicated over 3 ranks (dp): 1 (norm.weight)" in lines
    assert "parameters without a wrapper: each rank keeps its own: 3 (experts.down)" in lines


@pytest.mark.usefixtures("second_of_three")
def test_what_only_all_ranks_can_update_is_in_every_snapshot() -> None:
    """Muon multiplies sharded matrices. With one rank's shard frozen and another's not, ranks once
    waited for each other.
    """
    net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    shard(net[0], "weight", 0)
    optimizer = torch.optim.Muon(net.parameters(), lr=0.1)
    assert LiveState(net, [optimizer], None).inseparable == {"0.weight"}
    assert LiveState(net, [torch.optim.AdamW(net.parameters())], None).inseparable == frozenset()


@pytest.mark.usefixtures("second_of_three")
def test_parameters_that_are_gathered_are_refused() -> None:
    """After a forward without backward FSDP2's root is still gathered: the model's parameters are
    not what the optimizer has.
    """
    net: Any = nn.Linear(6, 6)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters())
    check_sharded(LiveState(net, [optimizer], None))
    net.unshard()
    with pytest.raises(
        ValueError, match=r"2 shards that the optimizer updates are not in the model.*reshard\(\)"
    ):
        check_sharded(LiveState(net, [optimizer], None))
    net.reshard()
    check_sharded(LiveState(net, [optimizer], None))
    assert local(net.weight).shape == (2, 6)
