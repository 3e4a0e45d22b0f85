"""The warnings of a placement, in sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ckptd.core.placement.bundles import Bundle
from ckptd.core.placement.nodes import fair_share
from ckptd.core.placement.spreading import Spreading
from ckptd.units import format_bytes

__all__ = ["warnings_of"]

_WARNINGS_MAX = 32


def warnings_of(spreading: Spreading, replicas: int, domains: tuple[str, ...]) -> tuple[str, ...]:
    """The missing guarantees, one sentence for all affected ranks."""
    about: dict[str, list[int]] = defaultdict(list)
    for bundle in spreading.bundles:
        for text in _shortcomings(spreading, bundle, replicas, domains):
            about[text] += [facts.rank for facts in bundle.ranks]
    lines = [(sorted(ranks), text) for text, ranks in about.items()]
    texts = [f"{_some('rank', ranks)}: {text}" for ranks, text in sorted(lines)]
    if spreading.skipped:
        names = sorted(spreading.ring.names[position] for position in spreading.skipped)
        texts.insert(
            0,
            f"{_some('node', names)}: skipped, because the capacity is too small for some replicas",
        )
    texts[:0] = _uneven(spreading)
    if len(texts) > _WARNINGS_MAX:
        more = len(texts) - _WARNINGS_MAX + 1
        texts[_WARNINGS_MAX - 1 :] = [f"and {more} more warnings like these"]
    return tuple(texts)


def _uneven(spreading: Spreading) -> Iterator[str]:
    """A warning if domains or nodes with many ranks give a node more than twice its share."""
    most = max(spreading.load, default=0)
    share = fair_share(sum(spreading.load), spreading.ring.capacity)
    if most > 2 * share + spreading.largest:
        name = spreading.ring.names[spreading.load.index(most)]
        yield (
            f"node {name}: receives {format_bytes(most)}, the even share is {format_bytes(share)}, "
            "because few nodes are in other domains; set a capacity to limit it"
        )


def _shortcomings(
    spreading: Spreading, bundle: Bundle, replicas: int, domains: tuple[str, ...]
) -> Iterator[str]:
    ring, members = spreading.ring, bundle.members
    if len(members) <= replicas:
        usable = len(ring.names)
        why = f"only {usable} nodes are usable" if usable <= replicas else "no other node has room"
        yield f"{len(members) - 1} of {replicas} replicas; {why}"
    for level, label in enumerate(domains):
        keys = [ring.keys[member][level] for member in members]
        shared = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
        if shared is not None:
            distinct = len(set(keys))
            room = "" if distinct == ring.num_domains[level] else " with room"
            yield (
                f"no {_ordinal(distinct + 1)} {label}{room}; "
                f"a replica shares {label} {ring.domain_name[shared]}"
            )


def _ordinal(number: int) -> str:
    words = ("first", "second", "third", "fourth")
    return words[number - 1] if number <= len(words) else f"{number}th"


def _some(noun: str, items: Sequence[object]) -> str:
    """The first items by name, and the total number."""
    if len(items) == 1:
        return f"{noun} {items[0]}"
    shown = ", ".join(map(str, items[:4]))
    return f"{noun}s {shown}" + (f", … ({len(items)} in all)" if len(items) > 4 else "")
