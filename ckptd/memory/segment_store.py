"""The segments of this node: planned, admitted, made, catalogued and removed.

The files are the only truth; a `SegmentStore` describes them. A file gets its name when it is complete, so
a crash leaves a temporary file (removed at the next start) and never half a segment. A file that is damaged
is put aside as `*.bad`, not deleted; one that cannot be opened now waits (`Adoption`).

Every segment has a purpose (`Purpose`). All purposes share the folder, the quota and one life, driven by a
`SegmentMaker`: `SegmentPlan`, `promise` (its bytes count from now on), `build`, then `enter` or `cancel`;
at last `remove`. Most methods are about segments that ranks of this node fill; replicas and copies for
readers have catalogs of their own (`ReplicaStore`, `ReaderCopies`), which know names and nothing of memory.

Boundary logs and parked state of a rank count and age like its snapshots. But a search for snapshots must
not find them: iteration, `of_rank` and `of_run` leave them out; `everything` and the like are for managing
memory, whatever it holds. Generations of a rank are counted over all kinds.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import msgspec

from ckptd.core.sessions import (
    AttachWish,
    MemoryFacts,
    RankKey,
    SegmentFacts,
    reject_if_too_large,
    room_for_replicas,
)
from ckptd.core.slots.segment_format import (
    FILE_ENDS,
    RECORD_ENDS,
    Kind,
    SegmentDescriptor,
    SegmentGeometry,
    encode_descriptor,
    plan_geometry,
    segment_file_name,
    write_prologue,
)
from ckptd.core.users import UserQuotas, owner_of
from ckptd.event_log import EventLog
from ckptd.memory.pages import FileMapping, allocate, populate, try_mlock
from ckptd.memory.segment_file import ASIDE, Adopted, Adoption, Segment, open_segment
from ckptd.memory.user_files import open_to_user
from ckptd.transport.messages import RefusalCode, Refused
from ckptd.units import format_bytes
from ckptd.workers import Workers

logger = logging.getLogger(__name__)


Mark = tuple[tuple[int, int], ...]  # by generation: `Segment.mark`

_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class CannotReserve(RuntimeError):
    """There is no memory; code, message and hint are those of the refusal."""

    def __init__(self, code: RefusalCode, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


class Purpose(StrEnum):
    """What a segment on this node is for."""

    RANK = "rank"
    """A rank of this node fills it with snapshots, a boundary log or parked state."""
    REPLICA = "replica"
    """A peer fills it."""
    COPY = "copy"
    """A rank of this node reads it; its content is another rank's."""
    DRILL = "drill"
    """A rehearsal fills it, and drops it."""


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """A segment that can be made."""

    descriptor: SegmentDescriptor
    geometry: SegmentGeometry
    path: Path
    purpose: Purpose = Purpose.RANK
    reader: AttachWish | None = None
    """For a copy: how its reader attached."""
    number: int = -1
    """For a copy: its number, in the place of a generation."""

    @property
    def key(self) -> RankKey:
        return RankKey(self.descriptor.job, self.descriptor.run, self.descriptor.rank)

    @property
    def charged_to(self) -> RankKey | None:
        """The rank of this node that pays for it; None: it gets only memory that is left over."""
        if self.reader is not None:
            return self.reader.key
        return self.key if self.purpose is Purpose.RANK else None

    @property
    def temporary(self) -> Path:
        return _temporary(self.path)


@dataclass(slots=True)
class _Held:
    plan: SegmentPlan
    segment: Segment | None = None

    @property
    def size_bytes(self) -> int:
        made = self.segment
        return self.plan.geometry.total_bytes if made is None else made.file_bytes


class FolderListener:
    """Looks after the folder and its files outside of the store; this one does nothing."""

    def remake_folder(self) -> None:
        """Make and claim the folder again: somebody has removed it."""

    def keep_file(self, name: str, fd: int | None) -> None:
        """Have a file kept beyond this process: a rank's segment, or the record of a run; None: not any
        more.
        """


