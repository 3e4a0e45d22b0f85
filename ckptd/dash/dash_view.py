"""What a person on call sees of a node: a pure function of the daemon's answers.

Three tiers protect a rank: snapshots in its node's memory (against the loss of its process), replicas on
other nodes (against the loss of its node), and durable checkpoints (against the loss of all memory). A tier
of a rank has a grade: how far its newest complete copy is behind the job, in units of what is normal for that
tier. The grade of a run's tier is that of its worst rank.

A rank that another node owns is known by the replicas that this node hosts, unless all nodes of the run were
asked (`Answers.surveys`). What is not known is shown as unknown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from ckptd.core.recovery.recovery_phases import parse_phases
from ckptd.dash.dash_history import RunName, RunPace
from ckptd.dash.recoverable import TierEnds, recoverable
from ckptd.transport import messages as m

_DETAILED = 32
_ASKED = "when its node was asked"
_CELLS = 64  # more operators share a cell of a slot's row
_EVENTS = 80
_RECOVERIES = 12
_LAYERS, _EXPERTS = 48, 256


class TierGrade(StrEnum):
    """How good a tier is; the value is the letter that stands for it. The worst comes first."""

    NONE = "x"
    FAR = "!"
    BEHIND = "~"
    CURRENT = "+"
    UNKNOWN = "?"
    OFF = "."


_ABSENT = (TierGrade.NONE, TierGrade.OFF)
_WORST_FIRST = {grade: number for number, grade in enumerate(TierGrade)}
TIERS = ("a process is lost", "a node is lost", "all memory is lost")
_SOURCES = ("memory", "peers", "storage")


@dataclass(frozen=True, slots=True)
class SurveyedRank:
    """A rank as all nodes of its run knew it when they were asked.

    Args:
        snapshot, replica: the ends of its newest complete suffixes on its own node and on others (-1: none).
        newest: the newest snapshot of the run at that time.
        silent: its node did not answer.
    """

    node: str
    snapshot: int
    replica: int
    newest: int
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Answers:
    """What a daemon answered at ``at_s`` (unix time), and what earlier answers showed.

    Args:
        events: newest last.
        recoveries: events of the kind `recovery_phases`, newest last.
        surveys: by run and rank, where all nodes were asked.
        error: why these answers are old; "" if they are not.
    """

    at_s: float
    status: m.Status
    snapshots: m.Snapshots
    peers: m.Peers
    events: Sequence[m.EventInfo] = ()
    recoveries: Sequence[m.EventInfo] = ()
    placements: Mapping[RunName, PlacementView] = field(default_factory=dict)
    paces: Mapping[RunName, RunPace] = field(default_factory=dict)
    surveys: Mapping[RunName, Mapping[int, SurveyedRank]] = field(default_factory=dict)
    error: str = ""


# -- the view -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierView:
    """A tier of a run or of a rank. ``iteration``: of the newest complete copy (-1: none), ``lag`` iterations
    and about ``age_s`` seconds behind the job (-1: not known).
    """

    grade: TierGrade
    iteration: int = -1
    lag: int = -1
    age_s: float = -1.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot of a ring.

    Args:
        levels: a digit for each operator, or for each group of neighbours: 0, only compute weights, to 9, the
            complete training state of all of them.
    """

    iteration: int
    state: str
    levels: str
    in_suffix: bool


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank in detail; ``tiers`` in the order of `TIERS`. ``pid``: 0 without a trainer on this node."""

    rank: int
    node: str
    pid: int
    step: int
    tiers: tuple[TierView, ...]
    window: int = 0
    operators: int = 0
    slots: tuple[SlotView, ...] = ()
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankColumns:
    """All ranks that are known, as columns: a job may have thousands. Grades and lags are of each tier."""

    ranks: tuple[int, ...]
    grades: tuple[str, ...]
    lags: tuple[tuple[int, ...], ...]
    counts: tuple[dict[str, int], ...]


@dataclass(frozen=True, slots=True)
class RecoveryView:
    """Where the time of one rank's recovery went: pairs of phase and seconds."""

    at_s: float
    rank: int
    phases: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PlacementView:
    """The experts of an elastic job.

    Args:
        copies: for each layer a digit for each expert: the number of nodes that hold it (9: or more).
        loads: for each layer a digit for each expert: 9 times its tokens over those of the busiest one.
        below: the number of experts on fewer than ``threshold`` nodes.
    """

    step: int
    threshold: int
    nodes: int
    layers: tuple[str, ...]
    copies: tuple[str, ...]
    loads: tuple[str, ...]
    below: int
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of a job. ``details`` has the worst ranks first, at most 32."""

    job: str
    run: str
    world_size: int
    live: bool
    step: int
    step_s: float
    grade: TierGrade
    verdict: str
    tiers: tuple[TierView, ...]
    columns: RankColumns
    details: tuple[RankView, ...]
    stalls: tuple[tuple[float, float, float], ...] = ()
    recoveries: tuple[RecoveryView, ...] = ()
    placement: PlacementView | None = None


@dataclass(frozen=True, slots=True)
class DashView:
    """Everything on the page, and on the screen of `ckptctl top`."""

    at_s: float
    error: str
    node: str
    version: str
    uptime_s: float
    used_bytes: int
    quota_bytes: int
    sealing: int
    store: str
    runs: tuple[RunSummary, ...]
    peers: tuple[m.PeerStatus, ...]
    events: tuple[m.EventInfo, ...]


def view_of(answers: Answers) -> DashView:
    """The view; runs with trainers first."""
    status = answers.status
    facts = _facts_by_run(answers)
    runs = (_run_view(name, facts[name], answers) for name in sorted(facts))
    return DashView(
        at_s=answers.at_s,
        error=answers.error,
        node=status.node_id,
        version=status.version,
        uptime_s=status.uptime_s,
        used_bytes=status.used_bytes,
        quota_bytes=status.quota_bytes,
        sealing=status.seal_queue,
        store="" if status.durable is None else status.durable.url,
        runs=tuple(sorted(runs, key=lambda run: not run.live)),
        peers=answers.peers.peers[:_EVENTS],
        events=tuple(answers.events[-_EVENTS:]),
    )


# -- what is known of each rank -------------------------------------------------------------------


@dataclass(slots=True)
class _RankFacts:
    """The parts of the answers about one rank."""

    session: m.SessionStatus | None = None
    ring: m.RankSnapshots | None = None
    replication: m.ReplicationStatus | None = None
    durable: m.DurableRank | None = None
    hosted: m.HostedReplica | None = None
    surveyed: SurveyedRank | None = None
    ends: TierEnds = field(default_factory=TierEnds)

    @property
    def local(self) -> bool:
        return self.session is not None or self.ring is not None

    def newest(self) -> int:
        """The newest iteration that this rank is known to have come to."""
        step = -1 if self.session is None else self.session.step
        ring = -1 if self.ring is None else max((slot.iteration for slot in self.ring.slots), default=-1)
        hosted = -1 if self.hosted is None else self.hosted.newest_iteration
        seen = -1 if self.surveyed is None else max(self.surveyed.snapshot, self.surveyed.replica)
        return max(step, ring, hosted, seen)

    def every(self) -> int:
        """Iterations between two snapshots, as far as the trainer reported it."""
        every = 1.0 if self.session is None else self.session.metrics.get("every", 1.0)
        return int(every) if 1 <= every < 1 << 53 else 1  # a trainer may report anything


_Facts = dict[int, _RankFacts]


def _facts_by_run(answers: Answers) -> dict[RunName, _Facts]:
    found: dict[RunName, _Facts] = defaultdict(lambda: defaultdict(_RankFacts))
    for session in answers.status.sessions:
        found[session.job, session.run][session.rank].session = session
    for ring in answers.snapshots.ranks:
        found[ring.job, ring.run][ring.rank].ring = ring
    for replication in answers.peers.ranks:
        if replication.kind == "snapshots":
            found[replication.job, replication.run][replication.rank].replication = replication
    for hosted in answers.peers.replicas:
        if hosted.kind == "snapshots":
            facts = found[hosted.job, hosted.run][hosted.rank]
            if facts.hosted is None or facts.hosted.newest_iteration < hosted.newest_iteration:
                facts.hosted = hosted
    for name, ranks in answers.surveys.items():
        for rank, surveyed in ranks.items():
            found[name][rank].surveyed = surveyed
    _add_durable(found, () if answers.status.durable is None else answers.status.durable.ranks)
    tiers = recoverable(answers.status, answers.snapshots, answers.peers)
    for (job, run), ranks_of in found.items():
        for rank, known in ranks_of.items():
            known.ends = tiers.at(job, run, rank)
    return found


def _add_durable(found: Mapping[RunName, _Facts], ranks: Sequence[m.DurableRank]) -> None:
    """Of ranks of other nodes, what one of this node reports."""
    of_rank = {(durable.job, durable.run, durable.rank): durable for durable in ranks}
    of_run = {(d.job, d.run): msgspec.structs.replace(d, reason="") for d in ranks}
    for name, facts in found.items():
        for rank, each in facts.items():
            each.durable = of_rank.get((*name, rank), of_run.get(name))


# -- grades ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scale:
    """What lags are measured with: the job's newest iteration, and seconds per iteration (0: not known)."""

    newest: int
    step_s: float
    at_s: float

    def tier(
        self, iteration: int, normal: int, *, note: str = "", newest: int | None = None, filled_at_ns: int = 0
    ) -> TierView:
        """A tier whose lag is at most ``normal`` if nothing is wrong, four times that if it catches up.

        Args:
            newest: the job's newest iteration when ``iteration`` was learned; None: just now.
        """
        if iteration < 0:
            return TierView(TierGrade.NONE, note=note)
        lag = max(0, (self.newest if newest is None else newest) - iteration)
        late = TierGrade.BEHIND if lag <= 4 * normal else TierGrade.FAR
        grade = TierGrade.CURRENT if lag <= normal else late
        age_s = lag * self.step_s if self.step_s else -1.0
        if filled_at_ns:
            age_s = max(0.0, self.at_s - filled_at_ns / 1e9)
        return TierView(grade, iteration, lag, age_s, note)


