"""Elastic jobs whose experts have their optimizer on shards: every element of every shard comes to
the rank that owns it in the next world.

As `test_elastic`: real processes over gloo, a daemon for each node, SIGKILL; a lost node loses its
memory. What nobody disturbed is one rank with an optimizer on each replica: both strategies train
alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.ckptd.nodes import Net, Node
from tests.e2e.elastic import ElasticRun, Life, same, undisturbed_life
from tests.e2e.elastic_job import EXPERTS
from tests.e2e.test_elastic import (
    GROW_AT,
    KILL_AT,
    TOTAL,
    assert_goes_on,
    assert_losses_as_of,
    damaged,
    places_anew,
)
from tests.long import long

pytestmark = pytest.mark.slow


@pytest.fixture
def net() -> Iterator[Net]:
    with Net(3, replicas="1").up() as up:
        yield up


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ElasticRun]:
    with contextlib.closing(ElasticRun(tmp_path, sharded=True)) as made:
        yield made


@pytest.fixture
def undisturbed(tmp_path: Path) -> Iterator[Life]:
    with undisturbed_life(tmp_path / "undisturbed", TOTAL) as life:
        yield life


def loses_a_node(
    run: ElasticRun, net: Net, *, keep: Sequence[int] = (KILL_AT,), **more: object
) -> tuple[Life, list[Node]]:
    """Three ranks, of which the second dies with its node in step ``KILL_AT``: a third of every
    expert's state goes with it.
    """
    life = run.life(
        net.nodes,
        {1: {"die_at": KILL_AT}},
        total=TOTAL,
        patient_until=KILL_AT,
        keep=frozenset(keep),
        **more,
    )
    assert life.torn_down() == 1
    net[1].lose()
    return life, [net[0], net[2]]


def test_a_lost_ranks_shards_come_from_its_snapshot(net: Net, run: ElasticRun, undisturbed: Life) -> None:
    """Three, two: of each expert a third of the state is nowhere but in a replica of the lost
    rank's snapshot.
    """
    first, left = loses_a_node(run, net, place_every=4)
    second = run.life(left, total=KILL_AT + 5, place_every=4)
    second.ends()
    assert_goes_on(first, second, KILL_AT)
    assert_all_is_there(first, KILL_AT)
    reason = second.events("world")[0]["reason"]
    assert "the shards of 2 of 3 ranks are parked" in reason, run.logs
    assert_losses_as_of(undisturbed, run)


def assert_all_is_there(life: Life, step: int) -> None:
    """What was compared are all parameters of all experts, with their moments."""
    names = life.whole(step).keys()
    for layer in ("blocks.0.moe", "blocks.1.moe"):
        for expert in range(EXPERTS):
            for param in ("inner.weight", "outer.weight", "outer.bias"):
                shard = f"shards of shards.{layer}.{expert}.{param}"
                wanted = {shard, f"{shard}/exp_avg", f"{shard}/exp_avg_sq", f"{shard}/step"}
                assert wanted <= names
                assert f"{layer}.experts.{expert}.{param}" in names


@long
def test_three_two_three(net: Net, run: ElasticRun, undisturbed: Life) -> None:
    """The node that comes holds nothing, and owns a third of every expert."""
    first, left = loses_a_node(run, net, place_every=3)
    second = run.life(left, total=GROW_AT, patient_until=GROW_AT, keep=frozenset([GROW_AT]), place_every=5)
    second.ends()
    assert_goes_on(first, second, KILL_AT)
    net[1].launch()
    third = run.life([net[1], *left], total=TOTAL)
    third.ends()
    assert third.start() == GROW_AT, run.logs
    was, now = second.whole(GROW_AT), third.whole(GROW_AT)
    now.pop("rng of rank 2")
    assert was.keys() == now.keys()
    assert [name for name in now if not same(was[name], now[name])] == []
    assert_losses_as_of(undisturbed, run)


@long
def test_a_node_has_several_ranks(tmp_path: Path, undisturbed: Life) -> None:
    """Two nodes with two ranks each; one goes, with both: half of every expert."""
    with (
        Net(2, replicas="1").up() as net,
        contextlib.closing(ElasticRun(tmp_path, sharded=True)) as run,
    ):
        seats = [net[0], net[0], net[1], net[1]]
        dies = {rank: {"die_at": KILL_AT} for rank in (2, 3)}
        keep = frozenset([KILL_AT])
        first = run.life(seats, dies, total=TOTAL, patient_until=KILL_AT, keep=keep)
        first.torn_down()
        net[1].lose()
        second = run.life(seats[:2], total=TOTAL)
        second.ends()
        assert_goes_on(first, second, KILL_AT)
        assert "the shards of 2 of 4 ranks are parked" in second.events("world")[0]["reason"]
        assert_losses_as_of(undisturbed, run)


@long
def test_a_loss_while_weights_are_sent_goes_back_to_the_top_of_the_step(
    net: Net, run: ElasticRun, undisturbed: Life
) -> None:
    """All shards are updated already, and nothing can be parked: what goes on are the snapshots of
    the top, and the step is done again.
    """
    first, left = loses_a_node(run, net, die_sending=True)
    second = run.life(left, total=TOTAL)
    second.ends()
    assert_goes_on(first, second, KILL_AT)
    reason = second.events("world")[0]["reason"]
    assert "the shards of 0 of 3 ranks are parked" in reason, run.logs
    assert_losses_as_of(undisturbed, run)


@long
def test_a_moment_that_is_forgotten_is_noticed(net: Net, run: ElasticRun, undisturbed: Life) -> None:
    """The control: of one shard of one rank the first moment is zero, and neither the state nor the
    losses are those there were.
    """
    first, left = loses_a_node(run, net)
    second = run.life(left, total=TOTAL, spoil=True)
    second.ends()
    with pytest.raises(AssertionError, match=r"shards of .*/exp_avg'"):
        assert_goes_on(first, second, KILL_AT)
    with pytest.raises(AssertionError, match="loss"):
        assert_losses_as_of(undisturbed, run)


@long
def test_weights_of_16_bits_are_the_rounded_masters(net: Net, run: ElasticRun) -> None:
    """No snapshot has the weights: they follow from the masters, to the bit, before and after."""
    first, left = loses_a_node(run, net, masters=True, place_every=4)
    second = run.life(left, total=TOTAL, masters=True, keep=frozenset([TOTAL]))
    second.ends()
    assert_goes_on(first, second, KILL_AT)
    for life, step in ((first, KILL_AT), (second, KILL_AT), (second, TOTAL)):
        state = life.whole(step)
        more = 0
        for layer in ("blocks.0.moe", "blocks.1.moe"):
            for expert in range(EXPERTS):
                for param in ("inner.weight", "outer.weight", "outer.bias", "scale"):
                    weight = state[f"{layer}.experts.{expert}.{param}"]
                    master = state[f"shards of shards.{layer}.{expert}.{param}"]
                    assert (weight.dtype, master.dtype) == (torch.bfloat16, torch.float32)
                    assert torch.equal(master.bfloat16().view(weight.shape), weight)
                    more += int((master.bfloat16().float() != master).sum())
        assert more, "the masters know more than the weights"


@long
def test_where_a_shard_is_older_all_of_the_model_goes_back_to_it(
    net: Net, run: ElasticRun, undisturbed: Life
) -> None:
    """Of the lost rank's newest snapshot there is no whole copy."""
    before = KILL_AT - 1
    first = run.life(
        net.nodes,
        {rank: {"die_at": KILL_AT} for rank in range(3)},
        total=TOTAL,
        patient_until=KILL_AT,
        keep=frozenset([before, KILL_AT]),
    )
    first.torn_down()
    net[1].lose()
    left = [net[0], net[2]]
    assert sum(damaged(node, run, "~r1~*.rep", KILL_AT) for node in left) == 1, run.logs
    second = run.life(left, total=TOTAL)
    second.ends()
    assert_goes_on(first, second, before)
    assert_losses_as_of(undisturbed, run)


