"""Many schedules of `tests.simulation.replication_world`, and one in twenty as many of each row of
`tests.simulation.special_worlds`.

``python -m tests.simulation.campaign --schedules 10000 --seed 0 [--processes 2]`` prints a line per
thousand; a seed that breaks a promise is printed with its trace, and the rest is still played: one
night tells all of them. ``--schedules 1 --seed N`` replays seed N exactly.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context

from ckptd.core.state_machine import validate_always
from tests.simulation.replication_world import play
from tests.simulation.special_worlds import ROWS, play_row

__all__ = ["main"]


_ROWS_SHARE = 20
_PRICE = ("losses asked", "skipped", "snapshots")


def _played(seed: int) -> tuple[int, Counter[str], str]:
    """The seed, what it showed, and how it failed ("" if it did not)."""
    try:
        seen = play(seed).seen
        if seed % _ROWS_SHARE == 0:
            for row in ROWS:
                told = play_row(seed // _ROWS_SHARE, row).seen
                seen.update({f"{row}: {what}": told[what] for what in _PRICE})
        return seed, seen, ""
    except Exception:  # noqa: BLE001 - whatever went wrong belongs to this seed, and is printed with it
        return seed, Counter(), traceback.format_exc()


def main(arguments: Sequence[str] | None = None) -> int:
    """Play them; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    seeds = range(options.seed, options.seed + options.schedules)
    seen: Counter[str] = Counter()
    broken: list[int] = []
    with get_context("spawn").Pool(options.processes, validate_always) as pool:
        for number, (seed, shown, failure) in enumerate(pool.imap(_played, seeds, 8), start=1):
            if failure:
                broken.append(seed)
                sys.stdout.write(f"{failure}\nseed {seed} breaks a promise\n")
                sys.stdout.flush()
            seen.update(shown)
            if number % 1000 == 0 or number == len(seeds):
                told = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
                sys.stdout.write(f"{number} schedules, seed {seed}: {told}\n")
                sys.stdout.flush()
    if broken:
        sys.stdout.write(f"{len(broken)} of {len(seeds)} schedules break a promise: seeds {broken}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
