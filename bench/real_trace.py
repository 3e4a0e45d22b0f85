"""A stretch of a spot trace with real processes under four strategies, beside what the simulation
says of it (`python -m bench.traces --real`).

`bench.spot.real` says what is played, `bench.spot.measured` how its time is divided. By default the
stretch of a stored trace in which most happens, scaled down to at most five hosts. All strategies
train the same model on the same batches, with the same hosts lost at the same times. Then the
simulation (`bench.spot.simulation`) is given what was measured of each strategy, the time of an
iteration and the pauses after a loss and after hosts came, and plays the stretch again: ``ratio``
is measured over predicted goodput. It tells how far the structure of the model holds, not whether
its numbers do: these are from the same run.

It fails if a loss of any strategy is not that of a process that nobody disturbed.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.common import Metric, emit, parser, table
from bench.spot.measured import (
    Account,
    Pauses,
    account,
    lives_of,
    measured_job,
    pauses_of,
    wrong_losses,
)
from bench.spot.model import Job
from bench.spot.real import Played, Setting, Strategy, play, strategies, undisturbed
from bench.spot.simulation import Result, simulate
from bench.spot.trace import Trace, parse
from bench.traces import STORED, UNITS
from ckptd.demo.lab import Event
from examples.moe_elastic.demo import CLOSE
from examples.moe_elastic.model import EXPERTS, LAYERS

__all__ = ["Outcome", "choose", "main", "plot"]

BINS = 12
STAND_S = 25.0  # real seconds: a restart of five hosts on two cores takes 10 to 30
WHERE = ("train", "restore", "restart", "halt")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One strategy: what was measured, the job that the simulation got, and what it made of it; no
    job where too little was measured.

    `Played` has the last two.
    """

    found: Account
    pauses: Pauses
    job: Job | None
    predicted: Result | None
    late_s: float
    agents: int


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    from_s, stretch = choose(args)
    setting = Setting(stretch, args.hosts, args.seed, args.batch, args.sample_ms, args.every)
    changes = ", ".join(f"{c.nodes} at {c.at_s:.0f} s" for c in stretch.changes)
    print(
        f"{args.name}, from {from_s:g} s on, {args.speed:g} times as fast, for {stretch.end_s:g} s; hosts: {changes}"
    )
    with ExitStack() as stack:
        scratch = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptd-spot-")))
        outcomes, problems = _play_all(args, setting, scratch)
    _report(args, from_s, setting, outcomes)
    if args.plot:
        plot(args.plot / f"{args.name}_real.png", setting, outcomes)
    if problems:
        sys.exit(f"FAILED in {len(problems)} places:\n" + "\n".join(problems[:20]))


def _play_all(
    args: argparse.Namespace, setting: Setting, scratch: Path
) -> tuple[dict[str, Outcome], list[str]]:
    """What came of each strategy, and which losses were wrong."""
    every = strategies(setting)
    outcomes: dict[str, Outcome] = {}
    told: dict[str, list[Event]] = {}
    for name in args.strategies:
        folder = scratch / name
        folder.mkdir(parents=True)
        print(f"\n{name}")
        played = play(setting, every[name], folder, lambda text: print(f"  {text}", flush=True))
        told[name] = played.events
        outcomes[name] = _outcome(setting, every[name], played)
    done = [e["step"] for events in told.values() for e in events if e["event"] == "step"]
    folder = scratch / "undisturbed"
    folder.mkdir()
    expected = undisturbed(max(done, default=0) + 1, args.batch, folder, timeout_s=600)
    return outcomes, [
        f"{name}: {line}"
        for name, events in told.items()
        for line in wrong_losses(expected, events, close=CLOSE)
    ]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--name", choices=sorted(STORED), default="g4dn", help="a stored trace")
    options.add_argument("--hosts", type=int, default=5, help="at most so many; the trace is scaled")
    options.add_argument(
        "--from", dest="from_s", type=float, help="second of the trace; default: where most happens"
    )
    options.add_argument("--speed", type=float, default=6.0, help="times as fast as it was")
    options.add_argument("--seconds", type=float, default=240.0, help="that it takes, for each strategy")
    options.add_argument("--strategies", nargs="+", default=list(_NAMES), choices=_NAMES)
    options.add_argument("--seed", type=int, default=0, help="of the draw of hosts that are lost")
    options.add_argument("--batch", type=int, default=40, help="samples of a step, all ranks together")
    options.add_argument("--sample-ms", type=float, default=20.0, help="of a sample on a host, for a device")
    options.add_argument(
        "--every",
        type=int,
        default=10,
        help="steps between states on disk; five times that for lazarus_alone",
    )
    options.add_argument("--logs", type=Path, help="new folder in which all logs are kept")
    options.add_argument("--plot", type=Path, help="folder for a PNG (matplotlib)")
    args = options.parse_args(argv)
    if not (args.speed > 0 and args.seconds > 0 and args.every > 0 and args.hosts > 1):
        options.error("--speed, --seconds and --every: above 0; --hosts: at least 2")
    return args