class SegmentStore:
    """Every segment in one folder.

    `build` and `lock_in_memory` may take seconds (they touch every page) and belong to a worker; all other
    methods belong to the daemon's loop thread.

    Args:
        folder: an existing folder that this store has claimed.
        mlock: auto, on or off, as configured.
        group: may write to segments, and read replicas.
        users: their quotas, if users are kept apart: then only the owner of a job may open its files.
        listener: looks after the folder and its files outside of this store; None: nobody does.
    """

    def __init__(
        self,
        folder: Path,
        quota_bytes: int,
        node_id: str,
        *,
        mlock: str,
        hugepages: str,
        group: int | None = None,
        users: UserQuotas | None = None,
        listener: FolderListener | None = None,
    ) -> None:
        self.folder = folder
        self.quota_bytes = quota_bytes
        self.node_id = node_id
        self._mlock, self._group, self._users = mlock, group, users
        self._hugepages = hugepages
        self._listener = listener or FolderListener()
        # By purpose and file name.
        self._held: dict[Purpose, dict[str, _Held]] = {purpose: {} for purpose in Purpose}
        # Segments of ranks by run, rank and generation: looked up at every beat for every rank, however
        # many runs there are.
        self._runs: dict[tuple[str, str], dict[RankKey, dict[int, Segment]]] = {}
        self._adoption = Adoption(folder, FILE_ENDS.values(), superseded=self._superseded)
        # The memory that live sessions asked for, by rank.
        self.promised: Callable[[], Mapping[RankKey, int]] = dict

    # -- of any purpose --------------------------------------------------------------------------

    def all_for(self, purpose: Purpose) -> list[Segment]:
        held = self._held[purpose]
        return [s for name in sorted(held) if (s := held[name].segment) is not None]

    def named(self, name: str, *purposes: Purpose) -> Segment | None:
        """The segment in this file, if it has one of these purposes (none given: any)."""
        found = (self._held[purpose].get(name) for purpose in purposes or Purpose)
        return next((held.segment for held in found if held is not None), None)

    def plans_for(self, purpose: Purpose) -> Iterator[tuple[SegmentPlan, Segment | None]]:
        """What was promised for a purpose, with the segment if it is made."""
        return ((held.plan, held.segment) for held in list(self._held[purpose].values()))

    def bytes_for(self, *purposes: Purpose) -> int:
        """The bytes of these purposes, including segments that are being made."""
        return sum(held.size_bytes for p in purposes for held in self._held[p].values())

    @property
    def used_bytes(self) -> int:
        return self.bytes_for(*Purpose)

    def facts(self) -> list[SegmentFacts]:
        """The memory of this node's ranks, for admission.

        What is being made counts; a copy is not offered to any rank.
        """
        ranks = self._held[Purpose.RANK].values()
        copies = [_copy_facts(held) for held in self._held[Purpose.COPY].values()]
        planned = [_facts(held.plan.descriptor, held) for held in ranks if held.segment is None]
        made = [_facts(s.descriptor, self._of(s), s.owned()) for s in self.everything()]
        return made + planned + copies

    @property
    def memory(self) -> MemoryFacts:
        """The state of the memory under all segments, now."""
        info = os.statvfs(self.folder)
        # Plans have not allocated all their bytes yet.
        missing = sum(
            _missing_bytes(held.plan)
            for of_purpose in self._held.values()
            for held in of_purpose.values()
            if held.segment is None
        )
        return MemoryFacts(
            quota_bytes=self.quota_bytes,
            fs_total_bytes=info.f_blocks * info.f_frsize,
            fs_available_bytes=max(0, info.f_bavail * info.f_frsize - missing),
            segment_dir=str(self.folder),
            promised=dict(self.promised()),
            replica_bytes=self.bytes_for(Purpose.REPLICA, Purpose.DRILL),
            replicas_of=self._replicas_of_users(),
            quotas=self._users,
        )

    def _replicas_of_users(self) -> Counter[int]:
        found: Counter[int] = Counter()
        for purpose in (Purpose.REPLICA, Purpose.DRILL):
            for held in self._held[purpose].values():
                if (user := owner_of(held.plan.descriptor.job)) is not None:
                    found[user] += held.size_bytes
        return found

    def keep_file(self, name: str, fd: int | None) -> None:
        """Have a file beside the segments kept beyond this process; None: not any more."""
        self._listener.keep_file(name, fd)

    def share(self, fd: int, purpose: Purpose, job: str) -> None:
        """Let trainers open a segment of this job: those of its owner, those of a group, or this user's; and
        nobody else, whom an earlier daemon may have let.

        Raises:
            OSError: the filesystem does not allow it.
        """
        if self._users is not None:
            # Nobody but the daemon reads what it rehearses.
            user = None if purpose is Purpose.DRILL else owner_of(job)
            open_to_user(fd, user, write=purpose is not Purpose.REPLICA)
            return
        open_to_user(fd, None)  # with a list, the mode below would be that list's mask
        if self._group is not None:
            os.fchown(fd, -1, self._group)
            os.fchmod(fd, 0o640 if purpose is Purpose.REPLICA else 0o660)

    def promise(self, plan: SegmentPlan) -> None:
        """Count the plan's bytes as used from now on."""
        self._held[plan.purpose][plan.path.name] = _Held(plan)

    def cancel(self, plan: SegmentPlan) -> None:
        self._held[plan.purpose].pop(plan.path.name, None)

    def build(self, plan: SegmentPlan) -> Segment:
        """Make the file: allocate and touch every page, perhaps lock them. May take seconds.

        Raises:
            CannotReserve: the filesystem is full, or locking is required and not allowed.
        """
        temporary = plan.temporary
        try:
            return self._build(plan, temporary)
        except OSError as error:
            raise _no_room(plan, self.folder, error) from error
        finally:
            temporary.unlink(missing_ok=True)

    def enter(self, plan: SegmentPlan, segment: Segment) -> None:
        self._held[plan.purpose][plan.path.name] = _Held(plan, segment)
        if plan.purpose is Purpose.RANK:
            self._listener.keep_file(plan.path.name, segment.fd)
            of_run = self._runs.setdefault((segment.key.job, segment.key.run), {})
            of_run.setdefault(segment.key, {})[segment.generation] = segment

    def enter_found(self, segment: Segment, purpose: Purpose) -> None:
        """Enter a segment of an earlier daemon, which may have had another rule of who opens what."""
        self.share(segment.fd, purpose, segment.key.job)
        plan = SegmentPlan(segment.descriptor, segment.geometry, segment.path, purpose)
        self.enter(plan, segment)

    def remove(self, segment: Segment) -> None:
        """Unlink and forget a segment. Its memory is free once nobody maps it any more."""
        self.discard(segment)
        segment.path.unlink(missing_ok=True)

    def discard(self, segment: Segment) -> None:
        """Forget a segment, and leave its file alone."""
        for purpose, of_purpose in self._held.items():
            held = of_purpose.get(segment.path.name)
            if held is not None and held.segment is segment:
                del of_purpose[segment.path.name]
                if purpose is Purpose.RANK:
                    self._listener.keep_file(segment.path.name, None)
        key = segment.key
        of_rank = self._of_rank(key)
        if of_rank.get(segment.generation) is not segment:
            return
        ranks = self._runs[key.job, key.run]
        del of_rank[segment.generation]
        if not of_rank:
            del ranks[key]
        if not ranks:
            del self._runs[key.job, key.run]

    def _of(self, segment: Segment) -> _Held:
        return self._held[Purpose.RANK][segment.path.name]

    # -- of ranks of this node -------------------------------------------------------------------

    def __iter__(self) -> Iterator[Segment]:
        return iter([s for s in self.everything() if s.holds_snapshots])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, key: RankKey, generation: int) -> Segment | None:
        return self._of_rank(key).get(generation)

    def of_rank(self, key: RankKey) -> list[Segment]:
        """The segments with a rank's snapshots, the one that was filled last at the end.

        Not by generation: a segment may be made ahead of the schedule change that it is for, and be empty
        until then.
        """
        found = [s for s in self._of_rank(key).values() if s.holds_snapshots]
        # The order needs every slot header.
        return found if len(found) < 2 else sorted(found, key=Segment.last_filled)

    def mark_of(self, key: RankKey, *, logs: bool = False) -> Mark:
        """What changes whenever the slots of a rank's snapshots do, or those of its logs."""
        found = self.all_of_rank(key)
        wanted = [s for s in found if (s.is_log if logs else s.holds_snapshots)]
        return tuple([(segment.generation, segment.mark()) for segment in wanted])

    def of_run(self, job: str, run: str) -> list[Segment]:
        return [s for s in self.all_of_run(job, run) if s.holds_snapshots]

    def everything(self) -> list[Segment]:
        """Every segment of a rank, of any kind."""
        return [segment for run in sorted(self._runs) for segment in self.all_of_run(*run)]

    def all_of_rank(self, key: RankKey) -> list[Segment]:
        """Every segment of a rank, oldest generation first."""
        found = self._of_rank(key)
        return [found[generation] for generation in sorted(found)]

    def all_of_run(self, job: str, run: str) -> list[Segment]:
        ranks = self._runs.get((job, run), {})
        return [segment for key in sorted(ranks) for segment in self.all_of_rank(key)]

    def logs_of_run(self, job: str, run: str) -> list[Segment]:
        return [s for s in self.all_of_run(job, run) if s.is_log]

    def replicated_logs_of(self, key: RankKey) -> list[Segment]:
        """The boundary logs of a rank that are replicated, oldest generation first."""
        return [s for s in self.all_of_rank(key) if s.is_log and s.descriptor.replicated]

    def parks_of_run(self, job: str, run: str) -> list[Segment]:
        return [s for s in self.all_of_run(job, run) if s.descriptor.kind == "parked"]

    def look_at_folder(self) -> list[Segment]:
        """Make the folder again if somebody has removed it; returns the segments whose files went with it.

        logind removes it at the end of a user's last login (RemoveIPC).
        """
        if self.folder.is_dir():
            return []
        self._listener.remake_folder()
        return self.everything()

    def rescue(self, segment: Segment) -> Segment:
        """Write a removed segment again, from what is still mapped, and put it in the place of the old one.

        A trainer that has the removed file mapped goes on with that. Blocks for as long as the copy takes:
        it is for a rare mishap.

        Raises:
            OSError: there is no room, or the name is taken.
            SegmentError: what is mapped is no segment any more.
        """
        temporary = _temporary(segment.path)
        fd = os.open(temporary, _NEW_FILE, 0o600)
        try:
            allocate(fd, segment.file_bytes)
            FileMapping(fd, segment.file_bytes).view[:] = segment.buffer
            self.share(fd, Purpose.RANK, segment.key.job)
            os.link(temporary, segment.path)  # a rename would replace an existing file
            found = open_segment(segment.path)
        finally:
            os.close(fd)
            temporary.unlink(missing_ok=True)
        self.discard(segment)
        segment.close()
        self.enter_found(found, Purpose.RANK)
        return found

    def put_back(self, name: str, fd: int) -> bool:
        """Write a file of a rank or run again, from a descriptor that was kept; whoever adopts it checks it.

        Returns:
            Whether that was to be done: not if the file was not removed, or belongs to somebody else.
        Raises:
            OSError: there is no room, or the name is taken.
        """
        info = os.fstat(fd)
        path = self.folder / name
        if info.st_nlink or not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
            return False
        if path.name != name or path.suffix not in (*FILE_ENDS.values(), RECORD_ENDS):
            return False
        self._remove_leftovers()  # of a daemon that died here: they take the room
        temporary = _temporary(path)
        copy = os.open(temporary, _NEW_FILE, 0o600)
        try:
            allocate(copy, info.st_size)
            done = 0
            while done < info.st_size and (count := os.sendfile(copy, fd, done, info.st_size - done)):
                done += count
            os.ftruncate(copy, done)  # to less than whole pages
            os.link(temporary, path)
        finally:
            os.close(copy)
            temporary.unlink(missing_ok=True)
        return True

    def adopt(self, now_s: float) -> Adopted:
        self._remove_leftovers()
        first = self._take_over(self._adoption.begin(), now_s)
        return first.and_then(self._take_over(self._adoption.come_back(), now_s))

    def _remove_leftovers(self) -> None:
        """Remove the unfinished files of earlier daemons, before this one makes any."""
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)

    def adopt_waiting(self, now_s: float) -> Adopted:
        return self._take_over(self._adoption.again(), now_s)

    def waits_for(self, job: str, run: str) -> list[str]:
        """The files of a run that are here and could not be opened yet."""
        return self._adoption.waits_for(f"{job}~{run}~")

    def _take_over(self, found: Adopted, now_s: float) -> Adopted:
        for segment in found.segments:
            segment.detached_at_s = None if segment.owned() else now_s
            self.enter_found(segment, Purpose.RANK)
        return found

    def _superseded(self, old: SegmentDescriptor) -> bool:
        """Whether its rank has a newer segment of its kind: memory to park in is made after snapshots."""
        key = RankKey(old.job, old.run, old.rank)
        found = (segment.descriptor for segment in self.all_of_rank(key))
        return max(self._generations(key, kind=old.kind), default=-1) > old.generation or any(
            other.kind == old.kind and other.created_at_ns > old.created_at_ns for other in found
        )

    def _generations(self, key: RankKey, *, aside: bool = False, kind: Kind | None = None) -> list[int]:
        """The generations of a rank's files, or of those of one kind; ``aside``: also of files put aside."""
        ends = FILE_ENDS.values() if kind is None else [FILE_ENDS[kind]]
        stem = f"{key.job}~{key.run}~r{key.rank}~g"
        found = []
        for path in self.folder.glob(f"{stem}*"):
            name = path.name.removesuffix(ASIDE) if aside else path.name
            number, dot, end = name.removeprefix(stem).partition(".")
            if number.isdecimal() and dot + end in ends:
                found.append(int(number))
        return found

    def plan(self, descriptor: SegmentDescriptor, num_slots: int, slot_bytes: int) -> SegmentPlan:
        """Lay out the next generation of a rank; no memory is promised yet.

        Raises:
            ValueError: numbers or names that no segment can have.
        """
        key = RankKey(descriptor.job, descriptor.run, descriptor.rank)
        held = self._held[Purpose.RANK].values()
        known = [h.plan.descriptor.generation for h in held if h.plan.key == key]
        # A file that waits or was put aside keeps its number: it may come back.
        known += self._generations(key, aside=True)
        final = msgspec.structs.replace(
            descriptor,
            generation=max(known, default=-1) + 1,
            node_id=self.node_id,
            created_at_ns=time.time_ns(),
        )
        geometry = plan_geometry(num_slots, slot_bytes, len(encode_descriptor(final)))
        name = segment_file_name(final.job, final.run, final.rank, final.generation, final.kind)
        return SegmentPlan(final, geometry, self.folder / name)

    def create(self, descriptor: SegmentDescriptor, num_slots: int, slot_bytes: int) -> Segment:
        """Plan, build and enter in one call."""
        plan = self.plan(descriptor, num_slots, slot_bytes)
        self.promise(plan)
        try:
            segment = self.build(plan)
        except BaseException:
            self.cancel(plan)
            raise
        self.enter(plan, segment)
        return segment

    def remove_bad(self, job: str, run: str) -> int:
        """Delete the files of a run that wait or were put aside; returns how many."""
        found = list(self.folder.glob(f"{job}~{run}~*{ASIDE}"))
        for path in found:
            path.unlink(missing_ok=True)
        return len(found) + self._adoption.forget(f"{job}~{run}~")

    def lock_in_memory(self, segment: Segment) -> None:
        """Lock a segment as configured; a failure is recorded in ``segment.mlocked`` and tolerated."""
        if self._mlock != "off" and not segment.mlocked:
            segment.mlocked = try_mlock(segment.buffer) is None

    def _of_rank(self, key: RankKey) -> dict[int, Segment]:
        return self._runs.get((key.job, key.run), {}).get(key, {})

    def _build(self, plan: SegmentPlan, temporary: Path) -> Segment:
        fd = os.open(temporary, _NEW_FILE, 0o600)
        try:
            file_bytes = allocate(fd, plan.geometry.total_bytes)
            mapping = FileMapping(fd, file_bytes)
            buffer = mapping.view
            populate(buffer, hugepages=self._hugepages == "auto")
            why_not = None if self._mlock == "off" else try_mlock(buffer)
            if why_not is not None and self._mlock == "on":
                raise CannotReserve(
                    RefusalCode.SEGMENT_FS,
                    f"{format_bytes(file_bytes)} cannot be locked in memory: {why_not}",
                    "raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity in the unit), or set CKPTD_MLOCK=auto",
                )
            write_prologue(buffer, plan.geometry, plan.descriptor)
            self.share(fd, plan.purpose, plan.descriptor.job)
            temporary.rename(plan.path)
        except BaseException:
            os.close(fd)
            raise
        mlocked = self._mlock != "off" and why_not is None
        return Segment(plan.path, plan.descriptor, plan.geometry, mapping, fd, file_bytes, mlocked=mlocked)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _facts(descriptor: SegmentDescriptor, held: _Held, owned: bool = False) -> SegmentFacts:
    return SegmentFacts(
        key=RankKey(descriptor.job, descriptor.run, descriptor.rank),
        generation=descriptor.generation,
        world_size=descriptor.world_size,
        topology=descriptor.topology,
        layout_version=descriptor.layout_version,
        total_bytes=held.size_bytes,
        owned=owned,
        ready=held.segment is not None,
    )


