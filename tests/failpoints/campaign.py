"""Kills, stops and errors drawn over failpoints, not over time: ``python -m tests.failpoints.campaign --kills 300``.

A *round* is a job of 2 to 4 ranks on 1 to 5 nodes with 0 to 2 replicas, with or without a store. In it, one point
after the other is armed (those first that were hurt least), all must train again, and the end must have the bits
of a run that nobody has hurt. Points of a start are reached because something is killed beside.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptd.transport import wire
from tests.e2e.harness import Jobs
from tests.failpoints.beside import Beside
from tests.failpoints.points import Kind, all_points
from tests.failpoints.runtime import CLOCK_STEPS_S, ERRORS, Arm, answers, forget_reached, reached
from tests.failpoints.world import (
    BUCKET,
    CASES,
    GRADIENTS,
    LOGGED,
    OPTIONS,
    PEERS,
    SETTINGS,
    Layout,
    Round,
    Training,
    Wrong,
    undisturbed,
)
from tests.storage.s3_server import weed

__all__ = ["Coverage", "campaign", "keep_failure", "table"]

PROCESSES = ("trainer", "daemon", "keeper", "recompute", "ctl")
PER_ROUND = 12
MAX_NTH = 6
MIXED_AFTER = 20  # rounds, in which most kinds of jobs have been
BESIDE = 0.25  # the share of the strikes beside which something else happens, to see what that reaches
OFTEN = 4  # what a process has reached more often is reached while it trains, too, and not in its start alone
CUT, OF_SOCKETS = "ECONNRESET", ("sendall", "sendmsg", "recv_into")
SITE = Path(__file__).parent / "site"
_Key = tuple[str, str, str]  # kind of process, point, before or after


@dataclass(frozen=True, slots=True)
class Way:
    """How a point was reached that is not reached in every job.

    Attributes:
        layout: the job.
        how: what happened beside; ``EIO@point``: an injected error; `AT_END`: the job's end; "": nothing.
    """

    layout: Layout
    how: str


AT_END = "at the end"


class Coverage:
    """What was reached, and how often each was hurt: in this run, and with a file in all that have used it.

    Args:
        file: JSON; several campaigns may add to it at once.
    """

    def __init__(self, plans: Path, file: Path | None = None) -> None:
        self._plans, self._file = plans, file
        self._earlier: Counter[_Key] = Counter()  # of rounds that are over
        self.points = all_points()
        self.fired: Counter[_Key] = Counter()
        self.missed: Counter[_Key] = Counter()
        self.ways: dict[_Key, Way] = {}
        self._learnt: set[_Key] = set()  # of this round
        self.sums: Counter[str] = Counter()  # strikes, rounds, failed rounds
        self._saved: dict[str, Counter[Any]] = {}  # what of it is in the file
        self.save()

    def here(self) -> dict[_Key, int]:
        """How often a process of this round reached each, by the most that one did."""
        return {k: n for k, n in reached(self._plans).items() if self._is_known(k)}

    def _is_known(self, key: _Key) -> bool:
        return key[0] in PROCESSES and key[1] in self.points

    def known(self) -> dict[_Key, int]:
        """The same, of all rounds."""
        return dict(self._earlier | Counter(self.here()))

    def begin_round(self) -> None:
        """Other processes, which may reach other points."""
        self._earlier |= Counter(self.here())
        forget_reached(self._plans)
        self._learnt = set()

    def learn(self, layout: Layout, how: str) -> None:
        """What this round has reached since the last call, it has in this way, or in answer to an error."""
        after_errors, here = answers(self._plans), self.here().keys()
        new, self._learnt = here - self._learnt, set(here)
        for key in new:
            way = Way(layout, after_errors.get(key, how))
            if key not in self.ways or (self.ways[key].how and not way.how):
                self.ways[key] = way

    def draw(self, rng: random.Random, layout: Layout) -> tuple[Arm, str]:
        """One of those that were hurt, or waited for in vain, least; and what has to happen beside."""
        known = self.here()
        for key, way in self.ways.items():
            # Commands of operators are the same beside every job.
            is_here = way.layout == layout or (
                key[0] == "ctl" and (layout.stores or way.how != Beside.VERIFY)
            )
            if is_here and way.how != AT_END:
                known.setdefault(key, 1)
        key = self._least(rng, known)
        process, point, when = key
        way_there = self.ways[key].how if key in self.ways else ""
        nth = min(known[key], 2 ** rng.randrange(4), MAX_NTH)
        error, _, at = way_there.partition("@")
        if at:
            return Arm(at, process, "before", 1, error, then=(point, when)), ""
        actions = ["kill"] * 6 + ["stop", "delay", *CLOCK_STEPS_S]
        if when == "before":
            actions += self._errors_at(point)
        often = known[key] > OFTEN
        if way_there:
            nth, often = 1, False
        return Arm(point, process, when, nth, rng.choice(actions), often=often), way_there

    def _errors_at(self, point: str) -> list[str]:
        """What the system may answer there."""
        if self.points[point].kind in (Kind.FILE, Kind.RENAME):
            return [error for error in ERRORS if error != CUT]
        return [CUT] * 3 if point.partition("/")[2].partition("#")[0] in OF_SOCKETS else []

    def draw_at_end(self, rng: random.Random) -> Arm | None:
        """One of those that the end of a job alone reaches."""
        known = {key: 1 for key, way in self.ways.items() if way.how == AT_END}
        if not known:
            return None
        process, point, when = self._least(rng, known)
        return Arm(point, process, when, 1, rng.choice(["kill", "kill", "stop", "delay"]))

    def draw_layout(self, rng: random.Random) -> Layout | None:
        """The job in which one of those was reached that were hurt least in all runs."""
        if not self.ways:
            return None
        return self.ways[self._least(rng, self.ways)].layout

    def _least(self, rng: random.Random, keys: Iterable[_Key]) -> _Key:
        tried = {key: self.fired[key] + self.missed[key] for key in keys if self._is_known(key)}
        least = min(tried.values())
        return rng.choice(sorted(key for key, n in tried.items() if n == least))

    def note(self, plan: Arm, *, hurt: bool, then: bool = False) -> None:
        """What came of a plan."""
        if plan.then is not None:
            key = (plan.process, *plan.then)
            (self.fired if then else self.missed)[key] += 1
        key = plan.process, plan.point, plan.when
        if hurt or plan.then is None:
            (self.fired if hurt else self.missed)[key] += 1

    def save(self) -> None:
        """Add what is new to the file, and read what others have added."""
        if self._file is None:
            return
        counts: dict[str, Counter[Any]] = {"hurt": self.fired, "missed": self.missed, "sums": self.sums}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                found = json.loads(self._file.read_text())
            except FileNotFoundError:
                found = {}
            for name, mine in counts.items():
                new = mine - self._saved.get(name, Counter())
                mine.clear()
                for text, number in found.get(name, {}).items():
                    mine[text if name == "sums" else tuple(text.split())] = number
                mine.update(new)
                self._saved[name] = Counter(mine)
            self._earlier |= Counter({_key(text): n for text, n in found.get("reached", {}).items()})
            self._earlier |= Counter(self.here())
            self._earlier = Counter({k: n for k, n in self._earlier.items() if self._is_known(k)})
            for text, way in found.get("ways", {}).items():
                key, theirs = _key(text), Way(Layout(**way["layout"]), way["how"])
                if self._is_known(key) and (key not in self.ways or not theirs.how):
                    self.ways[key] = theirs
            text = json.dumps(
                {
                    **{name: {_text(k): n for k, n in sorted(c.items())} for name, c in counts.items()},
                    "reached": {_text(k): n for k, n in sorted(self._earlier.items())},
                    "ways": {_text(k): asdict(way) for k, way in sorted(self.ways.items())},
                },
                indent=0,
            )
            new_file = self._file.with_suffix(".new")
            new_file.write_text(text)
            new_file.rename(self._file)


def _text(key: _Key | str) -> str:
    return key if isinstance(key, str) else " ".join(key)


def _key(text: str) -> _Key:
    process, point, when = text.split()
    return process, point, when


def draw_layout(rng: random.Random, case: str) -> Layout:
    """A job of this case."""
    if case == "a pipeline":
        case = rng.choice(sorted(LOGGED))
    num_nodes = rng.choice((2, 3) if case == GRADIENTS else (1, 2, 2, 3, 4))
    num_ranks = LOGGED.get(case) or max(num_nodes, rng.choice((2, 2, 3)))
    num_nodes = min(num_nodes, num_ranks)
    replicas = rng.randint(1 if case == GRADIENTS else 0, min(2, num_nodes - 1))
    option = rng.choice(("", "", *sorted(OPTIONS))) if case in (*CASES, GRADIENTS) else ""
    setting = rng.choice(("", *sorted({*SETTINGS} - ({BUCKET} if weed() is None else set()))))
    if rng.random() < 0.2:
        num_nodes += 1  # the ranks may move there
    return Layout(
        case,
        num_nodes,
        num_ranks,
        replicas,
        stores=setting == BUCKET or rng.random() < 0.5,
        peers=rng.choice(sorted(PEERS)) if num_nodes > 1 else "streams",
        parks=case in LOGGED or option == "asyncio" or rng.random() < 0.25,
        setting=setting,
        option=option,
    )


def campaign(
    kills: int,
    seed: int,
    folder: Path,
    say: Callable[[str], object],
    *,
    layouts: Sequence[Layout] = (),
    limit_s: float = float("inf"),
    file: Path | None = None,
) -> tuple[list[Round], Coverage]:
    """Rounds until so many points have fired, or the time is over.

    Args:
        layouts: in place of drawn ones; nothing happens beside strikes in them.
        file: keeps the coverage.
    """
    plans = Path(os.environ["FAILPOINTS_DIR"])
    rng, jobs, coverage = random.Random(seed), Jobs(folder, "none"), Coverage(plans, file)
    references: dict[tuple[str, int], list[Path]] = {}
    rounds: list[Round] = []
    cases = (*CASES, GRADIENTS, "a pipeline")
    begun, num_struck = time.monotonic(), 0
    while num_struck < kills and time.monotonic() - begun < limit_s:
        number = len(rounds)
        layout = layouts[number % len(layouts)] if layouts else None
        if layout is None and coverage.sums["rounds"] >= MIXED_AFTER and rng.random() < 0.5:
            layout = coverage.draw_layout(rng)
        layout = layout or draw_layout(rng, cases[(number + seed) % len(cases)])
        of = layout.trained, layout.num_ranks
        if of not in references:
            references[of] = undisturbed(jobs, layout)
        training = Training(layout, seed + number, jobs, plans, folder / f"store-{number}")
        rounds.append(training.round)
        coverage.begin_round()
        try:
            with training:
                training.begin()
                coverage.learn(layout, "")
                while len(training.round.strikes) < PER_ROUND and not training.over:
                    if num_struck >= kills or time.monotonic() - begun > limit_s:
                        break
                    plan, how = coverage.draw(rng, layout)
                    if not how and not layouts and rng.random() < BESIDE:
                        how = rng.choice([*Beside])
                    beside = Beside(how) if how else None
                    if beside is not None and not training.can(beside):
                        beside, how = None, ""
                    strike = training.strike(plan, beside)
                    coverage.note(plan, hurt=strike.fired is not None, then=strike.then)
                    num_struck += strike.fired is not None
                    coverage.learn(layout, how)
                plan_at_end = None if layouts else coverage.draw_at_end(rng)
                last = training.finish(references[of], plan_at_end)
                if not layouts:
                    training.forget(last)
                    coverage.learn(layout, AT_END)
                if last is not None:
                    coverage.note(last.arm, hurt=last.fired is not None)
                    num_struck += last.fired is not None
        except (Wrong, AssertionError) as error:
            training.round.failures.append(str(error))
        found = training.round
        outcome = (
            "identical" if not found.failures else f"FAILED after {found.strikes[-1:]}: {found.failures[0]}"
        )
        say(
            f"[{num_struck}/{kills}] {layout}, seed {found.seed}: {len(found.strikes)} strikes, "
            f"{found.lives} lives, {outcome}\n"
        )
        if file is not None and found.failures:
            keep_failure(file, found)
        coverage.sums["rounds"] += 1
        coverage.sums["failed rounds"] += bool(found.failures)
        coverage.sums["strikes"] += sum(strike.fired is not None for strike in found.strikes)
        coverage.save()
    return rounds, coverage


def keep_failure(file: Path, found: Round) -> Path:
    """Write what failed in a round, and all logs, beside the coverage, where no later run overwrites it."""
    kept = file.with_name(f"{file.stem}.failed-{found.seed}-{time.time_ns():x}.txt")
    lines = [f"{found.layout}, seed {found.seed}", *map(str, found.strikes), *found.failures, found.logs]
    kept.write_text("\n".join(lines) + "\n")
    return kept


def table(rounds: Sequence[Round], coverage: Coverage) -> str:
    """What was hurt, by kind of process and point, and what went wrong."""
    strikes = [strike for found in rounds for strike in found.strikes]
    done = [strike for strike in strikes if strike.fired is not None]
    known = coverage.known()
    lines = [f"{'process':10}{'reached':>9}{'hurt':>7}{'share':>8}" + "".join(f"{kind:>9}" for kind in Kind)]
    for process in PROCESSES:
        here = [key for key in known if key[0] == process]
        hurt = [key for key in here if coverage.fired[key]]
        kinds = Counter(coverage.points[s.arm.point].kind for s in done if s.arm.process == process)
        share = len(hurt) / len(here) if here else 0.0
        lines.append(
            f"{process:10}{len(here):9}{len(hurt):7}{share:8.2f}"
            + "".join(f"{kinds[kind]:9}" for kind in Kind)
        )
    reached_points = {key[1] for key in known}
    actions = Counter(strike.arm.action for strike in done)
    besides = Counter(str(strike.beside) for strike in done if strike.beside is not None)
    lines.append(
        f"{len(done)} strikes in {len(rounds)} rounds, {sum(r.lives for r in rounds)} lives "
        f"({', '.join(f'{n} {action}' for action, n in actions.most_common())}); "
        f"{sum(bool(s.forced) for s in done)} in a start, {sum(bool(s.also) for s in done)} with a second kill at "
        f"once, {sum(bool(s.lost_node) for s in done)} with the node's memory; "
        f"{sum(s.then for s in done)} after an injected error; "
        f"{sum(s.refused for s in done)} starts refused for an injected error; "
        f"{len(strikes) - len(done)} plans met nobody"
    )
    if besides:
        lines.append(f"beside: {', '.join(f'{n} {what}' for what, n in besides.most_common())}")
    places = {(point, when) for point in coverage.points for when in ("before", "after")}
    hurt_places = {key[1:] for key, n in coverage.fired.items() if n} & places
    lines.append(
        f"{len(reached_points)} of {len(coverage.points)} points were reached; "
        f"{sum(bool(coverage.fired[key]) for key in known)} of {len(known)} (process, point, before or after) "
        f"were hurt, {len(hurt_places)} of {len(places)} (point, before or after)"
    )
    sums = ", ".join(f"{n} {what}" for what, n in coverage.sums.items())
    lines.append(f"with the runs before: {sums}")
    back = [s.went_back for s in done if s.lost_node]
    if back:
        lines.append(
            f"a lost node cost {sum(back) / len(back):.1f} iterations in the mean, at most {max(back)}"
        )
    failed = [found for found in rounds if found.failures]
    lines.append(f"{len(failed)} failed rounds")
    lines += [f"FAILED {r.layout} seed {r.seed}, {r.strikes[-1:]}: {t}" for r in failed for t in r.failures]
    return "\n".join(lines)


def listing(coverage: Coverage) -> str:
    """A line for each (process, point, before or after): how often it was hurt, and how often waited for in vain."""
    known = coverage.known()
    lines = [f"{coverage.fired[k]:4} {coverage.missed[k]:4}  {' '.join(k)}" for k in sorted(known)]
    never = sorted(set(coverage.points) - {point for _, point, _ in known})
    return "\n".join(["hurt missed", *lines, "", "never reached:", *never]) + "\n"


def prepare(folder: Path) -> None:
    """From here on, interpreters and forked trainers have their points; call it before the first of them."""
    wire._ALIVE_S = 2.0  # daemons die while they are asked
    (folder / "plans").mkdir()
    os.environ["FAILPOINTS_DIR"] = str(folder / "plans")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH", "")]))


def main(argv: Sequence[str] | None = None) -> int:
    """Play; 1 if anything was not as it has to be."""
    parser = argparse.ArgumentParser(prog="python -m tests.failpoints.campaign")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no round after these")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20))
    parser.add_argument(
        "--short", action="store_true", help="two ranks on two nodes with a store, and no other layout"
    )
    parser.add_argument("--coverage", type=Path, help="add to the coverage in this file, and go on from it")
    parser.add_argument("--out", type=Path, help="write which points were hurt, and how often, to this file")
    args = parser.parse_args(argv)
    layouts = (Layout("plain", 2, 2, 1, stores=True),) if args.short else ()
    sys.stdout.write(
        f"seed {args.seed}; --seed {args.seed} repeats the choices, as far as what is reached repeats\n"
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it has started ends with it
    with tempfile.TemporaryDirectory(prefix="ckptd-failpoints-") as name:
        prepare(Path(name))
        rounds, coverage = campaign(
            args.kills,
            args.seed,
            Path(name),
            _say,
            layouts=layouts,
            limit_s=60 * args.minutes,
            file=args.coverage,
        )
        sys.stdout.write(table(rounds, coverage) + "\n")
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(listing(coverage))
    return 1 if any(found.failures for found in rounds) else 0


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
