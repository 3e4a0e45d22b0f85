"""What the host of a rank other than 0 has of the coordinator: a link, and its loss.

Until the coordinator has welcomed this host, everything is tried again, for some time; then the host goes on
without further epochs. Once welcomed, the loss of the link is the loss of the host of rank 0, and with it of
its trainer: this epoch cannot go on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptd.host.coordinator import GREET_S, JOIN_S
from ckptd.host.host_links import Link, LinkError, connect
from ckptd.host.host_loop import HostLoop
from ckptd.host.host_options import HostOptions
from ckptd.host.job_store import StoreErrand, store_request
from ckptd.host.zygotes.zygote_link import ZygoteLink

logger = logging.getLogger(__name__)

Message = dict[str, Any]

_LISTENS_YET_S = 0.02  # on one machine: is there a socket?
_AGAIN_S = (0.2, 2.0)  # first, and at most
_TOO_LATE = "its trainer has ended before this host had joined the others"
_TOKEN = re.compile(r"([0-9a-f]{2})+")


class JobMember:
    """A host's place in its job, seen from any rank but 0.

    Args:
        folder: private; the coordinator's socket is there if it is on this machine.
        obey: what this host does with a message of the coordinator.
    """

    def __init__(
        self, options: HostOptions, folder: Path, loop: HostLoop, obey: Callable[[Message], None]
    ) -> None:
        self._options, self._folder, self._loop, self._obey = options, folder, loop, obey
        self._zygote: ZygoteLink | None = None
        self._unsent: list[Message] = []
        self._until = 0.0
        self._errand: StoreErrand | None = None
        self._connecting: socket.socket | None = None
        self._link: Link | None = None
        self._hello_sent = self._welcome = self._last_try = self._over = False
        self._again_s = _AGAIN_S[0]
        self._why = "the host of rank 0 did not appear"

    def begin(self) -> None:
        """Begin to join."""
        if self._options.one_machine:
            self._begin_joining()

    def _begin_joining(self) -> None:
        self._until = time.monotonic() + JOIN_S
        self._loop.after(JOIN_S, self._give_up)
        self._join()

    def use(self, zygote: ZygoteLink | None) -> None:
        """A zygote is ready to fork what reads the job's store; None: there will be none."""
        self._zygote = zygote
        if not self._options.one_machine and not self._until:
            self._begin_joining()

    def tell(self, message: Message) -> None:
        """Tell the coordinator; what cannot be sent yet is sent after joining."""
        if not self._welcome:
            self._unsent.append(message)
            if message["told"] in ("failed", "completed") and not self._options.one_machine:
                # The store through which hosts find each other may have ended with a trainer.
                self._last_try = True
                if not self._hello_sent:
                    self._give_up(_TOO_LATE)
        elif self._link is not None:
            with contextlib.suppress(LinkError):  # seen when it is read
                self._link.send(message)

    # -- joining ----------------------------------------------------------------------------------

    def _join(self) -> None:
        if self._link is not None or self._over:
            return
        if not self._options.one_machine:
            self._look_up()
            return
        try:
            link = connect(self._folder, f"{self._options.job}.sock")
        except LinkError as error:
            self._give_up(f"no connection to the host of rank 0: {error}")
            return
        if link is None:
            self._loop.after(_LISTENS_YET_S, self._join)
        else:
            self._use_link(link)

    def _look_up(self) -> None:
        """Where is the host of rank 0?"""
        try:
            request = store_request(self._options, self._until)
            self._errand = StoreErrand(self._loop, self._zygote, request, self._on_answer)
        except OSError as error:
            self._try_again(str(error))

    def _on_answer(self, answer: Message) -> None:
        self._errand = None
        if "value" not in answer:
            self._try_again(f"the job's store: {answer['error']}")
            return
        # Not needed on one machine, where hosts are to be small: it imports OpenSSL.
        from ckptd.host.remote_links import start_connecting

        try:
            place = json.loads(answer["value"])
            if not _TOKEN.fullmatch(place["token"]):
                raise ValueError("no token")
            token = bytes.fromhex(place["token"])
            connection = start_connecting(place["address"], int(place["port"]), self._options.silence_s)
        except (OSError, KeyError, TypeError, ValueError, OverflowError) as error:
            self._try_again(f"the host of rank 0 cannot be reached: {error}")
            return
        self._connecting = connection
        self._loop.watch(connection, lambda: self._on_connected(token), writable=True)
        self._loop.after(GREET_S, self._on_no_welcome)

    def _on_connected(self, token: bytes) -> None:
        from ckptd.host.remote_links import RemoteLink

        connection, self._connecting = self._connecting, None
        assert connection is not None
        self._loop.forget(connection)
        number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if number:
                raise LinkError(os.strerror(number))
            link = RemoteLink(connection, token, connects=True)
        except LinkError as error:
            connection.close()
            self._try_again(f"the host of rank 0 cannot be reached: {error}")
            return
        self._use_link(link)

    def _use_link(self, link: Link) -> None:
        self._link = link
        self._loop.watch(link, self._on_link)
        if link.proven:
            self._say_hello()

    def _say_hello(self) -> None:
        assert self._link is not None
        self._hello_sent = True
        with contextlib.suppress(LinkError):  # seen when it is read
            own = self._options
            self._link.send({"rank": own.rank, "world_size": own.world_size, "node": own.node})

    def _on_no_welcome(self) -> None:
        self._drop_link()
        self._try_again("the host of rank 0 does not answer")

    def _try_again(self, why: str) -> None:
        self._loop.cancel(self._on_no_welcome)
        self._why = why
        if self._last_try:
            self._give_up(_TOO_LATE)
        if not self._over:
            self._loop.after(self._again_s, self._join)
            self._again_s = min(2 * self._again_s, _AGAIN_S[1])

    def _give_up(self, why: str = "") -> None:
        if self._welcome or self._over:
            return
        self._over = True
        self.close()
        self._obey({"order": "abandon", "because": why or self._why})

    # -- the link ---------------------------------------------------------------------------------

    def _on_link(self) -> None:
        assert self._link is not None
        try:
            messages = self._link.receive()
            if not self._hello_sent and self._link.proven:
                self._say_hello()
            for message in messages:
                if message["order"] == "welcome":
                    self._on_welcome(message["start"])
                else:
                    self._obey(message)
        except (LinkError, KeyError) as error:
            self._drop_link()
            if not self._welcome:
                self._try_again(f"the host of rank 0 did not let this one join: {error}")
            elif not self._over:
                self._over = True
                self._obey({"order": "stop", "because": f"the host of rank 0 is lost ({error})"})

    def _on_welcome(self, start: str) -> None:
        self._welcome = True
        self._obey({"order": "start", "start": start})
        self._loop.cancel(self._on_no_welcome)
        self._loop.cancel(self._give_up)
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self.tell(message)

    def _drop_link(self) -> None:
        self._hello_sent = False
        for source in (self._link, self._connecting):
            if source is not None:
                self._loop.forget(source)
                source.close()
        self._link = self._connecting = None

    def close(self) -> None:
        """Join no further, or leave."""
        self._drop_link()
        if self._errand is not None:
            self._errand.close()
            self._errand = None
        for timer in (self._join, self._on_no_welcome, self._give_up):
            self._loop.cancel(timer)
