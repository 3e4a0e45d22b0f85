"""What the demo concludes from two runs: are they the same, what did the kills cost, and a picture.

Pure functions over the event logs and the final states; only `draw` writes a file.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ckptd.core.recovery.recovery_phases import RecoveryPhase, phases_in_metrics
from ckptd.demo.lab import Event


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL that was delivered."""

    time_s: float  # wall clock, when it was sent
    victim: str  # "trainer", "trainer + daemon" or "daemon"
    last_step: int  # the last iteration that the run had completed by then
    note: str = ""

    @property
    def hit_trainer(self) -> bool:
        return self.victim.startswith("trainer")


@dataclass(frozen=True, slots=True)
class KillRecovery:
    """How one kill of the trainer was survived; None where the next kill came first."""

    resumed_at: int | None  # the first iteration of the process that followed
    redone: int  # iterations it repeated
    start_s: float | None  # kill to attached: process, imports, model
    back_s: float | None  # kill to the first iteration that had not been done before
    phases: Mapping[RecoveryPhase, float] = field(default_factory=dict)  # seconds, as the process tells


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """Hosts that were destroyed at the same time."""

    time_s: float  # wall clock, when it began
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]  # that lived there
    last_step: int  # the last iteration that any rank had completed by then


def recoveries(kills: Sequence[Kill], events: Sequence[Event]) -> list[KillRecovery | None]:
    """One entry per kill, in order; None for kills that did not hit the trainer."""
    hits = [kill for kill in kills if kill.hit_trainer]
    ends = [kill.time_s for kill in hits[1:]] + [float("inf")]
    found = iter([_recovery(kill, end, events) for kill, end in zip(hits, ends, strict=True)])
    return [next(found) if kill.hit_trainer else None for kill in kills]


def _recovery(kill: Kill, end_s: float, events: Sequence[Event]) -> KillRecovery:
    own = [event for event in events if kill.time_s < event["time_s"] <= end_s]
    attached = next((event for event in own if event["event"] == "attached"), None)
    if attached is None:
        return KillRecovery(resumed_at=None, redone=0, start_s=None, back_s=None)
    # The process may have ended an iteration after the kill was on its way.
    own = [event for event in own if event["time_s"] >= attached["time_s"]]
    steps = [event for event in own if event["event"] == "step"]
    fresh = next((event for event in steps if event["step"] > kill.last_step), None)
    back = next((event for event in own if event["event"] == "back"), None)
    return KillRecovery(
        resumed_at=steps[0]["step"] if steps else None,
        redone=sum(event["step"] <= kill.last_step for event in steps),
        start_s=attached["time_s"] - kill.time_s,
        back_s=fresh["time_s"] - kill.time_s if fresh else None,
        phases=phases_in_metrics(back["phases"]) if back else {},
    )


def phase_table(columns: Mapping[str, tuple[Mapping[RecoveryPhase, float], float]]) -> str:
    """The phases of recoveries in ms, one column for each.

    Args:
        columns: by their headings, seconds of each phase, and of the whole.
    """
    known = [phase for phase in RecoveryPhase if any(phase in found for found, _ in columns.values())]
    rows: list[list[object]] = [
        [str(phase), *(_ms(found.get(phase)) for found, _ in columns.values())] for phase in known
    ]
    rows.append(["rest", *(_ms(whole - sum(found.values())) for found, whole in columns.values())])
    rows.append(["back", *(_ms(whole) for _, whole in columns.values())])
    return table(["phase, ms", *columns], rows)


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else round(1000 * seconds)


