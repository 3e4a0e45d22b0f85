"""What is vouched for of a snapshot on its way here: the cryptographic digests that its holders
told, and what follows from them.

A digest comes from a holder over the control session, from the manifest of a stored checkpoint, or
from what this node kept beside a copy of its own. xxh3 digests travel with the bytes and can be
made to fit them; these cannot. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

from ckptd.transport.messages import FetchSource

__all__ = ["Vouchers", "Vouching"]


class Vouching(Enum):
    """What to make of an image whose xxh3 digests match."""

    GOOD = "good"
    WRONG = "wrong"  # it is not what is vouched for
    DISPUTED = "disputed"  # as many nodes vouch for it as vouch for something else


class Vouchers:
    """Of one snapshot.

    Args:
        us: this node's name. What it kept itself decides.
    """

    def __init__(self, us: str) -> None:
        self._us = us
        self._told: dict[FetchSource, str] = {}

    def tell(self, source: FetchSource, digest: str) -> None:
        """What this source vouches for; "": for nothing."""
        self._told[source] = digest

    def lacks(self, sources: Iterable[FetchSource]) -> list[FetchSource]:
        """Those of which it was not told yet."""
        return [source for source in sources if source not in self._told]

    @property
    def digests(self) -> tuple[str, ...]:
        """All that are vouched for, each once."""
        return tuple(dict.fromkeys(digest for digest in self._told.values() if digest))

    def verdict(self, matching: Collection[str]) -> Vouching:
        """On an image that has the digests ``matching``, of `digests`. Nodes are counted, not copies."""
        own = {digest for source, digest in self._told.items() if digest and source.node == self._us}
        if own:
            return Vouching.GOOD if own & {*matching} else Vouching.WRONG
        agree = {source.node for source, digest in self._told.items() if digest in matching}
        vouching = {source.node for source, digest in self._told.items() if digest}
        differ = vouching - agree
        if len(agree) != len(differ):
            return Vouching.GOOD if len(agree) > len(differ) else Vouching.WRONG
        return Vouching.DISPUTED if agree else Vouching.GOOD

    def against(self, matching: Collection[str]) -> list[FetchSource]:
        """Who vouches for something else than an image that has the digests ``matching``."""
        return [s for s, digest in self._told.items() if digest and digest not in matching]

    def vouching(self, matching: Collection[str]) -> list[FetchSource]:
        """Who vouches for it."""
        return [source for source, digest in self._told.items() if digest in matching]