_NAMES = ("ours", "lazarus_alone", "fixed_reconfigured", "fixed_checkpoints")


def choose(args: argparse.Namespace) -> tuple[float, Trace]:
    """Where the stretch begins in its trace, and the stretch."""
    path, unit = STORED[args.name]
    trace = parse(path.read_text(), unit_s=UNITS[unit]).scaled(args.hosts)
    span_s = args.seconds * args.speed
    from_s = args.from_s
    if from_s is None:
        from_s = trace.busiest_s(span_s, fewest=2, stand_s=STAND_S * args.speed)
    return from_s, trace.stretch(from_s, from_s + span_s, speed=args.speed)


def _outcome(setting: Setting, strategy: Strategy, played: Played) -> Outcome:
    stretch = setting.stretch
    lives = lives_of(played.events, played.begun_s, stretch.end_s)
    found = account(lives, stretch, fewest=strategy.fewest)
    pauses = pauses_of(lives, stretch, fewest=strategy.fewest)
    job = measured_job(
        found,
        pauses,
        batch=setting.batch,
        experts=EXPERTS,
        layers=len(LAYERS),
        slots=setting.slots,
        elastic=strategy.replicas is not None,
    )
    predicted = None
    if job is not None:
        predicted = simulate(setting.membership, stretch.end_s, strategy.predicted(job))
    return Outcome(found, pauses, job, predicted, played.late_s, played.agents)


# --- what is printed -------------------------------------------------------------------------------------


def _report(
    args: argparse.Namespace, from_s: float, setting: Setting, outcomes: Mapping[str, Outcome]
) -> None:
    metrics: dict[str, Metric] = {
        "trace": args.name,
        "from_s": from_s,
        "speed": args.speed,
        "seconds": setting.stretch.end_s,
        "hosts": args.hosts,
        "changes": len(setting.stretch.changes),
        "seed": args.seed,
        "every": args.every,
        "sample_ms": args.sample_ms,
    }
    rows = []
    for name, one in outcomes.items():
        numbers = _numbers(setting, one)
        metrics |= {f"{name}_{key}": value for key, value in numbers.items()}
        rows.append(
            [
                name,
                f"{one.found.useful}",
                *(f"{numbers[key]:.1f}" for key in ("goodput", "throughput", "predicted")),
                f"{numbers['ratio']:.2f}",
                *(f"{one.found.seconds[where]:.0f}" for where in WHERE),
                f"{numbers['repeated']:g}",
                f"{len(one.found.lives)}",
                f"{one.found.rollbacks}",
            ]
        )
    head = [
        "",
        "steps",
        "goodput",
        "throughput",
        "predicted",
        "ratio",
        *WHERE,
        "repeated",
        "starts",
        "from disk",
    ]
    print("\nsteps trained for the first time; samples/s; times in seconds")
    print(table(head, rows))
    print(
        "\npauses until training goes on, in seconds, and samples/s of one host; what the simulation was given"
    )
    print(
        table(
            ["", "at the start", "after a loss", "after hosts came", "samples/s"],
            [_given(name, one) for name, one in outcomes.items()],
        )
    )
    print("\ngoodput over time, samples/s: measured (predicted)")
    print(table(["seconds", "hosts", *outcomes], _over_time(setting, outcomes)))
    emit("real_trace", metrics, as_json=args.json)


