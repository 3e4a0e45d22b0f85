"""Whoever snapshots can be had from: a peer, or storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ckptd.transport.verbs import Done, RegionKey, Transfer

__all__ = ["Holder"]


class Holder(Protocol):
    """What fetches need of `ckptd.peers.peer_link.PeerLink` and `ckptd.persistence.store_link.StoreLink`."""

    boot_id: str

    def ask(
        self,
        message: Any,
        expect: type[Any],
        done: Callable[[Any], None],
        failed: Callable[[str, str], None],
        *,
        timeout_s: float = ...,
    ) -> None:
        """Send a question; one of ``done(reply)`` and ``failed(code, reason)`` is called, later."""

    def tell(self, message: Any) -> None:
        """Send what needs no answer."""

    def get(
        self,
        source: RegionKey,
        target: memoryview,
        *,
        offset: int,
        deadline_s: float,
        done: Done,
    ) -> Transfer:
        """Fill ``target`` from the region, from ``offset`` on."""
