"""The trainer's conversation with its daemon, on two threads of its own; training never waits for it.

The *lane* (`DaemonConnection`) owns the connection and may wait for an answer. The *desk* finishes
snapshots, seals them while the daemon is away, and never waits: a daemon that hangs holds up nothing but
the conversation.

For the training thread all traffic after the attach is one-way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from ckptd.client.daemon_link.connection import (
    ANSWER_S,
    FAILURES,
    LOOK_S,
    DaemonConnection,
    WorkerThread,
)
from ckptd.client.log_lines import get_logger
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
from ckptd.transport.wire import RequestTimeout, WireError

logger = get_logger(__name__)

_RESERVE_WAIT_S = 2.0
_RESERVE_LIMIT_S = 600.0
_STORE_S = 900.0
_CLOSE_S = 15.0
_LOOK_AGAIN_S = 0.05
_TEXT_LIMIT = 4000


class SessionListener(Protocol):
    """The owner of a session."""

    def held(self) -> tuple[int, ...]:
        """The generations whose owner lock this process holds."""
        ...

    def while_lost(self) -> None:
        """Called on the desk about twice a second while the daemon is away."""

    def asked_to_park(self, number: int) -> bool:
        """Called on the lane with the number of a request to park; False: this trainer does not park."""
        ...


class Session(DaemonConnection):
    """Attach to the daemon and keep the session alive.

    Args:
        find_endpoint, attach, version, check: see `DaemonConnection`.
        listener: owns the session.
    Attributes:
        segments, logs, parked, kv: this rank's segments, as the daemon last listed them.
        failure_ago_s, others_ended_ago_s: as in `Attached`, at the last attach.
        replicated, durable: as in the last `Pong`, about once a second.
    Raises:
        DaemonUnavailable: no daemon answers within ``timeout_s``.
        AttachRefused: it answers and refuses; code, message and hint are the daemon's.
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
        super().__init__(find_endpoint, attach, version=version, check=check)
        self._listener, self._timeout_s = listener, timeout_s
        self._desk = WorkerThread("ckptd-desk", self._look_at_slots, lambda error: None, self._closed)
        self._next_look = 0.0
        self._reserving: tuple[Reserve, Future[SegmentInfo]] | None = None
        # Generations that this trainer knows, and has not given back.
        self._known: set[int] | None = None
        self._joined: Join | None = None
        self._join_again = False
        self._park_asked = 0
        self.node_id = self.segment_dir = ""
        self.card = NodeCard("nobody")
        self.slack, self.persists = 0, False
        self.replicated = self.durable = -1
        self.failure_ago_s = self.others_ended_ago_s = -1.0
        self.segments: tuple[SegmentInfo, ...] = ()
        self.logs: tuple[SegmentInfo, ...] = ()
        self.parked: tuple[SegmentInfo, ...] = ()
        self.kv: tuple[SegmentInfo, ...] = ()
        self.available_bytes = 0
        self.notes: tuple[str, ...] = ()
        self.open_within(timeout_s)
        self._lane.start()
        self._desk.start()

    @property
    def run(self) -> tuple[str, str]:
        """Job and run of this session."""
        return self._attach.job, self._attach.run

    # -- called from any thread ------------------------------------------------------------------

    def submit(self, work: Callable[[], Any]) -> bool:
        """Do ``work`` at the desk; False if its queue is full (the work is dropped)."""
        return self._desk.submit(work)

    def filled(self, generation: int, slot: int, iteration: int) -> None:
        """Announce a slot that waits to be sealed."""
        self._lane.submit(lambda: self._send(Filled(generation, slot, iteration)))

    def report(self, step: int, metrics: dict[str, float]) -> None:
        self._lane.submit(lambda: self._send(Report(step, metrics)))

    def notice(self, level: str, kind: str, message: str) -> None:
        self._lane.submit(lambda: self._send(Notice(level, kind, message[:_TEXT_LIMIT])))

    def tell(self, level: str, kind: str, message: str, timeout_s: float) -> bool:
        """Like `notice`, and wait until the daemon has it; False if that is not certain."""

        def say() -> None:
            self._send(Notice(level, kind, message[:_TEXT_LIMIT]))
            self._request(Ping(), Pong, timeout_s)  # answered in order: it has read what came before

        try:
            self._lane.call(say, timeout_s)
        except (AttachRefused, TimeoutError, *FAILURES) as error:
            logger.info("the daemon may not have heard of %s: %s", kind, error)
            return False
        return True

    def tell_replay(self, failure: ReplayFailure | None) -> None:
        """Report a replay that did not reproduce, and wait until the daemon has written that down; or
        None: one did, without waiting.

        This process is about to end; a daemon that is away never hears of it, and the next start
        replays once more for nothing.
        """
        if failure is None:
            self._lane.submit(self._tell_reproduced)
            return
        try:
            self.ask(TellReplay(failure), Done, "tell of a replay")
        except (AttachRefused, DaemonUnavailable) as error:
            logger.error("the daemon was not told that this replay failed: %s", error)

    def _tell_reproduced(self) -> None:
        try:
            self._request(TellReplay(None), Done, ANSWER_S)
        except (AttachRefused, *FAILURES) as error:
            logger.warning("the daemon was not told that this replay reproduced: %s", error)

    def park_outcome(self, number: int, iteration: int, reason: str) -> None:
        """Answer a request to park."""
        outcome = ParkOutcome(number, iteration, reason[:_TEXT_LIMIT])
        self._lane.submit(lambda: self._send(outcome))

    def tell_elastic(self, elastic: Elastic) -> None:
        """Report the placement of an elastic job, for `ckptctl elastic`; lost if the daemon is away."""

        def say() -> None:
            try:
                self._send(TellElastic(elastic))
            except WireError as error:  # too large: no reason to take the daemon for lost
                logger.warning("the daemon was not told of the placement: %s", error)

        self._lane.submit(say)

    @property
    def reserving(self) -> bool:
        """Whether a requested generation is still on its way."""
        return self._reserving is not None and not self._reserving[1].done()

    def reserve(
        self, slot_bytes: int, num_slots: int, descriptor: bytes, *, patient: bool = True
    ) -> SegmentInfo:
        """Request a new generation. Training does not wait long: a large one is pre-touched while it goes on.

        Args:
            patient: wait for a moment after the request; otherwise not at all.
        Raises:
            AttachRefused: it does not fit, with the numbers.
            DaemonUnavailable: the daemon is away.
            TimeoutError: it is on its way; ask for the same again once ``reserving`` is false.
        """
        wanted = Reserve(slot_bytes, num_slots, descriptor)
        patience_s = 0.0
        if self._reserving is None:
            patience_s = _RESERVE_WAIT_S if patient else 0.0
            self._reserving = wanted, self._lane.begin(lambda: self._request_memory(wanted))
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
        self.drop(found.generation)  # requested under another plan, and no longer wanted
        return self.reserve(slot_bytes, num_slots, descriptor, patient=patient)

    def reserve_auxiliary(self, slot_bytes: int, num_slots: int, descriptor: bytes) -> Future[SegmentInfo]:
        """Request a segment without snapshots (a boundary log, parked state); does not block. The future
        raises the errors of `reserve`.

        Raises:
            DaemonUnavailable: not even the request can be queued.
        """
        wanted = ReserveBeside(slot_bytes, num_slots, descriptor)
        return self._lane.begin(lambda: self._request_memory(wanted))

    def see_run(
        self, job: str, run: str, known: tuple[str, ...], *, storage: bool = False, patient: bool = False
    ) -> RunSeen:
        """What this node holds of a run, and the nodes that took part before and are not ``known``.

        Args:
            storage: include what is durable, if the daemon has a store.
            patient: wait for nodes without a sign of life as long as for others.
        Raises:
            DaemonUnavailable: the daemon is away, and not back within the time for which a start waits.
        """
        # A store may take its time; the daemon gives up on it by itself.
        patience_s = _STORE_S if storage else 2 * ANSWER_S
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self.ask(SeeRun(job, run, known, storage, patient), RunSeen, "see run", patience_s)
            except DaemonUnavailable as error:
                # A start waits for a daemon that is only slow, or is being restarted.
                if isinstance(error.__cause__, WireError) or not self._is_back_by(deadline):
                    raise

    def _is_back_by(self, deadline: float) -> bool:
        while time.monotonic() < deadline:
            if self.connected:
                return True
            time.sleep(_LOOK_AGAIN_S)
        return False

    def join(self, message: Join) -> None:
        """Tell the daemon who takes part in the run, now and after each of its restarts.

        A daemon that is away learns it when it is back: snapshots of this node go on, and are not
        replicated until then.

        Raises:
            AttachRefused: the run has been recovered again since this was planned (``stale_epoch``).
        """
        self._joined = message
        try:
            self._lane.call(self._join, 2 * ANSWER_S)
        except (DaemonUnavailable, TimeoutError) as error:  # the lane is busy
            self._join_later(error)

    def fetch(self, pieces: tuple[FetchPiece, ...], cards: tuple[NodeCard, ...]) -> SegmentInfo:
        """Fetch these snapshots into a new generation, whose slots are sealed one after the other.

        Raises:
            AttachRefused: they do not fit, or no node holds them any more.
            DaemonUnavailable: the daemon is away.
        """
        wanted = Fetch(pieces, cards)
        return self._note(self.ask(wanted, Reserved, "fetch", _RESERVE_LIMIT_S).segment)

    def fetch_for_reading(
        self, rank: int, kind: str, pieces: tuple[FetchPiece, ...], cards: tuple[NodeCard, ...] = ()
    ) -> Future[SegmentInfo]:
        """Fetch another rank's data of this ``kind`` into a segment to read; does not block. The future
        raises the errors of `fetch`.

        The segment is none of this rank's generations, and ends with this session. `fetch_state` and
        `drop` take its number like theirs.

        Raises:
            DaemonUnavailable: not even the request can be queued.
        """
        wanted = Fetch(pieces, cards, kind, rank)
        return self._lane.begin(lambda: self._request_memory(wanted))

    def fetch_state(self, generation: int) -> FetchState:
        """The progress of a fetch.

        Raises:
            AttachRefused: the daemon does not know it (it was restarted).
            DaemonUnavailable: the daemon is away.
        """
        return self.ask(GetFetch(generation), FetchState, "fetch")

    def drop(self, generation: int) -> None:
        """Give a generation back."""

        def ask() -> None:
            if self._known is not None:
                self._known.discard(generation)
            try:
                self._request(Drop(generation), Done, ANSWER_S)
            except (AttachRefused, *FAILURES) as error:
                logger.warning("generation %d was not dropped: %s", generation, error)

        self._lane.submit(ask)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all work submitted to the desk is done; False if that takes longer."""
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
                self._request(Detach(final), Done, ANSWER_S)

        try:
            self.flush(ANSWER_S)
            self._lane.call(last, _CLOSE_S)
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

    # -- on the lane -----------------------------------------------------------------------------

    def _request_memory(self, wanted: Reserve | ReserveBeside | Fetch) -> SegmentInfo:
        try:
            reply = self._request(wanted, Reserved, _RESERVE_LIMIT_S, alive_s=ANSWER_S)
        except (RequestTimeout, WireError, OSError) as error:
            self._lose(str(error))
            raise DaemonUnavailable(str(error), operation="reserve") from error
        return reply.segment if isinstance(wanted, Fetch) else self._note(reply.segment)

    def _note(self, segment: SegmentInfo) -> SegmentInfo:
        if self._known is not None:
            self._known.add(segment.generation)
        return segment

    def _give_back_unknown(self, attached: Attached) -> None:
        """Give back segments that this trainer does not know: an answer, or a `drop`, was lost on its way."""
        listed = (*attached.segments, *attached.logs, *attached.parked, *attached.kv)
        found = {segment.generation for segment in listed}
        if self._known is None:  # the first time: all segments are mapped
            self._known = found
            return
        for generation in sorted(found - self._known):
            logger.info("generation %d is given back: its answer never came", generation)
            self.drop(generation)

    def _join(self) -> None:
        """Raises AttachRefused if the run was recovered again; retries after any other failure."""
        if self._joined is None:
            return
        try:
            self._request(self._joined, Done, ANSWER_S)
            self._join_again = False
        except AttachRefused as error:
            if error.code == RefusalCode.STALE_EPOCH:
                self._joined, self._join_again = None, False
                text = f"snapshots are not replicated: {error}"
                logger.error("%s", text)
                self._send(Notice("error", str(RefusalCode.STALE_EPOCH), text[:_TEXT_LIMIT]))
                raise
            self._join_later(error)
        except FAILURES as error:
            self._join_later(error)

    def _join_later(self, error: Exception) -> None:
        self._join_again = True
        logger.warning("the daemon was not told who takes part in the run: %s", error)

    def _rejoin(self) -> None:
        with contextlib.suppress(AttachRefused):  # logged there; training goes on
            self._join()

    def _held(self) -> tuple[int, ...]:
        return self._listener.held()

    def _opened(self, welcome: Welcome, attached: Attached) -> None:
        self.node_id, self.segment_dir = welcome.node_id, welcome.segment_dir
        self.card = welcome.card or NodeCard(welcome.node_id)
        self.slack, self.persists = attached.replication_slack, attached.persists
        self.failure_ago_s, self.others_ended_ago_s = attached.failure_ago_s, attached.others_ended_ago_s
        self.segments, self.logs = attached.segments, attached.logs
        self.parked, self.kv, self._park_asked = attached.parked, attached.kv, 0
        self._give_back_unknown(attached)
        self.available_bytes = attached.available_bytes
        self.notes = attached.notes

    def _back(self) -> None:
        logger.warning("the daemon is back (node %s)", self.node_id)
        self._rejoin()

    def _answered(self, pong: Pong) -> None:
        self.replicated, self.durable = pong.replicated, pong.durable
        if self._join_again:
            self._rejoin()
        number = pong.park
        # 0: no request to park. A request comes with each ping until it is answered.
        if number not in (0, self._park_asked):
            self._park_asked = number
            if not self._listener.asked_to_park(number):
                why = (
                    "this trainer does not park: pass recovery=RecoveryOptions(park=True), or log boundaries"
                )
                self._send(ParkOutcome(number, -1, why))