def node_recovery(loss: NodeLoss, events: Sequence[Event]) -> KillRecovery:
    """How one rank survived a loss of hosts, from its log: from the loss to its first new iteration.

    A survivor's last iteration may be logged after the loss began; the new life begins with `attached`.
    """
    later = [event for event in events if event["time_s"] > loss.time_s]
    attached = next((event for event in later if event["event"] == "attached"), None)
    if attached is None:
        return KillRecovery(resumed_at=None, redone=0, start_s=None, back_s=None)
    steps = [e for e in later if e["event"] == "step" and e["time_s"] >= attached["time_s"]]
    fresh = next((event for event in steps if event["step"] > loss.last_step), None)
    end_s = fresh["time_s"] if fresh else float("inf")
    return KillRecovery(
        resumed_at=steps[0]["step"] if steps else None,
        redone=sum(e["step"] <= loss.last_step and e["time_s"] < end_s for e in steps),
        start_s=attached["time_s"] - loss.time_s,
        back_s=fresh["time_s"] - loss.time_s if fresh else None,
    )


def losses_by_step(events: Iterable[Event]) -> dict[int, float]:
    """The loss of every iteration; of an iteration that was done twice, the later one."""
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def redone_steps(events: Iterable[Event]) -> tuple[int, int]:
    """How many iterations were done again, and how many of those gave another loss or norm."""
    first: dict[int, tuple[float, float]] = {}
    redone = different = 0
    for event in events:
        if event["event"] != "step":
            continue
        seen = (event["loss"], event["norm"])
        if event["step"] in first:
            redone += 1
            different += seen != first[event["step"]]
        first.setdefault(event["step"], seen)
    return redone, different


def step_time_ms(events: Sequence[Event]) -> float:
    """Median time of an ordinary iteration, start-up and replay left out."""
    gaps = [
        1000 * (after["time_s"] - before["time_s"])
        for before, after in itertools.pairwise(events)
        if before["event"] == after["event"] == "step"
        and before["pid"] == after["pid"]
        and not before["replaying"]
        and not after["replaying"]
    ]
    return statistics.median(gaps) if gaps else float("nan")


def differing_tensors(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> list[str]:
    """One line for every tensor that is missing, extra, or not `torch.equal`."""
    out = []
    for name in sorted(expected.keys() | actual.keys()):
        if name not in expected or name not in actual:
            out.append(f"{name}: only in the {'killed' if name in actual else 'undisturbed'} run")
            continue
        left, right = expected[name], actual[name]
        if left.dtype != right.dtype or left.shape != right.shape:
            out.append(f"{name}: {left.dtype}{tuple(left.shape)} and {right.dtype}{right.shape}")
        elif not torch.equal(left, right):
            count = int((left != right).sum())
            out.append(f"{name}: {count} of {left.numel()} elements differ")
    return out


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain text table; numbers to the right, the first column to the left."""
    cells = [list(header), *[[_text(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def draw(
    path: Path,
    undisturbed: Mapping[int, float],
    killed: Mapping[int, float],
    kills: Sequence[Kill],
) -> None:
    """Both loss curves on top of each other, with a mark where each kill struck."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    axes.plot(*zip(*sorted(undisturbed.items()), strict=True), color="#9bc4e2", linewidth=5)
    axes.plot(*zip(*sorted(killed.items()), strict=True), color="#12355b", linewidth=1)
    labels = ["undisturbed", "killed and resumed"]
    for victim, colour in (
        ("trainer", "#c1121f"),
        ("trainer + daemon", "#7b2cbf"),
        ("daemon", "#e09f3e"),
    ):
        hits = [kill.last_step for kill in kills if kill.victim == victim]
        if hits:
            heights = [killed.get(step, 0.0) for step in hits]
            axes.scatter(hits, heights, marker="x", s=90, color=colour, zorder=3, linewidths=2.5)
            labels.append(f"SIGKILL: {victim}")
    axes.legend(axes.get_lines() + list(axes.collections), labels)
    axes.set_xlabel("iteration")
    axes.set_ylabel("training loss (nats per byte)")
    same = all(undisturbed.get(step) == loss for step, loss in killed.items())
    same = same and undisturbed.keys() == killed.keys()
    axes.set_title("Losses are equal in every bit of every iteration" if same else "THE RUNS DIFFER")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
