"""Every policy on one job with real kills: what it costs, measured beside what `ckptctl advise` would say.

The demo's model trains under a host on this machine. An iteration lasts longer than it computes, as one on a
device does for its host; so replayed iterations last as long as others, and few copies are felt. A *twin*, the
same training without ckptd, is alive all the time. One of the two is stopped (SIGSTOP) while the other runs, in
short turns, so that a machine that becomes slower changes both. An iteration in which a trainer was stopped
counts neither in iterations nor in time.

For each configuration (policy, window, interval), and with nobody killed yet:

1. The job and its twin take turns. The *stall* of an iteration is what the job needs longer than the twin's
   turns before and after it: the median over turns.
2. Some kills, which are not counted later, show how long a *restart* takes: from the kill to the first new
   iteration, without this and the replayed ones; and what the next iterations take longer than others.
3. Failures are drawn, as the work that lies between two of them, and `play` of `ckptd.core.advice` goes through
   them with what is known now: that ETTR is the *prediction*. It is printed, and nothing is changed later.
4. The trainer is SIGKILLed where that was drawn. The *measured* ETTR is the iterations that count, times the
   length of the twin's iterations in between, as a part of the time.

`predicted_vs_measured_ettr_max_error` is the largest difference. Selecting experts of a large model is timed,
too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

import torch

from bench.common import Metric, emit, forget, median, parser, scratch_folder, table
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import Operator, discover_operators
from ckptd.client.schedule.expert_selection import ExpertSelection
from ckptd.client.schedule.snapshot_plan import SnapshotPlan, operator_costs
from ckptd.core.advice.failure_simulation import play
from ckptd.core.advice.job_shape import RankShape
from ckptd.core.advice.outlook import (
    Conditions,
    PolicyOutlook,
    dense_outlook,
    partial_outlook,
    selected_outlook,
    window_outlook,
)
from ckptd.core.partial_experts import Selection, plan_partial, rotation
from ckptd.core.recovery.global_plan import VERIFY_ITERATIONS
from ckptd.core.snapshot_policy import OperatorCost, OperatorKind, PartialScope
from ckptd.demo.lab import DemoDaemon, Event, Trainer, daemon_folders
from ckptd.demo.model import MoEConfig, native_precision
from ckptd.demo.train import build_model
from ckptd.transport.wire import RefusedError

__all__ = ["Restart", "Stretch", "drawn_stretches", "main", "predicted_ettr", "restart_of", "turn_points"]

TIMEOUT_S = 300.0
ENDLESS, JOB = "1000000", "bench-policies"
WARM_STEPS = 50  # of each job, until a first window is there and it is decided where copies run
TURN_STEPS = 12  # of each turn; of the job a multiple of its interval
TURN_EVERY = 50  # iterations of a run between two turns of the twin
COLD_STEPS = 4  # iterations of a new process that take longer than others, after a first whole window
TRIED_KILLS = 3
EXPERTS = MoEConfig().num_experts
MEMORY_BPS = 1e12  # peers are not part of it: what is loaded lies in this host's memory


@dataclass(frozen=True, slots=True)
class Configuration:
    """A policy with its window and interval."""

    policy: str
    window: int
    every: int

    @property
    def arguments(self) -> list[str]:
        """Of the trainer."""
        if self.policy in ("partial", "selected"):
            of = ["--experts", str(EXPERTS // self.window)]
        else:
            of = [] if self.policy == "dense" else ["--window", str(self.window)]
        return ["--policy", self.policy, "--every", str(self.every), *of]

    @property
    def name(self) -> str:
        """For a table."""
        detail = f"every {self.every}" if self.policy == "dense" else f"W={self.window}"
        if self.policy != "dense" and self.every > 1:
            detail += f", every {self.every}"
        return f"{self.policy}, {detail}"

    @property
    def cold_steps(self) -> int:
        """The first iterations of a process, of which some make a copy plan and all touch new memory."""
        return self.window * self.every + COLD_STEPS

    @property
    def round(self) -> int:
        """Iterations after which a snapshot is there again to which the job can go back."""
        return self.window if self.policy == "aligned" else self.every

    def outlook(self, rank: RankShape, conditions: Conditions) -> PolicyOutlook:
        """As predicted."""
        if self.policy == "dense":
            return dense_outlook(rank, conditions, self.every)
        if self.policy == "partial":
            return partial_outlook(rank, conditions, self.window, self.every)
        if self.policy == "selected":
            return selected_outlook(rank, conditions, self.window, self.every)
        return window_outlook(
            rank, conditions, "aligned" if self.policy == "aligned" else "sliding", self.window
        )


CONFIGURATIONS = [
    *(Configuration("sliding", window, 1) for window in (1, 2, 4, 8)),
    *(Configuration("aligned", window, 1) for window in (2, 4)),
    *(Configuration("dense", 1, every) for every in (2, 5, 10)),
    *(Configuration("partial", window, 1) for window in (2, 8)),
    Configuration("partial", 4, 3),
    Configuration("selected", 8, 1),
]


# --- what is drawn and predicted before any kill that counts -------------------------------------------


@dataclass(frozen=True, slots=True)
class Stretch:
    """The work between two failures: so many iterations, and a part of one that the failure cuts off."""

    iterations: int
    cut_off: float


def drawn_stretches(rng: random.Random, mtbf: float, total: float) -> list[Stretch]:
    """Failures at random (Poisson), at least one; the last stretch ends without one.

    Args:
        mtbf: iterations between two failures, on average.
        total: iterations of all stretches.
    """
    while True:
        found: list[Stretch] = []
        left = total
        while (until := rng.expovariate(1 / mtbf)) < left:
            # At least one: a process is known to train by its first iteration.
            found.append(Stretch(max(1, int(until)), until % 1))
            left -= until
        if found:
            return [*found, Stretch(max(1, round(left)), 0.0)]


def predicted_ettr(outlook: PolicyOutlook, iteration_s: float, stretches: Sequence[Stretch]) -> float:
    """Play failures at the moments at which that work is done, as far as is known before."""
    step_s = iteration_s + outlook.stall_s
    recovers_s = outlook.restart_s + outlook.load_s + outlook.replay_s
    failures_s: list[float] = []
    now_s = 0.0
    for each in stretches[:-1]:
        now_s += (each.iterations + each.cut_off) * step_s
        failures_s.append(now_s)
        now_s += recovers_s
    now_s += (stretches[-1].iterations + 1e-6) * step_s
    return play(outlook, iteration_s, failures_s, now_s).ettr


def turn_points(first: int, last: int, *, cold: int, guard: int) -> list[int]:
    """The iterations of a stretch after which the twin has a turn: settled ones, and none that the failure
    after ``last`` could take away, which is nearer than ``guard`` to it.
    """
    return [at for at in range(first + TURN_EVERY, last - guard, TURN_EVERY) if at > first + cold]


def shape() -> RankShape:
    """The demo's model in numbers."""
    precision = native_precision()
    model, masters = build_model(0, precision)
    optimizer = torch.optim.AdamW(list(masters.values()))
    for master in masters.values():
        master.grad = torch.zeros_like(master)
    optimizer.step()
    binding = LiveState(model, [optimizer], masters if precision == "bf16" else None)
    operators = discover_operators(model, rows_allowed=binding.rows_allowed)
    costs = operator_costs(binding, operators, {})
    return RankShape(tuple(costs), (0.0,) * len(costs))  # a frozen operator saves no time here


