"""`ckptctl elastic`: where the experts of a job are or would be, what that is worth, and what
losing nodes would mean.

Without a file the answer is about what a running job told its daemon (`show`, `plan`, `whatif`);
with one, no daemon is asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Callable
from typing import Any

from ckptd.ctl.elastic.elastic_answers import (
    LossReport,
    Outlook,
    Planned,
    as_planned,
    lose,
    lost_nodes,
    next_time,
    outlook,
    plan,
)
from ckptd.ctl.elastic.elastic_input import InputProblem, Situation, read_file, situation
from ckptd.ctl.elastic.elastic_render import (
    Canvas,
    lost_text,
    next_text,
    outlook_text,
    planned_text,
)
from ckptd.ctl.peers_command import as_json, ask_what_if, render_what_if
from ckptd.ctl.store.checkpoints import CommandOutcome
from ckptd.errors import ElasticError
from ckptd.transport.control import messages as m
from ckptd.transport.control.wire import ControlClient, RefusedError
from ckptd.units import format_age

__all__ = ["run_elastic"]

Connect = Callable[[], ControlClient]
_FAILED = 1


def run_elastic(args: argparse.Namespace, connect: Connect) -> CommandOutcome:
    """`ckptctl elastic plan|show|whatif`.

    Raises:
        InputProblem: the file, or what a job told, cannot be used.
        ElasticError: there are fewer slots than experts.
        RefusedError: no job told this daemon of its placement, or several did and none is named.
    """
    run: Callable[[argparse.Namespace, Connect], CommandOutcome] = {
        "plan": _plan,
        "show": _show,
        "whatif": _what_if,
    }[args.question]
    return run(args, connect)


def _plan(args: argparse.Namespace, connect: Connect) -> CommandOutcome:
    found = situation(read_file(args.file) if args.file else _told(args, connect).elastic)
    planned = plan(found)
    return CommandOutcome(planned_json(planned), planned_text(planned, _canvas(args, found)))


def _show(args: argparse.Namespace, connect: Connect) -> CommandOutcome:
    with connect() as client:
        told = client.ask(m.GetElastic(args.job or "", args.run or ""), m.SeenElastic).told
    if not told:
        raise _nobody(args)
    shown = [_shown(one, args) for one in told]
    return CommandOutcome(
        {"runs": [one for one, _ in shown]}, "\n\n".join(text for _, text in shown)
    )


def _shown(one: m.ElasticTold, args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    found = situation(one.elastic)
    head = f"{one.job}/{one.run}, told by rank {one.rank} {format_age(one.ago_s)} ago"
    head += f" in step {found.told.step}" if found.told.step >= 0 else ""
    why = "; ".join(part for part in (found.told.method, found.told.reason) if part)
    out: dict[str, Any] = {"job": one.job, "run": one.run, "rank": one.rank, "ago_s": one.ago_s}
    out["told"] = one.elastic
    if found.held is None:
        return out, f"{head}\nwhat its nodes hold is not told"
    now = outlook(found, found.held)
    parts = [head + (f"\n{why}" if why else ""), outlook_text(found, now, _canvas(args, found))]
    out["now"] = outlook_json(now)
    out["history"] = [_hottest(period) for period in (*found.told.history, found.told.loads)]
    parts.append(_history_text(out["history"]))
    try:
        coming = next_time(found, now, plan(found))
    except ElasticError as error:
        out["next"] = {"error": str(error)}
        return out, "\n\n".join([*parts, f"next rebalance: none: {error}"])
    out["next"] = dataclasses.asdict(coming)
    return out, "\n\n".join([*parts, next_text(coming)])


def _hottest(period: tuple[tuple[int, ...], ...]) -> float:
    """The share of the layer's hottest expert in its tokens, mean over layers."""
    shares = [max(row) / sum(row) for row in period if sum(row)]
    return sum(shares) / len(shares) if shares else 0.0


def _history_text(shares: list[float]) -> str:
    told = ", ".join(f"{share:.1%}" for share in shares)
    return f"share of a layer's tokens on its hottest expert, by period, the newest last: {told}"


def _what_if(args: argparse.Namespace, connect: Connect) -> CommandOutcome:
    told = None if args.file else _told(args, connect)
    found = situation(read_file(args.file) if told is None else told.elastic)
    nodes, text = lost_nodes(found, args.lose), []
    if found.held is None:
        found = as_planned(found)
        text.append("what the nodes hold is not told: taken as `plan` would place it")
    lost = lose(found, nodes)
    text.append(lost_text(found, lost, _canvas(args, found)))
    answer = lost_json(lost)
    recoverable = None if lost.gone else True
    if isinstance(lost.planned, str):
        recoverable = False
    elif told is not None:
        snapshots, said = _from_snapshots(args, connect, told, lost)
        answer["snapshots"] = snapshots
        text.append(said)
        recoverable = True if recoverable else bool(snapshots.get("recoverable"))
    elif lost.gone:
        text.append(
            "whether the lost ones can be had from snapshots, only a running job's daemon knows"
        )
    answer["recoverable"] = recoverable
    text.append(_next_after(found, lost))
    return CommandOutcome(
        answer, "\n\n".join(part for part in text if part), _FAILED if recoverable is False else 0
    )


