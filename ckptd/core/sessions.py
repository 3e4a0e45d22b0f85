"""Who is attached, and who may attach: a table and one pure decision.

`decide_attach` sees facts (segments on this node, who owns them, the numbers of the memory) and
answers with `Admitted` or `Rejected`, both of which say why. It never looks anything up itself.

Memory is promised at attach: an admitted rank counts with what it said it needs, even before it
reserves, so that of eight ranks that each fit alone the one too many is told at its attach.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptd.transport.messages import Member, RefusalCode
from ckptd.units import format_bytes

__all__ = [
    "Admitted",
    "AttachWish",
    "MemoryFacts",
    "RankKey",
    "Rejected",
    "SegmentFacts",
    "SessionTable",
    "TrainerSession",
    "decide_attach",
    "reject_if_too_large",
    "room_for_replicas",
    "wrong_members",
]


# What a trainer calls a job that nobody named: its script, and a digest of where it lies and was started.
_NAMED_AFTER_SCRIPT = re.compile(r"(.+)-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, order=True)
class RankKey:
    """One rank of one run of one job."""

    job: str
    run: str
    rank: int

    def __str__(self) -> str:
        return f"{self.job}/{self.run} rank {self.rank}"


@dataclass(frozen=True, slots=True)
class AttachWish:
    """What a trainer asks for. `held`: generations whose owner lock it holds itself."""

    key: RankKey
    world_size: int
    topology: str
    layout_version: int
    needed_bytes: int
    needed_text: str
    held: frozenset[int] = frozenset()
    token: bytes = b""


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """What matters of one segment when somebody wants to attach."""

    key: RankKey
    generation: int
    world_size: int
    topology: str
    layout_version: int
    total_bytes: int
    owned: bool
    ready: bool = True  # false while it is being made: it counts, but cannot be mapped


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """The numbers of the segment memory; `promised` is what live sessions may still take.

    `replica_bytes` is what replicas of other nodes' segments take of the quota.
    """

    quota_bytes: int
    fs_total_bytes: int
    fs_available_bytes: int
    segment_dir: str
    promised: Mapping[RankKey, int] = field(default_factory=dict)
    replica_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """The rank may attach; `generations` are its segments, `notes` what an operator may want."""

    generations: tuple[int, ...]
    available_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """The rank may not attach, why, and what would help."""

    code: RefusalCode
    message: str
    hint: str


@dataclass(slots=True)
class TrainerSession:
    """One attached trainer. `boot` facts come from its Hello and Attach; the rest moves.

    `pid` is the process as it is known here, `writer_pid` what it is in its own pid namespace and
    writes into slots.
    """

    identity: bytes
    pid: int
    key: RankKey
    wish: AttachWish
    attached_at_s: float
    last_seen_s: float
    watched_by: str
    writer_pid: int
    step: int = -1
    metrics: Mapping[str, float] = field(default_factory=dict)
    parked_told: int = -1  # up to this sequence its parked states are told
    owner_seen: bool = False  # the owner lock was held once: from then on its loss means death


class SessionTable:
    """The attached trainers, found by connection or by rank; at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_identity: dict[bytes, TrainerSession] = {}

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[TrainerSession]:
        return iter(list(self._by_identity.values()))

    def of_identity(self, identity: bytes) -> TrainerSession | None:
        """The session of this connection."""
        return self._by_identity.get(identity)

    def of_rank(self, key: RankKey) -> TrainerSession | None:
        """The session that owns this rank."""
        return next((s for s in self._by_identity.values() if s.key == key), None)

    def add(self, session: TrainerSession) -> None:
        """Enter a session; it replaces an earlier one of the same connection."""
        assert len(self) < self.limit or session.identity in self._by_identity
        self._by_identity[session.identity] = session

    def remove(self, session: TrainerSession) -> None:
        """Forget a session; nothing happens if it is gone already."""
        if self._by_identity.get(session.identity) is session:
            del self._by_identity[session.identity]

    def promised(self) -> dict[RankKey, int]:
        """What each live session said it needs in all."""
        return {s.key: s.wish.needed_bytes for s in self._by_identity.values()}


