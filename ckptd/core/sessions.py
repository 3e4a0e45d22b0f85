"""The trainers of this node: which of them may attach, which are attached, and which are asked to park. Pure.

`decide_attach` gets facts (the segments on this node and their owners, the numbers of the memory) and answers
`Admitted` or `Rejected`, with reasons.

Memory is promised at attach: an admitted rank counts with the bytes that it said it needs, even before it
reserves them. So of eight ranks that each fit alone, the one too many is refused at its attach.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptd.core.users import UserQuotas, owner_of, same_owner
from ckptd.transport.messages import Member, Parks, RankParked, RefusalCode
from ckptd.units import first_of, format_bytes

# The default name of a job: its script, and a digest of the folders in which it lies and was started.
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
    """A trainer's request to attach. `held`: generations whose owner lock it holds itself."""

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
    """The facts about one segment that matter for an attach."""

    key: RankKey
    generation: int
    world_size: int
    topology: str
    layout_version: int
    total_bytes: int
    owned: bool
    ready: bool = True  # false during its creation: it counts, but cannot be mapped


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """The numbers of the segment memory.

    `promised` is what live sessions said they need; `replica_bytes` is the part of the quota that replicas of
    other nodes' segments use, `replicas_of` the same for each user. `quotas` is None where users are not kept
    apart.
    """

    quota_bytes: int
    fs_total_bytes: int
    fs_available_bytes: int
    segment_dir: str
    promised: Mapping[RankKey, int] = field(default_factory=dict)
    replica_bytes: int = 0
    replicas_of: Mapping[int, int] = field(default_factory=dict)
    quotas: UserQuotas | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """The rank may attach; `generations` are its segments, `notes` are for the operator."""

    generations: tuple[int, ...]
    available_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """The rank may not attach, with the reason and a remedy."""

    code: RefusalCode
    message: str
    hint: str


@dataclass(slots=True)
class TrainerSession:
    """One attached trainer.

    `pid` is its process in this pid namespace; `writer_pid` in its own one, which it writes into slots.
    `user` is that of the process behind the connection; None: unknown.
    """

    identity: bytes
    pid: int
    key: RankKey
    wish: AttachWish
    attached_at_s: float
    last_seen_s: float
    watched_by: str
    writer_pid: int
    user: int | None = None
    step: int = -1
    metrics: Mapping[str, float] = field(default_factory=dict)
    parked_told: int = -1  # its parked states up to this sequence were reported
    # Kind and text of its notice that its start is over; its next report has the durations of the phases.
    told_start: tuple[str, str] | None = None
    owner_seen: bool = False  # the owner lock was held once: since then its loss means death


class SessionTable:
    """The attached trainers, by connection or by rank; at most `limit`."""

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
        """Add a session; it replaces an earlier one of the same connection."""
        assert len(self) < self.limit or session.identity in self._by_identity
        self._by_identity[session.identity] = session

    def remove(self, session: TrainerSession) -> None:
        """Remove a session, unless it is gone already."""
        if self._by_identity.get(session.identity) is session:
            del self._by_identity[session.identity]

    def promised(self) -> dict[RankKey, int]:
        """The bytes that each live session said it needs in all."""
        return {s.key: s.wish.needed_bytes for s in self._by_identity.values()}


@dataclass(slots=True)
class _Failure:
    found_s: float
    others_s: float | None = None


