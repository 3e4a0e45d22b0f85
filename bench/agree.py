"""How long ranks take to agree, by world size: at the start, and on where to resume.

Real: 2 to 16 processes on this machine over gloo, with a tiny model and one daemon. They share its
cores, so these are upper bounds of what agreeing costs. Attach is all of ``Checkpointer()`` where
nothing is to be restored, resume all of it where something is; of that, plan is to learn who holds
what and to agree on it. What carries the words, ``exchange``, is measured against torch's
``all_gather_object`` of the same bytes, and planning against the planning collective of
``torch.distributed.checkpoint`` for the same model. Rendezvous is not counted.

Simulated: the plan for the inventories of up to 16,384 ranks, each on three nodes; and as many
ranks meeting at one store, played by a few connections of this machine, against the requests that
an exchange through the store alone would take.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from bench.common import clock_ms, emit, forget, median, own_daemon, parser, scratch_folder, table
from bench.scale import cluster, holdings
from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
from ckptd.client.identity import Identity
from ckptd.client.ranks.collectives import exchange
from ckptd.client.ranks.store_barrier import arrive, own_connection
from ckptd.core.placement import plan_placement
from ckptd.core.recovery.global_plan import RecoveryPlan, plan_recovery
from ckptd.core.recovery.held import from_wire, to_wire

__all__ = ["main"]

WORLDS = (2, 4, 8, 16)
SIMULATED_NODES, RANKS_PER_NODE = (128, 512, 2_048), 8
CONNECTIONS = 4
STEPS, STEP_S = 40, 0.01
PAYLOAD_BYTES = 4_096
MEMORY_MIB = 1_024
WAIT_S = 120.0
VARIANTS = ("attach", "resume", "plan", "exchange", "all_gather_object", "dcp_plan")

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["bench.scale", "ckptd.client", "torch.distributed.checkpoint"])


# --- a rank ----------------------------------------------------------------------------------------------


def tiny() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    return model, torch.optim.AdamW(model.parameters())


def timed(work: Callable[[], object]) -> float:
    """Seconds, begun by all ranks together."""
    dist.barrier()
    return clock_ms(work) / 1e3


def train(ckpt: Checkpointer, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """In lockstep, and for as long as the ranks take to agree on their first window."""
    for _ in ckpt.steps(STEPS):
        dist.barrier()
        time.sleep(STEP_S)
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()


def once(endpoint: str, run: str) -> dict[str, float]:
    """One round of everything, each variant in turn."""
    options: dict[str, Any] = {
        "run": RunOptions(name=run, job="agree"),
        "daemon": endpoint,
        "snapshots": SnapshotOptions(window=2),
    }
    made: list[Checkpointer] = []
    found: dict[str, float] = {}
    model, optimizer = tiny()
    found["attach"] = timed(lambda: made.append(Checkpointer(model, optimizer, **options)))
    train(made[-1], model, optimizer)
    made[-1].close()
    model, optimizer = tiny()
    found["resume"] = timed(lambda: made.append(Checkpointer(model, optimizer, **options)))
    assert made[-1].resumed_from is not None
    found["plan"] = made[-1].stats()["recover_plan_s"]
    made[-1].close()
    dist.barrier()
    if dist.get_rank() == 0:
        forget(endpoint, "agree", run)
    identity = Identity("agree", run, dist.get_rank(), dist.get_world_size())
    payload = os.urandom(PAYLOAD_BYTES)
    heard: list[Any] = [None] * identity.world_size
    found["exchange"] = timed(lambda: exchange(identity, payload))
    found["all_gather_object"] = timed(lambda: dist.all_gather_object(heard, payload))
    found["dcp_plan"] = timed(lambda: dcp_plan(model))
    return found


def dcp_plan(model: nn.Module) -> None:
    """What ``dcp.save`` does before it writes: each rank's plan to rank 0, and its part of the whole back."""
    planner = DefaultSavePlanner()
    group = _DistWrapper(None, True, 0)

    def local() -> Any:
        planner.set_up_planner(model.state_dict(), is_coordinator=group.is_coordinator)
        return planner.create_local_plan()

    def whole(plans: list[Any]) -> list[Any]:
        return planner.create_global_plan(plans)[0]

    group.reduce_scatter("plan", local, whole)


