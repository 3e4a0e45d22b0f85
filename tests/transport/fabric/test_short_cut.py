"""The short cut within one host: what the verbs promise holds there, too, and whoever may not take
it goes over the network.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from ckptd.transport.fabric import short_cut
from ckptd.transport.fabric.short_cut import copy_chunk
from ckptd.transport.fabric.transfers import ChunkUse
from ckptd.transport.fabric.zmq_fabric import ZmqFabric
from ckptd.transport.verbs import Access, Fault, RegionKey
from tests.transport.fabric_pairs import (
    BEFORE,
    CHUNK,
    SIZES,
    WAIT_S,
    Brake,
    Host,
    Make,
    brake,
    content,
    host,
    make,
    until,
)

__all__ = ["brake", "host", "make"]  # fixtures


# --- bytes arrive ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_what_is_put_lies_in_the_file(host: Host, size: int) -> None:
    data = content(size)
    shared, region = host.share(bytes(size))
    done = host.peer.put(memoryview(data), region.key).wait(WAIT_S)
    assert (done.ok, done.size_bytes, done.retries) == (True, size, 0)
    assert shared.inside == data
    assert shared.untouched_outside()
    assert host.copied == host.here.counters.put_bytes == size
    assert host.networked == 0


@pytest.mark.parametrize("size", SIZES)
def test_what_is_got_equals_the_file(host: Host, size: int) -> None:
    data, target = content(size), bytearray(size)
    _, region = host.share(data)
    done = host.peer.get(region.key, memoryview(target)).wait(WAIT_S)
    assert (done.ok, done.size_bytes) == (True, size)
    assert target == data
    assert host.copied == host.here.counters.got_bytes == size
    assert host.networked == 0


def test_an_offset_counts_from_the_start_of_the_region(host: Host) -> None:
    data = content(2 * CHUNK + 5)
    shared, region = host.share(bytes(4 * CHUNK))
    assert host.peer.put(memoryview(data), region.key, offset=1001).wait(WAIT_S).ok
    rest = bytes(shared.size - 1001 - len(data))
    assert shared.inside == bytes(1001) + data + rest
    back = bytearray(len(data) - 7)
    assert host.peer.get(region.key, memoryview(back), offset=1008).wait(WAIT_S).ok
    assert back == data[7:]
    assert host.networked == 0


def test_many_transfers_at_once_all_arrive(host: Host) -> None:
    sources = [content(3 * CHUNK + n, n) for n in range(20)]
    shares = [host.share(bytes(len(source)), peer="here") for source in sources]
    puts = [
        host.peer.put(memoryview(source), region.key)
        for source, (_, region) in zip(sources, shares, strict=True)
    ]
    assert all(put.wait(WAIT_S).ok for put in puts)
    assert [shared.inside for shared, _ in shares] == sources
    assert host.networked == 0


def test_after_the_completion_the_buffer_is_free(host: Host) -> None:
    buffer = bytearray(9 * CHUNK)
    _, region = host.share(bytes(len(buffer)))
    assert host.peer.put(memoryview(buffer), region.key).wait(WAIT_S).ok
    assert host.peer.get(region.key, memoryview(buffer)).wait(WAIT_S).ok
    buffer.append(0)  # raises BufferError if anything still refers to it


# --- ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        (lambda host, put: put.cancel(), Fault.CANCELLED),
        (lambda host, put: host.peer.close(), Fault.CLOSED),
    ],
)
def test_a_transfer_that_is_ended_completes_when_its_copy_has_ended(
    host: Host, brake: Brake, end: Callable[..., None], fault: Fault
) -> None:
    source = bytearray(b"\1" * 9 * CHUNK)
    shared, region = host.share(bytes(len(source)))
    put = host.peer.put(memoryview(source), region.key)
    assert brake.reached.wait(WAIT_S)
    end(host, put)
    with pytest.raises(TimeoutError):
        put.wait(0.2)
    brake.release()
    assert put.wait(WAIT_S).fault is fault
    source.append(0)
    frozen = shared.inside
    assert frozen.count(b"\1") <= 2 * CHUNK
    time.sleep(0.05)
    assert shared.inside == frozen


def test_a_deadline_ends_a_copy(host: Host, brake: Brake) -> None:
    _, region = host.share(bytes(3 * CHUNK))
    put = host.peer.put(memoryview(bytes(3 * CHUNK)), region.key, deadline_s=0.1)
    assert brake.reached.wait(WAIT_S)
    time.sleep(0.15)
    brake.release()
    assert put.wait(WAIT_S).fault is Fault.DEADLINE


def test_closing_the_fabric_completes_copies(make: Make, tmp_path: Path) -> None:
    host = Host(make("here"), make("there"), tmp_path)
    source = bytearray(500 * CHUNK)
    _, region = host.share(bytes(len(source)))
    put = host.peer.put(memoryview(source), region.key)
    until(lambda: host.copied > 0)
    host.here.close()
    assert put.wait(0).fault in (Fault.CLOSED, None)
    source.append(0)


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("put", [True, False])
def test_requests_that_are_not_allowed_touch_nothing(host: Host, put: bool) -> None:
    """By anybody who has something wrong: the network refuses them, as it does without a file."""
    shared, region = host.share(b"0123456789abcdef")
    key = region.key
    _, others = host.share(bytes(16), peer="somebody")
    _, access = host.share(bytes(16), Access.READ if put else Access.WRITE)
    assert key.file is not None
    wrong: list[tuple[RegionKey, Fault]] = [
        (replace(key, token=bytes(16)), Fault.REGION),
        (replace(key, region=key.region ^ 1), Fault.REGION),
        (replace(key, token=b"short"), Fault.REGION),
        (replace(key, region=-1), Fault.REGION),
        (others.key, Fault.ACCESS),
        (access.key, Fault.ACCESS),
    ]
    buffer = bytearray(16)
    for bad, fault in wrong:
        begin = host.peer.put(memoryview(buffer), bad) if put else host.peer.get(bad, memoryview(buffer))
        assert begin.wait(WAIT_S).fault is fault
    long = bytearray(17)
    for bad in (key, replace(key, length=17)):
        begin = host.peer.put(memoryview(long), bad) if put else host.peer.get(bad, memoryview(long))
        assert begin.wait(WAIT_S).fault is Fault.BOUNDS
    assert buffer == bytes(16)
    assert shared.inside == b"0123456789abcdef"
    assert shared.untouched_outside()
    assert host.copied == host.networked == 0
    assert host.there.counters.refused >= 6


def test_another_place_in_the_file_is_not_granted(host: Host) -> None:
    """The network has no such offset: the bytes go where they belong."""
    shared, region = host.share(bytes(16))
    assert region.key.file is not None
    moved = replace(region.key, file=structs.replace(region.key.file, offset=BEFORE - 16))
    assert host.peer.put(memoryview(b"x" * 16), moved).wait(WAIT_S).ok
    assert shared.inside == b"x" * 16
    assert shared.untouched_outside()
    assert (host.copied, host.networked) == (0, 16)


@pytest.mark.parametrize("how", ["gone", "other file", "link", "other user", "fifo", "bad name"])
def test_a_file_that_is_not_the_one_is_left_alone(
    host: Host, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another host, or in another mount namespace."""
    shared, region = host.share(bytes(CHUNK))
    key, aside = region.key, shared.path.with_suffix(".aside")
    assert key.file is not None
    if how == "other user":
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    elif how == "bad name":
        key = replace(key, file=structs.replace(key.file, path="/\0"))
    else:
        shared.path.rename(aside)
        if how == "other file":
            shared.path.write_bytes(aside.read_bytes())
        elif how == "link":
            shared.path.symlink_to(aside)
        elif how == "fifo":
            os.mkfifo(shared.path)
    data = content(CHUNK)
    assert host.peer.put(memoryview(data), key).wait(WAIT_S).ok
    assert shared.inside == data, "it went over the network"
    assert (host.copied, host.networked) == (0, CHUNK)
    if how == "other file":
        assert shared.path.read_bytes()[BEFORE : BEFORE + CHUNK] == bytes(CHUNK)


