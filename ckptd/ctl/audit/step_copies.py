"""Copies of the sealed snapshots of one step, of all ranks, in a folder that a daemon of its own can adopt.

All slots are held (a read lock each, as while they are sent) before the first one is copied, so that all
ranks' copies are of the same iterations. Each is released as soon as it is copied, the oldest first: beside a
window a ring has one slot that is filled and one that is digested, and the trainer takes the oldest one next.
If that is held, it leaves out a snapshot. A rank's segment may be its own or a replica that this node holds;
its copy has the name of an own one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ckptd.core.recovery.global_plan import NoRecovery, RecoveryPlan, plan_recovery
from ckptd.core.recovery.held import HeldRecords
from ckptd.core.slots.segment_format import (
    HINT_DROP_GRADIENTS,
    HINT_OFFSET,
    WORLD_TOPOLOGY,
    SlotHeader,
    segment_file_name,
    slot_lock_byte,
    slot_view,
    write_prologue,
    write_slot_header,
)
from ckptd.core.slots.slots import SlotState
from ckptd.core.snapshot_policy import PolicyKind
from ckptd.ctl.command import EXIT_REFUSED, CommandError
from ckptd.export.memory_source import open_segments
from ckptd.holdings import held_from_segments, policy_of
from ckptd.memory import inventory, locks
from ckptd.memory.pages import FileMapping
from ckptd.memory.segment_file import Segment
from ckptd.units import format_bytes

_HERE = "here"  # the node of all inventories
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class CopiedStep:
    """The snapshots of a step that were copied.

    Attributes:
        start: the oldest iteration, from which a replay computes ``end``.
        digests: by rank, the header digest of the snapshot of ``end``.
        copy_s: how long it took to copy them; for so long the newest ones were held.
        copied_bytes: of all ranks.
        file_bytes: the sizes of the copies' files, most of which are holes.
    """

    job: str
    run: str
    world_size: int
    start: int
    end: int
    epoch: int
    digests: Mapping[int, bytes]
    copy_s: float
    copied_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class _Slot:
    """A chosen snapshot and where it is."""

    segment: Segment
    index: int
    header: SlotHeader


class _TryAgain(Exception):
    """There is no step at this moment; the text says why."""


def copy_step(
    source: Path,
    target: Path,
    job: str,
    run: str,
    *,
    verify_iterations: int,
    wait_s: float,
    newer_than: int = -1,
) -> CopiedStep:
    """Copy the snapshots of the newest step that all ranks have, which an audit replays.

    Args:
        source: the folder of a daemon's segments.
        target: an empty folder for the copies.
        verify_iterations: the most iterations from one dense snapshot to the next.
        wait_s: how long to wait for one.
        newer_than: the iteration after which the step must end.
    Raises:
        CommandError: there is none, with the reason, or no memory for the copies.
    """
    give_up = time.monotonic() + wait_s
    while True:
        with ExitStack() as opened:
            try:
                segments = _segments(source, job, run, opened)
                plan = _plan(segments, verify_iterations)
                if plan.end <= newer_than:
                    raise _TryAgain(
                        f"the newest step leads to iteration {plan.end}, which was audited before"
                    )
                return _copied(plan, segments, target)
            except _TryAgain as error:
                if time.monotonic() > give_up:
                    raise CommandError(
                        f"no step of {job}/{run} can be audited: {error}", EXIT_REFUSED
                    ) from error
        time.sleep(_PAUSE_S)


def _segments(source: Path, job: str, run: str, opened: ExitStack) -> dict[str, Segment]:
    """The segments of the run and the replicas of such segments, by file name."""
    paths = [path for end in ("seg", "rep") for path in sorted(source.glob(f"{job}~{run}~r*.{end}"))]
    segments, problems = open_segments(paths)
    for segment in segments:
        opened.callback(segment.close)
    if not segments:
        raise _TryAgain("; ".join(problems) or f"{source} has no snapshot of it")
    newest = max(segments, key=lambda s: s.descriptor.created_at_ns).descriptor
    if newest.topology == WORLD_TOPOLOGY:
        text = f"{job}/{run} is an elastic job, which begins with its script's own ranks: no step is audited"
        raise CommandError(text, EXIT_REFUSED)
    if policy_of(newest) == PolicyKind.PARTIAL:
        text = (
            f"the snapshots of {job}/{run} are partial: no replay leads from one to the next, so no step can "
            "be audited. Other policies have snapshots of the whole state (docs/policies.md)"
        )
        raise CommandError(text, EXIT_REFUSED)
    return {segment.path.name: segment for segment in segments}


def _plan(segments: Mapping[str, Segment], verify_iterations: int) -> RecoveryPlan:
    held: list[HeldRecords] = []
    for segment in segments.values():
        own = segment.path.suffix == ".seg"
        held += held_from_segments(_HERE, [inventory.held_segment(segment, own=own)])
    world_size = max(segment.descriptor.world_size for segment in segments.values())
    homes = dict.fromkeys(range(world_size), _HERE)
    plan = plan_recovery(held, world_size, homes=homes, verify_iterations=verify_iterations)
    if isinstance(plan, NoRecovery):
        more = ""
        if world_size > 1:
            more = ". An audit needs all ranks' snapshots on one node, its own or replicas (`ckptctl peers`)"
        raise _TryAgain(f"{plan.reason}{more}")
    if plan.unverified:
        window = max(segment.descriptor.window for segment in segments.values())
        text = f"only the snapshots of iterations {plan.start} to {plan.end} are whole: {plan.unverified}"
        if window > 1:
            text += (
                f". Snapshots are sparse, with a window of {window}: an audit replays {window} steps, from "
                f"{window + 1} snapshots in a row"
            )
        raise _TryAgain(text)
    return plan


def _copied(plan: RecoveryPlan, segments: Mapping[str, Segment], target: Path) -> CopiedStep:
    slots: list[_Slot] = []
    for pieces in plan.per_rank.values():
        for piece in pieces:
            segment, index = segments[piece.sources[0].segment], piece.sources[0].index
            header = segment.header(index)
            if header is None or header.header_digest != piece.record.header_digest:
                raise _overwritten(piece.record.iteration)
            slots.append(_Slot(segment, index, header))
    slots.sort(key=lambda slot: slot.header.iteration)
    size = sum(slot.header.image_len for slot in slots)
    _check_room(target, size)
    began_s = time.monotonic()
    with ExitStack() as all_held, ExitStack() as opened:
        held = [all_held.enter_context(_Held(slot)) for slot in slots]
        files: dict[tuple[int, int], _CopiedFile] = {}  # by rank and generation
        for hold in held:
            of = hold.slot.segment.descriptor
            place = of.rank, of.generation
            if place not in files:
                files[place] = opened.enter_context(_CopiedFile(target, hold.slot.segment))
            files[place].add(hold.slot)
            hold.release()
    newest = {slot.segment.descriptor.rank: slot for slot in slots}  # the last one of each
    descriptor = slots[0].segment.descriptor
    return CopiedStep(
        descriptor.job,
        descriptor.run,
        descriptor.world_size,
        plan.start,
        plan.end,
        slots[-1].header.epoch,
        {rank: slot.header.header_digest for rank, slot in newest.items()},
        time.monotonic() - began_s,
        size,
        sum(file.size for file in files.values()),
    )


def _check_room(target: Path, size: int) -> None:
    there = os.statvfs(target)
    free = there.f_bavail * there.f_frsize
    if size > free:
        raise CommandError(
            f"the copies of the step's snapshots take {format_bytes(size)}, and {target} has "
            f"{format_bytes(free)}: pass --copies with another folder (a disk will do)",
            EXIT_REFUSED,
        )


def _overwritten(iteration: int) -> _TryAgain:
    return _TryAgain(f"the snapshot of iteration {iteration} was overwritten meanwhile")


class _Held:
    """A slot that is not filled again in the block, or until it is released."""

    def __init__(self, slot: _Slot) -> None:
        self.slot = slot
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        slot = self.slot
        lock = locks.lock_file(slot.segment.path, slot_lock_byte(slot.index), exclusive=False)
        if not self._lock.enter_context(lock) or slot.segment.header(slot.index) != slot.header:
            self.release()
            raise _overwritten(slot.header.iteration)
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        self._lock.close()


class _CopiedFile:
    """The segment file with the copies of one generation, ``like`` one of its segments or replicas."""

    def __init__(self, target: Path, like: Segment) -> None:
        descriptor, self._geometry = like.descriptor, like.geometry
        self.size, self._target, self._used = like.geometry.total_bytes, target, 0
        name = segment_file_name(descriptor.job, descriptor.run, descriptor.rank, descriptor.generation)
        fd = os.open(target / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, self.size)
            self._mapping = FileMapping(fd, self.size)
        finally:
            os.close(fd)
        buffer = self._mapping.view
        write_prologue(buffer, self._geometry, descriptor)
        buffer[HINT_OFFSET] = like.buffer[HINT_OFFSET] & HINT_DROP_GRADIENTS  # how the run's replays freeze

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._mapping.view.release()

    def add(self, slot: _Slot) -> None:
        """Copy a held snapshot into the next slot."""
        buffer, index = self._mapping.view, self._used
        write_slot_header(buffer, self._geometry, index, replace(slot.header, state=SlotState.FILLING))
        image = slot.segment.image(slot.index, slot.header)
        slot_view(buffer, self._geometry, index)[: len(image)] = image
        write_slot_header(buffer, self._geometry, index, slot.header)
        self._used += 1
        if self._mapping.cut:
            raise CommandError(f"{self._target} had no memory left for the copies", EXIT_REFUSED)
