"""A process that gets signals in the place of a trainer, and says which."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from ckptd.host.signal_witness import SignalWitness, pending_in
from tests.ckptd.host.hosting import children_of, gone, until


def seen_by(witness: SignalWitness) -> list[int] | None:
    witness.ask()
    select.select([witness], [], [], 60)
    return witness.receive()


@pytest.mark.parametrize("own_session", [False, True])
def test_it_tells_once_which_signals_it_got(own_session: bool) -> None:
    before, mask = os.listdir("/proc/self/fd"), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    witness = SignalWitness(own_session=own_session)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    assert seen_by(witness) == []
    pid = witness.pid
    assert (os.getsid(pid) == pid) is own_session
    assert children_of(os.getpid())["ckptd-witness"] == pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert pending_in(pid) == {signal.SIGTERM, signal.SIGINT}
    assert seen_by(witness) == [signal.SIGINT, signal.SIGTERM]
    assert seen_by(witness) == []
    assert witness.receive() == []  # it was not asked
    witness.close()
    assert os.waitpid(pid, 0)[1] == 0
    assert os.listdir("/proc/self/fd") == before


def test_one_that_was_killed() -> None:
    witness = SignalWitness(own_session=True)
    pid = witness.pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert seen_by(witness) is None
    witness.close()
    assert pending_in(pid) == set()


def test_it_keeps_no_file_of_the_host_open(tmp_path: Path) -> None:
    """Other hosts see by their sockets that this one has died."""
    here, there = os.pipe()
    witness = SignalWitness(own_session=True)
    os.close(there)
    assert os.read(here, 1) == b""
    os.close(here)
    pid = witness.pid
    witness.close()
    os.waitpid(pid, 0)
    until(lambda: gone(pid), "its end")
