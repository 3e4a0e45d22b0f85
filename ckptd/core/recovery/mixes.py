"""Combinations of holders for the parts of a damaged range (pure).

A tensor of several parts has one digest, which shows that something is wrong but not where. If each part
is good at some holder, some combination of holders is correct. Likely combinations come first: all parts
from one holder; all but one part from one holder, which repairs a copy with one flipped bit; and so on.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Hashable, Iterator, Sequence
from typing import TypeVar

__all__ = ["MIXES", "next_mix"]

# Combinations per range. Each costs a pass over the image (0.1 s per 2 GB), and all of them are tried
# only if a recovery would fail otherwise. The limit covers all combinations for up to 7 parts of 2
# holders (56 MiB), 4 of 3, 3 of 4 or 5; and one damaged part in each of two copies of a tensor of 60
# parts (480 MiB).
MIXES = 128
_LOOKED_AT = 8 * MIXES  # `_mixes` yields a combination of n holders up to n times

Holder = TypeVar("Holder", bound=Hashable)


def next_mix(
    cannot: Sequence[Container[Holder]],
    holders: Sequence[Holder],
    tried: Collection[tuple[Holder, ...]],
) -> tuple[Holder, ...] | None:
    """The holder of each part in the next combination; None if none is left, or too many were tried.

    Args:
        cannot: by part, the holders that cannot deliver it.
        holders: the remaining holders.
        tried: the combinations that were wrong.
    """
    if len(cannot) < 2 or len(tried) >= MIXES:
        return None  # for a single part each holder was tried already
    for mix in itertools.islice(_mixes(len(cannot), holders), _LOOKED_AT):
        if mix not in tried and not any(n in not_ for n, not_ in zip(mix, cannot, strict=True)):
            return mix
    return None


def _mixes(num_parts: int, holders: Sequence[Holder]) -> Iterator[tuple[Holder, ...]]:
    """All combinations, ordered by the number of parts that do not come from the main holder; with
    duplicates.
    """
    for num_others in range(num_parts + 1 if len(holders) > 1 else 1):
        for holder in holders:
            others = [other for other in holders if other != holder]
            for places in itertools.combinations(range(num_parts), num_others):
                for chosen in itertools.product(others, repeat=num_others):
                    mix = [holder] * num_parts
                    for place, other in zip(places, chosen, strict=True):
                        mix[place] = other
                    yield tuple(mix)
