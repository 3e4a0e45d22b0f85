"""The store keeper as a process of its own: what it says of a store that it cannot open, and how it
ends when its daemon does.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ckptd.persistence import keeper_wire as w
from tests.ckptd.running import ROOT

RANK = w.RankName("job", "run", 0)
ALONE_S = 60.0  # other tests may have the machine, too


class Process:
    """A keeper, and the daemon's end of its conversation."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ckptd.persistence.keeper", str(theirs.fileno())],
            cwd=ROOT,
            pass_fds=(theirs.fileno(),),
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        self.socket = ours
        self.channel = w.Channel(ours, w.decode_from_keeper)
        retain = w.Retain(1, 0, 0.0)
        self.channel.send(w.Configure(url, options or {}, "auto", 2, 0.0, 20.0, False, retain))

    def ask(self, message: Any) -> Any:
        self.channel.send(message)
        return self.channel.receive()

    def end(self) -> tuple[int, str]:
        """Its exit status, and what it has told on stderr."""
        _, told = self.process.communicate(timeout=ALONE_S)
        return self.process.returncode, told


@pytest.fixture
def started() -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for each in made:
        each.process.kill()
        each.process.wait()
        each.socket.close()


@pytest.mark.parametrize(
    ("url", "options", "reason"),
    [
        ("s3://", {}, "the URL names no bucket or container: write s3://name/path"),
        ("abfss://x", {}, "Generic MicrosoftAzure error: Account must be specified"),
        (
            "s3://bucket/x",
            {"key": "me", "secret": "hush-hush", "obstore": {"nonsense": "hush-hush"}},
            "Configuration key: 'nonsense' is not valid for store 'S3'.",
        ),
        ("nosuch://x", {}, "Protocol not known: nosuch"),
    ],
)
def test_a_store_that_cannot_be_opened_is_one_line_and_every_question_is_answered(
    started: list[Process], url: str, options: dict[str, Any], reason: str
) -> None:
    """What obstore raises is of no kind of ours: the first question ended the keeper with a
    traceback, again and again.
    """
    keeper = Process(url, options)
    started.append(keeper)
    for number in (1, 2):
        answer = keeper.ask(w.FindStored(number, "job", "run", [0]))
        assert answer == w.KeeperFailed(number, w.FailureCode.STORE, f"the store cannot be opened: {reason}")
    assert keeper.ask(w.KeeperPing()) == w.KeeperPong()
    keeper.channel.close()
    assert keeper.end() == (0, f"ckptd store keeper: the store cannot be opened: {reason}\n")


@pytest.mark.parametrize("url", ["memory://gone", "nosuch://gone"])
def test_a_daemon_that_is_gone_ends_its_keeper_without_a_traceback(started: list[Process], url: str) -> None:
    """It was killed while questions lay in the socket: each answer, also that to a ping, meets a
    closed connection.
    """
    keeper = Process(url)
    started.append(keeper)
    assert keeper.ask(w.KeeperPing()) == w.KeeperPong()  # it is up
    keeper.process.send_signal(signal.SIGSTOP)
    for message in (w.KeeperPing(), w.FindStored(1, "job", "run", [0]), w.KeeperPing()):
        keeper.channel.send(message)
    keeper.socket.close()
    keeper.process.send_signal(signal.SIGCONT)
    code, told = keeper.end()
    assert code == 0, told
    lines = [line for line in told.splitlines() if "cannot be opened" not in line]
    assert all(line.startswith("ckptd store keeper: the daemon is gone") for line in lines), told
    assert len(lines) <= 1, told