class FailureTimes:
    """When the trainers of a run on this node ended at its last failure, for those that come after them.

    A failure begins when a trainer is found dead. The trainers that were attached by then belong to it,
    however they end. The death of one that attached later begins the next failure; if such a one leaves
    in order, the run was back, and nothing is left to tell.

    Args:
        limit: of the runs that are remembered; the one whose failure is oldest is forgotten first.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._last: dict[tuple[str, str], _Failure] = {}

    def ended(self, session: TrainerSession, now_s: float, *, in_order: bool) -> None:
        """A trainer was found dead, or (``in_order``) has left."""
        run = session.key.job, session.key.run
        failure = self._last.get(run)
        if failure is not None and session.attached_at_s <= failure.found_s:
            failure.others_s = now_s
            return
        self._last.pop(run, None)
        if not in_order:
            self._last[run] = _Failure(now_s)
            while len(self._last) > self._limit:
                del self._last[next(iter(self._last))]

    def forget(self, job: str, run: str) -> None:
        """The run is forgotten: who comes next under its name begins another one."""
        self._last.pop((job, run), None)

    def ago_s(self, job: str, run: str, now_s: float) -> tuple[float, float]:
        """Seconds since the first trainer of the run was found dead, and since the last of its others ended;
        -1 where there was none.
        """
        failure = self._last.get((job, run))
        if failure is None:
            return -1.0, -1.0
        return now_s - failure.found_s, -1.0 if failure.others_s is None else now_s - failure.others_s


def decide_attach(
    wish: AttachWish,
    segments: Sequence[SegmentFacts],
    memory: MemoryFacts,
    *,
    owner_pid: int | None = None,
    open_in: Collection[int] = (),
) -> Admitted | Rejected:
    """Decide whether a trainer may own its rank.

    Args:
        segments: every segment on this node, of any job.
        owner_pid: the process of another live session that owns the rank.
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
    user = owner_of(wish.key.job)
    if limit := _quota_of(user, memory):
        available = min(available, limit - bytes_of_user(user, segments, memory, but=wish.key))
    return Admitted(generations, available, _stale_notes(wish.key, segments, memory))