# --- what is measured ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restart:
    """After a kill: ``restart_s`` until the loop runs, without ``replayed`` iterations and the first new one.
    ``first_s``: the end of this one, from the kill on. ``cold_s``: what the next ones take longer than others,
    together; it is ``whole`` if the process lived through all of them.
    """

    restart_s: float
    cold_s: float
    replayed: int
    first_s: float
    whole: bool


def restart_of(events: Sequence[Event], killed_s: float, step_s: float, cold_steps: int) -> Restart:
    """What the events since a kill say of it; a process has trained at least one iteration.

    Args:
        step_s: an iteration that nothing disturbs.
        cold_steps: after the first new one, those that may take longer.
    """
    steps = [e for e in events if e["event"] == "step" and e["time_s"] > killed_s]
    replayed = sum(bool(e["replaying"]) for e in steps)
    new = [float(e["time_s"]) for e in steps if not e["replaying"]][: 1 + cold_steps]
    first_s = new[0] - killed_s
    cold_s = max(0.0, new[-1] - new[0] - (len(new) - 1) * step_s)
    restart_s = first_s - (1 + replayed) * step_s
    return Restart(restart_s, cold_s, replayed, first_s, len(new) == 1 + cold_steps)


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What is known of a job before its failures: iterations of the twin, those of the job as a multiple of
    them (the median over turns), and restarts.
    """

    plain_s: float
    ratio: float
    restarts: tuple[Restart, ...]
    stats: Mapping[str, float]

    @property
    def stall_s(self) -> float:
        """Of an iteration."""
        return max(0.0, (self.ratio - 1) * self.plain_s)


@dataclass(slots=True)
class Run:
    """A run with failures: ``iterations`` that count in ``length_s``, both without the turns of the twin.

    `plain_s` has those; `redone` counts iterations that were lost and done again.
    """

    iterations: int = 0
    length_s: float = 0.0
    plain_s: list[float] = field(default_factory=list)
    redone: int = 0
    restarts: list[Restart] = field(default_factory=list)
    lost_tokens: int = 0
    plt: float = 0.0

    @property
    def ettr(self) -> float:
        """The part of the time that counts."""
        return self.iterations * statistics.fmean(self.plain_s) / self.length_s


class Lab:
    """A daemon, a twin that trains without it, and one job at a time."""

    def __init__(self, folder: Path, runtime: Path, segments: Path, common: Sequence[str]) -> None:
        self._folder, self._runtime, self._common = folder, runtime, list(common)
        self._daemon = DemoDaemon(runtime, segments)
        self._count = 0
        self._twin = self._trainer(["--daemon", "none", "--steps", ENDLESS], hosted=False)

    def __enter__(self) -> Self:
        self._daemon.start()
        self._twin.start(init_seed=1)
        try:
            follow_steps(self._twin, WARM_STEPS)
            pause(self._twin)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._twin.stop()
        self._daemon.stop()

    def job(self, what: Configuration) -> Job:
        """A job that is about to start."""
        own = ["--daemon", self._daemon.endpoint, "--steps", ENDLESS, "--stats-every", "5", *what.arguments]
        return Job(self._trainer(own, hosted=True), self._twin, what)

    def forget(self, job: Job) -> None:
        """Free its memory, once the daemon has noticed that its trainer is gone."""
        deadline = time.monotonic() + 20
        while True:
            try:
                forget(self._daemon.endpoint, JOB, job.trainer.name)
            except RefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

    def _trainer(self, arguments: Sequence[str], *, hosted: bool) -> Trainer:
        self._count += 1
        name = f"t{self._count}"
        return Trainer(
            name,
            self._folder,
            [*self._common, *arguments, "--run", name],
            host_folder=self._runtime if hosted else None,
        )


@dataclass(slots=True)
class Job:
    """A job and its twin; both are stopped between two calls."""

    trainer: Trainer
    twin: Trainer
    what: Configuration

    def start(self) -> None:
        """Start it, and train until it is settled."""
        self.trainer.start(init_seed=1)
        follow_steps(self.trainer, WARM_STEPS + self.what.window * self.what.every)
        pause(self.trainer)

    def undisturbed(self, turns: int, rng: random.Random) -> Undisturbed:
        """Take turns, and then try some kills."""
        steps = -(-TURN_STEPS // self.what.every) * self.what.every
        plain_s, own_s = [turn(self.twin, TURN_STEPS)], []
        for _ in range(turns):
            own_s.append(turn(self.trainer, steps))
            plain_s.append(turn(self.twin, TURN_STEPS))
        around_s = [statistics.fmean(pair) for pair in itertools.pairwise(plain_s)]
        ratio = median([own / around for own, around in zip(own_s, around_s, strict=True)])
        mean_s = statistics.fmean(plain_s)
        go_on(self.trainer)
        restarts = [self._tried_kill(mean_s * ratio, rng) for _ in range(TRIED_KILLS)]
        told = [e["stats"] for e in self.trainer.drain() if e["event"] == "stats"]
        pause(self.trainer)
        # Just after a restart there is no snapshot yet.
        stats = next(each for each in reversed(told) if each["snapshot_bytes"])
        return Undisturbed(mean_s, ratio, tuple(restarts), stats)

    def _tried_kill(self, step_s: float, rng: random.Random) -> Restart:
        follow_steps(self.trainer, self.what.round + 2)
        time.sleep(rng.random() * step_s)
        killed_s = self.trainer.kill()
        since = len(self.trainer.drain())
        self._back()
        follow_steps(self.trainer, self.what.cold_steps)
        return restart_of(self.trainer.events[since:], killed_s, step_s, self.what.cold_steps)

    def _back(self) -> Event:
        """The first iteration of a new process that is no replay."""
        return follow(self.trainer, lambda e: e["event"] == "step" and not e["replaying"])

    def run(self, stretches: Sequence[Stretch], step_s: float) -> Run:
        """Train, and kill it after each stretch but the last.

        Args:
            step_s: an iteration that nothing disturbs.
        """
        found = Run(plain_s=[turn(self.twin, TURN_STEPS)])
        go_on(self.trainer)
        # Whole snapshots are compared with older ones of the same process, if it has two.
        follow_steps(self.trainer, 2 * self.what.round + 2)
        # The first one that counts begins with a snapshot to which the job can go back.
        begun = follow(
            self.trainer, lambda e: e["event"] == "step" and (e["step"] + 1) % self.what.round == 0
        )
        since, first = len(self.trainer.events), int(begun["step"]) + 1
        kills: list[tuple[int, float]] = []
        for stretch in stretches:
            last = first + stretch.iterations - 1
            for at in turn_points(first, last, cold=self.what.cold_steps, guard=self.what.round + 3):
                self._interrupted(at, found)
            newest = self._step(last)
            if stretch is stretches[-1]:
                break
            time.sleep(max(0.0, newest["time_s"] + stretch.cut_off * found.plain_s[-1] - time.time()))
            killed_s = self.trainer.kill()
            kills.append((len(self.trainer.drain()), killed_s))
            first = int(self._back()["step"])
        pause(self.trainer)
        found.plain_s.append(turn(self.twin, TURN_STEPS))
        found.length_s += newest["time_s"] - begun["time_s"]
        found.iterations += newest["step"] - begun["step"]
        events = self.trainer.events
        ends = [at for at, _ in kills[1:]] + [len(events)]
        found.restarts = [
            restart_of(events[at:end], killed_s, step_s, self.what.cold_steps)
            for (at, killed_s), end in zip(kills, ends, strict=True)
        ]
        steps = [e["step"] for e in events[since:] if e["event"] == "step" and not e["replaying"]]
        found.redone = len(steps) - len(set(steps))
        lives = [e for e in events[since:] if e["event"] == "attached"]
        found.lost_tokens, found.plt = sum(int(e["lost_tokens"]) for e in lives), float(lives[-1]["plt"])
        return found

    def _step(self, number: int) -> Event:
        """The end of this iteration, which this process trains."""
        newest = self.trainer.events[-1]
        reached = [e for e in self.trainer.events if e["event"] == "step" and e["pid"] == newest["pid"]][-1]
        if reached["step"] >= number:
            return reached
        return follow(self.trainer, lambda e: e["event"] == "step" and e["step"] >= number)

    def _interrupted(self, at: int, found: Run) -> None:
        """A turn of the twin after iteration ``at``. The one in which the job was stopped does not count."""
        self._step(at)
        pause(self.trainer)
        before = [e for e in self.trainer.drain() if e["event"] == "step"][-1]
        found.plain_s.append(turn(self.twin, TURN_STEPS))
        go_on(self.trainer)
        after = follow(self.trainer, lambda e: e["event"] == "step")
        found.length_s -= after["time_s"] - before["time_s"]
        found.iterations -= after["step"] - before["step"]


def follow(trainer: Trainer, until: Callable[[Event], bool]) -> Event:
    """The first new event for which that holds."""
    for _ in trainer.follow(until, timeout_s=TIMEOUT_S):
        pass
    return trainer.events[-1]


def follow_steps(trainer: Trainer, count: int) -> None:
    """Wait until so many iterations are complete, replayed ones included."""
    left = itertools.count(count, -1)
    follow(trainer, lambda e: e["event"] == "step" and next(left) <= 1)


def pause(trainer: Trainer) -> None:
    """Stop the process that trains, where it is."""
    os.kill(trainer.drain()[-1]["pid"], signal.SIGSTOP)


def go_on(trainer: Trainer) -> None:
    """End a pause."""
    os.kill(trainer.events[-1]["pid"], signal.SIGCONT)


def turn(trainer: Trainer, steps: int) -> float:
    """The mean length of so many iterations of a trainer that is stopped before and afterwards. The one in
    which it was stopped does not count.
    """
    since = len(trainer.drain())
    go_on(trainer)
    follow_steps(trainer, 1 + steps)
    pause(trainer)
    times_s = [e["time_s"] for e in trainer.events[since:] if e["event"] == "step"]
    return float(times_s[-1] - times_s[0]) / (len(times_s) - 1)


def predict(what: Configuration, rank: RankShape, known: Undisturbed) -> PolicyOutlook:
    """The outlook of a configuration before its failures."""
    conditions = Conditions(
        known.plain_s,
        1.0,  # `play` goes through the failures themselves
        known.stats["capture_gb_per_s"] * 1e9,
        MEMORY_BPS,
        restart_s=max(0.0, statistics.fmean(each.restart_s + each.cold_s for each in known.restarts)),
        verify_iterations=VERIFY_ITERATIONS,
    )
    return replace(what.outlook(rank, conditions), stall_s=known.stall_s)


def selection_ms(selected: int, selection: Selection) -> float:
    """Choosing the experts of one snapshot of 61 layers of 256 experts, beside training: milliseconds of the
    processor, with what was counted; the median over a window.
    """
    layers, experts = [f"{layer}.experts" for layer in range(61)], 256
    operators = [
        Operator(f"{layer}.{i}", OperatorKind.EXPERT, (), layer, expert=(layer, i))
        for layer in layers
        for i in range(experts)
    ]
    window = experts // selected
    phases = rotation([op.expert for op in operators], window)
    costs = [OperatorCost(op.name, op.kind, 1, 0) for op in operators]
    schedule = plan_partial(costs, phases, window, fixed_bytes=0, budget_bytes=None)
    plan = SnapshotPlan(operators, costs, schedule, "partial", {}, {}, 0, scope=PartialScope.BOTH)
    plan.selection, plan.selectable = selection, frozenset(range(len(operators)))
    rng, chosen, times_s = random.Random(1), ExpertSelection(plan, {}), []
    popular = [rng.random() ** 4 for _ in range(experts)]
    for step in range(3 * window):
        given = {layer: [(step + 1) * share for share in popular] for layer in layers}
        found = chosen.experts(step)
        anchored = frozenset(plan.turns(step)) if found is None else found
        chosen.begun(step, step, anchored, given, follows=step > 0)
        begun = time.thread_time()
        chosen.filled(step)
        times_s.append(time.thread_time() - begun)
    return 1e3 * median(times_s[-window:])


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration with one MTBF; columns in pairs are measured and predicted. ``back_s`` is the time from
    a kill until the first new iteration is complete.
    """

    policy: str
    mtbf_s: float
    kills: int
    snapshot_mb: float
    predicted_mb: float
    plain_ms: float
    stall_ms: float
    back_s: float
    predicted_back_s: float
    redone: int
    lost_tokens: int
    plt: float
    ettr: float
    predicted: float

    @classmethod
    def of(
        cls,
        what: Configuration,
        mtbf_s: float,
        known: Undisturbed,
        outlook: PolicyOutlook,
        run: Run,
        predicted: float,
    ) -> Row:
        """Of what was known before, and what came."""
        restart_s = statistics.fmean(each.restart_s for each in known.restarts)
        return cls(
            what.name,
            mtbf_s,
            len(run.restarts),
            known.stats["snapshot_bytes"] / 1e6,
            outlook.snapshot_bytes / 1e6,
            1e3 * statistics.fmean(run.plain_s),
            1e3 * known.stall_s,
            statistics.fmean(each.first_s for each in run.restarts),
            restart_s + outlook.replay_s + known.plain_s + known.stall_s,
            run.redone,
            run.lost_tokens,
            run.plt,
            run.ettr,
            predicted,
        )

    @property
    def cells(self) -> list[str]:
        """For a table."""
        return [
            self.policy,
            f"{self.mtbf_s:g}",
            str(self.kills),
            f"{self.snapshot_mb:.1f} {self.predicted_mb:.1f}",
            f"{self.plain_ms:.1f}",
            f"{self.stall_ms:.1f}",
            f"{self.back_s:.2f} {self.predicted_back_s:.2f}",
            str(self.redone),
            str(self.lost_tokens),
            f"{self.plt:.1%}",
            f"{self.ettr:.3f} {self.predicted:.3f}",
            f"{self.ettr - self.predicted:+.3f}",
        ]


