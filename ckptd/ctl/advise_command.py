"""`ckptctl advise`: rate every policy for a job that is described or runs here, and name the best."""

from __future__ import annotations

import argparse
import heapq
import math
import random
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from ckptd.config.settings import parse_bytes
from ckptd.core.advice.advice import (
    advise,
    arguments,
    ettr_curves,
    mtbf_axis,
    settings,
)
from ckptd.core.advice.failure_simulation import RecordedFailures, mean_shares, recorded_failures
from ckptd.core.advice.job_shape import (
    MODELS,
    PRECISIONS,
    Layout,
    RankShape,
    measured_partial_shape,
    measured_shape,
    rank_shape,
)
from ckptd.core.advice.node_losses import NodeLosses
from ckptd.core.advice.outlook import (
    HIDDEN,
    Conditions,
    PolicyOutlook,
    dense_outlook,
    partial_outlook,
    persisting,
    selected_outlook,
    window_outlook,
)
from ckptd.core.durable_experts import turns_of
from ckptd.core.recovery.recovery_phases import RecoveryPhase, phases_in_metrics
from ckptd.core.slots.slots import DRAWN_EPOCHS
from ckptd.core.snapshot_policy import PolicyKind
from ckptd.ctl.advice_report import LOSES, Played, advice_text, draw
from ckptd.ctl.command import (
    EXIT_FAILED,
    EXIT_REFUSED,
    TIME,
    CommandError,
    CommandOutcome,
    Commands,
    add_run,
    ask,
    duration,
)
from ckptd.transport import messages as m

_PLAYED_S = 12 * 3600.0
_PLAYED_FAILURES = 1000  # at most: failures that come every second would take minutes
_SEEDS = 20
_LINK_BPS, _NETWORK_BPS, _RESTART_S = 20e9, 5e9, 3.0
_GPUS_OF_NODE = 8
_STEPS_MIN = 3
_RESTART = (
    RecoveryPhase.OTHERS_STOPPED,
    RecoveryPhase.PROCESS_THERE,
    RecoveryPhase.IMPORTS,
    RecoveryPhase.PROCESS_GROUPS,
    RecoveryPhase.ATTACH,
    RecoveryPhase.INVENTORY,
)
_UNITS_S = {"s": 1.0, "h": 3600.0}  # of a record of failures
_FACTORS = {"K": 10**3, "M": 10**6, "G": 10**9}
# Of an iteration, and of each GPU, if nobody says: what the pretraining of large models on H100s reaches.
_TOKENS, _TFLOPS = 4_000_000, 400.0
# Forward and backward, for each parameter that a token uses.
_FLOPS_PER_PARAMETER = 6.0

# The options that fields of `Conditions` come from.
_FLAGS = {
    "iteration_s": "--iteration",
    "mtbf_s": "--mtbf",
    "loss_mtbf_s": "--loss-mtbf",
    "restart_s": "--restart",
    "link_Bps": "--link",
    "network_Bps": "--network",
    "storage_Bps": "--storage",
    "replicas": "--replicas",
    "skew": "--skew",
    "drag": "--drag",
}


def add_advise_command(commands: Commands) -> None:
    """Add `advise`."""
    text = "rate every policy for a job that is described, or runs on this node, and name the best"
    parser = commands.add("advise", _advise, text)
    text = "a job that runs: its state, iterations, copies and restarts are measured"
    job = parser.add_argument_group(text)
    add_run(job, "?", job_help="an attached job of this node's daemon, in place of --model")
    job.add_argument("--watch", **TIME, default="5s", help="watch it so long (default: 5s)")
    _add_description(parser.add_argument_group("a job that is described"))
    around = parser.add_argument_group("what is around it")
    _add_failures(around)
    _add_copies(around)
    text = "draw the ETTR of each policy over the MTBF (needs matplotlib)"
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help=text)
    text = "in pixels (default: 1200x750)"
    parser.add_argument("--picture-size", type=_pixels, default="1200x750", metavar="WxH", help=text)


