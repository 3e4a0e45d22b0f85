"""A node that is late when its job starts again: nothing is forgotten meanwhile, and all of it is
there afterwards.
"""

from __future__ import annotations

import pytest

from ckptd.errors import DaemonUnavailable
from ckptd.peers.run_records import decode_record
from tests.ckptd.nodes import Net
from tests.ckptd.peers_harness import Job
from tests.ckptd.running import eventually

pytestmark = pytest.mark.timeout(90)


def test_the_only_holder_is_late() -> None:
    """Rank 1 lived on node 1, without replicas; its job starts again on node 2 while node 1 still boots."""
    with Net(3, peer_deadline_s="2").up() as net:
        first, late, spare = net.nodes
        job = Job(net, [first, late], replicas=0)
        job.start()
        job.record(0)
        job.record(1)
        job.end()
        late.kill()
        eventually(lambda: first.saw("peer_lost", late.name), "it is missed")
        again = Job(net, [first, spare], replicas=0)
        again.written = job.written
        again.attach()
        with pytest.raises(DaemonUnavailable, match=f"node {late.name} took part in the run before"):
            again.recover()
        again.end()
        assert again.check_all() == 0, "no replicas; what is there is as it was"
        late.launch()
        eventually(lambda: first.saw("peer_back", late.name), "it is back")
        assert again.resume() == 1
        assert f"from {late.name}" in spare.events("fetched")[0].message
        again.end()
        assert not any(node.saw("starting_over") for node in net.nodes)


def test_the_only_holder_is_late_and_the_daemon_that_knew_of_it_was_restarted() -> None:
    """Rank 1 lived on node 1, whose daemon was killed; node 0 came through a restart of its daemon,
    too, before the job started again.

    Who took part was in the memory of the daemons alone: nobody counted as missing, every
    generation was dropped, a new epoch began, and what the late node held was of an abandoned
    history. Now the restarted daemon knows whom to wait for.
    """
    with Net(3, peer_deadline_s="2").up() as net:
        first, late, spare = net.nodes
        job = Job(net, [first, late], replicas=0, window=2)
        job.start()
        job.record(0, 1, 2)
        job.end()
        late.kill()
        first.kill()
        first.launch()
        again = Job(net, [first, spare], replicas=0, window=2)
        again.written = job.written
        for _ in range(2):  # whoever starts it again and again meanwhile loses nothing either
            again.attach()
            with pytest.raises(DaemonUnavailable) as refused:
                again.recover()
            again.end()
            told = str(refused.value)
            assert "no node holds a snapshot of rank 1" in told
            assert f"of rank 0 there are iterations 1 to 2 on node {first.name}" in told
            assert f"node {late.name} took part in the run before and did not answer" in told
            assert f"`ckptctl forget job run` on node {first.name}," in told
            again.check_all()
        late.launch()
        assert again.resume() == 2
        again.end()
        assert not any(node.saw("starting_over") for node in net.nodes)


def test_after_a_recovery_without_it_a_late_node_is_still_waited_for() -> None:
    """Node 2 held replicas of the job's first life and was away when the job came back from the
    others; then these lost everything before the second life had a floor of its own. What node 2
    holds is all that is left, and it is not forgotten.
    """
    with Net(3, peer_deadline_s="1").up() as net:
        first, second, holder = net.nodes
        job = Job(net, [first, second, holder], replicas=2)
        job.start()
        job.record(0, 1)
        job.await_replicas(1, 2)
        job.end()
        holder.kill()
        smaller = Job(net, [first, second, first], replicas=1)
        smaller.written = job.written
        assert smaller.resume() == 1
        smaller.end()
        second.lose()
        first.kill()
        for path in first.files():
            path.unlink()  # as if its memory had been taken, but not what it knows
        first.launch()
        second.launch()
        again = Job(net, [first, second, first], replicas=1)
        again.written = job.written
        again.attach()
        with pytest.raises(DaemonUnavailable, match=f"node {holder.name} took part in the run"):
            again.recover()
        again.end()
        holder.launch()
        assert again.resume() == 1
        again.end()


def test_a_run_that_was_forgotten_by_command_begins_anew_and_a_late_node_does_not_bring_it_back() -> None:
    """The operator gives the late node up. What it holds is older than whatever begins now, and
    must not win over it.
    """
    with Net(3, peer_deadline_s="2").up() as net:
        first, late, spare = net.nodes
        job = Job(net, [first, late], replicas=0)
        job.start()
        job.record(0, 1)
        job.end()
        late.kill()
        again = Job(net, [first, spare], replicas=0)
        again.attach()
        with pytest.raises(DaemonUnavailable):
            again.recover()
        again.end()
        done = first.ctl("forget", "job", "run", "--yes")
        assert "forgot the members of the run" in done.stdout
        again.start()
        again.record(0)
        again.end()
        first.kill()  # nor does a restart bring back what was forgotten
        first.launch()
        late.launch()
        third = Job(net, [first, late], replicas=0)
        third.written = again.written
        assert third.resume() == 0, "the history that began anew, not iteration 1 of the old one"
        third.end()


def test_a_damaged_record_means_that_nobody_knows_not_that_nobody_takes_part() -> None:
    with Net(2, peer_deadline_s="2").up() as net:
        first, second = net.nodes
        job = Job(net, [first, second], replicas=0)
        job.start()
        job.record(0, 1)
        job.end()
        second.kill()
        first.kill()
        (record,) = first.segment_dir.glob("*.run")
        data = bytearray(record.read_bytes())
        data[40] ^= 1
        record.write_bytes(data)
        for path in first.files():
            path.unlink()
        first.launch()
        assert first.saw("bad_run_record", "who took part in this run is not known here")
        again = Job(net, [first, first], replicas=0)
        again.attach()
        with pytest.raises(DaemonUnavailable, match=f"damaged on node {first.name}"):
            again.recover()
        again.end()
        assert (first.segment_dir / f"{record.name}.bad").exists()
        first.ctl("forget", "job", "run", "--yes")
        assert not list(first.segment_dir.glob("*.run*"))
        again.start()
        again.end()


def test_a_late_node_hears_of_a_new_speaker_from_a_member_that_both_know() -> None:
    """Node 2 was away when node 1 went on with node 0, and each of nodes 0 and 2 had never heard of
    the other. Node 0 is the one that tells who takes part, so that node 2 was told nothing of the
    new epoch for as long as node 1 lived, and would have refused node 0.
    """
    with Net(3, peer_deadline_s="2").up() as net:
        speaker, member, late = net.nodes
        assert speaker.name < member.name
        job = Job(net, [member, late], replicas=1)
        job.start()
        job.record(0, 1)
        job.await_replicas(1, 1)
        job.end()
        late.kill()
        second = Job(net, [speaker, member], replicas=1)
        second.written = job.written
        assert second.resume() == 1
        late.launch()
        path = late.segment_dir / "job~run.run"
        eventually(
            lambda: speaker.name in {m.card.node for m in decode_record(path.read_bytes()).members},
            "the late node knows who takes part now",
            timeout_s=60,
        )
        second.end()