def decide_attach(
    wish: AttachWish,
    segments: Sequence[SegmentFacts],
    memory: MemoryFacts,
    *,
    owner_pid: int | None = None,
    open_in: Collection[int] = (),
) -> Admitted | Rejected:
    """May this trainer own this rank?

    Args:
        segments: every segment on this node, of whatever job.
        owner_pid: process of a live session that owns the rank, if it is another one.
        open_in: processes that have the rank's files open, for the message.
    """
    own = [s for s in segments if s.key == wish.key]
    if owner_pid is not None or any(s.owned and s.generation not in wish.held for s in own):
        return _rank_taken(wish.key, owner_pid, open_in)
    if (mismatch := _mismatch(wish, own)) is not None:
        return mismatch
    own_bytes = sum(s.total_bytes for s in own)
    too_large = reject_if_too_large(
        wish.key, max(wish.needed_bytes, own_bytes), wish.needed_text, segments, memory
    )
    if too_large is not None:
        return too_large
    generations = tuple(sorted(s.generation for s in own if s.ready))
    available = memory.quota_bytes - _taken_by_others(wish.key, segments, memory)
    return Admitted(generations, available, _stale_notes(wish.key, segments))


def reject_if_too_large(
    key: RankKey,
    needed_bytes: int,
    needed_text: str,
    segments: Sequence[SegmentFacts],
    memory: MemoryFacts,
) -> Rejected | None:
    """Does `needed_bytes` in all for this rank fit the quota and the filesystem? None: it does."""
    how = f" ({needed_text})" if needed_text else ""
    others = _taken_by_others(key, segments, memory)
    own = sum(s.total_bytes for s in segments if s.key == key)
    if needed_bytes <= own:
        return None  # it is there already, also if the quota was lowered since
    if needed_bytes > memory.quota_bytes - others:
        return Rejected(
            RefusalCode.QUOTA,
            f"{key} needs {format_bytes(needed_bytes)}{how}; the quota is "
            f"{format_bytes(memory.quota_bytes)}, of which {format_bytes(others)} is in use"
            f"{_users(key, segments, memory)}{_replicas(memory)}",
            _quota_hint(key, segments),
        )
    pending = _pending(key, segments, memory)
    missing = needed_bytes - own
    if missing > memory.fs_available_bytes - pending:
        return Rejected(
            RefusalCode.SEGMENT_FS,
            f"{key} needs {format_bytes(needed_bytes)}{how}, {format_bytes(missing)} more than it "
            f"has; the filesystem of {memory.segment_dir} has "
            f"{format_bytes(memory.fs_total_bytes)}, of which "
            f"{format_bytes(memory.fs_available_bytes)} is free and {format_bytes(pending)} of "
            "that is promised to other ranks",
            "enlarge it (`mount -o remount,size=<bytes> /dev/shm`, or `docker run --shm-size`, or "
            "a larger emptyDir with medium Memory), or set CKPTD_SEGMENT_DIR to a larger tmpfs",
        )
    return None


def wrong_members(members: Sequence[Member], world_size: int) -> str:
    """Why these nodes with these ranks can be no run of this size; "" if they can."""
    nodes: set[str] = set()
    ranks: set[int] = set()
    for member in members:
        if member.card.node in nodes:
            return f"node {member.card.node} is named twice"
        nodes.add(member.card.node)
        for rank in member.ranks:
            if rank in ranks:
                return f"rank {rank} is on two nodes, or named twice"
            if rank >= world_size:
                return f"rank {rank} in a world of {world_size}"
            ranks.add(rank)
        if len(member.ring_bytes) > len(member.ranks):
            return f"node {member.card.node} tells the sizes of more rings than it has ranks"
    return ""


def room_for_replicas(segments: Sequence[SegmentFacts], memory: MemoryFacts) -> int:
    """What is neither in use nor promised to a rank: bytes that a replica may take."""
    in_quota = memory.quota_bytes - _taken_by_others(None, segments, memory)
    in_fs = memory.fs_available_bytes - _pending(None, segments, memory)
    return max(0, min(in_quota, in_fs))


def _rank_taken(key: RankKey, owner_pid: int | None, open_in: Collection[int]) -> Rejected:
    who = f"process {owner_pid}" if owner_pid is not None else "another live process"
    seen = f"; open in process {', '.join(map(str, sorted(open_in)))}" if open_in else ""
    return Rejected(
        RefusalCode.RANK_TAKEN,
        f"{key} is owned by {who}{seen}",
        "end that process (a forked helper such as a data loader worker counts as well), or give "
        "this trainer another job, run or rank",
    )


def _mismatch(wish: AttachWish, own: Sequence[SegmentFacts]) -> Rejected | None:
    """Fence what the segments of this very rank say about themselves."""
    for found in own:
        here = f"the snapshots of {wish.key} in memory (generation {found.generation})"
        if (found.world_size, found.topology) != (wish.world_size, wish.topology):
            return Rejected(
                RefusalCode.TOPOLOGY,
                f"{here} are of world size {found.world_size}, topology {found.topology!r}; this "
                f"trainer has world size {wish.world_size}, topology {wish.topology!r}",
                _other_run_hint(wish.key),
            )
        if found.layout_version != wish.layout_version:
            return Rejected(
                RefusalCode.LAYOUT_VERSION,
                f"{here} have layout version {found.layout_version}; this trainer writes and reads "
                f"layout version {wish.layout_version}",
                _other_run_hint(wish.key),
            )
    return None


