"""What a step makes, replaces or renames in a model is named once, and nothing else."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from ckptd.client.model.live_state import LiveState
from ckptd.client.model.module_tree import ModuleTree


class Job:
    def __init__(self, keep: contextlib.ExitStack) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(self.model.parameters())
        self.tree = ModuleTree(LiveState(self.model, [optimizer], None))
        self.tree.watch(keep)


@pytest.fixture
def job() -> Iterator[Job]:
    with contextlib.ExitStack() as keep:
        yield Job(keep)


CHANGES: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "pruning": (lambda m: prune.l1_unstructured(m[0], "weight", 0.5), "parameter 0.weight: a step has"),
    "parametrization": (lambda m: parametrizations.weight_norm(m[2]), "parameter 2.weight: a step has"),
    "parameter": (lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(2))), "parameter 0.bias: a step"),
    "head": (lambda m: setattr(m, "2", nn.Linear(2, 2)), "parameter 2.weight: a step has replaced or"),
    "activation": (lambda m: setattr(m, "1", nn.GELU()), "module 1 (GELU): a step has replaced it"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_ends_snapshots(job: Job, name: str) -> None:
    change, text = CHANGES[name]
    assert job.tree.top() is None
    change(job.model)
    found = job.tree.top()
    assert found is not None
    assert found.text.startswith(f"NOT RECOVERABLE: {text}")
    assert found.ends
    assert job.tree.top() is None


def test_a_module_that_a_forward_makes_is_told_only(job: Job) -> None:
    job.model.append(nn.Tanh())
    found = job.tree.top()
    assert found is not None
    assert "module 3 (Tanh): a step has added it" in found.text
    assert not found.ends


def test_what_is_undone_in_the_step_is_no_change(job: Job) -> None:
    """And what happens to other models."""
    kept = job.model[0].weight
    job.model[0].weight = nn.Parameter(torch.zeros(2, 2))
    job.model[0].weight = kept
    prune.identity(copy.deepcopy(job.model)[0], "weight")
    assert job.tree.top() is None
