"""`ckptctl drill`: the recovery of a rank, rehearsed from other nodes' memory without touching the job.

What a node that lost everything would fetch is fetched into memory that nobody else sees, verified
against its digests, compared byte for byte with the primary where that lies on this node, and
dropped.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ckptd.core.recovery.global_plan import NoRecovery, RecoveryPlan, SnapshotToLoad, plan_recovery
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.errors import RemoteProtocolError
from ckptd.holdings import fetch_piece, newest_history
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_maker import SegmentMaker
from ckptd.memory.segment_store import Purpose, SegmentStore
from ckptd.restore.descriptor_search import FoundDescriptor
from ckptd.restore.fetch_job import FetchJob
from ckptd.transport.messages import DrillReport, FetchPiece, FetchSource, Refused, RunSeen
from ckptd.workers import Workers

__all__ = ["DrillRun"]

_PIECE_BYTES = 1 << 20

# Begins to fill a segment with pieces; calls back with the reason of a failure, or "".
StartFetch = Callable[[Segment, list[FetchPiece], Callable[[str], None]], FetchJob]
FindDescriptor = Callable[[RankKey, tuple[FetchSource, ...], Callable[[FoundDescriptor | str], None]], None]


class DrillRun:
    """One rehearsal, from the survey of the run to the report. Lives on the daemon's loop thread."""

    def __init__(
        self,
        key: RankKey,
        store: SegmentStore,
        maker: SegmentMaker,
        comparers: Workers,
        *,
        find_descriptor: FindDescriptor,
        start_fetch: StartFetch,
        answer: Callable[[DrillReport], None],
        clock: Callable[[], float],
    ) -> None:
        self._key, self._store, self._maker, self._comparers = key, store, maker, comparers
        self._find_descriptor, self._start_fetch = find_descriptor, start_fetch
        self._answer, self._clock = answer, clock
        self._plan: RecoveryPlan | None = None
        self._pieces: tuple[SnapshotToLoad, ...] = ()
        self._job: FetchJob | None = None
        self._began_s = 0.0

    def seen(self, seen: RunSeen) -> None:
        """What the nodes of the run hold: plan, without the rank's own node."""
        try:
            held = newest_history(seen)
        except RemoteProtocolError as error:
            self._fail(str(error))
            return
        homes = {rank: member.card.node for member in seen.members for rank in member.ranks}
        if not held.world_size or self._key.rank not in homes:
            self._fail(f"no rank {self._key.rank} of {self._key.job}/{self._key.run} is known here")
            return
        plan = plan_recovery(
            held.snapshots,
            held.world_size,
            homes=homes,
            lost={homes[self._key.rank]},
            epochs=held.history.begun,
        )
        if isinstance(plan, NoRecovery):
            self._fail(plan.reason)
            return
        self._plan, self._pieces = plan, plan.per_rank[self._key.rank]
        sources = tuple(FetchSource(s.node, s.segment, s.index) for s in self._pieces[0].sources)
        self._find_descriptor(self._key, sources, self._described)

    def _described(self, found: FoundDescriptor | str) -> None:
        if isinstance(found, str):
            self._fail(found)
            return
        plan = self._store.plan(found.descriptor, len(self._pieces), found.slot_bytes)
        # A name that the next start of the daemon takes for a leftover.
        path = self._store.folder / f".drill-{secrets.token_hex(4)}.tmp"
        plan = replace(plan, path=path, purpose=Purpose.DRILL)
        refusal = self._maker.make(plan, made=self._made, refused=self._refused)
        if refusal is not None:
            self._refused(refusal)

    def _refused(self, refusal: Refused) -> None:
        self._fail(refusal.message)

    def _made(self, segment: Segment) -> None:
        self._began_s = self._clock()
        self._job = self._start_fetch(
            segment,
            [fetch_piece(piece, sealed_at_ns=time.time_ns()) for piece in self._pieces],
            partial(self._fetched, segment),
        )

    def _fetched(self, segment: Segment, reason: str) -> None:
        took_s = self._clock() - self._began_s
        assert self._plan is not None
        done = partial(self._finish, segment, took_s)
        if reason:
            done((reason, 0))
            return
        primaries = self._store.of_rank(self._key)
        pieces = self._pieces
        if not self._comparers.submit(
            lambda: _compare(segment, pieces, primaries),
            done,
            lambda error: done((f"comparing failed: {error!r}", 0)),
        ):
            done(("", 0))

    def _finish(self, segment: Segment, took_s: float, outcome: tuple[str, int]) -> None:
        reason, compared = outcome
        self._maker.give_back(segment)
        assert self._plan is not None
        state = self._job.state if self._job is not None else None
        self._answer(
            DrillReport(
                recoverable=not reason,
                reason=reason or self._plan.reason,
                start=self._plan.start,
                end=self._plan.end,
                seconds=took_s,
                bytes=state.bytes_done if state is not None else 0,
                compared=compared,
                by_node={n: b for n, b in state.by_node.items() if b} if state is not None else {},
            )
        )

    def _fail(self, reason: str) -> None:
        self._answer(DrillReport(False, reason))


def _compare(
    segment: Segment, pieces: tuple[SnapshotToLoad, ...], primaries: list[Segment]
) -> tuple[str, int]:
    """What differs from the primary ("" for nothing), and how many bytes were compared."""
    compared = 0
    for index, piece in enumerate(pieces):
        for primary in primaries:
            for slot, header in primary.headers():
                if header.header_digest != piece.record.header_digest:
                    continue
                with locks.lock_file(primary.path, slot_lock_byte(slot), exclusive=False) as taken:
                    if not taken or primary.header(slot) != header:
                        continue
                    size = header.image_len
                    fetched = segment.header(index)
                    if fetched is None or not _same(
                        segment.image(index, fetched), primary.image(slot, header)
                    ):
                        return f"iteration {header.iteration} differs from the primary", compared
                    compared += size
    return "", compared


def _same(a: memoryview, b: memoryview) -> bool:
    """In small pieces: comparing views is slow and holds up every other thread meanwhile."""
    if len(a) != len(b):
        return False
    return all(
        bytes(a[at : at + _PIECE_BYTES]) == bytes(b[at : at + _PIECE_BYTES])
        for at in range(0, len(a), _PIECE_BYTES)
    )
