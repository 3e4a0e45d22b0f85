"""The control of the window on a simulated device: ten shapes, from 0.1 to 100 GB of state and 20 ms to 30 s.

Simulated are device, link and digest threads; the planner and the control are the client's
(`tests.simulation.window_loop`, which says where its numbers come from). For each shape: the smallest window that
costs at most the bound, found by trying all; the one that the client chooses; after how many snapshots it has
chosen it; and what an iteration takes, against one without snapshots, with the choice of the first run on a
device and with today's. `window_lost_share` is the largest share of an iteration that training waits where a
window without waits exists, `window_decided_after` the most snapshots until the last choice, `window_vs_best` the
largest ratio of a chosen window to the best one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bench.common import emit, parser, table
from tests.simulation.window_loop import FIRST_RUN, H100, Control, Loop, Machine, Past, Shape, best_window

__all__ = ["main"]

BOUND = 0.01
STEPS, TAIL = 400, 100
SHAPES = (
    Shape(0.1, 0.02),
    Shape(1.0, 0.02),
    Shape(1.0, 0.088),
    Shape(4.0, 0.088),
    Shape(4.0, 0.5),
    Shape(20.0, 0.088),
    Shape(20.0, 0.5),
    Shape(100.0, 0.5),
    Shape(100.0, 3.0),
    Shape(100.0, 30.0),
)
MACHINES = {
    "copies beside training cost nothing": H100,
    "digests are slow": replace(H100, digest=8.0),
    "as in the first run": FIRST_RUN,
}


@dataclass(frozen=True, slots=True)
class Played:
    """One shape on one machine, under the control of today and of the first run."""

    shape: Shape
    best: int | None
    before: float
    loop: Loop

    @property
    def window(self) -> int:
        return self.loop.told[-1].window

    @property
    def decided_after(self) -> int:
        return self.loop.decided[-1][0] if self.loop.decided else 0

    @property
    def lost(self) -> float:
        tail = self.loop.told[-TAIL:]
        return sum(t.copy_wait_s + t.seal_wait_s for t in tail) / sum(t.iteration_s for t in tail)


def longer(loop: Loop) -> float:
    """The length of the last iterations, without snapshots = 1."""
    tail = loop.told[-TAIL:]
    return sum(t.iteration_s for t in tail) / sum(t.plain_s for t in tail)


def play(machine: Machine, shape: Shape) -> Played:
    past = Loop(machine, shape, Past(), trainer_seals=True)
    past.run(STEPS)
    loop = Loop(replace(machine, make=1e6), shape, Control(bound=BOUND))
    loop.run(STEPS)
    return Played(shape, best_window(machine, shape, bound=BOUND), longer(past), loop)


def rows(played: list[Played]) -> list[list[str]]:
    return [
        [
            f"{p.shape.state_gb:g} GB every {p.shape.iteration_s:g} s",
            "none" if p.best is None else str(p.best),
            f"{p.loop.told[0].window} -> {p.window}",
            str(p.decided_after),
            f"{p.lost:.1%}",
            f"{p.before:.2f}",
            f"{longer(p.loop):.2f}",
            "yes" if p.loop.control.misfit else "",
        ]
        for p in played
    ]


def plot(path: Path, played: list[Played]) -> None:
    """The window and the share of an iteration that is lost, over the first iterations, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 5, figsize=(18, 6), sharex=True)
    for ax, p in zip(axes.flat, played, strict=True):
        told = p.loop.told[:80]
        ax.step(range(len(told)), [t.window for t in told], color="tab:blue", where="post")
        ax.set_yscale("log", base=2)
        ax.set_ylim(0.9, 80)
        if p.best is not None:
            ax.axhline(p.best, color="tab:blue", linestyle=":")
        other = ax.twinx()
        other.plot([t.lost for t in told], color="tab:red")
        other.set_ylim(0, 1)
        ax.set_title(f"{p.shape.state_gb:g} GB, {p.shape.iteration_s:g} s")
    figure.supxlabel("iteration")
    figure.supylabel("window (blue; dotted: the best); share of an iteration lost (red)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--plot", type=Path, help="write window and stall over time here (matplotlib)")
    args = options.parse_args()
    titles = ["state", "best", "window", "after", "waits", "first run", "today", "says none"]
    metrics: dict[str, float | int | str] = {}
    found: list[Played] = []
    for name, machine in MACHINES.items():
        played = [play(machine, shape) for shape in SHAPES]
        print(f"\n{name}")
        print(table(titles, rows(played)))
        found += played
        if machine.digest < H100.digest and not machine.slowdown and args.plot is not None:
            plot(args.plot, played)
    possible = [p for p in found if p.best is not None]
    metrics["window_lost_share"] = max(p.lost for p in possible)
    metrics["window_decided_after"] = max(p.decided_after for p in possible)
    metrics["window_vs_best"] = max(
        p.window / p.best for p in possible if p.best is not None and not p.loop.machine.slowdown
    )
    metrics["window_untold"] = sum(p.best is None and not p.loop.control.misfit for p in found)
    emit("window", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
