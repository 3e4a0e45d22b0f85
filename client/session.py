"""The trainer's conversation with its daemon, on threads of its own; training never waits for it.

Two lanes, so that a daemon that hangs holds up nothing but the conversation: the *link* owns the connection and may wait for
an answer; the *desk* finishes snapshots (and seals them while the daemon is away) and never waits for anybody.

States: connected; lost (the daemon does not answer: snapshots go on, sealed here, while the thread keeps trying);
closed. All traffic after the attach is one-way from the training thread's point of view.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ckptd.client.lanes import LOOK_S, Lane
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.transport.messages import (
    Attach,
    Attached,
    Detach,
    Done,
    Drop,
    Elastic,
    Fetch,
    FetchPiece,
    FetchState,
    Filled,
    GetFetch,
    Hello,
    Join,
    NodeCard,
    Notice,
    ParkOutcome,
    Ping,
    Pong,
    RefusalCode,
    Report,
    Reserve,
    ReserveBeside,
    Reserved,
    RunSeen,
    SeeRun,
    SegmentInfo,
    TellElastic,
    Welcome,
)
from ckptd.transport.wire import ControlClient, RefusedError, RequestTimeout, WireError

__all__ = ["Session"]

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

_PING_S = 1.0
_ANSWER_S = 5.0
_RANK_PATIENCE_S = 5.0
_RESERVE_WAIT_S = 2.0
_RESERVE_LIMIT_S = 600.0
_STORE_S = 900.0
_FAILURES = (RequestTimeout, WireError, DaemonUnavailable, OSError)


class Session:
    """Attach to the daemon behind ``endpoint`` and keep the session alive.

    Args:
        find_endpoint: returns the daemon's endpoint, starting one if that is wanted; called again after a loss.
        attach: what to ask for; repeated after a loss.
        version: this package's version.
        while_lost: called on the desk about twice a second while the daemon is away.
        held: the generations whose owner lock this process holds.
    Raises:
        DaemonUnavailable: none answers within ``timeout_s``.
        AttachRefused: it answers and says no; code, message and hint are the daemon's.
    """

    def __init__(
        self,
        find_endpoint: Callable[[], str],
        attach: Attach,
        *,
        version: str,
        while_lost: Callable[[], None],
        held: Callable[[], tuple[int, ...]],
        timeout_s: float = 30.0,
    ) -> None:
        self._find_endpoint, self._attach, self._version = find_endpoint, attach, version
        self._while_lost, self._held = while_lost, held
        self._client: ControlClient | None = None
        self._closed = threading.Event()
        self._link = Lane("ckptd-link", self._look_for_daemon, self._link_failed, self._closed)
        self._desk = Lane("ckptd-desk", self._look_at_slots, lambda error: None, self._closed)
        self._next_ping = self._next_try = self._next_look = 0.0
        self._reserving: tuple[Reserve, Future[SegmentInfo]] | None = None
        self._joined: Join | None = None
        self._join_again = False
        self.connected = False
        self.outages = 0
        self.node_id = self.segment_dir = ""
        self.card = NodeCard("nobody")
        self.slack, self.persists = 0, False
        self.segments: tuple[SegmentInfo, ...] = ()
        self.logs: tuple[SegmentInfo, ...] = ()
        self.parked: tuple[SegmentInfo, ...] = ()
        # Called on the link with the number of a request to park; None: this trainer does not park.
        self.on_park: Callable[[int], None] | None = None
        self._park_asked = 0
        self.quota_bytes = self.available_bytes = 0
        self._open_within(timeout_s)
        self._link.start()
        self._desk.start()

    # -- called from any thread ------------------------------------------------------------------

    def submit(self, work: Callable[[], Any]) -> bool:
        """Do ``work`` at the desk; False if its queue is full (the work is dropped)."""
        return self._desk.submit(work)

    def filled(self, generation: int, slot: int, iteration: int) -> None:
        """Tell the daemon that a slot waits to be sealed."""
        self._link.submit(lambda: self._send(Filled(generation, slot, iteration)))

    def report(self, step: int, metrics: dict[str, float]) -> None:
        self._link.submit(lambda: self._send(Report(step, metrics)))

    def notice(self, level: str, kind: str, message: str) -> None:
        self._link.submit(lambda: self._send(Notice(level, kind, message[:4000])))

    def tell(self, level: str, kind: str, message: str, timeout_s: float) -> bool:
        """As `notice`, and wait until the daemon has it, as before the end of this process; whether it has."""

        def say() -> None:
            self._send(Notice(level, kind, message[:4000]))
            self._request(
                Ping(), Pong, timeout_s
            )  # answered in order: then it has read what came before

        try:
            self._link.call(say, timeout_s)
        except (AttachRefused, TimeoutError, *_FAILURES) as error:
            logger.info("the daemon may not have heard of %s: %s", kind, error)
            return False
        return True

    def park_outcome(self, number: int, iteration: int, reason: str) -> None:
        """Answer a request to park."""
        outcome = ParkOutcome(number, iteration, reason[:4000])
        self._link.submit(lambda: self._send(outcome))

    def tell_elastic(self, elastic: Elastic) -> None:
        """Tell the daemon what this elastic job has placed where, for `ckptctl elastic`; one that is away is not told."""

        def say() -> None:
            try:
                self._send(TellElastic(elastic))
            except WireError as error:  # too large: no reason to take the daemon for lost
                logger.warning("the daemon was not told of the placement: %s", error)

        self._link.submit(say)

    @property
    def reserving(self) -> bool:
        """Whether a generation that was asked for is still on its way."""
        return self._reserving is not None and not self._reserving[1].done()

    def reserve(
        self, slot_bytes: int, num_slots: int, descriptor: bytes, *, patient: bool = True
    ) -> SegmentInfo:
        """Ask for a new generation. Training does not wait long: a large one is pre-touched while it goes on.

        Args:
            patient: wait for a moment when asking for it; otherwise not at all.
        Raises:
            AttachRefused: it does not fit, with the numbers.
            DaemonUnavailable: the daemon is away.
            TimeoutError: it is on its way; ask for the same again once ``reserving`` is false.
        """
        wanted = Reserve(slot_bytes, num_slots, descriptor)
        patience_s = 0.0
        if self._reserving is None:
            patience_s = _RESERVE_WAIT_S if patient else 0.0
            self._reserving = wanted, self._link.begin(lambda: self._ask_for_memory(wanted))
        asked, future = self._reserving
        try:
            found = future.result(patience_s)
        except TimeoutError:
            raise TimeoutError("the daemon is still making the memory for them") from None
        except BaseException:
            self._reserving = None
            raise
        self._reserving = None
        if asked == wanted:
            return found
        self.drop(found.generation)  # asked for under another plan, and no longer wanted
        return self.reserve(slot_bytes, num_slots, descriptor, patient=patient)

    def reserve_beside(
        self, slot_bytes: int, num_slots: int, descriptor: bytes
    ) -> Future[SegmentInfo]:
        """Ask for a segment that holds no snapshots (a boundary log, parked state), and wait for nothing.

        The result is one of `reserve`'s errors, or the segment.

        Raises:
            DaemonUnavailable: not even the question can be asked.
        """
        wanted = ReserveBeside(slot_bytes, num_slots, descriptor)
        return self._link.begin(lambda: self._ask_for_memory(wanted))

    def see_run(
        self, job: str, run: str, known: tuple[str, ...], *, storage: bool = False
    ) -> RunSeen:
        """What is held of a run, on this node and on those that took part before and are not ``known``.

        Args:
            storage: ask for what is durable, too, if the daemon has a store.
        Raises:
            DaemonUnavailable: the daemon is away.
        """
        # A store may take its time; the daemon gives up on it by itself.
        patience_s = _STORE_S if storage else 2 * _ANSWER_S
        return self._ask_now(SeeRun(job, run, known, storage), RunSeen, "see run", patience_s)

    def join(self, message: Join) -> None:
        """Tell the daemon who takes part in the run, now and after each of its restarts.

        A daemon that is away is told when it is back: snapshots of this node go on, and have no second home until then.

        Raises:
            AttachRefused: the run has been recovered again since this was planned (``stale_epoch``).
        """
        self._joined = message
        try:
            self._link.call(self._join, 2 * _ANSWER_S)
        except (DaemonUnavailable, TimeoutError) as error:  # the link is busy
            self._join_later(error)

    def fetch(self, pieces: tuple[FetchPiece, ...], cards: tuple[NodeCard, ...]) -> SegmentInfo:
        """Have these snapshots brought here, into a new generation; they are sealed one after the other.

        Raises:
            AttachRefused: they do not fit, or nobody holds them any more.
            DaemonUnavailable: the daemon is away.
        """
        wanted = Fetch(pieces, cards)
        return self._ask_now(wanted, Reserved, "fetch", _RESERVE_LIMIT_S).segment

    def fetch_for_reading(
        self, rank: int, kind: str, pieces: tuple[FetchPiece, ...], cards: tuple[NodeCard, ...] = ()
    ) -> Future[SegmentInfo]:
        """Have what another rank of this run has brought here, to be read; waits for nothing.

        The result is one of `fetch`'s errors, or a segment of that ``kind`` whose slots are sealed one after the other. It is none of
        this rank's generations; `fetch_state` and `drop` take its number as theirs, and it is gone when this session is.

        Raises:
            DaemonUnavailable: not even the question can be asked.
        """
        wanted = Fetch(pieces, cards, kind, rank)
        return self._link.begin(lambda: self._ask_for_memory(wanted))

    @property
    def run(self) -> tuple[str, str]:
        """Job and run that this session is of."""
        return self._attach.job, self._attach.run

    def fetch_state(self, generation: int) -> FetchState:
        """How far a fetch is.

        Raises:
            AttachRefused: the daemon knows nothing of it (it was restarted).
            DaemonUnavailable: the daemon is away.
        """
        return self._ask_now(GetFetch(generation), FetchState, "fetch")

    def drop(self, generation: int) -> None:
        """Tell the daemon that a generation is no longer needed."""

        def ask() -> None:
            try:
                self._request(Drop(generation), Done, _ANSWER_S)
            except (AttachRefused, *_FAILURES) as error:
                logger.warning("generation %d was not dropped: %s", generation, error)

        self._link.submit(ask)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything submitted so far is done; False if that takes longer."""
        try:
            self._desk.call(lambda: None, timeout_s)
        except (DaemonUnavailable, TimeoutError):
            return False
        return True

    def close(self, *, final: bool = False) -> None:
        """End the session in order, after the work already queued; never raises."""
        if self._closed.is_set():
            return

        def last() -> None:
            self._closed.set()  # first: no ping after the detach may take us for lost
            if self.connected:
                self._request(Detach(final), Done, _ANSWER_S)

        try:
            self.flush(_ANSWER_S)
            self._link.call(last, 15)
        except (AttachRefused, TimeoutError, *_FAILURES) as error:
            logger.warning("detaching from the daemon: %s", error)
        self._closed.set()
        self._link.join(_ANSWER_S)
        self._desk.join(_ANSWER_S)

    # -- at the desk -----------------------------------------------------------------------------

    def _look_at_slots(self) -> None:
        now = time.monotonic()
        if not self.connected and now >= self._next_look and not self._closed.is_set():
            self._next_look = now + LOOK_S
            self._while_lost()

    # -- on the link -----------------------------------------------------------------------------

    def _look_for_daemon(self) -> None:
        now = time.monotonic()
        if self._closed.is_set():
            if self._client is not None:
                self._client.close()
                self._client = None
        elif self.connected and now >= self._next_ping:
            self._next_ping = now + _PING_S
            self._ping()
        elif not self.connected and now >= self._next_try:
            self._next_try = now + LOOK_S
            self._try_again()

    def _link_failed(self, error: Exception) -> None:
        if isinstance(error, _FAILURES):
            self._lose(str(error))

    def _ask_for_memory(self, wanted: Reserve | ReserveBeside | Fetch) -> SegmentInfo:
        try:
            reply = self._request(wanted, Reserved, _RESERVE_LIMIT_S, alive_s=_ANSWER_S)
        except (RequestTimeout, WireError, OSError) as error:
            self._lose(str(error))
            raise DaemonUnavailable(str(error), operation="reserve") from error
        return reply.segment

    def _ask_now(
        self, message: Any, answer: type[Answer], operation: str, timeout_s: float = _ANSWER_S
    ) -> Answer:
        """Ask on the link and wait here for the answer."""

        def ask() -> Answer:
            return self._request(message, answer, timeout_s, alive_s=_ANSWER_S)

        try:
            return self._link.call(ask, timeout_s + _ANSWER_S)
        except (RequestTimeout, WireError, OSError, TimeoutError) as error:
            raise DaemonUnavailable(str(error), operation=operation) from error

    def _join(self) -> None:
        """Raises AttachRefused if it never will be welcome; anything else is tried again."""
        if self._joined is None:
            return
        try:
            self._request(self._joined, Done, _ANSWER_S)
            self._join_again = False
        except AttachRefused as error:
            if error.code == RefusalCode.STALE_EPOCH:
                self._joined, self._join_again = None, False
                text = f"snapshots are not replicated: {error}"
                logger.error("%s", text)
                self._send(Notice("error", str(RefusalCode.STALE_EPOCH), text[:4000]))
                raise
            self._join_later(error)
        except _FAILURES as error:
            self._join_later(error)

    def _join_later(self, error: Exception) -> None:
        self._join_again = True
        logger.warning("the daemon was not told who takes part in the run: %s", error)

    def _rejoin(self) -> None:
        """Tell a daemon that was away. Training goes on whatever it says."""
        with contextlib.suppress(AttachRefused):  # logged there
            self._join()

    def _send(self, message: Filled | Report | Notice | ParkOutcome | TellElastic) -> None:
        if self.connected and self._client is not None and not self._client.send(message):
            self._lose("it takes no messages")

    def _request(
        self,
        message: Any,
        answer: type[Answer],
        timeout_s: float,
        *,
        alive_s: float | None = None,
    ) -> Answer:
        """Raises, besides what its callers tell, WireError if the daemon answers something else (it may be of another version)."""
        if self._client is None or not self.connected:
            raise DaemonUnavailable("request", hint="the daemon is away; it is being looked for")
        try:
            found = self._client.request(message, timeout_s=timeout_s, alive_s=alive_s)
        except RefusedError as error:
            if error.code == RefusalCode.NO_SESSION:
                # Restarted since our last look: for who asks, that is as if it were away for a moment.
                self._lose("it was restarted")
                raise DaemonUnavailable(
                    "it was restarted and is being attached to again", operation="request"
                ) from error
            raise AttachRefused(error.code, error.message, error.hint) from error
        if not isinstance(found, answer):
            what = f"{type(message).__name__} was answered with {type(found).__name__}"
            raise WireError("unexpected", what)
        return found

    def _ping(self) -> None:
        try:
            pong = self._request(Ping(), Pong, _ANSWER_S)
        except (AttachRefused, *_FAILURES) as error:
            self._lose(str(error))
            return
        if not pong.attached:
            self._lose("it was restarted")
        else:
            if self._join_again:
                self._rejoin()
            self._heed(pong.park)

    def _heed(self, number: int) -> None:
        """Somebody asks this trainer to park (0: nobody does); asked again with each ping until it has answered."""
        if number in (0, self._park_asked):
            return
        self._park_asked = number
        if self.on_park is None:
            why = "this trainer does not park: pass park=True, or log boundaries"
            self._send(ParkOutcome(number, -1, why))
        else:
            self.on_park(number)

    def _lose(self, why: str) -> None:
        if not self.connected:
            return
        self.connected = False
        self.outages += 1
        logger.warning("ckptd is away (%s): training and snapshots go on; looking for it", why)

    def _try_again(self) -> None:
        try:
            self._open()
        except (AttachRefused, *_FAILURES) as error:
            logger.debug("still no daemon: %s", error)
            return
        logger.warning("ckptd is back (node %s)", self.node_id)
        self._rejoin()

    def _open_within(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        patient_until = time.monotonic() + min(timeout_s, _RANK_PATIENCE_S)
        while True:
            try:
                self._open()
                return
            except AttachRefused as error:
                # A killed trainer owns its rank until the kernel is done with it: restarts are quicker than that.
                if error.code != RefusalCode.RANK_TAKEN or time.monotonic() >= patient_until:
                    raise
            except _FAILURES as error:
                other_version = isinstance(error, WireError) and error.code == "protocol"
                if time.monotonic() >= deadline or other_version:
                    if isinstance(error, DaemonUnavailable):
                        raise
                    raise DaemonUnavailable(
                        f"attach: {error}",
                        hint="start one with `ckptd run`, or pass daemon='auto'; `ckptctl doctor` looks for causes",
                    ) from error
            time.sleep(0.2)

    def _open(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        client = ControlClient(self._find_endpoint(), timeout_s=_ANSWER_S)
        try:
            welcome = client.ask(Hello(self._version, os.getpid()), Welcome)
            attached = client.ask(_with_held(self._attach, self._held()), Attached)
        except RefusedError as error:
            client.close()
            raise AttachRefused(error.code, error.message, error.hint) from error
        except BaseException:
            client.close()
            raise
        self._client, self.node_id = client, welcome.node_id
        self.segment_dir = welcome.segment_dir
        self.card = welcome.card or NodeCard(welcome.node_id)
        self.slack, self.persists = attached.replication_slack, attached.persists
        self.segments, self.logs = attached.segments, attached.logs
        self.parked, self._park_asked = attached.parked, 0
        self.quota_bytes, self.available_bytes = attached.quota_bytes, attached.available_bytes
        self.connected = True


def _with_held(attach: Attach, held: tuple[int, ...]) -> Attach:
    return Attach(
        attach.job,
        attach.run,
        attach.rank,
        attach.world_size,
        attach.topology,
        attach.layout_version,
        attach.needed_bytes,
        attach.needed_text,
        held,
    )
