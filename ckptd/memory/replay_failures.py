"""Failed replays of this node's runs, and the slots quarantined for them (docs/replication.md §2b).

One file per run is kept with its segments, so that it lives as long as they do: the trainer that found the
failure is about to end, and the daemon may restart before the next one comes. The file is written as a
whole and renamed; one that cannot be read counts as none, which costs one more replay.

A slot of a quarantined snapshot only changes its state, in segments of ranks and in replicas. Its content
stays until the ring needs its room, so that somebody can examine it, or lift the quarantine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from ckptd.core.recovery.quarantine import (
    Mark,
    add_failure,
    describe_failure,
    marks_of,
    settled,
)
from ckptd.core.slots.segment_format import check_name, set_slot_state, slot_lock_byte
from ckptd.core.slots.slots import SlotState
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.private_files import replace_private_file
from ckptd.transport.messages import ReplayFailure, RunFailures
from ckptd.unpacking import unpack

logger = logging.getLogger(__name__)

_END = ".replays"
_FORMAT = 1
_MOST_BYTES = 16 << 20

RunKey = tuple[str, str]  # job, run


class _File(msgspec.Struct, frozen=True):
    format: int
    failures: tuple[ReplayFailure, ...]


_decoder = msgspec.msgpack.Decoder(_File)


class Quarantine:
    """Failed replays by run, and the quarantine of slots that follows. On the daemon's loop thread.

    Args:
        segments: every segment of a run here, replicas included.
        damaged: called with each segment in which a slot was quarantined.
    """

    def __init__(
        self,
        folder: Path,
        events: EventLog,
        *,
        segments: Callable[[str, str], Iterable[Segment]],
        damaged: Callable[[Segment], None],
    ) -> None:
        self._folder, self._events = folder, events
        self._segments, self._damaged = segments, damaged
        self._known: dict[RunKey, tuple[ReplayFailure, ...]] = {}

    def adopt(self) -> None:
        for path in sorted(self._folder.glob(f"*{_END}")):
            job, _, run = path.name.removesuffix(_END).partition("~")
            try:
                if path.stat().st_size > _MOST_BYTES:
                    raise ValueError("it is too large")
                found = unpack(_decoder, path.read_bytes(), max_bytes=_MOST_BYTES)
                if found.format != _FORMAT:
                    raise ValueError(f"its format is {found.format}, not {_FORMAT}")
                self._known[check_name(job, "job"), check_name(run, "run")] = found.failures
            except (OSError, ValueError) as error:
                text = f"{path.name} is not heeded: {error}; what was quarantined may be replayed once more"
                self._events.add("warning", "replays_unreadable", text)

    def write_again(self) -> None:
        """Write all files again: somebody has removed their folder. Raises nothing."""
        for key, failures in list(self._known.items()):
            self._keep(key, failures)

    def failures(self, job: str, run: str) -> tuple[ReplayFailure, ...]:
        return self._known.get((job, run), ())

    def marks(self, job: str, run: str) -> frozenset[Mark]:
        """The snapshots of a run that must not be used."""
        return marks_of(self.failures(job, run))

    def reports(self, job: str, run: str) -> list[RunFailures]:
        """For `ckptctl`; empty names mean all."""
        return [
            RunFailures(*key, found)
            for key, found in sorted(self._known.items())
            if job in ("", key[0]) and run in ("", key[1])
        ]

    def tell(self, job: str, run: str, failure: ReplayFailure | None) -> None:
        """A replay of the run failed; None: one reproduced."""
        known = self.failures(job, run)
        fresh = settled(known) if failure is None else add_failure(known, failure)
        if fresh == known:
            return
        self._keep((job, run), fresh)
        if failure is not None:
            text = f"{job}/{run}: {describe_failure(failure)}; {failure.reason}"
            self._events.add("error", "replay_mismatch", text[:4000])
            self._apply(job, run)

    def tick(self) -> None:
        """Quarantine slots that arrived since; forget runs without segments here."""
        for job, run in list(self._known):
            if not any(True for _ in self._segments(job, run)):
                self.forget(job, run)
            else:
                self._apply(job, run)

    def lift(self, job: str, run: str) -> list[tuple[Segment, int, int]]:
        """Lift the quarantine of a run; returns slots and sequence numbers to verify now."""
        marks = self.marks(job, run)
        found: list[tuple[Segment, int, int]] = []
        for segment in self._segments(job, run):
            for index in _change(segment, marks, SlotState.QUARANTINED, SlotState.SEALED):
                header = segment.header(index)
                if header is not None:
                    found.append((segment, index, header.sequence))
        self.forget(job, run)
        return found

    def forget(self, job: str, run: str) -> None:
        if self._known.pop((job, run), None) is not None:
            self._path(job, run).unlink(missing_ok=True)

    def _apply(self, job: str, run: str) -> None:
        marks = self.marks(job, run)
        if not marks:
            return
        for segment in self._segments(job, run):
            if not segment.holds_snapshots:
                continue
            if slots := _change(segment, marks, SlotState.SEALED, SlotState.QUARANTINED):
                self._damaged(segment)
                headers = [h for index in slots if (h := segment.header(index)) is not None]
                iterations = ", ".join(str(h.iteration) for h in headers)
                text = (
                    f"{segment.path.name}: the snapshots of iterations {iterations} are quarantined, "
                    "since no replay reproduces them"
                )
                self._events.add("error", "slots_quarantined", text, segment.key)

    def _keep(self, key: RunKey, failures: tuple[ReplayFailure, ...]) -> None:
        if not failures:
            self.forget(*key)
            return
        self._known[key] = failures
        path = self._path(*key)
        try:
            replace_private_file(path, msgspec.msgpack.encode(_File(_FORMAT, failures)), synced=False)
        except OSError as error:
            text = f"{path.name} cannot be written: {error}; a daemon after this one will not know of it"
            logger.error("%s", text)
            self._events.add("error", "replays_not_written", text)

    def _path(self, job: str, run: str) -> Path:
        return self._folder / f"{job}~{run}{_END}"


def _change(segment: Segment, marks: frozenset[Mark], old: SlotState, new: SlotState) -> list[int]:
    """Change the state of marked snapshots' slots, unless they are about to be filled; returns which."""
    changed: list[int] = []
    for index, seen in segment.headers():
        if seen.state is not old or (seen.iteration, seen.epoch) not in marks:
            continue
        with locks.lock_file(segment.path, slot_lock_byte(index), exclusive=False) as taken:
            if taken and segment.header(index) == seen:
                set_slot_state(segment.buffer, segment.geometry, index, new)
                changed.append(index)
    return changed
