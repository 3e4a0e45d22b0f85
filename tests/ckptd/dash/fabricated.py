"""Answers of a daemon, made up for the tests of the view: a healthy job of any size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from ckptd.core.recovery.recovery_phases import RecoveryPhase, describe_phases
from ckptd.dash.dash_history import RunPace
from ckptd.dash.dash_view import Answers, placement_of
from ckptd.transport import messages as m

NOW_S = 1_790_000_000.0
NEWEST = 120
WINDOW = 3
NAME = ("moe", "run-1")
EVENT = m.EventInfo(1, int(NOW_S * 1e9), "info", "attached", "process 1 is moe/run-1 rank 0", *NAME, 0)


def slot(index: int, iteration: int, state: str = "sealed", anchors: bytes = b"\x01") -> m.SlotInfo:
    filled = int((NOW_S - (NEWEST - iteration) * 0.5) * 1e9)
    return m.SlotInfo(
        0, index, state, iteration, iteration - 1, iteration, 1 << 20, 0, filled, filled, 1, 7, anchors
    )


def ring(rank: int, world_size: int) -> m.RankSnapshots:
    """Four snapshots, the newest of which end a complete suffix; each anchors one operator of three."""
    slots = [slot(i, NEWEST - i, anchors=bytes([1 << (NEWEST - i) % WINDOW])) for i in range(4)]
    slots.append(slot(4, -1, "free"))
    suffix = (NEWEST - WINDOW + 1, NEWEST)
    return m.RankSnapshots(*NAME, rank, world_size, WINDOW, WINDOW, tuple(slots), suffix, "complete")


def target(node: str = "n1", up_to: int = NEWEST - 1, *, alive: bool = True) -> m.TargetStatus:
    return m.TargetStatus(node, "current", alive, True, 3, up_to, NEWEST - up_to, 0, "")


def session(rank: int, world_size: int, **metrics: float) -> m.SessionStatus:
    return m.SessionStatus(
        *NAME, rank, world_size, 1000 + rank, NEWEST, metrics, 1, 1 << 20, 0, 60.0, "pidfd"
    )


def durable(rank: int, committed: int = NEWEST - 20) -> m.DurableRank:
    return m.DurableRank(*NAME, rank, committed, NEWEST - committed, -1, 0, 3, 20, 0, 0, 1 << 20, 1.5, "")


def status(**changes: Any) -> m.Status:
    texts = ("0.4.0", "n0", "boot", 1, 3600.0, "ipc:///x", "/run", "/dev/shm/x")
    told = m.Status(*texts, 1 << 30, 1 << 28, 0, 1 << 30, 1 << 30, 1, 1, 1, 0, (), (), {})
    return msgspec.structs.replace(told, **changes)


def peers(**changes: Any) -> m.Peers:
    n1 = m.PeerStatus("n1", "tcp://10.0.0.2:1", {"rack": "B"}, True, 0.2, 1 << 30)
    return msgspec.structs.replace(m.Peers("n0", "tcp://10.0.0.1:1", "", (n1,), (), (), {}), **changes)


def hosted(rank: int, newest: int) -> m.HostedReplica:
    return m.HostedReplica(f"r{rank}", *NAME, rank, 1 << 20, 3, newest)


def answers(world_size: int = 1) -> Answers:
    """All ranks are on this node, with a replica each and a store."""
    ranks = range(world_size)
    replication = tuple(m.ReplicationStatus(*NAME, r, 1, NEWEST - 1, (target(),)) for r in ranks)
    store = m.DurableStatus("s3://bucket/x", 9, 0, 0, tuple(durable(r) for r in ranks))
    stalls = tuple((NOW_S - 120 + i, 0.2 + (i % 7) / 10, 0.001) for i in range(120))
    return Answers(
        at_s=NOW_S,
        status=status(sessions=tuple(session(r, world_size) for r in ranks), durable=store),
        snapshots=m.Snapshots(tuple(ring(r, world_size) for r in ranks)),
        peers=peers(ranks=replication),
        events=(EVENT,),
        paces={NAME: RunPace(0.5, stalls)},
    )


def recovery(rank: int = 0, at_s: float = NOW_S) -> m.EventInfo:
    phases = {phase: 0.25 * (number + 1) for number, phase in enumerate(list(RecoveryPhase)[1:])}
    text = f"the first new iteration is 61: 7 s from detected to first_new_step: {describe_phases(phases)}"
    return m.EventInfo(2, int(at_s * 1e9), "info", "recovery_phases", text, *NAME, rank)


def elastic(layers: int = 4, experts: int = 8) -> m.Elastic:
    """Expert 0 of each layer is on one node only, all others are on two of three."""
    loads = tuple(tuple(10 * (1 + e) for e in range(experts)) for _ in range(layers))
    holds = (tuple(range(experts)), tuple(range(1, experts)), ())
    nodes = tuple(m.ElasticNode(f"n{n}", experts, holds=(held,) * layers) for n, held in enumerate(holds))
    return m.Elastic(loads, nodes, step=100, threshold=2)


def everything(world_size: int) -> Answers:
    """A job with all that the page shows: trouble of some ranks, recoveries, experts, a lost peer, events."""
    found = answers(world_size)
    behind = tuple(
        msgspec.structs.replace(r, targets=(target(up_to=NEWEST - 12 * (1 + r.rank % 4)),))
        if r.rank % 9 == 4
        else r
        for r in found.peers.ranks
    )
    lost = m.PeerStatus("n2", "tcp://10.0.0.3:1", {}, False, 42.0, 0)
    events = [recovery(rank, NOW_S - 60 + rank) for rank in range(min(4, world_size))]
    warning = m.EventInfo(3, int(NOW_S * 1e9), "warning", "peer_lost", "n2 has not answered for 5 s")
    return replace(
        found,
        peers=msgspec.structs.replace(found.peers, ranks=behind, peers=(*found.peers.peers, lost)),
        events=(EVENT, *events, warning),
        recoveries=events,
        placements={NAME: placement_of(elastic())},
    )
