"""`make demo-reroute`: kill workers of a pipeline for good; the others do their work and nobody stops.

Pipelines of four stages train as processes under hosts. In the middle of an iteration one worker is killed
with its host, later a second one, at another stage of another pipeline. Still later both hosts are started
again. The same happens to a run that drops each pipeline with a hole. Two pipelines have none left for that
after the second loss, so there it strikes once.

The demo fails unless every tensor of all workers and every loss is identical to those of an undisturbed run.
The picture has the times of iterations, in which each phase of a micro-batch lasts `--phase-ms` at least, as
if each worker had a device: eight processes share this machine's cores.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckptd.demo.lab import Event, read_events
from ckptd.demo.report import table
from examples.demo_progress import Progress, failed, seed_of
from examples.rerouted_hosts import ReroutedHosts, RunEnded, end_on_sigterm

__all__ = ["GridRun", "Losses", "draw_times", "main", "plan_victims", "spans"]

Batch = tuple[int, int, int]  # iteration, pipeline, number


@dataclass(frozen=True, slots=True)
class Losses:
    """Which ranks are lost after which iterations, and when both are started again."""

    victims: tuple[int, ...]
    after: tuple[int, ...]
    back_after: int


def plan_victims(rng: random.Random, *, pipelines: int, stages: int, iterations: int) -> Losses:
    """Two workers of different pipelines and stages. Not rank 0, whose host decides who is there.

    Raises:
        ValueError: there are too few iterations, pipelines or stages.
    """
    if min(pipelines, stages) < 2 or iterations < 20:
        raise ValueError(
            f"{pipelines} pipelines of {stages} stages, {iterations} iterations: needs 2, 2 and 20 at least"
        )
    workers = range(1, pipelines * stages)
    pairs = [
        (a, b) for a in workers for b in workers if a // stages != b // stages and a % stages != b % stages
    ]
    sixth = iterations // 6
    return Losses(rng.choice(pairs), (sixth, 2 * sixth), 3 * sixth)


class GridRun(ReroutedHosts):
    """One run, followed by the logs of its trainers.

    Attributes:
        marks: what was done to it, and when (unix time).
    """

    def __init__(
        self, name: str, folder: Path, args: argparse.Namespace, options: Sequence[str] = ()
    ) -> None:
        self.args = args
        self.marks: list[tuple[str, float]] = []
        words = ["examples.moe_pipeline.rerouted_train", "--folder", str(folder)]
        words += ["--stages", f"{args.stages}", "--iterations", f"{args.iterations}"]
        words += ["--micro-batches", f"{args.micro_batches}", *options]
        super().__init__(name, folder, args.pipelines * args.stages, words)

    def kill(self, rank: int) -> float:
        at = super().kill(rank)
        self.marks.append((f"rank {rank} is lost", at))
        return at

    def steps(self, rank: int) -> list[Event]:
        """The iterations that the rank has told of, over all of its lives."""
        events = read_events(self.folder / f"rank-r{rank}.jsonl")
        return [event for event in events if event["event"] == "step"]

    def after(self, iteration: int) -> None:
        """Wait until this iteration has ended at rank 0."""
        self.until(lambda: any(e["step"] >= iteration for e in self.steps(0)), f"iteration {iteration}")

    def losses(self) -> dict[Batch, set[float]]:
        """What was told of each micro-batch; an iteration may have come twice."""
        found: dict[Batch, set[float]] = {}
        for event in (event for rank in self.ranks for event in self.steps(rank)):
            for pipeline, number, loss in event["losses"]:
                found.setdefault((event["step"], pipeline, number), set()).add(loss)
        return found

    def final(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"rank-r{rank}.pt"
        return dict(torch.load(path, weights_only=True)) if path.exists() else {}


def play(run: GridRun, losses: Losses, rng: random.Random, say: Callable[[str], None]) -> None:
    """Train to the end, with these losses."""
    try:
        run.start_all()
        for rank, after in zip(losses.victims, losses.after, strict=False):
            run.after(after)
            time.sleep(rng.random() * spans(run.steps(0))[-1][1])  # somewhere in the iteration
            run.kill(rank)
            where = f"stage {rank % run.args.stages} of pipeline {rank // run.args.stages}"
            say(f"{run.name}: SIGKILL to rank {rank} ({where}) and its host, after iteration {after}")
        if losses.victims:
            run.after(losses.back_after)
            for rank in losses.victims:
                run.start(rank)
            run.marks.append(("hosts start again", time.time()))
            say(f"{run.name}: their hosts are started again, after iteration {losses.back_after}")
            run.until(lambda: not run.steps(0)[-1]["missing"], "the return of the lost workers")
            run.marks.append(("all are back", time.time()))
            say(f"{run.name}: all are back, in iteration {run.steps(0)[-1]['step']}")
        run.wait()
        say(f"{run.name}: the end")
    finally:
        run.stop()


def spans(steps: Sequence[Event]) -> list[tuple[float, float, int]]:
    """Of each iteration but the first: when it ended, how long it took, and how many workers were missing."""
    pairs = itertools.pairwise(steps)
    return [(b["time_s"], b["time_s"] - a["time_s"], len(b["missing"])) for a, b in pairs]


def differences(expected: GridRun, actual: GridRun) -> list[str]:
    """Tensors of final states, and losses on the way."""
    problems = [
        f"{actual.name}, rank {rank}: the final state differs"
        for rank in expected.ranks
        if not (expected.final(rank) and _equal(expected.final(rank), actual.final(rank)))
    ]
    wanted, found = expected.losses(), actual.losses()
    problems += [
        f"{actual.name}: losses of {batch}: {wanted.get(batch)} and {found.get(batch)}"
        for batch in sorted(wanted.keys() | found.keys())
        if wanted.get(batch) != found.get(batch)
    ]
    return problems


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def print_times(runs: Sequence[GridRun]) -> None:
    """Medians by how many are missing, and the longest iteration after each mark."""
    rows: list[list[object]] = []
    for run in runs:
        found = spans(run.steps(0))
        medians: list[object] = []
        for missing in range(3):
            times = [took for _, took, count in found if count == missing]
            medians.append(f"{statistics.median(times):.2f}" if times else "-")
        losses = [at for what, at in run.marks if "lost" in what]
        first = [next(end for end, _, _ in found if end > at) - at for at in losses]
        rows.append([run.name, *medians, ", ".join(f"{seconds:.2f}" for seconds in first)])
    print("\nseconds of an iteration (median), by missing workers; and from each loss to the next step:\n")
    print(table(["run", "0", "1", "2", "next step"], rows))


def draw_times(path: Path, runs: Sequence[GridRun], phase_ms: float) -> None:
    """Times of iterations over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    for run, colour in zip(runs, ("#12355b", "#e09f3e"), strict=True):
        found = spans(run.steps(0))
        begun = found[0][0]
        times = [end - begun for end, _, _ in found]
        axes.step(times, [took for _, took, _ in found], where="pre", color=colour, label=run.name)
        for number, (what, at) in enumerate(run.marks):
            axes.axvline(at - begun, color=colour, linewidth=0.8, linestyle="--")
            height = 0.97 - 0.05 * (number % 3) - 0.18 * (run is not runs[0])
            transform = axes.get_xaxis_transform()
            axes.text(at - begun, height, f" {what}", color=colour, fontsize=8, transform=transform)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("seconds of an iteration")
    axes.set_title(f"Each phase of a micro-batch lasts {phase_ms:g} ms at least", fontsize=10)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Lose workers of a pipeline; nobody stops. Compare the bits."
    )
    parser.add_argument("--pipelines", type=int, default=2)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8, help="of each pipeline")
    parser.add_argument("--iterations", type=int, default=72)
    parser.add_argument("--phase-ms", type=float, default=25.0, help="least time of a micro-batch's phase")
    parser.add_argument("--seed", type=int, default=None, help="of the losses; default: random")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args(argv)


