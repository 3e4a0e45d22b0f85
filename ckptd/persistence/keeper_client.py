"""The daemon's side of the store keeper: starts the process, sends it requests, and restarts it when it dies.

All methods are called on the daemon's loop thread, and all callbacks run there (`post`). Two threads carry
the messages, so a keeper that does not read blocks nothing. When the keeper dies, its open requests fail with
``away``. A keeper that answers no ping for too long (stopped, or stuck) is killed, because a starting trainer
may wait for its answer.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Struct

from ckptd.node_context import Post
from ckptd.persistence.keeper_wire import (
    Channel,
    Configure,
    KeeperEvent,
    KeeperFailed,
    KeeperPing,
    KeeperPong,
    RankFenced,
    Settled,
    decode_from_keeper,
)

logger = logging.getLogger(__name__)

# Codes of requests that the keeper did not answer: it is not running or died; it has too many open requests.
AWAY, BUSY = "away", "busy"
_WAITING = 4096
_BACKOFF_S, _BACKOFF_MAX_S = 0.5, 30.0
_GRACE_S = 0.5
_LIVED_S = 60.0  # after this lifetime, the backoff begins anew
_PING_S = 5.0
_SILENT_S = 45.0  # a keeper needs a second or two to start, and ten on a busy machine
_TICK_MAX_S = 1.0  # a longer pause between ticks counts as this: the daemon itself may have been stopped

Done = Callable[[Any], None]
Refused = Callable[[str, str], None]


@dataclass(slots=True)
class _Life:
    """One keeper process and its threads."""

    process: subprocess.Popen[bytes]
    channel: Channel
    outgoing: queue.SimpleQueue[Struct | None]
    began_s: float
    heard_s: float
    ticked_s: float
    silent_s: float = 0.0  # time since an unanswered ping
    pinged: bool = False


class KeeperListener(Protocol):
    """Receives the keeper's unsolicited messages, on the daemon's loop thread."""

    def keeper_event(self, message: KeeperEvent) -> None: ...

    def settled(self, message: Settled) -> None: ...

    def fenced(self, message: RankFenced) -> None: ...

    def keeper_died(self, reason: str) -> None:
        """The keeper died; the next one has no state of it."""


class StoreChild:
    """Starts the keeper with the first `ask`, and again after it died."""

    def __init__(
        self,
        configure: Configure,
        listener: KeeperListener,
        *,
        post: Post,
        clock: Callable[[], float],
        nice: int = 0,
        silent_s: float = _SILENT_S,
    ) -> None:
        self._configure, self._listener = configure, listener
        self._post, self._silent_s = post, silent_s
        self._clock, self._nice = clock, nice
        self._life: _Life | None = None
        self._asked: dict[int, tuple[Done, Refused]] = {}
        self._ids = 0
        self._failures, self._not_before_s = 0, 0.0
        self._closed = False

    @property
    def pid(self) -> int:
        """The process id; 0 if the keeper is not running."""
        return 0 if self._life is None else self._life.process.pid

    def next_id(self) -> int:
        """The id of the next request."""
        self._ids += 1
        return self._ids

    def ask(self, message: Any, done: Done, refused: Refused) -> None:
        """Send a request that has an ``id``; calls ``done(reply)`` or ``refused(code, reason)`` later."""
        if not self._alive():
            self._post(lambda: refused(AWAY, "the store keeper is not running"))
            return
        if len(self._asked) >= _WAITING:
            text = f"the store keeper has {_WAITING} questions to answer already"
            self._post(lambda: refused(BUSY, text))
            return
        self._asked[message.id] = done, refused
        self._send(message)

    def tell(self, message: Struct) -> None:
        """Send a message without an answer; it is lost if the keeper is not running."""
        if self._alive():
            self._send(message)

    def tick(self) -> None:
        """Ping the keeper, and kill it if it has not answered for too long."""
        life, now_s = self._life, self._clock()
        if life is None:
            return
        passed_s, life.ticked_s = now_s - life.ticked_s, now_s
        if not life.pinged:
            if now_s - life.heard_s >= _PING_S:
                life.pinged, life.silent_s = True, 0.0
                self._send(KeeperPing())
            return
        life.silent_s += min(passed_s, _TICK_MAX_S)
        if life.silent_s >= self._silent_s:
            self._over(life, f"it has not answered for {life.silent_s:.0f} s and was killed")

    def close(self) -> None:
        """Stop the keeper and drop all open requests."""
        self._closed = True
        life, self._life = self._life, None
        self._asked.clear()
        if life is not None:
            _end(life)

    # -- the process -----------------------------------------------------------------------------

    def _alive(self) -> bool:
        if self._closed:
            return False
        if self._life is None and self._clock() >= self._not_before_s:
            self._start()
        return self._life is not None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "ckptd.persistence.keeper", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C at the daemon's terminal is for the daemon alone
            )
        except OSError as error:
            ours.close()
            self._failed(f"it cannot be started: {error}")
            return
        finally:
            theirs.close()
        if self._nice:
            _be_nice(process.pid, self._nice)
        now_s = self._clock()
        channel = Channel(ours, decode_from_keeper)
        life = _Life(process, channel, queue.SimpleQueue(), now_s, now_s, now_s)
        self._life = life
        for work, name in ((self._read, "store-in"), (_write, "store-out")):
            threading.Thread(target=work, args=(life,), name=name, daemon=True).start()
        self._send(self._configure)

    def _send(self, message: Struct) -> None:
        assert self._life is not None
        self._life.outgoing.put(message)

    def _read(self, life: _Life) -> None:
        """Thread: pass every message to the loop."""
        reason = "it ended"
        try:
            while (message := life.channel.receive()) is not None:
                self._post(lambda message=message: self._arrived(life, message))  # type: ignore[misc]
        except (OSError, ValueError) as error:
            reason = f"its answers cannot be read: {error}"
        self._post(lambda: self._over(life, reason))

    def _arrived(self, life: _Life, message: Any) -> None:
        if life is not self._life:
            return  # from a keeper that was given up
        life.heard_s, life.pinged = self._clock(), False
        match message:
            case KeeperPong():
                pass
            case KeeperEvent():
                self._listener.keeper_event(message)
            case Settled():
                self._listener.settled(message)
            case RankFenced():
                self._listener.fenced(message)
            case _:
                self._answered(message)

    def _answered(self, message: Any) -> None:
        found = self._asked.pop(message.id, None)
        if found is None:
            return
        done, refused = found
        if isinstance(message, KeeperFailed):
            refused(str(message.code), message.reason)
        else:
            done(message)

    def _over(self, life: _Life, reason: str) -> None:
        if life is not self._life:
            return
        self._life = None
        _end(life)
        code = life.process.returncode
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit status {code}"
        if self._clock() - life.began_s > _LIVED_S:
            self._failures = 0
        self._failed(f"{reason} ({how})")

    def _failed(self, reason: str) -> None:
        pause_s = min(_BACKOFF_S * 2**self._failures, _BACKOFF_MAX_S)
        self._failures += 1
        self._not_before_s = self._clock() + pause_s
        logger.error("the store keeper is gone: %s; it is started again in %.1f s", reason, pause_s)
        asked, self._asked = self._asked, {}
        for _, refused in asked.values():
            refused(AWAY, f"the store keeper is gone: {reason}")
        self._listener.keeper_died(reason)


def _write(life: _Life) -> None:
    """Thread: send the queued messages."""
    while (message := life.outgoing.get()) is not None:
        try:
            life.channel.send(message)
        except OSError as error:
            logger.info("the store keeper does not take messages: %s", error)
            return  # the reading thread sees the end of the connection too


def _end(life: _Life) -> None:
    life.outgoing.put(None)
    life.channel.close()
    try:
        # The keeper exits by itself when the connection closes; its exit status is reported.
        life.process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        life.process.kill()
        life.process.wait()


def _be_nice(pid: int, nice: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
    except OSError as error:
        logger.info("the store keeper keeps its priority: %s", error)
