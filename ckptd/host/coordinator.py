"""The coordinator of a job: hears of failures from all hosts, and tells all when an epoch begins.

It is a part of the host of rank 0. Hosts of one machine connect to its unix socket. Those of other machines
connect by TCP: the address, the port and a token of this start are in the job's store.

If another host is lost, all are told to end their trainers and themselves, or, in a job that can go on with
fewer ranks, to begin an epoch without it. If this one is lost, its connections close, and the others end by
themselves (`ckptd.host.member`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.host.epochs import AbandonJob, BeginEpoch, EndLoops, JobEpochs, Order, ReleaseHosts, StopJob
from ckptd.host.hangs.job_hangs import JobHangs
from ckptd.host.host_links import Link, LinkError, accept, listen
from ckptd.host.host_loop import HostLoop
from ckptd.host.host_options import HostOptions
from ckptd.host.job_store import StoreErrand, store_request
from ckptd.host.process_control import allow_descriptors
from ckptd.host.rerouted_epochs import ReroutedEpochs
from ckptd.host.zygotes.zygote_link import StoreServer, ZygoteLink

logger = logging.getLogger(__name__)

Message = dict[str, Any]

JOIN_S = 300.0  # as long as a zygote may import
# A connection that has not shown within this time that it is a host of this job is closed.
GREET_S = 5.0
_STRANGERS_MAX = 64  # beside one connection for each rank; then the oldest one makes room
_OTHER_FILES = 64  # that a host has open
_PUBLISH_AGAIN_S = 0.5
# When the members of a job change, torchrun tells all hosts to end within about this time. If it has told
# some only, those are leaving.
_DEPART_S = 2.0


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
        folder: private; the socket for the other hosts of this machine is made there.
        obey: what this host does with a message.
    Raises:
        OSError: nobody could connect: no socket can be made.
    """

    def __init__(
        self, options: HostOptions, folder: Path, loop: HostLoop, obey: Callable[[Message], None]
    ) -> None:
        self._options, self._loop, self._obey = options, loop, obey
        self._rerouted: ReroutedEpochs | None = None
        self._epochs = self._epochs_of(options)
        self._hangs = JobHangs(lambda: len(self._epochs.ranks), loop, self._send, self._hung)
        self._members: dict[Link, int] = {}  # the ranks of the start
        self._nodes: dict[int, int | None] = {0: options.node}
        self._strangers: dict[Link, float] = {}  # since when; in this order
        self._start = os.urandom(8).hex()  # which start of the job this is
        self._socket = folder / f"{options.job}.sock"
        self._token = b""
        self._address = ""  # of this machine, for others
        self._listener: socket.socket | None = None
        if options.world_size > 1:
            self._listener = self._listen()
        self._errand: StoreErrand | None = None
        self._published = False
        self._zygote: ZygoteLink | None = None
        self._publish_until = 0.0
        self._stores: StoreServer | None = None
        self._no_server = False
        self._spare_port = 0
        self._served_epoch = 0  # the newest that has a store of the present server
        self._waiting: BeginEpoch | None = None
        self._last: Message | None = None
        self._leaving_because = ""

    def _epochs_of(self, options: HostOptions) -> JobEpochs:
        limits: dict[str, Any] = {"max_restarts": options.max_restarts, "steady_s": options.steady_s}
        if options.reroute:
            self._rerouted = ReroutedEpochs(options.world_size, **limits)
            return self._rerouted
        return JobEpochs(options.world_size, **limits, min_ranks=options.min_ranks)

    def _listen(self) -> socket.socket:
        if self._options.one_machine:
            return listen(self._socket.parent, self._socket.name)
        # Not needed on one machine, where hosts are to be small: it imports OpenSSL.
        from ckptd.host.remote_links import TOKEN_BYTES, address_towards, listen_remotely

        self._token = os.urandom(TOKEN_BYTES)
        self._address, own = address_towards(*self._options.store)
        return listen_remotely(own)

    def begin(self) -> None:
        """Let hosts join."""
        self._obey({"order": "start", "start": self._start})
        if self._listener is None:
            return
        needed = self._options.world_size + _STRANGERS_MAX + _OTHER_FILES
        if (allowed := allow_descriptors(needed)) < needed:
            logger.warning(
                "rank 0: this host may open %d files, and %d hosts need up to %d: raise the hard limit "
                "(ulimit -Hn)",
                allowed,
                self._options.world_size,
                needed,
            )
        self._loop.watch(self._listener, self._on_connect)

    # -- other hosts ------------------------------------------------------------------------------

    def _on_connect(self) -> None:
        link = self._accepted()
        if link is None:
            return
        if len(self._strangers) >= self._options.world_size + _STRANGERS_MAX:
            self._turn_away(next(iter(self._strangers)))
        self._strangers[link] = time.monotonic()
        self._loop.watch(link, lambda: self._on_link(link))
        if not self._loop.is_timed(self._look_at_strangers):
            self._loop.after(GREET_S, self._look_at_strangers)

    def _accepted(self) -> Link | None:
        assert self._listener is not None
        if self._options.one_machine:
            try:
                return accept(self._listener)
            except LinkError as error:
                logger.warning("refused: %s", error)
                return None
        from ckptd.host.remote_links import accept_remote

        return accept_remote(self._listener, self._token, self._options.silence_s)

    def _turn_away(self, link: Link) -> None:
        del self._strangers[link]
        self._loop.forget(link)
        link.close()

    def _look_at_strangers(self) -> None:
        now = time.monotonic()
        for link in [link for link, since in self._strangers.items() if since + GREET_S <= now]:
            self._turn_away(link)
        for since in self._strangers.values():  # the oldest
            self._loop.after(since + GREET_S - now, self._look_at_strangers)
            break

    def _on_link(self, link: Link) -> None:
        try:
            for message in link.receive():
                if link in self._strangers:
                    self._greet(link, message)
                else:
                    self.report(self._members[link], message)
        except (LinkError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            if link in self._strangers:
                logger.info("rank 0: a connection is closed: %s", error)
                self._turn_away(link)
                return
            rank = self._members.pop(link)
            self._loop.forget(link)
            link.close()
            if rank not in self._epochs.departing:
                why = f"the host of rank {self._now(rank)} is lost ({error})"
                self._give(self._epochs.lost(self._with_node_of(rank), why, time.monotonic()))

    def _greet(self, link: Link, hello: Message) -> None:
        rank, world_size = int(hello["rank"]), int(hello["world_size"])
        if world_size != self._options.world_size or not 0 < rank < world_size:
            raise LinkError(f"rank {rank} of {world_size} is no rank of this job")
        if rank in self._members.values():
            raise LinkError(f"rank {rank} has a host already")
        if rank not in self._epochs.ranks:
            raise LinkError(f"the job goes on without rank {rank}")
        if self._epochs.closed and not self._options.one_machine:
            raise LinkError(f"rank {rank} comes late: this start of the job is over")
        link.send({"order": "welcome", "start": self._start})
        del self._strangers[link]
        self._members[link] = rank
        self._nodes[rank] = hello.get("node")
        if self._complete:
            logger.info("rank 0: all %d hosts have joined", world_size)
            self._epochs.joined()
        if self._last is not None:
            link.send(self._last)

    @property
    def _complete(self) -> bool:
        """Whether all hosts have joined; once is enough."""
        return len(self._nodes) == self._options.world_size

    def _with_node_of(self, rank: int) -> set[int]:
        """The ranks that are lost with this one."""
        node = None if self._rerouted is not None else self._nodes[rank]
        return {rank} if node is None else {each for each, there in self._nodes.items() if there == node}

    def _now(self, rank: int) -> int:
        """Which rank it is now, of those that are left."""
        ranks = self._epochs.ranks
        return ranks.index(rank) if rank in ranks else rank

    def tell(self, message: Message) -> None:
        """What this host says of its own trainer."""
        self.report(0, message)

    def report(self, rank: int, message: Message) -> None:
        """What a host says of its trainer."""
        match message["told"]:
            case "started":
                self._epochs.started(rank, int(message["epoch"]), time.monotonic())
            case "failed" | "completed" if not (self._options.one_machine or self._complete):
                # Without torchrun the store was that of rank 0's trainer: who comes late finds none.
                end = f"rank {rank}: {message['why']}"
                self._give(self._epochs.left({rank}, f"{end}, before all hosts had joined"))
            case "failed":
                why = f"rank {self._now(rank)}: {message['why']}"
                self._give(self._epochs.failed(rank, int(message["epoch"]), why, time.monotonic()))
            case "completed":
                self._give(self._epochs.completed(rank, int(message["epoch"])))
            case "leaving":
                self._leaves(rank, f"rank {self._now(rank)}: {message['why']}")
            case "overdue":
                if int(message["epoch"]) == self._epochs.epoch and not self._epochs.closed:
                    self._hangs.overdue(self._now(rank), message)
            case "said" if self._rerouted is not None:
                self._give(self._said(self._rerouted, rank, message))
            case "position" if rank in self._epochs.ranks:
                self._hangs.answered(self._now(rank), message)

    def _said(self, epochs: ReroutedEpochs, rank: int, message: Message) -> Order | None:
        """By a trainer, through its host."""
        match message["word"]:
            case "ready":
                return epochs.ready(rank, int(message["epoch"]))
            case "finished":
                return epochs.finished(rank, int(message["epoch"]))
            case "recover":
                return epochs.cannot_go_on(int(message["epoch"]), f"rank {rank}: {message['why']}")
        return None

    def _leaves(self, rank: int, why: str) -> None:
        self._give(self._epochs.left(self._with_node_of(rank), why))
        if self._epochs.departing and not self._loop.is_timed(self._depart):
            self._leaving_because = why
            self._loop.after(_DEPART_S, self._depart)

    def _depart(self) -> None:
        self._give(self._epochs.depart(self._leaving_because, time.monotonic()))

    def _hung(self, step: int, why: str, host_is_silent: bool) -> None:
        if host_is_silent:  # it would not hear of another epoch
            self._give(self._epochs.lost((), why, time.monotonic()))
        else:
            self._give(self._epochs.hung(step, why, time.monotonic()))

    # -- orders -----------------------------------------------------------------------------------

    def _give(self, order: Order | None) -> None:
        match order:
            case None:
                return
            case BeginEpoch():
                self._waiting = order
                self._begin()
            case EndLoops(absent):
                self._say({"order": "end_loops", "absent": list(absent)})
            case ReleaseHosts():
                self._say({"order": "release"})
            case AbandonJob(because):
                self._waiting = None
                self._say({"order": "abandon", "because": because})
            case StopJob(because):
                self._waiting = None
                self._say({"order": "stop", "because": because})

    def _begin(self) -> None:
        """Begin the epoch that waits, if there is a store for it."""
        order = self._waiting
        if order is None:
            return
        port = StorePort(0, False)
        if self._options.has_store:
            if self._spare_port:
                port = StorePort(self._spare_port, True)
                self._served_epoch = order.epoch
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
                "address": self._address,
                "port": port.port,
                "served": port.served,
                "because": order.because,
                "staying": order.staying,
                "patience": order.patience,
                "absent": list(order.absent),
                "at_boundary": order.at_boundary,
                "without": list(order.without),
                "without_nodes": sorted(
                    {node for r in order.without if (node := self._nodes[r]) is not None}
                ),
            }
        )

    def _say(self, message: Message) -> None:
        """An order; whoever joins later gets the last one."""
        self._hangs.cancel()
        self._last = message
        self._send(message)

    def _send(self, message: Message) -> None:
        for link in self._members:
            # A link that cannot be written to is closed when it is read.
            with contextlib.suppress(LinkError):
                link.send(message)
        self._obey(message)

    # -- what only torch can do -------------------------------------------------------------------

    def use(self, zygote: ZygoteLink | None) -> None:
        """A zygote is ready to fork what this needs; None: there will be none."""
        self._zygote = zygote
        self._serve_stores()
        self._publish()

    def _serve_stores(self) -> None:
        if not self._options.has_store or self._stores is not None:
            return
        self._no_server = self._zygote is None
        if self._zygote is not None:
            self._stores = self._zygote.fork_store()
            self._stores.ask()
            self._loop.watch(self._stores, self._on_stores)
        self._begin()

    def _on_stores(self) -> None:
        assert self._stores is not None
        ports = self._stores.receive()
        if ports is None:
            logger.warning("rank 0: the server of stores has ended; another is needed")
            self._loop.forget(self._stores)
            self._stores.close()
            self._stores, self._spare_port = None, 0
            served, self._served_epoch = self._served_epoch, 0
            if served:
                self._give(self._epochs.store_lost(served, time.monotonic()))
            if self._zygote is None or self._zygote.ready:  # else one is asked when it is
                self._serve_stores()
            return
        for port in ports:
            self._spare_port = port
        self._begin()

    def _publish(self) -> None:
        """Write into the job's store where this coordinator is."""
        if self._listener is None or self._options.one_machine or self._published or self._errand is not None:
            return
        place = {
            "address": self._address,
            "port": self._listener.getsockname()[1],
            "token": self._token.hex(),
        }
        self._publish_until = self._publish_until or time.monotonic() + JOIN_S
        try:
            request = store_request(self._options, self._publish_until, json.dumps(place))
            self._errand = StoreErrand(self._loop, self._zygote, request, self._on_published)
        except OSError as error:
            self._cannot_publish(str(error))

    def _on_published(self, answer: Message) -> None:
        self._errand = None
        if "value" in answer:
            self._published = True
        else:
            self._cannot_publish(answer["error"])

    def _cannot_publish(self, error: str) -> None:
        if time.monotonic() < self._publish_until:
            self._loop.after(_PUBLISH_AGAIN_S, self._publish)
            return
        why = f"the other hosts cannot be told where to meet: {error}"
        self._give(self._epochs.left({0}, why))

    def close(self) -> None:
        """The job is over here."""
        if self._errand is not None:
            self._errand.close()
        for source in (self._stores, self._listener, *self._members, *self._strangers):
            if source is not None:
                self._loop.forget(source)
                source.close()
        for timer in (self._publish, self._look_at_strangers, self._depart):
            self._loop.cancel(timer)
        if self._listener is not None and self._options.one_machine:
            self._socket.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        port: int = free.getsockname()[1]
        return port
