"""The daemon's answers as text for people."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ckptd.core.recovery.global_plan import VERIFY_ITERATIONS
from ckptd.core.recovery.quarantine import describe_failure
from ckptd.ctl.doctor import Diagnosis
from ckptd.saved import SavedIteration
from ckptd.transport import messages as m
from ckptd.units import format_age, format_bytes, format_table

__all__ = ["events", "findings", "parks", "snapshots", "status"]

_SHOWN_METRICS = 6
_OPERATORS_PER_LINE = 8


def status(answer: m.Status) -> str:
    """Daemon, memory, trainers, segments, uploads to storage, counters."""
    used = answer.used_bytes / answer.quota_bytes if answer.quota_bytes else 0.0
    who = (
        f"ckptd {answer.version} on node {answer.node_id}, process {answer.pid}, "
        f"up {format_age(answer.uptime_s)}, {answer.endpoint}"
    )
    memory = (
        f"memory    {format_bytes(answer.used_bytes)} of {format_bytes(answer.quota_bytes)} "
        f"({used:.0%}); promised {format_bytes(answer.promised_bytes)}; "
        f"{answer.segment_dir}: {format_bytes(answer.fs_available_bytes)} of "
        f"{format_bytes(answer.fs_total_bytes)} free"
    )
    daemon = (
        f"daemon    {format_bytes(answer.rss_anon_bytes)} of its own, "
        f"{format_bytes(answer.rss_file_bytes)} libraries, "
        f"{format_bytes(answer.rss_shmem_bytes)} segment pages mapped (shared)"
    )
    sealing = f"sealing   {answer.seal_queue} waiting{_digest_rate(answer.counters)}"
    lines = [who, memory, daemon, sealing, ""]
    lines.append(_sessions(answer.sessions))
    lines += ["", _segments(answer.segments)]
    if answer.durable is not None:
        lines += ["", _durable(answer.durable)]
    interesting = {k: v for k, v in answer.counters.items() if not k.startswith("event.")}
    shown = ", ".join(f"{name} {value}" for name, value in sorted(interesting.items()))
    lines += ["", f"counters  {shown or 'none yet'}"]
    return "\n".join(lines)


def iterations(job: str, run: str, found: Sequence[SavedIteration]) -> str:
    """A table of the iterations, newest first."""
    if not found:
        return f"no iteration of {job}/{run} is saved on all ranks"
    rows = [[str(each.iteration), str(each.replay_from), "yes" if each.durable else "no"] for each in found]
    return format_table(["iteration", "replayed from", "in storage"], rows)


def snapshots(answer: m.Snapshots, *, operators: bool, verify_iterations: int = VERIFY_ITERATIONS) -> str:
    """One block per rank: its slots, then the iteration that can be recovered and its cost for
    a trainer with these ``verify_iterations``.
    """
    ranks = [_rank(rank, operators=operators, verify_iterations=verify_iterations) for rank in answer.ranks]
    replays = [_replays(run) for run in answer.replays]
    return "\n\n".join([*(ranks or ["no snapshots in memory"]), *replays])


def events(found: Sequence[m.EventInfo]) -> str:
    """One line per event."""
    if not found:
        return "no events"
    return "\n".join(
        f"{event.seq:>6}  {_when(event.time_ns)}  {event.level:<7}  {event.kind:<16}  {event.message}"
        for event in found
    )


def parks(answer: m.Parks) -> str:
    """One line per trainer that received the request."""
    if not answer.ranks:
        return "no attached trainer can park"
    return "\n".join(
        f"{rank.job}/{rank.run} rank {rank.rank}: "
        + (f"parked at iteration {rank.iteration}" if rank.iteration >= 0 else f"not parked: {rank.reason}")
        for rank in answer.ranks
    )


def findings(found: Sequence[Diagnosis]) -> str:
    """One line per check, and its fix under it."""
    lines = []
    width = max(len(finding.name) for finding in found)
    for finding in found:
        lines.append(f"{finding.grade:<4}  {finding.name:<{width}}  {finding.detail}")
        if finding.fix:
            lines.append(f"      {'':<{width}}  -> {finding.fix}")
    return "\n".join(lines)


def _replays(run: m.RunFailures) -> str:
    """The failed replays of a run, and the verdict on each."""
    lines = [f"{run.job}/{run.run}: replays that did not reproduce the recorded values"]
    for failure in run.failures:
        lines.append(f"  {failure.verdict}: {describe_failure(failure)}")
        lines += [
            f"    rank {rank.rank}: {rank.what} ({rank.count} in all; recorded {rank.expected}, "
            f"recomputed {rank.got})"
            for rank in failure.ranks[1:]
        ]
        lines.append(f"    {failure.reason}")
    return "\n".join(lines)


def _sessions(sessions: Sequence[m.SessionStatus]) -> str:
    if not sessions:
        return "no trainer is attached"
    rows = [
        (
            session.job,
            session.run,
            session.rank,
            session.world_size,
            session.pid,
            session.step if session.step >= 0 else "-",
            format_bytes(session.segment_bytes),
            format_age(session.attached_s),
            ", ".join(f"{name} {value:.4g}" for name, value in list(session.metrics.items())[:_SHOWN_METRICS])
            or "-",
        )
        for session in sessions
    ]
    header = ("job", "run", "rank", "world", "pid", "step", "memory", "attached", "metrics")
    return format_table(header, rows)


def _segments(segments: Sequence[m.SegmentStatus]) -> str:
    if not segments:
        return "no segments"
    rows = [
        (
            segment.job,
            segment.run,
            segment.rank,
            segment.generation,
            segment.kind,
            format_bytes(segment.total_bytes),
            f"{segment.num_slots} x {format_bytes(segment.slot_bytes)}",
            ", ".join(f"{count} {state}" for state, count in sorted(segment.states.items())),
            segment.newest_iteration if segment.newest_iteration >= 0 else "-",
            "live" if segment.owned else f"detached {format_age(segment.detached_s)}",
            "locked" if segment.mlocked else "not locked",
        )
        for segment in segments
    ]
    header = (
        "job",
        "run",
        "rank",
        "gen",
        "holds",
        "size",
        "slots",
        "states",
        "newest",
        "owner",
        "memory",
    )
    return format_table(header, rows)


def _durable(durable: m.DurableStatus) -> str:
    keeper = f"store keeper {durable.keeper_pid}" if durable.keeper_pid else "no store keeper now"
    title = (
        f"durable   {durable.url}, {keeper}; {format_bytes(durable.uploaded_bytes)} uploaded, "
        f"{format_bytes(durable.spared_bytes)} spared"
    )
    if not durable.ranks:
        return title
    rows = [
        (
            rank.job,
            rank.run,
            rank.rank,
            f"{rank.committed} ({rank.lag_iterations} ago)" if rank.committed >= 0 else "-",
            f"{rank.under_way}: {rank.stored} of {rank.of}" if rank.under_way >= 0 else "-",
            rank.stride,
            rank.skipped,
            rank.abandoned,
            format_bytes(rank.uploaded_bytes),
            format_age(rank.last_s) if rank.last_s else "-",
            rank.reason or "-",
        )
        for rank in durable.ranks
    ]
    header = (
        "job",
        "run",
        "rank",
        "committed",
        "under way",
        "stride",
        "skipped",
        "abandoned",
        "uploaded",
        "took",
        "last trouble",
    )
    return f"{title}\n{format_table(header, rows)}"


def _rank(rank: m.RankSnapshots, *, operators: bool, verify_iterations: int) -> str:
    title = (
        f"{rank.job}/{rank.run} rank {rank.rank} of {rank.world_size}: window {rank.window}, "
        f"{rank.num_operators} operators"
    )
    used = [slot for slot in rank.slots if slot.state != "free"]
    free = len(rank.slots) - len(used)
    header = (
        "iteration",
        "size",
        "anchored",
        "compute",
        "state",
        "replicated",
        "durable",
        "gen",
        "slot",
        "age",
        "digest",
    )
    lines = [title, format_table(header, [_slot(slot, rank) for slot in used])]
    if free:
        lines.append(f"and {free} free slots")
    lines.append(_recoverable(rank, verify_iterations))
    if rank.log:
        lines.append(_log(rank.log))
    if rank.parked:
        lines.append(_parked(rank.parked))
    if operators:
        lines += [line for slot in used for line in _anchored(slot, rank)]
    return "\n".join(lines)


def _slot(slot: m.SlotInfo, rank: m.RankSnapshots) -> tuple[object, ...]:
    count = int.from_bytes(slot.anchors, "little").bit_count()
    known = slot.state in ("sealed", "filled", "quarantined")
    age_s = (time.time_ns() - slot.filled_at_ns) / 1e9
    return (
        slot.iteration,
        format_bytes(slot.image_len),
        count if known else "-",
        rank.num_operators - count if known else "-",
        slot.state,
        "-",
        "-",
        slot.generation,
        slot.slot,
        format_age(max(0.0, age_s)) if slot.filled_at_ns else "-",
        f"{slot.digest_ns / 1e6:.3g} ms" if slot.digest_ns else "-",
    )


def _recoverable(rank: m.RankSnapshots, verify_iterations: int) -> str:
    start, end = rank.suffix
    if start < 0:
        return f"not recoverable yet: {rank.reason}"
    more = start - rank.before if rank.before >= 0 else 0
    if more > verify_iterations:
        more = 0
    replayed = end - start + more
    to_compare = f", {more} of them only to verify the loaded values" if more else ""
    return (
        f"recoverable: iteration {end}, from snapshots {start - more} to {end}, by replaying {replayed} "
        f"iteration{'' if replayed == 1 else 's'}{to_compare} ({rank.reason})"
    )


def _log(slots: Sequence[m.SlotInfo]) -> str:
    """The iterations in the boundary log."""
    logged = sorted({slot.iteration for slot in slots if slot.state == "sealed"})
    size = format_bytes(sum(slot.image_len for slot in slots if slot.state == "sealed"))
    span = f"iterations {', '.join(map(str, logged))}, {size}" if logged else "nothing yet"
    return f"boundary log: {span} ({len(slots)} slots)"


def _parked(slots: Sequence[m.SlotInfo]) -> str:
    """The iterations from which a restart resumes without replay."""
    sealed = [slot for slot in slots if slot.state == "sealed"]
    shown = ", ".join(
        f"iteration {slot.iteration} ({format_bytes(slot.image_len)}, "
        f"{format_age(max(0.0, (time.time_ns() - slot.filled_at_ns) / 1e9))} ago)"
        for slot in sealed
    )
    return f"parked: {shown or 'nothing'} ({len(slots)} slots)"


def _anchored(slot: m.SlotInfo, rank: m.RankSnapshots) -> list[str]:
    bits = int.from_bytes(slot.anchors, "little")
    names = [name for number, name in enumerate(rank.operators) if bits >> number & 1]
    lines = [f"iteration {slot.iteration} anchors {len(names)}:"]
    lines += [
        "    " + ", ".join(names[begin : begin + _OPERATORS_PER_LINE])
        for begin in range(0, len(names), _OPERATORS_PER_LINE)
    ]
    return lines


def _digest_rate(counters: dict[str, int]) -> str:
    size, took = counters.get("sealed_bytes", 0), counters.get("digest_ns", 0)
    if not took:
        return ""
    return f"; {counters.get('seal.sealed', 0)} sealed at {format_bytes(size * 10**9 // took)}/s"


def _when(time_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns / 1e9))
