"""Every policy on one job with real kills: what it costs, measured beside what `ckptctl advise` would say.

The demo's model trains under a host on this machine. An iteration lasts longer than it computes, as one on a
device does for its host; so replayed iterations last as long as others, and few copies are felt. For each
configuration (policy, window, interval, time between failures) it runs for a while, and is SIGKILLed at random
moments; its *measured* ETTR is the iterations that count times their length without ckptd, as a part of that
while. *Predicted* is the ETTR of `ckptd.core.advice`, played through the same failures. What it needs to know
is measured in the same run: an iteration without ckptd, before each configuration; how long a restart takes, in
each; the rate of copies and what copies beside training cost, in a first run with dense snapshots.

`predicted_vs_measured_ettr_max_error` is the largest difference. Selecting experts of a large model is timed,
too.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from bench.common import emit, forget, median, parser, scratch_folder, table
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import discover_operators
from ckptd.client.schedule.snapshot_plan import operator_costs
from ckptd.core.advice.failure_simulation import play
from ckptd.core.advice.job_shape import RankShape
from ckptd.core.advice.outlook import (
    Conditions,
    PolicyOutlook,
    dense_outlook,
    partial_outlook,
    window_outlook,
)
from ckptd.core.partial_experts import select_by_risk
from ckptd.core.recovery.global_plan import VERIFY_ITERATIONS
from ckptd.demo.lab import DemoDaemon, Event, Trainer, daemon_folders
from ckptd.demo.model import MoEConfig, native_precision
from ckptd.demo.train import build_model
from ckptd.transport.wire import RefusedError

__all__ = ["main"]

TIMEOUT_S = 300.0
CALIBRATED_MTBF_S = 4.0
ENDLESS, JOB = "1000000", "bench-policies"
WARM_STEPS = 60  # of each configuration, until a first window is there and copies are settled
PLAIN_STEPS = 40
EXPERTS = MoEConfig().num_experts
MEMORY_BPS = 1e12  # peers are not part of it: what is loaded lies in this host's memory


@dataclass(frozen=True, slots=True)
class Configuration:
    """A policy, and the mean seconds of training between two failures."""

    policy: str
    window: int
    every: int
    mtbf_s: float

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

    def outlook(self, rank: RankShape, conditions: Conditions) -> PolicyOutlook:
        """As predicted."""
        if self.policy == "dense":
            return dense_outlook(rank, conditions, self.every)
        if self.policy in ("partial", "selected"):
            return partial_outlook(rank, conditions, self.window, self.every)
        return window_outlook(
            rank, conditions, "aligned" if self.policy == "aligned" else "sliding", self.window
        )


CONFIGURATIONS = [
    *(("sliding", window, 1) for window in (1, 2, 4, 8)),
    *(("aligned", window, 1) for window in (2, 4)),
    *(("dense", 1, every) for every in (2, 5, 10)),
    *(("partial", window, 1) for window in (2, 8)),
    ("partial", 4, 3),
    ("selected", 8, 1),
]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a configuration cost; `kills_s` from the beginning of the `length_s` that were measured."""

    iterations: int
    length_s: float
    kills_s: tuple[float, ...]
    backs_s: tuple[float, ...]
    redone: int
    step_s: float
    stats: Mapping[str, float]
    lost_tokens: int
    plt: float

    def restart_s(self, otherwise_s: float) -> float:
        """From a kill until the loop runs: what is left of being back without repeated iterations and the
        new one.
        """
        if not self.backs_s:
            return otherwise_s
        repeated = self.redone / len(self.backs_s)
        return max(0.05, statistics.fmean(self.backs_s) - (1 + repeated) * self.step_s)


