"""What of a snapshot was wrong in whose copy, and from where it was taken in the end: for events
(docs/replication.md §7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.recovery.striping import ImagePart, Span
from ckptd.restore.fetched_image import Wrong
from ckptd.transport.messages import FetchSource

__all__ = ["WHOLE_IMAGE", "Repairs"]

WHOLE_IMAGE = "the image"  # is wrong, and it is not known where
_TOLD = 4
_Nodes = tuple[str, ...]


@dataclass(slots=True)
class _Repair:
    """One tensor: where it lies, and whose copies of it were wrong."""

    span: Span
    wrong_in: list[str] = field(default_factory=list)


class Repairs:
    """Of one snapshot.

    Args:
        us: this node's name.
    """

    def __init__(self, iteration: int, us: str) -> None:
        self._iteration, self._us = iteration, us
        self._repairs: dict[str, _Repair] = {}
        self._accused: dict[FetchSource, None] = {}

    def found(self, wrong: Iterable[Wrong], blamed: Mapping[Span, Sequence[FetchSource]]) -> str:
        """One verification's outcome, and who had brought each range; returns what to tell of it."""
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
        told = "; ".join(_wrong(names, nodes, told=_TOLD) for nodes, names in by_copies.items())
        return f"iteration {self._iteration}: {told}; fetched from other copies"

    def mended(self, bringers: Callable[[Span], Sequence[FetchSource]]) -> str:
        """What to tell when all is right; "" if nothing was wrong."""
        groups: dict[tuple[_Nodes, _Nodes], list[str]] = {}
        for name, repair in self._repairs.items():
            key = tuple(repair.wrong_in), self._nodes(bringers(repair.span))
            groups.setdefault(key, []).append(name)
        told = [
            f"{_wrong(names, wrong_in)}; taken from {_from(taken, wrong_in)}"
            for (wrong_in, taken), names in groups.items()
        ]
        return f"iteration {self._iteration}: " + "; ".join(told) if told else ""

    def hopeless(self, parts: Sequence[ImagePart]) -> str:
        """What cannot be had, if these parts cannot; "" if it was never wrong, only lost."""
        names = [
            name
            for name, repair in self._repairs.items()
            if any(p.start < repair.span[1] and repair.span[0] < p.stop for p in parts)
        ]
        return f"; in no copy that was reached is {_listed(names, _TOLD)} right" if names else ""

    def named(self, sources: Iterable[FetchSource]) -> str:
        """Their nodes, each once."""
        return ", ".join(self._nodes(sources))

    def accuse(self, sources: Iterable[FetchSource]) -> None:
        """Their copies may be wrong, though they brought nothing."""
        self._accused |= dict.fromkeys(sources)

    def accused(self) -> list[FetchSource]:
        """The copies in which something was wrong, or may have been; each is named once."""
        found = list(self._accused)
        self._accused.clear()
        return found

    def _nodes(self, sources: Iterable[FetchSource]) -> _Nodes:
        called = {STORE_NODE: "storage", self._us: "this node"}
        return tuple(dict.fromkeys(called.get(source.node, source.node) for source in sources))


def _wrong(names: Sequence[str], nodes: _Nodes, *, told: int = 0) -> str:
    if list(names) in (["header"], [WHOLE_IMAGE]):
        what = "the header" if names[0] == "header" else WHOLE_IMAGE
        does = "does"
    else:
        what = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
        does = "does" if len(names) == 1 else "do"
        what += f" ({_listed(names, told)})" if told else ""
    whose = " and ".join(f"{node}'s" for node in nodes)
    told_of = " what is vouched for" if what == WHOLE_IMAGE else ""
    return f"{what} of {whose} {'copy' if len(nodes) == 1 else 'copies'} {does} not match{told_of}"


def _from(taken: _Nodes, wrong_in: _Nodes) -> str:
    found = [f"another copy on {node}" if node in wrong_in else node for node in taken]
    return " and ".join(found)


def _listed(names: Sequence[str], limit: int) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")
