"""Hosts of several machines find their coordinator, in one loop, over real TCP; the job's store is a dict."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptd.host import coordinator as coordinator_module
from ckptd.host import member as member_module
from ckptd.host.coordinator import Coordinator
from ckptd.host.host_links import LinkError
from ckptd.host.host_loop import HostLoop
from ckptd.host.host_options import HostOptions, options_from
from ckptd.host.member import JobMember
from ckptd.host.remote_links import RemoteLink

WORLD_SIZE = 3


def options(rank: int) -> HostOptions:
    environ = {
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    return options_from(["--max-restarts", "2", "train.py"], environ)


class Machines:
    """Hosts of several machines, and the store of their job.

    Attributes:
        store: its keys; a reader of a key that is not there waits.
        obeyed: orders, by rank.
        starts: of the job, as ranks know it, each time that it is told.
    """

    ready = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.loop = folder, HostLoop()
        self.store: dict[str, str] = {}
        self.obeyed: list[list[dict[str, Any]]] = [[] for _ in range(WORLD_SIZE)]
        self.starts: list[str] = []
        self.readers: list[tuple[str, socket.socket]] = []
        self.opened: list[socket.socket] = []
        self.hosts: dict[int, Coordinator | JobMember] = {}

    def start(self, rank: int) -> None:
        kind = JobMember if rank else Coordinator
        host = self.hosts[rank] = kind(options(rank), self.folder, self.loop, partial(self.obey, rank))
        host.begin()
        as_zygote: Any = self
        host.use(as_zygote)

    def obey(self, rank: int, message: dict[str, Any]) -> None:
        if message["order"] == "start":
            self.starts.append(message["start"])
        else:
            self.obeyed[rank].append(message)

    def start_all(self) -> None:
        for rank in range(WORLD_SIZE):
            self.start(rank)
        self.until(lambda: self.joined == {1, 2}, "all have joined")

    @property
    def joined(self) -> set[int]:
        coordinator: Any = self.hosts[0]
        return set(coordinator._members.values())

    def fork_store(self) -> Any:
        """A server of stores that never answers: orders to begin wait."""
        from ckptd.host.zygotes.zygote_link import StoreServer

        ours, theirs = socket.socketpair()
        self.opened.append(theirs)
        return StoreServer(ours)

    def fork_errand(self, channel: int) -> None:
        """As the child of a zygote would, with this store."""
        end = socket.socket(fileno=os.dup(channel))
        self.opened.append(end)
        self.loop.watch(end, lambda: self.serve(end))

    def serve(self, end: socket.socket) -> None:
        self.loop.forget(end)
        request = json.loads(end.recv(1 << 16))
        if "value" in request:
            self.store[request["key"]] = request["value"]
        self.readers.append((request["key"], end))
        for key, reader in [each for each in self.readers if each[0] in self.store]:
            self.readers.remove((key, reader))
            reader.send(json.dumps({"value": self.store[key]}).encode() + b"\n")

    @property
    def place(self) -> dict[str, Any]:
        """What was published."""
        self.until(lambda: self.store, "the place in the store")
        (value,) = self.store.values()
        place: dict[str, Any] = json.loads(value)
        return place

    def connect(self) -> socket.socket:
        """Somebody connects to the coordinator."""
        connection = socket.create_connection(("127.0.0.1", self.place["port"]))
        self.opened.append(connection)
        return connection

    def until(self, condition: Callable[[], object], what: str) -> None:
        self.loop.after(60, fail)
        while not condition():
            self.loop.after(0.02, nothing)
            self.loop.turn()

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        for each in self.opened:
            each.close()
        self.loop.close()


def fail() -> None:
    raise AssertionError("not within 60 s")


def nothing() -> None:
    """The loop looks again."""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    made.close()


def test_all_hosts_hear_of_an_order(machines: Machines) -> None:
    machines.start_all()
    machines.hosts[2].tell({"told": "leaving", "why": "SIGTERM"})
    machines.until(lambda: all(machines.obeyed), "an order")
    assert [orders[0]["order"] for orders in machines.obeyed] == ["abandon"] * 3


def test_all_hosts_know_which_start_of_the_job_this_is(machines: Machines, tmp_path: Path) -> None:
    """Whatever each launcher has counted, and whatever the job's store has of earlier starts."""
    machines.start_all()
    machines.until(lambda: len(machines.starts) == WORLD_SIZE, "the start")
    (start,) = {*machines.starts}
    later: list[dict[str, Any]] = []
    coordinator = Coordinator(options(0), tmp_path, machines.loop, later.append)
    coordinator.begin()
    coordinator.close()
    assert start
    assert later[0]["start"] not in ("", start)


def test_what_happened_before_joining_is_told_afterwards(machines: Machines) -> None:
    machines.start(1)
    machines.hosts[1].tell({"told": "leaving", "why": "its host got SIGTERM"})
    machines.start(2)
    machines.start(0)
    machines.until(lambda: all(machines.obeyed), "an order")
    assert {orders[0]["because"] for orders in machines.obeyed} == {"rank 1: its host got SIGTERM"}


def test_all_are_released_together(machines: Machines) -> None:
    machines.start_all()
    for rank in (1, 0, 2):
        machines.hosts[rank].tell({"told": "completed", "epoch": 0, "why": "exit code 0"})
    machines.until(lambda: all(machines.obeyed), "an order")
    assert machines.obeyed == [[{"order": "release"}]] * 3


