"""`ckptctl advise`: rate every policy for a job that is described or runs here, and name the best."""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from ckptd.config.settings import parse_bytes
from ckptd.core.advice.advice import Advice, EttrCurve, advise, arguments, ettr_curves, mtbf_axis
from ckptd.core.advice.failure_simulation import RecordedFailures, mean_ettr, play, recorded_failures
from ckptd.core.advice.job_shape import (
    MODELS,
    PRECISIONS,
    Layout,
    RankShape,
    measured_partial_shape,
    measured_shape,
    rank_shape,
)
from ckptd.core.advice.outlook import (
    Conditions,
    PolicyOutlook,
    dense_outlook,
    partial_outlook,
    window_outlook,
)
from ckptd.core.recovery.recovery_phases import RecoveryPhase, phases_in_metrics
from ckptd.core.snapshot_policy import PolicyKind
from ckptd.ctl.command import (
    EXIT_FAILED,
    EXIT_REFUSED,
    CommandError,
    CommandOutcome,
    Commands,
    add_run,
    ask,
    duration,
)
from ckptd.transport import messages as m
from ckptd.units import format_age, format_bytes, format_table

__all__ = ["add_advise_command", "failures_at_random"]

_PLAYED_S = 12 * 3600.0
_SEEDS = 20
_LINK_BPS, _RESTART_S = 20e9, 3.0
_STEPS_MIN = 3
_RESTART = (
    RecoveryPhase.OTHERS_STOPPED,
    RecoveryPhase.PROCESS_THERE,
    RecoveryPhase.IMPORTS,
    RecoveryPhase.PROCESS_GROUPS,
    RecoveryPhase.ATTACH,
    RecoveryPhase.INVENTORY,
)
_FACTORS = {"K": 10**3, "M": 10**6, "G": 10**9}
# Of the time; less is within what is not known.
_FAR = 0.01
# Forward and backward, for each parameter that a token uses.
_FLOPS_PER_PARAMETER = 6.0


def add_advise_command(commands: Commands) -> None:
    """Add `advise`."""
    text = "rate every policy for a job that is described, or runs on this node, and name the best"
    parser = commands.add("advise", _advise, text)
    job = parser.add_argument_group(
        "a job that runs: its state, iterations, copies and restarts are measured"
    )
    add_run(job, "?", job_help="an attached job of this node's daemon, in place of --model")
    job.add_argument(
        "--watch", type=duration, default="5s", metavar="TIME", help="watch it so long (default: 5s)"
    )
    job = parser.add_argument_group("a job that is described")
    job.add_argument("--model", help=f"one of {', '.join(sorted(MODELS))}")
    job.add_argument("--gpus", type=int, help="ranks of the job")
    job.add_argument("--stages", type=int, default=1, help="of a pipeline (default: 1)")
    job.add_argument(
        "--expert-ranks", type=int, default=1, help="ranks that share a layer's experts (default: 1)"
    )
    job.add_argument(
        "--precision", choices=sorted(PRECISIONS), default="bf16-mixed", help="default: bf16-mixed"
    )
    job.add_argument("--iteration", type=duration, metavar="TIME", help="of an iteration, such as 2.5s")
    job.add_argument("--tokens", type=_count, help="of an iteration, such as 4M, in place of --iteration")
    job.add_argument("--tflops", type=float, help="that a GPU reaches, with --tokens")
    around = parser.add_argument_group("what is around it")
    around.add_argument("--mtbf", type=duration, metavar="TIME", help="of the whole job, such as 10m or 6h")
    around.add_argument(
        "--failures",
        type=Path,
        metavar="FILE",
        help="play these: a line for each, in seconds, or lines of seconds,nodes (default: at random)",
    )
    around.add_argument(
        "--link", type=_bytes, help="device to host, a second (default: as measured, or 20GB)"
    )
    around.add_argument(
        "--network", type=_bytes, default="5GB", help="a rank to a peer, a second (default: 5GB)"
    )
    around.add_argument("--replicas", type=int, default=1, help="copies on other nodes (default: 1)")
    around.add_argument(
        "--restart",
        type=duration,
        metavar="TIME",
        help="until all ranks run again (default: as measured, or 3s)",
    )
    around.add_argument(
        "--micro-batches",
        type=int,
        metavar="N",
        help="of a pipeline with boundary logs: only the stage of a lost rank replays (default: all ranks)",
    )
    around.add_argument(
        "--memory", type=_bytes, help="of the host for each rank, such as 64GiB (default: enough)"
    )
    around.add_argument(
        "--drag",
        type=float,
        default=0.0,
        help="seconds that training loses in each second of a copy (default: 0)",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE.png",
        help="draw the ETTR of each policy over the MTBF (needs matplotlib)",
    )
    parser.add_argument(
        "--picture-size",
        type=_pixels,
        default="1200x750",
        metavar="WxH",
        help="in pixels (default: 1200x750)",
    )