def _add_description(job: argparse._ArgumentGroup) -> None:
    job.add_argument("--model", help=f"one of {', '.join(sorted(MODELS))}")
    job.add_argument("--gpus", type=int, help="ranks of the job")
    job.add_argument("--stages", type=int, default=1, help="of a pipeline (default: 1)")
    text = "ranks that share a layer's experts (default: 1)"
    job.add_argument("--expert-ranks", type=int, default=1, help=text)
    text = "default: bf16-mixed"
    job.add_argument("--precision", choices=sorted(PRECISIONS), default="bf16-mixed", help=text)
    job.add_argument("--iteration", **TIME, help="of an iteration, such as 2.5s")
    text = "of an iteration, in place of --iteration (default: 4M, and says so)"
    job.add_argument("--tokens", type=_count, help=text)
    job.add_argument("--tflops", type=float, help="that a GPU reaches, with --tokens (default: 400)")


def _add_failures(around: argparse._ArgumentGroup) -> None:
    text = "of the whole job, such as 10m or 6h (default: as seen of a job that runs)"
    around.add_argument("--mtbf", **TIME, help=text)
    text = "play these: a line for each with its time, or lines of time,nodes (default: at random)"
    around.add_argument("--failures", type=Path, metavar="FILE", help=text)
    text = "of the times of --failures: hours or seconds (default: s)"
    around.add_argument("--failures-unit", choices=sorted(_UNITS_S), default="s", help=text)
    text = "device to host, a second (default: as measured, or 20GB)"
    around.add_argument("--link", type=_bytes, help=text)
    text = "a rank to a peer, a second (default: as measured, or 5GB)"
    around.add_argument("--network", type=_bytes, help=text)
    text = (
        "of failures that take a state with all of its copies in memory, so that the job goes back to "
        "storage, such as 30d (default: none)"
    )
    around.add_argument("--loss-mtbf", **TIME, help=text)
    text = "a rank to storage, and back, a second; with --loss-mtbf, --lost-nodes (default: as measured)"
    around.add_argument("--storage", type=_bytes, help=text)
    text = (
        "N nodes are lost at once this often, beside other failures, such as 4:30d; may be repeated. "
        "The number of replicas is then a part of the choice; needs --storage (default: none)"
    )
    around.add_argument(
        "--lost-nodes", type=_lost_nodes, action="append", default=[], metavar="N:TIME", help=text
    )
    text = "of the job, with --lost-nodes (default: one for 8 GPUs of a described job)"
    around.add_argument("--nodes", type=int, help=text)


def _add_copies(around: argparse._ArgumentGroup) -> None:
    text = "copies on other nodes (default: 1, or as a running job has; with --lost-nodes, what is best)"
    around.add_argument("--replicas", type=int, metavar="N", help=text)
    text = (
        'of the tokens of a layer\'s experts, for "selected": 0 if all have as many, towards 1 if one '
        "has all (normalized Herfindahl-Hirschman index; default: 0)"
    )
    around.add_argument("--skew", type=float, default=0.0, help=text)
    text = "until all ranks run again (default: as measured, or 3s)"
    around.add_argument("--restart", **TIME, help=text)
    text = "of a pipeline with boundary logs: only the stage of a lost rank replays (default: all ranks)"
    around.add_argument("--micro-batches", type=int, metavar="N", help=text)
    text = "of the host for each rank, such as 64GiB (default: enough)"
    around.add_argument("--memory", type=_bytes, help=text)
    text = "seconds that training loses in each second of a copy (default: 0)"
    around.add_argument("--drag", type=float, default=0.0, help=text)


