"""The coordinator with members over real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from ckptd.host.coordinator import Coordinator
from ckptd.host.host_links import Link, LinkError, connect
from ckptd.host.host_loop import HostLoop
from ckptd.host.host_options import HostOptions, options_from
from ckptd.host.zygotes.zygote_link import StoreServer, ZygoteLink


def options(world_size: int = 3, **more: str) -> HostOptions:
    environ = {"RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), **more}
    return options_from(["--max-restarts", "9", "train.py"], environ)


class Job:
    """Rank 0's coordinator, and connections as other hosts have them."""

    def __init__(self, folder: Path, given: HostOptions) -> None:
        self.folder, self.options = folder, given
        self.obeyed: list[dict[str, Any]] = []
        self.start = ""
        self.loop = HostLoop()
        self.coordinator = Coordinator(given, folder, self.loop, self.obey)
        self.coordinator.begin()
        self.there: dict[int, Link] = {}
        self.opened: list[Link] = []

    def obey(self, message: dict[str, Any]) -> None:
        if message["order"] == "start":
            self.start = message["start"]
        else:
            self.obeyed.append(message)

    def connect(self) -> Link:
        link = connect(self.folder, f"{self.options.job}.sock")
        assert link is not None
        self.opened.append(link)
        return link

    def join(self, rank: int, **hello: object) -> bool:
        """Returns whether it was let in."""
        link = self.connect()
        link.send({"rank": rank, "world_size": self.options.world_size, **hello})
        try:
            assert self.heard(link)[0] == {"order": "welcome", "start": self.start}
        except LinkError:
            return False
        self.there[rank] = link
        return True

    def heard(self, link: Link) -> list[dict[str, Any]]:
        """The next message; and let the coordinator work meanwhile."""
        self.loop.after(60, self.fail)
        while not (messages := link.receive()):
            self.loop.after(0.02, nothing)
            self.loop.turn()
        return messages

    def orders(self, rank: int) -> list[dict[str, Any]]:
        return self.heard(self.there[rank])

    def fail(self) -> None:
        raise AssertionError("nothing was heard")

    def obeys(self) -> dict[str, Any]:
        """The first order that this host gets, or has got."""
        self.loop.after(60, self.fail)
        while not self.obeyed:
            self.loop.turn()
        return self.obeyed[0]

    def tell(self, rank: int, what: str, epoch: int = 0) -> None:
        self.there[rank].send({"told": what, "epoch": epoch, "why": "SIGKILL"})

    def close(self) -> None:
        self.coordinator.close()
        for link in self.opened:
            link.close()
        self.loop.close()


def nothing() -> None:
    """The loop looks at its sockets again."""


class Zygote:
    """Stands for one that is ready; its server of stores is this test."""

    ready = True

    def __init__(self) -> None:
        self.asked: list[socket.socket] = []

    def fork_store(self) -> StoreServer:
        ours, theirs = socket.socketpair()
        self.asked.append(theirs)
        return StoreServer(ours)

    @property
    def link(self) -> ZygoteLink:
        return cast(ZygoteLink, self)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, options())
    yield made
    made.close()


def test_all_hosts_hear_of_a_failure(job: Job) -> None:
    job.join(1)
    job.join(2)
    job.tell(1, "failed")
    because = "rank 1: SIGKILL"
    order = {
        "order": "begin",
        "epoch": 1,
        "address": "",
        "port": 0,
        "served": False,
        "because": because,
        "staying": True,
        "patience": 1,
        "absent": [],
        "at_boundary": False,
        "without": [],
        "without_nodes": [],
    }
    assert job.orders(1) == job.orders(2) == [order]
    assert job.obeyed == [order]


