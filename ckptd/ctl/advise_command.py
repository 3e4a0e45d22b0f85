"""`ckptctl advise`: rate every policy for a described job, and name the best. Needs no daemon."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ckptd.config.settings import parse_bytes
from ckptd.core.advice.advice import Advice, advise, arguments
from ckptd.core.advice.failure_simulation import mean_ettr
from ckptd.core.advice.job_shape import MODELS, PRECISIONS, Layout, RankShape, rank_shape
from ckptd.core.advice.outlook import Conditions, PolicyOutlook
from ckptd.ctl.command import EXIT_FAILED, CommandError, CommandOutcome, Commands, duration
from ckptd.units import format_age, format_bytes, format_table

__all__ = ["add_advise_command", "failures_at_random"]

_PLAYED_S = 12 * 3600.0
_SEEDS = 20
# Forward and backward, for each parameter that a token uses.
_FLOPS_PER_PARAMETER = 6.0


def add_advise_command(commands: Commands) -> None:
    """Add `advise`."""
    parser = commands.add("advise", _advise, "rate every policy for a described job, and name the best")
    job = parser.add_argument_group("the job")
    job.add_argument("--model", required=True, help=f"one of {', '.join(sorted(MODELS))}")
    job.add_argument("--gpus", type=int, required=True, help="ranks of the job")
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
    around.add_argument(
        "--mtbf", type=duration, required=True, metavar="TIME", help="of the whole job, such as 10m or 6h"
    )
    around.add_argument("--link", type=_rate, default="20GB", help="device to host, a second (default: 20GB)")
    around.add_argument(
        "--network", type=_rate, default="5GB", help="a rank to a peer, a second (default: 5GB)"
    )
    around.add_argument("--replicas", type=int, default=1, help="copies on other nodes (default: 1)")
    around.add_argument(
        "--restart",
        type=duration,
        default="3s",
        metavar="TIME",
        help="until all ranks run again (default: 3s)",
    )
    around.add_argument(
        "--memory", type=_rate, help="of the host for each rank, such as 64GiB (default: enough)"
    )
    around.add_argument(
        "--drag",
        type=float,
        default=0.0,
        help="seconds that training loses in each second of a copy (default: 0)",
    )


def _count(text: str) -> int:
    for unit, factor in (("K", 10**3), ("M", 10**6), ("G", 10**9)):
        if text.endswith(unit):
            text, factor_found = text.removesuffix(unit), factor
            break
    else:
        factor_found = 1
    try:
        return int(float(text) * factor_found)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4M") from None


def _rate(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _advise(args: argparse.Namespace) -> CommandOutcome:
    try:
        rank, conditions = _described(args)
        advice = advise(rank, conditions, memory_bytes=args.memory)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if advice.best is None:
        raise CommandError(f"nothing fits: {advice.rejected}", EXIT_FAILED)
    rated = [("best", advice.best), *advice.others]
    played = {name: _played(outlook, conditions) for name, outlook in rated}
    answer = {
        "iteration_s": conditions.iteration_s,
        "rank_state_bytes": rank.dense_bytes,
        "arguments": arguments(advice.best),
        "rejected": advice.rejected,
        "policies": [
            {"name": name, **asdict(outlook), "recovery_s": outlook.recovery_s, "played_ettr": played[name]}
            for name, outlook in rated
        ],
    }
    return CommandOutcome(answer, _text(advice, rank, conditions, played))


def _described(args: argparse.Namespace) -> tuple[RankShape, Conditions]:
    """Raises ValueError if the description contradicts itself."""
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
    return rank, Conditions(
        iteration_s=iteration_s,
        mtbf_s=args.mtbf,
        link_Bps=args.link,
        network_Bps=args.network,
        replicas=args.replicas,
        restart_s=args.restart,
        drag=args.drag,
    )


def _played(outlook: PolicyOutlook, conditions: Conditions) -> float:
    """The mean of runs of twelve hours."""
    drawn = (failures_at_random(conditions.mtbf_s, _PLAYED_S, seed) for seed in range(_SEEDS))
    return mean_ettr(outlook, conditions.iteration_s, drawn, _PLAYED_S)


def failures_at_random(mtbf_s: float, length_s: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which failures come, independent of each other."""
    rng = random.Random(seed)
    now_s = rng.expovariate(1 / mtbf_s)
    while now_s < length_s:
        yield now_s
        now_s += rng.expovariate(1 / mtbf_s)


def _text(advice: Advice, rank: RankShape, conditions: Conditions, played: dict[str, float]) -> str:
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
    rows = [_row(name, outlook, played[name]) for name, outlook in [("best", best), *advice.others]]
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
    parts = [
        job,
        format_table(header, rows),
        failure + loses,
        *([f"Left out: {advice.rejected}."] if advice.rejected else []),
        f"All of these are exact. Pass:\n    {arguments(best)}",
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
