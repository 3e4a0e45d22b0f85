"""This rank's memory: the session with the daemon, and the segments that it grants."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckptd.client.daemon_link.mapped_segment import Generations, MappedSegment, RankTaken, SlotTable
from ckptd.client.daemon_link.retrieval import Arrivals, Retrieval, Retrieved, only_stored
from ckptd.client.daemon_link.run_inventory import RankNote, RunView, see_run
from ckptd.client.daemon_link.session import Session
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.identity import Identity
from ckptd.client.options import DaemonOptions
from ckptd.client.phase_clock import PhaseClock
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.stats import Stats
from ckptd.core.recovery.recovery_facts import RankFacts
from ckptd.core.recovery.recovery_phases import RecoveryPhase
from ckptd.core.recovery.snapshot_tables import SnapshotCopy, SnapshotToLoad
from ckptd.core.slots.ring import truncate
from ckptd.core.slots.segment_format import Kind, ReplicaGroup, SegmentDescriptor, encode_descriptor
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.cuda.engine import CopyEngine
from ckptd.errors import AttachRefused, DaemonUnavailable, SegmentError
from ckptd.launch import ensure_daemon, unexpected
from ckptd.storage.image import ImageView
from ckptd.transport.messages import Attach, Join, Member, ReplayFailure, SegmentInfo

if TYPE_CHECKING:
    from ckptd.client.pipeline.log_reader import LogFacts

LAYOUT_VERSION = 1
_TEXT_LIMIT = 4000
RETRY_STEPS = 50
_MAX_AUXILIARY = 2


class MemoryNeed(NamedTuple):
    """The least memory with which a rank can be protected, and its derivation in words."""

    size_bytes: int
    text: str


class RankMemory:
    """Attach, map, recover, reserve.

    Attributes:
        session: with the daemon.
        phases: of this start.
        table: of the generations that snapshots are written to.
        logs, parks: segments of the boundary log, and of parked state.
        failures: replays that did not reproduce, as far as any node knew when this start last asked.
        replica_groups: what this rank's snapshots have in common with those of other ranks.
        brought_facts: with whom this rank communicates, if an earlier trainer recorded that on another
            node.
        chosen: the iteration to which this start is told to go back; the next one learns of it. -1: none.
    Raises:
        AttachRefused: the daemon refuses, or another process owns the rank.
        DaemonUnavailable: no daemon answers.
    """

    def __init__(
        self,
        identity: Identity,
        daemon: DaemonOptions,
        needed: MemoryNeed,
        *,
        topology: str,
        version: str,
        stats: Stats | None = None,
        phases: PhaseClock | None = None,
    ) -> None:
        self.identity, self.topology, self._replicas = identity, topology, daemon.replicas
        self._ask_to_park: Callable[[int], None] | None = None
        self._segments, self.logs, self.parks = Generations(), Generations(), Generations()
        self._ahead: tuple[MappedSegment, ...] = ()  # made for a plan that does not count yet
        self.failures: tuple[ReplayFailure, ...] = ()
        self.replica_groups: tuple[ReplicaGroup, ...] = ()
        self.brought_facts: LogFacts | None = None
        self.chosen = -1
        self._stats, self.phases = stats or Stats(), phases or PhaseClock()
        self._needed_bytes = needed.size_bytes
        begun = time.perf_counter()
        attach = Attach(
            identity.job,
            identity.run,
            identity.rank,
            identity.world_size,
            topology,
            LAYOUT_VERSION,
            needed.size_bytes,
            needed.text[:_TEXT_LIMIT],
        )
        auto = daemon.endpoint == "auto"
        self.session = session = Session(
            ensure_daemon if auto else lambda: str(daemon.endpoint),
            attach,
            self,
            version=version,
            timeout_s=daemon.timeout_s,
            check=unexpected if auto else lambda _: "",
        )
        self.phases.failed(session.failure_ago_s, session.others_ended_ago_s)
        try:
            for generations, infos in (
                (self._segments, session.segments),
                (self.logs, session.logs),
                (self.parks, session.parked),
            ):
                for info in infos:
                    generations.add(MappedSegment(info.path, info.generation))
        except RankTaken as error:
            session.close()
            raise AttachRefused("rank_taken", str(error)) from error
        except (OSError, SegmentError) as error:
            session.close()
            text = f"its segment cannot be used: {error}"
            raise DaemonUnavailable(text, operation="attach") from error
        self._segments.order_by_use()
        self.retrieval = Retrieval(session, self._segments)
        self.epoch, self.epoch_start = 0, -1
        self.table = self._table(self._segments.current())
        self._stats.attach_s = time.perf_counter() - begun
        self.phases.reach(RecoveryPhase.ATTACH)

    @property
    def descriptor(self) -> SegmentDescriptor | None:
        """The newest generation's; None before the first one is reserved."""
        newest = self._segments.newest
        return None if newest is None else newest.descriptor

    @property
    def num_operators(self) -> int:
        return self.descriptor.num_operators if self.descriptor is not None else 0

    @property
    def slack(self) -> int:
        """Slots that the ring should have beyond what one node needs."""
        return self.session.slack

    @property
    def persists(self) -> bool:
        """Whether the daemon uploads snapshots to storage."""
        return self.session.persists

    @property
    def _auxiliary(self) -> tuple[MappedSegment, ...]:
        return (*self.logs, *self.parks)

    # -- the session's listener --------------------------------------------------------------------

    def held(self) -> tuple[int, ...]:
        """The generations whose owner lock this process holds."""
        return tuple(s.generation for s in (*self._segments, *self._ahead, *self._auxiliary))

    def while_lost(self) -> None:
        """Seal what is filled while the daemon is away (on the session's thread)."""
        for segment in (*self._segments, *self._auxiliary):
            for index in range(segment.geometry.num_slots):
                segment.seal(index)

    def asked_to_park(self, number: int) -> bool:
        """A request to park (on the session's thread); returns whether this trainer parks at all."""
        ask = self._ask_to_park
        if ask is not None:
            ask(number)
        return ask is not None

    def park_when_asked(self, ask: Callable[[int], None] | None) -> None:
        """Call ``ask`` with the number of each request to park from now on; None: no more."""
        self._ask_to_park = ask

    # -- recovery --------------------------------------------------------------------------------

    def settle_filled(self, timeout_s: float) -> None:
        """Wait until what a dead trainer left filled is sealed; seal it here if the daemon takes longer.

        Boundary logs and parked state, too: if the last of them is missing when a recovery is
        planned, more ranks go back.
        """
        deadline = time.monotonic() + timeout_s
        while any(SlotState.FILLED in s.states() for s in (*self._segments, *self._auxiliary)):
            if time.monotonic() > deadline:
                self.while_lost()
                return
            time.sleep(0.005)

    def see(
        self,
        ranks: Collectives,
        *,
        storage: bool = False,
        patient: bool = False,
        facts: RankFacts | None = None,
        same_operators: tuple[int, ...] = (),
        unusable: tuple[SnapshotCopy, ...] = (),
    ) -> RunView:
        """What the nodes of this run hold, and what its ranks know of themselves; a collective call.

        Args:
            storage: include what is durable.
            patient: wait for nodes without a sign of life as long as for others.
            facts: with whom this rank communicates in a step, as an earlier trainer has observed.
            same_operators: ranks whose operators all equal those of this rank.
            unusable: copies of parked states that this rank could not have.
        Raises:
            DaemonUnavailable: a node's daemon is away; on every rank.
        """
        ring_bytes = max(self._needed_bytes, self._segments.total_bytes)
        mine = RankNote(ring_bytes, self.hint, facts, same_operators, unusable)
        with self.planning(RecoveryPhase.INVENTORY):
            view = see_run(
                self.session,
                self.identity.job,
                self.identity.run,
                ranks,
                note=mine,
                storage=storage,
                patient=patient,
            )
        self.failures = view.failures
        return view

    @contextmanager
    def planning(self, phase: RecoveryPhase) -> Iterator[None]:
        """Count the duration of the body as planning of a recovery; the phase ends with it."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._stats.recover_plan_s += time.perf_counter() - begun
        self.phases.reach(phase)

    def resume(
        self,
        pieces: Sequence[SnapshotToLoad],
        retrieved: Retrieved,
        view: RunView,
        *,
        epoch: int,
        end: int,
        apart: Sequence[SnapshotToLoad] = (),
    ) -> tuple[list[SnapshotImage], list[SnapshotImage]]:
        """Map what was fetched, begin the new history, and drop what belongs to an abandoned one.

        Args:
            pieces: the snapshots to load; empty if this rank goes on from parked state.
            epoch: the highest known.
            end: what is newer belongs to the abandoned history.
            apart: snapshots outside the plan's chain; they were retrieved before ``pieces``.
        Returns:
            The images of ``pieces``, and those of ``apart``.
        Raises:
            AttachRefused: the run was recovered again since the plan was made; nothing has begun.
        """
        unlike = self._newer_than_table_of(pieces[0], view) if pieces else []
        mine = [record for record in retrieved.own[len(apart) :] if record is not None]
        pieces, stats = (*apart, *pieces), self._stats
        stats.from_storage = sum(map(only_stored, retrieved.missing(pieces)))
        stats.from_peers = len(retrieved.missing(pieces)) - stats.from_storage
        if mine and not unlike:
            unlike = self._segments.of_another_window(self._segments.of(mine[-1]))
        arriving = None if retrieved.fetched is None else self._map(retrieved.fetched)
        if arriving is not None:
            self._segments.add(arriving)
        own = [None if record is None else self._image(record) for record in retrieved.own]
        # What may be refused comes before what cannot be undone.
        self.begin_epoch_after(view, epoch, end)
        self._give_up(unlike)
        self.table = self._table(self._segments.current())
        records = self.table.records()
        of_others = [r for r in records if r.epoch in view.others and r.iteration <= end]
        for record in (*truncate(records, end), *of_others):
            self._release(record)
        images = [image for image in own if image is not None]
        if arriving is not None:
            arrivals = Arrivals(self.session, arriving, self._stats, asked_s=retrieved.asked_s)
            slots = count()  # missing pieces were requested in this order
            images = [
                image if image is not None else arrivals.image(next(slots), piece.record)
                for piece, image in zip(pieces, own, strict=True)
            ]
        return images[len(apart) :], images[: len(apart)]

    def begin_epoch_after(self, view: RunView, highest: int, start: int) -> None:
        """Begin the epoch that follows all that any node knows.

        Raises:
            AttachRefused: the run was recovered again since the plan was made; nothing has begun.
        """
        follows = view.last_epoch(highest)
        if follows in view.others:
            follows = highest
        self.begin_epoch(view.next_epoch(highest), start, view.members, follows=follows)

    def begin_epoch(
        self, epoch: int, start: int, members: tuple[Member, ...] = (), *, follows: int = -1
    ) -> None:
        """Write snapshots of this epoch from now on; it goes on from iteration ``start`` (-1: the beginning).

        Raises:
            AttachRefused: the run was recovered again since the plan was made; nothing has begun.
        """
        if members:
            replicas = -1 if self._replicas is None else self._replicas
            self.session.join(Join(epoch, start, members, replicas, follows, self.chosen))
        self.epoch, self.epoch_start = epoch, start
        self._stats.epoch = epoch
        self.table.epoch, self.table.epoch_start = epoch, start

    def _newer_than_table_of(self, piece: SnapshotToLoad, view: RunView) -> list[MappedSegment]:
        """Own generations that are newer than the plan's and of another operator table."""
        at = piece.sources[0]
        newest = next(h for h in view.held if (h.node, h.segment) == (at.node, at.segment))
        return self._segments.newer_than_table((newest.num_operators, newest.operators_id))

    def images(self, records: Sequence[SlotRecord]) -> list[SnapshotImage]:
        """The images of sealed slots, for a replay in process."""
        return [self._image(r) for r in records]

    def _image(self, record: SlotRecord) -> SnapshotImage:
        segment = self._segments.of(record)
        view = ImageView(segment.slot(record.index)[: record.image_len])
        base = segment.slot_base(record.index)
        return SnapshotImage(record.iteration, view, segment.memory, base, record.phase)

    def _release(self, record: SlotRecord) -> None:
        self.table.segment(record.generation).free_slot(record.index)

    @property
    def hint(self) -> int:
        """What earlier trainers of this rank learned (``HINT_…``, as bits)."""
        return functools.reduce(operator.or_, (s.hint for s in self._segments), 0)

    def leave_hint(self, hint: int) -> None:
        """Leave a hint to the next trainer of this rank, in memory that outlives this process."""
        for segment in self._segments:
            segment.hint |= hint

    def take_back_hint(self, hint: int) -> None:
        """Remove a hint."""
        for segment in self._segments:
            segment.hint &= ~hint

    # -- growing and shrinking -------------------------------------------------------------------

    def reserve(
        self,
        slot_bytes: int,
        num_slots: int,
        *,
        window: int,
        num_operators: int,
        payload: bytes,
        patient: bool = True,
        ahead: bool = False,
    ) -> MappedSegment:
        """A new generation, to be filled from now on; ``ahead``: once it is installed.

        Raises:
            AttachRefused: it does not fit.
            DaemonUnavailable: the daemon is away.
            TimeoutError: it is on its way; ask for the same again later.
        """
        base = self._descriptor_of(window, num_operators, payload)
        descriptor = encode_descriptor(msgspec.structs.replace(base, replica_groups=self.replica_groups))
        segment = self._map(self.session.reserve(slot_bytes, num_slots, descriptor, patient=patient))
        if ahead:
            self._ahead = (*self._ahead, segment)
        else:
            self.install(segment)
        return segment

    def install(self, segment: MappedSegment) -> None:
        """Fill this generation from now on."""
        self._ahead = tuple(s for s in self._ahead if s is not segment)
        segment.hint = self.hint
        self._segments.add(segment)
        self.table = self._table(self._segments.current())

    def give_back(self, segment: MappedSegment) -> None:
        """Give back a generation that was made ahead and is not needed."""
        self._ahead = tuple(s for s in self._ahead if s is not segment)
        self._drop(segment)

    def reserve_auxiliary(
        self,
        kind: Kind,
        slot_bytes: int,
        num_slots: int,
        payload: bytes,
        *,
        window: int = 1,
        num_operators: int = 1,
        replicated: bool = False,
    ) -> Future[SegmentInfo]:
        """Request a generation without snapshots, for `add_auxiliary`; see `Session.reserve_auxiliary`."""
        base = self._descriptor_of(window, num_operators, payload)
        descriptor = msgspec.structs.replace(base, kind=kind, replicated=replicated)
        return self.session.reserve_auxiliary(slot_bytes, num_slots, encode_descriptor(descriptor))

    def add_auxiliary(self, info: SegmentInfo) -> MappedSegment:
        """Map a segment that `reserve_auxiliary` was granted.

        Raises:
            DaemonUnavailable: it cannot be used.
        """
        segment = self._map(info)
        (self.logs if segment.descriptor.is_log else self.parks).add(segment)
        return segment

    def drop_auxiliary(self, segment: MappedSegment) -> None:
        """Give back a generation of the boundary log or of parked state."""
        (self.logs if segment.descriptor.is_log else self.parks).remove(segment)
        self._drop(segment)

    def drop_unneeded(self) -> list[MappedSegment]:
        """Give back generations that no suffix needs; returns them, mapped, for an engine to release."""
        if len(self._segments) < 2:
            return []
        taken = {s: slots for s in self._unneeded() if (slots := s.lock_sealed()) is not None}
        # A daemon that promises something from here on sees the locks (`Run._secured`); what it
        # wrote down before is read now.
        dropped = [s for s in taken if s in self._unneeded()] if taken else []
        for segment, slots in taken.items():
            for index in slots:
                if segment in dropped:
                    segment.set_state(index, SlotState.FREE)  # from here on nobody counts on it
                else:
                    segment.unlock_slot(index)
        self._give_up(dropped)
        if dropped:
            self.table.segments = self._segments.current()
        return dropped

    def _unneeded(self) -> list[MappedSegment]:
        """Not those to which the other ranks may have to go back."""
        return self._segments.unneeded(self.table, self.num_operators)

    def forget_everything(self) -> None:
        """Drop every generation: nothing in them can be recovered."""
        self.forget_snapshots()
        for segment in self._auxiliary:
            self.drop_auxiliary(segment)

    def forget_snapshots(self) -> list[MappedSegment]:
        """Drop every generation of snapshots; returns them, still mapped, for an engine to release."""
        forgotten = list(self._segments)
        self._give_up(forgotten)
        self.table = self._table([])
        return forgotten

    def close(self, *, final: bool = False) -> None:
        """Detach and give up ownership; the daemon keeps the memory."""
        self.session.close(final=final)
        for segment in self._ahead:
            segment.close()
        self._ahead = ()
        for generations in (self._segments, self.logs, self.parks):
            generations.close()

    def _give_up(self, segments: Sequence[MappedSegment]) -> None:
        for segment in segments:
            self._segments.remove(segment)
            self._drop(segment)

    def _drop(self, segment: MappedSegment) -> None:
        segment.close()
        self.session.drop(segment.generation)

    def _map(self, info: SegmentInfo) -> MappedSegment:
        try:
            return MappedSegment(info.path, info.generation)
        except (OSError, RankTaken, SegmentError) as error:
            text = f"its new segment cannot be used: {error}"
            raise DaemonUnavailable(text, operation="reserve") from error

    def _table(self, segments: Sequence[MappedSegment]) -> SlotTable:
        return SlotTable(segments, epoch=self.epoch, epoch_start=self.epoch_start)

    def _descriptor_of(self, window: int, num_operators: int, payload: bytes) -> SegmentDescriptor:
        return SegmentDescriptor(
            job=self.identity.job,
            run=self.identity.run,
            rank=self.identity.rank,
            world_size=self.identity.world_size,
            topology=self.topology,
            layout_version=LAYOUT_VERSION,
            generation=0,
            node_id="",
            created_at_ns=0,
            window=window,
            num_operators=num_operators,
            client=payload,
        )


