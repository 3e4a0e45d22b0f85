"""This rank's memory: the session with the daemon and the segments it grants, from attach to recovery.

Generations whose operator tables differ (a replanned window may split operators differently) cannot share a suffix, so the
ring sees only those that agree with the newest; older ones are kept until the newest holds a complete suffix by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from ckptd.client.identity import Identity
from ckptd.client.replay import SnapshotImage
from ckptd.client.segment import MappedSegment, RankTaken, SlotTable
from ckptd.client.session import Session
from ckptd.errors import AttachRefused, DaemonUnavailable, SegmentError
from ckptd.recovery import NoRecovery, RankInventory, plan_recovery
from ckptd.ring import NoSuffix, SlotRecord, SlotState, droppable_generations, find_suffix, truncate
from ckptd.segment_format import SegmentDescriptor, encode_descriptor
from ckptd.storage.image import DigestMismatch, ImageError, ImageView, verify
from ckptd.transport.messages import Attach

__all__ = ["LAYOUT_VERSION", "RankMemory"]

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 1
# Exchanges every rank's inventory and returns all of them, by rank.
Exchange = Callable[[RankInventory], dict[int, RankInventory]]


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
    ) -> None:
        self.identity, self.topology = identity, topology
        self._segments: list[MappedSegment] = []
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
        self.table = SlotTable(self._current())

    # -- recovery --------------------------------------------------------------------------------

    @property
    def descriptor(self) -> SegmentDescriptor | None:
        """The newest generation's; None before the first one is reserved."""
        return self._segments[-1].descriptor if self._segments else None

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

    def choose_table(self) -> None:
        """Recover from the newest generations that hold a complete suffix, if the very newest do not."""
        for group in reversed(self._groups()):
            table = SlotTable(group)
            if not isinstance(
                find_suffix(table.records(), group[-1].descriptor.num_operators), NoSuffix
            ):
                newer = self._segments[self._segments.index(group[-1]) + 1 :]
                self._give_up(
                    newer
                )  # they hold no complete suffix, and another history begins here
                self.table = table
                return

    def _give_up(self, segments: Sequence[MappedSegment]) -> None:
        for segment in segments:
            self._segments.remove(segment)
            segment.close()
            self.session.drop(segment.generation)

    def recover(self, exchange: Exchange) -> tuple[list[SnapshotImage], str] | str:
        """The newest suffix that every rank has and whose every byte is as it was sealed; or why there is none.

        A slot that fails its digests is quarantined and reported, and the next older suffix is tried.
        """
        while True:
            group = self.table.segments
            num_operators = group[-1].descriptor.num_operators if group else 0
            inventory = RankInventory(num_operators, tuple(self.table.records()))
            plan = plan_recovery(exchange(inventory), self.identity.world_size)
            if isinstance(plan, NoRecovery):
                return plan.reason
            records = plan.per_rank[self.identity.rank]
            bad = self._verify(records)
            # Every rank must see the same outcome: what one rank quarantined changes its next inventory.
            if not self._any(exchange, bad):
                for record in truncate(self.table.records(), plan.end):
                    self._release(record)
                return [self._image(r) for r in records], plan.reason

    def _any(self, exchange: Exchange, bad: bool) -> bool:
        """Whether any rank found damage; a collective call."""
        if self.identity.world_size == 1:
            return bad
        # A vote in the only form that ranks exchange: an inventory without records, of one operator for yes and of none for no.
        votes = exchange(RankInventory(int(bad), ()))
        return any(vote.num_operators for vote in votes.values())

    def _verify(self, records: Sequence[SlotRecord]) -> bool:
        """Check every digest of these slots; True if one failed (it is quarantined)."""
        bad = False
        with ThreadPoolExecutor(2, thread_name_prefix="ckptd-verify") as pool:
            for record in records:
                segment = self.table.segment(record.generation)
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
            record.iteration, view, segment.memory, segment.slot_base(record.index)
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
        self.table = SlotTable([])

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
        try:
            segment = MappedSegment(info.path, info.generation)
        except (OSError, RankTaken, SegmentError) as error:
            raise DaemonUnavailable(
                f"its new segment cannot be used: {error}", operation="reserve"
            ) from error
        segment.hint = max((s.hint for s in self._segments), default=0)
        self._segments.append(segment)
        self.table = SlotTable(self._current())
        return segment

    def drop_unneeded(self) -> list[MappedSegment]:
        """Give back generations that no suffix needs; returns them (still mapped) so that an engine can release them."""
        if len(self._segments) < 2:
            return []
        current = self._segments[-1].generation
        records = self.table.records()
        unneeded = droppable_generations(records, self.num_operators, current)
        if not isinstance(find_suffix(records, self.num_operators), NoSuffix):
            unneeded |= {s.generation for s in self._segments} - {
                s.generation for s in self.table.segments
            }
        dropped = [s for s in self._segments if s.generation in unneeded]
        self._give_up(dropped)
        if dropped:
            self.table.segments = self._current()
        return dropped

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
    import msgspec

    told = msgspec.msgpack.decode(segment.descriptor.client)
    return segment.descriptor.num_operators, xxhash.xxh3_128_hexdigest(
        msgspec.msgpack.encode(told["operators"])
    )
