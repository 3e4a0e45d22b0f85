"""Elastic jobs: nodes vanish and come, and training goes on at the step that was cut off, with the bits that were there.

Every life is real processes over gloo with a daemon for each rank; a lost node loses its trainer, its daemon and its memory. ``CKPTD_LONG=1``
plays all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ckptd.nodes import Net, Node
from tests.e2e.elastic import ElasticRun, Life, same
from tests.e2e.elastic_job import EXPERTS
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
    """One rank with all experts and the whole batch, without ckptd."""
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    with contextlib.closing(ElasticRun(folder)) as made:
        yield made.life([None], slots=EXPERTS, total=TOTAL)


def loses_a_node(run: ElasticRun, net: Net, *, sole: bool = True) -> tuple[Life, list[Node]]:
    """Three ranks, of which one dies with its node in step ``KILL_AT``: the sole holder of an expert, or the last."""
    dies = {"die_at": KILL_AT, "die_sole": sole}
    who = range(3) if sole else [2]
    patient = {"patient_until": KILL_AT, "keep": frozenset([KILL_AT])}
    life = run.life(net.nodes, dict.fromkeys(who, dies), total=TOTAL, **patient)
    lost = life.torn_down()
    net[lost].lose()
    return life, [node for node in net.nodes if node is not net[lost]]


def assert_goes_on(before: Life, after: Life, step: int) -> None:
    """Every rank is, at the top of the step that was cut off, what the ranks were there: all weights, optimizer states and buffers."""
    assert after.start() == step, before.logs + after.logs
    was, now = before.whole(step), after.whole(step)
    assert was.keys() == now.keys()
    assert [name for name in was if not same(was[name], now[name])] == []


def assert_losses_as_of(undisturbed: Life, run: ElasticRun) -> None:
    """Each step was done, and has the loss that one rank alone has with the same global batch."""
    undisturbed.ends()
    found: dict[int, float] = {}
    for life in run.lives:
        found |= life.losses()
    expected = {step: loss for step, loss in undisturbed.losses().items() if step <= max(found)}
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=CLOSE, abs=CLOSE)


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
