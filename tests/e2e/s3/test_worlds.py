"""Elastic jobs over a real S3 server: all hosts are lost, others go on with the state that is durable there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.storage.checkpoints.names import run_of_incarnation
from tests.ckptd.nodes import Net, Node
from tests.ckptd.running import eventually
from tests.e2e.bucket import Bucket
from tests.e2e.elastic import ElasticRun, Life, same, undisturbed_life
from tests.e2e.elastic_job import EXPERTS
from tests.e2e.s3.training import SOON_S, long, needs_server
from tests.e2e.test_elastic import assert_goes_on, assert_losses_as_of
from tests.e2e.world_store import WorldStore
from tests.storage.fault_proxy import Answer, FaultProxy

pytestmark = [pytest.mark.slow, needs_server, long]

TOTAL = 60


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[ElasticRun]:
    with contextlib.closing(ElasticRun(tmp_path)) as made:
        yield made


@pytest.fixture
def undisturbed(tmp_path: Path) -> Iterator[Life]:
    with undisturbed_life(tmp_path / "undisturbed", TOTAL) as life:
        yield life


def loses_all(run: ElasticRun, nodes: list[Node], store: WorldStore, *, checkpoints: int) -> Life:
    """Ranks that train until so many checkpoints are durable, and then are lost in the middle of
    it, with their hosts and all memory.
    """
    keep = frozenset(range(TOTAL + 1))
    life = run.life(nodes, total=TOTAL, keep=keep, step_ms=250)
    try:
        eventually(lambda: len(store.committed(run.run)) >= checkpoints, "durable checkpoints", SOON_S)
    finally:
        life.kill()
        for node in nodes:
            node.lose()
    assert all(life.events("step", rank) for rank in range(len(nodes))), life.logs
    return life


def others(net: Net, count: int) -> list[Node]:
    """Nodes that hold nothing of the job: the fourth one, and lost ones that came back empty."""
    back = net.nodes[: count - 1]
    for node in back:
        node.launch()
    return [net[3], *back]


@pytest.mark.parametrize("left", [2, 4])
def test_all_three_hosts_are_destroyed_and_others_go_on(
    bucket: Bucket, elastic: ElasticRun, undisturbed: Life, left: int
) -> None:
    """With another number of ranks; the losses are those of a run that was never disturbed."""
    store = WorldStore.bucket(bucket)
    with Net(4, replicas="1", **store.settings).up() as net:
        first = loses_all(elastic, net.nodes[:3], store, checkpoints=1)
        newest = store.committed(elastic.run)[0]
        nodes = others(net, left)
        second = elastic.life(nodes, total=TOTAL, patient_until=TOTAL)
        second.ends()
        assert second.start() == newest > 0, elastic.logs
        if left < 3:
            assert_goes_on(first, second, newest)
        else:
            check_more_ranks(first, second, newest)
        assert "brought from storage" in second.events("world")[0]["reason"]
        assert_losses_as_of(undisturbed, elastic)
        # What was brought is freed as soon as the new world can be had without it.
        held = {path.name.split("~")[1] for node in nodes for path in node.segment_dir.glob("*~*")}
        assert held == {run_of_incarnation(elastic.run, store.worlds(elastic.run)[0])}
        eventually(lambda: store.committed(elastic.run)[0] == TOTAL, "its end is durable", SOON_S)
        for world in store.worlds(elastic.run):
            report = bucket.verify(f"{elastic.run}.w{world}")
            assert report.ok, report.findings


def check_more_ranks(before: Life, after: Life, step: int) -> None:
    """All of the state; and ranks that there were not draw random numbers of their own."""
    was, now = before.whole(step), after.whole(step)
    came = [now.pop(f"rng of rank {rank}") for rank in range(len(before.parts), len(after.parts))]
    assert was.keys() == now.keys()
    assert [name for name in now if not same(was[name], now[name])] == []
    assert not any(same(rng, now["rng of rank 0"]) for rng in came)


def test_a_damaged_object_in_the_newest_checkpoint_leads_to_the_one_before(
    bucket: Bucket, elastic: ElasticRun, undisturbed: Life
) -> None:
    store = WorldStore.bucket(bucket)
    with Net(4, replicas="1", **store.settings).up() as net:
        first = loses_all(elastic, net.nodes[:3], store, checkpoints=2)
        newest, before = store.committed(elastic.run)[:2]
        store.damage(elastic.run, store.worlds(elastic.run)[0], newest)
        nodes = others(net, 2)
        second = elastic.life(nodes, total=TOTAL)
        second.ends()
        assert_goes_on(first, second, before)
        assert any(node.saw("checkpoint_damaged", elastic.run) for node in nodes)
        assert_losses_as_of(undisturbed, elastic)


def test_a_store_that_is_away_or_refuses_stops_the_start_on_every_rank_and_a_state_in_memory_needs_none(
    bucket: Bucket, elastic: ElasticRun, proxy: FaultProxy
) -> None:
    """To begin anew would bury what is durable; what memory holds as a whole does not wait for it."""
    store = WorldStore.bucket(bucket, endpoint=proxy.endpoint, store_deadline_s="4")
    with Net(3, replicas="0", **store.settings).up() as net:
        total = 9
        first = elastic.life(
            net.nodes[:1], slots=EXPERTS, total=total, patient_until=total, keep=frozenset([total])
        )
        first.ends()
        eventually(lambda: store.committed(elastic.run)[:1] == [total], "it is durable", SOON_S)
        proxy.inject(Answer(403, "InvalidAccessKeyId"), times=1_000_000)
        refused = elastic.life(net.nodes[1:], total=total + 2)
        with pytest.raises(AssertionError, match=r"the durable checkpoints of .* cannot be listed"):
            refused.ends()
        for part in refused.parts:
            told = (part.folder / f"{part.out}-{part.rank}.log").read_text()
            assert "cannot be listed" in told, told
        second = elastic.life(net.nodes[:1], slots=EXPERTS, total=total + 2)
        second.ends()
        assert_goes_on(first, second, total)
        assert "the ranks go on without its store" in second.logs
