"""What a restart could not set back keeps a process from it, with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckptd.client.data import Batches
from ckptd.client.in_process.restarts import why_not
from ckptd.client.model.live_state import LiveState


class Loader(DataLoader[int]):
    """A loader that keeps its position."""

    def __init__(self) -> None:
        super().__init__([1, 2, 3])  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def asked(
    model: nn.Module | None = None, state: dict[str, Any] | None = None, *batches: Batches, **how: bool
) -> str:
    model = model or nn.Linear(2, 2)
    binding = LiveState(model, [torch.optim.AdamW(model.parameters())], None)
    return why_not(model, binding, state or {}, batches, **{"logs": False, "found_masters": False, **how})


def test_an_ordinary_job_can_restart() -> None:
    assert asked(state={"sched": object(), "data": iter([1])}) == ""


def test_iterators_that_the_script_holds_cannot_be_set_back() -> None:
    loader = Loader()
    assert asked(state={"loader": loader}).startswith("state['loader'] is iterated by the script")
    batches = Batches(loader, None)
    assert asked(None, {"loader": loader}, batches) == ""
    assert asked(None, {"loader": Loader()}, batches) != ""


def test_a_log_of_boundaries_belongs_to_one_life() -> None:
    assert asked(logs=True) == "boundaries of stages are logged"


@pytest.mark.parametrize("name", ["FSDPModule", "FullyShardedDataParallel"])
def test_shards_hold_groups_that_end(name: str) -> None:
    sharded = type("Sharded", (type(name, (nn.Linear,), {}),), {})
    assert "spread over ranks" in asked(nn.Sequential(sharded(2, 2)))


def test_distributed_tensors_hold_groups_that_end() -> None:
    model = nn.Linear(2, 2)
    vars(model.weight)["to_local"] = lambda: model.weight  # as of a DTensor
    assert "spread over ranks" in asked(model)


def test_masters_that_were_found_would_not_be_found_again() -> None:
    assert asked(found_masters=True).startswith("master weights were found by their values; pass layout=")
