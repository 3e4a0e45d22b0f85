"""The command line that campaigns have in common."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

__all__ = ["play"]


class Judged(Protocol):
    """A round of a campaign."""

    failures: list[str]


_Round = TypeVar("_Round", bound=Judged)
_Campaign = Callable[[int, int, Path, Callable[[str], object]], list[_Round]]


def play(
    name: str,
    campaign: _Campaign[_Round],
    table: Callable[[Sequence[_Round]], str],
    argv: Sequence[str] | None,
    *,
    kills: int,
    counts: str = "kills",
) -> int:
    """Run a campaign with ``--kills`` and ``--seed``; 1 if anything was not as it has to be.

    Args:
        name: of the module.
        kills: if none are given.
        counts: what the campaign does so many of, and the name of the option.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}")
    parser.add_argument(f"--{counts}", dest="number", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20))
    args = parser.parse_args(argv)
    say = sys.stdout.write
    say(f"seed {args.seed}; --seed {args.seed} repeats the choices\n")
    with tempfile.TemporaryDirectory(prefix="ckptd-campaign-") as folder:
        rounds = campaign(args.number, args.seed, Path(folder), say)
    say(table(rounds) + "\n")
    return 1 if any(found.failures for found in rounds) else 0
