"""`make demo-elastic`: hosts vanish one by one, and come back one by one, and an elastic training
goes on with those that there are.

Five hosts, each a network namespace of this machine with a daemon, memory and processes of its own
(`tests.cluster`), under torchrun with a node range of 2 to 5. Each trainer has a host process
(`ckptd.host`): when a machine is lost, the trainers on the others are forked anew at once, and torchrun
meets anew only when one comes. With `--plain` there is none. Two hosts are destroyed at seeded
random, the third one because it alone holds an expert: all of its replicas are gone with it, and it
comes back from a replica of a snapshot. Then the hosts return, empty. Every time the experts are
placed anew over what is there. The demo fails unless at each change the job went on at the very
step that was cut off, all replicas of all experts were equal, bit for bit (the training itself
checks that), and the losses of all steps are those of one process that nobody disturbed, with the
same global batch, up to the order of sums.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.demo.lab import SHARED_CORES, Event, read_events
from ckptd.demo.report import table
from examples.demo_progress import Progress, failed, seed_of
from examples.moe_elastic.model import EXPERTS
from tests.cluster.daemons import DaemonFailed, HostDaemon, provision_keys
from tests.cluster.hosts import Cluster, Host, clean_environment
from tests.cluster.torchrun import SETTINGS, JobFailed, TorchrunJob

__all__ = ["Change", "Report", "main", "report_of", "sole_holders"]

HOSTS, FEWEST = 5, 2
READY_TIMEOUT_S = 180.0
CLOSE = 1e-6
"""Of losses in double precision, relative: what another order of sums may have grown to at the end of a run."""
MEET = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=300,last_call_timeout=3"


@dataclass(frozen=True, slots=True)
class Change:
    """Hosts went or came: when, what is said of it, and the last step that all ranks had done."""

    time_s: float
    what: str
    hosts_before: int
    hosts_after: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a change; times in seconds since it: until all ranks had met, the state was
    planned, loaded, and the first step done.
    """

    change: Change
    start: int
    met_s: float
    planned_s: float
    loaded_s: float
    back_s: float
    seconds: dict[str, float]
    reason: str

    @property
    def redone(self) -> int:
        """Steps that had been done and were done again; the one that was cut off is none."""
        return self.change.last_step + 1 - self.start


def report_of(change: Change, events: Sequence[Event]) -> Report | None:
    """What all hosts' logs tell of the world after a change; None if it has not done a step yet.

    Args:
        events: of all hosts.
    """
    later = [e for e in events if e["time_s"] > change.time_s]
    worlds = [e for e in later if e["event"] == "world"]
    for number in sorted({e["number"] for e in worlds}):
        begun = [e for e in worlds if e["number"] == number]
        loaded = [e for e in later if e["event"] == "loaded" and e["time_s"] > begun[0]["time_s"]]
        steps = [e for e in later if e["event"] == "step" and e["time_s"] > begun[0]["time_s"]]
        if len(begun) != change.hosts_after or len(loaded) < len(begun) or not steps:
            continue
        met = max(e["time_s"] for e in later if e["event"] == "met" and e["time_s"] < begun[0]["time_s"])
        longest = max(loaded, key=lambda e: sum(e["seconds"].values()))["seconds"]
        return Report(
            change,
            begun[0]["start"],
            met - change.time_s,
            max(e["time_s"] for e in begun) - change.time_s,
            max(e["time_s"] for e in loaded[: len(begun)]) - change.time_s,
            min(e["time_s"] for e in steps) - change.time_s,
            longest,
            begun[0]["reason"],
        )
    return None


def sole_holders(worlds: Sequence[Event]) -> dict[str, str]:
    """The hosts that alone hold some expert, with the name of one.

    Args:
        worlds: what each rank of one world has told at its beginning.
    """
    found: dict[str, str] = {}
    for layer in worlds[0]["held"]:
        for expert in range(EXPERTS):
            holders = [e["host"] for e in worlds if expert in e["held"][layer]]
            if len(holders) == 1:
                found.setdefault(holders[0], f"{layer}.experts.{expert}")
    return found


