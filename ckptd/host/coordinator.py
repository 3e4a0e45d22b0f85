"""The coordinator of a job: hears of failures from all hosts, and tells all when an epoch begins.

It is a part of the host of rank 0. If that host dies, the connections close, each other host goes on with its
trainer alone, and the launcher does what it does without hosts.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.host.epochs import AbandonJob, BeginEpoch, JobEpochs, Order, ReleaseHosts
from ckptd.host.host_links import Link, LinkError, accept, listen
from ckptd.host.host_options import HostOptions
from ckptd.host.zygote_link import StoreServer

__all__ = ["Coordinator", "StorePort"]

logger = logging.getLogger(__name__)

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StorePort:
    """Where the trainers of an epoch meet.

    Attributes:
        port: 0: they need no store.
        served: the store is there. If not, the trainer of rank 0 makes it.
    """

    port: int
    served: bool


class Coordinator:
    """Orders for all hosts, this one included.

    Args:
        folder: private; the socket for the other hosts is made there.
        obey: what this host does with a message.
    """

    def __init__(self, options: HostOptions, folder: Path, obey: Callable[[Message], None]) -> None:
        self._options, self._obey = options, obey
        self._epochs = JobEpochs(
            options.world_size, max_restarts=options.max_restarts, steady_s=options.steady_s
        )
        self._members: dict[Link, int] = {}
        self._socket = folder / f"{options.job}.sock"
        self.listener: socket.socket | None = None
        if options.world_size > 1:
            self.listener = listen(folder, self._socket.name)
        self._stores: StoreServer | None = None
        self._no_server = False
        self._spare_port = 0
        self._waiting: BeginEpoch | None = None
        self._last: Message | None = None

    # -- other hosts ------------------------------------------------------------------------------

    def admit(self) -> Link | None:
        """Somebody connects; the new link, which speaks first."""
        assert self.listener is not None
        try:
            link = accept(self.listener)
        except LinkError as error:
            logger.warning("refused: %s", error)
            return None
        if link is not None:
            self._members[link] = -1
        return link

    def hear(self, link: Link) -> bool:
        """A member has sent something; False if it has gone."""
        try:
            for message in link.receive():
                if self._members[link] < 0:
                    self._greet(link, message)
                else:
                    self.report(self._members[link], message)
        except (LinkError, KeyError, TypeError, ValueError) as error:
            rank = self._members.pop(link)
            link.close()
            if rank >= 0:
                self._give(self._epochs.left(rank, f"the host of rank {rank} has gone ({error})"))
            return False
        return True

    def _greet(self, link: Link, hello: Message) -> None:
        rank, world_size = int(hello["rank"]), int(hello["world_size"])
        if world_size != self._options.world_size or not 0 < rank < world_size:
            raise LinkError(f"rank {rank} of {world_size} is no rank of this job")
        if rank in self._members.values():
            raise LinkError(f"rank {rank} has a host already")
        self._members[link] = rank
        if self._last is not None:
            link.send(self._last)

    def report(self, rank: int, message: Message) -> None:
        """What a host says of its trainer."""
        match message["told"]:
            case "started":
                self._epochs.started(rank, int(message["epoch"]), time.monotonic())
            case "failed":
                why = f"rank {rank}: {message['why']}"
                self._give(self._epochs.failed(rank, int(message["epoch"]), why, time.monotonic()))
            case "completed":
                self._give(self._epochs.completed(rank, int(message["epoch"])))
            case "leaving":
                self._give(self._epochs.left(rank, f"rank {rank}: {message['why']}"))

    # -- orders -----------------------------------------------------------------------------------

    def _give(self, order: Order | None) -> None:
        match order:
            case None:
                return
            case BeginEpoch():
                self._waiting = order
                self._begin()
            case ReleaseHosts():
                self._say({"order": "release"})
            case AbandonJob(because):
                self._waiting = None
                self._say({"order": "abandon", "because": because})

    def _begin(self) -> None:
        """Begin the epoch that waits, if there is a store for it."""
        order = self._waiting
        if order is None:
            return
        port = StorePort(0, False)
        if self._options.has_store:
            if self._spare_port:
                port = StorePort(self._spare_port, True)
            elif self._no_server:
                port = StorePort(_free_port(), False)
            else:
                return  # a port arrives, or the news that none will
        self._waiting, self._spare_port = None, 0
        if self._stores is not None:
            self._stores.ask()
        self._say(
            {
                "order": "begin",
                "epoch": order.epoch,
                "port": port.port,
                "served": port.served,
                "because": order.because,
            }
        )

    def _say(self, message: Message) -> None:
        self._last = message
        for link in self._members:
            # A link that cannot be written to is closed when it is read.
            with contextlib.suppress(LinkError):
                link.send(message)
        self._obey(message)

    # -- stores -----------------------------------------------------------------------------------

    @property
    def needs_server(self) -> bool:
        """Whether a server of stores is to be forked."""
        return self._options.has_store and self._stores is None

    def use_server(self, stores: StoreServer | None) -> None:
        """A server was forked; None: there will be none, and the trainer of rank 0 makes the stores."""
        self._stores, self._no_server = stores, stores is None
        if stores is not None:
            stores.ask()
        self._begin()

    def hear_stores(self) -> bool:
        """The server has sent something; False if it has gone."""
        assert self._stores is not None
        ports = self._stores.receive()
        if ports is None:
            self._stores.close()
            self._stores, self._spare_port = None, 0
            return False
        for port in ports:
            self._spare_port = port
        self._begin()
        return True

    def close(self) -> None:
        """The job is over here."""
        if self._stores is not None:
            self._stores.close()
        if self.listener is not None:
            self.listener.close()
            self._socket.unlink(missing_ok=True)
        for link in self._members:
            link.close()


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        port: int = free.getsockname()[1]
        return port
