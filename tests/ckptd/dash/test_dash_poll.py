"""What is asked of real daemons: the whole job, events over a restart, and a daemon that stops answering."""

from __future__ import annotations

import pytest

from ckptd.dash.dash_poll import DaemonPoll
from ckptd.transport import messages as m
from ckptd.transport.wire import RequestTimeout
from tests.ckptd.nodes import Net
from tests.ckptd.peers_harness import Job
from tests.ckptd.running import attach, eventually, running_daemon

pytestmark = pytest.mark.timeout(120)


def test_the_whole_job_is_seen_from_one_node() -> None:
    """Node n0 has rank 0, and hosts no replica of some other rank."""
    with Net(3).up() as net:
        job = Job(net, net.nodes, window=2, replicas=1)
        job.start()
        job.record(0, 1, 2)
        job.await_replicas(2, 1)
        with net[0].client() as client:
            here = DaemonPoll(client).view().runs[0]
            assert len(here.columns.ranks) < 3
            whole = DaemonPoll(client, whole_job=True).view().runs[0]
        assert whole.columns.ranks == (0, 1, 2)
        assert whole.columns.grades[:2] == ("+++", "+++")
        assert {rank.rank: rank.node for rank in whole.details} == {0: "n0", 1: "n1", 2: "n2"}
        assert {rank.rank: rank.tiers[0].iteration for rank in whole.details} == {0: 2, 1: 2, 2: 2}
        net[2].lose()

        def lost() -> bool:
            with net[0].client() as again:
                run = DaemonPoll(again, whole_job=True).view().runs[0]
            return run.columns.grades[0][2:] == "?" and run.columns.grades[1][2:] == "+"

        eventually(lost, "rank 2 has only its replica")
        job.end()


def test_events_go_on_after_a_restart_of_the_daemon() -> None:
    with running_daemon() as daemon, daemon.client() as client:
        poll = DaemonPoll(client)
        with daemon.client() as trainer:
            attach(trainer)
            trainer.send(m.Notice("info", "hello", "one"))
            eventually(lambda: poll.view().events[-1].message == "one", "the notice")
        before = poll.view().events[-1].seq
        daemon.kill()
        daemon.start()
        eventually(lambda: poll.view().events[-1].seq < before, "events of the next daemon")
        assert [event.kind for event in poll.view().events].count("started") == 2


def test_the_first_answer_must_come_and_later_ones_may_be_late() -> None:
    with running_daemon() as daemon, daemon.client() as client:
        client.timeout_s = 0.5
        poll = DaemonPoll(client)
        first = poll.view()
        daemon.kill()
        later = poll.view()
        assert (later.error != "", later.at_s) == (True, first.at_s)
        with pytest.raises(RequestTimeout):
            DaemonPoll(client).view()
