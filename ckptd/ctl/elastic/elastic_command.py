"""`ckptctl elastic`: show and plan the placement of a job's experts, and predict the loss of nodes.

Without a file, the input is the report of a running job to its daemon (`show`, `plan`, `whatif`);
with a file, the command needs no daemon.
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
from ckptd.transport import messages as m
from ckptd.transport.wire import ControlClient, RefusedError
from ckptd.units import format_age

__all__ = ["run_elastic"]

Connect = Callable[[], ControlClient]
_FAILED = 1


def run_elastic(args: argparse.Namespace, connect: Connect) -> CommandOutcome:
    """`ckptctl elastic plan|show|whatif`.

    Raises:
        InputProblem: the file, or the report of a job, cannot be used.
        ElasticError: there are fewer slots than experts.
        RefusedError: no job reported its placement to this daemon, or several did and the arguments
            name none.
    """
    run: Callable[[argparse.Namespace, Connect], CommandOutcome] = {
        "plan": _plan,
        "show": _show,
        "whatif": _what_if,
    }[args.question]
    return run(args, connect)


def _plan(args: argparse.Namespace, connect: Connect) -> CommandOutcome:
    found = situation(read_file(args.file) if args.file else _reported_run(args, connect).elastic)
    planned = plan(found)
    return CommandOutcome(planned_json(planned), planned_text(planned, _canvas(args, found)))


def _show(args: argparse.Namespace, connect: Connect) -> CommandOutcome:
    with connect() as client:
        reports = client.ask(m.GetElastic(args.job or "", args.run or ""), m.SeenElastic).told
    if not reports:
        raise _nothing_reported(args)
    shown = [_shown(one, args) for one in reports]
    return CommandOutcome({"runs": [one for one, _ in shown]}, "\n\n".join(text for _, text in shown))


def _shown(one: m.ElasticTold, args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    found = situation(one.elastic)
    head = f"{one.job}/{one.run}, reported by rank {one.rank} {format_age(one.ago_s)} ago"
    head += f" in step {found.report.step}" if found.report.step >= 0 else ""
    why = "; ".join(part for part in (found.report.method, found.report.reason) if part)
    out: dict[str, Any] = {"job": one.job, "run": one.run, "rank": one.rank, "ago_s": one.ago_s}
    out["told"] = one.elastic
    if found.held is None:
        return out, f"{head}\nthe report does not say which experts the nodes hold"
    now = outlook(found, found.held)
    parts = [head + (f"\n{why}" if why else ""), outlook_text(found, now, _canvas(args, found))]
    out["now"] = outlook_json(now)
    out["history"] = [_hottest(period) for period in (*found.report.history, found.report.loads)]
    parts.append(_history_text(out["history"]))
    try:
        coming = next_time(found, now, plan(found))
    except ElasticError as error:
        out["next"] = {"error": str(error)}
        return out, "\n\n".join([*parts, f"next rebalance: none: {error}"])
    out["next"] = dataclasses.asdict(coming)
    return out, "\n\n".join([*parts, next_text(coming)])


def _hottest(period: tuple[tuple[int, ...], ...]) -> float:
    """The hottest expert's share of its layer's tokens; mean over the layers."""
    shares = [max(row) / sum(row) for row in period if sum(row)]
    return sum(shares) / len(shares) if shares else 0.0


def _history_text(shares: list[float]) -> str:
    listed = ", ".join(f"{share:.1%}" for share in shares)
    return f"the hottest expert's share of its layer's tokens, by period, the newest last: {listed}"


def _what_if(args: argparse.Namespace, connect: Connect) -> CommandOutcome:
    report = None if args.file else _reported_run(args, connect)
    found = situation(read_file(args.file) if report is None else report.elastic)
    nodes, text = lost_nodes(found, args.lose), []
    if found.held is None:
        found = as_planned(found)
        text.append("the input does not say which experts the nodes hold: the placement of `plan` is assumed")
    lost = lose(found, nodes)
    text.append(lost_text(found, lost, _canvas(args, found)))
    answer = lost_json(lost)
    recoverable = None if lost.gone else True
    if isinstance(lost.planned, str):
        recoverable = False
    elif report is not None:
        snapshots, outcome = _from_snapshots(args, connect, report, lost)
        answer["snapshots"] = snapshots
        text.append(outcome)
        recoverable = True if recoverable else bool(snapshots.get("recoverable"))
    elif lost.gone:
        text.append("only the daemon of a running job knows whether snapshots contain the lost experts")
    answer["recoverable"] = recoverable
    text.append(_next_after(found, lost))
    return CommandOutcome(
        answer, "\n\n".join(part for part in text if part), _FAILED if recoverable is False else 0
    )


def _from_snapshots(
    args: argparse.Namespace, connect: Connect, report: m.ElasticTold, lost: LossReport
) -> tuple[dict[str, Any], str]:
    """The recovery of the ranks of these nodes from the memory tier, as `ckptctl whatif` predicts it."""
    asked = argparse.Namespace(
        job=report.job,
        run=report.run,
        lose=",".join(f"node={node}" for node in lost.nodes),
        timeout=args.timeout,
    )
    try:
        with connect() as client:
            # A new incarnation loads one iteration and replays none.
            found = ask_what_if(client, asked, verify_iterations=0)
    except (ValueError, RefusedError) as error:
        text = f"snapshots: not known: {error}"
        return {"recoverable": False, "reason": str(error)}, text
    return as_json(found), f"snapshots, {render_what_if(found)}"


def _next_after(found: Situation, lost: LossReport) -> str:
    if isinstance(lost.planned, str):
        return "next rebalance: when the nodes have enough slots"
    gather = "120 s after the last node has joined (at most 600 s after the first)"
    return (
        f"next rebalance: immediately, on the remaining nodes; again {gather}, and when the load has shifted"
    )


def _reported_run(args: argparse.Namespace, connect: Connect) -> m.ElasticTold:
    """The report of the one run that the arguments match."""
    with connect() as client:
        reports = client.ask(m.GetElastic(args.job or "", args.run or ""), m.SeenElastic).told
    if not reports:
        raise _nothing_reported(args)
    if len(reports) > 1:
        runs = ", ".join(f"{one.job}/{one.run}" for one in reports)
        raise RefusedError("not_found", f"several runs match: {runs}", "pass --job and --run")
    return reports[0]


def _nothing_reported(args: argparse.Namespace) -> RefusedError:
    which = f" of {args.job or 'any job'}/{args.run or 'any run'}" if args.job or args.run else ""
    return RefusedError(
        "not_found",
        f"no elastic job{which} has reported its expert placement to this daemon",
        "a job reports after each placement; a restarted daemon receives a report with the next "
        "measured load",
    )


def _canvas(args: argparse.Namespace, found: Situation) -> Canvas:
    for layer in args.layer or ():
        if not 0 <= layer < len(found.loads_LE):
            raise InputProblem(
                f"--layer {layer} does not exist: the layers are 0 to {len(found.loads_LE) - 1}"
            )
    terminal = sys.stdout.isatty()
    color = terminal if args.color == "auto" else args.color == "always"
    return Canvas(shutil.get_terminal_size((100, 24)).columns, color, tuple(args.layer or ()))


# --- as JSON ---------------------------------------------------------------------------------------------


def outlook_json(found: Outlook) -> dict[str, Any]:
    """An outlook as plain values. ``placement`` lists the experts of each layer and node (in the
    order of the nodes), with one entry for each replica.
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
    """The report of a loss as plain values."""
    return {
        "lost_nodes": list(lost.nodes),
        "lost_experts": [list(one) for one in lost.gone],
        "planned": {"error": lost.planned} if isinstance(lost.planned, str) else planned_json(lost.planned),
    }
