"""How likely training goes on when nodes are lost, by placement of the experts; what that costs in balance.

Lazarus' instance (§6.4): 16 experts, 10 nodes of 6 slots, every expert at least twice, most tokens
on two experts. Its maximum rank overlap (MRO), here with each expert once on a node at most,
against round robin (spread) and packing (compact), by number of lost nodes; exact counts. Then
equation 1 as printed, which gives a hot expert more replicas than there are nodes, under the same
placements. Then what a bound on the straggler factor buys.

Twelve layers with loads of their own: all on one order of nodes, and each on its own.

How long a plan for 1,024 nodes x 256 experts x 64 layers takes, allocation included: without a bound, with
the bound that elastic jobs pass (goal: under 1 s), and for 16,384 ranks on 2,048 nodes (goal: under 3 s).

How many replicas move after the loss of 10 nodes, drawn at random, with the nodes in 64 racks or each by
itself: over the least that any placement with as many replicas on distinct nodes moves (goal: 1.1), and what a
placement from scratch moves after its nodes were mapped.

How many tokens the ranks then compute is `bench.dispatch`'s subject.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.common import clock_ms, emit, median, parser, table
from ckptd.core.elastic.allocation import Allocation, allocate, straggler_factor
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement
from ckptd.core.elastic.expert_placement import compact, place, spread
from ckptd.core.elastic.mapping import held_now, map_nodes
from ckptd.core.elastic.placement_repair import count_moves
from ckptd.core.elastic.survival import recovery_probability

__all__ = ["by_placement", "main", "plot"]

# As in the training trace of the paper (§2.1): 87 % of the tokens on two experts.
SKEWED = (480, 390, 20, 15, 14, 12, 11, 10, 9, 8, 8, 7, 6, 5, 4, 1)
NODES, SLOTS, THRESHOLD, LAYERS = 10, 6, 2, 12
BOUNDS = (1.05, 1.2, 1.5)
LARGE_NODES, LARGE_EXPERTS, LARGE_LAYERS, LARGE_SLOTS = 1024, 256, 64, 8
# What elastic jobs pass (`PlacementOptions`).
BOUND = 1.1
RANKS = 8
RACKS, LOST, LOSSES = 64, 10, 5


def chances(placement: ExpertPlacement) -> list[float]:
    """Recovery probability with 1 … N - 1 nodes lost."""
    return [recovery_probability(placement, k).value for k in range(1, placement.num_nodes)]


def by_placement(
    allocation: Allocation, loads_LE: NDArray[np.int64], cluster: Cluster
) -> dict[str, ExpertPlacement]:
    return {
        "mro": place(allocation, loads_LE, cluster).placement,
        "spread": spread(allocation, cluster),
        "compact": compact(allocation, cluster),
    }


def shown(placements: Mapping[str, ExpertPlacement], loads_LE: NDArray[np.int64], cluster: Cluster) -> None:
    header = ["nodes lost", *(str(k) for k in range(1, cluster.num_nodes)), "straggler factor"]
    rows = [
        [
            name,
            *(f"{value:.3f}" for value in chances(placement)),
            f"{straggler_factor(placement, loads_LE, cluster):.2f}",
        ]
        for name, placement in placements.items()
    ]
    print("\n" + table(header, rows))


def aligned_or_not(metrics: dict[str, float | int | str], cluster: Cluster) -> None:
    """All layers on one order of nodes against a random order for each."""
    rng = np.random.default_rng(0)
    loads_LE = np.stack([rng.permutation(SKEWED) for _ in range(LAYERS)])
    plan = place(allocate(loads_LE, cluster, THRESHOLD), loads_LE, cluster).placement
    shuffled = np.stack([layer[rng.permutation(NODES)] for layer in plan.counts])
    placements = {"one order": plan, "an order for each layer": ExpertPlacement(shuffled)}
    shown(placements, loads_LE, cluster)
    metrics["layers_12_lost_4_one_order"] = chances(plan)[3]
    metrics["layers_12_lost_4_own_orders"] = chances(placements["an order for each layer"])[3]


def large_loads(seed: int) -> NDArray[np.int64]:
    """As skewed as in training."""
    shares = np.random.default_rng(seed).dirichlet(np.full(LARGE_EXPERTS, 0.5), LARGE_LAYERS)
    return np.asarray(np.floor(1e6 * shares), dtype=np.int64)


def large_plan_ms(cluster: Cluster, seed: int, bound: float | None) -> tuple[float, float]:
    """Milliseconds to allocate and to place."""
    loads_LE = large_loads(seed)
    kept: list[Allocation] = []
    allocating = clock_ms(lambda: kept.append(allocate(loads_LE, cluster, THRESHOLD)))
    return allocating, clock_ms(lambda: place(kept[0], loads_LE, cluster, max_straggler=bound))


def large_plans(metrics: dict[str, float | int | str], num_nodes: int, rounds: int) -> None:
    """The seconds of large plans."""
    alone = Cluster.uniform(num_nodes, LARGE_SLOTS)
    times = [large_plan_ms(alone, seed, None) for seed in range(rounds)]
    metrics["large_allocate_ms"] = median([allocating for allocating, _ in times])
    metrics["large_place_ms"] = median([placing for _, placing in times])
    metrics["large_plan_s"] = median([sum(pair) / 1e3 for pair in times])
    shared = Cluster.uniform(2 * num_nodes, RANKS * LARGE_SLOTS, ranks=RANKS)
    for name, cluster in ((str(num_nodes), alone), (str(shared.num_ranks), shared)):
        bounded = [sum(large_plan_ms(cluster, seed, BOUND)) / 1e3 for seed in range(rounds)]
        metrics[f"plan_s_bounded_{name}"] = median(bounded)


def moves_after_losses(metrics: dict[str, float | int | str], num_nodes: int, racks: int) -> None:
    """Replicas moved, over the least, after each of some losses."""
    label = "_racks" if racks else ""
    found = [_moves_after_a_loss(num_nodes, racks, seed) for seed in range(LOSSES)]
    for name in found[0]:
        metrics[f"{name}{label}"] = median([one[name] for one in found])
    metrics[f"moved_vs_least{label}_worst"] = max(one["moved_vs_least"] for one in found)
    header = [
        "lost of",
        "moved",
        "least",
        "moved / least",
        "placed anew",
        "expert survives 8 racks or nodes",
        "anew",
        "s",
    ]
    rows = [
        [
            f"{num_nodes} nodes{f' in {racks} racks' if racks else ''}",
            f"{one['moved_share']:.2%}",
            f"{one['least_share']:.2%}",
            f"{one['moved_vs_least']:.3f}",
            f"{one['moved_anew_share']:.0%}",
            f"{one['survives_lost_8']:.4f}",
            f"{one['survives_anew_lost_8']:.4f}",
            f"{one['plan_s_held']:.2f}",
        ]
        for one in found
    ]
    print("\n" + table(header, rows))


def _moves_after_a_loss(num_nodes: int, racks: int, seed: int) -> dict[str, float]:
    names = tuple(f"rack-{node * racks // num_nodes}" for node in range(num_nodes)) if racks else ()
    loads_LE, before = large_loads(seed), Cluster.uniform(num_nodes, LARGE_SLOTS, names)
    first = place(allocate(loads_LE, before, THRESHOLD), loads_LE, before, max_straggler=BOUND).placement
    gone = np.random.default_rng(seed).choice(num_nodes, min(LOST, num_nodes // 8), replace=False)
    alive = np.setdiff1d(np.arange(num_nodes), gone)
    cluster = Cluster.uniform(len(alive), LARGE_SLOTS, [before.domains[node] for node in alive])
    held, allocation = held_now(first, alive), allocate(loads_LE, cluster, THRESHOLD)
    kept: list[ExpertPlacement] = []
    took_ms = clock_ms(
        lambda: kept.append(place(allocation, loads_LE, cluster, max_straggler=BOUND, held=held).placement)
    )
    fresh = place(allocation, loads_LE, cluster, max_straggler=BOUND).placement
    anew = map_nodes(fresh, held, cluster, np.ones_like(loads_LE)).apply(fresh)
    moves, replicas = count_moves(kept[0], held), int(allocation.replicas.sum())
    survives = [
        recovery_probability(one, min(8, cluster.num_domains - 1), units=cluster.domain_ids).value
        for one in (kept[0], anew)
    ]
    return {
        "moved_vs_least": moves.moved / max(moves.least, 1),
        "moved_share": moves.moved / replicas,
        "least_share": moves.least / replicas,
        "moved_anew_share": count_moves(anew, held).moved / replicas,
        "survives_lost_8": survives[0],
        "survives_anew_lost_8": survives[1],
        "straggler_held": straggler_factor(kept[0], loads_LE, cluster),
        "plan_s_held": took_ms / 1e3,
    }


def plot(path: Path, placements: Mapping[str, ExpertPlacement]) -> None:
    """Recovery by number of lost nodes, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, placement in placements.items():
        axes.plot(range(1, placement.num_nodes), chances(placement), marker="o", label=name)
    axes.set(xlabel="nodes lost at once, of 10", ylabel="probability that training goes on")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--nodes", type=int, default=LARGE_NODES, help="of the large plan")
    options.add_argument("--plot", type=Path, help="write a chart of recovery here (matplotlib)")
    args = options.parse_args()
    cluster = Cluster.uniform(NODES, SLOTS)
    loads_LE = np.array([SKEWED], dtype=np.int64)
    allocation = allocate(loads_LE, cluster, THRESHOLD)
    print(f"replicas: {allocation.replicas[0].tolist()}; {allocation.reason}")
    placements = by_placement(allocation, loads_LE, cluster)
    shown(placements, loads_LE, cluster)
    metrics: dict[str, float | int | str] = {}
    for name, placement in placements.items():
        for lost, value in enumerate(chances(placement), start=1):
            metrics[f"recovery_{name}_lost_{lost}"] = value
        metrics[f"straggler_{name}"] = straggler_factor(placement, loads_LE, cluster)

    printed = allocate(loads_LE, cluster, THRESHOLD, limit=cluster.num_slots)
    print(f"\nequation 1 as printed: {printed.replicas[0].tolist()}")
    as_printed = by_placement(printed, loads_LE, cluster)
    shown(as_printed, loads_LE, cluster)
    for name, placement in as_printed.items():
        metrics[f"printed_recovery_{name}_lost_4"] = chances(placement)[3]
        metrics[f"printed_straggler_{name}"] = straggler_factor(placement, loads_LE, cluster)

    bounded = {
        f"straggler factor <= {bound}": place(allocation, loads_LE, cluster, max_straggler=bound).placement
        for bound in BOUNDS
    }
    shown(bounded, loads_LE, cluster)
    for bound, placement in zip(BOUNDS, bounded.values(), strict=True):
        metrics[f"bound_{bound}_recovery_lost_4"] = chances(placement)[3]
        metrics[f"bound_{bound}_straggler"] = straggler_factor(placement, loads_LE, cluster)
    aligned_or_not(metrics, cluster)

    large_plans(metrics, args.nodes, args.rounds)
    for racks in (min(RACKS, args.nodes // 4), 0):
        moves_after_losses(metrics, args.nodes, racks)
    if args.plot:
        plot(args.plot, {**placements, **{k: v for k, v in bounded.items() if "1.2" in k}})
    emit("placement", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
