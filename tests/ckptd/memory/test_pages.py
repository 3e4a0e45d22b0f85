"""A mapped file that is cut short reads as zeros, on whichever thread, and never ends the process."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from ckptd.memory.pages import FileMapping, copy_bytes
from tests.ckptd.running import ROOT

SIZE = 64 << 20


@pytest.fixture
def file(tmp_path: Path) -> int:
    """A file of SIZE bytes, all 1."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"\1" * SIZE)
    return fd


@pytest.mark.parametrize("readonly", [False, True])
def test_a_view_is_the_file_until_it_is_cut(file: int, readonly: bool) -> None:
    mapping = FileMapping(file, SIZE, readonly=readonly)
    assert mapping.view.readonly is readonly
    assert bytes(mapping.view[-4:]) == b"\1\1\1\1"
    os.ftruncate(file, SIZE // 2)
    assert bytes(mapping.view[:4]) == b"\1\1\1\1"
    before = mapping.cut
    assert bytes(mapping.view[-4:]) == bytes(4)  # the page is gone
    assert (before, mapping.cut) == (False, True)
    assert bytes(mapping.view[:4]) == bytes(4)  # nor is the rest to be believed


def test_what_is_written_then_harms_nobody(file: int) -> None:
    mapping = FileMapping(file, SIZE)
    os.ftruncate(file, 0)
    mapping.view[100:104] = b"here"
    assert mapping.cut
    assert bytes(mapping.view[100:104]) == b"here"
    assert os.fstat(file).st_size == 0


READS: dict[str, Callable[[memoryview], object]] = {
    "with the interpreter's lock": bytes,
    "crc": zlib.crc32,
    "digest": xxhash.xxh3_64_digest,
    "copy": lambda view: copy_bytes(memoryview(bytearray(SIZE)), view),
}


@pytest.mark.parametrize("what", READS)
def test_it_is_cut_at_any_moment_while_several_threads_read(file: int, what: str) -> None:
    for moment in range(4):
        os.pwrite(file, b"\1" * SIZE, 0)
        mapping = FileMapping(file, SIZE)
        threads = [
            threading.Thread(target=lambda m=mapping: [READS[what](m.view) for _ in range(3)])
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        threads[moment % 3].join(0.005 * moment)
        os.ftruncate(file, 0)
        for thread in threads:
            thread.join()
        assert READS[what](mapping.view) == READS[what](memoryview(bytearray(SIZE)))
        assert mapping.cut


def test_a_mapping_is_found_though_a_newer_one_goes_meanwhile(tmp_path: Path) -> None:
    """Another thread may give up a mapping while the handler looks through them: here, at that moment."""
    script = """
import os, sys
from ckptd.memory import pages
class GoesWhenLookedAt:
    length = 0
    @property
    def start(self):
        if self in pages._regions:
            pages._regions.remove(self)
        return 0
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 1 << 20)
mapping = pages.FileMapping(fd, 1 << 20)
os.ftruncate(fd, 0)
pages._regions.insert(0, GoesWhenLookedAt())
assert mapping.view[0] == 0 and mapping.cut
assert len(pages._regions) == 1
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "file")], cwd=ROOT, stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_mappings_are_told_apart(file: int, tmp_path: Path) -> None:
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.write(other, b"\2" * SIZE)
    bad, good = FileMapping(file, SIZE), FileMapping(other, SIZE)
    os.ftruncate(file, 0)
    assert sum(bad.view[:: 1 << 20]) == 0
    assert bytes(good.view) == b"\2" * SIZE
    assert (bad.cut, good.cut) == (True, False)


def test_a_mapping_lives_as_long_as_a_view_of_it(file: int) -> None:
    mapping = FileMapping(file, SIZE)
    part = mapping.view[SIZE // 2 :]
    mapping.view.release()
    del mapping
    os.ftruncate(file, 0)
    assert bytes(part[:4]) == bytes(4)


@pytest.mark.parametrize("way", ["another mapping", "a signal that somebody sent"])
def test_any_other_fault_ends_the_process_as_before(way: str, tmp_path: Path) -> None:
    script = """
import mmap, os, signal, sys
from ckptd.memory.pages import FileMapping
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 1 << 20)
ours, other = FileMapping(fd, 1 << 20), mmap.mmap(fd, 1 << 20)
os.ftruncate(fd, 0)
if sys.argv[2] == "another mapping":
    other[0]
else:
    os.kill(os.getpid(), signal.SIGBUS)
    os.kill(os.getpid(), signal.SIGBUS)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "file"), way], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGBUS


def test_a_file_that_cannot_be_mapped_is_an_error(file: int) -> None:
    with pytest.raises(ValueError, match="length"):
        FileMapping(file, SIZE + mmap.PAGESIZE)
    assert ctypes.sizeof(ctypes.c_void_p) == 8  # the structures are those of 64-bit Linux