def _count(text: str) -> int:
    factor = _FACTORS.get(text[-1:], 1)
    try:
        return int(float(text[:-1] if factor > 1 else text) * factor)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4M") from None


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pixels(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{3,4})x(\d{3,4})", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 1200x750, of 100 to 9999 pixels")
    return int(found[1]), int(found[2])


def _advise(args: argparse.Namespace) -> CommandOutcome:
    if (args.job is None) == (args.model is None) or (args.job is None) != (args.run is None):
        raise CommandError("pass either JOB and RUN, or --model")
    recorded = None if args.failures is None else _recorded(args.failures)
    if recorded is not None and args.mtbf is None:
        args.mtbf = recorded.mtbf_s
    if args.mtbf is None:
        raise CommandError("pass --mtbf, or --failures")
    try:
        rank, conditions, now = _described(args) if args.job is None else _running(args)
        advice = advise(rank, conditions, memory_bytes=args.memory)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if advice.best is None:
        raise CommandError(f"nothing fits: {advice.rejected}", EXIT_FAILED)
    rated = [("best", advice.best), *advice.others]
    if now is not None:
        rated.insert(0, ("now", now))
    if advice.lossy is not None:
        rated.append(("loses updates", advice.lossy))
    played = {name: _played(outlook, conditions, recorded) for name, outlook in rated}
    if args.picture is not None:
        mtbfs_s = mtbf_axis(conditions.mtbf_s)
        curves = ettr_curves(rank, conditions, mtbfs_s, memory_bytes=args.memory)
        _draw(args.picture, args.picture_size, curves, mtbfs_s, mtbfs_s.index(conditions.mtbf_s))
    answer = {
        "iteration_s": conditions.iteration_s,
        "mtbf_s": conditions.mtbf_s,
        "rank_state_bytes": rank.dense_bytes,
        "arguments": arguments(advice.best),
        "rejected": advice.rejected,
        "policies": [
            {"name": name, **asdict(outlook), "recovery_s": outlook.recovery_s, "played_ettr": played[name]}
            for name, outlook in rated
        ],
    }
    return CommandOutcome(answer, _text(advice, rated, rank, conditions, played))


def _described(args: argparse.Namespace) -> tuple[RankShape, Conditions, None]:
    """Raises ValueError if the description contradicts itself."""
    if args.gpus is None:
        raise ValueError("--model needs --gpus")
    model = MODELS.get(args.model)
    if model is None:
        raise ValueError(f"no model {args.model!r}; there are {', '.join(sorted(MODELS))}")
    if (args.iteration is None) == (args.tokens is None):
        raise ValueError("pass either --iteration, or --tokens with --tflops")
    iteration_s = args.iteration
    if iteration_s is None:
        if args.tflops is None or args.tflops <= 0:
            raise ValueError("--tokens needs --tflops, what a GPU reaches; above 0")
        work = _FLOPS_PER_PARAMETER * model.active_parameters * args.tokens
        iteration_s = work / (args.gpus * args.tflops * 1e12) if args.gpus > 0 else 0.0
    rank = rank_shape(model, Layout(args.gpus, args.stages, args.expert_ranks), PRECISIONS[args.precision])
    return rank, _conditions(args, iteration_s, _LINK_BPS, _RESTART_S), None


def _conditions(
    args: argparse.Namespace, iteration_s: float, link_Bps: float, restart_s: float
) -> Conditions:
    """What the user says counts, and then what is known."""
    return Conditions(
        iteration_s=iteration_s,
        mtbf_s=args.mtbf,
        link_Bps=args.link or link_Bps,
        network_Bps=args.network,
        replicas=args.replicas,
        restart_s=restart_s if args.restart is None else args.restart,
        drag=args.drag,
        alone=_alone(args),
    )


def _alone(args: argparse.Namespace) -> float:
    """Raises ValueError if there is no pipeline."""
    if args.micro_batches is None:
        return 0.0
    if args.stages < 2 or args.micro_batches < 1:
        raise ValueError(
            "--micro-batches needs the --stages of a pipeline, at least 2; and at least 1 of them"
        )
    return float(args.micro_batches / (args.micro_batches + args.stages - 1))


