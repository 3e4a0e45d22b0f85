"""Typed requests to a peer, and transfers; answers come on the daemon's loop thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from ckptd.node_context import Post
from ckptd.transport.peer_messages import (
    PeerMessage,
    PeerRefused,
    PeerReply,
    ReadOpened,
    SlotGranted,
    decode_peer,
    encode_peer,
)
from ckptd.transport.verbs import Done, Fault, Peer, PeerAddress, RegionKey, Transfer


class Holder(Protocol):
    """A source of snapshots: `PeerLink`, or `ckptd.persistence.store_link.StoreLink`."""

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
        """Send a request; exactly one of ``done(reply)`` and ``failed(code, reason)`` is called, later."""

    def tell(self, message: Any) -> None:
        """Send a message that needs no answer."""

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


def region_of(reply: SlotGranted | ReadOpened) -> RegionKey:
    """The region that a peer granted."""
    return RegionKey(reply.region, reply.token, reply.length, reply.file)


ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)
# Answers a request of a peer once, now or later.
AnswerPeer = Callable[[PeerReply], None]

ASK_TIMEOUT_S = 10.0


class PeerLink:
    """The connection to one peer; every callback comes on the loop thread.

    Args:
        post: calls a function on the loop thread.
        boot_id: of this daemon; what the peer does for us ends with it.
    """

    def __init__(self, peer: Peer, post: Post, boot_id: str) -> None:
        self._peer, self._post, self.boot_id = peer, post, boot_id

    @property
    def address(self) -> PeerAddress:
        return self._peer.address

    def ask(
        self,
        message: PeerMessage,
        expect: type[ReplyT],
        done: Callable[[ReplyT], None],
        failed: Callable[[str, str], None],
        *,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> None:
        """Send a request; exactly one of ``done(reply)`` and ``failed(code, reason)`` is called, later.

        ``code`` is the peer's (`PeerRefused.code`) or a fault of the fabric.
        """

        def answered(body: bytes | Fault) -> None:
            self._post(lambda: _deliver(body, expect, done, failed))

        self._peer.request(encode_peer(message), timeout_s=timeout_s, answered=answered)

    def tell(self, message: PeerMessage) -> None:
        """Send a message without an answer; it is lost if the peer is away."""
        self._peer.request(encode_peer(message), timeout_s=ASK_TIMEOUT_S, answered=lambda _: None)

    def put(
        self, source: memoryview, target: RegionKey, *, offset: int = 0, deadline_s: float, done: Done
    ) -> Transfer:
        """`Peer.put`; ``done`` is called on the loop thread."""
        return self._peer.put(
            source,
            target,
            offset=offset,
            deadline_s=deadline_s,
            done=lambda completion: self._post(lambda: done(completion)),
        )

    def get(
        self,
        source: RegionKey,
        target: memoryview,
        *,
        offset: int,
        deadline_s: float,
        done: Done,
    ) -> Transfer:
        """`Peer.get`; ``done`` is called on the loop thread."""
        return self._peer.get(
            source,
            target,
            offset=offset,
            deadline_s=deadline_s,
            done=lambda completion: self._post(lambda: done(completion)),
        )

    def close(self) -> None:
        self._peer.close()


def _deliver(
    body: bytes | Fault,
    expect: type[ReplyT],
    done: Callable[[ReplyT], None],
    failed: Callable[[str, str], None],
) -> None:
    if isinstance(body, Fault):
        failed(str(body), f"no answer: {body}")
        return
    try:
        reply = decode_peer(body)
    except ValueError as error:
        failed("bad_message", str(error))
        return
    if isinstance(reply, expect):
        done(reply)
    elif isinstance(reply, PeerRefused):
        failed(reply.code, f"{reply.message} ({reply.hint})" if reply.hint else reply.message)
    else:
        failed("bad_message", f"answered with {type(reply).__name__}")
