"""How long a large cluster takes to decide: who holds whose replicas, and where everybody resumes
(16,384 ranks).

Placement: 2,048 nodes of 8 ranks, in racks, two replicas each; regular, and with three kinds of
irregularity. Recovery: holdings of every rank on three nodes (its own and two replicas), a whole
rack lost. For comparison, in the same run: decoding these holdings from msgpack, which no plan can
do without.

Localized recovery: the same ranks as a pipeline of 16 stages, the same rack lost; whoever is left
was parked. In stages of replicas the lost ranks copy; where stages are sharded theirs replays;
without logs one stage after the other has to replay, too, until all do.

Advice: every policy is rated for deepseek-v3 on these ranks, with experts in one domain of NVLink and on each
rank, and the best of each plays twelve hours with failures every ten minutes, twenty times.
"""

from __future__ import annotations

import random

from bench.common import clock_ms, emit, median, parser
from ckptd.core.advice.advice import Advice, advise
from ckptd.core.advice.failure_simulation import mean_shares
from ckptd.core.advice.job_shape import MODELS, PRECISIONS, Layout, rank_shape
from ckptd.core.advice.outlook import Conditions
from ckptd.core.placement import NodeFacts, PlacedRank, ReplicaPlacement, plan_placement
from ckptd.core.recovery.global_plan import RecoveryPlan, plan_recovery
from ckptd.core.recovery.held import HeldRecords, RunHoldings, from_wire, to_wire
from ckptd.core.recovery.localized_plan import LocalizedPlan, NotLocalized, plan_localized
from ckptd.core.recovery.recovery_facts import RankFacts as Communication
from ckptd.core.recovery.recovery_facts import facts_from_wire, facts_to_wire
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.ctl.advise_command import failures_at_random

__all__ = ["main"]

NODES, RANKS_PER_NODE, NODES_PER_RACK = 2_048, 8, 16
WINDOW, COPIES = 6, 3
RING_BYTES = 20 << 30
STAGES = 16
CLUSTERS = ("regular", "tight", "mixed_racks", "labels_missing")


def cluster(kind: str, *, seed: int) -> tuple[list[NodeFacts], list[PlacedRank]]:
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
        PlacedRank(rank, nodes[rank // RANKS_PER_NODE].node, RING_BYTES)
        for rank in range(NODES * RANKS_PER_NODE)
    ]
    return nodes, ranks


def holdings(placement: ReplicaPlacement, ranks: list[PlacedRank]) -> list[HeldRecords]:
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


def communication(num_ranks: int, *, replicated: bool) -> dict[int, Communication]:
    """With whom each rank of a pipeline of stages communicates; the ranks of a stage are replicas, or shards."""
    size = num_ranks // STAGES
    stages = [tuple(range(first, first + size)) for first in range(0, num_ranks, size)]
    return {
        rank: Communication(
            tuple(other for other in (rank - size, rank + size) if 0 <= other < num_ranks),
            stages[rank // size],
            stages[rank // size] if replicated else (),
        )
        for rank in range(num_ranks)
    }


def beside(ranks: list[PlacedRank], kind: str, operators: int, iterations: range) -> list[HeldRecords]:
    """Parked states, or boundary logs, of every rank on its own node."""
    records = tuple(
        SlotRecord(0, t % 16, SlotState.SEALED, t, -1, t, 1 << 20, anchors=(1 << operators) - 1)
        for t in iterations
    )
    return [
        HeldRecords(r.node, f"r{r.rank}.{kind}", True, r.rank, operators, "t", 1 << 20, records)
        for r in ranks
    ]


def localized_s(
    held: list[HeldRecords], ranks: list[PlacedRank], lost: set[str], rounds: int
) -> dict[str, float]:
    """Seconds to plan a localized recovery, and to read what all nodes tell of their ranks' communication."""
    newest = max(r.iteration for r in held[0].records)
    homes = {r.rank: r.node for r in ranks}
    parked = beside(ranks, "parked", WINDOW, range(newest, newest + 1))
    logs = beside(ranks, "boundary", 0, range(newest - WINDOW - 2, newest))
    found: dict[str, float] = {}
    for kind, sent in (("copied", logs), ("replayed", logs), ("widened", [])):
        facts = communication(len(ranks), replicated=kind == "copied")
        told = [
            facts_to_wire({r.rank: facts[r.rank] for r in ranks[at : at + RANKS_PER_NODE]})
            for at in range(0, len(ranks), RANKS_PER_NODE)
            if ranks[at].node not in lost
        ]
        known: list[dict[int, Communication]] = []
        plans: list[LocalizedPlan | NotLocalized] = []

        def read() -> None:
            known.append(facts_from_wire(told))  # noqa: B023 - called in this round of the loop

        def plan() -> None:
            facts, count = known[-1], len(ranks)  # noqa: B023
            there = RunHoldings(held, parked, sent)  # noqa: B023
            made = plan_localized(there, facts, count, homes=homes, lost=lost)
            plans.append(made)  # noqa: B023

        found["facts_decode_s"] = median([clock_ms(read) for _ in range(rounds)]) / 1e3
        found[f"localized_s_{kind}"] = median([clock_ms(plan) for _ in range(rounds)]) / 1e3
        assert isinstance(plans[-1], NotLocalized if kind == "widened" else LocalizedPlan)
    return found


def advice_s(rounds: int) -> dict[str, float]:
    """Seconds to rate all policies, and to play the best of each."""
    conditions = Conditions(10.0, 600.0, link_Bps=20e9, network_Bps=5e9)
    hours = 12 * 3600.0
    found: dict[str, float] = {}
    for name, layout in (("32_stages", Layout(16384, 32, 8)), ("all_experts", Layout(16384))):
        rank = rank_shape(MODELS["deepseek-v3"], layout, PRECISIONS["bf16-mixed"])
        advices: list[Advice] = []

        def rate() -> None:
            advices.append(advise(rank, conditions))  # noqa: B023 - called in this round of the loop

        def play_all() -> None:
            found = advices[-1]  # noqa: B023
            best = found.best, *found.lossy, *(each for _, each in found.others)
            for outlook in best:
                assert outlook is not None
                drawn = (failures_at_random(conditions.mtbf_s, hours, seed) for seed in range(20))
                mean_shares(outlook, conditions.iteration_s, drawn, hours)

        found[f"advise_s_{name}"] = median([clock_ms(rate) for _ in range(rounds)]) / 1e3
        found[f"played_s_{name}"] = median([clock_ms(play_all) for _ in range(rounds)]) / 1e3
    return found


def main() -> None:
    args = parser(__doc__).parse_args()
    metrics: dict[str, float | int | str] = {"ranks": NODES * RANKS_PER_NODE}
    regular: ReplicaPlacement | None = None
    for kind in CLUSTERS:
        took = []
        for seed in range(args.rounds):
            nodes, ranks = cluster(kind, seed=seed)
            found: list[ReplicaPlacement] = []
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
    metrics["decode_s"] = median([clock_ms(lambda: from_wire(wire)) for _ in range(args.rounds)]) / 1e3
    metrics["plan_vs_decode"] = float(metrics["plan_s"]) / float(metrics["decode_s"])
    metrics["holdings_mib"] = len(wire) / 2**20
    metrics["ranks_moved"] = sum(size > 0 for size in plans[-1].moved_bytes.values())
    metrics |= localized_s(held, ranks, lost, args.rounds)
    metrics |= advice_s(args.rounds)
    emit("scale", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
