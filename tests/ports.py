"""Ports for programs that tests start and that are told which one to listen on."""

from __future__ import annotations

import socket
from contextlib import ExitStack

__all__ = ["free_port", "free_ports"]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports of this address that nobody listens on now; other processes can take them, too.

    Raises:
        OSError: this machine has no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server((host, 0), family=family)) for _ in range(count)]
        return [listener.getsockname()[1] for listener in taken]


def free_port(host: str = "127.0.0.1") -> int:
    """One such port."""
    (port,) = free_ports(1, host)
    return port
