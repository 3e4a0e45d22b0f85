"""Without a worker the others train on with the very bits of an undisturbed job: real processes over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.pipeline.rerouted_stage import ReroutedStage, micro_batch_seed
from ckptd.core.reroute.reroute_plan import ReroutePlan, plan_reroute
from tests.ckptd.core.reroute.grids import grid
from tests.client.pipeline.reroute_ranks import ROWS, WIDTH, Life, Part, loss_of, played
from tests.client.rerouting.undisturbed import assert_equal
from tests.long import long_since


def _same_bits(life: Life, folder: Path) -> None:
    """Parameters, optimizer's state, generators and losses, worker by worker."""
    undisturbed, found = played(life, folder)
    assert len(undisturbed) == life.pipelines * life.stages
    assert len(found) == life.pipelines * life.stages - len(life.failed)
    for worker, state in found.items():
        wanted = undisturbed[worker]
        for key in ("model", "optimizer", "draw"):
            assert_equal(state[key], wanted[key], f"{worker} {key}")
    for iteration in range(life.iterations):
        losses = [_of_all(each, iteration) for each in (found, undisturbed)]
        if iteration < life.hole:
            losses[1] = {k: v for k, v in losses[1].items() if (k[0], life.stages - 1) not in life.failed}
        assert losses[0] == losses[1], iteration
        assert losses[0]


def _of_all(states: dict[Any, Any], iteration: int) -> dict[tuple[int, int], float]:
    return {k: v for state in states.values() for k, v in state["losses"][iteration].items()}


@pytest.mark.slow
def test_two_pipelines_go_on_without_a_worker(tmp_path: Path) -> None:
    _same_bits(Life(2, 2, failed=((0, 1),)), tmp_path)


@pytest.mark.slow
@long_since("one grid stands for all")
@pytest.mark.parametrize(
    "life",
    [
        Life(2, 3, failed=((0, 1),)),
        Life(2, 3, failed=((1, 0),)),
        Life(2, 3, failed=((0, 0), (1, 2)), micro_batches=5),
        Life(3, 2, failed=((1, 1),)),
        Life(3, 2, failed=((0, 0), (2, 1)), schedule="gpipe"),
        Life(3, 2, failed=((0, 0), (2, 0)), micro_batches=2),
        Life(3, 2, failed=((1, 0),), plan="drop"),
        Life(2, 1, failed=((1, 0),)),
        Life(2, 2, failed=((0, 0),), hole=0),
    ],
    ids=str,
)
def test_every_grid_has_the_bits_of_an_undisturbed_job(tmp_path: Path, life: Life) -> None:
    _same_bits(life, tmp_path)


@pytest.mark.slow
@long_since("the short tests check what is refused")
def test_one_sum_is_near_but_has_other_bits(tmp_path: Path) -> None:
    undisturbed, found = played(Life(3, 2, failed=((1, 1),), exact=False), tmp_path)
    same = []
    for worker, state in found.items():
        for name, value in state["model"].items():
            torch.testing.assert_close(value, undisturbed[worker]["model"][name])
            same.append(torch.equal(value, undisturbed[worker]["model"][name]))
    assert not all(same)


# -- what is refused: one worker, in this process --------------------------------------------------------


def _one(part: nn.Module | None = None, **more: Any) -> ReroutedStage:
    rows = torch.zeros(ROWS, WIDTH)
    shapes: Any = {"input_args": rows, "output_args": rows.clone().requires_grad_()}
    stage = PipelineStage(part or nn.Linear(WIDTH, WIDTH), 0, 1, torch.device("cpu"), **shapes)
    return ReroutedStage(stage, [[0]], loss_of, **more)


def _run(runner: ReroutedStage, plan: ReroutePlan) -> dict[tuple[int, int], torch.Tensor]:
    data = torch.ones(ROWS, WIDTH)
    return runner.run(plan, lambda d, m: (data,), lambda d, m: data)


@pytest.mark.usefixtures("alone")
def test_a_grid_of_one_worker() -> None:
    """Gradients are the mean, losses one for each micro-batch, and generators are left as they were."""
    runner = _one(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))
    draw = torch.get_rng_state()
    losses = _run(runner, plan_reroute(grid(1, 1, 3)))
    assert torch.equal(draw, torch.get_rng_state())
    assert sorted(losses) == [(0, 0), (0, 1), (0, 2)]
    assert len({float(loss) for loss in losses.values()}) == 3  # each draws another dropout
    weight = runner.stage.submod[0].weight
    first = weight.grad.clone()
    weight.grad = None
    runner.stage.submod[0].bias.grad = None
    assert _run(runner, plan_reroute(grid(1, 1, 3))).keys() == losses.keys()
    assert torch.equal(weight.grad, first)


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_run_is_refused() -> None:
    runner = _one()
    with pytest.raises(ValueError, match="a plan for 2 x 1 workers, here are 1 x 1"):
        _run(runner, plan_reroute(grid(2, 1, 2)))
    with pytest.raises(ValueError, match="recovered from snapshots"):
        _run(runner, plan_reroute(grid(1, 1, 2, (0, 0))))
    _run(runner, plan_reroute(grid(1, 1, 2)))
    with pytest.raises(ValueError, match=r"call optimizer.zero_grad\(\) first"):
        _run(runner, plan_reroute(grid(1, 1, 2)))
    counting = Part(0, counts=True)
    with pytest.raises(ValueError, match="stage 0 writes to its buffer 'calls'"):
        _run(_one(counting), plan_reroute(grid(1, 1, 2)))
    assert _run(_one(Part(0, counts=True), exact=False), plan_reroute(grid(1, 1, 2)))


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_rerouted_is_refused() -> None:
    def stage(part: nn.Module, **more: Any) -> PipelineStage:
        return PipelineStage(part, 0, 1, torch.device("cpu"), **more)

    rows: Any = {"input_args": torch.zeros(1, 2), "output_args": torch.zeros(1, 2)}
    with pytest.raises(ValueError, match="what it sends is not known"):
        ReroutedStage(stage(nn.Linear(2, 2)), [[0]], loss_of)
    with pytest.raises(ValueError, match="wrapped for data parallelism"):
        ReroutedStage(stage(DistributedDataParallel(nn.Linear(2, 2)), **rows), [[0]], loss_of)
    with pytest.raises(ValueError, match="dw_builder"):
        ReroutedStage(stage(nn.Linear(2, 2), dw_builder=lambda: lambda: None, **rows), [[0]], loss_of)
    with pytest.raises(ValueError, match="no PipelineStage"):
        ReroutedStage(object(), [[0]], loss_of)
    with pytest.raises(ValueError, match=r"pipelines of \[1, 2\] stages"):
        ReroutedStage(stage(nn.Linear(2, 2), **rows), [[0], [1, 2]], loss_of)
    with pytest.raises(ValueError, match="in the grid twice"):
        ReroutedStage(stage(nn.Linear(2, 2), **rows), [[0], [0]], loss_of)
    with pytest.raises(ValueError, match="rank 0 has stage 0, but is at"):
        ReroutedStage(stage(nn.Linear(2, 2), **rows), [[1]], loss_of)
    with pytest.raises(ValueError, match="needs loss_fn"):
        ReroutedStage(stage(nn.Linear(2, 2), **rows), [[0]])


def test_seeds_differ_in_each_part_of_the_key() -> None:
    keys = [(0, 1, 2, 3, 4), (1, 1, 2, 3, 4), (0, 0, 2, 3, 4), (0, 1, 3, 2, 4), (0, 1, 2, 4, 3)]
    assert len({micro_batch_seed(*key) for key in keys}) == len(keys)
