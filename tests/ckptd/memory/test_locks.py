"""OFD locks: between descriptions of one process, and gone with a killed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.memory import locks
from tests.ckptd.running import ROOT


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(64))
    return path


def test_exclusive_excludes_and_shared_shares(file: Path) -> None:
    one, other = os.open(file, os.O_RDWR), os.open(file, os.O_RDWR)
    try:
        assert locks.try_lock(one, 16, exclusive=True)
        assert not locks.try_lock(other, 16, exclusive=True)
        assert not locks.try_lock(other, 16, exclusive=False)
        assert locks.try_lock(other, 17, exclusive=True)  # each byte on its own
        locks.unlock(one, 16)
        assert locks.try_lock(one, 16, exclusive=False)
        assert locks.try_lock(other, 16, exclusive=False)
        assert not locks.try_lock(one, 16, exclusive=True)
    finally:
        os.close(one)
        os.close(other)


def test_is_locked_sees_others_and_not_itself(file: Path) -> None:
    one, other = os.open(file, os.O_RDWR), os.open(file, os.O_RDWR)
    try:
        locks.try_lock(one, 0, exclusive=True)
        assert locks.is_locked(other, 0, exclusive=True)
        assert not locks.is_locked(one, 0, exclusive=True)
        locks.try_lock(one, 0, exclusive=False)  # converts
        assert locks.is_locked(other, 0, exclusive=True)
        assert not locks.is_locked(other, 0, exclusive=False)
    finally:
        os.close(one)
        os.close(other)


def test_held_and_lock_file_release(file: Path) -> None:
    fd = os.open(file, os.O_RDWR)
    try:
        with locks.held(fd, 3, exclusive=True) as taken:
            assert taken
            with locks.lock_file(file, 3, exclusive=False) as also:
                assert not also
        with locks.lock_file(file, 3, exclusive=True) as taken:
            assert taken
            assert locks.is_locked(fd, 3, exclusive=True)
        assert not locks.is_locked(fd, 3, exclusive=True)
    finally:
        os.close(fd)


def test_a_killed_process_holds_nothing(file: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from ckptd.memory import locks\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "assert locks.try_lock(fd, 0, True)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, cwd=ROOT)
    fd = os.open(file, os.O_RDWR)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        assert locks.is_locked(fd, 0, exclusive=True)
        assert child.pid in locks.holders_of(file)
        assert locks.other_holders_of(file) == [], "this process and its child"
        child.kill()
        child.wait(10)
        assert locks.try_lock(fd, 0, exclusive=True)
    finally:
        child.kill()
        child.wait(10)
        assert child.stdout is not None
        child.stdout.close()
        os.close(fd)


def test_a_process_that_another_one_has_started_is_named(file: Path) -> None:
    """The refusal to free the memory of a live run named the daemon's own store keeper among its trainers."""
    code = (
        "import os, subprocess, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "child = subprocess.Popen(['sleep', '60'], pass_fds=[fd])\n"
        "os.close(fd)\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
        "child.kill()\n"
        "child.wait()\n"
    )
    command = [sys.executable, "-c", code, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        assert locks.other_holders_of(file) == [grandchild]
        process.communicate(timeout=60)


def test_holders_of_a_file_that_is_gone_are_none(tmp_path: Path) -> None:
    assert locks.holders_of(tmp_path / "gone") == []
