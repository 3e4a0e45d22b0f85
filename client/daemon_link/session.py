"""The trainer's conversation with its daemon, on threads of its own; training never waits for it.

Two lanes, so that a daemon that hangs holds up nothing but the conversation: that of the *link*
(``Link``), which owns the connection and may wait for an answer; the *desk* finishes snapshots (and
seals them while the daemon is away) and never waits for anybody.

While the daemon does not answer snapshots go on, sealed here, and the link keeps trying. All
traffic after the attach is one-way from the training thread's point of view.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from ckptd.client.daemon_link.connection import ANSWER_S, FAILURES, LOOK_S, Link, WorkerThread
from ckptd.client.log_lines import get_logger
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.transport.control.messages import (
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
    Join,
    NodeCard,
    Notice,
    ParkOutcome,
    Ping,
    Pong,
    RefusalCode,
    ReplayFailure,
    Report,
    Reserve,
    ReserveBeside,
    Reserved,
    RunSeen,
    SeeRun,
    SegmentInfo,
    TellElastic,
    TellReplay,
    Welcome,
)
from ckptd.transport.control.wire import RequestTimeout, WireError

__all__ = ["Session"]

logger = get_logger(__name__)

_RESERVE_WAIT_S = 2.0
_RESERVE_LIMIT_S = 600.0
_STORE_S = 900.0


class SessionListener(Protocol):
    """Whose session it is: asked what it holds, and told what the daemon wants."""

    def held(self) -> tuple[int, ...]:
        """The generations whose owner lock this process holds."""
        ...

    def while_lost(self) -> None:
        """Called on the desk about twice a second while the daemon is away."""

    def asked_to_park(self, number: int) -> bool:
        """Called on the link with the number of a request to park; False: this trainer does not park."""
        ...


class Session:
    """Attach to the daemon behind ``endpoint`` and keep the session alive.

    Args:
        find_endpoint: returns the daemon's endpoint, starting one if that is wanted; called again
            after a loss.
        attach: what to ask for; repeated after a loss.
        listener: whose session it is.
        version: this package's version.
        check: see `Link`.
    Raises:
        DaemonUnavailable: none answers within ``timeout_s``.
        AttachRefused: it answers and says no; code, message and hint are the daemon's.
    """

    def __init__(
        self,
        find_endpoint: Callable[[], str],
        attach: Attach,
        listener: SessionListener,
        *,
        version: str,
        timeout_s: float = 30.0,
        check: Callable[[Mapping[str, str]], str] = lambda _: "",
    ) -> None:
        self._attach, self._listener = attach, listener
        self._closed = threading.Event()
        self.link = Link(
            find_endpoint,
            attach,
            version=version,
            held=listener.held,
            follows=self,
            closed=self._closed,
            check=check,
        )
        self._lane = self.link.lane
        self._desk = WorkerThread("ckptd-desk", self._look_at_slots, lambda error: None, self._closed)
        self._next_look = 0.0
        self._reserving: tuple[Reserve, Future[SegmentInfo]] | None = None
        # Generations that this trainer was told of, and has not given back.
        self._known: set[int] | None = None
        self._joined: Join | None = None
        self._join_again = False
        self.node_id = self.segment_dir = ""
        self.card = NodeCard("nobody")
        self.slack, self.persists = 0, False
        self.segments: tuple[SegmentInfo, ...] = ()
        self.logs: tuple[SegmentInfo, ...] = ()
        self.parked: tuple[SegmentInfo, ...] = ()
        self._park_asked = 0
        self.quota_bytes = self.available_bytes = 0
        self.notes: tuple[str, ...] = ()
        self.link.open_within(timeout_s)
        self._lane.start()
        self._desk.start()

    @property
    def connected(self) -> bool:
        """Whether the daemon answers."""
        return self.link.connected

    @property
    def outages(self) -> int:
        """How often it was lost."""
        return self.link.outages

    # -- called from any thread ------------------------------------------------------------------

    def submit(self, work: Callable[[], Any]) -> bool:
        """Do ``work`` at the desk; False if its queue is full (the work is dropped)."""
        return self._desk.submit(work)

    def filled(self, generation: int, slot: int, iteration: int) -> None:
        """Tell the daemon that a slot waits to be sealed."""
        self._lane.submit(lambda: self.link.send(Filled(generation, slot, iteration)))

    def report(self, step: int, metrics: dict[str, float]) -> None:
        self._lane.submit(lambda: self.link.send(Report(step, metrics)))

    def notice(self, level: str, kind: str, message: str) -> None:
        self._lane.submit(lambda: self.link.send(Notice(level, kind, message[:4000])))

    def tell(self, level: str, kind: str, message: str, timeout_s: float) -> bool:
        """As `notice`, and wait until the daemon has it, as before the end of this process; whether
        it has.
        """

        def say() -> None:
            self.link.send(Notice(level, kind, message[:4000]))
            self.link.request(Ping(), Pong, timeout_s)  # answered in order: then it has read what came before

        try:
            self._lane.call(say, timeout_s)
        except (AttachRefused, TimeoutError, *FAILURES) as error:
            logger.info("the daemon may not have heard of %s: %s", kind, error)
            return False
        return True

    def tell_replay(self, failure: ReplayFailure | None) -> None:
        """Tell the daemon that a replay did not reproduce, and wait until it has written that down;
        None: one did.

        This process is about to end; a daemon that is away never hears of it, and the next start
        replays once more for nothing.
        """
        if failure is None:
            self._lane.submit(self._tell_reproduced)
            return
        try:
            self.link.ask(TellReplay(failure), Done, "tell of a replay")
        except (AttachRefused, DaemonUnavailable) as error:
            logger.error("the daemon was not told that this replay failed: %s", error)

    def _tell_reproduced(self) -> None:
        try:
            self.link.request(TellReplay(None), Done, ANSWER_S)
        except (AttachRefused, *FAILURES) as error:
            logger.warning("the daemon was not told that this replay reproduced: %s", error)

    def park_outcome(self, number: int, iteration: int, reason: str) -> None:
        """Answer a request to park."""
        outcome = ParkOutcome(number, iteration, reason[:4000])
        self._lane.submit(lambda: self.link.send(outcome))

    def tell_elastic(self, elastic: Elastic) -> None:
        """Tell the daemon what this elastic job has placed where, for `ckptctl elastic`; one that
        is away is not told.
        """

        def say() -> None:
            try:
                self.link.send(TellElastic(elastic))
            except WireError as error:  # too large: no reason to take the daemon for lost
                logger.warning("the daemon was not told of the placement: %s", error)

        self._lane.submit(say)

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
            self._reserving = wanted, self._lane.begin(lambda: self._ask_for_memory(wanted))
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

    def reserve_auxiliary(self, slot_bytes: int, num_slots: int, descriptor: bytes) -> Future[SegmentInfo]:
        """Ask for a segment that holds no snapshots (a boundary log, parked state), and wait for nothing.

        The result is one of `reserve`'s errors, or the segment.

        Raises:
            DaemonUnavailable: not even the question can be asked.
        """
        wanted = ReserveBeside(slot_bytes, num_slots, descriptor)
        return self._lane.begin(lambda: self._ask_for_memory(wanted))

    def see_run(self, job: str, run: str, known: tuple[str, ...], *, storage: bool = False) -> RunSeen:
        """What is held of a run, on this node and on those that took part before and are not ``known``.

        Args:
            storage: ask for what is durable, too, if the daemon has a store.
        Raises:
            DaemonUnavailable: the daemon is away.
        """
        # A store may take its time; the daemon gives up on it by itself.
        patience_s = _STORE_S if storage else 2 * ANSWER_S
        return self.link.ask(SeeRun(job, run, known, storage), RunSeen, "see run", patience_s)

    def join(self, message: Join) -> None:
        """Tell the daemon who takes part in the run, now and after each of its restarts.

        A daemon that is away is told when it is back: snapshots of this node go on, and have no
        second home until then.

        Raises:
            AttachRefused: the run has been recovered again since this was planned (``stale_epoch``).
        """
        self._joined = message
        try:
            self._lane.call(self._join, 2 * ANSWER_S)
        except (DaemonUnavailable, TimeoutError) as error:  # the link is busy
            self._join_later(error)

    def fetch(self, pieces: tuple[FetchPiece, ...], cards: tuple[NodeCard, ...]) -> SegmentInfo:
        """Have these snapshots brought here, into a new generation; they are sealed one after the other.

        Raises:
            AttachRefused: they do not fit, or nobody holds them any more.
            DaemonUnavailable: the daemon is away.
        """
        wanted = Fetch(pieces, cards)
        return self._told(self.link.ask(wanted, Reserved, "fetch", _RESERVE_LIMIT_S).segment)

    def fetch_for_reading(
        self, rank: int, kind: str, pieces: tuple[FetchPiece, ...], cards: tuple[NodeCard, ...] = ()
    ) -> Future[SegmentInfo]:
        """Have what another rank of this run has brought here, to be read; waits for nothing.

        The result is one of `fetch`'s errors, or a segment of that ``kind`` whose slots are sealed
        one after the other. It is none of this rank's generations; `fetch_state` and `drop` take
        its number as theirs, and it is gone when this session is.

        Raises:
            DaemonUnavailable: not even the question can be asked.
        """
        wanted = Fetch(pieces, cards, kind, rank)
        return self._lane.begin(lambda: self._ask_for_memory(wanted))

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
        return self.link.ask(GetFetch(generation), FetchState, "fetch")

    def drop(self, generation: int) -> None:
        """Tell the daemon that a generation is no longer needed."""

        def ask() -> None:
            if self._known is not None:
                self._known.discard(generation)
            try:
                self.link.request(Drop(generation), Done, ANSWER_S)
            except (AttachRefused, *FAILURES) as error:
                logger.warning("generation %d was not dropped: %s", generation, error)

        self._lane.submit(ask)

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
                self.link.request(Detach(final), Done, ANSWER_S)

        try:
            self.flush(ANSWER_S)
            self._lane.call(last, 15)
        except (AttachRefused, TimeoutError, *FAILURES) as error:
            logger.warning("detaching from the daemon: %s", error)
        self._closed.set()
        self._lane.join(ANSWER_S)
        self._desk.join(ANSWER_S)

    # -- at the desk -----------------------------------------------------------------------------

    def _look_at_slots(self) -> None:
        now = time.monotonic()
        if not self.connected and now >= self._next_look and not self._closed.is_set():
            self._next_look = now + LOOK_S
            self._listener.while_lost()

    # -- on the link -----------------------------------------------------------------------------

    def _ask_for_memory(self, wanted: Reserve | ReserveBeside | Fetch) -> SegmentInfo:
        try:
            reply = self.link.request(wanted, Reserved, _RESERVE_LIMIT_S, alive_s=ANSWER_S)
        except (RequestTimeout, WireError, OSError) as error:
            self.link.lose(str(error))
            raise DaemonUnavailable(str(error), operation="reserve") from error
        return reply.segment if isinstance(wanted, Fetch) else self._told(reply.segment)

    def _told(self, segment: SegmentInfo) -> SegmentInfo:
        if self._known is not None:
            self._known.add(segment.generation)
        return segment

    def _give_back_unknown(self, attached: Attached) -> None:
        """A daemon that ended between making a segment and telling us has found it again; nobody
        else knows of it.

        So it is with one whose `drop` the daemon did not hear.
        """
        told = (*attached.segments, *attached.logs, *attached.parked)
        found = {segment.generation for segment in told}
        if self._known is None:  # the first time: all that there is, is mapped
            self._known = found
            return
        for generation in sorted(found - self._known):
            logger.info("generation %d is given back: its answer never came", generation)
            self.drop(generation)

    def _join(self) -> None:
        """Raises AttachRefused if it never will be welcome; anything else is tried again."""
        if self._joined is None:
            return
        try:
            self.link.request(self._joined, Done, ANSWER_S)
            self._join_again = False
        except AttachRefused as error:
            if error.code == RefusalCode.STALE_EPOCH:
                self._joined, self._join_again = None, False
                text = f"snapshots are not replicated: {error}"
                logger.error("%s", text)
                self.link.send(Notice("error", str(RefusalCode.STALE_EPOCH), text[:4000]))
                raise
            self._join_later(error)
        except FAILURES as error:
            self._join_later(error)

    def _join_later(self, error: Exception) -> None:
        self._join_again = True
        logger.warning("the daemon was not told who takes part in the run: %s", error)

    def _rejoin(self) -> None:
        """Tell a daemon that was away. Training goes on whatever it says."""
        with contextlib.suppress(AttachRefused):  # logged there
            self._join()

    def opened(self, welcome: Welcome, attached: Attached) -> None:
        """What the daemon says when it is attached to; to be called by the link."""
        self.node_id, self.segment_dir = welcome.node_id, welcome.segment_dir
        self.card = welcome.card or NodeCard(welcome.node_id)
        self.slack, self.persists = attached.replication_slack, attached.persists
        self.segments, self.logs = attached.segments, attached.logs
        self.parked, self._park_asked = attached.parked, 0
        self._give_back_unknown(attached)
        self.quota_bytes, self.available_bytes = attached.quota_bytes, attached.available_bytes
        self.notes = attached.notes

    def back(self) -> None:
        """The daemon was away, and is there again; to be called by the link."""
        logger.warning("the daemon is back (node %s)", self.node_id)
        self._rejoin()

    def answered(self, pong: Pong) -> None:
        """The daemon is there; to be called by the link."""
        if self._join_again:
            self._rejoin()
        self._heed(pong.park)

    def _heed(self, number: int) -> None:
        """Somebody asks this trainer to park (0: nobody does); asked again with each ping until it
        has answered.
        """
        if number in (0, self._park_asked):
            return
        self._park_asked = number
        if not self._listener.asked_to_park(number):
            why = "this trainer does not park: pass recovery=RecoveryOptions(park=True), or log boundaries"
            self.link.send(ParkOutcome(number, -1, why))