def _other_run_hint(key: RankKey) -> str:
    return (
        "start as before to resume from them, use another run= to begin anew beside them, or "
        f"free them with `ckptctl forget {key.job} {key.run}`"
    )


def _taken_by_others(key: RankKey | None, segments: Sequence[SegmentFacts], memory: MemoryFacts) -> int:
    return memory.replica_bytes + sum(size for _, size in _ranks(key, segments, memory))


def _pending(but: RankKey | None, segments: Sequence[SegmentFacts], memory: MemoryFacts) -> int:
    """What was promised to other ranks and is not taken from the filesystem yet."""
    return sum(
        max(0, promised - sum(s.total_bytes for s in segments if s.key == other))
        for other, promised in memory.promised.items()
        if other != but
    )


def _replicas(memory: MemoryFacts) -> str:
    size = memory.replica_bytes
    return f", {format_bytes(size)} of it by replicas of other nodes' ranks" if size else ""


def _ranks(
    but: RankKey | None, segments: Sequence[SegmentFacts], memory: MemoryFacts
) -> list[tuple[RankKey, int]]:
    """Every other rank with what it has or was promised, whichever is more."""
    has: dict[RankKey, int] = dict.fromkeys(memory.promised, 0)
    for found in segments:
        has[found.key] = has.get(found.key, 0) + found.total_bytes
    return [(k, max(n, memory.promised.get(k, 0))) for k, n in sorted(has.items()) if k != but]


def _users(but: RankKey, segments: Sequence[SegmentFacts], memory: MemoryFacts) -> str:
    runs: dict[str, int] = {}
    for key, size in _ranks(but, segments, memory):
        name = f"{key.job}/{key.run}"
        runs[name] = runs.get(name, 0) + size
    largest = sorted(runs.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} ({format_bytes(size)})" for name, size in largest[:8])
    more = f" and {len(largest) - 8} more" if len(largest) > 8 else ""
    return f" by {shown}{more}" if runs else ""


def _quota_hint(key: RankKey, segments: Sequence[SegmentFacts]) -> str:
    """Name a run whose memory can be freed at once, the largest one without a live trainer."""
    alive = {(s.key.job, s.key.run) for s in segments if s.owned} | {(key.job, key.run)}
    free: dict[tuple[str, str], int] = {}
    for found in segments:
        run = (found.key.job, found.key.run)
        if run not in alive:
            free[run] = free.get(run, 0) + found.total_bytes
    raise_it = "start the daemon with a larger CKPTD_MEMORY"
    if not free:
        return raise_it
    job, run_name = max(free, key=lambda run: free[run])
    return f"free some with `ckptctl forget {job} {run_name}`, or {raise_it}"


def _stale_notes(key: RankKey, segments: Sequence[SegmentFacts]) -> tuple[str, ...]:
    """Segments of other runs of this job are there, and are not served: say so by name. So it is
    with jobs of a script of this name.
    """
    runs: dict[str, int] = {}
    others: dict[str, int] = {}
    for found in segments:
        job, run = found.key.job, found.key.run
        if job == key.job and run != key.run:
            runs[run] = runs.get(run, 0) + found.total_bytes
        elif job != key.job and _of_same_script(job, key.job):
            others[job] = others.get(job, 0) + found.total_bytes
    notes = []
    if runs:
        notes.append(
            f"{key} does not get the snapshots of run {_listed(runs)} of the same job: each run "
            "resumes from its own"
        )
    if others:
        notes.append(
            f"{key} does not get the snapshots of job {_listed(others)}: of a script of the same "
            "name, elsewhere or in another folder"
        )
    return tuple(notes)


def _of_same_script(job: str, other: str) -> bool:
    """Whether a script of one name gave both jobs theirs: with where it lies and was started, or
    (before that was added) alone.
    """
    told, here = _NAMED_AFTER_SCRIPT.fullmatch(job), _NAMED_AFTER_SCRIPT.fullmatch(other)
    return here is not None and here[1] == (job if told is None else told[1])


def _listed(sizes: Mapping[str, int]) -> str:
    """Names with their bytes, the largest first; "" if there are none."""
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))
    named = ", ".join(f"{name!r} ({format_bytes(sizes[name])})" for name in largest[:8])
    return named + (f" and {len(sizes) - 8} more" if len(sizes) > 8 else "")