def _tiers(facts: _RankFacts, answers: Answers, scale: _Scale) -> tuple[TierView, ...]:
    return (
        _in_memory(facts, scale),
        _on_peers(facts, answers, scale),
        _in_storage(facts, answers, scale),
    )


def _in_memory(facts: _RankFacts, scale: _Scale) -> TierView:
    """Normal: one snapshot is being copied or sealed while the next one is due."""
    ring, normal = facts.ring, 2 * facts.every()
    if ring is not None:
        end = -1 if facts.ends.memory is None else facts.ends.memory
        filled = max((slot.filled_at_ns for slot in ring.slots if slot.iteration == end), default=0)
        return scale.tier(end, normal, note="" if end >= 0 else ring.reason, filled_at_ns=filled)
    if facts.session is not None:
        return TierView(TierGrade.NONE, note="no memory is reserved yet")
    if facts.surveyed is not None and not facts.surveyed.silent:
        return scale.tier(facts.surveyed.snapshot, normal, newest=facts.surveyed.newest, note=_ASKED)
    if facts.surveyed is not None:
        return TierView(TierGrade.UNKNOWN, note=f"{facts.surveyed.node} does not answer")
    return TierView(TierGrade.UNKNOWN, note="on another node")


def _on_peers(facts: _RankFacts, answers: Answers, scale: _Scale) -> TierView:
    """Normal: a snapshot is on its way while the next ones are made."""
    normal = 4 * facts.every()
    best = facts.ends.peers
    if facts.local and facts.replication is not None and best is not None:
        reasons = [target.reason for target in facts.replication.targets if target.reason]
        note = "" if best >= 0 else next(iter(reasons), "no other node holds it")
        return scale.tier(best, normal, note=note)
    if facts.local:
        if not answers.peers.endpoint:
            return TierView(TierGrade.OFF, note="no peers")
        return TierView(TierGrade.NONE, note="no other node")
    if facts.hosted is not None:
        return scale.tier(facts.hosted.newest_iteration, normal)
    seen = facts.surveyed
    if seen is None:
        return TierView(TierGrade.UNKNOWN, note="on another node")
    return scale.tier(seen.replica, normal, newest=seen.newest, note=_ASKED)


