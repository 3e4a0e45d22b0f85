"""Elastic jobs come back from storage when too many nodes are lost: into any number of ranks, at
the bits of the checkpoint.

With a folder as the store; over a real S3 server: tests/e2e/s3/test_worlds.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.ckptd.nodes import Net, Node
from tests.ckptd.running import eventually
from tests.e2e.elastic import ElasticRun, Life
from tests.e2e.elastic_job import EXPERTS
from tests.e2e.test_elastic import assert_goes_on
from tests.e2e.world_store import WorldStore
from tests.long import long

pytestmark = pytest.mark.slow

TOTAL = 9


@pytest.fixture
def store(tmp_path: Path) -> WorldStore:
    return WorldStore.folder(tmp_path / "store")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ElasticRun]:
    with contextlib.closing(ElasticRun(tmp_path)) as made:
        yield made


def trains(run: ElasticRun, nodes: Sequence[Node], store: WorldStore, total: int, slots: int = 3) -> Life:
    """A life that comes to its end, whose last state is durable then."""
    keep = frozenset([total])
    life = run.life(nodes, slots=slots, total=total, patient_until=total, keep=keep)
    life.ends()
    eventually(lambda: store.committed(run.run)[:1] == [total], f"{total} is durable", 30)
    return life


def test_what_two_ranks_left_in_storage_one_rank_goes_on_from(store: WorldStore, run: ElasticRun) -> None:
    """Their host is destroyed; the one that comes has never heard of the job."""
    with Net(2, replicas="0", **store.settings).up() as net:
        first = trains(run, [net[0], net[0]], store, TOTAL)
        net[0].lose()
        second = run.life([net[1]], slots=EXPERTS, total=TOTAL + 1)
        second.ends()
        assert_goes_on(first, second, TOTAL)
        assert "brought from storage" in second.events("world")[0]["reason"], run.logs


@long
def test_only_what_no_node_holds_comes_from_storage(store: WorldStore, run: ElasticRun) -> None:
    """One of three is lost, without any replica: the other two have their parts of the same iteration."""
    with Net(3, replicas="0", **store.settings).up() as net:
        first = trains(run, net.nodes, store, TOTAL, slots=2)
        net[0].lose()
        # Of two ranks on one node, one has it brought.
        second = run.life([net[1], net[2], net[2]], slots=2, total=TOTAL + 1)
        second.ends()
        assert_goes_on(first, second, TOTAL)
        assert "no iteration is held as a whole" in second.logs, run.logs
        assert "the daemons bring 1 of 3 images" in second.logs, run.logs


@long
def test_a_later_world_in_storage_counts_more_than_an_earlier_one_in_memory(
    store: WorldStore, run: ElasticRun
) -> None:
    """A job moves to another host and back, where its old memory still lies: nothing that was done
    meanwhile is lost.
    """
    with Net(2, replicas="0", **store.settings).up() as net:
        trains(run, net.nodes[:1], store, TOTAL, slots=EXPERTS)
        net[0].pause()
        moved = trains(run, net.nodes[1:], store, TOTAL + 5, slots=EXPERTS)
        assert moved.start() == TOTAL
        net[1].lose()
        net[0].unpause()
        back = run.life(net.nodes[:1], slots=EXPERTS, total=TOTAL + 6)
        back.ends()
        assert_goes_on(moved, back, TOTAL + 5)
        assert len(store.worlds(run.run)) == 3


@long
def test_damaged_checkpoints_are_passed_over_and_told_when_none_is_left(
    store: WorldStore, run: ElasticRun
) -> None:
    """The newest one first, then all; every rank hears of it, and nothing begins anew."""
    with Net(4, replicas="0", **store.settings).up() as net:
        keep = frozenset(range(TOTAL + 1))
        first = run.life(net.nodes[:2], total=TOTAL, patient_until=TOTAL, keep=keep)
        first.ends()
        eventually(lambda: store.committed(run.run)[:1] == [TOTAL], "all is durable", 30)
        (world,), ends = store.worlds(run.run), store.committed(run.run)
        for node in net.nodes[:2]:
            node.lose()
        store.damage(run.run, world, ends[0])
        second = run.life(net.nodes[2:], total=ends[1] + 1)
        second.ends()
        assert_goes_on(first, second, ends[1])
        for node in net.nodes[2:]:
            node.lose()
            node.launch()
        for each in store.worlds(run.run):
            for checkpoint in store.catalog(run.run, each).committed:
                if (each, checkpoint.id.end) != (world, ends[0]):
                    store.damage(run.run, each, checkpoint.id.end)
        third = run.life(net.nodes[2:], total=TOTAL)
        with pytest.raises(AssertionError, match=r"nothing stored of e2e/\w+ can be used"):
            third.ends()
        for rank in range(2):
            assert "can be used" in (third.parts[rank].folder / f"life2-{rank}.log").read_text()
