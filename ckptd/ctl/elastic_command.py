"""`ckptctl elastic`: show and plan the placement of a job's experts, and predict the loss of nodes.

Without a file, the input is the report of a running job to its daemon (`show`, `plan`, `whatif`);
with a file, the command needs no daemon.

The text has a heat map of each layer. A cell is the number of replicas of an expert (column) on a node
(row): "." for none, "+" for ten and more. On a terminal the background shows the share of the layer's
tokens that the node computes for that expert, from blue to red (the hottest cell).
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptd.core.elastic.survival import Chance
from ckptd.ctl.command import EXIT_FAILED, Command, CommandError, CommandOutcome, ask, connected
from ckptd.ctl.elastic_answers import (
    LossReport,
    NextTime,
    Outlook,
    PlacementMove,
    Planned,
    Situation,
    as_planned,
    lose,
    lost_nodes,
    next_time,
    outlook,
    plan,
    read_file,
    situation,
)
from ckptd.ctl.peers_command import ask_what_if, what_if_json, what_if_text
from ckptd.errors import ElasticError
from ckptd.transport import messages as m
from ckptd.transport.wire import RefusedError, WireError
from ckptd.units import first_of, format_age, format_bytes, format_table

_HEAT = (17, 18, 19, 20, 56, 92, 128, 164, 160, 196)  # of a terminal's 256 colors
_RESET = "\x1b[0m"
_MOST_NODES = 40
_MOST_LAYERS = 4
_MOST_RANKS = 32
_MOST_FETCHES = 32
_SHOWN = 8


def _plan(args: argparse.Namespace) -> CommandOutcome:
    found = situation(read_file(args.file) if args.file else _reported_run(args).elastic)
    planned = plan(found)
    return CommandOutcome(planned_json(planned), planned_text(planned, _canvas(args, found)))


def _show(args: argparse.Namespace) -> CommandOutcome:
    shown = [_shown(one, args) for one in _reports(args)]
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


def _what_if(args: argparse.Namespace) -> CommandOutcome:
    report = None if args.file else _reported_run(args)
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
        snapshots, outcome = _from_snapshots(args, report, lost)
        answer["snapshots"] = snapshots
        text.append(outcome)
        recoverable = True if recoverable else bool(snapshots.get("recoverable"))
    elif lost.gone:
        text.append("only the daemon of a running job knows whether snapshots contain the lost experts")
    answer["recoverable"] = recoverable
    text.append(_next_after(found, lost))
    return CommandOutcome(
        answer, "\n\n".join(part for part in text if part), EXIT_FAILED if recoverable is False else 0
    )


def _from_snapshots(
    args: argparse.Namespace, report: m.ElasticTold, lost: LossReport
) -> tuple[dict[str, Any], str]:
    """The recovery of the ranks of these nodes from the memory tier, as `ckptctl whatif` predicts it."""
    asked = argparse.Namespace(
        job=report.job,
        run=report.run,
        lose=",".join(f"node={node}" for node in lost.nodes),
        timeout=args.timeout,
    )
    try:
        with connected(args) as client:
            # A new incarnation loads one iteration and replays none.
            found = ask_what_if(client, asked, verify_iterations=0)
    except (CommandError, WireError, RefusedError) as error:
        text = f"snapshots: not known: {error}"
        return {"recoverable": False, "reason": str(error)}, text
    return what_if_json(found), f"snapshots, {what_if_text(found)}"


QUESTIONS: dict[str, Command] = {"plan": _plan, "show": _show, "whatif": _what_if}


def _next_after(found: Situation, lost: LossReport) -> str:
    if isinstance(lost.planned, str):
        return "next rebalance: when the nodes have enough slots"
    gather = "120 s after the last node has joined (at most 600 s after the first)"
    return (
        f"next rebalance: immediately, on the remaining nodes; again {gather}, and when the load has shifted"
    )


def _reported_run(args: argparse.Namespace) -> m.ElasticTold:
    """The report of the one run that the arguments match."""
    reports = _reports(args)
    if len(reports) > 1:
        runs = ", ".join(f"{one.job}/{one.run}" for one in reports)
        raise RefusedError("not_found", f"several runs match: {runs}", "pass --job and --run")
    return reports[0]


def _reports(args: argparse.Namespace) -> Sequence[m.ElasticTold]:
    """The reports of the runs that the arguments match."""
    reports = ask(args, m.GetElastic(args.job or "", args.run or ""), m.SeenElastic).told
    if reports:
        return reports
    which = f" of {args.job or 'any job'}/{args.run or 'any run'}" if args.job or args.run else ""
    raise RefusedError(
        "not_found",
        f"no elastic job{which} has reported its expert placement to this daemon",
        "a job reports after each placement; a restarted daemon receives a report with the next "
        "measured load",
    )


def _canvas(args: argparse.Namespace, found: Situation) -> Canvas:
    for layer in args.layer or ():
        if not 0 <= layer < len(found.loads_LE):
            raise CommandError(
                f"--layer {layer} does not exist: the layers are 0 to {len(found.loads_LE) - 1}"
            )
    terminal = sys.stdout.isatty()
    color = terminal if args.color == "auto" else args.color == "always"
    return Canvas(shutil.get_terminal_size((100, 24)).columns, color, tuple(args.layer or ()))


# -- as JSON --------------------------------------------------------------------------------------


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


# -- as text --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Canvas:
    """The terminal: its number of columns, whether it shows colors, and the layers to show (empty: the
    first few).
    """

    columns: int = 80
    color: bool = False
    layers: tuple[int, ...] = ()


def planned_text(planned: Planned, canvas: Canvas) -> str:
    """A new placement, its rating and its transfers."""
    lines = [f"{planned.method}; {planned.guarantee}", ""]
    lines.append(outlook_text(planned.situation, planned.outlook, canvas))
    if planned.move is not None:
        lines += ["", _move_text(planned.situation, planned.move)]
    return "\n".join(lines)


def outlook_text(situation: Situation, found: Outlook, canvas: Canvas) -> str:
    """A placement: maps, probability of recovery, tokens."""
    shown = canvas.layers or tuple(range(min(len(situation.loads_LE), _MOST_LAYERS)))
    lines = []
    for layer in shown:
        lines += [*_map(situation, found, layer, canvas), ""]
    if len(shown) < len(situation.loads_LE):
        lines += [f"{len(situation.loads_LE) - len(shown)} more layers (--layer N, --json)", ""]
    lines += [_recovery("nodes lost", found.recovery)]
    if found.domain_recovery:
        lines += ["", _recovery(f"{situation.report.domain} lost", found.domain_recovery)]
    return "\n".join([*lines, "", _tokens(situation, found)])


def lost_text(situation: Situation, lost: LossReport, canvas: Canvas) -> str:
    """The result of a loss of nodes, without the snapshots."""
    head = f"without {', '.join(lost.nodes)}: "
    if lost.gone:
        head += (
            f"{len(lost.gone)} expert{'s' * (len(lost.gone) > 1)} "
            f"lose{'s' * (len(lost.gone) == 1)} every replica: {_experts(situation, lost.gone)}"
        )
    else:
        head += "every expert keeps a replica"
    if isinstance(lost.planned, str):
        return f"{head}\nNOT PLACED: {lost.planned}"
    left = lost.planned.situation.cluster
    more = f"then on {left.num_nodes} nodes with {left.num_slots} slots in a layer: "
    return f"{head}\n{more}{planned_text(lost.planned, canvas)}"


def next_text(found: NextTime) -> str:
    """Whether a rebalance pays, and when the job checks next."""
    factors = (
        f"straggler factor {found.straggler_now:.3f} now, {found.straggler_after:.3f} with a new placement"
    )
    if found.pays:
        verdict = f"it pays: saves {found.gain_s:.1f} s, costs {found.cost_s:.1f} s"
    elif found.pays is False and found.gain_s >= 0 and found.cost_s >= 0:
        verdict = f"it does not pay: saves {found.gain_s:.1f} s, costs {found.cost_s:.1f} s"
    elif found.pays is False:
        verdict = "it gains nothing"
    elif found.worth_from_s >= 0:
        verdict = (
            f"it pays if more than {found.worth_from_s:.3g} s of each step grow with the "
            "tokens of the busiest rank"
        )
    else:
        verdict = "the cost is not known: the input lacks expert_bytes and bytes_per_s"
    check = f"; next check in step {found.check_step}" if found.check_step >= 0 else ""
    due = f"; any gain suffices in step {found.due_step}" if found.due_step >= 0 else ""
    return f"next rebalance: {factors}: {verdict}{check}{due}"


def _map(situation: Situation, found: Outlook, layer: int, canvas: Canvas) -> list[str]:
    counts_NE = found.placement.counts[layer]
    each_E = situation.loads_LE[layer] / np.maximum(found.placement.replicas[layer], 1)
    heat_NE = counts_NE * each_E
    mean = heat_NE.sum() / situation.cluster.num_ranks
    ranks_N = np.array(situation.cluster.ranks)
    busy_N = heat_NE.sum(axis=1) / ranks_N / mean if mean else np.ones(len(ranks_N))
    names = [name[:20] for name in situation.names[:_MOST_NODES]]
    margin = max(map(len, names))
    width = max(10, canvas.columns - margin - 12)
    factor = found.straggler_by_layer[layer]
    lines = [f"{situation.layers[layer]}: straggler factor {factor:.3f}; columns: experts, then load / mean"]
    hottest = float(heat_NE.max())
    for first in range(0, counts_NE.shape[1], width):
        part = slice(first, min(first + width, counts_NE.shape[1]))
        lines += [" " * (margin + 2) + row for row in _ruler(part.start, part.stop)]
        for number, name in enumerate(names):
            cells = _cells(counts_NE[number, part], heat_NE[number, part], hottest, canvas.color)
            lines.append(f"{name:<{margin}}  {cells}  {busy_N[number]:.2f}")
    if len(situation.names) > _MOST_NODES:
        lines.append(f"and {len(situation.names) - _MOST_NODES} more nodes (--json has all)")
    return lines


def _ruler(start: int, stop: int) -> list[str]:
    """The numbers of the experts in two lines: the tens, where they change, and the units."""
    units = "".join(str(number % 10) for number in range(start, stop))
    if stop <= 10:
        return [units]
    marks = [" "] * (stop - start)
    for number in range(start, stop):
        if number % 10 == 0:
            marks[number - start : number - start + len(str(number))] = str(number)
    return ["".join(marks)[: stop - start], units]


def _cells(counts_E: NDArray[np.int32], heat_E: NDArray[np.float64], hottest: float, color: bool) -> str:
    text = ["." if n == 0 else "+" if n > 9 else str(n) for n in counts_E.tolist()]
    if not color:
        return "".join(text)
    shade = np.zeros(len(text), dtype=np.int64)
    if hottest:
        shade = np.minimum(heat_E / hottest * len(_HEAT), len(_HEAT) - 1).astype(np.int64)
    painted = [
        cell if cell == "." else f"\x1b[97;48;5;{_HEAT[level]}m{cell}{_RESET}"
        for cell, level in zip(text, shade.tolist(), strict=True)
    ]
    return "".join(painted)


def _recovery(title: str, chances: Sequence[tuple[int, Chance]]) -> str:
    if not chances:
        return f"{title}: the job has only one; without snapshots elsewhere, its loss loses every expert"
    head = [title, *(str(lost) for lost, _ in chances)]
    return format_table(head, [["every expert survives", *(str(chance) for _, chance in chances)]])


def _tokens(situation: Situation, found: Outlook) -> str:
    per_rank = found.tokens_LR.sum(axis=0)
    mean = per_rank.mean()
    text = (
        f"straggler factor {found.straggler:.3f}; predicted tokens of a rank, all layers: least "
        f"{per_rank.min():.0f}, "
        f"mean {mean:.0f}, most {per_rank.max():.0f}"
        + (f" ({per_rank.max() / mean:.2f} of the mean)" if mean else "")
    )
    if len(per_rank) > _MOST_RANKS:
        return text
    owner = np.repeat(np.arange(situation.cluster.num_nodes), situation.cluster.ranks)
    rows = [
        (rank, situation.names[owner[rank]], round(tokens)) for rank, tokens in enumerate(per_rank.tolist())
    ]
    return "\n".join([text, format_table(["rank", "node", "tokens"], rows)])


def _move_text(situation: Situation, move: PlacementMove) -> str:
    if not move.replicas:
        return "no transfers: every node holds its planned experts"
    text = f"transfers from the present placement: {move.replicas} experts"
    if move.total_bytes >= 0:
        text += f", {format_bytes(move.total_bytes)}, at most {format_bytes(move.largest_bytes)} to one node"
    if move.seconds >= 0:
        text += f", {move.seconds:.2f} s"
    else:
        lacking = "expert_bytes and bytes_per_s" if move.total_bytes < 0 else "bytes_per_s"
        text += f" (the time is not known: the input lacks {lacking})"
    if move.from_snapshots:
        size = f" ({format_bytes(move.snapshot_bytes)})" if move.snapshot_bytes >= 0 else ""
        text += f"; {move.from_snapshots} of them{size} from snapshots: {_experts(situation, move.lost)}"
    return f"{text}\n{_fetches_text(move)}"


def _fetches_text(move: PlacementMove) -> str:
    """The transfers by receiver and source; if they are many, totals by receiver, the largest first."""
    if len(move.fetches) <= _MOST_FETCHES:
        pairs = [
            (one.receiver, one.source or "snapshots", one.replicas, _size(one.bytes)) for one in move.fetches
        ]
        return format_table(["node", "fetches from", "experts", "size"], pairs)
    by_node: dict[str, list[int]] = {}
    for one in move.fetches:
        total = by_node.setdefault(one.receiver, [0, 0, 0])
        total[0] += 1
        total[1] += one.replicas
        total[2] += one.bytes
    most = sorted(by_node.items(), key=lambda item: (-item[1][2], -item[1][1]))
    sized = move.total_bytes >= 0
    rows = [
        (node, sources, replicas, _size(size if sized else -1))
        for node, (sources, replicas, size) in most[:_MOST_FETCHES]
    ]
    table = format_table(["node", "sources", "experts", "size"], rows)
    more = len(most) - len(rows)
    return table + (f"\nand {more} more nodes (--json has all)" if more else "")


def _size(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes >= 0 else "-"


def _experts(situation: Situation, which: Sequence[tuple[int, int]]) -> str:
    return first_of((f"{situation.layers[layer]} expert {expert}" for layer, expert in which), _SHOWN)
