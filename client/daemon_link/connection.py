"""The connection of a trainer with its daemon: attached, checked by pings, and attached again after a loss.

States: connected; lost (the daemon does not answer; the next attempt follows within half a second); closed.
All traffic is on one thread, the *lane*, except the first attach.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from ckptd.client.log_lines import get_logger
from ckptd.cuda.quiet_threads import Bell, start_quiet
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.launch import connect
from ckptd.transport.messages import (
    Attach,
    Attached,
    Filled,
    Hello,
    Notice,
    ParkOutcome,
    Ping,
    Pong,
    RefusalCode,
    Report,
    TellElastic,
    Welcome,
)
from ckptd.transport.wire import ControlClient, RefusedError, RequestTimeout, WireError

logger = get_logger(__name__)
Answer = TypeVar("Answer")
Result = TypeVar("Result")

LOOK_S = 0.5
_QUEUE_LIMIT = 1024
_PING_S = 1.0
ANSWER_S = 5.0
_RANK_PATIENCE_S = 5.0
FAILURES = (RequestTimeout, WireError, DaemonUnavailable, OSError)

_token = secrets.token_bytes(32)


def _new_token() -> None:
    """A forked child is another process: it must not pass for its parent."""
    global _token
    _token = secrets.token_bytes(32)
    _opened_here.clear()


os.register_at_fork(after_in_child=_new_token)

# The daemon takes a second attach with this process's token for the first trainer come back: two would take
# the rank from each other in turns.
_opened_here: weakref.WeakSet[DaemonConnection] = weakref.WeakSet()


class WorkerThread:
    """A quiet thread that works off a bounded queue. It calls ``look`` after each piece of work and every
    ``look_s``.

    Args:
        failed: called with the error of each piece of work that failed.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], None],
        failed: Callable[[Exception], None],
        closed: threading.Event,
        look_s: float = LOOK_S,
    ) -> None:
        self._look, self._failed, self._closed, self._look_s = look, failed, closed, look_s
        self._work: queue.Queue[tuple[Callable[[], Any], Future[Any] | None]] = queue.Queue(_QUEUE_LIMIT)
        self._bell = Bell()
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = start_quiet(self._run, name=self._name)

    def submit(self, work: Callable[[], Any]) -> bool:
        """Queue ``work``; False if the queue is full (the work is dropped)."""
        try:
            self._work.put_nowait((work, None))
        except queue.Full:
            return False
        self._bell.ring()
        return True

    def begin(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue ``work``, and keep its result.

        Raises:
            DaemonUnavailable: the queue is full.
        """
        future: Future[Result] = Future()
        try:
            self._work.put_nowait((work, future))
        except queue.Full as error:
            raise DaemonUnavailable("session", hint="its queue is full") from error
        self._bell.ring()
        return future

    def call(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Queue ``work``, and wait for its result."""
        return self.begin(work).result(timeout_s)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, after `closed` was set."""
        self.submit(lambda: None)  # which it sees sooner than the end of its wait
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._bell.wait(self._look_s)
            self._work_off()
        self._look_around()

    def _work_off(self) -> None:
        """Do what waits; look around after each piece, and if there is none."""
        while True:
            try:
                work, future = self._work.get_nowait()
            except queue.Empty:
                self._look_around()
                return
            self._perform(work, future)
            if self._closed.is_set():
                return
            self._look_around()

    def _look_around(self) -> None:
        try:
            self._look()
        except Exception:
            logger.exception("in the thread %s", self._name)  # it must live: snapshots are finished here

    def _perform(self, work: Callable[[], Any], future: Future[Any] | None) -> None:
        try:
            result = work()
        # The work is the caller's: the thread must survive it and return the error.
        except Exception as error:
            self._failed(error)
            if future is not None:
                future.set_exception(error)
            else:
                logger.exception("in the thread %s", self._name)
        else:
            if future is not None:
                future.set_result(result)


class DaemonConnection:
    """Attaches to a daemon and keeps the connection. `Session` implements what follows from it.

    Args:
        find_endpoint: returns the daemon's endpoint, starting one if that is wanted; called again
            after a loss.
        attach: the request; repeated after a loss.
        version: this package's version.
        check: returns how the daemon's settings differ from those that this trainer expects; "" if they
            do not.
    Attributes:
        connected: whether the daemon answers.
        outages: how often it was lost.
        changes: how often a daemon with other settings answered in the place of the one before.
    """

    def __init__(
        self,
        find_endpoint: Callable[[], str],
        attach: Attach,
        *,
        version: str,
        check: Callable[[Mapping[str, str]], str] = lambda _: "",
    ) -> None:
        self._find_endpoint, self._attach, self._version = find_endpoint, attach, version
        self._check = check
        self._closed = threading.Event()
        self._settings: Mapping[str, str] | None = None  # of the daemon that was attached to first
        self._client: ControlClient | None = None
        self._endpoint = ""
        self._next_ping = self._next_try = 0.0
        self._logged = ""
        self._lane = WorkerThread("ckptd-link", self._look_for_daemon, self._failed, self._closed)
        self.connected = False
        self.outages = self.changes = 0

    # -- to implement ----------------------------------------------------------------------------

    def _held(self) -> tuple[int, ...]:
        """The generations whose owner lock this process holds."""
        raise NotImplementedError

    def _opened(self, welcome: Welcome, attached: Attached) -> None:
        """The daemon was attached to, for the first time or again; not connected yet."""
        raise NotImplementedError

    def _back(self) -> None:
        """The daemon is back; training goes on whatever follows from this."""
        raise NotImplementedError

    def _answered(self, pong: Pong) -> None:
        """The daemon answered a ping."""
        raise NotImplementedError

    # -- any thread ------------------------------------------------------------------------------

    def open_within(self, timeout_s: float) -> None:
        """Connect and attach.

        Raises:
            DaemonUnavailable: no daemon answers within this time.
            AttachRefused: it answers and refuses.
        """
        deadline = time.monotonic() + timeout_s
        patient_until = time.monotonic() + min(timeout_s, _RANK_PATIENCE_S)
        while True:
            try:
                self._open()
                return
            except AttachRefused as error:
                if self._is_second_here():
                    raise
                # A killed trainer owns its rank until the kernel is done with it: restarts are
                # quicker than that.
                until: dict[str, float] = {
                    RefusalCode.RANK_TAKEN: patient_until,
                    RefusalCode.NOT_READY: deadline,
                }
                if time.monotonic() >= until.get(error.code, 0.0):
                    raise
            except FAILURES as error:
                final = isinstance(error, WireError) and error.code in ("protocol", "untrusted")
                if time.monotonic() >= deadline or final:
                    if isinstance(error, DaemonUnavailable):
                        raise
                    hint = (
                        "start one with `ckptd run`, or pass daemon='auto'; `ckptctl doctor` looks for causes"
                    )
                    raise DaemonUnavailable(f"attach: {error}", hint=hint) from error
            time.sleep(0.2)

    def ask(self, message: Any, answer: type[Answer], operation: str, timeout_s: float = ANSWER_S) -> Answer:
        """Send a request, and wait for the answer.

        Raises:
            AttachRefused: the daemon refuses.
            DaemonUnavailable: it is away.
        """

        def work() -> Answer:
            return self._request(message, answer, timeout_s, alive_s=ANSWER_S)

        try:
            return self._lane.call(work, timeout_s + ANSWER_S)
        except (RequestTimeout, WireError, OSError, TimeoutError) as error:
            raise DaemonUnavailable(str(error), operation=operation) from error

    # -- on the lane -----------------------------------------------------------------------------

    def _send(self, message: Filled | Report | Notice | ParkOutcome | TellElastic) -> None:
        """Send without an answer; does nothing while the daemon is away."""
        if self.connected and self._client is not None and not self._client.send(message):
            self._lose("it takes no messages")

    def _request(
        self, message: Any, answer: type[Answer], timeout_s: float, *, alive_s: float | None = None
    ) -> Answer:
        """Send a request.

        Raises:
            AttachRefused: the daemon refuses.
            DaemonUnavailable: it is away.
            RequestTimeout, WireError: it does not answer, or something else (it may be of another version).
        """
        if self._client is None or not self.connected:
            raise DaemonUnavailable("request", hint="the daemon is away; it is being looked for")
        try:
            found = self._client.request(message, timeout_s=timeout_s, alive_s=alive_s)
        except RefusedError as error:
            if error.code == RefusalCode.NO_SESSION:
                # Restarted since our last look: for the caller, that is as if it were away for a moment.
                self._lose("it was restarted")
                raise DaemonUnavailable(
                    "it was restarted and is being attached to again", operation="request"
                ) from error
            raise AttachRefused(error.code, error.message, error.hint) from error
        if not isinstance(found, answer):
            what = f"{type(message).__name__} was answered with {type(found).__name__}"
            raise WireError("unexpected", what)
        return found

    def _lose(self, why: str) -> None:
        if not self.connected:
            return
        self.connected = False
        self.outages += 1
        logger.warning("the daemon is away (%s): training and snapshots go on; looking for it", why)

    def _look_for_daemon(self) -> None:
        now = time.monotonic()
        if self._closed.is_set():
            self._hang_up()
        elif self.connected and now >= self._next_ping:
            self._next_ping = now + _PING_S
            self._ping()
        elif not self.connected and now >= self._next_try:
            self._next_try = now + LOOK_S
            self._try_again()

    def _failed(self, error: Exception) -> None:
        if isinstance(error, FAILURES):
            self._lose(str(error))

    def _ping(self) -> None:
        try:
            pong = self._request(Ping(), Pong, ANSWER_S)
        except (AttachRefused, *FAILURES) as error:
            self._lose(str(error))
            return
        if pong.attached:
            self._answered(pong)
        else:
            self._lose("it was restarted")

    def _try_again(self) -> None:
        try:
            self._open()
        except (AttachRefused, *FAILURES) as error:
            untrusted = isinstance(error, WireError) and error.code == "untrusted"
            logged, self._logged = self._logged, str(error) if untrusted else ""
            if untrusted and logged != self._logged:
                logger.error("what is in the daemon's place is not asked: %s", error)
            logger.debug("still no daemon: %s", error)
            return
        self._back()

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _open(self) -> None:
        self._hang_up()
        endpoint = self._endpoint = self._find_endpoint()
        if self._is_second_here():
            raise AttachRefused(
                RefusalCode.RANK_TAKEN,
                f"{self._attach.job}/{self._attach.run} rank {self._attach.rank} has a Checkpointer in this "
                "process already",
                "Close that one first (`ckpt.close()`), or pass another run= to this one",
            )
        client = connect(endpoint, ANSWER_S)
        try:
            welcome = client.ask(Hello(self._version, os.getpid()), Welcome)
            self._check_settings(welcome.settings, welcome.pid)
            attach = msgspec.structs.replace(self._attach, held=self._held(), token=_token)
            attached = client.ask(attach, Attached)
        except RefusedError as error:
            client.close()
            raise AttachRefused(error.code, error.message, error.hint) from error
        except BaseException:
            client.close()
            raise
        self._client = client
        if not welcome.started_by_trainer:
            # It is an operator's: while it is away no trainer starts another one in its place.
            self._find_endpoint = lambda: endpoint
        self._opened(welcome, attached)
        self.connected = True
        _opened_here.add(self)

    def _is_second_here(self) -> bool:
        """True if another connection of this process that is not closed has this rank."""
        mine = self._rank_here()
        return any(each is not self and each._rank_here() == mine for each in _opened_here if each._is_open())

    def _is_open(self) -> bool:
        return not self._closed.is_set()

    def _rank_here(self) -> tuple[str, str, str, int]:
        return self._endpoint, self._attach.job, self._attach.run, self._attach.rank

    def _check_settings(self, settings: Mapping[str, str], pid: int) -> None:
        """At the first attach, a difference is an error; later, training goes on."""
        if self._settings is None:
            if different := self._check(settings):
                raise AttachRefused(
                    RefusalCode.DAEMON_DIFFERS,
                    f"the daemon is not as this trainer's environment says: {different}",
                    f"restart the daemon with these settings (`kill {pid}` ends it, and its memory "
                    "stays), or take them out of the "
                    "trainer's environment; to use it as it is, pass daemon= its endpoint "
                    "(`ckptctl status` shows it)",
                )
        elif settings != self._settings:
            before, now = self._settings, settings
            changed = "; ".join(
                f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
                for key in sorted({*before, *now})
                if before.get(key) != now.get(key)
            )
            logger.error("another daemon answers in the place of the first: %s", changed)
            self.changes += 1
        self._settings = dict(settings)