def _running(args: argparse.Namespace) -> tuple[RankShape, Conditions, PolicyOutlook]:
    """The rank of a job on this node that has the most state, as it is seen for some seconds.

    Raises:
        ValueError: it takes no snapshots, or no steps.
    """
    before = _session(args)
    time.sleep(args.watch)
    after = _session(args, before.rank)
    metrics = after.metrics
    steps = after.step - before.step
    if steps < _STEPS_MIN:
        raise ValueError(
            f"{steps} iterations within {args.watch:g} s are too few to tell how long one lasts: pass a "
            "longer --watch"
        )
    # Each look finds a report that is up to a second old: the longer the watch, the less that counts.
    iteration_s = args.watch / steps
    stall_s = metrics.get("stall_ms_sum", 0.0) / 1e3 / max(metrics.get("steps", 0.0), 1.0)
    window = max(1, int(metrics.get("window", 1)))
    snapshot = int(metrics.get("snapshot_bytes", 0))
    state = max(int(metrics.get("dense_bytes", 0)), snapshot)  # an image has a header, too
    policy = _policy(args, after.rank)
    partial = policy == PolicyKind.PARTIAL and window > 1
    rank = (measured_partial_shape if partial else measured_shape)(state, snapshot, window)
    link = metrics.get("capture_gb_per_s", 0.0) * 1e9 or _LINK_BPS
    phases = phases_in_metrics(metrics)
    restart_s = sum(phases.get(phase, 0.0) for phase in _RESTART) or _RESTART_S
    conditions = _conditions(args, max(iteration_s - stall_s, iteration_s / 2), link, restart_s)
    taken = metrics.get("snapshots", 0.0) - before.metrics.get("snapshots", 0.0)
    every = round(steps / max(taken, 1.0))
    if partial:
        return rank, conditions, partial_outlook(rank, conditions, window, every)
    if window == 1 and every > 1:
        return rank, conditions, dense_outlook(rank, conditions, every)
    kind: Literal["sliding", "aligned"] = "aligned" if policy == PolicyKind.ALIGNED else "sliding"
    return rank, conditions, window_outlook(rank, conditions, kind, window)


def _policy(args: argparse.Namespace, rank: int) -> str:
    """Of the rank's snapshots; "" if it is not known."""
    found = ask(args, m.GetSnapshots(args.job, args.run, rank), m.Snapshots).ranks
    return found[0].policy if found else ""


def _session(args: argparse.Namespace, rank: int | None = None) -> m.SessionStatus:
    status = ask(args, m.GetStatus(), m.Status)
    found = [s for s in status.sessions if (s.job, s.run) == (args.job, args.run)]
    found = [s for s in found if rank is None or s.rank == rank]
    if not found:
        raise CommandError(
            f"no trainer of {args.job}/{args.run} is attached to this node's daemon", EXIT_REFUSED
        )
    return max(found, key=lambda s: s.metrics.get("dense_bytes", 0.0))


def _recorded(path: Path) -> RecordedFailures:
    try:
        return recorded_failures(path.read_text())
    except (OSError, ValueError) as error:
        raise CommandError(f"--failures {path}: {error}") from error


def _played(outlook: PolicyOutlook, conditions: Conditions, recorded: RecordedFailures | None) -> float:
    """Of the run that was recorded, or the mean of runs of twelve hours."""
    if recorded is not None:
        return play(outlook, conditions.iteration_s, recorded.failures_s, recorded.length_s).ettr
    drawn = (failures_at_random(conditions.mtbf_s, _PLAYED_S, seed) for seed in range(_SEEDS))
    return mean_ettr(outlook, conditions.iteration_s, drawn, _PLAYED_S)


