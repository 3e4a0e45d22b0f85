"""Elastic jobs: nodes vanish and come, and training goes on at the step that was cut off, with the
bits that were there.

Every life is real processes over gloo with a daemon for each rank; a lost node loses its trainer,
its daemon and its memory. ``CKPTD_LONG=1`` plays all of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.core.elastic.rebalance_policy import TimesConfig
from ckptd.core.slots.slots import SlotState
from ckptd.memory.segment_file import open_segment
from tests.ckptd.nodes import Net, Node
from tests.e2e.elastic import ElasticRun, Life, same, undisturbed_life
from tests.e2e.elastic_job import EXPERTS, MAX_NORM
from tests.e2e.test_bad_input import flip
from tests.long import long

pytestmark = pytest.mark.slow

KILL_AT, GROW_AT, TOTAL = 14, 30, 34
# Of sums in double precision that are added up in another order, over all steps.
CLOSE = 1e-9


@pytest.fixture
def net() -> Iterator[Net]:
    with Net(3, replicas="1").up() as up:
        yield up


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ElasticRun]:
    with contextlib.closing(ElasticRun(tmp_path)) as made:
        yield made


@pytest.fixture
def undisturbed(tmp_path: Path) -> Iterator[Life]:
    with undisturbed_life(tmp_path / "undisturbed", TOTAL) as life:
        yield life


def places_anew(run: ElasticRun, net: Net) -> Life:
    """Three ranks that are told to look often at the load, and to count on much: each lives in two worlds."""
    eager = TimesConfig(threshold=1, every_steps=KILL_AT, check_steps=KILL_AT, margin=0.0)
    life = run.life(
        net.nodes,
        total=TOTAL,
        patient_until=KILL_AT,
        options={"when": eager, "max_straggler": 1.0},
    )
    life.ends()
    return life


def loses_a_node(run: ElasticRun, net: Net, *, sole: bool = True) -> tuple[Life, list[Node]]:
    """Three ranks, of which one dies with its node in step ``KILL_AT``: the sole holder of an
    expert, or the last.
    """
    dies = {"die_at": KILL_AT, "die_sole": sole}
    who = range(3) if sole else [2]
    patient = {"patient_until": KILL_AT, "keep": frozenset([KILL_AT])}
    life = run.life(net.nodes, dict.fromkeys(who, dies), total=TOTAL, **patient)
    lost = life.torn_down()
    net[lost].lose()
    return life, [node for node in net.nodes if node is not net[lost]]


def assert_goes_on(before: Life, after: Life, step: int) -> None:
    """Every rank is, at the top of the step that was cut off, what the ranks were there: all
    weights, optimizer states and buffers.
    """
    assert after.start() == step, before.logs + after.logs
    was, now = before.whole(step), after.whole(step)
    beyond = {f"rng of rank {rank}" for rank in range(len(after.parts), len(before.parts))}
    assert was.keys() - beyond == now.keys()
    assert [name for name in now if not same(was[name], now[name])] == []


def assert_losses_as_of(undisturbed: Life, run: ElasticRun) -> None:
    """Each step was done, and has the loss and the norm that one rank alone has with the same global batch."""
    undisturbed.ends()
    for what in ("loss", "norm"):
        found: dict[int, float] = {}
        for life in run.lives:
            found |= life.losses(what)
        alone = undisturbed.losses(what)
        expected = {step: alone[step] for step in alone if step <= max(found)}
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, rel=CLOSE, abs=CLOSE), what
    norms = undisturbed.losses("norm").values()
    assert min(norms) < MAX_NORM < max(norms), "gradients were clipped, and not always"


def test_an_expert_that_lost_its_only_holder_comes_from_a_snapshot(
    net: Net, run: ElasticRun, undisturbed: Life
) -> None:
    """Two of three nodes go on; of the third one's expert there is a replica of a snapshot only."""
    first, left = loses_a_node(run, net)
    second = run.life(left, total=TOTAL)
    second.ends()
    assert_goes_on(first, second, KILL_AT)
    assert "come from snapshots" in second.events("world")[0]["reason"], run.logs
    assert_losses_as_of(undisturbed, run)
    shown = left[0].ctl("elastic", "show").stdout
    assert all(name in shown for name in ("blocks.0.moe", "blocks.1.moe")), shown


