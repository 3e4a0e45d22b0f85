"""Elastic runtime decisions: how long dispatching, mapping and sharing transfers take, and how even
the tokens are.

Dispatch: what one rank computes for each layer and step (its plan, what it sends and what it gets),
and, for comparison in the same run, what all ranks send. Where there is a CUDA device, one rank's
part by its kernels, too: between events around what the host launches, and as a replayed CUDA
graph, which is what the device itself needs; the numbers are compared with the CPU's first. Mapping
and transfers: 64 layers of 256 experts of which a node has 4 slots each; after the loss of 8 nodes
in place, after another load was spread, and with all at random.

The exact count behind figure 10a of Lazarus: one layer of 8 experts on 10 ranks of 6 slots, one of
the experts with 1 to 8 times its even share of the tokens. Tokens on the busiest rank over the
mean: our placement with a bound on that, without one (it then concentrates the others for recovery)
and spread; and expert parallelism of fixed size 2 (every rank used) and 8 (an expert on a rank, two
ranks idle).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.common import Metric, clock_ms, emit, median, parser, table
from ckptd.core.elastic.allocation import allocate
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement
from ckptd.core.elastic.expert_placement import place, spread
from ckptd.core.elastic.expert_transfers import plan_transfers
from ckptd.core.elastic.mapping import held_now, map_nodes
from ckptd.core.elastic.token_dispatch import plan_dispatch
from ckptd.cuda.dispatch import DeviceDispatcher, DeviceSends

__all__ = [
    "dispatch_gpu_times",
    "dispatch_times",
    "main",
    "move_times",
    "plot",
    "straggler_by_ratio",
]

Ints = NDArray[np.int64]

SIZES = ((16, 64), (64, 128), (256, 256), (1024, 256))  # ranks, experts
TOKENS, TOP_K = 4096, 8  # of a rank and micro-batch
GOAL_SIZE = "256x256"
GPU_ROUNDS, GPU_WARM_ROUNDS = 200, 20
LAYERS, EXPERTS, SLOTS = 64, 256, 4
THRESHOLD = 2
LOST, RACK = 8, 8
EXPERT_BYTES = 112 << 20  # Lazarus, table 2: GPT-L

# Figure 10a.
RATIOS = range(1, 9)
LAYER_EXPERTS, LAYER_RANKS, LAYER_SLOTS = 8, 10, 6
RANK_TOKENS = 4 * 1024
FIXED_SIZES = (2, 8)
BALANCED = 1.05


def main() -> None:
    args = _arguments()
    metrics: dict[str, Metric] = {}
    for ranks, experts in SIZES:
        metrics |= dispatch_times(ranks, experts, rounds=args.rounds)
    metrics |= _all_gpu_times()
    for nodes in args.nodes:
        metrics |= move_times(nodes, layers=args.layers, rounds=args.rounds)
    metrics |= straggler_by_ratio()
    if args.plot:
        plot(args.plot, metrics)
    emit("dispatch", metrics, as_json=args.json)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--nodes", type=int, nargs="+", default=[128, 1024])
    options.add_argument("--layers", type=int, default=LAYERS)
    options.add_argument("--plot", type=Path, help="write a chart of figure 10a here (matplotlib)")
    return options.parse_args()


# --- how long it takes -----------------------------------------------------------------------------------


def dispatch_times(ranks: int, experts: int, *, rounds: int) -> dict[str, Metric]:
    """Milliseconds for a skewed load on replicas at random places."""
    tokens_RE, replicas_RE, nodes_R = _dispatch_case(ranks, experts)

    def one_rank() -> None:
        plan = plan_dispatch(tokens_RE, replicas_RE, nodes=nodes_R)
        plan.sends(ranks - 1)
        plan.receives(ranks - 1)

    def all_ranks() -> None:
        plan_dispatch(tokens_RE, replicas_RE, nodes=nodes_R).entries()

    name = f"{ranks}x{experts}"
    return {
        f"dispatch_ms_{name}": _typical_ms(one_rank, rounds),
        f"dispatch_all_ranks_ms_{name}": _typical_ms(all_ranks, rounds),
    }


def _all_gpu_times() -> dict[str, Metric]:
    if not torch.cuda.is_available():
        print("no CUDA device here: the dispatcher's kernels are not measured")
        return {}
    out: dict[str, Metric] = {}
    for ranks, experts in SIZES:
        out |= dispatch_gpu_times(ranks, experts)
    return out | {"dispatch_gpu_ms": out[f"dispatch_gpu_ms_{GOAL_SIZE}"]}


def dispatch_gpu_times(ranks: int, experts: int) -> dict[str, Metric]:
    """The same on the current CUDA device, warm, the median of many.

    Raises:
        RuntimeError: the kernels give other numbers than the CPU.
    """
    tokens_RE, replicas_RE, nodes_R = _dispatch_case(ranks, experts)
    planner = DeviceDispatcher(torch.from_numpy(replicas_RE), "cuda", nodes=torch.from_numpy(nodes_R))
    tokens = torch.from_numpy(tokens_RE).cuda()

    def one_rank() -> tuple[DeviceSends, Tensor]:
        return planner.plan(tokens).share(ranks - 1)

    plan = plan_dispatch(tokens_RE, replicas_RE, nodes=nodes_R)
    wanted = plan.sends(ranks - 1)
    expected = np.stack([wanted.tokens, wanted.first, plan.receives(ranks - 1)])
    sends, received = one_rank()
    found = torch.stack([sends.tokens, sends.first, received])
    if not torch.equal(found.cpu(), torch.from_numpy(expected)):
        raise RuntimeError(f"the kernels differ from the CPU for {ranks} ranks, {experts} experts")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_rank()
    name = f"{ranks}x{experts}"
    return {
        f"dispatch_gpu_ms_{name}": _device_ms(one_rank),
        f"dispatch_gpu_graph_ms_{name}": _device_ms(graph.replay),
    }


def _device_ms(work: Callable[[], object]) -> float:
    """From an event before to one after, each time with an idle device at first."""
    taken = []
    for _ in range(GPU_WARM_ROUNDS + GPU_ROUNDS):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return median(taken[GPU_WARM_ROUNDS:])


def _dispatch_case(ranks: int, experts: int) -> tuple[Ints, Ints, Ints]:
    """Tokens, replicas, and nodes of eight ranks."""
    rng = np.random.default_rng(ranks)
    popularity = rng.dirichlet(np.full(experts, 0.5))
    tokens_RE = rng.multinomial(TOKENS * TOP_K, popularity, size=ranks)
    replicas_RE = rng.multinomial(2, np.full(experts, 1 / experts), size=ranks)
    replicas_RE[rng.integers(0, ranks, experts), np.arange(experts)] += 1
    return tokens_RE, replicas_RE, np.arange(ranks) // 8


def move_times(num_nodes: int, *, layers: int, rounds: int) -> dict[str, Metric]:
    """Milliseconds to map nodes and to share out what is missing, in three situations."""
    rng = np.random.default_rng(num_nodes)
    old = _spread(_some_loads(rng, layers), Cluster.uniform(num_nodes, SLOTS))
    survivors = np.arange(num_nodes)
    survivors[:: num_nodes // min(LOST, num_nodes)] = -1
    situations = {
        "loss": (old, held_now(old, survivors)),
        "rebalance": (_spread(_some_loads(rng, layers), Cluster.uniform(num_nodes, SLOTS)), old),
        "random": (_at_random(rng, layers, num_nodes), _at_random(rng, layers, num_nodes)),
    }
    racks = tuple(f"rack-{node // RACK}" for node in range(num_nodes))
    bytes_LE = np.full((layers, EXPERTS), EXPERT_BYTES)
    out: dict[str, Metric] = {}
    for situation, (plan, held) in situations.items():
        for label, domains in (("", ()), ("_racks", racks)):
            cluster = Cluster.uniform(num_nodes, SLOTS, domains)
            name = f"{situation}{label}_{num_nodes}"
            out |= _one_move(name, plan, held, cluster, bytes_LE, rounds)
    return out


def _one_move(
    name: str,
    plan: ExpertPlacement,
    held: ExpertPlacement,
    cluster: Cluster,
    bytes_LE: Ints,
    rounds: int,
) -> dict[str, Metric]:
    wanted = map_nodes(plan, held, cluster, bytes_LE).apply(plan)
    map_ms = _typical_ms(lambda: map_nodes(plan, held, cluster, bytes_LE), rounds)
    transfers_ms = _typical_ms(lambda: plan_transfers(wanted, held, cluster, bytes_LE), rounds)
    return {f"map_ms_{name}": map_ms, f"transfers_ms_{name}": transfers_ms}


def _typical_ms(work: Callable[[], object], rounds: int) -> float:
    return median([clock_ms(work) for _ in range(rounds)])


def _some_loads(rng: np.random.Generator, layers: int) -> Ints:
    return np.asarray(
        rng.multinomial(1 << 20, rng.dirichlet(np.full(EXPERTS, 2.0), size=layers)), dtype=np.int64
    )


def _at_random(rng: np.random.Generator, layers: int, num_nodes: int) -> ExpertPlacement:
    """Every slot holds some expert, and every expert is held."""
    fill = rng.integers(0, EXPERTS, size=(layers, num_nodes * SLOTS))
    fill[:, :EXPERTS] = np.arange(EXPERTS)
    return _dealt(fill, num_nodes)


def _spread(loads: Ints, cluster: Cluster) -> ExpertPlacement:
    return spread(allocate(loads, cluster, THRESHOLD), cluster)


def _dealt(fill: Ints, num_nodes: int) -> ExpertPlacement:
    layers, replicas = fill.shape
    counts = np.zeros((layers, num_nodes, int(fill.max()) + 1), dtype=np.int32)
    np.add.at(counts, (np.arange(layers)[:, None], np.arange(replicas) % num_nodes, fill), 1)
    return ExpertPlacement(counts)


# --- how even it is --------------------------------------------------------------------------------------


def straggler_by_ratio() -> dict[str, Metric]:
    """Figure 10a as an exact count: the busiest rank's tokens over the mean."""
    out: dict[str, Metric] = {}
    rows = []
    for ratio in RATIOS:
        tokens_RE = np.tile(_skewed(ratio), (LAYER_RANKS, 1))
        factors = _ours(tokens_RE)
        factors |= {f"fixed_{size}": _fixed(tokens_RE, size) for size in FIXED_SIZES}
        out |= {f"straggler_{name}_{ratio}to1": value for name, value in factors.items()}
        rows.append([f"{ratio}:1", *(f"{value:.3f}" for value in factors.values())])
    kinds = ["ours", "recovery first", "spread", *(f"fixed, {size}" for size in FIXED_SIZES)]
    print(table(["load ratio", *kinds], rows))
    return out


