"""What optimizers keep in attributes, lists and nested values, when nodes come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ckptd.nodes import Net
from tests.e2e.elastic import ElasticRun, Life, same
from tests.long import long

pytestmark = pytest.mark.slow

GROW_AT, TOTAL = 12, 18
CLOSE = 1e-9


@pytest.fixture
def net() -> Iterator[Net]:
    with Net(3, replicas="1").up() as up:
        yield up


def two_ranks(run: ElasticRun, net: Net, optimizer: str, *, protected: bool = True) -> Life:
    life = run.life(
        net.nodes[:2],
        total=GROW_AT,
        optimizer=optimizer,
        patient_until=GROW_AT if protected else 0,
        keep=frozenset([GROW_AT]),
    )
    life.ends()
    return life


def test_a_rank_that_joins_gets_what_the_optimizer_keeps_elsewhere(net: Net, tmp_path: Path) -> None:
    """A counter, a dict, an entry of no parameter, a list of gradients of each: none of it came to
    any rank of a new world.

    All ranks counted from 0 again, the one that joined too, and all of them trained on differently,
    without a word.
    """
    (tmp_path / "alone").mkdir()
    with (
        contextlib.closing(ElasticRun(tmp_path)) as run,
        contextlib.closing(ElasticRun(tmp_path / "alone")) as other,
    ):
        before = two_ranks(run, net, "counting")
        after = run.life(net.nodes, total=TOTAL, optimizer="counting")
        after.ends()
        assert after.start() == GROW_AT, run.logs
        was, now = before.whole(GROW_AT), after.whole(GROW_AT)
        assert now["kept"][0]["calls"] == GROW_AT
        assert any("/past" in name for name in now), "lists of the parameters are compared"
        assert {n for n in now if n.startswith("rng")} - was.keys() == {"rng of rank 2"}
        assert [name for name in was if not same(was[name], now[name])] == []
        alone = other.life([None], slots=6, total=TOTAL, optimizer="counting")
        alone.ends()
        expected = {step: loss for step, loss in alone.losses().items() if step >= GROW_AT}
        assert after.losses() == pytest.approx(expected, rel=CLOSE, abs=CLOSE)


@long
def test_state_that_is_made_of_several_tensors_goes_with_its_parameter(net: Net, tmp_path: Path) -> None:
    """FP8 codes and scales behind a tensor without memory of its own, also for an expert on another rank."""
    with contextlib.closing(ElasticRun(tmp_path)) as run:
        before = two_ranks(run, net, "blocks")
        after = run.life(net.nodes, total=TOTAL, optimizer="blocks")
        after.ends()
        assert after.start() == GROW_AT, run.logs
        was, now = before.whole(GROW_AT), after.whole(GROW_AT)
        assert any(name.endswith("inner.weight/first:codes") for name in now)
        assert [name for name in was if not same(was[name], now[name])] == []


def test_what_differs_between_ranks_is_refused_by_its_path_when_one_joins(net: Net, tmp_path: Path) -> None:
    """Nobody knows what it is on a rank that there was not. As many ranks as before go on with their own."""
    with contextlib.closing(ElasticRun(tmp_path)) as run:
        before = two_ranks(run, net, "of its rank")
        grows = run.life(net.nodes, total=TOTAL, optimizer="of its rank")
        with pytest.raises(
            AssertionError, match="greatest of optimizer OfItsRank was not the same on ranks 0 and 1"
        ):
            grows.ends()
        for rank in range(3):
            assert "greatest of optimizer OfItsRank" in (tmp_path / f"life1-{rank}.log").read_text()
        again = run.life(net.nodes[:2], total=TOTAL, optimizer="of its rank")
        again.ends()
        was, now = before.whole(GROW_AT), again.whole(GROW_AT)
        assert [name for name in was if not same(was[name], now[name])] == []


def test_a_list_by_position_is_told_at_the_first_snapshot(net: Net, tmp_path: Path) -> None:
    """Ranks have other experts in each world, so its values would go to others: no snapshot is
    taken, and the path is told.
    """
    with contextlib.closing(ElasticRun(tmp_path)) as run:
        life = two_ranks(run, net, "by position", protected=False)
        assert "optimizer ByPosition keeps sizes (a list; it may go by the position" in life.logs
        again = run.life(net.nodes[:2], total=TOTAL, optimizer="by position")
        again.ends()
        assert again.start() < GROW_AT, run.logs


def test_a_new_world_says_what_the_program_has_otherwise(net: Net, tmp_path: Path) -> None:
    """The learning rate was edited between two worlds: the recorded one counted, and nothing was said.

    Both values are told by one rank, in this world and in the next, with what counts; with
    ``options="script"`` the script's rate counts at once.
    """
    with contextlib.closing(ElasticRun(tmp_path)) as run:
        two_ranks(run, net, "")
        told = "initial_lr: recorded 0.02, here 0.05"
        for number, of in enumerate(("recorded", "script", "script")):
            total = GROW_AT + 6 * (number + 1)
            life = run.life(
                net.nodes[:2],
                total=total,
                patient_until=total,
                optimizer="another rate",
                options_of=of,
            )
            life.ends()
            lines = [line for line in life.logs.splitlines() if "THIS PROGRAM DIFFERS" in line]
            if number == 2:  # what was recorded since is the script's
                assert not lines, life.logs
                continue
            (line,) = lines
            assert told in line
            what = (
                "What was recorded counts"
                if of == "recorded"
                else f"The script's options count from iteration {life.start()} on"
            )
            assert what in line, line
