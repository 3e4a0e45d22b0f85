"""Periodic work on slots and segments: seal, settle, scrub, expire, remove.

A `Housekeeper` lives on the daemon's loop thread; workers do the work. `tick` is called about once a second
and looks at the files each time, so a message that was lost, or that an earlier daemon got, costs at most a
tick.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from weakref import WeakKeyDictionary

from ckptd.config.settings import DaemonConfig
from ckptd.core.slots.slots import SlotState
from ckptd.errors import SegmentError
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.segment_file import Adopted, Segment, settle, tell_adopted
from ckptd.memory.segment_store import SegmentStore
from ckptd.memory.slot_digests import SealOutcome, SealVerdict, SlotDoubts, scrub_slot, seal_slot
from ckptd.units import format_age, format_bytes
from ckptd.workers import Workers

logger = logging.getLogger(__name__)

_SWEEP_AFTER_S = 2.0  # a filled slot is sealed after this time even if no message announced it
_SETTLED_S = 30.0  # slots in active use are overwritten sooner, and are not scrubbed


class SlotListener:
    """Called about slots; this one does nothing."""

    def snapshot_sealed(self, segment: Segment) -> None:
        """A snapshot was sealed."""

    def digested(self, segment: Segment, outcome: SealOutcome) -> None:
        """A snapshot is sealed of which other ranks should have the same tensors (``outcome.replicated``)."""

    def log_sealed(self, segment: Segment) -> None:
        """An iteration of a boundary log was sealed."""

    def slot_damaged(self, segment: Segment) -> None:
        """A slot was quarantined."""

    def replicas(self) -> Iterable[Segment]:
        """Further segments to scrub: replicas of other nodes' segments."""
        return ()