class Run:
    """The job over the cluster, with a daemon on each host, followed by the logs of the hosts."""

    def __init__(self, cluster: Cluster, folder: Path, args: argparse.Namespace) -> None:
        self.cluster, self.folder = cluster, folder
        self.hurry = folder / "hurry"
        self.daemons = {
            host.name: HostDaemon(
                host, folder, settings={"labels": f"rack=r{host.index}", "replicas": "1", "memory": "256MiB"}
            )
            for host in cluster.hosts
        }
        hosted = [] if args.plain else ["ckptd.host", "--min-ranks", str(FEWEST), "-m"]
        command = [
            *("-m", "--", *hosted, "examples.moe_elastic.train", "--log", str(folder)),
            *("--steps", str(args.steps), "--step-ms", str(args.step_ms)),
            *("--hurry", str(self.hurry), "--slots", str(args.slots)),
        ]
        self.job = TorchrunJob(
            cluster,
            command,
            nnodes=f"{FEWEST}:{HOSTS}",
            folder=folder,
            env=self._environment,
            settings={**SETTINGS, "--rdzv-conf": MEET},
        )

    def _environment(self, host: Host) -> dict[str, str]:
        return {**SHARED_CORES, **self.daemons[host.name].env, "CKPTD_NODE_ID": host.name}

    def start(self) -> None:
        provision_keys(self.daemons.values())
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(HostDaemon.start, self.daemons.values()))
        self.job.start()

    def events(self) -> list[Event]:
        """Of all hosts, in the order of time."""
        found = [e for host in self.cluster.hosts for e in read_events(self.folder / f"{host.name}.jsonl")]
        return sorted(found, key=lambda event: event["time_s"])

    def newest_world(self) -> list[Event]:
        """What the ranks of the newest world told at its beginning."""
        worlds = [e for e in self.events() if e["event"] == "world"]
        newest = max((e["number"] for e in worlds), default=-1)
        return [e for e in worlds if e["number"] == newest]

    def until_protected(self) -> None:
        """Wait until all ranks of the newest world are in the middle of one step, of which the
        state is held as often as it is to be.
        """
        self.job.until(self._protected, "a protected step", timeout_s=READY_TIMEOUT_S)

    def _protected(self) -> bool:
        world = self.newest_world()
        if len(world) != sum(host.up for host in self.cluster.hosts):
            return False
        since = max(e["time_s"] for e in world)
        halves = [e for e in self.events() if e["event"] == "half" and e["time_s"] > since]
        newest = {e["host"]: e for e in halves}
        steps = {e["step"] for e in newest.values()}
        ready = all(e["floor"] > world[0]["start"] and e["park"] for e in newest.values())
        return len(newest) == len(world) and len(steps) == 1 and ready

    def last_step(self) -> int:
        """The newest step that a rank has done."""
        return max((e["step"] for e in self.events() if e["event"] == "step"), default=-1)

    def lose(self, host: Host, what: str, delay_s: float) -> Change:
        """Destroy a host in the middle of a step."""
        before = sum(h.up for h in self.cluster.hosts)
        self.until_protected()
        done = self.last_step()
        self.job.until(lambda: self.last_step() > done, "one more step", timeout_s=60)
        time.sleep(delay_s)
        begun_s = time.time()
        host.destroy()
        self.job.lost(host)
        return Change(begun_s, what, before, before - 1, self.last_step())

    def gain(self, host: Host) -> Change:
        """A host returns, empty."""
        before = sum(h.up for h in self.cluster.hosts)
        self.until_protected()
        host.boot()
        self.daemons[host.name].start()
        begun_s = time.time()
        self.job.join(host)
        return Change(begun_s, f"{host.name} came", before, before + 1, -1)

    def back(self, change: Change) -> Report:
        """Wait until the world after a change has done a step."""
        found: list[Report] = []

        def is_back() -> bool:
            found[:] = [r for r in [report_of(change, self.events())] if r is not None]
            return bool(found)

        self.job.until(is_back, f"a step after {change.what}", timeout_s=READY_TIMEOUT_S)
        return found[0]


