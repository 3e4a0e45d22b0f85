"""What a demo prints on its way, and how it ends."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

__all__ = ["Progress", "failed", "seed_of"]


class Progress:
    """Live lines with the time since the start."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._begun

    def say(self, text: str) -> None:
        print(f"[{self.seconds:6.1f} s] {text}", flush=True)


def seed_of(given: int | None) -> int:
    """The seed that was given, or a random one."""
    return given if given is not None else random.SystemRandom().randrange(10**6)


def failed(problems: Sequence[str], what: str) -> int:
    """Print what is wrong, and the first problems; the exit code."""
    print(f"\nFAILED: {what}:")
    for line in problems[:20]:
        print(f"  {line}")
    return 1
