"""Numbers and names in messages. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

__all__ = ["first_of", "named_ranks", "ranges"]


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ascending ranges: 1, 3 to 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs)


def named_ranks(ranks: Collection[int]) -> str:
    """Ranks in words: rank 1; ranks 1, 3 to 7."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def first_of(names: Sequence[str], limit: int) -> str:
    """The first names, and the number of others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
