"""`make demo-nodes`: data-parallel training across hosts, of which one after the other is destroyed.

Three hosts train and one waits as a spare, each a network namespace of this machine with a daemon,
memory and processes of its own (`tests.cluster`). The first run is not touched by ckptd. In the
second, every snapshot is replicated to two peers; at seeded random moments a host is destroyed: all
its processes are SIGKILLed, its memory is wiped, its network is taken away. Once two go at the same
time. torchrun brings the job back on what is left and the spare, the ranks get their state from
their peers' memory, and the host returns, empty, as the next spare. Every life of a rank is
initialised from another seed. The demo fails unless every tensor of all ranks and every loss is
identical to those of the first run.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptd.demo.report import NodeLoss, node_recovery, step_time_ms, table
from examples.demo_progress import Progress, failed, seed_of
from examples.moe_text.cluster_run import RUN_TIMEOUT_S, ClusterRun, what_differs
from tests.cluster.daemons import DaemonFailed
from tests.cluster.hosts import Cluster
from tests.cluster.torchrun import JobFailed

__all__ = ["PlannedLoss", "main", "plan_losses"]

NUM_RANKS = 3
NUM_SPARES = 1
BACK_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class PlannedLoss:
    """Destroy the hosts of these ranks `delay_s` after iteration `step` was logged."""

    step: int
    delay_s: float
    ranks: tuple[int, ...]


def plan_losses(rng: random.Random, *, steps: int, window: int, count: int) -> list[PlannedLoss]:
    """`count` losses spread over the run at random moments; the third takes two hosts at once."""
    # Before the first full window is replicated there is nothing to come back to.
    first, last = 3 * window + 5, int(steps * 0.95)
    width = (last - first) / max(1, count)
    if count and width < 2 * window:
        raise ValueError(f"{steps} steps are too few for {count} losses; use more --steps")
    plan = []
    for index in range(count):
        step = first + int(index * width + rng.random() * (width - window))
        ranks = rng.sample(range(NUM_RANKS), 2 if index == 2 else 1)
        plan.append(PlannedLoss(step, rng.random() * 0.3, tuple(sorted(ranks))))
    return plan


def strike(planned: PlannedLoss, run: ClusterRun, progress: Progress) -> NodeLoss:
    """Wait for the planned moment and destroy the hosts of those ranks."""
    run.job.until(
        lambda: run.last_step() >= planned.step,
        f"iteration {planned.step}",
        timeout_s=RUN_TIMEOUT_S,
    )
    time.sleep(planned.delay_s)
    hosts = [run.host_of(rank) for rank in planned.ranks]
    begun_s = time.time()
    for host in hosts:
        run.destroy(host)
    last_step = max(run.last_step(rank) for rank in range(NUM_RANKS))
    names = tuple(host.name for host in hosts)
    progress.say(f"--> destroyed {' and '.join(names)} after iteration {last_step}")
    return NodeLoss(begun_s, names, planned.ranks, last_step)


def come_back(loss: NodeLoss, run: ClusterRun, progress: Progress) -> None:
    """Let the job go on without the lost hosts, and return them, empty, as spares.

    With fewer hosts left than ranks, the first lost one returns before that: there is no other way.
    The rest wait until the job goes on, so that no survivor loses its place to a newcomer.
    """
    waiting = [host for host in run.cluster.hosts if not host.up]
    while sum(host.up for host in run.cluster.hosts) < NUM_RANKS:
        run.return_empty([waiting.pop(0)])
    for rank in range(NUM_RANKS):
        run.job.until(
            lambda rank=rank: run.last_step(rank) > loss.last_step,  # type: ignore[misc]
            f"rank {rank} beyond iteration {loss.last_step}",
            timeout_s=BACK_TIMEOUT_S,
        )
    found = node_recovery(loss, run.events())
    progress.say(
        f"    resumed at iteration {found.resumed_at}, back in {found.back_s:.1f} s"
        if found.back_s is not None
        else "    the job goes on"
    )
    run.return_empty(waiting)


def sources(loss: NodeLoss, run: ClusterRun) -> str:
    """From which nodes the daemons have fetched since the loss, as their events tell."""
    found = set()
    for name, daemon in run.daemons.items():
        if not daemon.host.up:
            continue
        for event in daemon.events():
            if event.kind.startswith("fetch") and event.time_ns > loss.time_s * 1e9:
                found |= {f"{other} to {name}" for other in run.daemons if other in event.message}
    return ", ".join(sorted(found)) or "-"


def run_to_end(run: ClusterRun) -> None:
    """Wait until all ranks have finished."""
    run.job.wait(timeout_s=RUN_TIMEOUT_S)


def run_destroyed(
    run: ClusterRun, plan: Sequence[PlannedLoss], progress: Progress
) -> list[tuple[NodeLoss, str]]:
    """The second run: every planned loss, with where its ranks got their state from."""
    losses = []
    for planned in plan:
        loss = strike(planned, run, progress)
        come_back(loss, run, progress)
        losses.append((loss, sources(loss, run)))
    run_to_end(run)
    return losses


def print_losses(losses: Sequence[tuple[NodeLoss, str]], run: ClusterRun) -> None:
    """The table: what was lost when, and how the job came back."""
    rows: list[list[object]] = []
    for number, (loss, where) in enumerate(losses, start=1):
        found = node_recovery(loss, run.events())
        lost = ", ".join(f"{host} (rank {rank})" for host, rank in zip(loss.hosts, loss.ranks, strict=True))
        rows.append(
            [number, lost, loss.last_step, found.resumed_at, found.redone, found.start_s, found.back_s, where]
        )
    header = [
        "#",
        "destroyed",
        "after iteration",
        "resumed at",
        "replayed",
        "restarted s",
        "back s",
        "fetched",
    ]
    print("\n" + table(header, rows))
    print(
        "\nrestarted s: from the loss until rank 0 was attached again (torchrun's heartbeat, interpreter, imports);"
        "\nback s: from the loss until the first iteration that had not been done before was complete."
    )


def print_summary(undisturbed: ClusterRun, destroyed: ClusterRun) -> None:
    stats = [event["stats"] for event in destroyed.events() if event["event"] == "finished"][-1]
    print(
        f"\niteration, median        {step_time_ms(undisturbed.events()):.0f} ms undisturbed,"
        f" {step_time_ms(destroyed.events()):.0f} ms with a snapshot every time"
    )
    if "stall_ms_mean" in stats:
        print(f"stall per step (ours)    {stats['stall_ms_mean']:.2f} ms mean")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Destroy hosts of a training job; compare the bits.")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--losses", type=int, default=5, help="how often hosts are destroyed")
    parser.add_argument("--seed", type=int, default=None, help="of the losses; default: random")
    parser.add_argument("--window", type=int, default=4, help="snapshots per window")
    parser.add_argument("--batch-size", type=int, default=1, help="per rank")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--no-peers", action="store_true", help="daemons that know of no others")
    return parser.parse_args(argv)


def play(args: argparse.Namespace, plan: Sequence[PlannedLoss], cluster: Cluster) -> list[str]:
    """Both runs and the report; what differs between them."""
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="ckptd-nodes-") as scratch:
        folder = Path(scratch)
        undisturbed = ClusterRun(
            "undisturbed", cluster, folder, args, num_ranks=NUM_RANKS, settings=None, peers=False
        )
        peers = {} if args.no_peers else {"replicas": str(args.replicas)}
        destroyed = ClusterRun(
            "destroyed", cluster, folder, args, num_ranks=NUM_RANKS, settings=peers, peers=not args.no_peers
        )
        try:
            progress.say("Run 1: undisturbed. ckptd takes no part in it.")
            undisturbed.start()
            run_to_end(undisturbed)
        finally:
            undisturbed.stop()
        try:
            progress.say(f"Run 2: the same training; hosts are destroyed {len(plan)} times.")
            destroyed.start()
            losses = run_destroyed(destroyed, plan, progress)
        finally:
            destroyed.stop()
        print_losses(losses, destroyed)
        print_summary(undisturbed, destroyed)
        return what_differs(undisturbed, destroyed)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    seed = seed_of(args.seed)
    plan = plan_losses(random.Random(seed), steps=args.steps, window=args.window, count=args.losses)
    with Cluster(NUM_RANKS + NUM_SPARES) as cluster:
        print(
            f"{NUM_RANKS} hosts and {NUM_SPARES} spare: {cluster}\ndata-parallel training of a byte-level MoE"
            f" transformer; losses from seed {seed} (repeat them with --seed {seed}).\n"
        )
        problems = play(args, plan, cluster)
    if problems:
        return failed(problems, f"the runs differ in {len(problems)} places (seed {seed})")
    print(
        f"\nIDENTICAL: every tensor of all {NUM_RANKS} ranks (weights, masters, optimizer, schedule, data"
        f" position,\nrandom states) and all {args.steps} losses of each are equal, bit for bit."
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DaemonFailed, JobFailed) as error:
        sys.exit(f"\nFAILED: {error}")
