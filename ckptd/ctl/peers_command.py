"""`ckptctl peers`, `whatif` and `drill`: where snapshots have their second home, and what it is worth."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ckptd.core.recovery.global_plan import NoRecovery, RecoveryPlan
from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.recovery.localized_plan import LocalizedPlan, NotLocalized
from ckptd.core.recovery.whatif import RankOutcome, WhatIf, what_if
from ckptd.errors import RemoteProtocolError
from ckptd.holdings import held_from_segments, newest_history
from ckptd.transport.control import messages as m
from ckptd.transport.control.wire import ControlClient, RefusedError
from ckptd.units import format_bytes, format_table

__all__ = [
    "as_json",
    "ask_what_if",
    "ask_whereabouts",
    "choose_run",
    "render_drill",
    "render_peers",
    "render_what_if",
    "run_drill",
]

_STORE_S = 900.0  # a store may take its time; the daemon gives up on it by itself
_MAX_RANKS = 64


def choose_run(client: ControlClient, args: argparse.Namespace) -> tuple[str, str]:
    """The job and run that are meant: as given, or the only ones that this node knows.

    Raises:
        RefusedError: none is known, or several are and none is named.
    """
    peers = client.ask(m.GetPeers(), m.Peers)
    segments = client.ask(m.GetStatus(), m.Status).segments
    known = sorted(
        {(r.job, r.run) for r in peers.ranks}
        | {(r.job, r.run) for r in peers.replicas}
        | {(s.job, s.run) for s in segments}
    )
    fits = [k for k in known if args.job in (None, k[0]) and args.run in (None, k[1])]
    if len(fits) == 1:
        return fits[0]
    named = ", ".join(f"{job}/{run}" for job, run in known) or "none"
    text = "no such run is known here" if not fits else "several runs fit"
    raise RefusedError("not_found", f"{text}; known are {named}", "pass --job and --run")


def ask_what_if(client: ControlClient, args: argparse.Namespace, verify_iterations: int) -> WhatIf:
    """What losing the nodes that ``--lose`` names would mean now to trainers with these
    ``verify_iterations``.

    Raises:
        ValueError: a selector fits no node.
        RefusedError: no run is meant, or nothing is held of it.
    """
    job, run = choose_run(client, args)
    seen = client.ask(m.SeeRun(job, run), m.RunSeen, timeout_s=max(args.timeout, 10.0))
    try:
        held = newest_history(seen)
    except RemoteProtocolError as error:
        raise RefusedError("internal", str(error)) from error
    homes = {rank: member.card.node for member in seen.members for rank in member.ranks}
    if not held.world_size:
        raise RefusedError("not_found", f"nothing is held of {job}/{run}")
    if not homes:  # no trainer has told this daemon who takes part: its own ranks live here
        homes = {h.rank: h.node for h in held.snapshots if h.own}
    labels = {member.card.node: member.card.labels for member in seen.members}
    lose = args.lose.split(",")
    try:
        found = what_if(
            held.snapshots,
            held.world_size,
            homes,
            labels,
            lose,
            logs=held.logs,
            parked=held.parked,
            begun=held.history.begun,
        )
        if found.recoverable or client.ask(m.GetStatus(), m.Status).durable is None:
            return found
        # Memory would not do; what is durable may.
        seen = client.ask(m.SeeRun(job, run, (), True), m.RunSeen, timeout_s=_STORE_S)
        durable = newest_history(seen)
        stored = what_if(
            durable.snapshots,
            held.world_size,
            homes,
            labels,
            lose,
            begun=durable.history.begun,
        )
        return stored if stored.recoverable else found
    except RemoteProtocolError as error:
        raise RefusedError("internal", str(error)) from error


def ask_whereabouts(
    client: ControlClient, job: str, run: str, iteration: int
) -> dict[int, tuple[str, ...]]:
    """By rank, the nodes that hold its snapshot of this iteration; of a rank of which none does,
    where it trains.
    """
    seen = client.ask(m.SeeRun(job, run), m.RunSeen)
    found: dict[int, set[str]] = {}
    for told in seen.holdings:
        for held in held_from_segments(told.node, told.segments):
            if any(record.iteration == iteration for record in held.records):
                found.setdefault(held.rank, set()).add(told.node)
    homes = {rank: (member.card.node,) for member in seen.members for rank in member.ranks}
    return homes | {rank: tuple(sorted(nodes)) for rank, nodes in found.items()}


def run_drill(client: ControlClient, args: argparse.Namespace) -> m.DrillReport:
    """Rehearse the recovery of ``--rank``; takes as long as the transfer does."""
    job, run = choose_run(client, args)
    return client.ask(m.Drill(job, run, args.rank), m.DrillReport, timeout_s=args.timeout)


def as_json(answer: WhatIf) -> dict[str, Any]:
    """A `WhatIf` as plain values.

    ``together`` is the recovery of all ranks together, ``localized`` the other one (absent for a
    job without boundary logs); ``recovery`` says which of them counts, or is "none". ``reason`` and
    ``ranks`` are of that one; ``start`` and ``end`` of the recovery together. What is replayed
    before ``needed`` is only compared.
    """
    plan, localized = answer.plan, answer.localized
    apart = isinstance(localized, LocalizedPlan)
    found = {
        "lost_nodes": answer.lost_nodes,
        "recoverable": answer.recoverable,
        "recovery": "localized" if apart else "together" if answer.recoverable else "none",
        "reason": answer.reason,
        "ranks": [dataclasses.asdict(rank) for rank in answer.ranks],
        "together": {"reason": plan.reason},
    }
    if isinstance(plan, RecoveryPlan):
        found |= {"start": plan.start, "end": plan.end, "needed": plan.needed}
    if localized is not None:
        told: dict[str, Any] = {"reason": localized.reason}
        if isinstance(localized, LocalizedPlan):
            told |= {"resume": localized.resume, "together": localized.together}
        found["localized"] = told
    return found


def render_peers(answer: m.Peers) -> str:
    """Neighbours, replication of the local ranks, replicas that lie here."""
    listen = answer.endpoint or "no peer listener (CKPTD_PEER_LISTEN): snapshots stay on this node"
    peers = [
        [
            p.node,
            p.endpoint,
            ",".join(f"{k}={v}" for k, v in sorted(p.labels.items())) or "-",
            "yes" if p.alive else "NO",
            f"{p.silent_s:.1f} s",
            format_bytes(p.free_bytes),
        ]
        for p in answer.peers
    ]
    targets = [
        [
            _whose(r),
            t.node,
            t.phase if t.alive else "lost",
            str(t.held),
            _iteration(t.current_up_to),
            f"{t.lag_iterations} ({format_bytes(t.lag_bytes)})",
            _iteration(r.floor),
            t.reason or "-",
        ]
        for r in answer.ranks
        for t in r.targets
    ]
    replicas = [
        [
            _whose(r),
            format_bytes(r.total_bytes),
            str(r.sealed),
            _iteration(r.newest_iteration),
        ]
        for r in answer.replicas
    ]
    moved = ", ".join(f"{name} {value}" for name, value in sorted(answer.counters.items()))
    parts = [f"node {answer.node}: {listen}"]
    if answer.public_key:
        parts[0] += f", key {answer.public_key}"
    if answer.encryption:
        parts[0] += f"\nsnapshots travel to peers in {answer.encryption}"
    parts.append(
        format_table(["peer", "endpoint", "labels", "alive", "heard", "free"], peers)
        if peers
        else "no peers known: they are learned when trainers attach"
    )
    if targets:
        head = ["replicates", "to", "state", "held", "current to", "lag", "floor", "last trouble"]
        parts.append(format_table(head, targets))
    if replicas:
        parts.append(format_table(["holds", "size", "snapshots", "newest"], replicas))
    if moved:
        parts.append(f"counters  {moved}")
    return "\n\n".join(parts)


def render_what_if(answer: WhatIf) -> str:
    """The plan, and what each rank would go through."""
    lost, localized = ", ".join(answer.lost_nodes), answer.localized
    apart = isinstance(localized, LocalizedPlan)
    head = f"without {lost}: " + ("" if answer.recoverable else "NOT RECOVERABLE: ")
    if any(STORE_NODE in rank.sources for rank in answer.ranks):
        head += "memory does not have it, storage has: "
    if apart:
        head += "localized recovery, if those who are left park: "
    lines = [head + answer.reason + ("" if apart else _compared(answer.plan))]
    if isinstance(localized, NotLocalized):
        lines.append(f"all ranks together, because {localized.reason}")
    head_row = ["rank", "home", "recovered from", "replayed", "lost", "moved"]
    if apart:
        head_row[2:3] = ["how", "recovered from", "fed by"]
    rows = [_outcome_row(r, apart) for r in answer.ranks[:_MAX_RANKS]]
    if rows:
        lines += ["", format_table(head_row, rows)]
    if len(answer.ranks) > _MAX_RANKS:
        lines.append(f"… and {len(answer.ranks) - _MAX_RANKS} more ranks (--json has all)")
    return "\n".join(lines)


def _compared(plan: RecoveryPlan | NoRecovery) -> str:
    if isinstance(plan, NoRecovery):
        return ""
    if plan.start < plan.needed:
        return f"; {plan.needed - plan.start} of the replayed iterations only to compare what is loaded"
    return f"; nothing more is replayed to compare what is loaded: {plan.unverified}"


def _outcome_row(rank: RankOutcome, apart: bool) -> list[str]:
    how = f"copies rank {rank.copies}" if rank.copies >= 0 else rank.kind or "-"
    fed = [f"rank {f.rank} {f.first}-{f.end - 1} ({', '.join(f.sources)})" for f in rank.fed_by]
    return [
        str(rank.rank),
        rank.home + (" (lost)" if rank.home_lost else ""),
        *([how] if apart else []),
        ", ".join("storage" if s == STORE_NODE else s for s in rank.sources) or "-",
        *(["; ".join(fed) or "-"] if apart else []),
        str(rank.replayed),
        str(rank.lost_iterations),
        format_bytes(rank.moved_bytes),
    ]


def render_drill(answer: m.DrillReport) -> str:
    """How the rehearsal went."""
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
    """For a table; of a boundary log it is said."""
    return f"{of.job}/{of.run} rank {of.rank}" + (" log" if of.kind == "log" else "")


def _iteration(number: int) -> str:
    return "-" if number < 0 else str(number)
