"""Recovery of a lost node's rank from its replicas, while holders lie, are slow or die: true bytes,
or a reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.errors import DaemonUnavailable
from tests.ckptd.nodes import Net, Node
from tests.ckptd.peers_harness import Job
from tests.ckptd.running import eventually
from tests.ckptd.snapshots import flip
from tests.long import long

pytestmark = pytest.mark.timeout(90)
both = pytest.mark.parametrize("data", ["stream", pytest.param("zmq", marks=long)])

SIZE = 600_000
SLOW = 250_000.0  # bytes per second: an image takes more than two seconds


@contextmanager
def recorded(copies: int, data: str, *, window: int = 1, curve: bool = False) -> Iterator[tuple[Net, Job]]:
    """A job on three nodes with proxies, replicated up to iteration 2 * window, whose node 0 is
    lost and empty again.
    """
    # Longer than connecting takes on a busy machine: who is lost meanwhile delivers nothing.
    with Net(3, data=data, proxied=True, curve=curve, peer_deadline_s="2.5").up() as net:
        job = Job(net, net.nodes, replicas=copies, window=window)
        job.start()
        for iteration in range(2 * window + 1):
            job.record(iteration, size=SIZE)
            job.await_replicas(iteration, copies)
        job.end()
        net[0].lose()
        net[0].launch()
        yield net, job


def wanted(job: Job) -> list[SnapshotImage]:
    """All ranks attach and plan; what rank 0 is going to replay. It may still be on its way."""
    job.attach()
    found = job.recover()[0]
    assert not isinstance(found, str), found
    job[0].last = found[0][-1].iteration
    return found[0]


def fetched(node: Node) -> str:
    (event,) = node.events("fetched")
    return event.message


@pytest.mark.parametrize(
    ("data", "curve", "window"), [("stream", True, 3), ("zmq", True, 1), ("stream", False, 1)]
)
def test_a_lost_node_gets_its_snapshots_back(curve: bool, window: int, data: str) -> None:
    with recorded(2, data, window=window, curve=curve) as (net, job):
        assert job.resume() == 2 * window
        assert f"{window} snapshots" in fetched(net[0])
        job.check_all()
        job.together(lambda t: t.reserve())
        job.record(2 * window + 1)
        job.await_replicas(2 * window + 1, 2)
        job.check_all()
        job.end()


@both
def test_a_liar_is_found_out_and_another_delivers(data: str) -> None:
    """The liar is the one that answers first."""
    with recorded(2, data) as (net, job):
        here, liar, honest = net.nodes
        assert flip(liar.replicas(0), [2]) == 1
        net.path(here, honest).delay_s = 0.02
        job.check_images(0, wanted(job))
        assert here.saw("fetch_damaged", f"1 tensor (w) of {liar.name}'s copy does not match")
        assert f"from {honest.name}" in fetched(here)
        job.end()


@both
def test_a_damaged_replica_that_is_the_only_one_is_never_restored(data: str) -> None:
    with recorded(1, data) as (net, job):
        here = net[0]
        (holder,) = job.holders(0, 2)
        assert flip(holder.replicas(0), [2]) == 1
        (image,) = wanted(job)
        with pytest.raises(DaemonUnavailable, match="iteration 2 could not be brought here"):
            _ = image.view
        assert here.saw("fetch_damaged", holder.name)
        assert here.saw("fetch_failed", "no holder is left")
        # Or each restart of the job would plan the same fetch.
        eventually(lambda: holder.saw("slot_quarantined"), "its holder looks for itself")
        assert not job[0].own(), "nothing wrong is sealed"
        job.end()


@both
def test_a_slow_holder_is_taken_over_from(data: str) -> None:
    with recorded(2, data) as (net, job):
        here, slow, quick = net.nodes
        net.path(here, quick).delay_s = 0.02  # it is asked second
        net.path(here, slow).bytes_per_s = SLOW / 20
        job.check_images(0, wanted(job))
        assert f"from {quick.name}" in fetched(here)
        job.end()


@both
def test_a_holder_dies_while_it_delivers(data: str) -> None:
    with recorded(2, data) as (net, job):
        here, dying, other = net.nodes
        net.path(here, other).delay_s = 0.02
        net.path(here, dying).bytes_per_s = SLOW
        images = wanted(job)
        assert not here.saw("fetched")
        dying.kill()
        job.check_images(0, images)
        assert f"from {other.name}" in fetched(here)
        dying.launch()
        job.end()


def test_a_holder_that_notices_our_restart_late_still_delivers() -> None:
    """It ends what our old life had open there, and not the read that the new one has opened already.

    Its own deadline is long: had it lost us between the new read and the notice, it would rightly
    have ended all.
    """
    with Net(3, proxied=True, of={"n2": {"peer_deadline_s": "60"}}).up() as net:
        here, slow, quick = net.nodes
        job = Job(net, net.nodes, replicas=2)
        job.start()
        job.record(0, size=SIZE)
        job.await_replicas(0, 2)
        job.end()
        eventually(lambda: quick.has_heard(here), "it knows this life of ours")
        back, there = net.path(quick, here), net.path(here, quick)
        back.refuse = True
        here.lose()
        here.launch()
        before = there.num_connections
        there.bytes_per_s = net.path(here, slow).bytes_per_s = SLOW / 20
        images = wanted(job)
        # The one for control messages, and the stream of the read.
        eventually(lambda: there.num_connections >= before + 2, "the new life reads")
        back.heal()
        eventually(lambda: quick.saw("peer_restarted", here.name), "it notices")
        there.heal()
        job.check_images(0, images)
        assert not quick.saw("peer_lost", here.name)
        assert here.counters().get("fetch.region", 0) == 0
        assert f"from {quick.name}" in fetched(here)
        job.end()


@both
def test_without_any_holder_left_there_is_a_reason_and_a_restart_finds_them_again(
    data: str,
) -> None:
    with recorded(1, data) as (net, job):
        here = net[0]
        (holder,) = job.holders(0, 2)
        net.path(here, holder).bytes_per_s = SLOW
        (image,) = wanted(job)
        holder.kill()
        with pytest.raises(DaemonUnavailable, match="no holder is left of"):
            _ = image.view
        assert here.saw("fetch_failed", "iteration 2")
        assert not job[0].own()
        holder.launch()
        net.path(here, holder).heal()
        job.end()
        assert job.resume() == 2
        job.end()


@both
def test_the_fetching_daemon_dies_and_the_job_plans_anew(data: str) -> None:
    with recorded(1, data) as (net, job):
        here = net[0]
        (holder,) = job.holders(0, 2)
        net.path(here, holder).bytes_per_s = SLOW
        (image,) = wanted(job)
        here.kill()
        here.launch()
        with pytest.raises(DaemonUnavailable):
            _ = image.view
        assert not job[0].own(), "what arrived in part is not shown"
        net.path(here, holder).heal()
        job.end()
        assert job.resume() == 2
        job.check_all()
        job.end()


@both
def test_memory_that_is_given_back_while_it_is_filled_ends_the_fetch(data: str) -> None:
    """A rank that cannot follow the plan makes all plan anew: the fetch of the others is in vain,
    and harms nobody.
    """
    with recorded(1, data) as (net, job):
        here = net[0]
        (holder,) = job.holders(0, 2)
        net.path(here, holder).bytes_per_s = SLOW
        wanted(job)
        generation = job[0].memory.table.segments[-1].generation
        job[0].memory.session.drop(generation)
        eventually(lambda: here.saw("fetch_failed", "given back"), "the job ends")
        assert not here.saw("internal")
        net.path(here, holder).heal()
        job.end()
        assert job.resume() == 2
        job.end()