def _copy_facts(held: _Held) -> SegmentFacts:
    """Memory of the reader's that is not offered to it."""
    reader = held.plan.reader
    assert reader is not None, "a copy has a reader"
    return SegmentFacts(
        key=reader.key,
        generation=held.plan.number,
        world_size=reader.world_size,
        topology=reader.topology,
        layout_version=reader.layout_version,
        total_bytes=held.size_bytes,
        owned=False,
        ready=False,
    )


def _missing_bytes(plan: SegmentPlan) -> int:
    """What a plan has yet to allocate; a segment that was made still counts as a plan until it is entered."""
    if plan.path.exists():
        return 0
    try:
        taken = plan.temporary.stat().st_blocks * 512
    except FileNotFoundError:
        taken = 0
    return max(0, plan.geometry.total_bytes - taken)


def _no_room(plan: SegmentPlan, folder: Path, error: OSError) -> CannotReserve:
    info = os.statvfs(folder)
    return CannotReserve(
        RefusalCode.SEGMENT_FS,
        f"{plan.key} needs {format_bytes(plan.geometry.total_bytes)} "
        f"({plan.geometry.num_slots} slots of {format_bytes(plan.geometry.slot_bytes)}); the "
        f"filesystem of {folder} has {format_bytes(info.f_blocks * info.f_frsize)}, of which "
        f"{format_bytes(info.f_bavail * info.f_frsize)} is free: {error.strerror or error}",
        "enlarge it (`mount -o remount,size=<bytes> /dev/shm`, or `docker run --shm-size`), or "
        "set CKPTD_SEGMENT_DIR to a larger tmpfs",
    )