def run_all(args: argparse.Namespace, rng: random.Random) -> list[str]:
    """All three runs; what is wrong."""
    say = Progress().say
    losses = plan_victims(rng, pipelines=args.pipelines, stages=args.stages, iterations=args.iterations)
    kept = len(losses.victims) if args.pipelines > 2 else 1
    with tempfile.TemporaryDirectory(prefix="ckptd-reroute-") as scratch:
        slow = ("--phase-ms", f"{args.phase_ms}")
        expected = GridRun("undisturbed", Path(scratch) / "undisturbed", args)
        ours = GridRun("re-routed", Path(scratch) / "rerouted", args, slow)
        dropped = GridRun("pipelines dropped", Path(scratch) / "dropped", args, (*slow, "--drop"))
        play(expected, Losses((), (), 0), rng, say)
        play(ours, losses, rng, say)
        play(dropped, Losses(losses.victims[:kept], losses.after[:kept], losses.back_after), rng, say)
        print_times([ours, dropped])
        if kept < len(losses.victims):
            print(
                "\nOf two pipelines none is whole after the second loss: the run that drops them got only the"
                "\nfirst one. It would have stopped."
            )
        draw_times(args.out / "demo_reroute.png", [ours, dropped], args.phase_ms)
        return differences(expected, ours) + differences(expected, dropped)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    seed = seed_of(args.seed)
    print(
        f"{args.pipelines} pipelines of {args.stages} stages, a process each, on {os.cpu_count()} cores."
        f"\nLosses from seed {seed} (repeat them with --seed {seed}).\n"
    )
    try:
        problems = run_all(args, random.Random(seed))
    except (RunEnded, ValueError) as error:
        print(f"\nFAILED (seed {seed}): {error}")
        return 1
    print(f"\npicture  {args.out / 'demo_reroute.png'}")
    if problems:
        return failed(problems, f"{len(problems)} problems (seed {seed})")
    print("\nIDENTICAL: every tensor of all workers, and every loss, in both runs with losses.")
    return 0


if __name__ == "__main__":
    end_on_sigterm()
    raise SystemExit(main())
