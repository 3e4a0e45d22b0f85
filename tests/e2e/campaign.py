"""Seeded random kills of trainers and daemons, and a comparison of the end with a run that was never hurt.

``python -m tests.e2e.campaign --kills 300 --seed 7`` prints progress and a table, and fails if a
single bit differs, if a job ends in any other way than by our SIGKILL or in order, or if a suffix
that was recoverable once is so no more.

A *cell* is one case (of ``cases.py``) with a run of its own. In it, a job is started, something is
killed at a moment drawn at random (see ``_wait``), the job is started again with another
initialisation, and so on until the kills are used up and the job is let go to its end. A job that
died before its first complete suffix begins anew, so it gets its original initialisation until the
daemon holds a suffix.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.process import BaseProcess
from pathlib import Path

from ckptd.transport.messages import Done, Forget, GetSnapshots, Snapshots
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon

__all__ = ["Cell", "Kill", "Moment", "Plan", "Target", "campaign", "run_cell", "table"]

# Cheap, and each different in what is captured, frozen, or recorded.
CAMPAIGN_CASES = (
    "plain",
    "fused",
    "masters",
    "scaler",
    "drop",
    "fused_drop",
    "batch_norm",
    "adamw_fused_slices",
    "own_optimizer",
    "muon",
    "bf16",
    "autocast_fused",
    "accumulate",
    "spread",
    "zero_first",
    "aligned",
    "dense",
    "dense_every",
    "window1",
    "window7",
    "auto_window",
)
_LIFE_LIMIT_S = 120.0
_DAEMON_AWAY_S = 1.0
_START_S = 1.2  # about what a forked trainer needs until its first step, on two cores


class Target(StrEnum):
    """What is killed."""

    TRAINER = "trainer"
    DAEMON = "daemon"
    BOTH = "both"


class Moment(StrEnum):
    """What the trainer was doing when something was killed."""

    STARTING = "starting, nothing to restore"
    RESTORING = "attaching and restoring"
    REPLAYING = "replaying"
    UNPROTECTED = "training before the first suffix"
    TRAINING = "training"


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: what, when, and how many iterations the next life had to repeat for it."""

    target: Target
    moment: Moment
    step: int
    repeated: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How a cell is hurt.

    Args:
        targets: drawn from for each kill.
        total: steps of the job.
        step_ms: how long each step is made, so that moments within one are hit.
    """

    targets: Sequence[Target] = (Target.TRAINER,) * 4 + (Target.DAEMON, Target.BOTH)
    total: int = 40
    step_ms: float = 10.0


@dataclass
class Cell:
    """One case's run: what was done to it, and what is wrong with its end (nothing)."""

    case: str
    seed: int
    kills: list[Kill] = field(default_factory=list)
    lives: int = 0
    failures: list[str] = field(default_factory=list)


class _Supervisor:
    """Starts a job again and again, and kills it or its daemon in between."""

    def __init__(self, cell: Cell, jobs: Jobs, daemon: DaemonProcess, plan: Plan, rng: random.Random) -> None:
        self.cell, self._jobs, self._daemon, self._plan, self._rng = cell, jobs, daemon, plan, rng
        self._run = f"{cell.case}-{cell.seed}-{rng.randrange(1 << 30):x}"
        self._progress = jobs.folder / f"{self._run}.progress"
        self._hold = jobs.folder / f"{self._run}.hold"  # no job ends before all its kills were made
        self._suffix = (-1, -1)
        self._aimed = 0

    def run(self, kills: int) -> Path | None:
        """Where the final state is; None if the job ended as it never should."""
        self._hold.touch()
        while True:
            process, out = self._start()
            self._hurt(process, kills)
            process.join(_LIFE_LIMIT_S)
            if process.exitcode == 0:
                return out
            if process.exitcode != -signal.SIGKILL:
                how = "hung" if process.is_alive() else f"ended with {process.exitcode}"
                process.kill()
                process.join()
                self.cell.failures.append(f"{how}:\n{self._jobs.log(out)}")
                return None
            self._look()

    def forget(self) -> None:
        """Give the run's memory back, if it came to have any (a job may end before its first snapshot)."""
        if self._daemon.ask(GetSnapshots("e2e", self._run), Snapshots).ranks:
            self._daemon.ask(Forget("e2e", self._run), Done)

    def _start(self) -> tuple[BaseProcess, Path]:
        self._progress.unlink(missing_ok=True)
        restorable = self._suffix != (-1, -1)
        seed = 1 if not restorable else 1000 + self.cell.lives
        self.cell.lives += 1
        return self._jobs.start(
            self.cell.case,
            *("--total", str(self._plan.total), "--step-ms", str(self._plan.step_ms)),
            *("--run", self._run, "--seed", str(seed), "--progress", str(self._progress)),
            *("--hold", str(self._hold)),
        )

    def _hurt(self, process: BaseProcess, kills: int) -> None:
        """Kill until the trainer is dead, has ended by itself, or every kill was used."""
        while self._aimed < kills:
            self._wait(process)
            if process.exitcode is not None:
                return
            self._aimed += 1
            target = self._rng.choice(list(self._plan.targets))
            step, replaying = self._where()
            self.cell.kills.append(Kill(target, self._moment(step, replaying), step))
            if self._kill(target, process):
                return
        self._hold.unlink(missing_ok=True)

    def _wait(self, process: BaseProcess) -> None:
        """Until a random moment of the start, of the first steps (a replay, perhaps), or of all of them."""
        aim = self._rng.choice(("start", "first steps", "steps", "steps"))
        if aim == "start":
            process.join(self._rng.uniform(0, _START_S))
            return
        deadline = time.monotonic() + _LIFE_LIMIT_S
        while process.exitcode is None and self._where()[0] < 0 and time.monotonic() < deadline:
            process.join(0.005)
        steps = 6 if aim == "first steps" else self._plan.total
        process.join(self._rng.uniform(0, 1.3 * steps * self._plan.step_ms / 1e3))

    def _kill(self, target: Target, process: BaseProcess) -> bool:
        """Kill, and bring the daemon back; True if the trainer was killed."""
        actions: list[Callable[[], None]] = []
        if target is not Target.DAEMON:
            actions.append(process.kill)
        if target is not Target.TRAINER:
            actions.append(self._daemon.kill)
        self._rng.shuffle(actions)
        for action in actions:
            action()
        if target is not Target.TRAINER:
            time.sleep(self._rng.uniform(0, _DAEMON_AWAY_S))
            self._daemon.start()
        return target is not Target.DAEMON

    def _where(self) -> tuple[int, bool]:
        """The step that runs and whether it is replayed; -1 before the first one."""
        try:
            step, replaying = self._progress.read_text().split()
        except FileNotFoundError:
            return -1, False
        return int(step), replaying == "1"

    def _moment(self, step: int, replaying: bool) -> Moment:
        restorable = self._suffix != (-1, -1)
        if step < 0:
            return Moment.RESTORING if restorable else Moment.STARTING
        if replaying:
            return Moment.REPLAYING
        return Moment.TRAINING if restorable or self._find() != (-1, -1) else Moment.UNPROTECTED

    def _look(self) -> None:
        """After the trainer's death: what is recoverable, and what it costs."""
        before, self._suffix = self._suffix, self._find()
        if self._suffix[1] < before[1]:
            self.cell.failures.append(
                f"the suffix up to {before[1]} was recoverable; now it is {self._suffix}"
            )
        killed = self.cell.kills[-1]
        repeated = max(0, killed.step + 1 - max(0, self._suffix[0])) if killed.step >= 0 else 0
        self.cell.kills[-1] = Kill(killed.target, killed.moment, killed.step, repeated)

    def _find(self) -> tuple[int, int]:
        """The recoverable suffix of the run, as the daemon sees it."""
        found = self._daemon.ask(GetSnapshots("e2e", self._run), Snapshots)
        return found.ranks[0].suffix if found.ranks else (-1, -1)


