"""Seeded audits of clean steps, and of steps in which one bit flips.

``python -m tests.e2e.audit_campaign --audits 200 --seed 7`` prints progress and a table, and fails if
clean steps raise an alarm, or if a flipped bit that changed the state is not found.

A *round* is one training, which waits within its last step, and one audit of what it has sealed. Drawn by
lot are the program, the window or the distance of its snapshots (an audit replays all steps between two),
one rank or two, and whether a bit flips: in a gradient just before its use, or in a parameter or an
optimizer's state after the update. A flip in a gradient may change nothing (it is rounded away): then the
training ends as one without it does, and the audit must pass. With sparse snapshots a flip is no failure if it
is not found: the newest one, which is compared, lacks what the window's other snapshots have. The table counts
these by themselves.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptd.ctl.audit.audit_run import Audited
from ckptd.ctl.command import CommandError
from tests.e2e.audits import audit, held, options
from tests.e2e.campaigns import play
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon

__all__ = ["Flip", "Round", "campaign", "run_round", "table"]

CASES = (
    *("plain", "fused", "tied", "batch_norm", "checkpoint", "strided", "frozen_param", "masters", "bf16"),
    *("adamw_fused", "amsgrad", "sgd", "nadam", "radam", "rmsprop", "adagrad", "adamax", "adadelta"),
    *("adafactor", "muon", "own_optimizer", "groups", "autocast", "accumulate", "plateau", "tensor_lr"),
)
DISTANCES = (50, 100, 200, 200)
_FLIPPED = re.compile(r"flipped bit .*")


@dataclass(frozen=True, slots=True)
class Flip:
    """What flipped, as the training says, and what the audit made of it."""

    kind: str
    text: str
    found: bool
    changed: bool


@dataclass
class Round:
    """One audit, and what is wrong with it (nothing)."""

    case: str
    seed: int
    num_ranks: int
    window: int
    distance: int
    steps: int = 0
    flip: Flip | None = None
    failures: list[str] = field(default_factory=list)


def run_round(seed: int, jobs: Jobs, daemon: DaemonProcess) -> Round:
    """Train, audit once, and judge."""
    rng = random.Random(f"audit {seed}")
    flips, run = rng.random() < 0.4, f"audit-{seed}"
    case = rng.choice(CASES)
    num_ranks = 2 if case == "plain" and rng.random() < 0.5 else 1
    window = rng.choice((1, 1, 1, 2, 4)) if flips else rng.choice((1, 1, 1, 3, 7))
    # Where ranks have to agree first, it is not known at which iterations snapshots are.
    distance = 1 if flips or window > 1 or num_ranks > 1 else rng.choice(DISTANCES)
    found = Round(case, seed, num_ranks, window, distance)
    newest = 2 * window + 6 if distance == 1 else distance + 1
    total = newest + 2  # the last step's snapshot is still being filled
    rare = () if distance == 1 else ("window=null", 'policy="dense"', f"every={distance}")
    more = [text for setting in rare for text in ("--set", setting)]
    settings = options(run, window, *more, "--seed", str(seed), total=total)
    kind = rng.choice(("state", "gradient")) if window == 1 else "state"
    option = {"state": "--flip-at", "gradient": "--flip-in"}[kind]
    what = {"state": "states" if window == 1 else "params", "gradient": "grads"}[kind]
    flip = (option, f"{newest - 1}:{what}/{seed}") if flips else ()
    try:
        with held(
            jobs,
            daemon,
            case,
            *settings,
            *flip,
            run=run,
            world_size=num_ranks,
            total=total,
            newest=newest,
        ) as outs:
            audited = audit(
                jobs,
                daemon,
                case,
                *settings,
                run=run,
                world_size=num_ranks,
                verify_iterations=distance,
            )
        found.steps = audited.end - audited.start
        if not flips:
            if not audited.passed:
                found.failures.append(f"a false alarm: {audited.verdict}")
        else:
            _judge_flip(found, kind, audited, jobs, outs, settings)
    except (
        AssertionError,
        CommandError,
    ) as error:  # it hung, ended as it should not, or left nothing to audit
        found.failures.append(str(error))
    return found


def _judge_flip(
    found: Round, kind: str, audited: Audited, jobs: Jobs, outs: Sequence[Path], settings: Sequence[str]
) -> None:
    said = [match.group() for out in outs if (match := _FLIPPED.search(jobs.log(out)))]
    if not said:
        found.failures.append("no bit has flipped")
        return
    changed = not audited.passed or kind == "state" or bool(_changed(found, jobs, outs, settings))
    found.flip = Flip(kind, said[0], not audited.passed and audited.certain, changed)
    if changed and not found.flip.found and found.window == 1:
        found.failures.append(f"not found: {found.flip.text}; {audited.verdict}")


def _changed(found: Round, jobs: Jobs, outs: Sequence[Path], settings: Sequence[str]) -> list[str]:
    """How the end differs from that of a training in which nothing flipped."""
    if found.num_ranks > 1:
        return ["not compared"]  # an audit that passed where a gradient differed is looked at by a person
    return differences(jobs.run(found.case, *settings, daemon="none"), outs[0])


def campaign(audits: int, seed: int, folder: Path, say: Callable[[str], object]) -> list[Round]:
    """As many audits as asked."""
    rounds: list[Round] = []
    for number in range(seed, seed + audits):
        # A daemon for each: what a run leaves behind is not what is looked at.
        (own := folder / str(number)).mkdir()
        with own_daemon("--memory", "512MiB") as daemon:
            found = run_round(number, Jobs(own, daemon.endpoint), daemon)
        rounds.append(found)
        outcome = f"FAILED: {found.failures[0]}" if found.failures else "as it has to be"
        drawn = f"{found.case}, {found.num_ranks} ranks, window {found.window}, every {found.distance}"
        text = "" if found.flip is None else f", {found.flip.text}"
        say(f"[{len(rounds)}/{audits}] seed {number}: {drawn}: {found.steps} steps{text}: {outcome}\n")
    return rounds


def table(rounds: Sequence[Round]) -> str:
    """Clean steps, flips by kind, and the failures."""
    clean = [found for found in rounds if found.flip is None and found.steps]
    flips = [(found.flip, found.window) for found in rounds if found.flip is not None]
    lines = [
        f"{sum(found.steps for found in clean)} clean steps in {len(clean)} audits of {len({f.case for f in clean})} programs"
    ]
    kinds = Counter((flip.kind, window > 1, flip.changed, flip.found) for flip, window in flips)
    lines += [
        f"{count} flips in a {kind}{', sparse snapshots' if sparse else ''}: "
        f"{'changed the state' if changed else 'rounded away'}, {'found' if was_found else 'not found'}"
        for (kind, sparse, changed, was_found), count in sorted(kinds.items())
    ]
    failed = [found for found in rounds if found.failures]
    lines.append(f"{len(failed)} failed rounds")
    lines += [f"FAILED {f.case} seed {f.seed}: {text}" for f in failed for text in f.failures]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; 1 if anything was not as it has to be."""
    return play("tests.e2e.audit_campaign", campaign, table, argv, kills=100, counts="audits")


if __name__ == "__main__":
    raise SystemExit(main())
