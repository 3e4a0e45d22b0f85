"""The locks of the short cut, held by processes that die or stop in the middle of a copy."""

from __future__ import annotations

import fcntl
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.transport.fabric import short_cut
from ckptd.transport.fabric.short_cut import FileLease, copy_chunk, is_being_filled
from ckptd.transport.verbs import Access, FileRange, RegionKey
from tests.transport.fabric_pairs import BEFORE, BOTH, CHUNK, WAIT_S, Host, Shared, host, make, until

__all__ = ["host", "make"]  # fixtures


def _copy_slowly(key: RegionKey, pipe: multiprocessing.connection.Connection) -> None:
    """A peer that is in the middle of a chunk until it is told to go on."""
    real = short_cut._copy

    def copy(fd: int, access: Access, at: int, view: memoryview) -> bool:
        pipe.send("copying")
        pipe.recv()
        return real(fd, access, at, view)

    short_cut._copy = copy
    pipe.send(copy_chunk("here", key, Access.WRITE, 0, memoryview(b"\1" * key.length)))


def _own(path: str, size: int, pipe: multiprocessing.connection.Connection) -> None:
    """An owner that grants the whole file, and lives until it is killed."""
    status = os.stat(path)
    key = RegionKey(5, bytes(16), size, FileRange(path, status.st_dev, status.st_ino, BEFORE))
    lease = FileLease(key, BOTH, "")
    pipe.send(key)
    pipe.recv()
    lease.close()


def _spawn(
    target: Callable[..., None], *args: object
) -> tuple[multiprocessing.process.BaseProcess, multiprocessing.connection.Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(WAIT_S), "it did not start"
    return process, ours


def _kill(process: multiprocessing.process.BaseProcess) -> None:
    process.kill()
    process.join(WAIT_S)


def test_a_peer_that_dies_in_the_middle_of_a_copy_holds_nothing(host: Host) -> None:
    _, region = host.share(bytes(CHUNK))
    process, pipe = _spawn(_copy_slowly, region.key)
    assert pipe.recv() == "copying"
    assert not region.revoke()
    _kill(process)
    region.close()
    assert region.revoke()


def test_a_peer_that_stops_in_the_middle_of_a_copy_is_waited_for(host: Host) -> None:
    """Nobody else may have the memory: when it is continued it goes on where it was."""
    shared, region = host.share(bytes(CHUNK))
    process, pipe = _spawn(_copy_slowly, region.key)
    assert pipe.recv() == "copying"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert not region.revoke()
    closer = threading.Thread(target=region.close)
    closer.start()
    closer.join(0.3)
    assert closer.is_alive()
    os.kill(process.pid, signal.SIGCONT)
    pipe.send("go on")
    closer.join(WAIT_S)
    assert not closer.is_alive()
    assert pipe.recv() is True
    assert shared.inside == b"\1" * CHUNK
    assert not copy_chunk("here", region.key, Access.WRITE, 0, memoryview(bytes(CHUNK)))
    process.join(WAIT_S)


def test_an_owner_that_dies_grants_nothing_any_more_and_its_next_life_sees_who_still_writes(
    tmp_path: Path,
) -> None:
    shared = Shared(tmp_path / "file", bytes(CHUNK))
    owner, owned = _spawn(_own, str(shared.path), CHUNK)
    key = owned.recv()
    peer, copying_pipe = _spawn(_copy_slowly, key)
    assert copying_pipe.recv() == "copying"
    _kill(owner)
    with shared.path.open("r+b") as file:
        fd = file.fileno()
        assert is_being_filled(fd, BEFORE, CHUNK)
        assert is_being_filled(fd, BEFORE + CHUNK - 1, 1)
        assert not is_being_filled(fd, 0, BEFORE)
        assert not is_being_filled(fd, BEFORE + CHUNK, 100)
        assert not is_being_filled(fd, BEFORE, 0)
        assert not copy_chunk("here", key, Access.WRITE, 0, memoryview(bytes(CHUNK)))
        copying_pipe.send("go on")
        assert copying_pipe.recv() is True, "what had begun ends"
        until(lambda: not is_being_filled(fd, BEFORE, CHUNK))
    peer.join(WAIT_S)


def test_an_owner_that_dies_while_its_lease_is_looked_at_leaves_a_lock_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer sees the lease and is stopped there. The owner's next life must find it, or it
    grants the slot to another.
    """
    shared = Shared(tmp_path / "file", bytes(CHUNK))
    key = RegionKey(5, bytes(16), CHUNK, shared.range)
    lease = FileLease(key, BOTH, "here")
    real, found = short_cut._copy, []

    def copy(fd: int, access: Access, at: int, view: memoryview) -> bool:
        lease.close()  # as the end of its process does
        with shared.path.open("r+b") as file:
            found.append(is_being_filled(file.fileno(), BEFORE, CHUNK))
        return real(fd, access, at, view)

    monkeypatch.setattr(short_cut, "_copy", copy)
    assert copy_chunk("here", key, Access.WRITE, 0, memoryview(b"1" * CHUNK))
    assert found == [True]
    assert not copy_chunk("here", key, Access.WRITE, 0, memoryview(b"2" * CHUNK))
    with shared.path.open("r+b") as file:
        assert not is_being_filled(file.fileno(), BEFORE, CHUNK), "who found no lease holds nothing"
    assert shared.inside == b"1" * CHUNK


@pytest.mark.parametrize("access", [Access.WRITE, Access.READ])
def test_who_can_only_read_a_file_grants_nothing_in_it(tmp_path: Path, access: Access) -> None:
    """A peer of another user tells us of a file of ours, and locks, shared, what would be the lease."""
    shared = Shared(tmp_path / "file", b"precious")
    key = RegionKey(5, bytes(16), 8, shared.range)
    with shared.path.open("rb") as file:
        byte = short_cut._lease_byte(key, shared.range, access, "")
        short_cut._set_lock(file.fileno(), fcntl.F_RDLCK, byte)
        told = bytearray(b"evil....")
        assert not copy_chunk("here", key, access, 0, memoryview(told))
    assert shared.inside == b"precious"
    assert told == b"evil...."
