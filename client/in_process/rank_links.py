"""The TCP connections between this process and other ranks, which can be cut.

A rank that waits for a message in gloo cannot be told to stop: gloo has no abort. It stops when the
connection ends. Which of a process's connections lead to other ranks is known by comparison: each rank tells
all what its connections are between, and those that another rank has, too, seen from its side, are these.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import xxhash

from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import Collectives

logger = get_logger(__name__)

Address = tuple[str, int]


class _Link(NamedTuple):
    descriptor: int
    own: Address
    other: Address


class RankLinks:
    """Connections of this process to others."""

    def __init__(self, links: Sequence[_Link] = ()) -> None:
        self._links = tuple(links)

    def __len__(self) -> int:
        return len(self._links)

    @classmethod
    def find(cls, ranks: Collectives) -> Self:
        """Those to other ranks; a collective call. A rank sends eight bytes for each of its connections."""
        mine = list(_tcp_connections())
        told = ranks.gather([_number_of(link.own, link.other) for link in mine], list[int])
        others = {number for rank, numbers in enumerate(told) if rank != ranks.rank for number in numbers}
        return cls([link for link in mine if _number_of(link.other, link.own) in others])

    def cut(self) -> None:
        """End them. The descriptors stay open: they are gloo's."""
        for link in self._links:
            with contextlib.suppress(OSError), _opened(link.descriptor) as connection:
                if _ends_of(connection) == (link.own, link.other):
                    connection.shutdown(socket.SHUT_RDWR)


def _tcp_connections() -> Iterator[_Link]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), _opened(int(name)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                yield _Link(int(name), *_ends_of(connection))


@contextlib.contextmanager
def _opened(descriptor: int) -> Iterator[socket.socket]:
    """The socket of a descriptor."""
    duplicate = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)  # or the lock that a file holds outlives its owner
        raise
    with connection:
        yield connection


def _ends_of(connection: socket.socket) -> tuple[Address, Address]:
    """Raises OSError if it is not connected."""
    own, other = connection.getsockname(), connection.getpeername()
    return (_plain(own[0]), own[1]), (_plain(other[0]), other[1])


def _plain(host: str) -> str:
    """An IPv4 address in an IPv6 socket as the other side may see it."""
    return host.removeprefix("::ffff:").partition("%")[0]


def _number_of(own: Address, other: Address) -> int:
    return xxhash.xxh3_64_intdigest(f"{own}{other}".encode())