@long
def test_nodes_that_come_get_their_share(net: Net, run: ElasticRun, undisturbed: Life) -> None:
    """Three, two, three: the new node holds nothing, and the job goes on where it was."""
    _, left = loses_a_node(run, net)
    second = run.life(left, total=GROW_AT, patient_until=GROW_AT, keep=frozenset([GROW_AT]))
    second.ends()
    # What the first world left is freed, replicas included, once the second can be had without it.
    files = [path for node in left for path in node.segment_dir.glob("*~*") if path.suffix != ".run"]
    numbers = {path.name.split("~")[1] for path in files}
    assert numbers == {f"{run.run}.w{second.events('world')[0]['number']}"}
    (came,) = [node for node in net.nodes if node not in left]
    came.launch()
    third = run.life([came, *left], total=TOTAL)
    third.ends()
    assert third.start() == GROW_AT, run.logs
    assert_losses_as_of(undisturbed, run)
    was, now = second.whole(GROW_AT), third.whole(GROW_AT)
    came_rng = now.pop("rng of rank 2")
    assert was.keys() == now.keys()
    assert [name for name in now if not same(was[name], now[name])] == []
    assert not same(came_rng, now["rng of rank 0"]), "it draws numbers of its own"
    held = third.events("world")[0]["held"]
    assert all(held.values()), "the node that came holds experts of each layer"


@long
def test_a_node_has_several_ranks(tmp_path: Path, undisturbed: Life) -> None:
    """Two nodes with two ranks each; one goes, with both."""
    with Net(2, replicas="1").up() as net, contextlib.closing(ElasticRun(tmp_path)) as run:
        seats = [net[0], net[0], net[1], net[1]]
        keep = frozenset([KILL_AT])
        dies = {rank: {"die_at": KILL_AT} for rank in (2, 3)}
        first = run.life(seats, dies, threshold=2, total=TOTAL, patient_until=KILL_AT, keep=keep)
        first.torn_down()
        net[1].lose()
        second = run.life(seats[:2], threshold=2, total=TOTAL)
        second.ends()
        assert_goes_on(first, second, KILL_AT)
        assert "12 of 12 experts are parked" in second.events("world")[0]["reason"], run.logs
        assert_losses_as_of(undisturbed, run)


@long
def test_all_ranks_killed_at_once_go_on_from_their_snapshots(
    net: Net, run: ElasticRun, undisturbed: Life
) -> None:
    """Nobody could park; the nodes and their memory stay."""
    life = run.life(
        net.nodes,
        {rank: {"die_at": KILL_AT} for rank in range(3)},
        total=TOTAL,
        patient_until=KILL_AT,
        keep=frozenset([KILL_AT]),
    )
    life.torn_down()
    second = run.life(net.nodes, total=TOTAL)
    second.ends()
    assert_goes_on(life, second, KILL_AT)
    assert_losses_as_of(undisturbed, run)


def damaged(node: Node, run: ElasticRun, pattern: str, iteration: int) -> int:
    """Flip a bit in what this node holds of an iteration; in how many slots."""
    count = 0
    for path in node.segment_dir.glob(f"e2e~{run.run}.w*{pattern}"):
        segment = open_segment(path)
        for index, header in segment.headers():
            if header.state is SlotState.SEALED and header.iteration == iteration:
                flip(segment, index, header)
                count += 1
        segment.close()
    return count


@long
def test_a_damaged_parked_state_is_left_out(net: Net, run: ElasticRun, undisturbed: Life) -> None:
    """Its rank's snapshot of the same iteration has the same bits."""
    first, left = loses_a_node(run, net, sole=False)
    assert damaged(left[0], run, "~*.parked", KILL_AT) == 1, run.logs
    second = run.life(left, total=TOTAL)
    second.ends()
    assert "the ranks plan again" in second.logs
    assert_goes_on(first, second, KILL_AT)
    assert_losses_as_of(undisturbed, run)


@long
def test_where_an_expert_is_older_all_of_the_model_goes_back_to_it(
    net: Net, run: ElasticRun, undisturbed: Life
) -> None:
    """Of the lost holder's newest snapshot there is no whole copy: experts, dense part and
    optimizers are those of one iteration before.
    """
    before = KILL_AT - 1
    dies = {"die_at": KILL_AT, "die_sole": True}
    keep = frozenset([before, KILL_AT])
    first = run.life(net.nodes, dict.fromkeys(range(3), dies), total=TOTAL, patient_until=KILL_AT, keep=keep)
    lost = first.torn_down()
    net[lost].lose()
    left = [node for node in net.nodes if node is not net[lost]]
    assert sum(damaged(node, run, f"~r{lost}~*.rep", KILL_AT) for node in left) == 1, run.logs
    second = run.life(left, total=TOTAL)
    second.ends()
    assert_goes_on(first, second, before)
    assert_losses_as_of(undisturbed, run)


