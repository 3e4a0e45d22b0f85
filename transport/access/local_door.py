"""Who stands at the door of a local (ipc) socket: as at the ports for peers, with processes of this
host in the place of addresses.

A connection is a stranger until a message of ours came over it. Strangers may be silent for as long
as they like: a trainer's connection renews itself after a restart of the daemon, and has nothing to
say until the trainer has. They are bounded in number, for each process and all together. So a
process that opens thousands of connections makes room for itself alone.

libzmq aborts the process when it cannot accept on such a socket for want of descriptors. It runs
ahead of the door by `doorkeeper.AHEAD` connections at most; the process needs so many descriptors
beside all that it uses (`ENOUGH_DESCRIPTORS`).
"""

from __future__ import annotations

import math
import os
import resource
import socket
import struct

import zmq

from ckptd.transport.access.admission import AdmissionLimits
from ckptd.transport.access.doorkeeper import AHEAD, Doorkeeper, Visitor
from ckptd.transport.access.refusals import RefusalLog

__all__ = ["ENOUGH_DESCRIPTORS", "LocalDoor", "local_limits"]

ENOUGH_DESCRIPTORS = 4096  # two doors' `AHEAD`, and as many again for what is let in
assert ENOUGH_DESCRIPTORS > 3 * AHEAD
_CREDENTIALS = struct.Struct("@iII")  # struct ucred: pid, uid, gid


def local_limits(descriptors: int) -> AdmissionLimits:
    """What local connections may take of this many descriptors: an eighth."""
    if descriptors == resource.RLIM_INFINITY:
        descriptors = 1 << 20
    connections = max(32, min(2048, descriptors // 8))
    return AdmissionLimits(
        connections=connections,
        strangers=min(256, connections // 2),
        strangers_per_address=min(64, connections // 4),
        arrivals_per_s=500.0,  # no key is exchanged: it costs a tenth of a peer's
        arrivals_burst=1000.0,
        per_peer=min(256, connections // 2),
        patience_s=math.inf,
    )


class LocalDoor(Doorkeeper):
    """``path``: of the socket."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        limits: AdmissionLimits,
        refusals: RefusalLog,
        *,
        path: str,
    ) -> None:
        super().__init__("local", router, limits, refusals)
        self._path = path

    def heard(self, fd: int, process: int) -> None:
        """A message of ours came over this connection, from this process (0 or less: it has no
        number here).
        """
        self.identified(fd, _source(process), _source(process) if process > 0 else "")

    def _visitor(self, fd: int, connection: socket.socket) -> Visitor | None:
        if connection.family != socket.AF_UNIX or connection.getsockname() != self._path:
            return None
        told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(told)[0]
        return Visitor(fd, os.fstat(connection.fileno()).st_ino, (pid,), _source(pid))

    def _measure(self, visitor: Visitor, node: str) -> None:
        """The kernel does not say how much came over such a connection."""

    def _left(self, source: str) -> None:
        """Whoever only looks whether somebody listens is not worth telling of: every client of ours does."""


def _source(process: int) -> str:
    return f"process {process}" if process > 0 else "processes of other pid namespaces"