def _in_storage(facts: _RankFacts, answers: Answers, scale: _Scale) -> TierView:
    """Normal: the next checkpoint is being uploaded, until the one after it is due."""
    if answers.status.durable is None:
        return TierView(TierGrade.OFF, note="no store")
    durable = facts.durable
    committed = facts.ends.storage
    if durable is None or committed is None or committed < 0:
        return TierView(TierGrade.NONE, note=(durable and durable.reason) or "no checkpoint yet")
    return scale.tier(committed, 2 * max(1, durable.stride), note=durable.reason)


def _badness(tier: TierView) -> tuple[int, bool, int]:
    """Sorts the worst first; of equal grades what is known of now."""
    return _WORST_FIRST[tier.grade], bool(tier.note), -tier.lag


# -- a run ----------------------------------------------------------------------------------------


def _run_view(name: RunName, facts: _Facts, answers: Answers) -> RunSummary:
    pace = answers.paces.get(name, RunPace())
    newest = max(each.newest() for each in facts.values())
    scale = _Scale(newest, pace.step_s, answers.at_s)
    ranks = sorted(facts)
    tiers = [_tiers(facts[rank], answers, scale) for rank in ranks]
    whole = _run_tiers(facts, dict(zip(ranks, tiers, strict=True)), scale)
    grade, verdict = _verdict(ranks, tiers, whole)
    order = sorted(range(len(ranks)), key=lambda i: (_order(tiers[i]), i))[:_DETAILED]
    sizes = [e.world_size for f in facts.values() for e in (f.session, f.ring) if e is not None]
    return RunSummary(
        job=name[0],
        run=name[1],
        world_size=max(sizes, default=0),
        live=any(each.session is not None for each in facts.values()),
        step=newest,
        step_s=pace.step_s,
        grade=grade,
        verdict=verdict,
        tiers=whole,
        columns=_columns(ranks, tiers),
        details=tuple(_rank_view(ranks[i], facts[ranks[i]], tiers[i], answers) for i in order),
        stalls=pace.stalls,
        recoveries=_recoveries(name, answers.recoveries),
        placement=answers.placements.get(name),
    )


