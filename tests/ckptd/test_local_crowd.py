"""Whoever may connect to the daemon's local socket and says nothing costs it little: real daemons,
real crowds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ckptd.core.slots.slots import SlotState
from ckptd.transport.messages import Detach, Done, GetStatus, Status
from ckptd.transport.wire import ControlClient
from tests.ckptd.running import (
    MIB,
    DaemonProcess,
    attach,
    eventually,
    fill,
    own,
    reserve,
    state_of,
)

FILES = 4096  # descriptors of the daemon: the least with which it does not warn
CROWD = 6000
LEAK = 96 * MIB  # beyond what a daemon takes with its share of connections
IDLERS = """
import socket, sys
path, count = sys.argv[1], int(sys.argv[2])
opened = []
for _ in range(count):
    each = socket.socket(socket.AF_UNIX)
    each.connect(path)  # waits where too many are not accepted yet
    opened.append(each)
print("open", flush=True)
sys.stdin.read()
"""
SPEAKERS = """
import os, sys
from ckptd.transport.messages import GetStatus, Status
from ckptd.transport.wire import ControlClient
clients = []
for _ in range(int(sys.argv[2])):
    clients.append(ControlClient(sys.argv[1], timeout_s=60))
    clients[-1].ask(GetStatus(), Status)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def daemon(request: pytest.FixtureRequest) -> Iterator[DaemonProcess]:
    made = DaemonProcess()
    made.spawn(files=getattr(request, "param", FILES))
    try:
        made.ctl("wait", "--timeout", "60")
        yield made
    finally:
        made.clean_up()


@contextmanager
def crowd(daemon: DaemonProcess, script: str, count: int, processes: int = 1) -> Iterator[None]:
    """So many connections, spread over processes; all are there when the block begins, or have been
    closed again.
    """
    with ExitStack() as stack:
        begun = []
        for _ in range(processes):
            path = daemon.endpoint.removeprefix("ipc://" if script == IDLERS else "")
            command = [sys.executable, "-c", script, path, str(count // processes)]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            assert process.stdin is not None
            stack.callback(process.stdin.close)
            begun.append(process)
        for process in begun:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n", daemon.log_text()
        yield


def descriptors(daemon: DaemonProcess) -> int:
    assert daemon.process is not None
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def most_resident(daemon: DaemonProcess) -> int:
    """The most memory that it ever had, in bytes."""
    assert daemon.process is not None
    status = Path(f"/proc/{daemon.process.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def counters(daemon: DaemonProcess) -> dict[str, int]:
    with daemon.client() as client:
        return client.ask(GetStatus(), Status).counters


def train(client: ControlClient, run: str) -> None:
    """Attach, take a snapshot, detach."""
    attach(client, run=run)
    segment = reserve(client, run=run)
    fd = own(segment)
    fill(segment, 0, 7)
    client.request(Detach())
    os.close(fd)
    eventually(lambda: state_of(segment, 0) is SlotState.SEALED, "the snapshot is sealed")
    segment.close()


@pytest.mark.parametrize("processes", [1, 4])
def test_thousands_of_idle_connections_leave_trainers_alone(daemon: DaemonProcess, processes: int) -> None:
    """They took all descriptors of the daemon, and libzmq aborted it: "Too many open files
    (src/ipc_listener.cpp)".
    """
    with daemon.client() as early:
        attach(early, run="early", needed_bytes=4 * MIB)
        before, resident = descriptors(daemon), most_resident(daemon)
        with crowd(daemon, IDLERS, CROWD, processes):
            for number in range(3):
                with daemon.client() as client:
                    train(client, f"late{number}")
            eventually(lambda: descriptors(daemon) < before + 300, "the others are closed")
            assert most_resident(daemon) < resident + LEAK
            assert early.request(Detach()) == Done(), "who was there before still is"
        eventually(lambda: descriptors(daemon) < before + 20, "all are closed")
        found = counters(daemon)
    assert found["local.turned_away.address"] + found.get("local.turned_away.rate", 0) > CROWD // 2
    assert any(name.startswith("local.turned_away_from.process ") for name in found)
    assert daemon.log_text().count("turned_away") < 6
    assert daemon.process is not None
    assert daemon.process.poll() is None


@pytest.mark.parametrize("daemon", [1024], indirect=True)
def test_whoever_holds_connections_that_spoke_has_so_many(daemon: DaemonProcess) -> None:
    """One message on each made a connection of use, and there was no bound on those."""
    before = descriptors(daemon)
    with daemon.client() as early:
        attach(early, run="early", needed_bytes=4 * MIB)
        with crowd(daemon, SPEAKERS, 160):
            eventually(lambda: descriptors(daemon) < before + 120, "the oldest ones are closed")
            eventually(lambda: "local.turned_away.peer" in counters(daemon), "it is counted")
            with daemon.client() as client:
                train(client, "late")
        assert early.request(Detach()) == Done()


def test_whoever_looks_whether_somebody_listens_is_not_told_of(daemon: DaemonProcess) -> None:
    """Every client does, with a connection that it closes again, before it says anything."""
    for _ in range(30):
        daemon.client().close()
    assert not any(name.startswith("local.") for name in counters(daemon))


@pytest.mark.parametrize("daemon", [512], indirect=True)
def test_a_daemon_with_few_descriptors_says_so(daemon: DaemonProcess) -> None:
    assert "few_descriptors" in daemon.ctl("events").stdout
    assert "LimitNOFILE=" in daemon.log_text()