class Housekeeper:
    """Keeps the slots of a store in order.

    Args:
        sealers: workers that digest; ``digest_pool`` spreads one image over threads.
        slow: workers for unlinking and locking, which may take long.
    """

    def __init__(
        self,
        config: DaemonConfig,
        store: SegmentStore,
        events: EventLog,
        sealers: Workers,
        slow: Workers,
        digest_pool: ThreadPoolExecutor | None,
        listener: SlotListener | None = None,
    ) -> None:
        self._listener = listener or SlotListener()
        self._config, self._store, self._events = config, store, events
        self._sealers, self._slow = sealers, slow
        self._map = None if digest_pool is None else digest_pool.map
        self._sealing: set[tuple[Segment, int]] = set()
        self._waiting: dict[tuple[Segment, int], tuple[int, float]] = {}  # sequence, seen since
        self._unsettled: set[Segment] = set()
        self._swept: WeakKeyDictionary[Segment, int] = WeakKeyDictionary()  # their marks, where no slot waits
        self.doubts = SlotDoubts(sealers, events, self._map, self._examined)
        self._scrubs: deque[tuple[Segment, int, int]] = deque()
        self._scrubbing = False
        self._next_round_s = 0.0
        self._next_scrub_s = 0.0

    @property
    def queued(self) -> int:
        return len(self._sealing)

    def start(self, now_s: float) -> None:
        self._adopted(self._store.adopt(now_s))
        self._next_round_s = now_s + self._config.scrub_interval_s

    def _adopted(self, found: Adopted) -> None:
        tell_adopted(self._events, found)
        for segment in found.segments:
            owner = "its trainer lives" if segment.detached_at_s is None else "without a trainer"
            self._report("info", "adopted", segment, f"({format_bytes(segment.file_bytes)}, {owner})")
            self.settle(segment)
            self._in_background(partial(self._store.lock_in_memory, segment))

    def tick(self, now_s: float, live_runs: Collection[tuple[str, str]]) -> None:
        """Look after missing files and owners, waiting slots, expired runs, and the scrub."""
        self.look_at_folder(now_s)
        self._adopted(self._store.adopt_waiting(now_s))
        for segment in list(self._unsettled):
            self.settle(segment)
        waiting, self._waiting = self._waiting, {}
        for segment in self._store.everything():
            if not segment.in_place():
                self._vanished(segment)
                continue
            self._watch_owner(segment, now_s)
            self._sweep(segment, now_s, waiting)
        self._expire(now_s, live_runs)
        self.doubts.tick(now_s)
        self._scrub(now_s)

    def look_at_folder(self, now_s: float) -> None:
        """Make the folder again if it was removed, and write its segments again.

        (A single file that somebody removes is not written again: that may be intended.)
        """
        for segment in self._store.look_at_folder():
            if segment.cut or not self._rescued(segment, now_s):
                self._vanished(segment)

    def settle(self, segment: Segment) -> None:
        """Free what a dead trainer was filling and seal what it had filled; retried at later ticks."""
        self._unsettled.discard(segment)
        if self._store.get(segment.key, segment.generation) is not segment:
            return  # it went meanwhile
        try:
            report = settle(segment)
        except OSError as error:
            self._unsettled.add(segment)
            self._events.count("settle_again")
            logger.warning("%s is settled later: %s", segment.path.name, error)
            return
        for index in report.freed:
            self._report("warning", "slot_freed", segment, f"slot {index} was being filled")
        for index in report.damaged:
            text = f"slot {index} had a damaged header and is free now"
            self._report("error", "slot_damaged", segment, text)
        for index in report.to_seal:
            self.seal(segment, index)

    def seal(self, segment: Segment, index: int) -> None:
        """Digest a filled slot on a worker; if the workers are full, a later sweep tries again."""
        job = (segment, index)
        if job in self._sealing:
            return
        if self._sealers.submit(
            partial(seal_slot, segment, index, self._map),
            partial(self._sealed, segment, index),
            partial(self._seal_failed, segment, index),
        ):
            self._sealing.add(job)

    def seal_all(self) -> None:
        """Queue every filled slot, before an orderly stop."""
        for segment in self._store.everything():
            for index, header in segment.headers():
                if header.state is SlotState.FILLED:
                    self.seal(segment, index)

    def remove(self, segment: Segment, why: str) -> None:
        """Unlink a segment now; a worker gives its pages back."""
        self._store.remove(segment)
        self._report("info", "removed", segment, f"({format_bytes(segment.file_bytes)}): {why}")
        self._in_background(segment.close)

    def _sealed(self, segment: Segment, index: int, outcome: SealOutcome) -> None:
        self._sealing.discard((segment, index))
        self._events.count(f"seal.{outcome.verdict}")
        if outcome.verdict is SealVerdict.SEALED:
            self._events.count("sealed_bytes", outcome.image_len)
            self._events.count("digest_ns", outcome.digest_ns)
            if segment.holds_snapshots:
                self._listener.snapshot_sealed(segment)
            elif segment.is_log:
                self._listener.log_sealed(segment)
        elif outcome.verdict is SealVerdict.DAMAGED:
            text = f"slot {index} holds no image (iteration {outcome.iteration}): {outcome.reason}"
            self._report("error", "slot_damaged", segment, f"{text}; it is free now")
        if outcome.replicated:
            self._listener.digested(segment, outcome)

    def _seal_failed(self, segment: Segment, index: int, error: BaseException) -> None:
        self._sealing.discard((segment, index))
        if self._store.get(segment.key, segment.generation) is not segment:
            return  # it was removed while its slot waited
        logger.error("sealing slot %d of %s failed", index, segment.path.name, exc_info=error)
        self._events.add("error", "seal_failed", f"{segment.key} slot {index}: {error!r}")

    def _watch_owner(self, segment: Segment, now_s: float) -> None:
        if segment.owned():
            segment.detached_at_s = None
        elif segment.detached_at_s is None:
            segment.detached_at_s = now_s
            self.settle(segment)

    def _vanished(self, segment: Segment) -> None:
        """Report a segment whose file was removed, replaced or cut; only this segment is lost."""
        if not segment.cut:
            self._store.discard(segment)
            text = f"somebody removed or replaced {segment.path.name}"
            self._events.add("error", "segment_vanished", f"{text}; its snapshots are lost", segment.key)
            return
        size = os.fstat(segment.fd).st_size
        others = locks.other_holders_of(segment.path)
        self._store.remove(segment)
        text = (
            f"{segment.path.name} was cut from {segment.file_bytes} to {size} bytes by a process that may "
            f"write to it (open in process {', '.join(map(str, others)) or 'unknown'}); its "
            "snapshots are lost, and it is removed"
        )
        self._events.add("error", "segment_cut", text, segment.key)
        self._in_background(segment.close)

    def _rescued(self, segment: Segment, now_s: float) -> bool:
        name, attached = segment.path.name, segment.owned()
        try:
            found = self._store.rescue(segment)
        except (OSError, SegmentError) as error:
            logger.warning("%s cannot be written again: %s", name, error)
            return False
        found.detached_at_s = now_s
        text = f"somebody removed {name}; what was in it is written again"
        if attached:
            text += (
                ". Its trainer goes on in the removed file, unprotected: restart the trainer, "
                "which then resumes from here"
            )
        self._events.add("error", "segment_rescued", text, found.key)
        self.settle(found)
        return True

    def _sweep(
        self, segment: Segment, now_s: float, before: dict[tuple[Segment, int], tuple[int, float]]
    ) -> None:
        """Seal slots that have been filled for a while.

        The header has the time of filling, but by a clock that may have been set since. A segment in which no
        slot waits is not looked at again before something in it changes.
        """
        mark = segment.mark()
        if self._swept.get(segment) == mark:
            return
        waits = False
        for index in range(segment.geometry.num_slots):
            header = segment.header(index)
            if header is None:
                self._report_damage(segment, index)
            elif header.state is SlotState.FILLED:
                waits = True
                seen = before.get((segment, index), (-1, 0.0))
                since_s = seen[1] if seen[0] == header.sequence else now_s
                self._waiting[segment, index] = header.sequence, since_s
                if now_s - since_s >= _SWEEP_AFTER_S:
                    self.seal(segment, index)
        if not waits:
            self._swept[segment] = mark

    def _report_damage(self, segment: Segment, index: int) -> None:
        """Report a header that is damaged twice in a row; once, it may be half written."""
        if index in segment.damaged or segment.header(index) is not None:
            return
        segment.damaged.add(index)
        text = f"slot {index} has a damaged header; it counts as free"
        self._report("error", "slot_damaged", segment, text)

    def _expire(self, now_s: float, live_runs: Collection[tuple[str, str]]) -> None:
        limit_s = self._config.retain_detached_s
        if limit_s == 0:
            return
        runs: dict[tuple[str, str], list[Segment]] = {}
        for segment in self._store.everything():
            runs.setdefault((segment.key.job, segment.key.run), []).append(segment)
        for run, segments in runs.items():
            left = [s.detached_at_s for s in segments if s.detached_at_s is not None]
            if run in live_runs or len(left) < len(segments) or now_s - max(left) < limit_s:
                continue
            for segment in segments:
                self.remove(segment, f"no trainer for {format_age(limit_s)}")

    def _scrub(self, now_s: float) -> None:
        """Scrub one slot at a time, spread over the interval, while no slot waits to be sealed."""
        interval_s = self._config.scrub_interval_s
        if interval_s == 0 or self._scrubbing or self._sealing or now_s < self._next_scrub_s:
            return
        if not self._scrubs:
            if now_s < self._next_round_s:
                return
            self._next_round_s = now_s + interval_s
            self._scrubs.extend(self._worth_scrubbing(min(_SETTLED_S, interval_s)))
        if not self._scrubs:
            return
        self._next_scrub_s = now_s + interval_s / (2 * len(self._scrubs))
        segment, index, sequence = self._scrubs.popleft()
        self._scrubbing = self._sealers.submit(
            partial(scrub_slot, segment, index, sequence, self._map),
            partial(self._scrubbed, segment, index),
            partial(self._scrub_failed, segment),
        )

    def _worth_scrubbing(self, settled_s: float) -> list[tuple[Segment, int, int]]:
        now_ns = time.time_ns()
        before = now_ns - int(settled_s * 1e9)
        return [
            (segment, index, header.sequence)
            for segment in (*self._store.everything(), *self._listener.replicas())
            for index, header in segment.headers()
            # A slot that was sealed in the future was sealed before the clock was set back.
            if header.state is SlotState.SEALED and not before <= header.sealed_at_ns <= now_ns
        ]

    def _scrubbed(self, segment: Segment, index: int, outcome: SealOutcome) -> None:
        self._scrubbing = False
        self._examined(segment, index, outcome)

    def _examined(self, segment: Segment, index: int, outcome: SealOutcome) -> None:
        self._events.count(f"scrub.{outcome.verdict}")
        if outcome.verdict is SealVerdict.DAMAGED:
            self._listener.slot_damaged(segment)
            text = f"slot {index} (iteration {outcome.iteration}): {outcome.reason}; it is quarantined"
            self._report("error", "slot_quarantined", segment, text)

    def _scrub_failed(self, segment: Segment, error: BaseException) -> None:
        self._scrubbing = False
        if self._store.get(segment.key, segment.generation) is not segment:
            return  # it was removed while it waited
        logger.error("scrubbing %s failed", segment.path.name, exc_info=error)
        self._events.add("error", "scrub_failed", f"{segment.key}: {error!r}", segment.key)

    def _report(self, level: str, kind: str, segment: Segment, text: str) -> None:
        text = f"{segment.key} generation {segment.generation} {text}"
        self._events.add(level, kind, text, segment.key)

    def _in_background(self, task: Callable[[], None]) -> None:
        self._slow.submit(task, lambda _: None, self._background_failed)

    def _background_failed(self, error: BaseException) -> None:
        logger.error("a background task failed", exc_info=error)
        self._events.add("error", "background_failed", repr(error))