HEADER = ["policy", "MTBF s", "kills", "MB", "plain ms", "stall ms", "back s", "redone", "lost tokens", "PLT"]
HEADER += ["ETTR", "off by"]


def measured(
    lab: Lab, what: Configuration, rank: RankShape, args: argparse.Namespace, rng: random.Random
) -> Iterator[Row]:
    """One job, and a run of it for each MTBF."""
    job = lab.job(what)
    try:
        job.start()
        known = job.undisturbed(args.turns, rng)
        for mtbf_s in args.mtbf:
            outlook = predict(what, rank, known)
            stretches = drawn_stretches(rng, mtbf_s / known.plain_s, args.length / known.plain_s)
            predicted = predicted_ettr(outlook, known.plain_s, stretches)
            print(f"{what.name}, {len(stretches) - 1} kills: predicted {predicted:.3f}", flush=True)
            run = job.run(stretches, known.plain_s + known.stall_s)
            yield Row.of(what, mtbf_s, known, outlook, run, predicted)
            # What is known before the next run.
            known = replace(known, restarts=(*known.restarts, *(each for each in run.restarts if each.whole)))
    finally:
        job.trainer.stop()
    lab.forget(job)


def main() -> None:
    out = parser(__doc__)
    out.add_argument("--length", type=float, default=26.0, help="seconds of work in each run")
    out.add_argument("--mtbf", type=float, nargs="+", default=[6.0, 12.0], help="seconds between failures")
    out.add_argument("--configurations", type=int, default=len(CONFIGURATIONS))
    out.add_argument("--turns", type=int, default=4, help="of each job before its failures")
    out.add_argument("--batch-size", type=int, default=1)
    out.add_argument("--period-ms", type=float, default=120.0, help="of an iteration, most of it idle")
    out.add_argument("--seed", type=int, default=1)
    out.add_argument("--rows", type=Path, metavar="FILE", help="append each row to it as a line of JSON")
    args = out.parse_args()
    rng = random.Random(args.seed)
    threads = min(4, len(os.sched_getaffinity(0)))
    common = ["--period-ms", str(args.period_ms)]
    common += ["--batch-size", str(args.batch_size), "--threads", str(threads), "--job", JOB]
    rank = shape()
    rows: list[Row] = []
    with (
        scratch_folder() as folder,
        daemon_folders() as (runtime, segments),
        Lab(Path(folder), runtime, segments, common) as lab,
    ):
        for what in CONFIGURATIONS[: args.configurations]:
            for row in measured(lab, what, rank, args, rng):
                rows.append(row)
                print("  ".join(row.cells), flush=True)
                if args.rows is not None:
                    with args.rows.open("a") as sink:
                        sink.write(json.dumps(asdict(row)) + "\n")
    print("\n" + table(HEADER, [row.cells for row in rows]))
    errors = [abs(row.ettr - row.predicted) for row in rows]
    metrics: dict[str, Metric] = {
        "configurations": len(rows),
        "precision": native_precision(),
        "kills": sum(row.kills for row in rows),
        "predicted_vs_measured_ettr_max_error": max(errors),
        "predicted_vs_measured_ettr_mean_error": statistics.fmean(errors),
        "select_8_of_256_in_61_layers_ms": selection_ms(8, Selection.MODEL),
        "select_32_of_256_in_61_layers_ms": selection_ms(32, Selection.MODEL),
        "select_8_of_256_in_each_of_61_layers_ms": selection_ms(8, Selection.LAYER),
    }
    emit("policies", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