@long
def test_a_node_that_vanishes_while_the_plan_is_applied(tmp_path: Path, undisturbed: Life) -> None:
    """One of two that were left goes before anything was loaded, with its node; the first lost one
    is back, empty.
    """
    with Net(3, replicas="2").up() as net, contextlib.closing(ElasticRun(tmp_path)) as run:
        first, left = loses_a_node(run, net)
        second = run.life(left, {1: {"die_before_loading": True}}, total=TOTAL)
        assert second.torn_down() == 1
        left[1].lose()
        (back,) = [node for node in net.nodes if node not in left]
        back.launch()
        third = run.life([left[0], back], total=TOTAL)
        third.ends()
        assert_goes_on(first, third, KILL_AT)
        numbers = [life.events("world")[0]["number"] for life in run.lives if life.events("world")]
        assert numbers == sorted(set(numbers))
        assert_losses_as_of(undisturbed, run)


@long
def test_too_few_slots_are_refused_on_every_rank_and_nothing_is_lost(
    net: Net, run: ElasticRun, undisturbed: Life
) -> None:
    first, left = loses_a_node(run, net)
    refused = run.life(left[:1], total=TOTAL)
    with pytest.raises(AssertionError, match="3 slots on 1 nodes cannot hold 6 experts"):
        refused.ends()
    second = run.life(left, total=TOTAL)
    second.ends()
    assert_goes_on(first, second, KILL_AT)
    run.lives.remove(refused)
    assert_losses_as_of(undisturbed, run)


@long
def test_experts_are_placed_anew_while_the_ranks_stay(net: Net, run: ElasticRun, undisturbed: Life) -> None:
    """Told to look often and to count on much: one process lives in two worlds, and no step is lost
    or done twice.
    """
    life = places_anew(run, net)
    worlds = life.events("world")
    assert len(worlds) > 1, life.logs
    assert [one["start"] for one in worlds][:2] == [0, KILL_AT]
    steps = [one["step"] for one in life.events("step")]
    assert steps == list(range(TOTAL))
    assert_losses_as_of(undisturbed, run)


@long
def test_starts_that_fail_do_not_use_up_the_memory(tmp_path: Path) -> None:
    """Each left a world of its own, until the one that came through got no memory, trained
    unprotected, and so freed none of them.
    """
    with (
        Net(1, memory="16MiB").up() as net,
        contextlib.closing(ElasticRun(tmp_path, slots=EXPERTS, total=TOTAL)) as run,
    ):
        first = run.life(net.nodes, {0: {"die_at": KILL_AT, "patient_until": KILL_AT}})
        first.torn_down()
        for _ in range(4):
            fails = run.life(net.nodes, step_ms=50.0)
            until = time.monotonic() + 60
            while len(fails.events("top")) < 2:
                assert time.monotonic() < until, run.logs
                time.sleep(0.01)
            fails.kill()
        last = run.life(net.nodes, patient_until=GROW_AT)
        last.ends()
        assert last.start() == KILL_AT, run.logs
        runs = {path.name.split("~")[1] for path in net[0].segment_dir.glob("*~*")}
        assert runs == {f"{run.run}.w{last.events('world')[0]['number']}"}, run.logs


@long
def test_two_jobs_share_the_nodes(net: Net, run: ElasticRun, tmp_path: Path) -> None:
    """One is named as if it were a world of the other. Both lose a rank, and each goes on from what
    is its own.
    """
    (tmp_path / "other").mkdir()
    with contextlib.closing(ElasticRun(tmp_path / "other")) as other:
        other.run = f"{run.run}.w5"
        dies = {1: {"die_at": KILL_AT}}
        both = run, other
        told = {"total": TOTAL, "patient_until": KILL_AT, "keep": frozenset([KILL_AT])}
        firsts = [one.life(net.nodes, dies, **told) for one in both]
        for first in firsts:
            first.torn_down()
        seconds = [one.life(net.nodes, total=TOTAL) for one in both]
        for first, second in zip(firsts, seconds, strict=True):
            second.ends()
            assert_goes_on(first, second, KILL_AT)