def _count(text: str) -> int:
    factor = _FACTORS.get(text[-1:], 1)
    try:
        return int(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4M") from None


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _lost_nodes(text: str) -> tuple[int, float]:
    nodes, _, every = text.partition(":")
    if not nodes.isdecimal() or len(nodes) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not nodes and a time, such as 4:30d")
    return int(nodes), duration(every)


def _pixels(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{3,4})x(\d{3,4})", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 1200x750, of 100 to 9999 pixels")
    return int(found[1]), int(found[2])


def _advise(args: argparse.Namespace) -> CommandOutcome:
    if (args.job is None) == (args.model is None) or (args.job is None) != (args.run is None):
        raise CommandError("pass either JOB and RUN, or --model")
    recorded = None if args.failures is None else _recorded(args.failures, _UNITS_S[args.failures_unit])
    if recorded is not None and args.mtbf is None:
        args.mtbf = recorded.mtbf_s
    if args.mtbf is None and args.model is not None:
        raise CommandError("pass --mtbf, or --failures")
    if args.storage is not None and args.loss_mtbf is None and not args.lost_nodes:
        raise CommandError(
            "--storage needs --loss-mtbf or --lost-nodes: nothing else sends a job back to storage"
        )
    try:
        rank, around, now = _described(args) if args.job is None else _running(args)
        conditions, losses = around.conditions, around.losses
        advice = advise(rank, conditions, memory_bytes=args.memory, losses=losses)
    except ValueError as error:
        raise CommandError(_with_flag(str(error))) from error
    if advice.best is None:
        raise CommandError(f"nothing fits: {advice.rejected}", EXIT_FAILED)
    rated = [("best", advice.best), *advice.others]
    if now is not None:
        rated.insert(0, ("now", now))
    rated += [(LOSES[outlook.choice.policy], outlook) for outlook in advice.lossy]
    played = {name: _played(outlook, around, recorded) for name, outlook in rated}
    if args.picture is not None:
        mtbfs_s = mtbf_axis(conditions.mtbf_s)
        curves = ettr_curves(rank, conditions, mtbfs_s, memory_bytes=args.memory, losses=losses)
        draw(args.picture, args.picture_size, curves, mtbfs_s, mtbfs_s.index(conditions.mtbf_s))
    answer = {
        "iteration_s": conditions.iteration_s,
        "mtbf_s": conditions.mtbf_s,
        "rank_state_bytes": rank.dense_bytes,
        "assumed": _assumed(args),
        "arguments": arguments(advice.best, rank),
        "settings": settings(advice.best),
        "rejected": advice.rejected,
        "lossy_rejected": advice.lossy_rejected,
        "policies": [
            {
                "name": name,
                **asdict(outlook),
                "recovery_s": outlook.recovery_s,
                "loss_s": outlook.loss_s,
                "played_ettr": played[name][0],
                "played_lost_share": played[name][1],
            }
            for name, outlook in rated
        ],
    }
    text = advice_text(advice, rated, rank, conditions, losses, played)
    if assumed := _assumed(args):
        text = f"Assumed: {assumed}.\n\n{text}"
    return CommandOutcome(answer, text)


def _with_flag(text: str) -> str:
    """An error about a value, by the option that has it."""
    name, space, rest = text.partition(" ")
    return f"{_FLAGS.get(name, name)}{space}{rest}"


def _assumed(args: argparse.Namespace) -> str:
    """What was taken for the length of an iteration although nobody said it; "" if nothing."""
    if args.model is None or args.iteration is not None:
        return ""
    tokens = f"{_TOKENS // 10**6}M tokens of an iteration (--tokens)" if args.tokens is None else ""
    tflops = f"{_TFLOPS:g} TFLOPS of a GPU (--tflops)" if args.tflops is None else ""
    return ", ".join(filter(None, (tokens, tflops)))


@dataclass(frozen=True, slots=True)
class _Around:
    """What is around a job.

    Attributes:
        conditions: without losses of several nodes at once, and with the number of replicas that is given or
            seen.
        losses: of several nodes at once; None: there are none, and the number of replicas is not chosen.
    """

    conditions: Conditions
    losses: NodeLosses | None = None

    def with_replicas(self, replicas: int) -> Conditions:
        """The conditions of a choice with so many."""
        found = replace(self.conditions, replicas=replicas)
        return found if self.losses is None else self.losses.conditions(found)


