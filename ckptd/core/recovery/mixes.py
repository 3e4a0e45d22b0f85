"""Which holder brings which part of a range that is wrong as a whole (pure).

A tensor of several parts has one digest: it says that something is wrong, not where. If each part
is good at some holder, some combination of holders is right. Those that are likely come first: all
of one holder; all of one but for one part, which is what mends a copy with one flipped bit; and so
on.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Hashable, Iterator, Sequence
from typing import TypeVar

__all__ = ["MIXES", "next_mix"]

# Combinations per range. Each costs a pass over the image (0.1 s per 2 GB), and all of them are
# tried only where a recovery would fail otherwise. It is all there are for up to 7 parts of 2
# holders (56 MiB), 4 of 3, 3 of 4 or 5; and for one damaged part in each of two copies of a tensor
# of 60 parts (480 MiB).
MIXES = 128
_LOOKED_AT = 8 * MIXES  # `_mixes` yields those of n holders up to n times

Holder = TypeVar("Holder", bound=Hashable)


def next_mix(
    cannot: Sequence[Container[Holder]],
    holders: Sequence[Holder],
    tried: Collection[tuple[Holder, ...]],
) -> tuple[Holder, ...] | None:
    """Who is to bring each part in the next try; None if there is no other, or there were too many.

    Args:
        cannot: by part, who cannot bring it.
        holders: those that are left.
        tried: what was wrong before.
    """
    if len(cannot) < 2 or len(tried) >= MIXES:
        return None  # of a single part each holder was asked by itself
    for mix in itertools.islice(_mixes(len(cannot), holders), _LOOKED_AT):
        if mix not in tried and not any(n in not_ for n, not_ in zip(mix, cannot, strict=True)):
            return mix
    return None


def _mixes(num_parts: int, holders: Sequence[Holder]) -> Iterator[tuple[Holder, ...]]:
    """All of them, by how many parts are not of the holder that has the others; some more than once."""
    for num_others in range(num_parts + 1 if len(holders) > 1 else 1):
        for holder in holders:
            others = [other for other in holders if other != holder]
            for places in itertools.combinations(range(num_parts), num_others):
                for chosen in itertools.product(others, repeat=num_others):
                    mix = [holder] * num_parts
                    for place, other in zip(places, chosen, strict=True):
                        mix[place] = other
                    yield tuple(mix)
