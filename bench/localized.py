"""The loss of one stage of a pipeline: recovery of that stage alone (localized) against recovery of
all stages (global).

The pipeline of `examples.moe_pipeline` (1F1B over gloo, one process per stage) runs under torchrun
with a daemon. Again and again the middle stage is killed. In one run the survivors park and only
the lost stage replays; the other run is the same without parking, so that all replay. For each
number of stages both come after one another, in turns which of them is first. From the ranks' logs:

    recovery     from the kill until every stage has done an iteration that none had done before
    attach       the part of it from the moment when the last rank attaches to its daemon: without torchrun's
                 restart, the interpreter's start and imports, which are most of it at this size and
                 are the same in both
    begin        the part of that until the lost stage begins its first iteration
    again        iterations done again, by the lost stage and, the most, by any other one: 0 if recovery is localized
    iteration    the lost stage's time for an iteration that it does again

All stages share this machine's cores. With fewer cores than stages a global replay is slower by
that alone, so the last part of the output is a model, not a measurement, and its names begin with
`simulated`. It is that of figure 9 of MoEvement (NSDI '26): with S equal stages and M micro-batches
under 1F1B an iteration takes M + S - 1 turns of a forward and a backward on S devices; a stage that
is fed from logs takes M, because it waits for nobody. With c for the M turns, as measured here of a
stage that replays alone, W - 1 iterations to replay, and a for `begin` of the localized runs,
medians over all numbers of stages,

    global     a + (W - 1) c (M + S - 1) / M + c (M + S - 1) / M
    localized  a + (W - 1) c                 + c (M + S - 1) / M

the last term being the iteration that was cut off, which all run together. The paper's 23 % for
three stages are between M = 6 (25 %) and M = 7 (22 %) by `simulated_replay_ratio` = M / (M + S -
1). Frozen operators are taken to cost as much as others, in both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common import (
    Metric,
    emit,
    forget,
    in_shared_environment,
    median,
    own_daemon,
    parser,
    scratch_folder,
    table,
)
from ckptd.demo.lab import Event
from examples.moe_pipeline.demo import PipelineRun

__all__ = ["Model", "main", "recovery_of"]

MODES = ("localized", "global")
RESTARTS_MAX = 6  # as the example's torchrun is told
STEPS = 10**6  # it is ended before
POLL_S = 0.2  # times come from the ranks' logs; looking often would take their cores
SIMULATED_STAGES = (4, 8, 12, 16, 32)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What came of one loss; see the module."""

    recovery_s: float
    attach_s: float
    begin_s: float
    again_lost: int
    again_others: int
    iteration_ms: float


@dataclass(frozen=True, slots=True)
class Model:
    """Figure 9 of MoEvement, for stages that take equally long.

    Args:
        stage_s: c, a stage's own work of one iteration.
        micro_batches: M.
        replayed: iterations to replay, W - 1.
        begin_s: a, from attach to the first iteration.
    """

    stage_s: float
    micro_batches: int
    replayed: int
    begin_s: float

    def together_s(self, stages: int) -> float:
        """One iteration of the whole pipeline, bubbles and all."""
        return self.stage_s * (self.micro_batches + stages - 1) / self.micro_batches

    def global_s(self, stages: int) -> float:
        return self.begin_s + (self.replayed + 1) * self.together_s(stages)

    def localized_s(self, stages: int) -> float:
        return self.begin_s + self.replayed * self.stage_s + self.together_s(stages)

    def replay_ratio(self, stages: int) -> float:
        """Of the replayed iterations alone."""
        return self.stage_s / self.together_s(stages)


# --- one run ---------------------------------------------------------------------------------------------


class Pipeline:
    """A run that loses its middle stage again and again."""

    def __init__(self, args: argparse.Namespace, stages: int, mode: str, folder: Path, endpoint: str) -> None:
        self._stages, self._window = stages, args.window
        shape = argparse.Namespace(
            stages=stages, replicas=1, steps=STEPS, window=args.window
        )  # as PipelineRun takes it
        options = ["--micro-batches", str(args.micro_batches), "--rows", str(args.rows)]
        options += ["--no-park"] if mode == "global" else []
        self._run = PipelineRun(f"{mode}-{stages}", folder, shape, daemon=endpoint, options=options)
        self._endpoint = endpoint

    def losses(self, count: int) -> list[Recovery]:
        self._run.start()
        try:
            self._all_beyond(4 * self._window + 4)
            return [self._lose_one() for _ in range(count)]
        finally:
            self._run.stop()
            forget(self._endpoint, "pipeline", self._run.name)

    def _lose_one(self) -> Recovery:
        lost = self._stages // 2
        loss = self._run.kill([lost])
        newest = max(loss.last_steps) + 1  # a stage that was not in the way may end one more
        self._all_beyond(newest + 3 * self._window)
        events = [self._run.events(rank) for rank in range(self._stages)]
        found = recovery_of(loss.time_s, events, lost)
        print(
            f"{self._run.name}: back in {found.recovery_s:.2f} s, {found.attach_s:.2f} s of it since attach; "
            f"done again: {found.again_lost} by the lost stage, {found.again_others} by others",
            flush=True,
        )
        return found

    def _all_beyond(self, step: int) -> None:
        for rank in range(self._stages):
            self._run.until(
                lambda rank=rank: self._run.last_step(rank) > step,  # type: ignore[misc]
                f"rank {rank} beyond iteration {step}",
                poll_s=POLL_S,
            )


