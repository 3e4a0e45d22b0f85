"""Tell the service manager how we are: the notification socket of systemd, and nothing else."""

from __future__ import annotations

import logging
import socket

__all__ = ["Notifier"]

logger = logging.getLogger(__name__)


class Notifier:
    """Sends state lines such as READY=1; without a socket every call does nothing."""

    def __init__(self, address: str | None) -> None:
        self._address: str | None = None
        if address:
            # A leading @ stands for the zero byte of Linux' abstract namespace.
            self._address = "\0" + address[1:] if address.startswith("@") else address

    def send(self, *lines: str) -> None:
        """Send the lines in one datagram. A manager that does not listen is logged, no more."""
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            logger.warning("service manager not notified of %s: %s", lines[0], error)
