"""The coordinator with members over real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.host.coordinator import Coordinator
from ckptd.host.host_links import Link, LinkError, connect
from ckptd.host.host_options import HostOptions, options_from
from ckptd.host.zygote_link import StoreServer


def options(world_size: int = 3, **more: str) -> HostOptions:
    environ = {"RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), **more}
    return options_from(["--max-restarts", "2", "train.py"], environ)


class Job:
    """Rank 0's coordinator, and connections as other hosts have them."""

    def __init__(self, folder: Path, given: HostOptions) -> None:
        self.folder, self.options = folder, given
        self.obeyed: list[dict[str, Any]] = []
        self.coordinator = Coordinator(given, folder, self.obeyed.append)
        self.here: dict[int, Link] = {}  # the coordinator's ends
        self.there: dict[int, Link] = {}
        self.opened: list[Link] = []

    def join(self, rank: int, **hello: object) -> bool:
        link = connect(self.folder, f"{self.options.job}.sock")
        assert link is not None
        self.there[rank] = link
        self.opened.append(link)
        ours = self.coordinator.admit()
        assert ours is not None
        self.here[rank] = ours
        link.send({"rank": rank, "world_size": self.options.world_size, **hello})
        return self.coordinator.hear(ours)

    def tell(self, rank: int, told: str, epoch: int = 0) -> bool:
        self.there[rank].send({"told": told, "epoch": epoch, "why": "SIGKILL"})
        return self.coordinator.hear(self.here[rank])

    def close(self) -> None:
        self.coordinator.close()
        for link in self.opened:
            link.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, options())
    yield made
    made.close()


def test_all_hosts_hear_of_a_failure(job: Job) -> None:
    job.join(1)
    job.join(2)
    job.tell(1, "failed")
    order = {"order": "begin", "epoch": 1, "port": 0, "served": False, "because": "rank 1: SIGKILL"}
    assert job.obeyed == [order]
    assert job.there[1].receive() == job.there[2].receive() == [order]


def test_a_host_that_joins_late_hears_of_the_epoch(job: Job) -> None:
    job.coordinator.report(0, {"told": "failed", "epoch": 0, "why": "exit code 1"})
    job.join(2)
    assert [m["epoch"] for m in job.there[2].receive()] == [1]


def test_all_are_released_together(job: Job) -> None:
    job.join(1)
    job.join(2)
    job.tell(2, "completed")
    job.coordinator.report(0, {"told": "completed", "epoch": 0})
    assert job.obeyed == []
    job.tell(1, "completed")
    assert job.obeyed == [{"order": "release"}] == job.there[1].receive()


def test_a_host_that_is_killed_leaves_the_others_to_the_launcher(job: Job) -> None:
    job.join(1)
    job.join(2)
    job.there[1].close()
    assert not job.coordinator.hear(job.here[1])
    (order,) = job.there[2].receive()
    assert order["order"] == "abandon"
    assert "host of rank 1 has gone" in order["because"]


def test_a_connection_that_says_nothing_of_use_harms_nobody(job: Job) -> None:
    job.join(1)
    assert not job.join(7)
    assert not job.join(0)
    assert not job.join(2, world_size=8)
    assert not job.join(2, world_size="x")
    assert not job.join(1), "rank 1 has a host already"
    assert job.obeyed == []


def test_a_member_that_talks_nonsense_counts_as_gone(job: Job) -> None:
    job.join(1)
    job.there[1].send({"what": 1})
    assert not job.coordinator.hear(job.here[1])
    assert job.obeyed[-1]["order"] == "abandon"
    with pytest.raises(LinkError):
        job.there[1].receive()


def test_an_epoch_waits_for_its_store(tmp_path: Path) -> None:
    obeyed: list[dict[str, Any]] = []
    coordinator = Coordinator(options(1, MASTER_PORT="29500"), tmp_path, obeyed.append)
    ours, theirs = socket.socketpair()
    with theirs:
        assert coordinator.needs_server
        coordinator.report(0, {"told": "failed", "epoch": 0, "why": "SIGKILL"})
        assert obeyed == []
        coordinator.use_server(StoreServer(ours))
        theirs.send(b"1234\n")
        assert coordinator.hear_stores()
        assert (obeyed[0]["port"], obeyed[0]["served"]) == (1234, True)
        theirs.send(b"1235\n")  # the spare one for the next epoch, which it has asked for
        assert coordinator.hear_stores()
        coordinator.report(0, {"told": "failed", "epoch": 1, "why": "SIGKILL"})
        assert obeyed[1]["port"] == 1235
        theirs.close()
        assert not coordinator.hear_stores()
        assert coordinator.needs_server
    coordinator.close()


def test_without_a_server_the_trainer_of_rank_0_makes_the_store(tmp_path: Path) -> None:
    obeyed: list[dict[str, Any]] = []
    coordinator = Coordinator(options(1, MASTER_PORT="29500"), tmp_path, obeyed.append)
    coordinator.report(0, {"told": "failed", "epoch": 0, "why": "SIGKILL"})
    coordinator.use_server(None)
    assert not obeyed[0]["served"]
    with socket.create_server(("", obeyed[0]["port"])):
        pass
    coordinator.close()