def _order(tiers: tuple[TierView, ...]) -> tuple[tuple[int, ...], bool]:
    """Sorts the worst first; ranks of this node, of which more is known, before others."""
    return tuple(_WORST_FIRST[tier.grade] for tier in tiers), tiers[0].grade is TierGrade.UNKNOWN


def _run_tiers(
    facts: _Facts, tiers: Mapping[int, tuple[TierView, ...]], scale: _Scale
) -> tuple[TierView, ...]:
    """The worst rank of each tier. For the loss of a node the floor of the run counts, too, which all nodes
    agreed on; on a node that has no peers it is that of its own ring, and says nothing of a lost node.
    """
    process, node, memory = (_worst_rank({rank: each[i] for rank, each in tiers.items()}) for i in range(3))
    floors = [each.replication.floor for each in facts.values() if each.replication is not None]
    if floors and node.grade not in _ABSENT:
        every = max(each.every() for each in facts.values())
        note = "" if min(floors) >= 0 else "not all ranks of the run have replicas yet"
        node = min(node, scale.tier(min(floors), 4 * every, note=note), key=_badness)
    return process, node, memory


def _worst_rank(tiers: Mapping[int, TierView]) -> TierView:
    rank = min(tiers, key=lambda rank: _badness(tiers[rank]))
    if tiers[rank].grade in (TierGrade.CURRENT, TierGrade.OFF):
        return tiers[rank]
    return replace(tiers[rank], note=f"rank {rank}" + (f": {tiers[rank].note}" if tiers[rank].note else ""))