def reject_if_too_large(
    key: RankKey,
    needed_bytes: int,
    needed_text: str,
    segments: Sequence[SegmentFacts],
    memory: MemoryFacts,
) -> Rejected | None:
    """Check that `needed_bytes` in all for this rank fit the quota and the filesystem; None if they do."""
    how = f" ({needed_text})" if needed_text else ""
    others = _taken_by_others(key, segments, memory)
    own = sum(s.total_bytes for s in segments if s.key == key)
    if needed_bytes <= own:
        return None  # the rank has it already, even if the quota was lowered since
    if (over := _over_user_quota(key, needed_bytes, how, segments, memory)) is not None:
        return over
    if needed_bytes > memory.quota_bytes - others:
        return Rejected(
            RefusalCode.QUOTA,
            f"{key} needs {format_bytes(needed_bytes)}{how}; the quota is "
            f"{format_bytes(memory.quota_bytes)}, of which {format_bytes(others)} is in use"
            f"{_users(key, segments, memory)}{_replicas(memory)}",
            _quota_hint(key, segments, memory),
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
    """The reason why these members cannot be a run of this size; "" if they can."""
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


def room_for_replicas(segments: Sequence[SegmentFacts], memory: MemoryFacts, user: int | None = None) -> int:
    """The bytes that a replica may take: neither in use nor promised to a rank.

    Args:
        user: the owner of the job, whose quota counts, too.
    """
    in_quota = memory.quota_bytes - _taken_by_others(None, segments, memory)
    in_fs = memory.fs_available_bytes - _pending(None, segments, memory)
    room = min(in_quota, in_fs)
    if limit := _quota_of(user, memory):
        room = min(room, limit - bytes_of_user(user, segments, memory))
    return max(0, room)


def bytes_of_user(
    user: int | None, segments: Sequence[SegmentFacts], memory: MemoryFacts, *, but: RankKey | None = None
) -> int:
    """The memory of a user on this node: what its ranks have or were promised, and replicas of its jobs.

    Args:
        but: a rank that does not count.
    """
    if user is None:
        return 0
    ranks = sum(size for key, size in _ranks(but, segments, memory) if owner_of(key.job) == user)
    return ranks + memory.replicas_of.get(user, 0)


def users_of(segments: Sequence[SegmentFacts], memory: MemoryFacts) -> list[int]:
    """The users with memory on this node, or named in quotas; none where they are not kept apart."""
    if memory.quotas is None:
        return []
    ranks = _ranks(None, segments, memory)
    owners = {user for key, _ in ranks if (user := owner_of(key.job)) is not None}
    return sorted(owners | set(memory.replicas_of) | set(memory.quotas.by_user))


def _quota_of(user: int | None, memory: MemoryFacts) -> int:
    return 0 if memory.quotas is None else memory.quotas.of(user)


def _over_user_quota(
    key: RankKey, needed_bytes: int, how: str, segments: Sequence[SegmentFacts], memory: MemoryFacts
) -> Rejected | None:
    """The refusal if a rank's memory does not fit the quota of its user."""
    user = owner_of(key.job)
    limit, others = _quota_of(user, memory), bytes_of_user(user, segments, memory, but=key)
    if user is None or not limit or needed_bytes <= limit - others:
        return None
    of_user = [found for found in segments if same_owner(found.key.job, key.job)]
    promised = {k: size for k, size in memory.promised.items() if same_owner(k.job, key.job)}
    own = replace(memory, promised=promised)
    replicas = memory.replicas_of.get(user, 0)
    copies = f", {format_bytes(replicas)} of it by replicas of its ranks on other nodes" if replicas else ""
    return Rejected(
        RefusalCode.USER_QUOTA,
        f"{key} needs {format_bytes(needed_bytes)}{how}; user {user} may have {format_bytes(limit)} on this "
        f"node, of which {format_bytes(others)} is in use{_users(key, of_user, own)}{copies}",
        _free_hint(key, of_user, own, "ask the operator to raise user_quota, or this user's in user_quotas"),
    )


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
    """The refusal if segments of this rank are of another world size, topology, or layout."""
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
    """The bytes that were promised to other ranks and are not used of the filesystem yet."""
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
    """The bytes of every other rank: those that it has or was promised, whichever are more."""
    has: dict[RankKey, int] = dict.fromkeys(memory.promised, 0)
    for found in segments:
        has[found.key] = has.get(found.key, 0) + found.total_bytes
    return [(k, max(n, memory.promised.get(k, 0))) for k, n in sorted(has.items()) if k != but]


def _may_name(key: RankKey, job: str, memory: MemoryFacts) -> bool:
    """Whether a refusal of this rank may name that job."""
    return memory.quotas is None or same_owner(key.job, job)


def _users(but: RankKey, segments: Sequence[SegmentFacts], memory: MemoryFacts) -> str:
    runs: dict[str, int] = {}
    for key, size in _ranks(but, segments, memory):
        name = f"{key.job}/{key.run}" if _may_name(but, key.job, memory) else "jobs of other users"
        runs[name] = runs.get(name, 0) + size
    largest = sorted(runs.items(), key=lambda item: -item[1])
    shown = first_of((f"{name} ({format_bytes(size)})" for name, size in largest), 8)
    return f" by {shown}" if runs else ""


def _quota_hint(key: RankKey, segments: Sequence[SegmentFacts], memory: MemoryFacts) -> str:
    return _free_hint(key, segments, memory, "start the daemon with a larger CKPTD_MEMORY")


def _free_hint(key: RankKey, segments: Sequence[SegmentFacts], memory: MemoryFacts, raise_it: str) -> str:
    """The remedy: a run whose memory can be freed at once, the largest one without a live trainer."""
    alive = {(s.key.job, s.key.run) for s in segments if s.owned} | {(key.job, key.run)}
    free: dict[tuple[str, str], int] = {}
    for found in segments:
        run = (found.key.job, found.key.run)
        if run not in alive and _may_name(key, found.key.job, memory):
            free[run] = free.get(run, 0) + found.total_bytes
    if not free:
        return raise_it
    job, run_name = max(free, key=lambda run: free[run])
    return f"free some with `ckptctl forget {job} {run_name}`, or {raise_it}"


def _stale_notes(key: RankKey, segments: Sequence[SegmentFacts], memory: MemoryFacts) -> tuple[str, ...]:
    """Notes on segments that are not served: of other runs of the job, and of jobs of the same script."""
    runs: dict[str, int] = {}
    others: dict[str, int] = {}
    of_others: dict[str, str] = {}  # a run of each
    for found in segments:
        job, run = found.key.job, found.key.run
        if not _may_name(key, job, memory):
            continue
        if job == key.job and run != key.run:
            runs[run] = runs.get(run, 0) + found.total_bytes
        elif job != key.job and _of_same_script(job, key.job):
            others[job] = others.get(job, 0) + found.total_bytes
            of_others[job] = run
    notes = []
    if runs:
        notes.append(
            f"{key} does not get the snapshots of run {_listed(runs)} of the same job: each run "
            f"resumes from its own. {_how_to_continue(key.job, _largest(runs)[0])}"
        )
    if others:
        job = _largest(others)[0]
        notes.append(
            f"{key} does not get the snapshots of job {_listed(others)}: of a script of the same "
            f"name, elsewhere or in another folder. {_how_to_continue(job, of_others[job])}"
        )
    return tuple(notes)


def _of_same_script(job: str, other: str) -> bool:
    """Whether both jobs are named after the same script name, with a digest or (older versions) without."""
    told, here = _NAMED_AFTER_SCRIPT.fullmatch(job), _NAMED_AFTER_SCRIPT.fullmatch(other)
    return here is not None and here[1] == (job if told is None else told[1])


def _listed(sizes: Mapping[str, int]) -> str:
    """Names with their bytes, the largest first."""
    return first_of((f"{name!r} ({format_bytes(sizes[name])})" for name in _largest(sizes)), 8)


def _largest(sizes: Mapping[str, int]) -> list[str]:
    return sorted(sizes, key=lambda name: (-sizes[name], name))


def _how_to_continue(job: str, run: str) -> str:
    return (
        f"To continue {job}/{run}, stop this trainer and pass run=RunOptions(name={run!r}, job={job!r}); to "
        f"free its memory, run `ckptctl forget {job} {run}`"
    )


@dataclass(slots=True)
class _Request:
    number: int
    until_s: float
    answer: Callable[[Parks], None]
    waits_for: set[RankKey]
    heard: dict[RankKey, RankParked] = field(default_factory=dict)


class ParkRequests:
    """The open requests of ``ckptctl park``, and the ranks that have yet to answer.

    A trainer learns of a request from the answer to its next ping; nothing is sent to one that did not ask. A
    request ends when every rank has answered, is gone, or time is out; then its caller is answered once.
    """

    def __init__(self) -> None:
        self._open: list[_Request] = []
        self._last = 0

    def ask(self, ranks: Iterable[RankKey], until_s: float, answer: Callable[[Parks], None]) -> None:
        """Ask these ranks; ``answer`` is called once, immediately if there are none."""
        self._last += 1
        self._open.append(_Request(self._last, until_s, answer, set(ranks)))
        self._end_complete()

    def number_for(self, rank: RankKey) -> int:
        """The newest request that this rank has not answered; 0 if there is none."""
        return max((r.number for r in self._open if rank in r.waits_for), default=0)

    def outcome(self, rank: RankKey, number: int, iteration: int, reason: str) -> None:
        """A rank is parked at this iteration (-1: not at all). That answers older requests, too."""
        for request in self._open:
            if request.number <= number:
                self._hear(request, rank, iteration, reason)
        self._end_complete()

    def gone(self, rank: RankKey) -> None:
        """A rank has left."""
        for request in self._open:
            self._hear(request, rank, -1, "its process ended before it said anything")
        self._end_complete()

    def tick(self, now_s: float) -> None:
        """End the requests whose time is out."""
        for request in self._open:
            if now_s >= request.until_s:
                for rank in list(request.waits_for):
                    why = "no answer: it hangs, or its ckptd knows no parking"
                    self._hear(request, rank, -1, why)
        self._end_complete()

    @staticmethod
    def _hear(request: _Request, rank: RankKey, iteration: int, reason: str) -> None:
        if rank in request.waits_for:
            request.waits_for.discard(rank)
            told = RankParked(rank.job, rank.run, rank.rank, iteration, reason)
            request.heard[rank] = told

    def _end_complete(self) -> None:
        ended = [request for request in self._open if not request.waits_for]
        self._open = [request for request in self._open if request.waits_for]
        for request in ended:
            request.answer(Parks(tuple(request.heard[rank] for rank in sorted(request.heard))))