class AuxiliarySegments:
    """The segments of the boundary log, or of parked state.

    They are requested in the background, one request at a time, and again some steps after a refusal;
    two generations exist at most.

    Args:
        generations: the attribute of ``memory``, with those of an earlier trainer.
        engine: copies into them.
    """

    def __init__(self, memory: RankMemory, generations: Generations, engine: CopyEngine) -> None:
        self._memory, self._generations, self._engine = memory, generations, engine
        self._coming: Future[SegmentInfo] | None = None
        self._retry_at = 0
        self.refused = ""

    @property
    def newest(self) -> MappedSegment | None:
        """The segment that is filled next; None while there is none."""
        return self._generations.newest

    @property
    def _full(self) -> bool:
        """Whether there are as many generations as there may be."""
        return len(self._generations) >= _MAX_AUXILIARY

    def _collect_segment(self) -> MappedSegment | None:
        """The requested segment, ready to be filled; None if none was requested, or it is on its way.

        Raises:
            AttachRefused: there is no memory for it.
            DaemonUnavailable: the daemon is away, or it cannot be used.
            RuntimeError: it cannot be pinned; it is given back.
        """
        if self._coming is None or not self._coming.done():
            return None
        coming, self._coming = self._coming, None
        segment = self._memory.add_auxiliary(coming.result())
        self._register(segment)
        return segment

    def _register(self, segment: MappedSegment) -> None:
        """Pin a segment; raises RuntimeError if that fails, after giving it back."""
        try:
            self._engine.register(segment.memory, segment.regions())
        except RuntimeError:
            self._memory.drop_auxiliary(segment)
            raise

    def _give_back(self, segment: MappedSegment) -> None:
        self._engine.release(segment.memory)
        self._memory.drop_auxiliary(segment)

    def _put_off(self, step: int, error: Exception) -> None:
        """Retry later: soon if the daemon is away."""
        self._retry_at = step + (1 if isinstance(error, DaemonUnavailable) else RETRY_STEPS)