def _described(args: argparse.Namespace) -> tuple[RankShape, _Around, None]:
    """Raises ValueError if the description contradicts itself."""
    if args.gpus is None:
        raise ValueError("--model needs --gpus")
    model = MODELS.get(args.model)
    if model is None:
        raise ValueError(f"no model {args.model!r}; there are {', '.join(sorted(MODELS))}")
    if args.iteration is not None and (args.tokens is not None or args.tflops is not None):
        raise ValueError("pass either --iteration, or --tokens and --tflops")
    iteration_s = args.iteration
    if iteration_s is None:
        tokens = _TOKENS if args.tokens is None else args.tokens
        tflops = _TFLOPS if args.tflops is None else args.tflops
        if tokens < 1:
            raise ValueError(f"--tokens is {tokens}; it must be above 0")
        if not 0 < tflops < math.inf:
            raise ValueError(f"--tflops is {tflops:g}; it must be above 0")
        work = _FLOPS_PER_PARAMETER * model.active_parameters * tokens
        iteration_s = work / (args.gpus * tflops * 1e12) if args.gpus > 0 else 0.0
    rank = rank_shape(model, Layout(args.gpus, args.stages, args.expert_ranks), PRECISIONS[args.precision])
    known = Conditions(iteration_s, args.mtbf, _LINK_BPS, _NETWORK_BPS, restart_s=_RESTART_S)
    nodes = math.ceil(args.gpus / _GPUS_OF_NODE)
    return rank, _around(args, known, nodes=nodes), None


def _around(
    args: argparse.Namespace, known: Conditions, *, nodes: int = 0, storage_Bps: float = 0.0
) -> _Around:
    """What the user says counts, and then what is known.

    Args:
        nodes: of the job; 0: not known.
        storage_Bps: as measured; 0: it was not.
    """
    storage_Bps = args.storage or storage_Bps
    if (args.loss_mtbf is not None or args.lost_nodes) and not storage_Bps:
        option = "--loss-mtbf" if args.loss_mtbf is not None else "--lost-nodes"
        raise ValueError(f"{option} needs --storage: the rate of storage was not measured")
    lost = args.loss_mtbf is not None
    conditions = replace(
        known,
        storage_Bps=storage_Bps if lost else 0.0,
        loss_mtbf_s=args.loss_mtbf if lost else math.inf,
        link_Bps=args.link or known.link_Bps,
        network_Bps=args.network or known.network_Bps,
        replicas=known.replicas if args.replicas is None else args.replicas,
        restart_s=known.restart_s if args.restart is None else args.restart,
        drag=args.drag,
        alone=_alone(args),
        skew=args.skew,
    )
    return _Around(conditions, _losses(args, nodes, storage_Bps))


def _losses(args: argparse.Namespace, nodes: int, storage_Bps: float) -> NodeLosses | None:
    """Raises ValueError if the number of nodes is not known."""
    if not args.lost_nodes:
        if args.nodes is not None:
            raise ValueError("--nodes is for --lost-nodes: nothing else depends on the number of nodes")
        return None
    if args.nodes is None and not nodes:
        raise ValueError("--lost-nodes needs the --nodes of the job")
    given = () if args.replicas is None else (args.replicas,)
    return NodeLosses(nodes if args.nodes is None else args.nodes, tuple(args.lost_nodes), storage_Bps, given)


def _alone(args: argparse.Namespace) -> float:
    """Raises ValueError if there is no pipeline."""
    if args.micro_batches is None:
        return 0.0
    if args.stages < 2 or args.micro_batches < 1:
        raise ValueError(
            "--micro-batches needs the --stages of a pipeline, at least 2; and at least 1 of them"
        )
    return float(args.micro_batches / (args.micro_batches + args.stages - 1))