def plot(path: Path, metrics: Mapping[str, Metric]) -> None:
    """The straggler factors by load ratio, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    kinds = [
        "ours",
        "ours_recovery_first",
        "ours_spread",
        *(f"fixed_{size}" for size in FIXED_SIZES),
    ]
    for kind in kinds:
        factors = [metrics[f"straggler_{kind}_{ratio}to1"] for ratio in RATIOS]
        axes.plot(list(RATIOS), factors, marker="o", label=kind)
    axes.set(xlabel="load ratio, to 1", ylabel="tokens on the busiest rank over the mean")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _skewed(ratio: int) -> Ints:
    """One rank's tokens for each expert: the first gets ``ratio`` times the even share."""
    hot = RANK_TOKENS * ratio // LAYER_EXPERTS
    each, rest = divmod(RANK_TOKENS - hot, LAYER_EXPERTS - 1)
    others = np.full(LAYER_EXPERTS - 1, each)
    others[:rest] += 1
    return np.concatenate([[hot], others])


def _ours(tokens_RE: Ints) -> dict[str, float]:
    """By what the placement is for: balance first, recovery first, or the baseline."""
    cluster = Cluster.uniform(LAYER_RANKS, LAYER_SLOTS)
    loads_LE = tokens_RE.sum(axis=0)[None]
    allocation = allocate(loads_LE, cluster, THRESHOLD)
    placements = {
        "ours": place(allocation, loads_LE, cluster, max_straggler=BALANCED).placement,
        "ours_recovery_first": place(allocation, loads_LE, cluster).placement,
        "ours_spread": spread(allocation, cluster),
    }
    return {
        name: _factor(plan_dispatch(tokens_RE, placement.counts[0]).quotas)
        for name, placement in placements.items()
    }


def _fixed(tokens_RE: Ints, size: int) -> float:
    """Groups of ``size`` ranks that hold every expert once; ranks that fill no group are idle.

    All tokens are trained on, so groups take those of idle ranks, too, and each keeps its own to itself.
    """
    groups = LAYER_RANKS // size
    replicas_RE = np.zeros_like(tokens_RE)
    experts = np.arange(LAYER_EXPERTS)
    for group in range(groups):
        replicas_RE[group * size + experts * size // LAYER_EXPERTS, experts] = 1
    # All ranks route alike, so every group has the same share of each expert's tokens.
    return _factor(plan_dispatch(tokens_RE, replicas_RE).quotas)


def _factor(quotas_RE: Ints) -> float:
    load_R = quotas_RE.sum(axis=1)
    return float(LAYER_RANKS * load_R.max() / load_R.sum())


if __name__ == "__main__":
    main()