@long
def test_shards_that_nobody_holds_are_named_on_all_ranks(tmp_path: Path) -> None:
    """Without replicas the lost rank's shards are gone: no rank begins with less, and nothing is freed."""
    with (
        Net(3, replicas="0").up() as net,
        contextlib.closing(ElasticRun(tmp_path, sharded=True)) as run,
    ):
        _, left = loses_a_node(run, net)
        second = run.life(left, total=TOTAL)
        with pytest.raises(AssertionError, match="no node holds the shards of rank 1"):
            second.ends()
        assert all(
            "no node holds the shards of rank 1" in (part.folder / f"{part.out}-{part.rank}.log").read_text()
            for part in second.parts
        )


@long
@pytest.mark.parametrize("sharded", [True, False])
def test_the_other_strategy_is_refused_on_all_ranks(
    net: Net, run: ElasticRun, undisturbed: Life, sharded: bool
) -> None:
    """Recorded with shards and resumed without, and the other way round; then it goes on as it was recorded."""
    first, left = loses_a_node(run, net, sharded=sharded)
    refused = run.life(left, total=TOTAL, sharded=not sharded)
    with pytest.raises(AssertionError):
        refused.ends()
    words = "optimizer on shards: call shards()" if sharded else "on each replica: leave shards() out"
    for part in refused.parts:
        log = (part.folder / f"{part.out}-{part.rank}.log").read_text()
        assert words in log, run.logs
    second = run.life(left, total=TOTAL, sharded=sharded)
    run.lives.remove(refused)
    second.ends()
    assert_goes_on(first, second, KILL_AT)
    assert_losses_as_of(undisturbed, run)


@long
def test_experts_are_placed_anew_in_another_world_of_the_same_process(
    net: Net, run: ElasticRun, undisturbed: Life
) -> None:
    """``again``: the same ranks own the same shards, other ranks hold the experts."""
    life = places_anew(run, net)
    assert [one["start"] for one in life.events("world")][:2] == [0, KILL_AT]
    assert [one["step"] for one in life.events("step")] == list(range(TOTAL))
    assert_losses_as_of(undisturbed, run)
