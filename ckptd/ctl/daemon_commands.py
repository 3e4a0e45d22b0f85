"""The commands of `ckptctl` about this node's daemon: status, snapshots, events, parking, and admission."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

from ckptd.core.recovery.global_plan import VERIFY_ITERATIONS
from ckptd.core.recovery.quarantine import describe_failure
from ckptd.core.recovery.recovery_phases import describe_phases, phases_in_metrics
from ckptd.core.snapshot_policy import PolicyKind
from ckptd.ctl.command import (
    CONNECT_S,
    EXIT_FAILED,
    EXIT_NO_DAEMON,
    CommandError,
    CommandOutcome,
    Commands,
    add_verify_iterations,
    ask,
    connected,
    count_from,
    endpoint_of,
    records,
    show,
    which_run,
)
from ckptd.ctl.peers_command import check_known, choose_run
from ckptd.ctl.usage.watching import add_watch
from ckptd.launch import answers
from ckptd.saved import SavedIteration, saved_iterations
from ckptd.transport import messages as m
from ckptd.transport.access.local_trust import user_name
from ckptd.transport.wire import RefusedError
from ckptd.units import count_of, format_age, format_bytes, format_table

_BEYOND = 1 << 61  # above any event number: returns only the newest one
_FOLLOW_S = 0.5
_WAIT_STEP_S = 0.2
_SHOWN_METRICS = 6
_OPERATORS_PER_LINE = 8


def add_daemon_commands(commands: Commands) -> None:
    """Add `status` to `wait`."""
    text = "show the daemon, its memory, its trainers and its segments"
    add_watch(commands.add("status", _status, text))
    text = "list the slots of each rank and the iteration that can be recovered"
    snapshots = commands.add("snapshots", _snapshots, text, which_run(rank="only this rank"))
    snapshots.add_argument("--operators", action="store_true", help="list operators by name")
    add_verify_iterations(snapshots)
    add_watch(snapshots)
    text = "list the iterations that a run can resume at, for RecoveryOptions(resume_at=N)"
    iterations = commands.add("iterations", _iterations, text, which_run())
    add_verify_iterations(iterations)
    add_watch(iterations)
    events = commands.add("events", _events, "list the events of this node")
    events.add_argument("--follow", action="store_true", help="keep printing new events")
    events.add_argument(
        "--since", type=count_from(0), metavar="N", default=0, help="only events after number N"
    )
    events.add_argument(
        "--limit", type=count_from(1), metavar="N", default=1000, help="print at most N events (default 1000)"
    )
    text = "have attached trainers copy their state to memory now (park); a restart resumes from that copy"
    park = commands.add("park", _park, text, timeout_s=60.0)
    park.add_argument("job", metavar="JOB", nargs="?", help="only this job")
    park.add_argument("run", metavar="RUN", nargs="?", help="only this run of it")
    text = "allow nodes that are not members of a run to read its snapshots from this node"
    admit = _add_of_run(commands.add("admit", _admit, text))
    admit.add_argument("nodes", nargs="+", metavar="NODE", help="node ids whose keys are trusted")
    text = "free the snapshots of a run that has no live trainer"
    forget = _add_of_run(commands.add("forget", _forget, text))
    forget.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    text = "lift the quarantine of snapshots that no replay reproduced; the next start may use them"
    _add_of_run(commands.add("unquarantine", _unquarantine, text))
    commands.add("wait", _wait, "wait until the daemon answers, for at most --timeout", timeout_s=60.0)


def _add_of_run(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("job", metavar="JOB")
    parser.add_argument("run", metavar="RUN")
    return parser


# -- the commands ---------------------------------------------------------------------------------


def _status(args: argparse.Namespace) -> CommandOutcome:
    status = ask(args, m.GetStatus(), m.Status)
    return CommandOutcome(status, status_text(status))


def _snapshots(args: argparse.Namespace) -> CommandOutcome:
    rank = -1 if args.rank is None else args.rank
    with connected(args) as client:
        wanted = m.GetSnapshots(args.job or "", args.run or "", rank, args.operators)
        found = client.ask(wanted, m.Snapshots)
        if not found.ranks and not found.replays:
            check_known(client, args)
    text = snapshots_text(found, operators=args.operators, verify_iterations=args.verify_iterations)
    if rank >= 0 and not found.ranks and not found.replays:
        text = f"no snapshots of rank {rank} in memory"
    return CommandOutcome(found, text)


def _iterations(args: argparse.Namespace) -> CommandOutcome:
    with connected(args) as client:
        job, run = args.job, args.run
        if job is None or run is None:
            job, run = choose_run(client, args)
    found = saved_iterations(job, run, daemon=endpoint_of(args), verify_iterations=args.verify_iterations)
    if not found:
        with connected(args) as client:
            check_known(client, args)
    text = _iterations_text(found) if found else f"no iteration of {job}/{run} is saved on all ranks"
    return CommandOutcome(found, text, 0 if found else EXIT_FAILED)


def _events(args: argparse.Namespace) -> CommandOutcome:
    """One page; with ``--follow`` prints every event, and returns only through an exception."""
    with connected(args) as client:
        newest = client.ask(m.GetEvents(since=_BEYOND, limit=1), m.Events).last_seq
        since = max(args.since, newest - args.limit)
        page = client.ask(m.GetEvents(since=since, limit=args.limit), m.Events)
        if not args.follow:
            return CommandOutcome(page, _events_text(page.events))
        while True:
            for event in page.events:
                show(args, CommandOutcome(event, _events_text((event,))))
                since = event.seq
            sys.stdout.flush()
            if not page.events:
                since = min(since, page.last_seq)  # a restarted daemon counts anew
                time.sleep(_FOLLOW_S)
            page = client.ask(m.GetEvents(since=since, limit=args.limit), m.Events)


def _park(args: argparse.Namespace) -> CommandOutcome:
    wanted = m.Park(args.job or "", args.run or "", args.timeout)
    with connected(args) as client:
        found = client.ask(wanted, m.Parks, timeout_s=args.timeout + CONNECT_S)
        if not found.ranks:
            check_known(client, args)
    all_parked = found.ranks and all(rank.iteration >= 0 for rank in found.ranks)
    return CommandOutcome(found, parks_text(found), 0 if all_parked else EXIT_FAILED)


def _admit(args: argparse.Namespace) -> CommandOutcome:
    return _done(args, m.AdmitNodes(args.job, args.run, tuple(args.nodes)))


def _forget(args: argparse.Namespace) -> CommandOutcome:
    if not args.yes:
        if not sys.stdin.isatty():
            raise CommandError("stdin is not a terminal: pass --yes to free snapshots without confirmation")
        question = f"Free all snapshots of {args.job}/{args.run}? They cannot be recovered. [y/N] "
        if input(question).strip().lower() not in ("y", "yes"):
            raise CommandError("nothing was freed")
    return _done(args, m.Forget(args.job, args.run))


def _unquarantine(args: argparse.Namespace) -> CommandOutcome:
    return _done(args, m.Unquarantine(args.job, args.run))


def _done(args: argparse.Namespace, request: m.Request) -> CommandOutcome:
    with connected(args) as client:
        try:
            done = client.ask(request, m.Done)
        except RefusedError as error:
            if error.code == m.RefusalCode.NOT_FOUND:
                check_known(client, args)
            raise
    return CommandOutcome(done, done.message)


def _wait(args: argparse.Namespace) -> CommandOutcome:
    endpoint = endpoint_of(args)
    deadline = time.monotonic() + args.timeout
    while not answers(endpoint):
        if time.monotonic() > deadline:
            raise CommandError(f"no daemon on {endpoint} within {args.timeout:g} s", EXIT_NO_DAEMON)
        time.sleep(_WAIT_STEP_S)
    return CommandOutcome({"endpoint": endpoint}, f"a daemon answers on {endpoint}")


# -- status ---------------------------------------------------------------------------------------


def status_text(answer: m.Status) -> str:
    """Daemon, memory, trainers, segments, uploads to storage, counters."""
    used = answer.used_bytes / answer.quota_bytes if answer.quota_bytes else 0.0
    head = (
        f"ckptd {answer.version} on node {answer.node_id}, process {answer.pid}, "
        f"up {format_age(answer.uptime_s)}, {answer.endpoint}\n"
        f"memory    {format_bytes(answer.used_bytes)} of {format_bytes(answer.quota_bytes)} "
        f"({used:.0%}); promised {format_bytes(answer.promised_bytes)}; "
        f"{answer.segment_dir}: {format_bytes(answer.fs_available_bytes)} of "
        f"{format_bytes(answer.fs_total_bytes)} free\n"
        f"daemon    {format_bytes(answer.rss_anon_bytes)} of its own, "
        f"{format_bytes(answer.rss_file_bytes)} libraries, "
        f"{format_bytes(answer.rss_shmem_bytes)} segment pages mapped (shared)\n"
        f"sealing   {answer.seal_queue} waiting{_digest_rate(answer.counters)}"
    )
    parts = [_sessions(answer.sessions), *_phases(answer.sessions), *_losses(answer.sessions)]
    parts.append(_segments(answer.segments))
    if answer.users:
        parts.append(_users(answer.users))
    parts += _audits(answer.audits)
    if answer.durable is not None:
        parts.append(_durable(answer.durable))
    interesting = sorted((k, v) for k, v in answer.counters.items() if not k.startswith("event."))
    shown = ", ".join(f"{name} {value}" for name, value in interesting)
    return "\n\n".join([head, *parts, f"counters  {shown or 'none yet'}"])


def _users(users: Sequence[m.UserStatus]) -> str:
    return records(
        [
            {
                "user": user_name(one.user),
                "memory": format_bytes(one.used_bytes),
                "quota": format_bytes(one.quota_bytes) if one.quota_bytes else "none",
            }
            for one in users
        ]
    )


def _sessions(sessions: Sequence[m.SessionStatus]) -> str:
    if not sessions:
        return "no trainer is attached"
    return records(
        [
            {
                "job": session.job,
                "run": session.run,
                "rank": session.rank,
                "world": session.world_size,
                "pid": session.pid,
                "step": _number(session.step),
                "memory": format_bytes(session.segment_bytes),
                "attached": format_age(session.attached_s),
                "metrics": _metrics(session.metrics),
            }
            for session in sessions
        ]
    )


def _phases(sessions: Sequence[m.SessionStatus]) -> list[str]:
    """One line per trainer whose start is over: how long its phases took."""
    lines = []
    for session in sessions:
        if phases := phases_in_metrics(session.metrics):
            whole = sum(phases.values())
            who = f"{session.job}/{session.run} rank {session.rank}"
            lines.append(f"start     {who}: {whole:.3f} s: {describe_phases(phases)}")
    return ["\n".join(lines)] if lines else []


def _audits(audits: Sequence[m.RunAudit]) -> list[str]:
    """One line per run of which steps were audited."""
    lines = []
    for one in audits:
        newest = f", up to iteration {one.newest}" if one.newest >= 0 else ""
        failed = f", {one.failed} FAILED, up to iteration {one.newest_failed}" if one.failed else ""
        lines.append(
            f"audits    {one.job}/{one.run}: {one.passed} passed{newest}{failed}; the last one "
            f"{format_age(one.ago_s)} ago: {one.verdict}"
        )
    return ["\n".join(lines)] if lines else []


def _losses(sessions: Sequence[m.SessionStatus]) -> list[str]:
    """One line per trainer with partial snapshots that has lost updates of experts."""
    lines = []
    for session in sessions:
        if plt := session.metrics.get("lost_tokens_share", 0.0):
            tokens, experts = (int(session.metrics.get(n, 0)) for n in ("lost_tokens", "older_experts"))
            lines.append(
                f"lost      {session.job}/{session.run} rank {session.rank}: PLT {plt:.4%} in all "
                f"recoveries; by the last one updates by {tokens} tokens of {experts} experts of this rank"
            )
    return ["\n".join(lines)] if lines else []


def _metrics(metrics: Mapping[str, float]) -> str:
    shown = list(metrics.items())[:_SHOWN_METRICS]
    return ", ".join(f"{name} {value:.4g}" for name, value in shown) or "-"


def _segments(segments: Sequence[m.SegmentStatus]) -> str:
    if not segments:
        return "no segments"
    return records(
        [
            {
                "job": segment.job,
                "run": segment.run,
                "rank": segment.rank,
                "gen": segment.generation,
                "holds": segment.kind,
                "size": format_bytes(segment.total_bytes),
                "slots": f"{segment.num_slots} x {format_bytes(segment.slot_bytes)}",
                "states": ", ".join(f"{count} {state}" for state, count in sorted(segment.states.items())),
                "newest": _number(segment.newest_iteration),
                "owner": "live" if segment.owned else f"detached {format_age(segment.detached_s)}",
                "memory": "locked" if segment.mlocked else "not locked",
            }
            for segment in segments
        ]
    )


def _durable(durable: m.DurableStatus) -> str:
    keeper = f"store keeper {durable.keeper_pid}" if durable.keeper_pid else "no store keeper now"
    title = (
        f"durable   {durable.url}, {keeper}; {format_bytes(durable.uploaded_bytes)} uploaded, "
        f"{format_bytes(durable.spared_bytes)} there already"
    )
    if not durable.ranks:
        return title
    table = records(
        [
            {
                "job": rank.job,
                "run": rank.run,
                "rank": rank.rank,
                "committed": f"{rank.committed} ({rank.lag_iterations} ago)" if rank.committed >= 0 else "-",
                "under way": f"{rank.under_way}: {rank.stored} of {rank.of}" if rank.under_way >= 0 else "-",
                "stride": rank.stride,
                "skipped": rank.skipped,
                "abandoned": rank.abandoned,
                "uploaded": format_bytes(rank.uploaded_bytes),
                "took": format_age(rank.last_s) if rank.last_s else "-",
                "last trouble": rank.reason or "-",
            }
            for rank in durable.ranks
        ]
    )
    return f"{title}\n{table}"


def _digest_rate(counters: dict[str, int]) -> str:
    size, took = counters.get("sealed_bytes", 0), counters.get("digest_ns", 0)
    if not took:
        return ""
    return f"; {counters.get('seal.sealed', 0)} sealed at {format_bytes(size * 10**9 // took)}/s"


def _number(number: int) -> int | str:
    """The number; "-" for one below 0, which means none."""
    return number if number >= 0 else "-"


# -- snapshots ------------------------------------------------------------------------------------


def snapshots_text(
    answer: m.Snapshots, *, operators: bool, verify_iterations: int = VERIFY_ITERATIONS
) -> str:
    """One block per rank: its slots, then the iteration that can be recovered and its cost for
    a trainer with these ``verify_iterations``.
    """
    ranks = [_rank(rank, operators=operators, verify_iterations=verify_iterations) for rank in answer.ranks]
    replays = [_replays(run) for run in answer.replays]
    return "\n\n".join([*(ranks or ["no snapshots in memory"]), *replays])


def _rank(rank: m.RankSnapshots, *, operators: bool, verify_iterations: int) -> str:
    used = [slot for slot in rank.slots if slot.state != "free"]
    free = len(rank.slots) - len(used)
    title = (
        f"{rank.job}/{rank.run} rank {rank.rank} of {rank.world_size}: window {rank.window}, "
        f"{rank.num_operators} operators"
    )
    if rank.policy == _LOSSY:
        title += "; PARTIAL: a recovery loses updates of experts"
    lines = [title, format_table(_SLOT_HEADER, [_slot(slot, rank) for slot in used])]
    if free:
        lines.append(f"and {free} free slots")
    lines.append(_recoverable(rank, verify_iterations))
    if rank.plt:
        most = "; most by " + ", ".join(f"{one.expert} ({one.tokens:,.0f})" for one in rank.lost)
        lines.append(f"lost so far: PLT {rank.plt:.4%}{most if rank.lost else ''}")
    if rank.log:
        lines.append(_log(rank.log))
    if rank.parked:
        lines.append(_parked(rank.parked))
    if operators:
        lines += [line for slot in used for line in _anchored(slot, rank)]
    return "\n".join(lines)


_LOSSY = str(PolicyKind.PARTIAL)
_SLOT_HEADER = (
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


def _slot(slot: m.SlotInfo, rank: m.RankSnapshots) -> tuple[object, ...]:
    count = int.from_bytes(slot.anchors, "little").bit_count()
    known = slot.state in ("sealed", "filled", "quarantined")
    return (
        slot.iteration,
        format_bytes(slot.image_len),
        count if known else "-",
        rank.num_operators - count if known and rank.policy != _LOSSY else "-",
        f"{slot.state}, audited" if slot.audited else slot.state,
        "-",
        "-",
        slot.generation,
        slot.slot,
        _age(slot) if slot.filled_at_ns else "-",
        f"{slot.digest_ns / 1e6:.3g} ms" if slot.digest_ns else "-",
    )


def _age(slot: m.SlotInfo) -> str:
    return format_age(max(0.0, (time.time_ns() - slot.filled_at_ns) / 1e9))


def _recoverable(rank: m.RankSnapshots, verify_iterations: int) -> str:
    start, end = rank.suffix
    if start < 0:
        return f"not recoverable yet: {rank.reason}"
    if rank.policy == _LOSSY:
        return f"recoverable: iteration {end}, with experts from {start} on, without a replay ({rank.reason})"
    more = start - rank.before if rank.before >= 0 else 0
    if more > verify_iterations:
        more = 0
    to_compare = f", {more} of them only to verify the loaded values" if more else ""
    return (
        f"recoverable: iteration {end}, from snapshots {start - more} to {end}, by replaying "
        f"{count_of(end - start + more, 'iteration')}{to_compare} ({rank.reason})"
    )


def _log(slots: Sequence[m.SlotInfo]) -> str:
    """The iterations in the boundary log."""
    logged = sorted({slot.iteration for slot in slots if slot.state == "sealed"})
    size = format_bytes(sum(slot.image_len for slot in slots if slot.state == "sealed"))
    span = f"iterations {', '.join(map(str, logged))}, {size}" if logged else "nothing yet"
    return f"boundary log: {span} ({len(slots)} slots)"


def _parked(slots: Sequence[m.SlotInfo]) -> str:
    """The iterations from which a restart resumes without replay."""
    shown = ", ".join(
        f"iteration {slot.iteration} ({format_bytes(slot.image_len)}, {_age(slot)} ago)"
        for slot in slots
        if slot.state == "sealed"
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


# -- other texts ----------------------------------------------------------------------------------


def _iterations_text(found: Sequence[SavedIteration]) -> str:
    return records(
        [
            {
                "iteration": str(each.iteration),
                "replayed from": str(each.replay_from),
                "in storage": "yes" if each.durable else "no",
            }
            for each in found
        ]
    )


def _events_text(found: Sequence[m.EventInfo]) -> str:
    if not found:
        return "no events"
    return "\n".join(
        f"{event.seq:>6}  {_when(event.time_ns)}  {event.level:<7}  {event.kind:<16}  {event.message}"
        for event in found
    )


def _when(time_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns / 1e9))


def parks_text(answer: m.Parks) -> str:
    """One line per trainer that received the request."""
    if not answer.ranks:
        return "no attached trainer can park"
    return "\n".join(
        f"{rank.job}/{rank.run} rank {rank.rank}: "
        + (f"parked at iteration {rank.iteration}" if rank.iteration >= 0 else f"not parked: {rank.reason}")
        for rank in answer.ranks
    )