def rank_main(rank: int, world: int, folder: str, endpoint: str, rounds: int, out: Queue[Any]) -> None:
    """All rounds of one rank; tells its seconds by variant."""
    torch.set_num_threads(1)
    logging.getLogger("ckptd").setLevel(logging.ERROR)  # resuming is a warning
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    measured = [once(endpoint, f"{world}-{number}") for number in range(rounds + 1)]
    out.put([measured[1:], rank])  # the first one warms up
    dist.barrier()
    dist.destroy_process_group()


def real(world: int, folder: Path, endpoint: str, rounds: int) -> dict[str, float]:
    """Median seconds by variant; in each round the slowest rank counts."""
    out = _FORK.Queue()
    ranks = [
        _FORK.Process(target=rank_main, args=(rank, world, str(folder), endpoint, rounds, out))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        told = [out.get(timeout=WAIT_S)[0] for _ in ranks]
        for process in ranks:
            process.join(WAIT_S)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
    return {
        variant: statistics.median(max(rank[number][variant] for rank in told) for number in range(rounds))
        for variant in VARIANTS
    }


# --- many ranks ------------------------------------------------------------------------------------------


def planned(num_nodes: int, rounds: int) -> tuple[float, float, float]:
    """Seconds to decode the inventories and to plan from them, one rack lost; and their MiB."""
    nodes, ranks = cluster("regular", seed=0)
    nodes, ranks = nodes[:num_nodes], ranks[: num_nodes * RANKS_PER_NODE]
    held = holdings(plan_placement(nodes, ranks, replicas=2), ranks)
    lost = {node.node for node in nodes[:16]}
    homes = {rank.rank: rank.node for rank in ranks}
    wire = to_wire(held)

    def plan() -> None:
        made = plan_recovery(held, len(ranks), homes=homes, lost=lost)
        assert isinstance(made, RecoveryPlan), made

    decode_s = median([clock_ms(lambda: from_wire(wire)) for _ in range(rounds)]) / 1e3
    return decode_s, median([clock_ms(plan) for _ in range(rounds)]) / 1e3, len(wire) / 2**20


def met(world: int, number: int) -> float:
    """Seconds until so many ranks have met at one store: each comes, looks, and reads the verdict."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]

    def some(first: int) -> None:
        own = own_connection(store)
        mine = range(first, world, CONNECTIONS)
        for rank in mine:
            arrive(own, "met", number, rank=rank, world_size=world)
        for _ in mine:
            while not own.check([f"met/{number}/verdict"]):
                time.sleep(0.001)
            own.get(f"met/{number}/verdict")

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return clock_ms(lambda: list(pool.map(some, range(CONNECTIONS)))) / 1e3


def main() -> None:
    args = parser(__doc__).parse_args()
    metrics: dict[str, float | int | str] = {"payload_bytes": PAYLOAD_BYTES}
    rows = []
    with scratch_folder() as folder, own_daemon(MEMORY_MIB) as endpoint:
        for world in WORLDS:
            found = real(world, Path(folder), endpoint, args.rounds)
            metrics.update({f"{name}_s_{world}": value for name, value in found.items()})
            rows.append([str(world), *(f"{found[name] * 1e3:.1f}" for name in VARIANTS)])
    print(table(["ranks", *(f"{name} ms" for name in VARIANTS)], rows))
    rows = []
    for num_nodes in SIMULATED_NODES:
        world = num_nodes * RANKS_PER_NODE
        decode_s, plan_s, mib = planned(num_nodes, args.rounds)
        met_s = statistics.median(met(world, number) for number in range(1, args.rounds + 1))
        metrics.update({f"decode_s_{world}": decode_s, f"plan_s_{world}": plan_s, f"met_s_{world}": met_s})
        metrics[f"inventories_mib_{world}"] = mib
        rows.append([str(world), *(f"{v:.3f}" for v in (decode_s, plan_s, met_s)), f"{mib:.1f}"])
    print()
    print(table(["ranks (simulated)", "decode s", "plan s", "meet s", "inventories MiB"], rows))
    emit("agree", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
