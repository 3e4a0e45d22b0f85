"""The contract of every fabric. A backend passes it by ``class TestMine(FabricContract)`` with a fixture
``make``.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from mmap import mmap
from typing import Any
from urllib.parse import urlsplit

import pytest

from ckptd.transport.verbs import Access, Completion, Fabric, Fault, PeerAddress, RegionKey, Scope
from tests.transport.fabric_pairs import (
    BOTH,
    CHUNK,
    SIZES,
    WAIT_S,
    FabricTests,
    Make,
    Pair,
    TcpProxy,
    content,
    until,
)

__all__ = ["FabricContract"]


class TransferContract(FabricTests):
    """Puts and gets in good times, their ends, and their bounds."""

    # --- bytes arrive ---

    @pytest.mark.parametrize("size", SIZES)
    def test_what_is_put_lies_in_the_region(self, pair: Pair, size: int) -> None:
        data, target = content(size), bytearray(size)
        done = pair.peer.put(memoryview(data), pair.expose(target)).wait(WAIT_S)
        assert (done.ok, done.size_bytes) == (True, size)
        assert target == data
        assert pair.there.counters.received_bytes == pair.here.counters.put_bytes == size

    @pytest.mark.parametrize("size", SIZES)
    def test_what_is_got_equals_the_region(self, pair: Pair, size: int) -> None:
        data, target = content(size), bytearray(size)
        done = pair.peer.get(pair.expose(data), memoryview(target)).wait(WAIT_S)
        assert (done.ok, done.size_bytes) == (True, size)
        assert target == data
        assert pair.here.counters.got_bytes == size
        # The owner counts after it sent: the last chunk may be here before it is counted there.
        until(lambda: pair.there.counters.served_bytes == size)

    def test_an_offset_counts_from_the_start_of_the_region(self, pair: Pair) -> None:
        data, target = content(2 * CHUNK + 5), bytearray(4 * CHUNK)
        key = pair.expose(target)
        assert pair.peer.put(memoryview(data), key, offset=1001).wait(WAIT_S).ok
        assert target == bytes(1001) + data + bytes(len(target) - 1001 - len(data))
        back = bytearray(len(data) - 7)
        assert pair.peer.get(key, memoryview(back), offset=1008).wait(WAIT_S).ok
        assert back == data[7:]

    def test_many_transfers_at_once_all_arrive(self, pair: Pair) -> None:
        sources = [content(3 * CHUNK + n, n) for n in range(40)]
        targets = [bytearray(len(source)) for source in sources]
        puts = [
            pair.peer.put(memoryview(source), pair.expose(target))
            for source, target in zip(sources, targets, strict=True)
        ]
        assert all(put.wait(WAIT_S).ok for put in puts)
        assert targets == sources

    def test_completions_come_once_and_not_on_the_callers_thread(self, pair: Pair) -> None:
        seen: list[tuple[Completion, int]] = []
        target = bytearray(3 * CHUNK)
        put = pair.peer.put(
            memoryview(content(len(target))),
            pair.expose(target),
            done=lambda completion: seen.append((completion, threading.get_ident())),
        )
        completion = put.wait(WAIT_S)
        put.cancel()
        assert pair.peer.put(memoryview(b"x"), pair.expose(target)).wait(WAIT_S).ok
        assert [entry[0] for entry in seen] == [completion]
        assert seen[0][1] != threading.get_ident()

    def test_a_callback_that_fails_stops_nothing(self, pair: Pair) -> None:
        key = pair.expose(bytearray(8))

        def fail(completion: Completion) -> None:
            raise RuntimeError("mine")

        assert pair.peer.put(memoryview(b"12345678"), key, done=fail).wait(WAIT_S).ok
        assert pair.peer.put(memoryview(b"12345678"), key).wait(WAIT_S).ok

    def test_after_the_completion_the_buffer_is_free(self, pair: Pair) -> None:
        """A mapping cannot be closed while anything refers to it."""
        mapping = mmap(-1, 16 * CHUNK)
        source = memoryview(mapping)
        key = pair.expose(bytearray(len(source)))
        assert pair.peer.put(source, key).wait(WAIT_S).ok
        assert pair.peer.get(key, source).wait(WAIT_S).ok
        source.release()
        gc.collect()
        mapping.close()

    # --- ends before the end ---

    def test_a_cancelled_put_lets_go_of_its_buffer(self, pair: Pair) -> None:
        source = bytearray(512 * CHUNK)
        put = pair.peer.put(memoryview(source), pair.expose(bytearray(len(source))))
        put.cancel()
        put.cancel()
        assert put.wait(WAIT_S).fault is Fault.CANCELLED
        source.append(0)  # raises BufferError if anything still refers to it

    def test_a_cancelled_get_writes_nothing_more(self, pair: Pair) -> None:
        target = bytearray(512 * CHUNK)
        get = pair.peer.get(pair.expose(content(len(target))), memoryview(target))
        until(lambda: pair.here.counters.got_bytes > 0)
        get.cancel()
        assert get.wait(WAIT_S).fault in (Fault.CANCELLED, None)
        frozen = bytes(target)
        assert pair.peer.put(memoryview(b"1"), pair.expose(bytearray(1))).wait(WAIT_S).ok
        assert target == frozen

    def test_an_unreachable_peer_ends_at_the_deadline(self, make: Make) -> None:
        here = make("here")
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
            peer = here.peer(replace(make("there").address, endpoint=f"tcp://127.0.0.1:{port}"))
            key = RegionKey(1, bytes(16), 8)
            answers: list[bytes | Fault] = []
            peer.request(b"?", timeout_s=0.3, answered=answers.append)
            done = peer.put(memoryview(bytearray(8)), key, deadline_s=0.3).wait(WAIT_S)
            assert done.fault is Fault.DEADLINE
            assert 0.25 < done.seconds < 5
            until(lambda: answers == [Fault.DEADLINE])

    def test_closing_completes_everything(self, make: Make) -> None:
        here, there = make("here"), make("there")
        source = bytearray(256 * CHUNK)
        region = there.register(memoryview(bytearray(len(source))), access=BOTH, scope=Scope(""))
        peer = here.peer(there.address)
        first = peer.put(memoryview(source), region.key)
        peer.close()
        assert first.wait(WAIT_S).fault in (Fault.CLOSED, None)
        assert peer.put(memoryview(b"1"), region.key).wait(WAIT_S).fault is Fault.CLOSED
        again = here.peer(there.address)
        assert again is not peer
        assert here.peer(there.address) is again
        second = again.put(memoryview(source), region.key)
        here.close()
        assert second.wait(0).fault in (Fault.CLOSED, None)
        assert again.put(memoryview(b"1"), region.key).wait(0).fault is Fault.CLOSED
        source.append(0)

    # --- how much at a time ---

    def test_the_rate_is_kept(self, make: Make) -> None:
        rate = 20e6
        here, there = make("here", rate_bytes_per_s=rate), make("there")
        target = bytearray(int(rate))
        region = there.register(memoryview(target), access=BOTH, scope=Scope(""))
        done = here.peer(there.address).put(memoryview(bytearray(len(target))), region.key)
        assert 0.7 < done.wait(WAIT_S).seconds < 3

    def test_a_closed_gate_holds_puts_for_a_while_only(self, make: Make) -> None:
        here, there = make("here", gate=lambda: False), make("there")
        buffer = bytearray(8)
        region = there.register(memoryview(buffer), access=BOTH, scope=Scope(""))
        peer = here.peer(there.address)
        assert peer.get(region.key, memoryview(bytearray(8))).wait(WAIT_S).seconds < 0.4
        done = peer.put(memoryview(b"12345678"), region.key).wait(WAIT_S)
        assert done.ok
        assert 0.4 < done.seconds < 5

    def test_memory_is_bounded(self, pair: Pair) -> None:
        source, target = bytearray(64 << 20), bytearray(64 << 20)
        key = pair.expose(target)
        assert pair.peer.put(memoryview(source), key).wait(WAIT_S).ok
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        puts = [pair.peer.put(memoryview(source), key) for _ in range(4)]
        assert all(put.wait(WAIT_S).ok for put in puts)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


class RegionContract(FabricTests):
    """What is refused, and what a region's end means."""

    # --- refusals ---

    def refusal(self, pair: Pair, key: RegionKey, *, put: bool = True) -> Fault | None:
        before = pair.there.counters.refused
        buffer = bytearray(16)
        transfer = (
            pair.peer.put(memoryview(b"?" * 16), key) if put else pair.peer.get(key, memoryview(buffer))
        )
        fault = transfer.wait(WAIT_S).fault
        assert pair.there.counters.refused == before + 1
        assert buffer == bytes(16)
        return fault

    @pytest.mark.parametrize("put", [True, False])
    def test_requests_that_are_not_allowed_touch_nothing(self, pair: Pair, put: bool) -> None:
        buffer = bytearray(16)
        key = pair.expose(buffer)
        wrong_token = replace(key, token=bytes(16))
        unknown = replace(key, region=key.region ^ 1)
        others = pair.expose(buffer, peer="somebody")
        access = pair.expose(buffer, Access.READ if put else Access.WRITE)
        short = pair.expose(bytearray(15))
        assert self.refusal(pair, wrong_token, put=put) is Fault.REGION
        assert self.refusal(pair, unknown, put=put) is Fault.REGION
        assert self.refusal(pair, others, put=put) is Fault.ACCESS
        assert self.refusal(pair, access, put=put) is Fault.ACCESS
        assert self.refusal(pair, short, put=put) is Fault.BOUNDS
        assert buffer == bytes(16)
        assert pair.peer.put(memoryview(b"!" * 16), key).wait(WAIT_S).ok  # nothing was closed

    def test_a_region_for_this_peer_is_granted(self, pair: Pair) -> None:
        key = pair.expose(bytearray(4), peer="here")
        assert pair.peer.put(memoryview(b"1234"), key).wait(WAIT_S).ok

    def test_a_negative_offset_is_out_of_bounds(self, pair: Pair) -> None:
        put = pair.peer.put(memoryview(b"1"), pair.expose(bytearray(4)), offset=-1)
        assert put.wait(WAIT_S).fault is Fault.BOUNDS

    def test_a_closed_region_is_never_touched_again(self, pair: Pair) -> None:
        buffer = bytearray(512 * CHUNK)
        region = pair.there.register(memoryview(buffer), access=BOTH, scope=Scope(""))
        put = pair.peer.put(memoryview(b"\1" * len(buffer)), region.key)
        until(lambda: pair.there.counters.received_bytes > 0)
        region.close()
        frozen = bytes(buffer)
        assert put.wait(WAIT_S).fault in (Fault.REGION, None)
        assert buffer == frozen
        buffer.append(0)  # nothing refers to the buffer any more
        # Not `refusal`: further chunks of the put above are still being refused and counted.
        again = pair.peer.put(memoryview(b"?"), region.key)
        assert again.wait(WAIT_S).fault is Fault.REGION
        assert pair.there.counters.refused >= 1

    def test_a_region_being_read_can_be_closed(self, pair: Pair) -> None:
        buffer = bytearray(256 * CHUNK)
        region = pair.there.register(memoryview(buffer), access=BOTH, scope=Scope(""))
        get = pair.peer.get(region.key, memoryview(bytearray(len(buffer))))
        until(lambda: pair.there.counters.served_bytes > 0)
        region.close()
        buffer.append(0)
        assert get.wait(WAIT_S).fault in (Fault.REGION, None)

    @pytest.mark.parametrize("put", [True, False])
    def test_a_region_is_revoked_at_once_while_a_peer_has_stopped(
        self, proxied: tuple[Pair, TcpProxy], put: bool
    ) -> None:
        """Who revokes must not wait for the peer; what had begun ends later, and the buffer is free
        only then.
        """
        pair, proxy = proxied
        buffer, other = bytearray(128 * CHUNK), bytearray(128 * CHUNK)
        region = pair.there.register(memoryview(buffer), access=BOTH, scope=Scope(""))
        assert pair.peer.put(memoryview(b"1"), region.key).wait(WAIT_S).ok
        proxy.hold_after(3 * CHUNK + CHUNK // 2)
        transfer = (
            pair.peer.put(memoryview(other), region.key)
            if put
            else pair.peer.get(region.key, memoryview(other))
        )
        until(lambda: proxy.holding)
        time.sleep(0.1)  # whatever had passed is being served
        begun_s = time.monotonic()
        free = region.revoke()
        assert time.monotonic() - begun_s < 0.2
        assert region.revoke() >= free, "a second time is no harm"
        if free:
            buffer.append(0)  # nothing refers to it any more
        proxy.move_on()
        region.close()
        frozen = bytes(buffer)
        buffer.append(0)
        assert transfer.wait(WAIT_S).fault is Fault.REGION
        assert buffer[:-1] == frozen


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


class MessageContract(FabricTests):
    """Control messages."""

    def test_a_request_is_answered_with_the_peers_name(self, pair: Pair) -> None:
        answers: list[bytes | Fault] = []
        pair.peer.request(b"hello", timeout_s=WAIT_S, answered=answers.append)
        until(lambda: bool(answers))
        assert answers == [b"here:hello"]

    def test_an_answer_may_come_later_from_any_thread_and_counts_once(self, make: Make) -> None:
        kept: list[Callable[[bytes], None]] = []
        here, there = make("here"), make("there", lambda node, body, answer: kept.append(answer))
        answers: list[bytes | Fault] = []
        here.peer(there.address).request(b"?", timeout_s=WAIT_S, answered=answers.append)
        until(lambda: bool(kept))
        kept[0](b"first")
        kept[0](b"second")
        until(lambda: bool(answers))
        assert answers == [b"first"]

    def test_a_request_without_an_answer_ends_at_its_deadline(self, make: Make) -> None:
        here, there = make("here"), make("there", lambda node, body, answer: None)
        answers: list[bytes | Fault] = []
        here.peer(there.address).request(b"?", timeout_s=0.3, answered=answers.append)
        until(lambda: bool(answers))
        assert answers == [Fault.DEADLINE]

    def test_a_server_that_fails_answers_the_next_one(self, make: Make) -> None:
        def serve(node: str, body: bytes, answer: Callable[[bytes], None]) -> None:
            if body == b"fail":
                raise RuntimeError("mine")
            answer(body)

        here, there = make("here"), make("there", serve)
        answers: list[bytes | Fault] = []
        here.peer(there.address).request(b"fail", timeout_s=0.2, answered=answers.append)
        here.peer(there.address).request(b"fine", timeout_s=WAIT_S, answered=answers.append)
        until(lambda: len(answers) == 2)
        assert set(answers) == {Fault.DEADLINE, b"fine"}

    def test_another_node_at_the_address_is_refused(self, make: Make) -> None:
        here, there = make("here"), make("there")
        peer = here.peer(replace(there.address, node="another"))
        done = peer.put(memoryview(b"1"), RegionKey(1, bytes(16), 1), deadline_s=5).wait(WAIT_S)
        assert done.fault is Fault.REFUSED


class FabricContract(TransferContract, RegionContract, FaultContract, MessageContract):
    """Every clause of ``ckptd.transport.verbs``, over real sockets."""