class SegmentMaker:
    """Makes segments of any purpose, and gives their memory back.

    A plan is admitted or refused, its bytes are promised, a worker builds the file, and it is entered in
    the store or the promise is cancelled. The caller learns of a refusal from what `make` returns, and of
    anything later by one of two callbacks, on the daemon's loop thread.

    A rank of this node is admitted by what it was promised when it attached, and by what it has. A segment
    that no rank pays for (replicas, drills) gets only memory that is left over.

    Args:
        slow: workers that may touch every page.
    """

    def __init__(
        self,
        store: SegmentStore,
        events: EventLog,
        slow: Workers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._events, self._slow, self._clock = store, events, slow, clock

    def make(
        self,
        plan: SegmentPlan,
        *,
        made: Callable[[Segment], None],
        refused: Callable[[Refused], None],
        what: str = "",
        final: bool = True,
    ) -> Refused | None:
        """Begin to make a segment; returns a refusal, or calls ``made`` or ``refused`` later.

        Args:
            what: describes the segment in a refusal.
            final: whether to report a refusal: less is not tried afterwards.
        """
        if (refusal := self.refusal(plan, what)) is not None:
            if final:
                self._report(plan, refusal)
            return refusal
        self._store.promise(plan)
        started = self._slow.submit(
            partial(self._store.build, plan),
            partial(self._built, plan, made),
            partial(self._not_built, plan, refused),
        )
        if not started:
            self._store.cancel(plan)
            return Refused(RefusalCode.IN_USE, "too many segments are being made", "try again")
        return None

    def refusal(self, plan: SegmentPlan, what: str = "") -> Refused | None:
        """Why there is no memory for it; None if there is."""
        facts, memory = self._store.facts(), self._store.memory
        needed = plan.geometry.total_bytes
        if (rank := plan.charged_to) is not None:
            own = sum(fact.total_bytes for fact in facts if fact.key == rank)
            owned = f" beside {format_bytes(own)} that it has" if own else ""
            no = reject_if_too_large(rank, own + needed, what + owned, facts, memory)
            return None if no is None else Refused(no.code, no.message, no.hint)
        free, user = room_for_replicas(facts, memory), owner_of(plan.descriptor.job)
        what = f"the replica of {plan.key} needs {format_bytes(needed)}, and of"
        if needed > free:
            text = (
                f"{what} {format_bytes(memory.quota_bytes)} here {format_bytes(free)} is free"
                f"{_promised(memory.promised)}"
            )
            return Refused(RefusalCode.QUOTA, text, "raise its CKPTD_MEMORY")
        if needed > (left := room_for_replicas(facts, memory, user)):
            text = f"{what} the memory that user {user} may have here {format_bytes(left)} is free"
            return Refused(RefusalCode.USER_QUOTA, text, "raise its CKPTD_USER_QUOTA")
        return None

    def give_back(self, segment: Segment) -> None:
        """Unlink and forget a segment now; a worker gives its pages back."""
        self._store.remove(segment)
        self.close(segment)

    def close(self, segment: Segment) -> None:
        """Give the pages of a removed segment back on a worker: that may take long."""
        self._slow.submit(segment.close, lambda _: None, partial(self._not_closed, segment.path.name))

    def _built(self, plan: SegmentPlan, made: Callable[[Segment], None], segment: Segment) -> None:
        if plan.purpose is Purpose.RANK:
            segment.detached_at_s = self._clock()  # until its trainer takes the owner lock
        self._store.enter(plan, segment)
        made(segment)

    def _not_built(self, plan: SegmentPlan, refused: Callable[[Refused], None], error: BaseException) -> None:
        self._store.cancel(plan)
        if isinstance(error, CannotReserve):
            refusal = Refused(error.code, error.message, error.hint)
            self._report(plan, refusal)
        else:
            logger.error("making %s failed", plan.path.name, exc_info=error)
            self._events.add("error", "reserve_failed", f"{plan.key}: {error!r}", plan.charged_to)
            refusal = Refused(RefusalCode.INTERNAL, f"making the segment failed: {error!r}")
        refused(refusal)

    def _report(self, plan: SegmentPlan, refusal: Refused) -> None:
        if plan.purpose is Purpose.REPLICA:
            self._events.add("warning", "replica_refused", refusal.message, plan.key)
        elif plan.purpose is not Purpose.DRILL:  # the report of a drill says it
            kind = f"refused.{refusal.code}"
            self._events.add("warning", kind, refusal.message, plan.charged_to)

    def _not_closed(self, name: str, error: BaseException) -> None:
        logger.error("closing %s failed", name, exc_info=error)
        self._events.add("error", "background_failed", f"closing {name}: {error!r}")


def _promised(promised: Mapping[RankKey, int]) -> str:
    total = sum(promised.values())
    return f" ({format_bytes(total)} is promised to its own ranks)" if total else ""
