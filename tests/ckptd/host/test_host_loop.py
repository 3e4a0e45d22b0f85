"""What a host waits for."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ckptd.host.host_loop import HostLoop


class Calls:
    """What was called, in order."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def first(self) -> None:
        self.made.append("first")

    def second(self) -> None:
        self.made.append("second")


@pytest.fixture
def loop() -> Iterator[HostLoop]:
    made = HostLoop()
    yield made
    made.close()


def test_a_timer_runs_out_once_and_the_last_setting_counts(loop: HostLoop) -> None:
    calls = Calls()
    loop.after(600, calls.first)
    loop.after(0, calls.first)
    loop.turn()
    assert not loop.is_timed(calls.first)
    loop.after(0, calls.second)
    loop.turn()
    assert calls.made == ["first", "second"]


def test_a_timer_that_another_cancels_does_not_run_out(loop: HostLoop) -> None:
    calls = Calls()
    loop.after(0, lambda: loop.cancel(calls.first))
    loop.after(0, calls.first)
    loop.after(0, calls.second)
    loop.turn()
    assert calls.made == ["second"]


def test_a_source_that_another_has_forgotten_is_not_served(loop: HostLoop) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    served: list[int] = []

    def serve(index: int) -> None:
        served.append(index)
        for ours, _ in pairs:
            loop.forget(ours)
            loop.forget(ours)  # nothing to do
            ours.close()

    for index, (ours, theirs) in enumerate(pairs):
        loop.watch(ours, lambda index=index: serve(index))  # type: ignore[misc]
        theirs.send(b"x")
    loop.turn()
    assert len(served) == 1
    for _, theirs in pairs:
        theirs.close()


def test_a_source_that_can_be_written_to(loop: HostLoop) -> None:
    calls = Calls()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.watch(ours, calls.first, writable=True)
        loop.turn()
    assert calls.made == ["first"]