def _verdict(
    ranks: Sequence[int], tiers: Sequence[tuple[TierView, ...]], whole: tuple[TierView, ...]
) -> tuple[TierGrade, str]:
    """Whether every rank is protected, in one sentence. `NONE`: a rank has nothing to resume from."""
    bare = [r for r, each in zip(ranks, tiers, strict=True) if all(t.grade in _ABSENT for t in each)]
    if bare:
        return TierGrade.NONE, f"{_named(bare)} can be recovered from nothing"
    absent = [tier.grade in _ABSENT for tier in whole]
    # What survives the loss of all memory survives that of a node, too, with more iterations lost.
    gaps = [what for i, what in enumerate(TIERS) if all(absent[i:])]
    parts = [
        f"if {what}, the run resumes from {_SOURCES[absent.index(False, i)]}"
        for i, what in enumerate(TIERS)
        if absent[i] and not all(absent[i:])
    ]
    late = [what for tier, what in zip(whole, TIERS, strict=True) if tier.grade is TierGrade.FAR]
    parts += [f"far behind if {' or '.join(late)}"] if late else []
    # A node that is to be alone, or without a store, is no fault; one that is both is.
    faults = [tier.grade for tier in whole if tier.grade in (TierGrade.NONE, TierGrade.FAR)]
    if faults or all(tier.grade is TierGrade.OFF for tier in whole[1:]):
        return TierGrade.FAR, "; ".join([f"not protected if {' or '.join(gaps)}"] * bool(gaps) + parts)
    behind = any(tier.grade is TierGrade.BEHIND for tier in whole)
    protected = "every rank known here is protected" + (f", except if {' or '.join(gaps)}" if gaps else "")
    return TierGrade.BEHIND if behind else TierGrade.CURRENT, "; ".join([protected, *parts])


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (", …" if len(ranks) > 6 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"


def _columns(ranks: Sequence[int], tiers: Sequence[tuple[TierView, ...]]) -> RankColumns:
    grades = tuple("".join(each[i].grade for each in tiers) for i in range(len(TIERS)))
    return RankColumns(
        ranks=tuple(ranks),
        grades=grades,
        lags=tuple(tuple(each[i].lag for each in tiers) for i in range(len(TIERS))),
        counts=tuple(dict(Counter(column)) for column in grades),
    )


def _rank_view(rank: int, facts: _RankFacts, tiers: tuple[TierView, ...], answers: Answers) -> RankView:
    ring, session, replication = facts.ring, facts.session, facts.replication
    elsewhere = "" if facts.surveyed is None else facts.surveyed.node
    return RankView(
        rank=rank,
        node=answers.status.node_id if facts.local else elsewhere,
        pid=0 if session is None else session.pid,
        step=facts.newest(),
        tiers=tiers,
        window=0 if ring is None else ring.window,
        operators=0 if ring is None else ring.num_operators,
        slots=() if ring is None else tuple(_slot_view(slot, ring) for slot in ring.slots),
        targets=() if replication is None else tuple(map(_target, replication.targets)),
    )


def _target(target: m.TargetStatus) -> str:
    state = "" if target.alive else ", lost"
    return f"{target.node}{state}: {target.current_up_to if target.current_up_to >= 0 else 'nothing yet'}"


def _slot_view(slot: m.SlotInfo, ring: m.RankSnapshots) -> SlotView:
    has_image = slot.state in ("filled", "sealed", "quarantined")
    return SlotView(
        iteration=slot.iteration if slot.state != "free" else -1,
        state=slot.state,
        levels=_levels(slot.anchors, ring.num_operators) if has_image else "",
        in_suffix=slot.state == "sealed" and ring.suffix[0] <= slot.iteration <= ring.suffix[1],
    )


def _levels(anchors: bytes, operators: int) -> str:
    bits, cells = int.from_bytes(anchors, "little"), min(operators, _CELLS)
    out = ""
    for cell in range(cells):
        first, end = cell * operators // cells, (cell + 1) * operators // cells
        anchored = (bits >> first & (1 << (end - first)) - 1).bit_count()
        out += str(-(-9 * anchored // (end - first)))
    return out


def _recoveries(name: RunName, events: Sequence[m.EventInfo]) -> tuple[RecoveryView, ...]:
    found = [
        RecoveryView(e.time_ns / 1e9, e.rank, tuple((str(p), s) for p, s in phases.items()))
        for e in events
        if (e.job, e.run) == name and (phases := parse_phases(e.message))
    ]
    return tuple(found[-_RECOVERIES:])


def placement_of(elastic: m.Elastic) -> PlacementView:
    """The number of nodes that hold each expert, and its load."""
    layers, experts = min(len(elastic.loads), _LAYERS), min(len(elastic.loads[0]), _EXPERTS)
    holders = [Counter[int]() for _ in elastic.loads]
    for node in elastic.nodes:
        for layer, held in enumerate(node.holds[: len(holders)]):
            holders[layer].update(set(held))
    busiest = [max(1, *loads) for loads in elastic.loads]
    cut = layers < len(elastic.loads) or experts < len(elastic.loads[0])
    return PlacementView(
        step=elastic.step,
        threshold=elastic.threshold,
        nodes=len(elastic.nodes),
        layers=(elastic.layers or tuple(f"layer {n}" for n in range(layers)))[:layers],
        copies=tuple("".join(str(min(9, holders[n][e])) for e in range(experts)) for n in range(layers)),
        loads=tuple(
            "".join(str(9 * load // busiest[n]) for load in elastic.loads[n][:experts]) for n in range(layers)
        ),
        below=sum(
            holders[n][e] < elastic.threshold
            for n, loads in enumerate(elastic.loads)
            for e in range(len(loads))
        ),
        left_out=f"{len(elastic.loads)} layers of {len(elastic.loads[0])} experts in all" if cut else "",
    )
