"""Seeded random kills of a job under hosts, and a comparison of the end with a run that was never hurt.

``python -m tests.e2e.host_campaign --kills 300 --seed 7`` prints progress and a table, and fails if a single bit
differs, if a life resumes nothing, if a replay was not compared, or if the job began anew without a kill.

A *run* is a job of three gloo ranks under torchrun and hosts, with one case of ``cases.py`` under DDP. In it,
something is killed at a random moment (see `Target`), all ranks are awaited beyond what they had done, and so on
until the kills of the run are used up and the job is let go to its end. Each life begins from another seed.

A rank that hangs (SIGSTOP) is ended by its host, which has a deadline for steps; the time until the job is back
counts from the signal. A host that hangs is ended by this campaign, some seconds later: while its trainer runs,
nothing misses it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ckptd.core.recovery.recovery_phases import RecoveryPhase, phases_in_metrics
from ckptd.demo.lab import Trainer
from ckptd.host.hangs.hang_inquiry import TrainerState
from ckptd.host.hangs.trainer_watch import state_of
from ckptd.saved import saved_iterations
from ckptd.transport.messages import Done, Events, Forget, GetEvents
from tests.ckptd.host.hosting import zygote_of
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, own_daemon
from tests.e2e.hosted_job import HostedJob

__all__ = ["CASES", "HostRun", "Strike", "Target", "campaign", "draw", "report", "table"]

CASES = ("plain", "fused_drop", "masters", "muon")
RANKS = 3
TOTAL = 600  # iterations of a run
STEP_MS = 10.0
KILLS_PER_RUN = 16
HANG_S = 2.0  # of a host
DEADLINE_S = 5  # of a step
END_S = 1800.0  # by then a run has ended, however slow the machine is
NOTICED_S = 60.0  # by then hosts have ended what hangs, however slow the machine is
END_STEPS = 24  # the last iterations, too few to be killed in and be back
HUNG_STEPS = int(1e3 * HANG_S / STEP_MS)  # at most, while a host hangs and its trainer goes on
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CKPTD_HOST_STEP_DEADLINE_S": str(DEADLINE_S)}
# Of the hosts' logs.
EPOCH = re.compile(r"rank 0: epoch \d+ begins: .*")
HANG, STOPPED = "has not gone on", "stopped by a signal"


class Target(StrEnum):
    """What a strike kills."""

    RANK = "a rank"
    TWO = "two ranks at once"
    REPLAY = "a rank in its replay"
    ZYGOTE = "a zygote"
    ZYGOTE_AND_RANK = "a zygote and its rank"
    HOST = "a host"
    HUNG_RANK = "a rank that hangs"
    HUNG_HOST = "a host that hangs"


WEIGHTS = {
    Target.RANK: 6,
    Target.TWO: 3,
    Target.REPLAY: 3,
    Target.ZYGOTE: 1,
    Target.ZYGOTE_AND_RANK: 1,
    Target.HOST: 1,
    Target.HUNG_RANK: 2,
    Target.HUNG_HOST: 1,
}
# Those whose trainers torchrun starts again.
BY_TORCHRUN = (Target.HOST, Target.HUNG_HOST)


@dataclass(frozen=True, slots=True)
class Strike:
    """What was killed, and how the job came back from it.

    Attributes:
        back_s: from the kill until every rank has done an iteration that none had done; None where training
            just went on, or where the next kill came first, as in a replay it shall.
        phases: seconds of each phase, of the rank that came last.
        replayed: iterations replayed, and ``compared`` the tensors that they compared, of all ranks.
        hung_s: how long it was stopped before the campaign ended it.
    """

    target: Target
    kills: int
    back_s: float | None
    phases: Mapping[RecoveryPhase, float] = field(default_factory=dict)
    replayed: int = 0
    compared: int = 0
    hung_s: float = 0.0


@dataclass
class HostRun:
    """One job: what was done to it, and what is wrong with it (nothing).

    Attributes:
        in_process: ranks stay when another one fails; ``stayed``: how often one did.
        false_alarms: epochs that began because a step was slow, and nothing was stopped.
    """

    case: str
    seed: int
    strikes: list[Strike] = field(default_factory=list)
    lives: int = 0
    seeds: int = 0
    stayed: int = 0
    false_alarms: int = 0
    in_process: bool = False
    failures: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(strike.kills for strike in self.strikes)


class _Attacker:
    """Kills parts of one job that runs, and waits until it is back."""

    def __init__(self, job: HostedJob, daemon: DaemonProcess, run: HostRun, rng: random.Random) -> None:
        self._job, self._daemon, self._run, self._rng = job, daemon, run, rng
        self._logs = [Trainer(str(rank), job.folder, []) for rank in range(RANKS)]
        self._known = set(self._errors())  # those of runs before

    def start(self) -> None:
        self._job.run = f"{self._run.case}-{self._run.seed}"
        _train(self._job, self._run.case, self._job.run, self._daemon, in_process=self._run.in_process)
        self._job.until(lambda: all(self._of(rank, "attached") for rank in range(RANKS)), "the first life")
        self._job.until(self._restorable, "snapshots of all ranks")

    def strike(self) -> Strike | None:
        """Hurt the job once, at a random moment; None if it has come too near to its end."""
        since, wanted = self._newest(), self._rng.randrange(3, 9)
        self._job.until(
            lambda: self._few_left() or min(map(self._last, range(RANKS))) >= since + wanted,
            "training between two kills",
        )
        if self._few_left():
            return None
        time.sleep(self._rng.uniform(0, 3 * STEP_MS / 1e3))
        target = self._rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        rank = self._rng.randrange(RANKS)
        if target is Target.HUNG_HOST and self._few_left(HUNG_STEPS):
            target = Target.HOST
        if target is Target.ZYGOTE:
            os.kill(self._zygote(rank), signal.SIGKILL)
            return Strike(target, 1, None)
        if target is Target.REPLAY:
            return self._in_replay(rank)
        if target in (Target.HUNG_RANK, Target.HUNG_HOST):
            return self._hang(target, rank)
        victims = {
            Target.RANK: lambda: [self._trainer(rank)],
            Target.TWO: lambda: [self._trainer(rank), self._trainer((rank + 1) % RANKS)],
            Target.ZYGOTE_AND_RANK: lambda: [self._zygote(rank), self._trainer(rank)],
            Target.HOST: lambda: [self._job.hosts()[rank]],
        }[target]()
        return self._back(target, *self._kill(victims), kills=len(victims))

    def _in_replay(self, rank: int) -> Strike:
        """Kill a rank, and once more as soon as it replays."""
        newest, _ = self._kill([self._trainer(rank)])
        lives = len(self._of(rank, "attached"))
        self._job.until(lambda: len(self._of(rank, "attached")) > lives, "the next life")
        life = self._of(rank, "attached")[-1]["pid"]
        self._job.until(lambda: self._replays(rank, life) or self._last(rank) > newest, "a replay")
        caught = self._replays(rank, life)
        before, killed_s = self._kill([life])
        target = Target.REPLAY if caught else Target.RANK
        return self._back(target, max(newest, before), killed_s, kills=2)

    def _hang(self, target: Target, rank: int) -> Strike:
        """Stop a process, and wait until it has been ended; after some seconds, end it."""
        pid = self._trainer(rank) if target is Target.HUNG_RANK else self._job.hosts()[rank]
        stopped_s = time.time()
        os.kill(pid, signal.SIGSTOP)
        if target is Target.HUNG_HOST:
            time.sleep(HANG_S)
            return self._back(target, *self._kill([pid]), kills=1, hung_s=HANG_S)
        newest = self._newest()
        while state_of(pid) is TrainerState.STOPPED:
            if time.time() > stopped_s + NOTICED_S:
                self._run.failures.append(f"rank {rank} was stopped for {NOTICED_S:g} s, and nothing came")
                return self._back(target, *self._kill([pid]), kills=1, hung_s=NOTICED_S)
            time.sleep(0.01)
        return self._back(target, newest, stopped_s, kills=1)

    def _kill(self, pids: Sequence[int]) -> tuple[int, float]:
        """SIGKILL them; the newest iteration that any rank had done, and when they were killed."""
        killed_s = time.time()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # ended because of the one before
                os.kill(pid, signal.SIGKILL)
        return self._newest(), killed_s

    def _back(
        self,
        target: Target,
        newest: int,
        killed_s: float,
        *,
        kills: int,
        hung_s: float = 0.0,
    ) -> Strike:
        """Wait until every rank has done an iteration that none had done, in a life after the kill."""
        found: list[tuple[float, dict[str, Any]]] = []

        def is_back() -> bool:
            found[:] = [new for rank in range(RANKS) if (new := self._new_life(rank, newest, killed_s))]
            return len(found) == RANKS

        self._job.until(is_back, f"{target} killed: iterations beyond {newest}")
        done_s, slowest = max(found, key=lambda new: new[0])
        return Strike(
            target,
            kills,
            done_s - killed_s,
            phases_in_metrics(slowest["phases"]),
            sum(back["replayed"] for _, back in found),
            sum(back["compared"] for _, back in found),
            hung_s,
        )

    def _new_life(self, rank: int, newest: int, killed_s: float) -> tuple[float, dict[str, Any]] | None:
        """When the rank had done a new iteration in its life after the kill, and what it says of its start."""
        events = self._logs[rank].drain()
        begun = max((n for n, e in enumerate(events) if e["event"] == "life"), default=0)
        life = events[begun:]
        if not life or life[0]["time_s"] <= killed_s:
            return None
        for event in life:
            if event["event"] == "attached" and event["resumed_from"] is None:
                raise AssertionError(f"rank {rank} has begun the run anew")
        done = next((e["time_s"] for e in life if e["event"] == "step" and e["step"] > newest), None)
        back = next((e for e in life if e["event"] == "back"), None)
        return None if done is None or back is None else (done, back)

    def _replays(self, rank: int, pid: int) -> bool:
        last = self._logs[rank].drain()[-1]
        return bool(last["pid"] == pid and last["event"] == "begins" and last["replaying"])

    def _of(self, rank: int, kind: str) -> list[dict[str, Any]]:
        return [event for event in self._logs[rank].drain() if event["event"] == kind]

    def _last(self, rank: int) -> int:
        return max((event["step"] for event in self._of(rank, "step")), default=-1)

    def _newest(self) -> int:
        return max(map(self._last, range(RANKS)))

    def _few_left(self, also: int = 0) -> bool:
        """Too few iterations to be killed in, and be back; after ``also`` further ones."""
        return self._newest() > TOTAL - END_STEPS - also

    def _trainer(self, rank: int) -> int:
        pid: int = self._logs[rank].drain()[-1]["pid"]
        return pid

    def _zygote(self, rank: int) -> int:
        """The zygote of a rank; it may just be a new one that is being started."""
        host = self._job.hosts()[rank]
        found: list[int] = []

        def is_there() -> bool:
            found[:] = [pid for pid in [zygote_of(host)] if pid is not None]
            return bool(found)

        self._job.until(is_there, "a zygote")
        return found[0]

    def _restorable(self) -> bool:
        return bool(saved_iterations("host-campaign", self._job.run, daemon=self._daemon.endpoint))

    def _errors(self) -> list[str]:
        """Events of the daemon that are errors: nothing here damages snapshots."""
        page = self._daemon.ask(GetEvents(limit=10_000), Events)
        return [f"{e.kind}: {e.message}" for e in page.events if e.level == "error"]

    def judge(self, reference: HostedJob) -> None:
        """After the end: what differs from the undisturbed run, and what happened that should not have."""
        run, wrong = self._run, self._run.failures
        for rank in range(RANKS):
            ours, theirs = (job.folder / f"{rank}.pt" for job in (self._job, reference))
            wrong += [f"rank {rank} differs: {name}" for name in differences(theirs, ours)]
        seeds = [event["seed"] for event in self._of(0, "life")]
        run.lives, run.seeds = len(seeds), len(set(seeds))
        run.stayed = self._job.output.count(" has stayed\n")
        begun = EPOCH.findall(self._job.output)
        hangs, named = (sum(text in each for each in begun) for text in (HANG, STOPPED))
        stopped = sum(strike.target is Target.HUNG_RANK for strike in run.strikes)
        if named < stopped:
            wrong.append(f"hosts named {named} of {stopped} ranks that were stopped: {'; '.join(begun)}")
        run.false_alarms = hangs - named
        epochs = [each for each in begun if HANG not in each]
        allowed = sum(
            strike.kills for strike in run.strikes if strike.target not in (Target.ZYGOTE, Target.HUNG_RANK)
        )
        if len(epochs) > allowed:
            wrong.append(f"{len(epochs)} epochs after {allowed} kills: {'; '.join(epochs)}")
        wrong += [f"the daemon reports {text}" for text in self._errors() if text not in self._known]
        wrong += [
            f"{strike.target}: replayed without a comparison"
            for strike in run.strikes
            if strike.replayed and not strike.compared
        ]
        self._daemon.ask(Forget("host-campaign", self._job.run), Done)


def _train(
    job: HostedJob,
    case: str,
    run: str,
    daemon: DaemonProcess,
    *,
    recorded: bool = True,
    total: int = 0,
    in_process: bool = False,
) -> None:
    """Start it under hosts, whose files are with those of the daemon: what one job imports, the zygotes of the
    next import ahead.
    """
    env = {"CKPTD_HOST_MAX_RESTARTS": "100000", "CKPTD_RUNTIME_DIR": str(daemon.runtime_dir)}
    endpoint = daemon.endpoint if recorded else "none"
    own = ["--case", case, "--total", str(total or TOTAL), "--step-ms", str(STEP_MS), "--run", run]
    own += ["--daemon", endpoint, "--folder", str(job.folder), *(["--in-process"] if in_process else [])]
    job.start("-m", "tests.e2e.host_job", *own, max_restarts=1000, env={**env, **ENVIRONMENT})


def run_one(run: HostRun, kills: int, folder: Path, daemon: DaemonProcess, reference: HostedJob) -> None:
    """Hurt one job ``kills`` times (fewer if it ends sooner), and compare its end."""
    job = HostedJob(folder / f"{run.case}-{run.seed}", RANKS)
    attacker = _Attacker(job, daemon, run, random.Random(f"{run.case} {run.seed}"))
    try:
        attacker.start()
        while run.kills < kills and (strike := attacker.strike()) is not None:
            run.strikes.append(strike)
        code = job.end(END_S)
        if code:
            run.failures.append(f"torchrun ended with {code}:\n{job.output[-4000:]}")
        else:
            attacker.judge(reference)
    except AssertionError as error:
        run.failures.append(str(error))
    finally:
        job.close()


def undisturbed(case: str, folder: Path) -> HostedJob:
    """The same training without ckptd, hosts and pauses.

    Raises:
        AssertionError: it failed.
    """
    job = HostedJob(folder / f"{case}-undisturbed", RANKS)
    own = ["--case", case, "--total", str(TOTAL), "--step-ms", "0", "--run", "none"]
    own += ["--daemon", "none", "--folder", str(job.folder)]
    job.start("-m", "tests.e2e.host_job", *own, host=False, env=ENVIRONMENT)
    return _ended(job)


def rehearse(case: str, folder: Path, daemon: DaemonProcess) -> None:
    """Start the job under hosts once, so that those of the campaign know what it imports. Otherwise they look
    some seconds after the first start, and who is killed while the zygotes import it waits for them.
    """
    job = HostedJob(folder / "rehearsal", RANKS)
    _train(job, case, "none", daemon, recorded=False, total=1)
    _ended(job)


def _ended(job: HostedJob) -> HostedJob:
    try:
        assert job.end(END_S) == 0, job.output
    finally:
        job.close()
    return job


def campaign(
    kills: int,
    seed: int,
    folder: Path,
    daemon: DaemonProcess,
    say: Callable[[str], object],
    *,
    cases: Sequence[str] = CASES,
    limit_s: float = float("inf"),
    in_process: bool = False,
) -> list[HostRun]:
    """Runs until at least ``kills`` kills were made, or ``limit_s`` has passed, over ``cases`` in turn.

    Args:
        in_process: ranks stay when another one fails.
    """
    runs: list[HostRun] = []
    references: dict[str, HostedJob] = {}
    begun = time.monotonic()
    rehearse(cases[0], folder, daemon)
    while (done := sum(run.kills for run in runs)) < kills and time.monotonic() - begun < limit_s:
        case = cases[len(runs) % len(cases)]
        if case not in references:
            references[case] = undisturbed(case, folder)
        left = min(KILLS_PER_RUN, kills - done)
        run = HostRun(case, seed + len(runs), in_process=in_process)
        run_one(run, left, folder, daemon, references[case])
        runs.append(run)
        backs = [strike.back_s for strike in run.strikes if strike.back_s is not None]
        middle = (
            f"back in {statistics.median(backs):.2f} s (median)" if backs else "nothing to come back from"
        )
        outcome = "identical" if not run.failures else f"FAILED: {run.failures[0]}"
        load = os.getloadavg()[0]
        say(
            f"[{done + run.kills}/{kills}] {case} seed {run.seed}: {run.kills} kills, {middle}, load {load:.0f}, {outcome}\n"
        )
    return runs


# --- what comes of it --------------------------------------------------------------------------------------


def _quantile(samples: Sequence[float], part: float) -> float:
    """The smallest sample that this part of all does not exceed."""
    return sorted(samples)[max(0, -int(-part * len(samples) // 1) - 1)]


def _rows(runs: Sequence[HostRun]) -> list[list[str]]:
    strikes = [strike for run in runs for strike in run.strikes]
    rows = [["killed", "strikes", "median s", "90 % s", "max s", "replayed", "compared"]]
    for target in Target:
        here = [strike for strike in strikes if strike.target is target]
        backs = [strike.back_s for strike in here if strike.back_s is not None]
        times = [statistics.median(backs), _quantile(backs, 0.9), max(backs)] if backs else []
        rows.append(
            [
                target + (" *" if any(strike.hung_s for strike in here) else ""),
                str(len(here)),
                *([f"{seconds:.2f}" for seconds in times] or ["-"] * 3),
                str(sum(strike.replayed for strike in here)),
                str(sum(strike.compared for strike in here)),
            ]
        )
    return rows


def _phase_rows(runs: Sequence[HostRun]) -> list[list[str]]:
    """Median ms of each phase, by what was killed."""
    medians = _median_phases(runs)
    rows = [["median ms", *medians]]
    for phase in RecoveryPhase:
        if any(phase in found for found in medians.values()):
            cells = (found.get(phase) for found in medians.values())
            rows.append([phase, *("-" if cell is None else f"{1e3 * cell:.0f}" for cell in cells)])
    return rows


def _median_phases(runs: Sequence[HostRun]) -> dict[str, dict[RecoveryPhase, float]]:
    found: dict[str, dict[RecoveryPhase, float]] = {}
    for target in Target:
        traces = [s.phases for run in runs for s in run.strikes if s.target is target and s.phases]
        if traces:
            found[target] = {
                phase: statistics.median([trace.get(phase, 0.0) for trace in traces])
                for phase in RecoveryPhase
                if any(phase in trace for trace in traces)
            }
    return found


def _summary(runs: Sequence[HostRun]) -> str:
    strikes = [strike for run in runs for strike in run.strikes]
    failed = sum(bool(run.failures) for run in runs)
    return (
        f"{sum(run.kills for run in runs)} kills in {len(runs)} runs of {len({run.case for run in runs})} cases, "
        f"{sum(run.lives for run in runs)} lives from {sum(run.seeds for run in runs)} seeds, "
        f"{sum(strike.compared for strike in strikes)} tensors compared in replays, {failed} failed runs. "
        f"{Target.HUNG_RANK} (SIGSTOP): its host ended it after the deadline of {DEADLINE_S} s; times count from the "
        f"SIGSTOP. {sum(run.false_alarms for run in runs)} epochs began because a step was slow. "
        f"{sum(run.stayed for run in runs)} times a rank stayed when another one had failed. "
        f"* stopped by SIGSTOP for {HANG_S:g} s, and ended by the campaign; times count from that SIGKILL."
    )


def _as_text(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def _as_markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def table(runs: Sequence[HostRun]) -> str:
    """Strikes by what was killed, what they cost, and the failures."""
    failed = [run for run in runs if run.failures]
    lines = [_as_text(_rows(runs)), "", _as_text(_phase_rows(runs)), "", _summary(runs)]
    lines += [f"FAILED {run.case} seed {run.seed}: {text}" for run in failed for text in run.failures]
    return "\n".join(lines)


def report(runs: Sequence[HostRun], *, how: str, picture: str) -> str:
    """The same as a page.

    Args:
        how: what was run, where.
        picture: the name of its file.
    """
    failed = [f"* FAILED {run.case} seed {run.seed}: {text}" for run in runs for text in run.failures]
    meaning = (
        "Seconds from the SIGKILL until every rank had done an iteration that none had done; iterations replayed,"
        " and tensors compared in them, of all ranks."
    )
    parts = [
        "# Kills of a job under hosts",
        how,
        meaning,
        _as_markdown(_rows(runs)),
        _summary(runs),
        "Phases of the rank that came last:",
        _as_markdown(_phase_rows(runs)),
        f"![Times to be back, and their phases]({picture})",
        *failed,
    ]
    return "\n\n".join(parts) + "\n"


def draw(path: Path, runs: Sequence[HostRun]) -> None:
    """A histogram of the times to be back, and the median phases by what was killed, stacked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    strikes = [strike for run in runs for strike in run.strikes]
    backs: dict[str, list[float]] = {"by a host": [], "by torchrun": []}
    for strike in strikes:
        if strike.back_s is not None:
            backs["by torchrun" if strike.target in BY_TORCHRUN else "by a host"].append(strike.back_s)
    figure, (times, phases) = pyplot.subplots(1, 2, figsize=(14, 5), layout="constrained")
    highest = max((seconds for found in backs.values() for seconds in found), default=1.0)
    edges = [highest * n / 60 for n in range(61)]
    labels = [f"started again {name} ({len(found)})" for name, found in backs.items()]
    times.hist(list(backs.values()), bins=edges, stacked=True, label=labels, color=["#12355b", "#e09f3e"])
    times.set_xlabel("seconds from the kill until every rank did a new iteration")
    times.set_ylabel("kills")
    times.legend()
    medians = _median_phases(runs)
    names = list(medians)
    lefts = [0.0] * len(names)
    colours = pyplot.get_cmap("tab20")
    for number, phase in enumerate(RecoveryPhase):
        widths = [medians[name].get(phase, 0.0) for name in names]
        if any(widths):
            phases.barh(names, widths, left=lefts, label=str(phase), color=colours(number))
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    phases.invert_yaxis()
    phases.set_xlabel("seconds, medians of the phases of the rank that came last")
    phases.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; 1 if anything was not as it has to be."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.host_campaign")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after these")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="CASE")
    parser.add_argument("--in-process", action="store_true", help="ranks stay when another one fails")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args(argv)
    say = sys.stdout.write
    say(f"seed {args.seed}; --seed {args.seed} repeats the choices\n")
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="ckptd-hosts-") as name, own_daemon() as own:
        runs = campaign(
            args.kills,
            args.seed,
            Path(name),
            own,
            say,
            cases=args.cases,
            limit_s=60 * args.minutes,
            in_process=args.in_process,
        )
    say(table(runs) + "\n")
    stays = " --in-process" if args.in_process else ""
    how = (
        f"`python -m tests.e2e.host_campaign --kills {args.kills} --seed {args.seed}{stays}`: three gloo ranks on one"
        f" machine with {os.cpu_count()} cores; load {before:.1f} before, {os.getloadavg()[1]:.1f} at the end (mean of"
        " five minutes, this campaign's own included)."
    )
    picture = args.out / f"campaign_{'in_process' if args.in_process else 'host'}.png"
    draw(picture, runs)
    picture.with_suffix(".md").write_text(report(runs, how=how, picture=picture.name))
    say(f"{picture.with_suffix('.md')}, {picture}\n")
    return 1 if any(run.failures for run in runs) else 0


if __name__ == "__main__":
    raise SystemExit(main())
