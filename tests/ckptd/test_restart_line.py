"""A host and its trainer agree on which epochs the trainer can come to in its process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ckptd.restart_line import LINE_VARIABLE, HostEnd, NextEpoch, TrainerEnd, inherited_line
from tests.ckptd.restart_ends import inherited_end

EPOCH = NextEpoch(3, {"MASTER_PORT": "4711"}, "rank 1: SIGKILL")


@pytest.fixture(autouse=True)
def unknown_yet() -> Iterator[None]:
    inherited_line.cache_clear()
    yield
    inherited_line.cache_clear()


@pytest.fixture
def host() -> Iterator[HostEnd]:
    end = HostEnd.make()
    yield end
    end.close()


@pytest.fixture
def trainer(host: HostEnd, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerEnd]:
    with inherited_end(host, monkeypatch) as end:
        yield end


def test_a_trainer_that_can_stay_is_offered_the_next_epoch(host: HostEnd, trainer: TrainerEnd) -> None:
    pid = os.getpid()
    assert not host.offer(pid, EPOCH), "it has not said that it can"
    trainer.can_stay(now=True)
    assert host.receive() is None
    assert host.offer(pid, EPOCH)
    assert trainer.receive() == EPOCH
    trainer.stayed(3)
    assert host.receive() == (pid, 3)
    assert not host.offer(pid, EPOCH), "its next loop has not begun"


@pytest.mark.parametrize("noise", [b"noise", b"[]", b"{}", b'{"pid": null}', b"\xff"])
def test_what_else_is_written_to_it_says_nothing(host: HostEnd, trainer: TrainerEnd, noise: bytes) -> None:
    os.write(host.descriptor, noise)
    trainer.can_stay(now=True)
    assert host.receive() is None
    assert host.receive() is None
    assert host.offer(os.getpid(), EPOCH)


def test_a_trainer_may_lose_the_ability(host: HostEnd, trainer: TrainerEnd) -> None:
    for now in (True, False):
        trainer.can_stay(now=now)
        host.receive()
    assert not host.offer(os.getpid(), EPOCH)


def test_what_was_meant_for_an_earlier_trainer_reaches_no_other(host: HostEnd, trainer: TrainerEnd) -> None:
    """All trainers of a host have the same socket in turn."""
    program = (
        "from ckptd.restart_line import inherited_line\n"
        "import os; inherited_line().can_stay(now=True); print(os.getpid())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, LINE_VARIABLE: str(host.descriptor)},
        pass_fds=[host.descriptor],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    host.receive()
    earlier = int(done.stdout)
    assert not host.offer(os.getpid(), EPOCH)
    assert host.offer(earlier, EPOCH)
    assert trainer.receive() is None


def test_a_forked_child_says_nothing(host: HostEnd, trainer: TrainerEnd) -> None:
    pid = os.fork()
    if not pid:
        trainer.can_stay(now=True)
        os._exit(0)
    os.waitpid(pid, 0)
    assert host.receive() is None
    assert not host.offer(pid, EPOCH)


def test_the_end_of_the_host_is_an_error(host: HostEnd, trainer: TrainerEnd) -> None:
    host.close()
    trainer.can_stay(now=True)  # nobody hears it
    with pytest.raises(OSError, match="the host has closed its end"):
        trainer.receive()
    assert host.descriptor == -1
    assert not host.offer(os.getpid(), EPOCH)


def test_a_trainer_that_reads_nothing_does_not_block_its_host(host: HostEnd, trainer: TrainerEnd) -> None:
    trainer.can_stay(now=True)
    host.receive()
    offers = 0
    while host.offer(os.getpid(), EPOCH):
        offers += 1
        assert offers < 100_000
    assert offers > 0


@pytest.mark.parametrize("text", ["", "x", "-1", "99999"])
def test_no_line_is_no_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LINE_VARIABLE, text)
    assert inherited_line() is None
    assert LINE_VARIABLE not in os.environ


def test_another_socket_with_its_number_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        monkeypatch.setenv(LINE_VARIABLE, str(other.fileno()))
        assert inherited_line() is None
        other.bind(("127.0.0.1", 0))