@dataclass(frozen=True, slots=True)
class _Look:
    """A rank of a job that runs, as this node's daemon sees it.

    Attributes:
        policy: of its snapshots; "" if it is not known.
        put_Bps: of the daemon's transfers to peers; 0: there were none.
        durable: its way to storage; None without a store.
        replicas: that it has while no node is lost; 0: none.
    """

    session: m.SessionStatus
    policy: str = ""
    put_Bps: float = 0.0
    durable: m.DurableRank | None = None
    replicas: int = 0


def _running(args: argparse.Namespace) -> tuple[RankShape, _Around, PolicyOutlook]:
    """The rank of a job on this node that has the most state, as it is seen for some seconds."""
    before = _look(args).session
    time.sleep(args.watch)
    look = _look(args, before.rank)
    after, metrics = look.session, look.session.metrics
    steps = after.step - before.step
    if steps < _STEPS_MIN:
        raise ValueError(
            f"{steps} iterations within {args.watch:g} s are too few to tell how long one lasts: pass a "
            "longer --watch"
        )
    # Each look finds a report that is up to a second old: the longer the watch, the less that counts.
    step_s = args.watch / steps
    stall_s = metrics.get("stall_ms_sum", 0.0) / 1e3 / max(metrics.get("steps", 0.0), 1.0)
    window = max(1, int(metrics.get("window", 1)))
    snapshot = int(metrics.get("snapshot_bytes", 0))
    state = max(int(metrics.get("dense_bytes", 0)), snapshot)  # an image has a header, too
    rank = measured_shape(state, snapshot, window)
    num_experts = int(metrics.get("num_experts", 0))
    selects = metrics.get("selectable_experts", 0.0) > 0
    if look.policy == PolicyKind.PARTIAL and window > 1:
        rank = measured_partial_shape(state, snapshot, window, num_experts)
        rank = replace(rank, selectable=after.world_size == 1 or selects)
    phases = phases_in_metrics(metrics)
    known = Conditions(
        iteration_s=max(step_s - stall_s, step_s / 2),
        mtbf_s=_seen_mtbf_s(after, step_s) if args.mtbf is None else args.mtbf,
        link_Bps=metrics.get("capture_gb_per_s", 0.0) * 1e9 or _LINK_BPS,
        network_Bps=look.put_Bps or _NETWORK_BPS,
        replicas=look.replicas or 1,
        restart_s=sum(phases.get(phase, 0.0) for phase in _RESTART) or _RESTART_S,
    )
    taken = metrics.get("snapshots", 0.0) - before.metrics.get("snapshots", 0.0)
    every = round(steps / max(taken, 1.0))
    # What a snapshot of any size costs: the measured stall but for what its copy is too long for.
    too_long_s = max(0.0, snapshot / known.link_Bps - HIDDEN * known.iteration_s)
    known = replace(known, top_s=max(known.top_s, stall_s * every - too_long_s))
    stored = int(metrics.get("persist_experts", 0))
    parts = turns_of(stored, num_experts, window) if stored else 0

    def now(conditions: Conditions) -> PolicyOutlook:
        if look.policy == PolicyKind.PARTIAL and window > 1 and selects:
            return selected_outlook(rank, conditions, window, every)
        if look.policy == PolicyKind.PARTIAL and window > 1:
            return partial_outlook(rank, conditions, window, every, parts)
        if window == 1 and every > 1:
            return dense_outlook(rank, conditions, every)
        kind: Literal["sliding", "aligned"] = "aligned" if look.policy == PolicyKind.ALIGNED else "sliding"
        return window_outlook(rank, conditions, kind, window)

    durable, measured_Bps = look.durable, 0.0
    if durable is not None and durable.last_s > 0:
        uploaded = now(replace(known, storage_Bps=1.0, loss_mtbf_s=1.0)).storage
        assert uploaded is not None, "the conditions have storage"
        measured_Bps = uploaded.upload_bytes / durable.last_s
    around = _around(args, known, storage_Bps=measured_Bps)
    conditions = around.with_replicas(known.replicas)
    found = now(conditions)
    if found.storage is not None and durable is not None:
        found = persisting(found, conditions, max(durable.stride, found.storage.shortest))
    return rank, around, found