def test_the_loss_of_any_host_ends_the_others(machines: Machines) -> None:
    machines.start_all()
    machines.hosts[1].close()
    machines.until(lambda: machines.obeyed[0] and machines.obeyed[2], "an order")
    assert [machines.obeyed[rank][0]["order"] for rank in (0, 2)] == ["stop"] * 2
    assert "host of rank 1 is lost" in machines.obeyed[2][0]["because"]


def test_the_loss_of_the_coordinator_ends_the_others(machines: Machines) -> None:
    machines.start_all()
    machines.hosts[0].close()
    machines.until(lambda: machines.obeyed[1] and machines.obeyed[2], "an order")
    for rank in (1, 2):
        (order,) = machines.obeyed[rank]
        assert order["order"] == "stop"
        assert "host of rank 0 is lost" in order["because"]


@pytest.mark.parametrize("end", ["failed", "completed"])
def test_an_end_before_all_have_joined_is_the_launchers(machines: Machines, end: str) -> None:
    """The store in which the last one would look may have been that trainer's."""
    machines.start(0)
    machines.start(1)
    machines.until(lambda: machines.joined == {1}, "one has joined")
    machines.hosts[0].tell({"told": end, "epoch": 0, "why": "exit code 1"})
    machines.until(lambda: machines.obeyed[1], "an order")
    assert machines.obeyed[0][0]["order"] == machines.obeyed[1][0]["order"] == "abandon"
    assert "before all hosts had joined" in machines.obeyed[1][0]["because"]


@pytest.mark.parametrize("end", ["failed", "completed"])
def test_an_end_before_this_host_has_joined_is_the_launchers(machines: Machines, end: str) -> None:
    machines.start(1)
    machines.hosts[1].tell({"told": end, "epoch": 0, "why": "exit code 1"})
    assert [order["order"] for order in machines.obeyed[1]] == ["abandon"]


def test_what_an_earlier_start_has_left_in_the_store_is_not_used(machines: Machines, tmp_path: Path) -> None:
    """Its coordinator is gone, so nobody listens; and of one that lives, but is over, hosts are turned away."""
    machines.start(1)
    machines.start(0)
    machines.until(lambda: machines.joined == {1}, "one has joined")
    stale, old = dict(machines.store), machines.hosts[0]
    old.tell({"told": "leaving", "why": "SIGTERM"})  # it is over, and still lives
    machines.until(lambda: machines.obeyed[1], "an order")
    machines.hosts[1].close()
    new = Machines(tmp_path)
    new.loop.close()
    new.loop, new.store = machines.loop, stale
    new.start(1)
    new.start(2)
    new.until(lambda: not new.readers, "the old place is read")
    old.close()
    new.start(0)
    new.until(lambda: new.joined == {1, 2}, "the new coordinator is found")
    assert new.obeyed == [[], [], []]
    for host in new.hosts.values():
        host.close()
    for each in new.opened:
        each.close()


@pytest.mark.parametrize(
    "place", ["", "null", "[]", '{"address": "127.0.0.1"}', '{"token": "x"}', '{"token": 1}']
)
def test_what_is_no_place_is_read_again(place: str, machines: Machines) -> None:
    machines.start(0)
    machines.start(2)
    right = machines.place
    (key,) = machines.store
    machines.store[key] = place
    machines.start(1)
    machines.until(lambda: not machines.readers, "it is read")
    machines.store[key] = json.dumps(right)
    machines.until(lambda: machines.joined == {1, 2}, "all have joined")


def test_who_does_not_know_the_token_is_turned_away_and_harms_nobody(machines: Machines) -> None:
    machines.start(0)
    stranger = RemoteLink(machines.connect(), os.urandom(32), connects=True)
    with pytest.raises(LinkError, match="token"):
        machines.until(stranger.receive, "words of the coordinator")
    garbage = machines.connect()
    garbage.send(b"GET / HTTP/1.1\r\n\r\n")
    garbage.setblocking(False)
    machines.until(lambda: has_ended(garbage), "the end of its connection")
    for rank in (1, 2):
        machines.start(rank)
    machines.until(lambda: machines.joined == {1, 2}, "all have joined")
    assert machines.obeyed == [[], [], []]


def has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(100)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_who_says_nothing_or_little_is_turned_away_in_time(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "GREET_S", 0.2)
    machines.start(0)
    silent, slow = machines.connect(), machines.connect()
    silent.setblocking(False)
    slow.setblocking(False)

    def both_have_ended() -> bool:
        try:
            slow.send(b"0")  # one more, always in time
        except OSError:
            return has_ended(silent)
        return False

    machines.until(both_have_ended, "the end of both connections")


def test_many_connections_make_room_for_new_ones(machines: Machines) -> None:
    machines.start(0)
    machines.start(1)
    machines.until(lambda: machines.joined == {1}, "one has joined")
    many = []
    for _ in range(WORLD_SIZE + 64 + 5):
        many.append(machines.connect())
        machines.loop.turn()
    many[0].setblocking(False)
    machines.until(lambda: has_ended(many[0]), "the end of the oldest connection")
    machines.start(2)
    machines.until(lambda: machines.joined == {1, 2}, "a host finds room")
    assert machines.obeyed == [[], [], []]


def test_a_coordinator_that_does_not_appear_is_waited_for_a_while(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_module, "JOIN_S", 0.1)
    machines.start(1)
    machines.until(lambda: machines.obeyed[1], "an order")
    (order,) = machines.obeyed[1]
    assert order["order"] == "abandon"
    assert "did not appear" in order["because"]