def play(run: Run, rng: random.Random, step_s: float, say: Callable[[str], None]) -> list[Report]:
    """All changes: three hosts go, three come."""
    reports = []
    gone: list[Host] = []
    for number in range(HOSTS - FEWEST):
        run.until_protected()
        up = [host for host in run.cluster.hosts if host.up]
        victim, what = rng.choice(up), "lost"
        if number == HOSTS - FEWEST - 1:
            sole = sole_holders(run.newest_world())
            victim = next(host for host in up if host.name in sole)
            what = f"lost, with all of {sole[victim.name]}"
        change = run.lose(victim, f"{victim.name} {what}", step_s * (0.6 + 0.3 * rng.random()))
        gone.append(victim)
        reports.append(_told(run, change, say))
    return [*reports, *(_told(run, run.gain(host), say) for host in gone)]


def _told(run: Run, change: Change, say: Callable[[str], None]) -> Report:
    say(f"--> {change.what}; {change.hosts_before} hosts before, {change.hosts_after} now")
    found = run.back(change)
    if change.last_step < 0:  # a host that comes cuts off the step at which the launcher ends the ranks
        done = [
            e
            for e in run.events()
            if e["event"] == "step" and change.time_s - 60 < e["time_s"] < change.time_s + found.met_s
        ]
        cut = Change(
            change.time_s, change.what, change.hosts_before, change.hosts_after, max(e["step"] for e in done)
        )
        found = Report(
            cut,
            found.start,
            found.met_s,
            found.planned_s,
            found.loaded_s,
            found.back_s,
            found.seconds,
            found.reason,
        )
    say(f"    on {change.hosts_after} hosts from step {found.start}, back in {found.back_s:.1f} s")
    return found


def undisturbed(folder: Path, args: argparse.Namespace) -> dict[int, float]:
    """The losses of one process with all experts and the whole batch, without ckptd."""
    folder.mkdir()
    own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-m", "examples.moe_elastic.train", "--daemon", "none", "--log", str(folder)]
    command += ["--steps", str(args.steps), "--slots", str(EXPERTS)]
    env = {**clean_environment(), **SHARED_CORES, **own, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, env=env, check=True, timeout=READY_TIMEOUT_S * 2)
    return losses(read_events(folder / "alone.jsonl"))


def losses(events: Sequence[Event]) -> dict[int, float]:
    """By step; of one that was done again, the last."""
    return {e["step"]: e["loss"] for e in events if e["event"] == "step"}


def differences(expected: dict[int, float], found: dict[int, float]) -> list[str]:
    """Steps that are missing, or have another loss."""
    both = sorted(expected.keys() & found.keys())
    far = [s for s in both if abs(found[s] - expected[s]) > CLOSE * abs(expected[s])]
    return [
        *(f"step {step} was not done" for step in sorted(expected.keys() - found.keys())),
        *(f"loss of step {s}: {found[s]!r}, undisturbed {expected[s]!r}" for s in far),
    ]