def _from_snapshots(
    args: argparse.Namespace, connect: Connect, told: m.ElasticTold, lost: LossReport
) -> tuple[dict[str, Any], str]:
    """What the memory tier would give the ranks of these nodes, as `ckptctl whatif` has it."""
    asked = argparse.Namespace(
        job=told.job,
        run=told.run,
        lose=",".join(f"node={node}" for node in lost.nodes),
        timeout=args.timeout,
    )
    try:
        with connect() as client:
            # A new world loads one iteration, and replays none.
            found = ask_what_if(client, asked, verify_iterations=0)
    except (ValueError, RefusedError) as error:
        text = f"snapshots: not known: {error}"
        return {"recoverable": False, "reason": str(error)}, text
    return as_json(found), f"snapshots, {render_what_if(found)}"


def _next_after(found: Situation, lost: LossReport) -> str:
    if isinstance(lost.planned, str):
        return "next rebalance: as soon as there are nodes with slots enough"
    gather = "120 s after the last node has come (at most 600 s after the first)"
    return f"next rebalance: at once, on the nodes that are left; again {gather}, and when the load has moved"


def _told(args: argparse.Namespace, connect: Connect) -> m.ElasticTold:
    """What the one run that is meant has told."""
    with connect() as client:
        told = client.ask(m.GetElastic(args.job or "", args.run or ""), m.SeenElastic).told
    if not told:
        raise _nobody(args)
    if len(told) > 1:
        runs = ", ".join(f"{one.job}/{one.run}" for one in told)
        raise RefusedError("not_found", f"several runs fit: {runs}", "pass --job and --run")
    return told[0]


def _nobody(args: argparse.Namespace) -> RefusedError:
    which = f" of {args.job or 'any job'}/{args.run or 'any run'}" if args.job or args.run else ""
    return RefusedError(
        "not_found",
        f"no elastic job{which} has told this daemon where its experts are",
        "it does when it has placed them; a restarted daemon hears of it with the next measured load",
    )


def _canvas(args: argparse.Namespace, found: Situation) -> Canvas:
    for layer in args.layer or ():
        if not 0 <= layer < len(found.loads_LE):
            raise InputProblem(f"--layer {layer}: there are layers 0 to {len(found.loads_LE) - 1}")
    terminal = sys.stdout.isatty()
    color = terminal if args.color == "auto" else args.color == "always"
    return Canvas(shutil.get_terminal_size((100, 24)).columns, color, tuple(args.layer or ()))


# --- as JSON ---------------------------------------------------------------------------------------------


def outlook_json(found: Outlook) -> dict[str, Any]:
    """``placement``: for each layer and node, in the order of the nodes, its experts, one entry for
    each replica.
    """
    placement = [
        [[e for e, n in enumerate(node) for _ in range(n)] for node in layer]
        for layer in found.placement.counts.tolist()
    ]
    return {
        "placement": placement,
        "recovery": _chances_json(found.recovery),
        "domain_recovery": _chances_json(found.domain_recovery),
        "straggler": found.straggler,
        "straggler_by_layer": list(found.straggler_by_layer),
        "tokens_per_rank": found.tokens_LR.tolist(),
    }


def _chances_json(chances: tuple[tuple[int, Any], ...]) -> list[dict[str, Any]]:
    return [
        {"lost": lost, "probability": chance.value, "error": chance.error, "exact": chance.exact}
        for lost, chance in chances
    ]


def planned_json(planned: Planned) -> dict[str, Any]:
    """A new placement as plain values."""
    return {
        "nodes": list(planned.situation.names),
        "layers": list(planned.situation.layers),
        "method": planned.method,
        "guarantee": planned.guarantee,
        **outlook_json(planned.outlook),
        "move": None if planned.move is None else dataclasses.asdict(planned.move),
    }


def lost_json(lost: LossReport) -> dict[str, Any]:
    """What the loss of nodes would mean, as plain values."""
    return {
        "lost_nodes": list(lost.nodes),
        "lost_experts": [list(one) for one in lost.gone],
        "planned": {"error": lost.planned}
        if isinstance(lost.planned, str)
        else planned_json(lost.planned),
    }