def recovery_of(killed_s: float, events: Sequence[Sequence[Event]], lost: int) -> Recovery:
    """From the logs of all ranks, of which the last life follows the kill."""
    lives = [_last_life(of) for of in events]
    done = [_steps(before) for before, _ in lives]
    newest = max(max(steps) for steps in done)
    attach_s = max(life[0]["time_s"] for _, life in lives)
    fresh_s = [_first(life, "step", newest + 1)["time_s"] for _, life in lives]
    again = [len(steps & _steps(life)) for steps, (_, life) in zip(done, lives, strict=True)]
    replayed = [e for e in lives[lost][1] if e["event"] == "step" and e["step"] in done[lost]]
    began_s = _first(lives[lost][1], "begins", 0)["time_s"]
    return Recovery(
        recovery_s=max(fresh_s) - killed_s,
        attach_s=max(fresh_s) - attach_s,
        begin_s=began_s - attach_s,
        again_lost=again[lost],
        again_others=max(n for rank, n in enumerate(again) if rank != lost),
        iteration_ms=1e3 * median([e["iteration_s"] for e in replayed]) if replayed else 0.0,
    )


def _last_life(events: Sequence[Event]) -> tuple[Sequence[Event], Sequence[Event]]:
    """What was before it, and the life itself; it begins with ``attaches``."""
    start = max(i for i, event in enumerate(events) if event["event"] == "attaches")
    return events[:start], events[start:]


def _steps(events: Iterable[Event]) -> set[int]:
    return {event["step"] for event in events if event["event"] == "step"}


def _first(events: Iterable[Event], kind: str, step: int) -> Event:
    return next(e for e in events if e["event"] == kind and e["step"] >= step)


# --- all runs --------------------------------------------------------------------------------------------

Found = dict[tuple[str, int], list[Recovery]]  # by mode and stages


def measure(args: argparse.Namespace) -> Found:
    found: Found = {}
    with scratch_folder() as scratch, own_daemon(args.memory_mib) as endpoint:
        for number, stages in enumerate(args.stages):
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                pipeline = Pipeline(args, stages, mode, Path(scratch), endpoint)
                found[mode, stages] = pipeline.losses(args.rounds)
                time.sleep(1.0)  # until the daemon has given back what the run had
    return found


def _median(found: Sequence[Recovery], name: str) -> float:
    return median([getattr(each, name) for each in found])


def rows(found: Found, stages: Sequence[int]) -> list[list[str]]:
    out = []
    for count in stages:
        for mode in MODES:
            of = found[mode, count]
            seconds = [_median(of, name) for name in ("recovery_s", "attach_s", "begin_s")]
            again = [max(getattr(r, name) for r in of) for name in ("again_lost", "again_others")]
            line = [f"{count} stages, {mode}", *(f"{s:.2f}" for s in seconds), *map(str, again)]
            out.append([*line, f"{_median(of, 'iteration_ms'):.0f}"])
    return out


def summarise(found: Found, stages: Sequence[int]) -> dict[str, Metric]:
    """Medians by number of stages; without a number: of the deepest pipeline."""
    metrics: dict[str, Metric] = {
        "replayed_iterations_unaffected": _others(found, "localized"),
        "replayed_iterations_unaffected_global": _others(found, "global"),
    }
    for count in stages:
        alone, together = (found[mode, count] for mode in MODES)
        for name in ("recovery_s", "attach_s", "begin_s", "iteration_ms"):
            for mode, of in zip(MODES, (alone, together), strict=True):
                metrics[f"{name}_{mode}_{count}"] = _median(of, name)
        for name, label in (("recovery_s", ""), ("attach_s", "attach_")):
            ratio = _median(alone, name) / _median(together, name)
            metrics[f"{label}localized_vs_global_{count}"] = ratio
            metrics[f"{label}localized_vs_global"] = ratio
    return metrics


def _others(found: Found, mode: str) -> int:
    return max(r.again_others for (of, _), each in found.items() if of == mode for r in each)


def simulate(model: Model) -> dict[str, Metric]:
    out: dict[str, Metric] = {}
    for stages in SIMULATED_STAGES:
        alone, together = model.localized_s(stages), model.global_s(stages)
        out[f"simulated_attach_s_localized_{stages}"] = alone
        out[f"simulated_attach_s_global_{stages}"] = together
        out[f"simulated_attach_localized_vs_global_{stages}"] = alone / together
        out[f"simulated_replay_ratio_{stages}"] = model.replay_ratio(stages)
    return out


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.set_defaults(rounds=3)
    options.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4], help="ascending")
    options.add_argument("--window", type=int, default=6)
    options.add_argument("--micro-batches", type=int, default=6)
    options.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    options.add_argument("--memory-mib", type=int, default=1024, help="of the daemon")
    args = options.parse_args()
    if args.rounds > RESTARTS_MAX:
        options.error(f"--rounds {args.rounds}: the run is restarted {RESTARTS_MAX} times at most")
    if min(args.stages) < 2:
        options.error(f"--stages {min(args.stages)}: localized recovery needs two stages")
    found = measure(args)
    header = ["median", "recovery s", "attach s", "begin s", "again", "by others", "iteration ms"]
    print("\n" + table(header, rows(found, args.stages)))
    alone = [each for (mode, _), of in found.items() if mode == "localized" for each in of]
    model = Model(
        stage_s=_median(alone, "iteration_ms") / 1e3,
        micro_batches=args.micro_batches,
        replayed=args.window - 1,
        begin_s=_median(alone, "begin_s"),
    )
    metrics = summarise(found, args.stages) | simulate(model)
    metrics |= {"window": args.window, "micro_batches": args.micro_batches, "rounds": args.rounds}
    emit("localized", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
