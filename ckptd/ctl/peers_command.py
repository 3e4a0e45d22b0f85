"""`ckptctl peers`, `whatif` and `drill`: replicas on other nodes, and recoveries from them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from ckptd.core.export_plan import ranges
from ckptd.core.recovery.global_plan import NoRecovery, RecoveryPlan
from ckptd.core.recovery.held import STORE_NODE, RunHoldings
from ckptd.core.recovery.localized_plan import LocalizedPlan, NotLocalized
from ckptd.core.recovery.whatif import RankOutcome, WhatIf, what_if
from ckptd.ctl.command import (
    EXIT_FAILED,
    CommandError,
    CommandOutcome,
    Commands,
    add_lose,
    add_verify_iterations,
    ask,
    connected,
    records,
    unknown_run,
    which_run,
)
from ckptd.ctl.usage.watching import add_watch
from ckptd.errors import RemoteProtocolError
from ckptd.holdings import held_from_segments, newest_history
from ckptd.transport import messages as m
from ckptd.transport.wire import ControlClient, RefusedError
from ckptd.units import format_bytes

_STORE_S = 900.0  # stores can be slow; the daemon has its own limit for them
_MAX_RANKS = 64


def add_peers_commands(commands: Commands) -> None:
    """Add `peers`, `whatif` and `drill`."""
    add_watch(commands.add("peers", _peers, "list the other nodes, the replicas and their lag"))
    text = "predict a recovery after the loss of nodes: sources, replay, lost iterations"
    lose = commands.add("whatif", _what_if, text, which_run())
    add_lose(lose)
    add_verify_iterations(lose)
    text = "rehearse the recovery of --rank from other nodes"
    which = which_run(rank="rank to rehearse (required)")
    commands.add("drill", _drill, text, which, timeout_s=600.0)


def _peers(args: argparse.Namespace) -> CommandOutcome:
    found = ask(args, m.GetPeers(), m.Peers)
    return CommandOutcome(found, _peers_text(found))


def _what_if(args: argparse.Namespace) -> CommandOutcome:
    with connected(args) as client:
        found = ask_what_if(client, args, args.verify_iterations)
    return CommandOutcome(what_if_json(found), what_if_text(found), 0 if found.recoverable else EXIT_FAILED)


def _drill(args: argparse.Namespace) -> CommandOutcome:
    """Rehearse the recovery of ``--rank``; blocks until the transfer has ended."""
    if args.rank is None:
        raise CommandError("pass --rank: the rank whose recovery is rehearsed")
    with connected(args) as client:
        job, run = choose_run(client, args)
        report = client.ask(m.Drill(job, run, args.rank), m.DrillReport, timeout_s=args.timeout)
    return CommandOutcome(report, _drill_text(report), 0 if report.recoverable else EXIT_FAILED)


def choose_run(client: ControlClient, args: argparse.Namespace) -> tuple[str, str]:
    """The job and run that the arguments name, or the only ones that this node knows.

    Raises:
        RefusedError: this node knows no matching run, or several.
    """
    known = known_runs(client)
    fits = [each for each in known if _fits(args, each)]
    if len(fits) == 1:
        return fits[0]
    if not known and args.job is None and args.run is None:
        raise RefusedError("not_found", "this node knows no run: no trainer has attached to its daemon yet")
    if fits or (args.job is None and args.run is None):
        named = ", ".join(f"{job}/{run}" for job, run in known)
        raise RefusedError("not_found", f"several runs match; known runs: {named}", "pass --job and --run")
    raise unknown_run(args.job, args.run, known)


def check_known(client: ControlClient, args: argparse.Namespace) -> None:
    """Check the job and run that the arguments name, if any.

    Raises:
        RefusedError: this node knows no such run.
    """
    known = known_runs(client)
    if (args.job or args.run) and not any(_fits(args, each) for each in known):
        raise unknown_run(args.job, args.run, known)


def known_runs(client: ControlClient) -> list[tuple[str, str]]:
    """The jobs and runs with a trainer, a segment or a replica on this node."""
    peers, status = client.ask(m.GetPeers(), m.Peers), client.ask(m.GetStatus(), m.Status)
    return sorted(
        {(s.job, s.run) for s in status.sessions}
        | {(s.job, s.run) for s in status.segments}
        | {(r.job, r.run) for r in peers.ranks}
        | {(r.job, r.run) for r in peers.replicas}
    )


def _fits(args: argparse.Namespace, known: tuple[str, str]) -> bool:
    return args.job in (None, known[0]) and args.run in (None, known[1])


def ask_what_if(client: ControlClient, args: argparse.Namespace, verify_iterations: int) -> WhatIf:
    """Predict the recovery after the loss of the nodes in ``--lose``, for trainers with these
    ``verify_iterations``.

    Raises:
        CommandError: a selector matches no node.
        RefusedError: the arguments match no run, or no node holds a snapshot of it.
    """
    job, run = choose_run(client, args)
    seen = client.ask(m.SeeRun(job, run), m.RunSeen, timeout_s=max(args.timeout, 10.0))
    try:
        held = newest_history(seen)
    except RemoteProtocolError as error:
        raise RefusedError("internal", str(error)) from error
    homes = {rank: member.card.node for member in seen.members for rank in member.ranks}
    if not held.world_size:
        raise RefusedError("not_found", f"no reachable node holds a snapshot of {job}/{run}")
    if not homes:  # no trainer reported its members: the primaries show the homes
        homes = {h.rank: h.node for h in held.snapshots if h.own}
    labels = {member.card.node: member.card.labels for member in seen.members}

    def predict(known: RunHoldings) -> WhatIf:
        try:
            return what_if(known, held.world_size, homes, labels, args.lose.split(","))
        except ValueError as error:
            raise CommandError(str(error)) from error

    try:
        found = predict(RunHoldings(held.snapshots, held.parked, held.logs, held.history.begun))
        newest = max((h.durable for h in seen.holdings), default=-1)
        alone = isinstance(found.localized, LocalizedPlan)  # which goes on where the others are
        suffices = alone or (isinstance(found.plan, RecoveryPlan) and found.plan.end >= newest)
        if suffices or client.ask(m.GetStatus(), m.Status).durable is None:
            return found
        # Memory does not suffice, or is older than what is durable: look at object storage, too.
        seen = client.ask(m.SeeRun(job, run, (), True, every_rank=True), m.RunSeen, timeout_s=_STORE_S)
        durable = newest_history(seen)
        stored = predict(RunHoldings(durable.snapshots, begun=durable.history.begun))
        return stored if stored.recoverable else found
    except RemoteProtocolError as error:
        raise RefusedError("internal", str(error)) from error


def ask_whereabouts(client: ControlClient, job: str, run: str, iteration: int) -> dict[int, tuple[str, ...]]:
    """By rank, the nodes that hold its snapshot of this iteration; if there are none, the node
    on which the rank trains.
    """
    seen = client.ask(m.SeeRun(job, run), m.RunSeen)
    found: dict[int, set[str]] = {}
    for node in seen.holdings:
        for held in held_from_segments(node.node, node.segments):
            if any(record.iteration == iteration for record in held.records):
                found.setdefault(held.rank, set()).add(node.node)
    homes = {rank: (member.card.node,) for member in seen.members for rank in member.ranks}
    return homes | {rank: tuple(sorted(nodes)) for rank, nodes in found.items()}


def what_if_json(answer: WhatIf) -> dict[str, Any]:
    """A `WhatIf` as plain values.

    ``together`` is the global recovery; ``localized`` is the localized recovery (absent for a job
    without boundary logs). ``recovery`` names the one that applies, or is "none"; ``reason`` and
    ``ranks`` describe it. ``start`` and ``end`` belong to the global recovery. Iterations before
    ``needed`` are replayed only for verification.
    """
    plan, localized = answer.plan, answer.localized
    is_localized = isinstance(localized, LocalizedPlan)
    found = {
        "lost_nodes": answer.lost_nodes,
        "recoverable": answer.recoverable,
        "recovery": "localized" if is_localized else "together" if answer.recoverable else "none",
        "reason": answer.reason,
        "ranks": [dataclasses.asdict(rank) for rank in answer.ranks],
        "together": {"reason": plan.reason},
    }
    if isinstance(plan, RecoveryPlan):
        found |= {"start": plan.start, "end": plan.end, "needed": plan.needed}
    if localized is not None:
        described: dict[str, Any] = {"reason": localized.reason}
        if isinstance(localized, LocalizedPlan):
            described |= {"resume": localized.resume, "together": localized.together}
        found["localized"] = described
    return found


def _peers_text(answer: m.Peers) -> str:
    """The peers, the replication of the local ranks, and the replicas on this node."""
    listen = answer.endpoint or "no peer listener (CKPTD_PEER_LISTEN is not set): snapshots stay on this node"
    head = f"node {answer.node}: {listen}"
    if answer.public_key:
        head += f", key {answer.public_key}"
    if answer.encryption:
        head += f"\nencryption of snapshots sent to peers: {answer.encryption}"
    peers = [
        {
            "peer": p.node,
            "endpoint": p.endpoint,
            "labels": ",".join(f"{k}={v}" for k, v in sorted(p.labels.items())) or "-",
            "alive": "NO" if not p.alive else "yes" if p.answered else "not yet",
            "heard": f"{p.silent_s:.1f} s" if p.answered else "never",
            "free": format_bytes(p.free_bytes),
        }
        for p in answer.peers
    ]
    targets = [
        {
            "replicates": _whose(r),
            "to": t.node,
            "state": t.phase if t.alive else "lost",
            "held": str(t.held),
            "current to": _iteration(t.current_up_to),
            "lag": f"{t.lag_iterations} ({format_bytes(t.lag_bytes)})",
            "floor": _iteration(r.floor),
            "last error": t.reason or "-",
        }
        for r in answer.ranks
        for t in r.targets
    ]
    replicas = [
        {
            "holds": _whose(r),
            "size": format_bytes(r.total_bytes),
            "snapshots": str(r.sealed),
            "newest": _iteration(r.newest_iteration),
        }
        for r in answer.replicas
    ]
    compared = [
        {
            "compares": f"{c.job}/{c.run} ranks {ranges(c.ranks)}",
            "up to": _iteration(c.iteration),
            "differ": _differing(c),
            "diverged": ", ".join(c.diverged) or "-",
        }
        for c in answer.compared
    ]
    parts = [head, records(peers) if peers else "no peers known: trainers report them when they attach"]
    parts += [records(rows) for rows in (targets, replicas, compared) if rows]
    if answer.counters:
        moved = ", ".join(f"{name} {value}" for name, value in sorted(answer.counters.items()))
        parts.append(f"counters  {moved}")
    return "\n\n".join(parts)


def what_if_text(answer: WhatIf) -> str:
    """The plan, and the recovery of each rank."""
    lost, localized = ", ".join(answer.lost_nodes), answer.localized
    is_localized = isinstance(localized, LocalizedPlan)
    head = f"without {lost}: " + ("" if answer.recoverable else "NOT RECOVERABLE: ")
    if any(STORE_NODE in rank.sources for rank in answer.ranks):
        head += "from object storage, because memory does not suffice: "
    if is_localized:
        head += "localized recovery, if the surviving ranks park: "
    lines = [head + answer.reason + ("" if is_localized else _compared(answer.plan))]
    if isinstance(localized, NotLocalized):
        lines.append(f"all ranks recover (global recovery), because {localized.reason}")
    if answer.ranks:
        rows = [_outcome_row(rank, is_localized) for rank in answer.ranks[:_MAX_RANKS]]
        lines += ["", records(rows)]
    if len(answer.ranks) > _MAX_RANKS:
        lines.append(f"… and {len(answer.ranks) - _MAX_RANKS} more ranks (--json has all)")
    return "\n".join(lines)


def _compared(plan: RecoveryPlan | NoRecovery) -> str:
    if isinstance(plan, NoRecovery):
        return ""
    if plan.start < plan.needed:
        return f"; {plan.needed - plan.start} of the replayed iterations only verify the loaded values"
    return f"; no additional iteration verifies the loaded values: {plan.unverified}"


def _outcome_row(rank: RankOutcome, is_localized: bool) -> Mapping[str, str]:
    row = {"rank": str(rank.rank), "home": rank.home + (" (lost)" if rank.home_lost else "")}
    if is_localized:
        row["how"] = f"copies rank {rank.copies}" if rank.copies >= 0 else rank.kind or "-"
    row["recovered from"] = ", ".join("storage" if s == STORE_NODE else s for s in rank.sources) or "-"
    if is_localized:
        fed = [f"rank {f.rank} {f.first}-{f.end - 1} ({', '.join(f.sources)})" for f in rank.fed_by]
        row["fed by"] = "; ".join(fed) or "-"
    return row | {
        "replayed": str(rank.replayed),
        "lost": str(rank.lost_iterations),
        "moved": format_bytes(rank.moved_bytes),
    }


def _drill_text(answer: m.DrillReport) -> str:
    """The result of the rehearsal."""
    if not answer.recoverable:
        return f"NOT RECOVERABLE from other nodes: {answer.reason}"
    rate = f", {answer.bytes / answer.seconds / 1e9:.2f} GB/s" if answer.seconds else ""
    sources = ", ".join(f"{format_bytes(n)} from {node}" for node, n in answer.by_node.items())
    compared = (
        f"{format_bytes(answer.compared)} compared with the primary, byte for byte"
        if answer.compared
        else "verified against digests (the primary is not on this node)"
    )
    return (
        f"iterations {answer.start} to {answer.end}: {format_bytes(answer.bytes)} in "
        f"{answer.seconds:.2f} s{rate} ({sources}); {compared}"
    )


def _whose(of: m.ReplicationStatus | m.HostedReplica) -> str:
    """Job, run and rank for a table; "log" marks a boundary log."""
    return f"{of.job}/{of.run} rank {of.rank}" + (" log" if of.kind == "log" else "")


def _differing(of: m.ComparedRanks) -> str:
    """The tensors that ranks do not hold alike."""
    more = of.num_differing - len(of.differing)
    return ", ".join(of.differing) + (f" and {more} more" if more else "") or "-"


def _iteration(number: int) -> str:
    return "-" if number < 0 else str(number)