def test_a_job_that_reroutes_goes_on_without_a_rank_until_that_is_back(tmp_path: Path) -> None:
    """Only the rank of a lost host is lost, also if all are on one node; another host may take its place."""
    job = Job(tmp_path, replace(options(), reroute=True))
    try:
        job.join(1, node=0)
        job.join(2, node=0)
        job.tell(2, "failed")
        (order,) = job.orders(1)
        assert (order["epoch"], order["absent"], order["at_boundary"]) == (1, [2], False)
        job.opened[1].close()
        job.there.pop(2)
        while not job.join(2, node=0):
            pass  # the coordinator has not seen yet that the first one is gone
        job.there[2].send({"told": "said", "word": "ready", "epoch": 1, "why": ""})
        order = job.orders(1)[0]
        assert (order["epoch"], order["absent"], order["at_boundary"]) == (2, [], True)
        for rank in (1, 2):
            job.there[rank].send({"told": "said", "word": "finished", "epoch": 2, "why": ""})
        job.coordinator.tell({"told": "said", "word": "finished", "epoch": 2, "why": ""})
        assert job.orders(1) == [{"order": "end_loops", "absent": []}]
    finally:
        job.close()


def test_a_host_that_joins_late_hears_of_the_epoch(job: Job) -> None:
    job.coordinator.tell({"told": "failed", "epoch": 0, "why": "exit code 1"})
    link = job.connect()
    link.send({"rank": 2, "world_size": 3})
    heard = job.heard(link)
    while len(heard) < 2:
        heard += job.heard(link)
    assert [m["order"] for m in heard] == ["welcome", "begin"]


def test_all_are_released_together(job: Job) -> None:
    job.join(1)
    job.join(2)
    job.tell(2, "completed")
    job.coordinator.tell({"told": "completed", "epoch": 0})
    job.tell(1, "completed")
    assert job.obeys() == {"order": "release"}
    assert job.orders(1) == job.orders(2) == [{"order": "release"}]
    job.there[1].close()  # as is right then
    job.join(1)
    assert job.obeyed == [{"order": "release"}]


def test_the_loss_of_a_host_ends_the_job(job: Job) -> None:
    job.join(1)
    job.join(2)
    job.there[1].close()
    (order,) = job.orders(2)
    assert order["order"] == "stop"
    assert "host of rank 1 is lost" in order["because"]
    assert job.obeyed == [order]


def test_a_host_that_leaves_lets_the_others_end_as_they_do(job: Job) -> None:
    """It got a signal: all may be about to end by themselves."""
    job.join(1)
    job.join(2)
    job.tell(1, "leaving")
    job.there[1].close()
    (order,) = job.orders(2)
    assert order["order"] == "abandon"
    job.join(1)
    assert job.obeyed == [order]


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[Job]:
    """Five ranks, one on the first node and two on each other; two can go on."""
    made = Job(tmp_path, options(5, CKPTD_HOST_MIN_RANKS="2", GROUP_RANK="0"))
    for rank, node in zip((1, 2, 3, 4), (1, 1, 2, 2), strict=True):
        assert made.join(rank, node=node)
    yield made
    made.close()


def test_an_elastic_job_goes_on_without_a_lost_node(elastic: Job) -> None:
    """And without its other ranks, which may not know yet."""
    elastic.there[1].close()
    (order,) = elastic.orders(3)
    assert (order["order"], order["epoch"]) == ("begin", 1)
    assert (order["without"], order["without_nodes"]) == ([1, 2], [1])
    assert "host of rank 1 is lost" in order["because"]
    assert elastic.orders(2) == elastic.orders(4) == elastic.obeyed == [order]
    elastic.there[2].close()
    assert not elastic.join(1, node=1), "it belongs to the job no longer"
    elastic.tell(4, "failed", epoch=1)
    (order,) = elastic.orders(4)
    assert order["because"] == "rank 2: SIGKILL", "which it is now"
    assert order["without"] == [1, 2]


