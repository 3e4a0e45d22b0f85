"""How long a large cluster takes to decide: who holds whose replicas, and where everybody resumes (16,384 ranks).

Placement: 2,048 nodes of 8 ranks, in racks, two replicas each; regular, and with three kinds of irregularity. Recovery: holdings
of every rank on three nodes (its own and two replicas), a whole rack lost. For comparison, in the same run: decoding these
holdings from msgpack, which no plan can do without.
"""

from __future__ import annotations

import random

from bench.common import clock_ms, emit, median, parser
from ckptd.memory.ring import SlotRecord, SlotState
from ckptd.placement import NodeFacts, Placement, RankFacts, plan_placement
from ckptd.recovery.held import HeldRecords, from_wire, to_wire
from ckptd.recovery.plan import RecoveryPlan, plan_recovery

__all__ = ["main"]

NODES, RANKS_PER_NODE, NODES_PER_RACK = 2_048, 8, 16
WINDOW, COPIES = 6, 3
RING_BYTES = 20 << 30
CLUSTERS = ("regular", "tight", "mixed_racks", "labels_missing")


def cluster(kind: str, *, seed: int) -> tuple[list[NodeFacts], list[RankFacts]]:
    """Nodes and ranks; ``tight``: capacities within 5 % of what is needed, different from node to node."""
    rng = random.Random(seed)
    needed = 2 * RANKS_PER_NODE * RING_BYTES
    nodes = []
    rack, left = 0, 0
    for number in range(NODES):
        if left == 0:
            rack += 1
            left = rng.randint(1, 40) if kind == "mixed_racks" else NODES_PER_RACK
        left -= 1
        labels = {"rack": f"rack-{rack}"}
        if kind == "labels_missing" and rng.random() < 0.3:
            labels = {}
        capacity = int(needed * rng.uniform(0.97, 1.08)) if kind == "tight" else None
        nodes.append(NodeFacts(f"node-{number:04}", labels, capacity))
    ranks = [
        RankFacts(rank, nodes[rank // RANKS_PER_NODE].node, RING_BYTES)
        for rank in range(NODES * RANKS_PER_NODE)
    ]
    return nodes, ranks


def holdings(placement: Placement, ranks: list[RankFacts]) -> list[HeldRecords]:
    """What all nodes hold after iteration 1,000."""
    records = tuple(
        SlotRecord(
            generation=0,
            index=t,
            state=SlotState.SEALED,
            iteration=1_000 - WINDOW - 1 + t,
            previous=1_000 - WINDOW - 2 + t,
            sequence=t,
            image_len=1 << 30,
            anchors=1 << t % WINDOW,
            phase=t % WINDOW,
            header_digest=bytes(16),
        )
        for t in range(WINDOW + 2)
    )
    return [
        HeldRecords(node, f"r{r.rank}", node == r.node, r.rank, WINDOW, "table", 1 << 30, records)
        for r in ranks
        for node in (r.node, *placement.targets[r.rank][: COPIES - 1])
    ]


def main() -> None:
    args = parser(__doc__).parse_args()
    metrics: dict[str, float | int | str] = {"ranks": NODES * RANKS_PER_NODE}
    regular: Placement | None = None
    for kind in CLUSTERS:
        took = []
        for seed in range(args.rounds):
            nodes, ranks = cluster(kind, seed=seed)
            found: list[Placement] = []
            took.append(clock_ms(lambda: found.append(plan_placement(nodes, ranks, replicas=2))))  # noqa: B023
            regular = regular or found[0]
        metrics[f"placement_s_{kind}"] = median(took) / 1e3
    assert regular is not None
    nodes, ranks = cluster("regular", seed=0)
    held = holdings(regular, ranks)
    homes = {r.rank: r.node for r in ranks}
    lost = {n.node for n in nodes[:NODES_PER_RACK]}
    wire = to_wire(held)
    plans: list[RecoveryPlan] = []

    def plan() -> None:
        made = plan_recovery(held, len(ranks), homes=homes, lost=lost)
        assert isinstance(made, RecoveryPlan), made
        plans.append(made)

    metrics["plan_s"] = median([clock_ms(plan) for _ in range(args.rounds)]) / 1e3
    metrics["decode_s"] = (
        median([clock_ms(lambda: from_wire(wire)) for _ in range(args.rounds)]) / 1e3
    )
    metrics["plan_vs_decode"] = float(metrics["plan_s"]) / float(metrics["decode_s"])
    metrics["holdings_mib"] = len(wire) / 2**20
    metrics["ranks_moved"] = sum(size > 0 for size in plans[-1].moved_bytes.values())
    emit("scale", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