class Lab:
    """A daemon, and one trainer at a time."""

    def __init__(self, folder: Path, runtime: Path, segments: Path, common: Sequence[str]) -> None:
        self._folder, self._runtime, self._common = folder, runtime, list(common)
        self._daemon = DemoDaemon(runtime, segments)
        self._count = 0

    def __enter__(self) -> Self:
        self._daemon.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._daemon.stop()

    def plain_step_s(self) -> float:
        """An iteration without ckptd."""
        trainer = self._trainer(["--daemon", "none", "--steps", str(PLAIN_STEPS)], hosted=False)
        trainer.start(init_seed=1)
        try:
            for _ in trainer.follow(lambda e: e["event"] == "finished", timeout_s=TIMEOUT_S):
                pass
            trainer.wait(timeout_s=TIMEOUT_S)
        finally:
            trainer.stop()
        return _step_s(trainer.events[len(trainer.events) // 3 :])

    def measure(self, what: Configuration, length_s: float, rng: random.Random) -> Measured:
        """Run it, and kill it after an exponentially distributed time of training each."""
        own = ["--daemon", self._daemon.endpoint, "--steps", ENDLESS, "--stats-every", "5", *what.arguments]
        trainer = self._trainer(own, hosted=True)
        trainer.start(init_seed=1)
        try:
            events = _until(trainer, WARM_STEPS, whole=what.window * what.every)
            first, begun_s = int(events[-1]["step"]), float(events[-1]["time_s"])
            kills: list[float] = []
            backs: list[float] = []
            newest, fails_at = first, begun_s + rng.expovariate(1 / what.mtbf_s)
            for event in trainer.follow(lambda e: e["time_s"] >= begun_s + length_s, timeout_s=TIMEOUT_S):
                if event["event"] != "step" or event["step"] <= newest:
                    continue
                newest = int(event["step"])
                if len(backs) < len(kills):  # back: the next failure is drawn from here on
                    backs.append(event["time_s"] - kills[-1])
                    fails_at = event["time_s"] + rng.expovariate(1 / what.mtbf_s)
                left_s = fails_at - time.time()
                # Between two events, which come every iteration.
                if left_s < 2 * _step_s(trainer.events[-12:]) and fails_at < begun_s + length_s:
                    time.sleep(max(0.0, left_s))
                    kills.append(trainer.kill())
                    newest = max(int(e["step"]) for e in trainer.drain() if e["event"] == "step")
            steps = [e for e in trainer.drain() if e["event"] == "step"]
            lives = [e for e in trainer.events if e["event"] == "attached"]
            told = [e["stats"] for e in trainer.events if e["event"] == "stats"]
            stats = next(
                each for each in reversed(told) if each["snapshot_bytes"]
            )  # none just after a restart
        finally:
            trainer.stop()
            self._forget(trainer.name)
        within = [e for e in steps if e["time_s"] <= begun_s + length_s]
        return Measured(
            max(int(e["step"]) for e in within) - first,
            length_s,
            tuple(kill - begun_s for kill in kills),
            tuple(backs),
            len(within) - len({e["step"] for e in within}),
            _step_s([e for e in trainer.events if e["time_s"] >= begun_s]),
            stats,
            sum(int(life["lost_tokens"]) for life in lives),
            float(lives[-1]["plt"]),
        )

    def _forget(self, run: str) -> None:
        """Free its memory, once the daemon has noticed that its trainer is gone."""
        deadline = time.monotonic() + 20
        while True:
            try:
                forget(self._daemon.endpoint, JOB, run)
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


def _until(trainer: Trainer, steps: int, *, whole: int) -> list[Event]:
    """The events up to a step from `steps` on at which a window begins."""
    for _ in trainer.follow(
        lambda e: e["event"] == "step" and e["step"] >= steps and e["step"] % whole == 0, timeout_s=TIMEOUT_S
    ):
        pass
    return trainer.events


def _step_s(events: Sequence[Event], *, unknown_s: float = 0.5) -> float:
    """The median iteration that is no replay, and follows one in the same process."""
    gaps = [
        float(after["time_s"] - before["time_s"])
        for before, after in itertools.pairwise(events)
        if before["event"] == after["event"] == "step" and before["pid"] == after["pid"]
        if not (before["replaying"] or after["replaying"])
    ]
    return median(gaps) if gaps else unknown_s


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


def calibrate(lab: Lab, rank: RankShape, length_s: float, rng: random.Random) -> Conditions:
    """What the predictions know: from a run with dense snapshots, and one without ckptd before and after."""
    before_s = lab.plain_step_s()
    found = lab.measure(Configuration("sliding", 1, 1, CALIBRATED_MTBF_S), length_s, rng)
    plain_s = (before_s + lab.plain_step_s()) / 2
    link_bps = found.stats["capture_gb_per_s"] * 1e9
    copy_s = rank.dense_bytes / link_bps
    drag = max(0.0, (found.step_s - plain_s) / copy_s)
    return Conditions(
        plain_s,
        CALIBRATED_MTBF_S,
        link_bps,
        MEMORY_BPS,
        restart_s=found.restart_s(1.0),
        drag=drag,
        verify_iterations=VERIFY_ITERATIONS,
    )


def selection_ms(selected: int) -> float:
    """Choosing the experts of one snapshot, of 61 layers of 256 experts, of each layer by itself."""
    rng = random.Random(1)
    window = -(-256 // selected)
    layers = [
        ([float(rng.randrange(1000)) for _ in range(256)], [rng.randint(1, window) for _ in range(256)])
        for _ in range(61)
    ]

    def once() -> float:
        begun = time.perf_counter()
        for tokens, ages in layers:
            select_by_risk(tokens, ages, [selected] * window, 2 * window)
        return 1e3 * (time.perf_counter() - begun)

    return min(once() for _ in range(5))


def main() -> None:
    out = parser(__doc__)
    out.add_argument("--length", type=float, default=30.0, help="seconds of each configuration")
    out.add_argument("--mtbf", type=float, nargs="+", default=[6.0, 12.0], help="seconds between failures")
    out.add_argument("--configurations", type=int, default=len(CONFIGURATIONS))
    out.add_argument("--batch-size", type=int, default=1)
    out.add_argument("--period-ms", type=float, default=120.0, help="of an iteration, most of it idle")
    out.add_argument("--seed", type=int, default=1)
    args = out.parse_args()
    rng = random.Random(args.seed)
    threads = min(4, len(os.sched_getaffinity(0)))
    common = ["--period-ms", str(args.period_ms)]
    common += ["--batch-size", str(args.batch_size), "--threads", str(threads), "--job", JOB]
    rank = shape()
    wanted = [
        Configuration(*each, mtbf_s) for each in CONFIGURATIONS[: args.configurations] for mtbf_s in args.mtbf
    ]
    rows: list[list[str]] = []
    errors: list[float] = []
    with (
        scratch_folder() as folder,
        daemon_folders() as (runtime, segments),
        Lab(Path(folder), runtime, segments, common) as lab,
    ):
        lab.plain_step_s()  # whatever is slower the first time
        conditions = calibrate(lab, rank, args.length, rng)
        print(
            f"an iteration {1e3 * conditions.iteration_s:.0f} ms, a restart {conditions.restart_s:.2f} s, "
            f"copies {conditions.link_Bps / 1e9:.2f} GB/s, of which {conditions.drag:.2f} are felt",
            flush=True,
        )
        for what in wanted:
            plain_s = lab.plain_step_s()
            found = lab.measure(what, args.length, rng)
            restart_s = found.restart_s(conditions.restart_s)
            now = replace(conditions, iteration_s=plain_s, mtbf_s=what.mtbf_s, restart_s=restart_s)
            predicted = play(what.outlook(rank, now), plain_s, found.kills_s, found.length_s).ettr
            ettr = found.iterations * plain_s / found.length_s
            errors.append(abs(ettr - predicted))
            rows.append(
                [
                    what.name,
                    f"{what.mtbf_s:g}",
                    str(len(found.kills_s)),
                    f"{found.stats['snapshot_bytes'] / 1e6:.1f}",
                    f"{1e3 * (found.step_s - plain_s):.1f}",
                    str(found.redone),
                    f"{statistics.fmean(found.backs_s):.2f}" if found.backs_s else "-",
                    f"{found.lost_tokens}",
                    f"{found.plt:.1%}",
                    f"{ettr:.3f}",
                    f"{predicted:.3f}",
                ]
            )
            print("  ".join(rows[-1]), flush=True)
    header = ["policy", "MTBF s", "kills", "MB", "slower ms", "redone", "back s", "lost tokens", "PLT"]
    print("\n" + table([*header, "ETTR", "predicted"], rows))
    metrics = {
        "configurations": len(wanted),
        "predicted_vs_measured_ettr_max_error": max(errors),
        "predicted_vs_measured_ettr_mean_error": statistics.fmean(errors),
        "select_8_of_256_in_61_layers_ms": selection_ms(8),
        "select_32_of_256_in_61_layers_ms": selection_ms(32),
    }
    emit("policies", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
