"""The answers of `ckptctl elastic` as text: a heat map of each layer, and the rating of the placement.

A cell of the map is the number of replicas of an expert (column) on a node (row): "." for none,
"+" for ten and more. On a terminal the background shows the share of the layer's tokens that the
node computes for that expert, from blue to red (the hottest cell).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptd.core.elastic.survival import Chance
from ckptd.ctl.elastic.elastic_answers import LossReport, NextTime, Outlook, PlacementMove, Planned
from ckptd.ctl.elastic.elastic_input import Situation
from ckptd.units import format_bytes, format_table

__all__ = ["Canvas", "lost_text", "next_text", "outlook_text", "planned_text"]

_HEAT = (17, 18, 19, 20, 56, 92, 128, 164, 160, 196)  # of a terminal's 256 colours
_RESET = "\x1b[0m"
_MOST_NODES = 40
_MOST_LAYERS = 4
_MOST_RANKS = 32
_MOST_FETCHES = 32
_SHOWN = 8


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


# --- the map ---------------------------------------------------------------------------------------------


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


# --- the rating ------------------------------------------------------------------------------------------


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
    shown = [f"{situation.layers[layer]} expert {expert}" for layer, expert in which[:_SHOWN]]
    more = len(which) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