def test_an_elastic_job_goes_on_without_hosts_that_leave(
    elastic: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may all be told to end, so it waits for more that leave; what fails meanwhile is a consequence."""
    monkeypatch.setattr("ckptd.host.coordinator._DEPART_S", 0.1)
    elastic.tell(4, "leaving")
    elastic.tell(1, "failed")
    elastic.there[4].close()
    (order,) = elastic.orders(1)
    assert (order["order"], order["without"], order["because"]) == ("begin", [3, 4], "rank 4: SIGKILL")


def test_when_all_hosts_leave_an_elastic_job_it_is_the_launchers(elastic: Job) -> None:
    elastic.tell(4, "leaving")
    elastic.tell(2, "leaving")
    (order,) = elastic.orders(3)
    assert order["order"] == "abandon"


def test_who_hangs_is_named_by_the_rank_that_it_is_now(elastic: Job) -> None:
    elastic.there[1].close()
    for rank in (3, 4):
        elastic.orders(rank)
    at = {"step": 7, "stage": 2, "state": "in_step"}
    elastic.there[4].send({"told": "overdue", "epoch": 1, **at, "idle_s": 12.0, "deadline_s": 10.0})
    assert elastic.orders(3) == [{"order": "report", "inquiry": 1}]
    elastic.coordinator.tell(position("in_step"))
    tells_where(elastic, 3, "stopped")
    tells_where(elastic, 4, "in_step")
    (order,) = elastic.orders(3)
    assert "step 7 of rank 2 has not gone on" in order["because"]
    assert "rank 1 is stopped by a signal" in order["because"]


def test_a_connection_that_says_nothing_of_use_harms_nobody(job: Job) -> None:
    job.join(1)
    assert not job.join(7)
    assert not job.join(0)
    assert not job.join(2, world_size=8)
    assert not job.join(2, world_size="x")
    assert not job.join(2, world_size=float("inf"))  # of which int() raises an OverflowError, fuzzing found
    assert not job.join(1), "rank 1 has a host already"
    job.connect()  # and says nothing
    assert job.join(2)
    assert job.obeyed == []


@pytest.mark.parametrize("nonsense", [{"what": 1}, {"told": "completed", "epoch": float("inf")}])
def test_a_member_that_talks_nonsense_counts_as_lost(job: Job, nonsense: dict[str, Any]) -> None:
    job.join(1)
    job.there[1].send(nonsense)
    assert job.obeys()["order"] == "stop"
    with pytest.raises(LinkError):
        job.orders(1)


def test_an_epoch_waits_for_its_store(tmp_path: Path) -> None:
    job = Job(tmp_path, options(1, MASTER_PORT="29500"))
    zygote = Zygote()
    job.coordinator.tell({"told": "failed", "epoch": 0, "why": "SIGKILL"})
    assert job.obeyed == []
    job.coordinator.use(zygote.link)
    (server,) = zygote.asked
    server.send(b"1234\n")
    order = job.obeys()
    assert (order["port"], order["served"]) == (1234, True)
    job.obeyed.clear()
    server.send(b"1235\n")  # the spare one for the next epoch, which it has asked for
    job.loop.turn()
    job.coordinator.tell({"told": "failed", "epoch": 1, "why": "SIGKILL"})
    assert job.obeys()["port"] == 1235
    job.obeyed.clear()
    server.close()
    job.loop.turn()
    assert len(zygote.asked) == 2, "the next server"
    zygote.asked[1].send(b"1236\n")
    order = job.obeys()
    assert (order["epoch"], order["port"], order["because"]) == (3, 1236, "the server of stores has ended")
    zygote.asked[1].close()
    zygote.ready = False
    job.loop.turn()
    assert len(zygote.asked) == 2, "it is asked when it is ready"
    job.coordinator.use(zygote.link)
    assert len(zygote.asked) == 3
    zygote.asked[2].close()
    job.close()


def test_without_a_server_the_trainer_of_rank_0_makes_the_store(tmp_path: Path) -> None:
    job = Job(tmp_path, options(1, MASTER_PORT="29500"))
    job.coordinator.tell({"told": "failed", "epoch": 0, "why": "SIGKILL"})
    job.coordinator.use(None)
    order = job.obeys()
    assert not order["served"]
    with socket.create_server(("", order["port"])):
        pass
    job.close()


def overdue(job: Job, rank: int, step: int = 7) -> None:
    """That host says so."""
    link = job.there[rank]
    at = {"step": step, "stage": 2, "state": "in_step"}
    link.send({"told": "overdue", "epoch": 0, **at, "idle_s": 12.0, "deadline_s": 10.0})


def tells_where(job: Job, rank: int, state: str, step: int = 7, inquiry: int = 1) -> None:
    job.there[rank].send({"told": "position", "inquiry": inquiry, "step": step, "stage": 2, "state": state})


def ask_all(job: Job) -> None:
    """All have joined, one says that its step is overdue, and all are asked where they are."""
    job.join(1)
    job.join(2)
    overdue(job, 1)
    asked = {"order": "report", "inquiry": 1}
    assert job.orders(1) == job.orders(2) == [asked]
    assert job.obeyed == [asked]


def position(state: str, inquiry: int = 1) -> dict[str, object]:
    return {"told": "position", "inquiry": inquiry, "step": 7, "stage": 2, "state": state}


def test_a_step_that_does_not_end_begins_an_epoch_and_who_hangs_is_named(job: Job) -> None:
    ask_all(job)
    job.coordinator.tell(position("in_step"))
    tells_where(job, 2, "stopped")
    tells_where(job, 1, "in_step")
    (order,) = job.orders(1)
    assert (order["order"], order["epoch"]) == ("begin", 1)
    assert order["because"] == (
        "step 7 of rank 1 has not gone on for 12.0 s (deadline 10.0 s): rank 2 is stopped by a signal"
    )
    assert job.orders(2) == [order]


def test_a_trainer_that_is_debugged_is_left_alone(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    ask_all(job)
    job.coordinator.tell(position("traced"))
    tells_where(job, 1, "in_step")
    with caplog.at_level("INFO"):
        tells_where(job, 2, "in_step")
        overdue(job, 2)  # as long again after its last report
        assert job.orders(1) == [{"order": "report", "inquiry": 2}]
    assert "step 7 does not count as hanging: rank 0 is held by a debugger" in caplog.text
    tells_where(job, 1, "in_step", inquiry=1)  # late, and of no interest
    job.coordinator.tell(position("in_step", inquiry=2))
    tells_where(job, 1, "in_step", inquiry=2)
    assert job.orders(2) == [{"order": "report", "inquiry": 2}]
    tells_where(job, 2, "in_step", inquiry=2)
    (order,) = job.orders(2)
    assert order["epoch"] == 1


def test_a_step_that_ends_meanwhile_does_not_hang(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """It was overdue, and came to its end while the hosts were asked."""
    ask_all(job)
    job.coordinator.tell(position("in_step"))
    tells_where(job, 2, "in_step")
    with caplog.at_level("INFO"):
        tells_where(job, 1, "in_step", step=8)
        overdue(job, 2)
        assert job.orders(1) == [{"order": "report", "inquiry": 2}], "and no epoch has begun"
    assert "step 7 does not count as hanging: rank 1 has gone on" in caplog.text


def test_a_host_that_does_not_answer_is_lost(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, say: it would not begin the next epoch either."""
    monkeypatch.setattr("ckptd.host.hangs.job_hangs._ANSWERS_S", 0.1)
    ask_all(job)
    job.coordinator.tell(position("in_step"))
    tells_where(job, 1, "in_step")
    (order,) = job.orders(1)
    assert order["order"] == "stop"
    assert "rank 2 is not answered for by a host" in order["because"]


def test_what_is_overdue_in_an_epoch_that_is_over_is_no_news(job: Job) -> None:
    job.join(1)
    job.join(2)
    job.tell(1, "failed")
    assert job.orders(1)[0]["epoch"] == 1
    overdue(job, 1)
    job.tell(1, "failed", epoch=1)
    heard = job.orders(1)
    assert [order["order"] for order in heard] == ["begin"]
    assert heard[0]["epoch"] == 2
