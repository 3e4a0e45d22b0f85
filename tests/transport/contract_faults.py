"""The contract: connections that break or damage, strangers, and processes that die."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from ckptd.transport.verbs import Fabric, Fault, PeerAddress, Scope
from tests.transport.fabric_pairs import (
    BOTH,
    CHUNK,
    WAIT_S,
    FabricTests,
    Make,
    Pair,
    TcpProxy,
    content,
    until,
)

__all__ = ["FaultContract"]


def _serve_in_process(
    start: Callable[..., Fabric], endpoint: str, pipe: multiprocessing.connection.Connection
) -> None:
    fabric = start("there", endpoint)
    buffer = bytearray(64 << 20)
    region = fabric.register(memoryview(buffer), access=BOTH, scope=Scope(""))
    pipe.send((fabric.address, region.key))
    pipe.recv()  # until the test ends it


class FaultContract(FabricTests):
    """What costs nothing but time, and what is never taken for good."""

    # A plain function, importable in another process: (node, endpoint) → fabric.
    start_in_process: Callable[..., Fabric]

    # --- faults ---

    def test_connections_that_break_cost_nothing_but_time(self, proxied: tuple[Pair, TcpProxy]) -> None:
        pair, proxy = proxied
        data, target = content(400 * CHUNK), bytearray(400 * CHUNK)
        key = pair.expose(target)
        put = pair.peer.put(memoryview(data), key)
        for _ in range(3):
            seen = proxy.passed
            until(lambda seen=seen: proxy.passed > seen + CHUNK)  # type: ignore[misc]
            proxy.cut()
        assert put.wait(WAIT_S).ok
        assert target == data
        back = bytearray(len(data))
        get = pair.peer.get(key, memoryview(back))
        until(lambda: pair.here.counters.got_bytes > 0)
        proxy.cut()
        assert get.wait(WAIT_S).ok
        assert back == data

    def test_damaged_bytes_are_never_taken_for_good(self, proxied: tuple[Pair, TcpProxy]) -> None:
        pair, proxy = proxied
        rng = random.Random(20261121)
        data, target = content(200 * CHUNK), bytearray(200 * CHUNK)

        def damage(passing: bytearray) -> None:
            if rng.random() < 0.02:
                passing[rng.randrange(len(passing))] ^= 1 << rng.randrange(8)

        proxy.damage = damage
        key = pair.expose(target)
        done = pair.peer.put(memoryview(data), key, deadline_s=8).wait(WAIT_S)
        proxy.damage = lambda passing: None
        if done.ok:
            assert target == data
        assert pair.peer.put(memoryview(data), key).wait(WAIT_S).ok
        assert target == data

    def test_a_link_that_always_damages_ends_in_a_digest_fault(self, proxied: tuple[Pair, TcpProxy]) -> None:
        pair, proxy = proxied
        key = pair.expose(bytearray(CHUNK))
        assert pair.peer.put(memoryview(b"1"), key).wait(WAIT_S).ok
        marker = b"damage-this-one-" * 8

        def damage(passing: bytearray) -> None:
            at = passing.find(marker)
            if at >= 0:
                passing[at] ^= 1

        proxy.damage = damage
        done = pair.peer.put(memoryview(marker * 16), key).wait(WAIT_S)
        assert done.fault is Fault.DIGEST
        assert pair.there.counters.bad_digests >= 2

    def test_garbage_on_the_port_is_counted_and_harmless(self, pair: Pair) -> None:
        key = pair.expose(bytearray(8))
        url = urlsplit(pair.there.address.endpoint)
        rng = random.Random(7)
        for size in (1, 9, 64, 70_000):
            with (
                socket.create_connection((url.hostname or "", url.port or 0)) as stranger,
                suppress(OSError),
            ):
                stranger.sendall(rng.randbytes(size))
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(2)
                while stranger.recv(4096):
                    pass
        until(lambda: pair.there.counters.garbage + pair.there.counters.unauthenticated > 0)
        assert pair.peer.put(memoryview(b"12345678"), key).wait(WAIT_S).ok

    def test_a_server_killed_and_restarted_is_no_hang(self, make: Make) -> None:
        """The region is gone with the process: the rest of the put is refused by the next one."""
        here = make("here", rate_bytes_per_s=8e6)
        process, address, key = self._spawn("tcp://127.0.0.1:0")
        put = here.peer(address).put(memoryview(bytearray(32 << 20)), key, deadline_s=20)
        until(lambda: here.counters.put_bytes > 0)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(WAIT_S)
        another, _, new_key = self._spawn(address.endpoint)
        assert put.wait(WAIT_S).fault is Fault.REGION
        assert here.peer(address).put(memoryview(b"1"), new_key).wait(WAIT_S).ok
        another.kill()
        another.join(WAIT_S)

    def _spawn(self, endpoint: str) -> tuple[multiprocessing.process.BaseProcess, PeerAddress, Any]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        start = type(self).start_in_process
        process = context.Process(target=_serve_in_process, args=(start, endpoint, theirs))
        process.daemon = True
        process.start()
        theirs.close()
        assert ours.poll(WAIT_S), "the server did not start"
        address, key = ours.recv()
        process._test_pipe = ours  # type: ignore[attr-defined]  # it ends when this is closed
        return process, address, key
