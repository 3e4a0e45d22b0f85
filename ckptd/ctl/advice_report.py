"""What `ckptctl advise` shows: the advice as text, and a picture of the policies over the MTBF."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptd.core.advice.advice import Advice, EttrCurve, arguments, settings
from ckptd.core.advice.job_shape import RankShape
from ckptd.core.advice.node_losses import NodeLosses, chance_of_loss
from ckptd.core.advice.outlook import LOSSY, Choice, Conditions, PolicyOutlook, StorageOutlook
from ckptd.ctl.command import EXIT_FAILED, CommandError
from ckptd.units import format_age, format_bytes, format_table

# The part of the time that counts, and the part of all experts' updates that is lost.
Played = tuple[float, float]

# Rows of what is not exact, by policy.
LOSES = dict(zip(LOSSY, ("loses updates", "loses updates, by risk"), strict=True))
# Of the time; less is within what is not known.
_FAR = 0.01

# Told apart without colours: by dashes and markers.
STYLES: Mapping[str, tuple[Any, str, str]] = {
    "sliding": ("-", "o", "#12355b"),
    "aligned": ("-.", "s", "#2a7f62"),
    "dense, Young and Daly's interval": (":", "^", "#b5541c"),
    "dense, CheckFreq's interval": (":", "D", "#7b2cbf"),
    "dense, Gemini's interval": (":", "v", "#444444"),
    "partial": ("--", "x", "#c1121f"),
    "selected": ("--", "+", "#d17b0f"),
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


def draw(
    path: Path, pixels: tuple[int, int], curves: Sequence[EttrCurve], mtbfs_s: Sequence[float], at: int
) -> None:
    """The ETTR of each policy over the MTBF, as a PNG; ``at``: which of the MTBFs is the job's."""
    try:
        import matplotlib
    except ImportError as error:
        raise CommandError(f"--picture needs matplotlib ({error}): pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (pixels[0] / _DPI, pixels[1] / _DPI)
    figure, axes = pyplot.subplots(figsize=size, dpi=_DPI, layout="constrained")
    for number, curve in enumerate(sorted(curves, key=lambda each: -_ettr(each.points[at]))):
        dashes, marker, colour = STYLES[curve.name]
        axes.plot(
            mtbfs_s,
            [math.nan if each is None else each.ettr for each in curve.points],
            linestyle=dashes,
            marker=marker,
            markevery=(2 * number, 12),
            color=colour,
            label=curve_label(curve, at),
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


def curve_label(curve: EttrCurve, at: int) -> str:
    """Such as ``0.951  dense, every 23: Young and Daly's interval``."""
    here = curve.points[at]
    if here is None:
        return f"{curve.name}: nothing fits"
    interval = f": {curve.name.removeprefix('dense, ')}" if here.choice.policy == "dense" else ""
    return f"{here.ettr:.3f}  {here.choice}{interval}" + ("" if curve.exact else " (loses updates)")


def _ettr(outlook: PolicyOutlook | None) -> float:
    return 0.0 if outlook is None else outlook.ettr


def advice_text(
    advice: Advice,
    rated: Sequence[tuple[str, PolicyOutlook]],
    rank: RankShape,
    conditions: Conditions,
    losses: NodeLosses | None,
    played: Mapping[str, Played],
) -> str:
    """The advice for a terminal.

    Args:
        rated: with their names; the best one, and the present one if the job runs, are among them.
        losses: of several nodes at once.
        played: by name.
    """
    best = advice.best
    assert best is not None
    stores = any(outlook.storage for _, outlook in rated)
    header = [
        "policy",
        "choice",
        "ETTR",
        "played",
        "stall ms",
        "failure s",
        "snapshot",
        "memory",
        "replicas",
        "to peers /s",
        *(["loss s", "stored every", "stored"] if stores else []),
    ]
    rows = [_row(name, outlook, played[name][0])[: len(header)] for name, outlook in rated]
    failure = (
        f"A failure costs {best.recovery_s:.3g} s: {best.lost_s:.3g} s of iterations that are lost, "
        f"{best.restart_s:.3g} s until all ranks run, {best.load_s:.3g} s to load, "
        f"{best.replay_s:.3g} s of replay."
    )
    loses = ""
    if advice.others:
        _, second = advice.others[0]
        named = f"{second.choice}{_replicas(second.choice, losses)}"
        loses = f" The next best ({named}) loses {_points(best, second)}."
    lost = ""
    if conditions.storage_Bps:
        lost = f", and one that takes all copies in memory every {format_age(conditions.loss_mtbf_s)}"
    if losses is not None:
        together = (f"{n} every {format_age(s)}" for n, s in losses.together)
        lost += f", losses of several of {losses.nodes} nodes at once: {', '.join(together)}"
    job = (
        f"{format_bytes(rank.dense_bytes)} of state on each rank, iterations of "
        f"{conditions.iteration_s:.3g} s, a failure every {format_age(conditions.mtbf_s)}{lost}"
    )
    name, now = rated[0]
    far = ""
    if name == "now" and best.ettr - now.ettr > _FAR:
        far = f"The job's settings ({now.choice}) lose {100 * (best.ettr - now.ettr):.1f} points of its time."
    lossy = [
        f"{each.choice}{_replicas(each.choice, losses)} is not exact: failures lose {each.lost_share:.2%} of "
        f"all experts' updates{_tokens(each, conditions)}; played "
        f"{played[LOSES[each.choice.policy]][1]:.2%}. To take it all the same, {_how_to_take(each, rank)}"
        for each in advice.lossy
    ]
    parts = [
        job,
        format_table(header, rows),
        failure + loses,
        *([_loss_text(best, best.storage)] if best.storage else []),
        *([_replicas_text(advice, best, losses)] if losses else []),
        *([far] if far else []),
        *(f"Left out: {each}." for each in (advice.rejected, advice.lossy_rejected) if each),
        *lossy,
        f"All {'others ' if lossy else 'of these '}are exact. For the best, {_how_to_take(best, rank)}",
    ]
    return "\n\n".join(parts)


def _tokens(lost: PolicyOutlook, conditions: Conditions) -> str:
    """What the tokens of a layer's experts are taken to be."""
    if lost.choice.policy == "selected" and conditions.skew:
        return f", with a skew of {conditions.skew:g}"
    return ", if tokens are even"


def _replicas(choice: Choice, losses: NodeLosses | None) -> str:
    """Such as ``, 2 replicas``; "" where all choices have as many."""
    several = losses is not None and len(losses.candidates) > 1
    return f", {choice.replicas_text}" if several else ""


def _points(best: PolicyOutlook, other: PolicyOutlook) -> str:
    """What another choice loses. It may be better by less than `EQUAL_ETTR`, and not as simple."""
    return f"{100 * max(0.0, best.ettr - other.ettr):.2f} points"


def _replicas_text(advice: Advice, best: PolicyOutlook, losses: NodeLosses) -> str:
    """What the best number of replicas survives, and what others lose."""
    chances = (
        f"{100 * chance_of_loss(losses.nodes, lost, best.choice.replicas):.2g}% if {lost} nodes are lost"
        for lost, _ in losses.together
    )
    # They are sorted: the first one with a number is the best with it.
    found = {each.choice.replicas: each for _, each in reversed((("", best), *advice.others))}
    lose = (
        f"; the best with {each.choice.replicas_text} ({each.choice}) loses {_points(best, each)}"
        for number, each in sorted(found.items())
        if number != best.choice.replicas
    )
    return (
        f"With {best.choice.replicas_text}, a state loses all of its copies with a probability of "
        f"{', '.join(chances)}{''.join(lose)}."
    )


def _loss_text(best: PolicyOutlook, stored: StorageOutlook) -> str:
    return (
        f"A failure that takes all copies in memory costs {best.loss_s:.3g} s: {stored.lost_s:.3g} s that "
        f"are lost, {best.restart_s:.3g} s until all ranks run, {stored.load_s:.3g} s to load from storage, "
        f"{stored.replay_s:.3g} s of replay. An upload takes {stored.upload_s:.3g} s, so durable checkpoints "
        f"may be {stored.shortest} iterations apart."
    )


def _how_to_take(outlook: PolicyOutlook, rank: RankShape) -> str:
    """What to pass to the trainer, and to set for the daemons."""
    text = f"pass\n    {arguments(outlook, rank)}"
    if outlook.choice.parts and not rank.num_experts:
        share = f"{outlook.choice.parts} / {outlook.choice.window}"
        text += f"\nwith PartialOptions(persist_experts=) of {share} of a layer's experts"
    if outlook.choice.policy == "selected" and rank.expert_ranks > 1:
        text += (
            f"\nand, unless wrappers declare it, which {rank.expert_ranks} ranks hold the same experts:\n    "
            "layout=LayoutOptions(replicated={'*.experts.*': group})"
        )
    if found := settings(outlook):
        values = " ".join(f"CKPTD_{name.upper()}={value}" for name, value in found.items())
        text += f"\nand start the daemons with\n    {values}"
    return text


def _row(name: str, outlook: PolicyOutlook, played: float) -> list[Any]:
    stored = outlook.storage
    return [
        name,
        str(outlook.choice) + (" (behind)" if outlook.behind else ""),
        f"{outlook.ettr:.4f}",
        f"{played:.4f}",
        f"{1e3 * outlook.stall_s:.3g}",
        f"{outlook.recovery_s:.3g}",
        format_bytes(outlook.snapshot_bytes),
        format_bytes(outlook.memory_bytes),
        str(outlook.choice.replicas),
        format_bytes(round(outlook.replication_Bps)),
        *(
            [f"{outlook.loss_s:.3g}", str(stored.every), format_bytes(stored.upload_bytes)]
            if stored
            else ["-"] * 3
        ),
    ]