def run_cell(
    case: str, seed: int, kills: int, jobs: Jobs, daemon: DaemonProcess, plan: Plan | None = None
) -> Cell:
    """Hurt one job ``kills`` times and compare its end with an undisturbed run."""
    plan = plan or Plan()
    rng = random.Random(f"{case} {seed}")
    cell = Cell(case, seed)
    reference = jobs.run(case, "--total", str(plan.total), daemon="none")
    supervisor = _Supervisor(cell, jobs, daemon, plan, rng)
    out = supervisor.run(kills)
    if out is not None:
        cell.failures += [f"differs: {name}" for name in differences(reference, out)]
        out.unlink()
    reference.unlink()
    supervisor.forget()
    return cell


def campaign(
    kills: int,
    seed: int,
    jobs: Jobs,
    daemon: DaemonProcess,
    say: Callable[[str], object],
    *,
    cases: Sequence[str] = CAMPAIGN_CASES,
    per_cell: int = 8,
) -> list[Cell]:
    """Cells until at least ``kills`` kills were made, over ``cases`` in turn."""
    cells: list[Cell] = []
    done = 0
    while done < kills:
        case = cases[len(cells) % len(cases)]
        cell = run_cell(case, seed + len(cells), min(per_cell, kills - done), jobs, daemon)
        cells.append(cell)
        done += len(cell.kills)
        outcome = "identical" if not cell.failures else f"FAILED: {cell.failures[0]}"
        say(f"[{done}/{kills}] {case} seed {cell.seed}: {len(cell.kills)} kills, {outcome}\n")
    return cells


def table(cells: Sequence[Cell]) -> str:
    """Kills by moment and target, what they cost, and the failures."""
    kills = [kill for cell in cells for kill in cell.kills]
    counts = Counter((kill.moment, kill.target) for kill in kills)
    lines = [f"{'moment':36}" + "".join(f"{t:>9}" for t in Target) + f"{'repeated':>20}"]
    for moment in Moment:
        here = [kill.repeated for kill in kills if kill.moment is moment]
        cost = f"mean {sum(here) / len(here):.1f}, max {max(here)}" if here else "-"
        lines.append(f"{moment:36}" + "".join(f"{counts[moment, t]:9}" for t in Target) + f"{cost:>20}")
    failed = [cell for cell in cells if cell.failures]
    lines.append(
        f"{len(kills)} kills in {len(cells)} runs of {len({c.case for c in cells})} cases, "
        f"{sum(c.lives for c in cells)} lives, "
        f"{sum(kill.repeated for kill in kills)} iterations repeated, {len(failed)} failed runs"
    )
    lines += [f"FAILED {c.case} seed {c.seed}: {text}" for c in failed for text in c.failures]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; 1 if anything was not as it has to be."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.campaign")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20))
    parser.add_argument("--cases", nargs="+", default=CAMPAIGN_CASES, metavar="CASE")
    args = parser.parse_args(argv)
    say = sys.stdout.write
    say(f"seed {args.seed}; --seed {args.seed} repeats the choices\n")
    with tempfile.TemporaryDirectory(prefix="ckptd-chaos-") as name, own_daemon() as own:
        cells = campaign(args.kills, args.seed, Jobs(Path(name), own.endpoint), own, say, cases=args.cases)
    say(table(cells) + "\n")
    return 1 if any(cell.failures for cell in cells) else 0


if __name__ == "__main__":
    raise SystemExit(main())
