"""Training on spot instances as they came and went: ours against three others, simulated over whole traces.

`bench.spot.model` says where every number of the model comes from; nothing here was measured by
running it. For each trace and strategy, over several draws of *which* nodes were lost (a trace
tells how many): samples trained on for the first time and how many for each second in which any
node was there (goodput), the same with repeated and cut-off iterations (throughput), what that is
of all live nodes working evenly all the time for nothing (ideal), and where the time went. Then
goodput over time, and with `--plot` a PNG.

With `--real` a stretch is played with real processes instead, beside what the simulation says of
it: `bench.real_trace`, which has options of its own.

Traces: the two that are stored beside this (`bench/spot/data`, from Bamboo's public artefact), or
`--trace FILE --unit s|h`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.common import Metric, emit, median, parser, table
from bench.spot.model import Job, growing_part
from bench.spot.simulation import Mode, Result, simulate
from bench.spot.strategies import Elastic, Fixed
from bench.spot.trace import Trace, memberships, parse

__all__ = ["Outcome", "main", "plot"]

DATA = Path(__file__).parent / "spot" / "data"
STORED = {
    "g4dn": (DATA / "aws-g4dn-xlarge-us-east-1d-2020-11-23_24.csv", "s"),
    "p2": (DATA / "aws-p2-xlarge-2020-11-20_23.csv", "h"),
}
UNITS = {"s": 1.0, "h": 3600.0}
GROUP = 4  # GPT-L's size of expert parallelism (Lazarus, §6.1)
NO_CORE_FREE = 0.20  # of an iteration: replication_fraction, results/node_loss_cpu_202611.md
BINS = 12

Maker = Callable[[Job], Elastic | Fixed]
STRATEGIES: dict[str, Maker] = {
    "ours": lambda job: Elastic(job, snapshots=True),
    "ours_no_core_free": lambda job: Elastic(job.with_overhead(NO_CORE_FREE), snapshots=True),
    "lazarus_alone": lambda job: Elastic(job, snapshots=False),
    "fixed_reconfigured": lambda job: Fixed(job, group=GROUP, reconfigures=True),
    "fixed_checkpoints": lambda job: Fixed(job, group=GROUP, reconfigures=False),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One strategy on one draw of lost nodes."""

    result: Result
    from_snapshots: int
    rollbacks: int


def main() -> None:
    if "--real" in sys.argv[1:]:
        from bench import real_trace  # it takes the stored traces from here

        real_trace.main([word for word in sys.argv[1:] if word != "--real"])
        return
    args = _arguments()
    job = Job()
    metrics: dict[str, Metric] = {"seeds": args.seeds, "growing_part": growing_part()}
    for name, trace in _traces(args).items():
        outcomes = {
            strategy: [_run(trace, seed, make(job)) for seed in range(args.seeds)]
            for strategy, make in STRATEGIES.items()
        }
        metrics |= _report(name, trace, job, outcomes)
        if args.plot:
            plot(args.plot, name, trace, job, {n: found[0] for n, found in outcomes.items()})
    emit("traces", metrics, as_json=args.json)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--real", action="store_true", help="real processes; with --help: its options")
    options.add_argument("--trace", type=Path, help="another trace: rows of time and nodes alive")
    options.add_argument("--unit", choices=sorted(UNITS), default="s", help="of its times")
    options.add_argument("--most-nodes", type=int, default=0, help="never use more than so many")
    options.add_argument("--seeds", type=int, default=10, help="draws of which nodes are lost")
    options.add_argument("--plot", type=Path, help="folder for a PNG of each trace (matplotlib)")
    args = options.parse_args()
    if args.seeds < 1:
        options.error(f"--seeds {args.seeds}: at least 1")
    return args


def _traces(args: argparse.Namespace) -> dict[str, Trace]:
    files = {args.trace.stem: (args.trace, args.unit)} if args.trace else STORED
    traces = {name: parse(path.read_text(), unit_s=UNITS[unit]) for name, (path, unit) in files.items()}
    if args.most_nodes:
        traces = {name: trace.at_most(args.most_nodes) for name, trace in traces.items()}
    return traces


def _run(trace: Trace, seed: int, strategy: Elastic | Fixed) -> Outcome:
    result = simulate(memberships(trace, seed), trace.end_s, strategy)
    copies = strategy.from_snapshots if isinstance(strategy, Elastic) else 0
    return Outcome(result, copies, strategy.rollbacks)


# --- what is printed -------------------------------------------------------------------------------------