def print_reports(reports: Sequence[Report]) -> None:
    rows: list[list[object]] = []
    for report in reports:
        change, s = report.change, report.seconds
        rows.append(
            [
                change.what,
                f"{change.hosts_before} to {change.hosts_after}",
                change.last_step,
                report.start,
                report.redone,
                report.met_s,
                s.get("inventory_s"),
                s.get("plan_s"),
                s.get("verify_s"),
                s.get("ship_s"),
                s.get("attach_s"),
                report.back_s,
            ]
        )
    header = [
        "what",
        "hosts",
        "last step",
        "goes on at",
        "redone",
        "met",
        "look",
        "plan",
        "verify",
        "give",
        "attach",
        "back",
    ]
    print("\n" + table(header, rows))
    print(
        "\nTimes in seconds. met: from the change until the ranks of the new world had met (torchrun's heartbeat, interpreters, imports);"
        "\nlook: what do the nodes hold; plan: where to go on, and placement; verify: digests of what is read; give: ranks give each other"
        "\nwhat their nodes lack; attach: a new Checkpointer; back: from the change until the first step of the new world was done."
    )


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hosts vanish and come; the training goes on.")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--step-ms", type=float, default=800.0, help="more time for each step")
    parser.add_argument("--slots", type=int, default=4, help="experts of a layer on a host")
    parser.add_argument("--seed", type=int, default=None, help="of the losses; default: random")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--plain", action="store_true", help="no host processes: torchrun starts all anew")
    return parser.parse_args(argv)


def draw(path: Path, expected: dict[int, float], found: dict[int, float], reports: Sequence[Report]) -> None:
    """Both loss curves, with a mark at each change."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    axes.plot(
        *zip(*sorted(expected.items()), strict=True),
        color="#9bc4e2",
        linewidth=5,
        label="one process, undisturbed",
    )
    axes.plot(*zip(*sorted(found.items()), strict=True), color="#12355b", linewidth=1, label="elastic")
    for report in reports:
        axes.axvline(report.start, color="#c1121f", linewidth=0.8)
        axes.text(report.start, max(expected.values()), f" {report.change.hosts_after}")
    axes.set_xlabel("step; in red: hosts from there on")
    axes.set_ylabel("training loss (nats per byte)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def run_all(args: argparse.Namespace, rng: random.Random) -> tuple[list[str], dict[str, Any]]:
    """Both runs; what is wrong, and what is to be shown."""
    say = Progress().say
    with tempfile.TemporaryDirectory(prefix="ckptd-elastic-") as scratch, Cluster(HOSTS) as cluster:
        say(f"One process, undisturbed, without ckptd; then {cluster}.")
        expected = undisturbed(Path(scratch) / "undisturbed", args)
        folder = Path(scratch) / "elastic"
        folder.mkdir()
        run = Run(cluster, folder, args)
        try:
            run.start()
            reports = play(run, rng, args.step_ms / 1e3, say)
            run.hurry.touch()
            run.job.wait(timeout_s=READY_TIMEOUT_S)
            say("the job is over")
            found = losses(run.events())
        finally:
            run.job.stop()
    print_reports(reports)
    draw(args.out / "demo_elastic.png", expected, found, reports)
    problems = differences(expected, found)
    problems += [f"{r.change.what}: {r.redone} steps done again" for r in reports if r.redone]
    if not any("come from snapshots" in report.reason for report in reports):
        problems.append("no expert came from a snapshot")
    most = max(abs(found[s] - expected[s]) / abs(expected[s]) for s in expected.keys() & found.keys())
    return problems, {"steps": len(found), "most": most}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    seed = seed_of(args.seed)
    print(
        f"{EXPERTS} experts in each of two layers, {args.slots} slots on each of {HOSTS} hosts, {os.cpu_count()} cores for all of them."
        f"\nLosses from seed {seed} (repeat them with --seed {seed}).\n"
    )
    problems, shown = run_all(args, random.Random(seed))
    print(f"\npicture  {args.out / 'demo_elastic.png'}")
    if problems:
        return failed(problems, f"{len(problems)} problems (seed {seed})")
    print(
        f"\nAll {shown['steps']} steps were done once; their losses are those of the undisturbed process within {shown['most']:.1e} (relative);"
        "\nat every change all replicas of all experts were equal, bit for bit."
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (JobFailed, DaemonFailed) as error:
        sys.exit(f"\nFAILED: {error}")
