"""The job that `bench.traces` simulates, and where each of its numbers comes from.

The model is GPT-L of Lazarus (§6.1): 12 mixture layers of 16 experts of 112 MB of state each (table
2), 1.7 billion parameters, 6 slots on a node of one GPU. The global batch is 40 samples, 4 for each
of the paper's 10 nodes, whatever number of nodes there is.

How long an iteration takes. Lazarus does 1,996 steps of GPT-L in 30 minutes in which five nodes
fail (§6.2), and a reconfiguration takes it 20 to 40 s (§6.3): (1,800 - 5 x 30) / 1,996 = 0.827 s
for 4 samples on each node, where loads are balanced. Of that, a part x grows with the tokens of the
busiest rank. The paper gives one pair of rates with all nodes and without overheads, for GPT-M (12
experts): 45 samples/s, and 34 with expert parallelism of size 2. With s the straggler factors of
both, ``45 / 34 = (1 - x + x * s_fixed) / (1 - x + x * s_ours)`` gives x. Which load the paper had
is not told in numbers; ours has 87 % of the tokens on two experts, as in its §2.1, in another order
in each layer, and does not change over time, so that nothing is rebalanced.

Interruptions:

- collectives on a dead node time out after 15 s (§6.3: 10 to 20), groups of ranks are made anew in
  10 s (5 to 15); plans take 0.1 s (less than that);
- a node sends and gets 0.275 GB/s: 160 and 55 experts moved among 6 and 5 survivors in 7.6 and 7.8
  s (table 2) are 0.39 and 0.16 GB/s for each;
- a restarted process begins to train 7.08 s after its start (`recovery_s` in
  results/node_loss_cpu_202611.md, two cores, 64 MiB of state: imports, rendezvous, plan, first
  state; what a CUDA context takes is not in it). A strategy that restarts processes pays it, ours
  among them; Lazarus reconfigures in the process;
- the store is behind 10 Gbit/s (§6.1), shared by all nodes: a checkpoint of the whole state takes
  18 s, a restart reads what each node holds;
- checkpoints every 50 steps for fixed expert parallelism, every 250 where a reconfiguration is the
  rule (§6.1, §6.4). They block (as DeepSpeed's do). Ours are in the background and add nothing
  measurable (0.07 ms: results/storage_cpu_202611.md); one is begun every 50 steps and counts 18 s
  later;
- ours pays 4.5 % of every iteration for snapshots (`overhead_fraction_cpu` in
  results/one_node_cpu_202611.md); 20 % where no core is free for replication
  (`replication_fraction`, results/node_loss_cpu_202611.md), which `bench.traces` shows beside it.
  After a recovery from snapshots it replays W - 1 = 3 iterations at 0.89 of their time
  (`replay_cost_0_frozen`), and has lost one more: replication lags by 0 to 1;
- after nodes have come everybody waits for 120 s (§6.4), at most 600 s after the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ckptd.core.elastic.allocation import allocate, straggler_factor
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement
from ckptd.core.elastic.expert_placement import place

__all__ = ["SKEWED", "Job", "fixed_straggler", "growing_part", "layer_loads", "placed"]

Ints = NDArray[np.int64]
SKEWED = (480, 390, 20, 15, 14, 12, 11, 10, 9, 8, 8, 7, 6, 5, 4, 1)
THRESHOLD = 2
MAX_STRAGGLER = 1.1

# GPT-M (Lazarus, table 1 and §6.2), for the part of an iteration that grows with the busiest rank.
_M_EXPERTS, _M_GROUP, _M_NODES, _M_RATES = 12, 2, 10, (45.0, 34.0)


@dataclass(frozen=True, slots=True)
class Job:
    """Numbers of the module's docstring."""

    layers: int = 12
    experts: int = 16
    slots: int = 6
    expert_bytes: float = 112e6
    dense_bytes: float = 1.2e9
    """1.7 billion parameters less the experts' 192 x 8.39 million, at the experts' 13.3 bytes of state each."""
    batch: int = 40
    node_samples_per_s: float = 4 / 0.827
    skew: tuple[int, ...] = SKEWED
    seed: int = 0
    detect_s: float = 15.0
    groups_s: float = 10.0
    plan_s: float = 0.1
    process_s: float = 7.08
    node_bytes_per_s: float = 0.275e9
    store_bytes_per_s: float = 1.25e9
    snapshot_overhead: float = 0.045
    window: int = 4
    replay_cost: float = 0.89
    gather_s: float = 120.0
    gather_most_s: float = 600.0
    loads_LE: Ints = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        loads = layer_loads(self.skew[: self.experts], self.layers, self.seed)
        object.__setattr__(self, "loads_LE", loads)

    @property
    def state_bytes(self) -> float:
        """Of the whole model, each expert once."""
        return self.dense_bytes + self.layers * self.experts * self.expert_bytes

    @property
    def save_s(self) -> float:
        """To write a checkpoint."""
        return self.state_bytes / self.store_bytes_per_s

    def load_s(self, nodes: int, slots: int) -> float:
        """For all of these nodes to read what they hold from the store."""
        each = self.dense_bytes + self.layers * slots * self.expert_bytes
        return nodes * each / self.store_bytes_per_s

    def iteration_s(self, nodes: int, straggler: float) -> float:
        """Of the global batch on so many nodes, without what interrupts it."""
        grows = growing_part()
        return self.batch / (self.node_samples_per_s * nodes) * (1 - grows + grows * straggler)

    def with_overhead(self, fraction: float) -> Job:
        """The same with another price of snapshots."""
        return replace(self, snapshot_overhead=fraction)


def layer_loads(skew: tuple[int, ...], layers: int, seed: int) -> Ints:
    """``[L, E]``: the skew in another order in each layer."""
    draw = np.random.default_rng(seed)
    return np.stack([draw.permutation(np.array(skew, dtype=np.int64)) for _ in range(layers)])


def fixed_straggler(loads_LE: Ints, group: int) -> float:
    """The busiest rank over the mean where ``group`` nodes share the experts evenly, and groups the tokens."""
    share_LP = loads_LE.reshape(len(loads_LE), group, -1).sum(axis=2)
    return float(group * share_LP.max(axis=1).sum() / loads_LE.sum())


@cache
def growing_part() -> float:
    """The part x of an iteration that grows with the tokens of the busiest rank; see the module."""
    loads_LE = layer_loads(SKEWED[:_M_EXPERTS], 12, 0)
    cluster = Cluster.uniform(_M_NODES, 6)
    plan = place(allocate(loads_LE, cluster, THRESHOLD), loads_LE, cluster, max_straggler=MAX_STRAGGLER)
    ours, fixed = (
        straggler_factor(plan.placement, loads_LE, cluster),
        fixed_straggler(loads_LE, _M_GROUP),
    )
    ratio = _M_RATES[0] / _M_RATES[1]
    return (ratio - 1) / (fixed - 1 - ratio * (ours - 1))


@cache
def placed(job: Job, nodes: int) -> tuple[ExpertPlacement, float]:
    """The placement on so many nodes, and its straggler factor."""
    cluster = Cluster.uniform(nodes, job.slots)
    allocation = allocate(job.loads_LE, cluster, THRESHOLD)
    plan = place(allocation, job.loads_LE, cluster, max_straggler=MAX_STRAGGLER)
    return plan.placement, straggler_factor(plan.placement, job.loads_LE, cluster)