def _report(name: str, trace: Trace, job: Job, outcomes: Mapping[str, list[Outcome]]) -> dict[str, Metric]:
    ideal = _node_seconds(trace, 0.0, trace.end_s) * job.node_samples_per_s
    there_s = _seconds_with_nodes(trace)
    print(
        f"\n{name}: {trace.end_s / 3600:.1f} h, {len(trace.changes)} changes, at most {trace.most} nodes; "
        f"{there_s / 3600:.1f} h with any, {ideal / there_s:.1f} samples/s if all were used evenly for nothing"
    )
    out: dict[str, Metric] = {
        f"{name}_hours_with_nodes": there_s / 3600,
        f"{name}_ideal_samples_per_s": ideal / there_s,
    }
    rows = []
    for strategy, found in outcomes.items():
        numbers = _numbers(found, job, there_s, ideal)
        out |= {f"{name}_{strategy}_{key}": value for key, value in numbers.items()}
        rows.append(
            [
                strategy,
                f"{numbers['goodput']:.2f} ({numbers['goodput_least']:.2f}-{numbers['goodput_most']:.2f})",
                f"{numbers['throughput']:.2f}",
                f"{numbers['of_ideal']:.3f}",
                *(f"{numbers[mode]:.3f}" for mode in Mode),
                f"{numbers['from_snapshots']:g}",
                f"{numbers['rollbacks']:g}",
            ]
        )
    head = [
        "median of draws",
        "goodput, samples/s",
        "throughput",
        "of ideal",
        *Mode,
        "snapshots",
        "rollbacks",
    ]
    print(table(head, rows))
    print("\ngoodput over time, samples/s, first draw")
    print(table(["hours", "nodes", *outcomes], _over_time(trace, job, outcomes)))
    return out


def _numbers(found: list[Outcome], job: Job, there_s: float, ideal: float) -> dict[str, float]:
    goodput = [one.result.useful * job.batch / there_s for one in found]
    return {
        "goodput": median(goodput),
        "goodput_least": min(goodput),
        "goodput_most": max(goodput),
        "throughput": median([one.result.computed * job.batch / there_s for one in found]),
        "of_ideal": median(goodput) * there_s / ideal,
        **{mode: median([_share(one.result, mode) for one in found]) for mode in Mode},
        "from_snapshots": median([one.from_snapshots for one in found]),
        "rollbacks": median([one.rollbacks for one in found]),
    }


def _share(result: Result, mode: Mode) -> float:
    return result.seconds(mode) / sum(result.seconds(each) for each in Mode)


def _over_time(trace: Trace, job: Job, outcomes: Mapping[str, list[Outcome]]) -> list[list[str]]:
    rows = []
    for start_s, end_s in _bins(trace, BINS):
        span_s = end_s - start_s
        done = (
            found[0].result.useful_between(start_s, end_s) * job.batch / span_s for found in outcomes.values()
        )
        nodes = _node_seconds(trace, start_s, end_s) / span_s
        rows.append([f"{start_s / 3600:.1f}", f"{nodes:.1f}", *(f"{rate:.1f}" for rate in done)])
    return rows


def _bins(trace: Trace, number: int) -> list[tuple[float, float]]:
    first_s = trace.changes[0].at_s
    edges = [first_s + (trace.end_s - first_s) * n / number for n in range(number + 1)]
    return list(itertools.pairwise(edges))


def _node_seconds(trace: Trace, start_s: float, end_s: float) -> float:
    """Live nodes times seconds within a time."""
    ends = [change.at_s for change in trace.changes[1:]] + [trace.end_s]
    spans = (
        change.nodes * max(0.0, min(end_s, until_s) - max(start_s, change.at_s))
        for change, until_s in zip(trace.changes, ends, strict=True)
    )
    return sum(spans)


def _seconds_with_nodes(trace: Trace) -> float:
    ends = [change.at_s for change in trace.changes[1:]] + [trace.end_s]
    pairs = zip(trace.changes, ends, strict=True)
    return sum(until_s - change.at_s for change, until_s in pairs if change.nodes)


def plot(folder: Path, name: str, trace: Trace, job: Job, outcomes: Mapping[str, Outcome]) -> None:
    """Nodes alive, goodput and what was trained on in all, over time, as ``<folder>/<name>.png``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (alive, rate, total) = pyplot.subplots(3, 1, figsize=(9, 9), sharex=True)
    hours = [change.at_s / 3600 for change in trace.changes] + [trace.end_s / 3600]
    nodes = [change.nodes for change in trace.changes]
    alive.step(hours, [*nodes, nodes[-1]], where="post", color="black")
    alive.set_ylabel("nodes alive")
    spans = _bins(trace, 120)
    for strategy, one in outcomes.items():
        done = [one.result.useful_between(*span) * job.batch for span in spans]
        middle = [sum(span) / 7200 for span in spans]
        rate.plot(
            middle,
            [samples / (span[1] - span[0]) for samples, span in zip(done, spans, strict=True)],
            label=strategy,
        )
        so_far = [sum(done[: n + 1]) / 1e3 for n in range(len(done))]
        total.plot([span[1] / 3600 for span in spans], so_far, label=strategy)
    rate.set_ylabel("goodput, samples/s")
    total.set(xlabel="hours", ylabel="samples trained on, thousands")
    rate.legend(fontsize="small")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    main()
