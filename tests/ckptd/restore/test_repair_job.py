"""Recovery where every copy of a snapshot is damaged, each in another tensor: real daemons, memory
and store; true bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptd.core.slots.segment_format import set_slot_state
from ckptd.core.slots.slots import SlotState
from ckptd.memory.segment_file import open_segment
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.image import ImageView
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.nodes import Net, Node
from tests.ckptd.peers_harness import Job
from tests.ckptd.running import eventually
from tests.ckptd.snapshots import Snapshot, flip_tensor, states_in

pytestmark = pytest.mark.timeout(90)

TENSORS = ("w", "exp_avg", "exp_avg_sq")
SIZE = 100_000


@contextmanager
def recorded(
    nodes: int, last: int, *, window: int = 1, proxied: bool = False, **settings: str
) -> Iterator[tuple[Net, Job]]:
    """A job with a rank on each node, replicated up to iteration ``last`` to all other nodes, whose
    trainers have ended.
    """
    of = {f"n{i}": settings for i in range(nodes)}
    with Net(nodes, proxied=proxied, of=of, peer_deadline_s="2.5").up() as net:
        job = Job(net, net.nodes, replicas=nodes - 1, window=window, tensors=TENSORS, slack=4)
        job.start()
        for iteration in range(last + 1):
            job.record(iteration, size=SIZE)
            job.await_replicas(iteration, nodes - 1)
        yield net, job
        job.end()


def lose_first(net: Net, job: Job) -> tuple[Node, Node]:
    """The first node is lost, and empty again; returns it and the other one."""
    job.end()
    net[0].lose()
    net[0].launch()
    return net[0], net[1]


def written(job: Job, iteration: int) -> Snapshot:
    """What rank 0 has recorded of it."""
    (found,) = [s for (rank, i, _, _), s in job.written.items() if (rank, i) == (0, iteration)]
    return found


def test_two_replicas_that_are_damaged_in_different_tensors_restore_the_snapshot() -> None:
    """Each of them was given up for what was wrong in it, and no copy was left."""
    with recorded(3, 2) as (net, job):
        here, one, other = net.nodes
        lose_first(net, job)
        for node, tensor in ((one, "exp_avg"), (other, "exp_avg_sq")):
            flip_tensor(node.replicas(0), 2, tensor)
        assert job.resume() == 2
        assert here.saw("fetch_repaired", "1 tensor of")
        assert not here.saw("fetch_failed")
        # Whoever was found wrong looks for itself; what is sealed then is right everywhere.
        found = [node for node in (one, other) if here.saw("fetch_damaged", f"{node.name}'s copy")]
        assert found
        for node in found:
            eventually(lambda n=node: n.saw("slot_quarantined"), "its holder looks for itself")  # type: ignore[misc]
        assert written(job, 2).image in [snapshot.image for snapshot in job[0].own().values()]


def test_what_is_right_in_ones_own_damaged_copy_need_not_travel_and_saves_the_rest() -> None:
    """Its trainer has put it in quarantine, so no plan names it; and the replica is damaged as well."""
    with recorded(2, 2) as (net, job):
        here, peer = net.nodes
        job.end()
        (own,) = here.segment_dir.glob("*~r0~*.seg")
        flip_tensor([own], 2, "exp_avg")
        flip_tensor(peer.replicas(0), 2, "exp_avg_sq")
        assert job.resume() == 2
        assert SlotState.QUARANTINED in states_in(own)
        assert here.saw(
            "fetch_repaired",
            f"iteration 2: 1 tensor of this node's copy does not match; taken from {peer.name}",
        )
        (event,) = here.events("fetched")
        assert f"from {peer.name}" in event.message
        # The replica was asked for one tensor, which is right in it.
        assert not peer.saw("slot_quarantined")


# -- storage -------------------------------------------------------------------------------------


@contextmanager
def stored(folder: Path, last: int, *, window: int = 1, proxied: bool = False) -> Iterator[tuple[Net, Job]]:
    """The same on two nodes with a store, where iteration ``last`` is committed; the trainers are
    still there.
    """
    url = f"file://{folder}"
    settings = {"store": url, "persist_every": "1", "persist_every_s": "0"}
    with recorded(2, last, window=window, proxied=proxied, **settings) as (net, job):

        def committed() -> bool:
            newest = read_catalog(open_store(url), "job", "run").newest
            return newest is not None and newest.id.end == last

        eventually(committed, f"iteration {last} is committed")
        yield net, job


def place_of(folder: Path, snapshot: Snapshot, tensor: str) -> tuple[Path, int]:
    """The object in which a tensor of a snapshot lies, and where in it its middle is."""
    data = bytes(ImageView(memoryview(snapshot.image)).data(tensor))
    for path in folder.rglob("*.safetensors"):
        at = path.read_bytes().find(data)
        if at >= 0:
            return path, at + len(data) // 2
    raise AssertionError(f"{tensor} is not in {folder}")


def test_a_tensor_that_is_damaged_in_memory_is_taken_from_storage(tmp_path: Path) -> None:
    """And storage, of the same iteration, is damaged in another one. Memory seemed to be enough, so
    the plan knew nothing of it.
    """
    with stored(tmp_path / "store", 1) as (net, job):
        here, peer = lose_first(net, job)
        flip_tensor(peer.replicas(0), 1, "exp_avg")
        path, at = place_of(tmp_path / "store", written(job, 1), "exp_avg_sq")
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
        assert job.resume() == 1
        text = f"iteration 1: 1 tensor of {peer.name}'s copy does not match; taken from storage"
        assert here.saw("fetch_repaired", text)


def test_a_drill_tells_what_memory_elsewhere_is_worth_and_asks_neither_storage_nor_its_own(
    tmp_path: Path,
) -> None:
    """Else it would call a replica good of which a part has to come from what is lost with the
    node, or from far away.
    """
    with stored(tmp_path / "store", 1) as (net, _):
        here, peer = net.nodes
        flip_tensor(peer.replicas(0), 1, "exp_avg")
        report = json.loads(here.ctl("drill", "--rank", "0", "--json", check=False).stdout)
        assert not report["recoverable"]
        assert "in no copy that was reached is exp_avg right" in report["reason"]
        assert here.counters().get("fetch.region", 0) == 0, "what is rehearsed lies in no segment"


def test_an_object_that_is_cut_short_is_good_for_what_is_left_of_it(tmp_path: Path) -> None:
    """One of the two snapshots is in storage only. Of the other one storage has not all, and a peer
    has not all right.
    """
    with stored(tmp_path / "store", 1, window=2, proxied=True) as (net, job):
        here, peer = lose_first(net, job)
        net.path(here, peer).delay_s = 0.02  # storage is asked first
        (replica,) = peer.replicas(0)
        quarantine(replica, 0)
        newest = written(job, 1)
        first, *_, last = [tensor.name for tensor in ImageView(memoryview(newest.image))]
        flip_tensor([replica], 1, first)
        path, at = place_of(tmp_path / "store", newest, last)
        path.write_bytes(path.read_bytes()[:at])
        assert job.resume() == 1
        assert here.saw("fetch_damaged", "iteration 1: storage cannot deliver all of it")
        text = f"iteration 1: 1 tensor of {peer.name}'s copy does not match; taken from storage"
        assert here.saw("fetch_repaired", text)


def quarantine(path: Path, iteration: int) -> None:
    """As a scrub does that finds damage."""
    segment = open_segment(path)
    for index, header in segment.headers():
        if header.iteration == iteration:
            set_slot_state(segment.buffer, segment.geometry, index, SlotState.QUARANTINED)
    segment.close()
