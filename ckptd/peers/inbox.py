"""Requests of peers that wait for the daemon's loop thread: bounded, for each peer and all together."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from ckptd.node_context import NodeContext
from ckptd.transport import peer_messages as p
from ckptd.units import format_bytes

__all__ = ["PeerInbox"]

_MAX_UNSERVED = 1024  # requests of one peer: more than a node of hundreds of ranks has at a time
_MAX_UNSERVED_BYTES = 64 << 20  # of one peer: two of the largest
_MAX_ALL_UNSERVED_BYTES = 256 << 20  # of all peers together

_Answer = Callable[[bytes], None]


class PeerInbox:
    """Hands requests from a fabric's threads to the loop thread.

    Args:
        serve: called on the loop thread with each request.
    """

    def __init__(self, node: NodeContext, serve: Callable[[str, bytes, _Answer], None]) -> None:
        self._node, self._serve = node, serve
        self._unserved: Counter[str] = Counter()
        self._unserved_bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def arrived(self, peer: str, body: bytes, answer: _Answer) -> None:
        """On a fabric's thread: have it served, or refuse it."""
        with self._lock:
            full = self._too_many_wait(peer, len(body))
            if not full:
                self._unserved[peer] += 1
                self._unserved_bytes[peer] += len(body)
        if full:
            self._node.post(lambda: self._node.events.count("peer_busy"))
            answer(p.encode_peer(p.PeerRefused("busy", full, "try again")))
            return
        self._node.post(lambda: self._serve_next(peer, body, answer))

    def _too_many_wait(self, peer: str, size_bytes: int) -> str:
        """Why a request of this size does not get a place; "" if it does. One of each peer does,
        whatever its size.
        """
        if not self._unserved[peer]:
            return ""
        if self._unserved[peer] >= _MAX_UNSERVED:
            return f"{_MAX_UNSERVED} requests of {peer} wait already"
        if self._unserved_bytes[peer] + size_bytes > _MAX_UNSERVED_BYTES:
            return f"{format_bytes(self._unserved_bytes[peer])} of requests of {peer} wait already"
        total = self._unserved_bytes.total()
        if total + size_bytes > _MAX_ALL_UNSERVED_BYTES:
            return f"{format_bytes(total)} of requests wait already"
        return ""

    def _serve_next(self, peer: str, body: bytes, answer: _Answer) -> None:
        with self._lock:
            self._unserved[peer] -= 1
            self._unserved_bytes[peer] -= len(body)
            if not self._unserved[peer]:
                del self._unserved[peer], self._unserved_bytes[peer]
        self._serve(peer, body, answer)
