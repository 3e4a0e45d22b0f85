"""A fetched image: what is wrong, what holders vouch for, whose copy was bad (docs/replication.md §7)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.recovery.striping import ImagePart, Span
from ckptd.core.slots.segment_format import SlotHeader, slot_lock_byte
from ckptd.core.slots.slots import SlotState
from ckptd.memory import locks
from ckptd.memory.pages import copy_bytes
from ckptd.memory.segment_file import Segment
from ckptd.storage.image import DigestMap, Mismatch, mismatches
from ckptd.storage.strong_digest import matches
from ckptd.transport.messages import FetchSource

# Ranges that one verification reports. Each is fetched by a request of its own, and a copy that is
# wrong in more places is hardly one of this snapshot.
_MAX_RANGES = 1024
_WITH_IMAGE = (SlotState.SEALED, SlotState.QUARANTINED)


@dataclass(frozen=True, slots=True)
class Wrong:
    """Bytes ``[start, stop)`` of an image that do not match, and their tensors (or "header")."""

    start: int
    stop: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Examined:
    """What is wrong by xxh3 digests; if nothing is, the cryptographic digests that match."""

    wrong: Sequence[Wrong]
    matching: frozenset[str] = frozenset()


def examine(
    image: memoryview,
    header_digest: bytes,
    digests: Sequence[str],
    map_fn: DigestMap | None,
    threads: int,
) -> Examined:
    """Compare an image with all its digests.

    Raises:
        ImageError: as `wrong_ranges`.
    """
    wrong = wrong_ranges(image, header_digest, map_fn)
    if wrong:
        return Examined(wrong)
    return Examined((), frozenset(d for d in digests if matches(image, d, threads=threads)))


def copy_parts(
    source: Segment, slot: int, wanted: SlotHeader, target: memoryview, parts: Sequence[ImagePart]
) -> bool:
    """Copy parts of a slot of this node, even damaged ones; false if it holds another snapshot."""
    with locks.lock_file(source.path, slot_lock_byte(slot), exclusive=False) as taken:
        header = source.header(slot)
        if (
            not taken
            or header is None
            or header.state not in _WITH_IMAGE
            or header.header_digest != wanted.header_digest
            or header.image_len != wanted.image_len
        ):
            return False
        image = source.image(slot, header)
        for part in parts:
            copy_bytes(target[part.start : part.stop], image[part.start : part.stop])
    return True


def wrong_ranges(image: memoryview, header_digest: bytes, map_fn: DigestMap | None) -> list[Wrong]:
    """The ranges of an image that do not match its digests, in order and disjoint.

    At most 1024: then ranges are joined, with the bytes between them.

    Raises:
        ImageError: the bytes are not an image that fits here.
    """
    return _bounded(mismatches(image, header_digest, map_fn=map_fn), _MAX_RANGES)


def _bounded(found: Sequence[Mismatch], limit: int) -> list[Wrong]:
    """Join ranges until there are ``limit`` at most; the widest gaps stay."""
    if len(found) <= limit:
        return [_joined([one]) for one in found]
    gaps = [after.start - before.stop for before, after in itertools.pairwise(found)]
    cuts = sorted(heapq.nlargest(limit - 1, range(len(gaps)), key=gaps.__getitem__))
    edges = [0, *(cut + 1 for cut in cuts), len(found)]
    return [_joined(found[a:b]) for a, b in itertools.pairwise(edges)]


def _joined(found: Sequence[Mismatch]) -> Wrong:
    return Wrong(found[0].start, found[-1].stop, tuple(one.name for one in found))


class Vouching(Enum):
    """The verdict on an image whose xxh3 digests match."""

    GOOD = "good"
    WRONG = "wrong"  # its holders vouch for another digest
    DISPUTED = "disputed"  # as many nodes vouch for it as for another digest


class Vouchers:
    """The cryptographic digests that holders of one snapshot vouch for. Pure.

    A digest comes from a holder over the control session, from the manifest of a stored checkpoint,
    or from what this node kept with a copy of its own. xxh3 digests travel with the bytes and can
    be made to fit them; these cannot.

    Args:
        us: this node's name. A digest that it kept itself decides.
    """

    def __init__(self, us: str) -> None:
        self._us = us
        self._digest_of: dict[FetchSource, str] = {}

    def tell(self, source: FetchSource, digest: str) -> None:
        """A source vouches for this digest; "": for none."""
        self._digest_of[source] = digest

    def lacks(self, sources: Iterable[FetchSource]) -> list[FetchSource]:
        return [source for source in sources if source not in self._digest_of]

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(digest for digest in self._digest_of.values() if digest))

    def verdict(self, matching: Collection[str]) -> Vouching:
        """The verdict on an image with the digests ``matching``; nodes are counted, not copies."""
        own = {digest for source, digest in self._digest_of.items() if digest and source.node == self._us}
        if own:
            return Vouching.GOOD if own & {*matching} else Vouching.WRONG
        agree = {source.node for source, digest in self._digest_of.items() if digest in matching}
        vouching = {source.node for source, digest in self._digest_of.items() if digest}
        differ = vouching - agree
        if len(agree) != len(differ):
            return Vouching.GOOD if len(agree) > len(differ) else Vouching.WRONG
        return Vouching.DISPUTED if agree else Vouching.GOOD

    def against(self, matching: Collection[str]) -> list[FetchSource]:
        """The sources that vouch for another digest."""
        return [s for s, digest in self._digest_of.items() if digest and digest not in matching]

    def vouching(self, matching: Collection[str]) -> list[FetchSource]:
        return [source for source, digest in self._digest_of.items() if digest in matching]


WHOLE_IMAGE = "the image"  # stands for all of it, where the wrong bytes are not known
_LISTED = 4
_Nodes = tuple[str, ...]


@dataclass(slots=True)
class _Repair:
    """One tensor: its bytes, and the nodes whose copies of it were wrong."""

    span: Span
    wrong_in: list[str] = field(default_factory=list)


class Repairs:
    """What was wrong with one snapshot, in whose copies, and who delivered it in the end; as texts of events.

    Args:
        us: this node's name.
    """

    def __init__(self, iteration: int, us: str) -> None:
        self._iteration, self._us = iteration, us
        self._repairs: dict[str, _Repair] = {}
        self._accused: dict[FetchSource, None] = {}

    def found(self, wrong: Iterable[Wrong], blamed: Mapping[Span, Sequence[FetchSource]]) -> str:
        """Note a verification's outcome and the sources of each wrong range; returns the text of an event."""
        by_copies: dict[_Nodes, list[str]] = {}
        for each in wrong:
            span = each.start, each.stop
            nodes = self._nodes(blamed.get(span, ()))
            by_copies.setdefault(nodes, []).extend(each.names)
            for name in each.names:
                repair = self._repairs.setdefault(name, _Repair(span))
                repair.span = span
                repair.wrong_in += [node for node in nodes if node not in repair.wrong_in]
        for sources in blamed.values():
            self._accused |= dict.fromkeys(sources)
        wrongs = "; ".join(_wrong(names, nodes, listed=_LISTED) for nodes, names in by_copies.items())
        return f"iteration {self._iteration}: {wrongs}; fetched from other copies"

    def mended(self, bringers: Callable[[Span], Sequence[FetchSource]]) -> str:
        """The text of the event when the snapshot is sealed; "" if nothing was wrong."""
        groups: dict[tuple[_Nodes, _Nodes], list[str]] = {}
        for name, repair in self._repairs.items():
            key = tuple(repair.wrong_in), self._nodes(bringers(repair.span))
            groups.setdefault(key, []).append(name)
        texts = [
            f"{_wrong(names, wrong_in)}; taken from {_from(taken, wrong_in)}"
            for (wrong_in, taken), names in groups.items()
        ]
        return f"iteration {self._iteration}: " + "; ".join(texts) if texts else ""

    def hopeless(self, parts: Sequence[ImagePart]) -> str:
        """What is right in no copy, if no source has these parts; "" if they were lost, but never wrong."""
        names = [
            name
            for name, repair in self._repairs.items()
            if any(p.start < repair.span[1] and repair.span[0] < p.stop for p in parts)
        ]
        return f"; in no copy that was reached is {_listed(names, _LISTED)} right" if names else ""

    def named(self, sources: Iterable[FetchSource]) -> str:
        return ", ".join(self._nodes(sources))

    def accuse(self, sources: Iterable[FetchSource]) -> None:
        """Their copies may be wrong, although they delivered nothing."""
        self._accused |= dict.fromkeys(sources)

    def accused(self) -> list[FetchSource]:
        """The copies that are wrong, or may be; each is returned once."""
        found = list(self._accused)
        self._accused.clear()
        return found

    def _nodes(self, sources: Iterable[FetchSource]) -> _Nodes:
        called = {STORE_NODE: "storage", self._us: "this node"}
        return tuple(dict.fromkeys(called.get(source.node, source.node) for source in sources))


def _wrong(names: Sequence[str], nodes: _Nodes, *, listed: int = 0) -> str:
    if list(names) in (["header"], [WHOLE_IMAGE]):
        what = "the header" if names[0] == "header" else WHOLE_IMAGE
        does = "does"
    else:
        what = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
        does = "does" if len(names) == 1 else "do"
        what += f" ({_listed(names, listed)})" if listed else ""
    whose = " and ".join(f"{node}'s" for node in nodes)
    vouched = " what is vouched for" if what == WHOLE_IMAGE else ""
    return f"{what} of {whose} {'copy' if len(nodes) == 1 else 'copies'} {does} not match{vouched}"


def _from(taken: _Nodes, wrong_in: _Nodes) -> str:
    found = [f"another copy on {node}" if node in wrong_in else node for node in taken]
    return " and ".join(found)


def _listed(names: Sequence[str], limit: int) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")