def _seen_mtbf_s(session: m.SessionStatus, step_s: float) -> float:
    """The time of the run's iterations, for each of its starts but the first."""
    again = int(session.metrics.get("epoch", 0.0)) // DRAWN_EPOCHS - 1
    if again < 1 or session.step < 1:
        raise ValueError(
            f"no failure of {session.job}/{session.run} was seen within {max(session.step, 0)} iterations: "
            "pass --mtbf, or --failures"
        )
    return session.step * step_s / again


def _look(args: argparse.Namespace, rank: int | None = None) -> _Look:
    status = ask(args, m.GetStatus(), m.Status)
    found = [s for s in status.sessions if (s.job, s.run) == (args.job, args.run)]
    found = [s for s in found if rank is None or s.rank == rank]
    if not found:
        raise CommandError(
            f"no trainer of {args.job}/{args.run} is attached to this node's daemon", EXIT_REFUSED
        )
    session = max(found, key=lambda s: s.metrics.get("dense_bytes", 0.0))
    slots = ask(args, m.GetSnapshots(args.job, args.run, session.rank), m.Snapshots).ranks
    peers = ask(args, m.GetPeers(), m.Peers).ranks
    sent_s = status.counters.get("replicated_ns", 0) / 1e9
    ranks = status.durable.ranks if status.durable else ()
    key = (session.job, session.run, session.rank)
    return _Look(
        session,
        slots[0].policy if slots else "",
        status.counters.get("replicated_bytes", 0) / sent_s if sent_s else 0.0,
        next((each for each in ranks if (each.job, each.run, each.rank) == key), None),
        max((e.wanted for e in peers if (e.job, e.run, e.rank, e.kind) == (*key, "snapshots")), default=0),
    )


def _recorded(path: Path, unit_s: float) -> RecordedFailures:
    try:
        return recorded_failures(path.read_text(), unit_s)
    except (OSError, ValueError) as error:
        raise CommandError(f"--failures {path}: {error}") from error


def _played(outlook: PolicyOutlook, around: _Around, recorded: RecordedFailures | None) -> Played:
    """Of the run that was recorded, or the mean of runs of twelve hours."""
    base, conditions = around.conditions, around.with_replicas(outlook.choice.replicas)
    length_s = recorded.length_s if recorded else min(_PLAYED_S, _PLAYED_FAILURES * conditions.mtbf_s)
    losses = None
    if conditions.storage_Bps:
        losses = [failures_at_random(conditions.loss_mtbf_s, length_s, _SEEDS + n) for n in range(_SEEDS)]
    if recorded is not None:
        # Losses of several nodes that leave a copy of each state come beside what was recorded.
        survived = 1 / conditions.mtbf_s - 1 / base.mtbf_s
        more_s = 1 / survived if survived * length_s > 1e-9 else math.inf
        drawn: list[Iterable[float]] = [
            heapq.merge(recorded.failures_s, failures_at_random(more_s, length_s, 2 * _SEEDS + n))
            for n in range(_SEEDS)
        ]
    else:
        drawn = [failures_at_random(conditions.mtbf_s, length_s, seed) for seed in range(_SEEDS)]
    return mean_shares(outlook, conditions.iteration_s, drawn, length_s, losses)


def failures_at_random(mtbf_s: float, length_s: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which failures come, independent of each other."""
    if math.isinf(mtbf_s):
        return
    rng = random.Random(seed)
    now_s = rng.expovariate(1 / mtbf_s)
    while now_s < length_s:
        yield now_s
        now_s += rng.expovariate(1 / mtbf_s)