@pytest.mark.parametrize("who", ["here", "there"])
def test_it_can_be_switched_off_on_either_side(make: Make, tmp_path: Path, who: str) -> None:
    host = Host(make("here", short_cut=who != "here"), make("there", short_cut=who != "there"), tmp_path)
    shared, region = host.share(bytes(CHUNK))
    assert (region.key.file is None) == (who == "there")
    data = content(CHUNK)
    assert host.peer.put(memoryview(data), region.key).wait(WAIT_S).ok
    assert shared.inside == data
    assert (host.copied, host.networked) == (0, CHUNK)


def test_a_file_that_was_cut_short_ends_nothing(host: Host) -> None:
    """A mapping would end the process; and a put must not make the file longer."""
    shared, region = host.share(content(3 * CHUNK))
    os.truncate(shared.path, BEFORE + 10)
    assert not copy_chunk("here", region.key, Access.WRITE, 0, memoryview(bytes(CHUNK)))
    assert not copy_chunk("here", region.key, Access.READ, 0, memoryview(bytearray(CHUNK)))
    assert shared.path.stat().st_size == BEFORE + 10


# --- revoking ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("put", [True, False])
def test_a_region_is_revoked_at_once_while_a_copy_goes_on(host: Host, brake: Brake, put: bool) -> None:
    """Its end is waited for; nothing begins after it."""
    shared, region = host.share(bytes(9 * CHUNK))
    other = bytearray(b"\1" * 9 * CHUNK)
    transfer = (
        host.peer.put(memoryview(other), region.key) if put else host.peer.get(region.key, memoryview(other))
    )
    assert brake.reached.wait(WAIT_S)
    begun_s = time.monotonic()
    assert not region.revoke()
    assert time.monotonic() - begun_s < 0.2
    closer = threading.Thread(target=region.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    brake.release()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    frozen = shared.inside
    assert transfer.wait(WAIT_S).fault is Fault.REGION
    assert shared.inside == frozen
    assert region.revoke(), "a second time is no harm"
    assert frozen.count(b"\1") == (CHUNK if put else 0)


def test_a_revoked_region_is_never_written_while_peers_keep_trying(host: Host) -> None:
    """Many times, at any moment: what was there when `close` returned stays."""
    source = b"\1" * 40 * CHUNK
    for round_number in range(25):
        shared, region = host.share(bytes(len(source)))
        put = host.peer.put(memoryview(source), region.key)
        time.sleep(0.0004 * round_number)
        region.close()
        frozen = shared.inside
        assert put.wait(WAIT_S).fault in (Fault.REGION, None)
        assert shared.inside == frozen
        shared.path.unlink()
    assert host.copied > 0


def test_a_closed_fabric_lends_nothing(host: Host) -> None:
    shared, region = host.share(bytes(CHUNK))
    host.there.close()
    assert not copy_chunk("here", region.key, Access.WRITE, 0, memoryview(b"1" * CHUNK))
    assert shared.inside == bytes(CHUNK)
    assert region.revoke()


def test_no_descriptor_is_left(host: Host) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    shares = [host.share(bytes(CHUNK)) for _ in range(5)]  # whose mappings have descriptors, too
    regions = [region for _, region in shares]
    assert all(host.peer.put(memoryview(bytes(CHUNK)), region.key).wait(WAIT_S).ok for region in regions)
    before = opened()
    for region in regions:
        region.close()
    assert opened() == before - len(regions)


# --- the copier --------------------------------------------------------------------------------------------


def test_a_copy_that_fails_unexpectedly_goes_over_the_network(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> bool:
        raise RuntimeError("mine")

    monkeypatch.setattr(short_cut, "copy_chunk", fail)
    data = content(3 * CHUNK)
    shared, region = host.share(bytes(len(data)))
    assert host.peer.put(memoryview(data), region.key).wait(WAIT_S).ok
    assert shared.inside == data
    assert host.networked == len(data)
    assert "a copy failed" in caplog.text


def test_where_no_copy_can_begin_any_more_the_network_has_to_do(host: Host) -> None:
    """At the interpreter's end an executor takes nothing more, and the fabric may not be closed yet."""
    assert isinstance(host.here, ZmqFabric)
    assert host.here._copier is not None
    host.here._copier.shutdown()
    data = content(9 * CHUNK)
    shared, region = host.share(bytes(len(data)))
    assert host.peer.put(memoryview(data), region.key).wait(WAIT_S).ok
    assert shared.inside == data
    assert host.networked == len(data)


def test_a_use_is_begun_once_and_not_after_its_transfer_ended(host: Host, brake: Brake) -> None:
    """The second chunk waits for the first one's copy; a cancelled transfer needs it no more."""
    source = bytearray(2 * CHUNK)
    shared, region = host.share(b"\2" * 2 * CHUNK)
    begun: list[int] = []
    real = ChunkUse.claim

    def claim(use: ChunkUse) -> bool:
        wanted = real(use)
        begun.append(use.chunk.start if wanted else -1)
        return wanted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkUse, "claim", claim)
        put = host.peer.put(memoryview(source), region.key)
        assert brake.reached.wait(WAIT_S)
        put.cancel()
        time.sleep(0.1)
        brake.release()
        assert put.wait(WAIT_S).fault is Fault.CANCELLED
        until(lambda: len(begun) == 2)
    assert begun == [0, -1]
    assert shared.inside[CHUNK:] == b"\2" * CHUNK