def failures_at_random(mtbf_s: float, length_s: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which failures come, independent of each other."""
    rng = random.Random(seed)
    now_s = rng.expovariate(1 / mtbf_s)
    while now_s < length_s:
        yield now_s
        now_s += rng.expovariate(1 / mtbf_s)


# Told apart without colours: by dashes and markers.
_STYLES: Mapping[str, tuple[Any, str, str]] = {
    "sliding": ("-", "o", "#12355b"),
    "aligned": ("-.", "s", "#2a7f62"),
    "dense, Young and Daly's interval": (":", "^", "#b5541c"),
    "dense, CheckFreq's interval": (":", "D", "#7b2cbf"),
    "dense, Gemini's interval": (":", "v", "#444444"),
    "partial": ("--", "x", "#c1121f"),
}
_DPI = 100
_TICKS_S = {
    60: "1 min",
    180: "3 min",
    600: "10 min",
    1800: "30 min",
    3600: "1 h",
    10800: "3 h",
    21600: "6 h",
    43200: "12 h",
    86400: "1 day",
}


def _draw(
    path: Path, pixels: tuple[int, int], curves: Sequence[EttrCurve], mtbfs_s: Sequence[float], at: int
) -> None:
    """The ETTR of each policy over the MTBF, as a PNG.

    Args:
        at: which of the MTBFs is the job's.
    Raises:
        CommandError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise CommandError(f"--picture needs matplotlib ({error}): pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (pixels[0] / _DPI, pixels[1] / _DPI)
    figure, axes = pyplot.subplots(figsize=size, dpi=_DPI, layout="constrained")
    for number, curve in enumerate(sorted(curves, key=lambda each: -_ettr(each.points[at]))):
        dashes, marker, colour = _STYLES[curve.name]
        axes.plot(
            mtbfs_s,
            [math.nan if each is None else each.ettr for each in curve.points],
            linestyle=dashes,
            marker=marker,
            markevery=(2 * number, 12),
            color=colour,
            label=_label(curve, at),
        )
    _scale(axes, mtbfs_s)
    axes.axvline(mtbfs_s[at], color="black", linewidth=0.8)
    axes.legend(loc="best", title=f"with a failure every {format_age(mtbfs_s[at])} (vertical line)")
    try:
        figure.savefig(path, format="png", pil_kwargs={"optimize": True})
    except OSError as error:
        raise CommandError(f"--picture: {error}", EXIT_FAILED) from error
    finally:
        pyplot.close(figure)


def _scale(axes: Any, mtbfs_s: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(mtbfs_s[0], mtbfs_s[-1])
    ticks = [each for each in _TICKS_S if mtbfs_s[0] <= each <= mtbfs_s[-1]]
    axes.set_xticks(ticks, [_TICKS_S[each] for each in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_ylim(top=1 + (1 - axes.get_ylim()[0]) / 50)
    axes.set_xlabel("mean time between two failures of the job")
    axes.set_ylabel("part of the time that counts (ETTR)")


def _label(curve: EttrCurve, at: int) -> str:
    """Such as ``0.951  dense, every 23: Young and Daly's interval``."""
    here = curve.points[at]
    if here is None:
        return f"{curve.name}: nothing fits"
    interval = f": {curve.name.removeprefix('dense, ')}" if here.choice.policy == "dense" else ""
    return f"{here.ettr:.3f}  {here.choice}{interval}" + ("" if curve.exact else " (loses updates)")


def _ettr(outlook: PolicyOutlook | None) -> float:
    return 0.0 if outlook is None else outlook.ettr


def _text(
    advice: Advice,
    rated: Sequence[tuple[str, PolicyOutlook]],
    rank: RankShape,
    conditions: Conditions,
    played: Mapping[str, float],
) -> str:
    best = advice.best
    assert best is not None
    header = [
        "policy",
        "choice",
        "ETTR",
        "played",
        "stall ms",
        "failure s",
        "snapshot",
        "memory",
        "to peers /s",
    ]
    rows = [_row(name, outlook, played[name]) for name, outlook in rated]
    failure = (
        f"A failure costs {best.recovery_s:.3g} s: {best.lost_s:.3g} s of iterations that are lost, "
        f"{best.restart_s:.3g} s until all ranks run, {best.load_s:.3g} s to load, "
        f"{best.replay_s:.3g} s of replay."
    )
    loses = ""
    if advice.others:
        _, second = advice.others[0]
        loses = f" The next best ({second.choice}) loses {100 * (best.ettr - second.ettr):.2f} points."
    job = (
        f"{format_bytes(rank.dense_bytes)} of state on each rank, iterations of "
        f"{conditions.iteration_s:.3g} s, a failure every {format_age(conditions.mtbf_s)}"
    )
    name, now = rated[0]
    far = ""
    if name == "now" and best.ettr - now.ettr > _FAR:
        far = f"The job's settings ({now.choice}) lose {100 * (best.ettr - now.ettr):.1f} points of its time."
    lossy = ""
    if (lost := advice.lossy) is not None:
        lossy = (
            f"{lost.choice} is not exact: failures lose {lost.lost_share:.2%} of all experts' updates, if "
            f"tokens are even. To take it all the same, pass {arguments(lost)}"
        )
    parts = [
        job,
        format_table(header, rows),
        failure + loses,
        *([far] if far else []),
        *([f"Left out: {advice.rejected}."] if advice.rejected else []),
        *([lossy] if lossy else []),
        f"All {'others ' if lossy else 'of these '}are exact. Pass:\n    {arguments(best)}",
    ]
    return "\n\n".join(parts)


def _row(name: str, outlook: PolicyOutlook, played: float) -> list[Any]:
    return [
        name,
        str(outlook.choice) + (" (behind)" if outlook.behind else ""),
        f"{outlook.ettr:.4f}",
        f"{played:.4f}",
        f"{1e3 * outlook.stall_s:.3g}",
        f"{outlook.recovery_s:.3g}",
        format_bytes(outlook.snapshot_bytes),
        format_bytes(outlook.memory_bytes),
        format_bytes(round(outlook.replication_Bps)),
    ]
