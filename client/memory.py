"""This rank's memory: the session with the daemon and the segments it grants, from attach to recovery.

Generations whose operator tables differ (a replanned window may split operators differently) cannot share a suffix, so the
ring sees only those that agree with the newest; older ones are kept until the newest holds a complete suffix by itself.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ckptd.client.identity import Identity
from ckptd.client.membership import Exchange, RunView, agree_that_any, see_run
from ckptd.client.replay import SnapshotImage
from ckptd.client.segment import MappedSegment, RankTaken, SlotTable
from ckptd.client.session import Session
from ckptd.client.stats import Stats
from ckptd.errors import AttachRefused, DaemonUnavailable, SegmentError
from ckptd.held import HeldRecords
from ckptd.holdings import fetch_piece, operators_id
from ckptd.recovery import NoRecovery, Piece, RecoveryPlan, plan_recovery
from ckptd.ring import (
    NoSuffix,
    SlotRecord,
    SlotState,
    droppable_generations,
    find_suffix,
    truncate,
)
from ckptd.segment_format import (
    SegmentDescriptor,
    encode_descriptor,
)
from ckptd.storage.image import DigestMismatch, ImageError, ImageView, verify
from ckptd.transport.messages import (
    Attach,
    Join,
    Member,
    RefusalCode,
    SegmentInfo,
)

__all__ = ["LAYOUT_VERSION", "RankMemory"]

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 1
_PLANS = 5  # nodes may come and go while a plan is made
_ASK_S = 0.5
_STALLED_S = 60.0


class RankMemory:
    """Attach, map, recover, reserve.

    Raises:
        AttachRefused: the daemon refuses, or another process owns the rank.
        DaemonUnavailable: no daemon answers.
    """

    def __init__(
        self,
        identity: Identity,
        find_endpoint: Callable[[], str],
        *,
        needed_bytes: int,
        needed_text: str,
        topology: str,
        version: str,
        timeout_s: float,
        replicas: int | None = None,
        stats: Stats | None = None,
    ) -> None:
        self.identity, self.topology, self._replicas = identity, topology, replicas
        self._segments: list[MappedSegment] = []
        self._stats, self._asked_s = stats or Stats(), 0.0
        begun = time.perf_counter()
        attach = Attach(
            identity.job,
            identity.run,
            identity.rank,
            identity.world_size,
            topology,
            LAYOUT_VERSION,
            needed_bytes,
            needed_text[:4000],
        )
        self.session = Session(
            find_endpoint,
            attach,
            version=version,
            while_lost=self._seal_waiting,
            held=lambda: tuple(s.generation for s in self._segments),
            timeout_s=timeout_s,
        )
        try:
            for info in self.session.segments:
                self._segments.append(MappedSegment(info.path, info.generation))
        except RankTaken as error:
            self.session.close()
            raise AttachRefused("rank_taken", str(error)) from error
        self.epoch, self.epoch_start = 0, -1
        self.table = self._table(self._current())
        self._stats.attach_s = time.perf_counter() - begun

    # -- recovery --------------------------------------------------------------------------------

    @property
    def descriptor(self) -> SegmentDescriptor | None:
        """The newest generation's; None before the first one is reserved."""
        return self._segments[-1].descriptor if self._segments else None

    @property
    def slack(self) -> int:
        """Slots that the ring should have beyond what one node needs."""
        return self.session.slack

    @property
    def num_operators(self) -> int:
        return self.descriptor.num_operators if self.descriptor is not None else 0

    def settle_filled(self, timeout_s: float) -> None:
        """Wait until what a dead trainer left filled is sealed; seal it here if the daemon takes longer."""
        deadline = time.monotonic() + timeout_s
        everything = SlotTable(self._segments)
        while any(r.state is SlotState.FILLED for r in everything.records()):
            if time.monotonic() > deadline:
                self._seal_waiting()
                return
            time.sleep(0.005)

    def _give_up(self, segments: Sequence[MappedSegment]) -> None:
        for segment in segments:
            self._segments.remove(segment)
            segment.close()
            self.session.drop(segment.generation)

    def recover(self, exchange: Exchange) -> tuple[list[SnapshotImage], str] | str:
        """The newest suffix that every rank can have, from here or from other nodes; or why there is none.

        What lies here is verified before use: a slot that fails its digests is quarantined and reported, and the ranks plan
        anew without it. What lies elsewhere is being brought here when this returns; its images are waited for when needed.

        Raises:
            AttachRefused: there is no memory for what must be brought here.
            DaemonUnavailable: the daemon went away.
        """
        for _ in range(_PLANS):
            begun = time.perf_counter()
            view = see_run(
                self.session, self.identity.job, self.identity.run, self.identity.rank, exchange
            )
            plan = plan_recovery(view.held, self.identity.world_size, homes=view.homes)
            self._stats.recover_plan_s += time.perf_counter() - begun
            if isinstance(plan, NoRecovery):
                self.begin_epoch(view.next_epoch(plan.epoch), -1, view.members)
                return plan.reason
            pieces = plan.per_rank[self.identity.rank]
            here = [self._here(piece) for piece in pieces]
            bad = self._verify([record for record in here if record is not None])
            missing = [p for p, record in zip(pieces, here, strict=True) if record is None]
            fetched, error = (None, None) if bad or not missing else self._fetch(missing, view)
            # Every rank must see the same outcome: what one rank lacks changes the plan of all.
            again = agree_that_any(exchange, bad or error is not None)
            if not again:
                return self._resume(plan, view, pieces, here, fetched), plan.reason
            if fetched is not None:
                self._forsake(fetched)
            if isinstance(error, AttachRefused) and error.code != RefusalCode.NOT_FOUND:
                raise error
        # Every rank comes here together. Starting over would free what the others hold safely.
        raise DaemonUnavailable(
            f"no plan for the recovery held after {_PLANS} attempts",
            hint="a node cannot reach the holders of its ranks' snapshots (`ckptctl peers`, `ckptctl events`); nothing was "
            "lost: start again when it can, or `ckptctl forget` the run to begin anew",
        )

    def _resume(
        self,
        plan: RecoveryPlan,
        view: RunView,
        pieces: Sequence[Piece],
        here: Sequence[SlotRecord | None],
        fetched: SegmentInfo | None,
    ) -> list[SnapshotImage]:
        """Map what was fetched, drop what belongs to an abandoned history, and begin the new one."""
        self._keep_table_of(pieces[0], view.held)
        arriving: MappedSegment | None = None
        if fetched is not None:
            arriving = self._map(fetched)
            self._segments.append(arriving)
        self.table = self._table(self._current())
        self.begin_epoch(view.next_epoch(plan.epoch), plan.end, view.members)
        for record in truncate(self.table.records(), plan.end):
            self._release(record)
        images = []
        index = 0
        for piece, lies_here in zip(pieces, here, strict=True):
            if lies_here is not None:
                images.append(self._image(lies_here))
                continue
            assert arriving is not None
            images.append(self._coming(arriving, index, piece.record))
            index += 1
        return images

    def begin_epoch(self, epoch: int, start: int, members: tuple[Member, ...] = ()) -> None:
        """What is filled from now on belongs to this epoch, which goes on from iteration ``start`` (-1: the beginning)."""
        self.epoch, self.epoch_start = epoch, start
        self.table.epoch, self.table.epoch_start = epoch, start
        if members:
            replicas = -1 if self._replicas is None else self._replicas
            self.session.join(Join(epoch, start, members, replicas))

    def _here(self, piece: Piece) -> SlotRecord | None:
        """The record of this rank's own copy of a piece, if it is mapped."""
        own = {_name(segment): segment for segment in self._segments}
        for at in piece.sources:
            if at.node == self.session.node_id and at.segment in own:
                return replace(piece.record, generation=own[at.segment].generation, index=at.index)
        return None

    def _keep_table_of(self, piece: Piece, held: Iterable[HeldRecords]) -> None:
        """Give up own generations that are newer than the plan's and of another operator table."""
        at = piece.sources[0]
        told = next(h for h in held if (h.node, h.segment) == (at.node, at.segment))
        newer: list[MappedSegment] = []
        for segment in reversed(self._segments):
            if _operators_id(segment) == (told.num_operators, told.operators_id):
                break
            newer.append(segment)
        if len(newer) < len(self._segments):
            self._give_up(newer)

    def _fetch(
        self, pieces: Sequence[Piece], view: RunView
    ) -> tuple[SegmentInfo | None, Exception | None]:
        """Have pieces brought here; what went wrong is for the vote."""
        wanted = tuple(fetch_piece(piece, sealed_at_ns=time.time_ns()) for piece in pieces)
        try:
            return self.session.fetch(wanted, view.everybody), None
        except (AttachRefused, DaemonUnavailable) as error:
            logger.error("snapshots could not be brought to this node: %s", error)
            self.session.notice("error", "fetch_failed", str(error))
            return None, error

    def _forsake(self, fetched: SegmentInfo) -> None:
        self.session.drop(fetched.generation)

    def _map(self, info: SegmentInfo) -> MappedSegment:
        try:
            return MappedSegment(info.path, info.generation)
        except (OSError, RankTaken, SegmentError) as error:
            raise DaemonUnavailable(
                f"its new segment cannot be used: {error}", operation="reserve"
            ) from error

    def _coming(self, segment: MappedSegment, index: int, record: SlotRecord) -> SnapshotImage:
        """An image that is still on its way."""

        def view() -> ImageView:
            self._wait_for(segment, index, record)
            self._stats.fetch_last_s = time.perf_counter() - self._asked_s
            self._stats.fetch_first_s = self._stats.fetch_first_s or self._stats.fetch_last_s
            return ImageView(segment.slot(index)[: record.image_len])

        return SnapshotImage(
            record.iteration, view, segment.memory, segment.slot_base(index), record.phase
        )

    def _wait_for(self, segment: MappedSegment, index: int, record: SlotRecord) -> None:
        """Until the daemon has sealed it.

        Raises:
            DaemonUnavailable: it cannot be brought here any more; a restart of the job plans anew.
        """
        asked_at, seen, moved_at = time.monotonic(), -1, time.monotonic()
        while True:
            header = segment.header(index)
            if header is not None and header.state is SlotState.SEALED:
                return
            now = time.monotonic()
            if now >= asked_at + _ASK_S:
                asked_at = now
                try:
                    state = self.session.fetch_state(segment.generation)
                except AttachRefused as error:
                    raise DaemonUnavailable(str(error), operation="fetch") from error
                if state.state == "failed":
                    raise DaemonUnavailable(
                        f"iteration {record.iteration} could not be brought here: {state.reason}",
                        operation="fetch",
                    )
                if state.bytes_done != seen:
                    seen, moved_at = state.bytes_done, now
                elif now > moved_at + _STALLED_S:
                    raise DaemonUnavailable(
                        f"iteration {record.iteration}: nothing arrived for {_STALLED_S:.0f} s",
                        operation="fetch",
                    )
            time.sleep(0.002)

    def _verify(self, records: Sequence[SlotRecord]) -> bool:
        """Check every digest of these slots; True if one failed (it is quarantined)."""
        bad = False
        with ThreadPoolExecutor(2, thread_name_prefix="ckptd-verify") as pool:
            for record in records:
                # Not the table's: the plan may be of older generations than the newest operator table.
                segment = next(s for s in self._segments if s.generation == record.generation)
                header = segment.header(record.index)
                slot = segment.slot(record.index)[: record.image_len]
                try:
                    if header is None:
                        raise ImageError("the slot header is damaged")
                    verify(slot, header.header_digest, map_fn=pool.map)
                except ImageError as error:
                    what = error.tensor if isinstance(error, DigestMismatch) else str(error)
                    text = f"slot {record.index} (iteration {record.iteration}) is damaged: {what}; quarantined, an older suffix is used"
                    logger.error("%s", text)
                    self.session.notice("error", "digest_mismatch", text)
                    segment.set_state(record.index, SlotState.QUARANTINED)
                    bad = True
        return bad

    def _image(self, record: SlotRecord) -> SnapshotImage:
        segment = self.table.segment(record.generation)
        view = ImageView(segment.slot(record.index)[: record.image_len])
        return SnapshotImage(
            record.iteration,
            view,
            segment.memory,
            segment.slot_base(record.index),
            record.phase,
        )

    @property
    def hint(self) -> int:
        """What an earlier trainer of this rank learned (see ``segment_format``)."""
        return max((s.hint for s in self._segments), default=0)

    def leave_hint(self, hint: int) -> None:
        """Tell the next trainer of this rank, through memory that outlives this process."""
        for segment in self._segments:
            segment.hint = hint

    def images(self, records: Sequence[SlotRecord]) -> list[SnapshotImage]:
        """The images of sealed slots, for a replay in process."""
        return [self._image(r) for r in records]

    def _release(self, record: SlotRecord) -> None:
        segment = self.table.segment(record.generation)
        if segment.try_lock_slot(record.index):
            segment.set_state(record.index, SlotState.FREE)
            segment.unlock_slot(record.index)

    def forget_everything(self) -> None:
        """Drop every generation: nothing in them can be recovered."""
        self._give_up(list(self._segments))
        self.table = self._table([])

    # -- growing and shrinking -------------------------------------------------------------------

    def reserve(
        self, slot_bytes: int, num_slots: int, *, window: int, num_operators: int, payload: bytes
    ) -> MappedSegment:
        """A new generation, which is filled from now on.

        Raises:
            AttachRefused: it does not fit.
            DaemonUnavailable: the daemon is away.
            TimeoutError: it is on its way; ask for the same again later.
        """
        descriptor = SegmentDescriptor(
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
        info = self.session.reserve(slot_bytes, num_slots, encode_descriptor(descriptor))
        segment = self._map(info)
        segment.hint = max((s.hint for s in self._segments), default=0)
        self._segments.append(segment)
        self.table = self._table(self._current())
        return segment

    def drop_unneeded(self) -> list[MappedSegment]:
        """Give back generations that no suffix needs; returns them (still mapped) so that an engine can release them."""
        if len(self._segments) < 2:
            return []
        current = self._segments[-1].generation
        records = self.table.records()
        epochs = self.table.epochs
        unneeded = droppable_generations(records, self.num_operators, current, epochs=epochs)
        if not isinstance(find_suffix(records, self.num_operators, epochs=epochs), NoSuffix):
            unneeded |= {s.generation for s in self._segments} - {
                s.generation for s in self.table.segments
            }
        dropped = [s for s in self._segments if s.generation in unneeded]
        self._give_up(dropped)
        if dropped:
            self.table.segments = self._current()
        return dropped

    def _table(self, segments: Sequence[MappedSegment]) -> SlotTable:
        return SlotTable(segments, epoch=self.epoch, epoch_start=self.epoch_start)

    def _groups(self) -> list[list[MappedSegment]]:
        """Runs of consecutive generations with the same operator table, oldest first."""
        groups: list[list[MappedSegment]] = []
        for segment in self._segments:
            if groups and _operators_id(groups[-1][-1]) == _operators_id(segment):
                groups[-1].append(segment)
            else:
                groups.append([segment])
        return groups

    def _current(self) -> list[MappedSegment]:
        groups = self._groups()
        return groups[-1] if groups else []

    def _seal_waiting(self) -> None:
        """Seal what is filled while the daemon is away (on the session's thread)."""
        for segment in list(self._segments):
            for index in range(segment.geometry.num_slots):
                segment.seal(index)

    def close(self, *, final: bool = False) -> None:
        """Detach and give up ownership; the daemon keeps the memory."""
        self.session.close(final=final)
        for segment in self._segments:
            segment.close()
        self._segments = []


def _operators_id(segment: MappedSegment) -> tuple[int, str]:
    return segment.descriptor.num_operators, operators_id(segment.descriptor)


def _name(segment: MappedSegment) -> str:
    return os.path.basename(segment.path)