def _numbers(setting: Setting, one: Outcome) -> dict[str, float]:
    span_s, batch, found = setting.stretch.end_s, setting.batch, one.found
    goodput = found.useful * batch / span_s
    predicted = one.predicted.useful * batch / span_s if one.predicted else math.nan
    given = {
        "start_s": one.pauses.start_s,
        "after_loss_s": one.pauses.after_loss_s,
        "after_coming_s": one.pauses.after_coming_s,
    }
    return {
        "steps": found.useful,
        "goodput": goodput,
        "throughput": found.computed * batch / span_s,
        "predicted": predicted,
        "ratio": goodput / predicted if predicted else math.nan,
        "repeated": found.computed - found.useful,
        "starts": len(found.lives),
        "from_disk": found.rollbacks,
        "late_s": one.late_s,
        "agents_started_again": one.agents,
        **{f"{where}_s": found.seconds[where] for where in WHERE},
        **{key: value for key, value in given.items() if value is not None},
        "host_samples_per_s": one.job.node_samples_per_s if one.job else math.nan,
    }


def _given(name: str, one: Outcome) -> list[str]:
    pauses = (one.pauses.start_s, one.pauses.after_loss_s, one.pauses.after_coming_s)
    return [
        name,
        *("-" if seconds is None else f"{seconds:.1f}" for seconds in pauses),
        f"{one.job.node_samples_per_s:.1f}" if one.job else "-",
    ]


def _bins(end_s: float, number: int) -> list[tuple[float, float]]:
    return list(pairwise(end_s * n / number for n in range(number + 1)))


def _over_time(setting: Setting, outcomes: Mapping[str, Outcome]) -> list[list[str]]:
    rows = []
    for start_s, end_s in _bins(setting.stretch.end_s, BINS):
        scale = setting.batch / (end_s - start_s)
        cells = (
            f"{one.found.useful_between(start_s, end_s) * scale:.0f}"
            + (f" ({one.predicted.useful_between(start_s, end_s) * scale:.0f})" if one.predicted else "")
            for one in outcomes.values()
        )
        hosts = _hosts(setting.stretch, start_s, end_s)
        rows.append([f"{start_s:.0f}", f"{hosts:.1f}", *cells])
    return rows


def _hosts(stretch: Trace, start_s: float, end_s: float) -> float:
    """The mean number within a time."""
    ends = [change.at_s for change in stretch.changes[1:]] + [stretch.end_s]
    spans = (
        change.nodes * max(0.0, min(end_s, until_s) - max(start_s, change.at_s))
        for change, until_s in zip(stretch.changes, ends, strict=True)
    )
    return sum(spans) / (end_s - start_s)


def plot(path: Path, setting: Setting, outcomes: Mapping[str, Outcome]) -> None:
    """Hosts alive, goodput, and samples trained on in all, over time; predictions are dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stretch, batch = setting.stretch, setting.batch
    figure, (alive, rate, total) = pyplot.subplots(3, 1, figsize=(9, 9), sharex=True)
    times = [change.at_s for change in stretch.changes] + [stretch.end_s]
    nodes = [change.nodes for change in stretch.changes]
    alive.step(times, [*nodes, nodes[-1]], where="post", color="black")
    alive.set_ylabel("hosts alive")
    spans = _bins(stretch.end_s, 4 * BINS)
    ends = [span[1] for span in spans]
    for number, (name, one) in enumerate(outcomes.items()):
        color = f"C{number}"
        for how, style, what in ((name, "-", one.found), (None, "--", one.predicted)):
            if what is None:
                continue
            done = [what.useful_between(*span) * batch for span in spans]
            total.plot(ends, [sum(done[: n + 1]) for n in range(len(done))], style, color=color, label=how)
            if how:
                middle = [sum(span) / 2 for span in spans]
                rates = [d / (end - start) for d, (start, end) in zip(done, spans, strict=True)]
                rate.plot(middle, rates, color=color, label=how)
    rate.set_ylabel("goodput, samples/s")
    total.set(xlabel="seconds", ylabel="samples trained on (dashed: predicted)")
    total.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    main()
