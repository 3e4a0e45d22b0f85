"""The socket between a trainer that can restart in its process and its host.

The trainer says that it could stay; the host tells it of the next epoch; the trainer says that it has come to
it. The host makes the socket, and all of its trainers inherit it in turn: so each message names the trainer
that it is from, or for.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, Self

LINE_VARIABLE = "CKPTD_HOST_LINE"
# In a job that re-routes: the epoch, a colon, and the ranks without which it goes on: "3:1,5".
EPOCH_VARIABLE = "CKPTD_HOST_EPOCH"
_PACKET_MAX = 64 << 10

Message = dict[str, Any]


class NextEpoch(NamedTuple):
    """An epoch that has begun.

    Attributes:
        environment: what it changes in the environment of trainers.
        because: what has failed.
        at_boundary: nobody has failed: the iteration that runs may end before.
    """

    number: int
    environment: Mapping[str, str]
    because: str
    at_boundary: bool = False


class JobStart(NamedTuple):
    """Which start of the job this is, in a job that re-routes.

    Attributes:
        start: the same for all trainers of this start, and for those of no other one; "": this host has not
            met the others, and will not.
    """

    start: str


class EndLoop(NamedTuple):
    """All trainers have done all iterations: none is needed by another one any more."""


class TrainerSaid(NamedTuple):
    """A trainer in a job that re-routes.

    Attributes:
        word: "ready": it could come to another epoch; "finished": it has done all iterations;
            "recover": the others cannot go on either.
        epoch: that it is in.
    """

    word: str
    epoch: int
    because: str = ""


class HostEnd:
    """The host's end.

    Attributes:
        descriptor: that trainers inherit; -1 if there was none to be had.
        said: by which trainer (process), what `receive` found beside what it returns; to be taken from here.
    """

    def __init__(self) -> None:
        self._ready_pid = 0
        self.descriptor = -1
        self._own: socket.socket | None = None
        self._theirs: socket.socket | None = None
        self.said: list[tuple[int, TrainerSaid]] = []

    @classmethod
    def make(cls) -> Self:
        """A line for the trainers of this host.

        Raises:
            OSError: there are no descriptors left.
        """
        made = cls()
        made._own, made._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made._own.setblocking(False)
        made.descriptor = made._theirs.fileno()
        return made

    def fileno(self) -> int:
        """For selectors."""
        assert self._own is not None
        return self._own.fileno()

    def receive(self) -> tuple[int, int] | None:
        """The trainer that says it has come to an epoch, and the epoch; None: nothing of the kind."""
        assert self._own is not None
        try:
            message: Message = json.loads(self._own.recv(_PACKET_MAX))
            pid = int(message["pid"])
        except (BlockingIOError, ValueError, KeyError, TypeError):
            return None  # nothing, or what a script has written to a descriptor that is not its own
        if "said" in message:
            self._hear(pid, message["said"])
            return None
        if "stays" in message:
            self._ready_pid = pid if message["stays"] else 0
            return None
        if pid == self._ready_pid and not message.get("ready"):
            self._ready_pid = 0  # until its next loop has begun
        return pid, int(message["stayed"])

    def _hear(self, pid: int, words: Any) -> None:
        try:
            said = TrainerSaid(str(words["word"]), int(words["epoch"]), str(words["because"]))
        except (ValueError, KeyError, TypeError):
            return
        if said.word == "ready":
            self._ready_pid = pid
        self.said.append((pid, said))

    def offer(self, pid: int, news: NextEpoch | JobStart | EndLoop) -> bool:
        """Tell a trainer something; False if it cannot restart in its process, or not now."""
        if self._own is None or pid != self._ready_pid:
            return False
        try:
            self._own.send(json.dumps({"pid": pid, **news._asdict()}).encode())
        except OSError:  # a trainer that reads nothing
            return False
        return True

    def close(self) -> None:
        """There will be no further trainer."""
        for end in (self._own, self._theirs):
            if end is not None:
                end.close()
        self._own = self._theirs = None
        self.descriptor = -1


class TrainerEnd:
    """The end of a trainer."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._pid = connection, os.getpid()

    def can_stay(self, *, now: bool) -> None:
        """Tell the host whether this process can come to another epoch from where it is."""
        self._tell({"stays": now})

    def stayed(self, epoch: int, *, ready: bool = False) -> None:
        """Tell the host that this process has left the last epoch for this one.

        Args:
            ready: for the one after that, too, at once.
        """
        self._tell({"stayed": epoch, "ready": ready})

    def say(self, said: TrainerSaid) -> None:
        """Tell the host of a job that re-routes."""
        self._tell({"said": said._asdict()})

    def _tell(self, message: Message) -> None:
        if os.getpid() == self._pid:  # not in a forked child, a data loader's worker
            with contextlib.suppress(OSError):  # the host is about to end this process
                self._socket.send(json.dumps({"pid": self._pid, **message}).encode())

    def receive(self) -> NextEpoch | JobStart | EndLoop | None:
        """Wait for a message, and return what it tells; None if it was for another trainer.

        Raises:
            OSError: there will be no message.
        """
        packet = self._socket.recv(_PACKET_MAX)
        if not packet:
            raise ConnectionResetError("the host has closed its end")
        message: Message = json.loads(packet)
        if message.pop("pid") != self._pid:
            return None
        if "start" in message:
            return JobStart(**message)
        return NextEpoch(**message) if message else EndLoop()


def epoch_text(epoch: int, absent: Iterable[int]) -> str:
    """The value of `EPOCH_VARIABLE`."""
    return f"{epoch}:{','.join(map(str, sorted(absent)))}"


def epoch_and_absent(text: str) -> tuple[int, frozenset[int]]:
    """What `epoch_text` was made of.

    Raises:
        ValueError: it is no such text.
    """
    epoch, colon, ranks = text.partition(":")
    if not colon:
        raise ValueError(f"{EPOCH_VARIABLE}={text!r} names no epoch")
    return int(epoch), frozenset(int(rank) for rank in ranks.split(",") if rank)


@cache
def inherited_line() -> TrainerEnd | None:
    """That of this process's host; None: there is none. What this process starts does not find it."""
    text = os.environ.pop(LINE_VARIABLE, "")
    if not text.isdecimal():
        return None
    try:
        os.set_inheritable(int(text), False)
        connection = socket.socket(fileno=os.dup(int(text)))
    except OSError:
        return None
    if (connection.family, connection.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        connection.close()
        return None
    return TrainerEnd(connection)
