"""Kills, stops and errors drawn over failpoints, not over time: ``python -m tests.failpoints.campaign --kills 300``.

A *round* is a job of 2 to 4 ranks on 1 to 4 nodes with 0 to 2 replicas, with or without a store. In it, one point
after the other is armed (those first that were hurt least), all must train again, and the end must have the bits
of a run that nobody has hurt. Points of a start are reached because something is killed beside.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptd.transport import wire
from tests.e2e.harness import Jobs
from tests.failpoints.points import Kind, all_points
from tests.failpoints.runtime import CLOCK_STEPS_S, ERRORS, Arm, forget_reached, reached
from tests.failpoints.world import CASES, GRADIENTS, PEERS, Layout, Round, Training, Wrong, undisturbed

__all__ = ["Coverage", "campaign", "table"]

PROCESSES = ("trainer", "daemon", "keeper", "recompute")
PER_ROUND = 12
MAX_NTH = 6
OFTEN = 4  # what a process has reached more often is reached while it trains, too, and not in its start alone
SITE = Path(__file__).parent / "site"
_Key = tuple[str, str, str]  # kind of process, point, before or after


class Coverage:
    """What was reached, and how often each was hurt."""

    def __init__(self, plans: Path) -> None:
        self._plans = plans
        self._earlier: Counter[_Key] = Counter()  # of rounds that are over
        self.points = all_points()
        self.fired: Counter[_Key] = Counter()
        self.missed: Counter[_Key] = Counter()

    def here(self) -> dict[_Key, int]:
        """How often a process of this round reached each, by the most that one did."""
        return {k: n for k, n in reached(self._plans).items() if k[0] in PROCESSES and k[1] in self.points}

    def known(self) -> dict[_Key, int]:
        """The same, of all rounds."""
        return dict(self._earlier | Counter(self.here()))

    def begin_round(self) -> None:
        """Other processes, which may reach other points."""
        self._earlier |= Counter(self.here())
        forget_reached(self._plans)

    def draw(self, rng: random.Random) -> Arm:
        """One of those of this round that were hurt, or waited for in vain, least."""
        known = self.here()
        least = min(self.fired[key] + self.missed[key] for key in known)
        process, point, when = key = rng.choice(
            sorted(k for k in known if self.fired[k] + self.missed[k] == least)
        )
        nth = min(known[key], 2 ** rng.randrange(4), MAX_NTH)
        actions = ["kill"] * 6 + ["stop", "delay", *CLOCK_STEPS_S]
        if when == "before" and self.points[point].kind in (Kind.FILE, Kind.RENAME):
            actions += [*ERRORS]
        return Arm(point, process, when, nth, rng.choice(actions), often=known[key] > OFTEN)

    def note(self, plan: Arm, *, hurt: bool) -> None:
        (self.fired if hurt else self.missed)[plan.process, plan.point, plan.when] += 1


def draw_layout(rng: random.Random, case: str) -> Layout:
    num_nodes = rng.choice((2, 3) if case == GRADIENTS else (1, 2, 2, 3, 4))
    num_ranks = max(num_nodes, rng.choice((2, 2, 3)))
    replicas = rng.randint(1 if case == GRADIENTS else 0, min(2, num_nodes - 1))
    return Layout(
        case,
        num_nodes,
        num_ranks,
        replicas,
        stores=rng.random() < 0.5,
        peers=rng.choice(sorted(PEERS)) if num_nodes > 1 else "streams",
        parks=rng.random() < 0.25,
    )


def campaign(
    kills: int,
    seed: int,
    folder: Path,
    say: Callable[[str], object],
    *,
    layouts: Sequence[Layout] = (),
    limit_s: float = float("inf"),
) -> tuple[list[Round], Coverage]:
    """Rounds until so many points have fired, or the time is over; ``layouts`` in place of drawn ones."""
    plans = Path(os.environ["FAILPOINTS_DIR"])
    rng, jobs, coverage = random.Random(seed), Jobs(folder, "none"), Coverage(plans)
    references: dict[tuple[str, int], list[Path]] = {}
    rounds: list[Round] = []
    cases = (*CASES, GRADIENTS)
    begun = time.monotonic()
    while coverage.fired.total() < kills and time.monotonic() - begun < limit_s:
        number = len(rounds)
        layout = layouts[number % len(layouts)] if layouts else draw_layout(rng, cases[number % len(cases)])
        of = layout.trained, layout.num_ranks
        if of not in references:
            references[of] = undisturbed(jobs, layout)
        training = Training(layout, seed + number, jobs, plans, folder / f"store-{number}")
        rounds.append(training.round)
        coverage.begin_round()
        try:
            with training:
                training.begin()
                while len(training.round.strikes) < PER_ROUND and not training.over:
                    if coverage.fired.total() >= kills or time.monotonic() - begun > limit_s:
                        break
                    plan = coverage.draw(rng)
                    coverage.note(plan, hurt=training.strike(plan).fired is not None)
                training.finish(references[of])
        except (Wrong, AssertionError) as error:
            training.round.failures.append(str(error))
        found = training.round
        outcome = (
            "identical" if not found.failures else f"FAILED after {found.strikes[-1:]}: {found.failures[0]}"
        )
        say(
            f"[{coverage.fired.total()}/{kills}] {layout}, seed {found.seed}: {len(found.strikes)} strikes, "
            f"{found.lives} lives, {outcome}\n"
        )
    return rounds, coverage


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
    lines.append(
        f"{len(done)} strikes in {len(rounds)} rounds, {sum(r.lives for r in rounds)} lives "
        f"({', '.join(f'{n} {action}' for action, n in actions.most_common())}); "
        f"{sum(bool(s.forced) for s in done)} in a start, {sum(bool(s.also) for s in done)} with a second kill at "
        f"once, {sum(bool(s.lost_node) for s in done)} with the node's memory; {sum(s.refused for s in done)} starts refused for an injected error; "
        f"{len(strikes) - len(done)} plans met nobody"
    )
    lines.append(
        f"{len(reached_points)} of {len(coverage.points)} points were reached; "
        f"{sum(bool(coverage.fired[key]) for key in known)} of {len(known)} (process, point, before or after) were hurt"
    )
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
            args.kills, args.seed, Path(name), _say, layouts=layouts, limit_s=60 * args.minutes
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
