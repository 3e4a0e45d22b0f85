"""``ZeroRedundancyOptimizer``: whose state is where, and what a snapshot must hold of what another
rank updates.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import Operator, ParameterRows
from ckptd.client.model.snapshot_layout import CapturedOperators, StateTable, build_phase
from ckptd.client.training_state import placement_lines
from ckptd.core.snapshot_policy import OperatorKind

with warnings.catch_warnings():
    # torch builds the functional optimizers in this package with its own deprecated torch.jit.script.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


@pytest.fixture
def rank() -> Iterator[int]:
    """Rank 0 of two; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield 0
    dist.destroy_process_group()


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def zero(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, **options)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()


@pytest.mark.usefixtures("rank")
class TestBinding:
    def test_what_another_rank_updates_is_elsewhere_and_has_no_state_here(self) -> None:
        """The wrapper's own ``state`` is empty: snapshots held no optimizer state at all, and nobody noticed."""
        model = model_of()
        optimizer = zero(model)
        binding = LiveState(model, [optimizer], None)
        stepped(model, optimizer)
        kept = binding.owner.keys() - binding.elsewhere
        assert len(kept) == len(binding.elsewhere) == 2
        assert all(binding.state(n).keys() == {"step", "exp_avg", "exp_avg_sq"} for n in kept)
        assert all(not binding.state(n) for n in binding.elsewhere)
        assert all(binding.specs(n) for n in kept)
        assert all(not binding.specs(n) for n in binding.elsewhere)

    def test_probing_does_not_step_the_users_optimizer(self) -> None:
        """A clone of the wrapper shared its part, and stepped it."""
        model = model_of()
        optimizer = zero(model)
        model(torch.ones(2, 6)).sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        assert LiveState(model, [optimizer], None).dependent() == []
        assert all(map(torch.equal, before, model.parameters()))
        assert not optimizer.optim.state

    def test_every_parameter_has_the_probe_of_the_inner_optimizer(self) -> None:
        """All ranks must find the same operators: rows may be apart where AdamW updates, here or elsewhere."""
        model = model_of()
        binding = LiveState(model, [zero(model)], None)
        assert all(binding.rows_allowed(n) for n in binding.params)

    def test_a_plain_optimizer_has_nothing_elsewhere(self) -> None:
        model = model_of()
        binding = LiveState(model, [torch.optim.AdamW(model.parameters())], None)
        assert binding.elsewhere == frozenset()
        assert binding.keepers == binding.optimizers

    def test_describe_tells_what_is_elsewhere(self) -> None:
        model = model_of()
        binding = LiveState(model, [zero(model)], None)
        (line,) = [told for told in placement_lines(binding) if "another rank" in told]
        assert line.endswith(f"2 ({min(binding.elsewhere)})")

    def test_updates_within_the_backward_are_refused(self) -> None:
        model = model_of()
        with pytest.raises(ValueError, match="overlap_with_ddp=False and call step"):
            LiveState(model, [zero(model, overlap_with_ddp=True)], None)


@pytest.mark.usefixtures("rank")
def test_every_snapshot_holds_all_of_what_another_rank_updates() -> None:
    """Also one that neither anchors it nor, in an aligned window, would hold its weights; and in
    its own dtype.
    """
    model = model_of()
    binding = LiveState(model, [zero(model)], None)
    operators = [Operator(n, OperatorKind.DENSE, (ParameterRows(n),)) for n in binding.params]
    plan = build_phase(
        binding,
        operators,
        CapturedOperators(anchored=[]),
        state=StateTable.of(binding),
        phase=0,
        compute_dtypes=dict.fromkeys(binding.params, torch.bfloat16),
        identity={},
        scalars_capacity=64,
    )
    held = {s.name: s.dtype for s in plan.sources if s is not None and s.kind == "param"}
    assert held == dict.fromkeys(sorted(binding.elsewhere), torch.float32)
