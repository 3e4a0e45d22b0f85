"""Who this trainer is: job, run, rank, world size; from arguments or torchrun's environment."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Identity", "identify"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Identity:
    """``(job, run, rank)`` names one trainer's memory; ``world_size`` fences it."""

    job: str
    run: str
    rank: int
    world_size: int

    def metadata(self) -> dict[str, str]:
        """As written into every image."""
        return {
            "job": self.job,
            "run": self.run,
            "rank": str(self.rank),
            "world_size": str(self.world_size),
        }


def identify(
    job: str | None, run: str | None, rank: int | None, world_size: int | None
) -> Identity:
    """Complete what was given from torchrun's environment (``RANK``, ``WORLD_SIZE``, ``TORCHELASTIC_RUN_ID``).

    Without either, the job is named after the script and the run is ``default``.

    Raises:
        ValueError: a name has other characters than letters, digits, ``.``, ``_`` and ``-``, or a number is out of range.
    """
    script = Path(sys.argv[0] or "python").stem or "python"
    job = job if job is not None else (re.sub(r"[^A-Za-z0-9._-]", "-", script)[:64] or "python")
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "")
    run = (
        run
        if run is not None
        else (
            re.sub(r"[^A-Za-z0-9._-]", "-", elastic)[:64]
            if elastic not in ("", "none")
            else "default"
        )
    )
    for what, name in (("job", job), ("run", run)):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{what}={name!r}: use 1 to 64 letters, digits, '.', '_' or '-'")
    rank = rank if rank is not None else _number("RANK", 0)
    world_size = world_size if world_size is not None else _number("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not in [0, world_size={world_size})")
    return Identity(job, run, rank, world_size)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {variable} is {text!r}, not a number") from None
