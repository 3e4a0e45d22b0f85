"""The contract: who may touch which region, and until when."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ckptd.transport.verbs import Access, Fault, RegionKey, Scope
from tests.transport.fabric_pairs import (
    BOTH,
    CHUNK,
    WAIT_S,
    FabricTests,
    Pair,
    TcpProxy,
    until,
)

__all__ = ["RegionContract"]


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
