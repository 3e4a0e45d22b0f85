"""The contract: bytes arrive, transfers can be ended, and take no more than they may."""

from __future__ import annotations

import gc
import resource
import socket
import threading
from dataclasses import replace
from mmap import mmap

import pytest

from ckptd.transport.verbs import Completion, Fault, RegionKey, Scope
from tests.transport.fabric_pairs import (
    BOTH,
    CHUNK,
    SIZES,
    WAIT_S,
    FabricTests,
    Make,
    Pair,
    content,
    until,
)

__all__ = ["TransferContract"]


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
