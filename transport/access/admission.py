"""Which connections may stay: pure decisions about accepted connections, for every port that others can
reach.

A visitor is a STRANGER until it has shown who it is, then KNOWN, and GONE in the end. Strangers are bounded
in number, for each address and together, and in time. The one that has been silent for longest makes room for
a new one, so visitors that identify themselves at once come in whatever others do. A visitor that is expected
(it was given a ticket) does not compete with strangers.

A visitor that was turned away counts until its owner reports that it is gone: until then it has a descriptor.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, ip_address
from typing import Self

MAX_SOURCES = 4096  # addresses whose rate is remembered
IPV6_SITE = (1 << 128) - (1 << 64)  # whoever has one address of a /64 has all of them


class TurnReason(StrEnum):
    """Why a visitor may not stay; ``text`` is for the log."""

    text: str

    def __new__(cls, value: str, text: str) -> Self:
        member = str.__new__(cls, value)
        member._value_, member.text = value, text
        return member

    RATE = "rate", "too many new connections from this address"
    # The oldest one of the address goes.
    ADDRESS = "address", "too many connections from this address have not identified themselves"
    # There are too many, or no room for one more: the oldest one of the address with most goes.
    STRANGERS = "strangers", "too many connections have not identified themselves"
    SILENT = "silent", "it did not identify itself in time"
    FULL = "full", "the port has no room for more connections"  # and no stranger to close
    PEER = "peer", "its node has too many connections; the oldest was closed"


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of one port."""

    connections: int = 4096
    """Visitors in any state: the port's share of the process's descriptors."""

    strangers: int = 256
    """Strangers that are not expected."""

    strangers_per_address: int = 64
    """Of these, from one address. Several nodes may share an address; a handshake takes milliseconds."""

    arrivals_per_s: float = 100.0
    """From one address. A handshake costs a third of a millisecond of processor time."""

    arrivals_burst: float = 200.0
    """From one address at once, after a quiet time."""

    per_peer: int = 64
    """Known visitors of one node: four of its lives with sixteen connections each."""

    patience_s: float = 5.0
    """How long a visitor may be a stranger."""


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A visitor that has to go."""

    visitor: Hashable
    source: str
    reason: TurnReason


@dataclass(slots=True)
class _Visit:
    source: str
    since_s: float
    expected: bool
    node: str = ""


class Admission:
    """The visitors of one port. Methods that return `TurnedAway` leave it to the owner to disconnect them."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._strangers: OrderedDict[Hashable, _Visit] = OrderedDict()  # the oldest first
        self._known: OrderedDict[Hashable, _Visit] = OrderedDict()
        self._leaving: set[Hashable] = set()
        self._unexpected: Counter[str] = Counter()  # strangers by address
        self._per_node: Counter[str] = Counter()
        self._rates: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens left, and when

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known) + len(self._leaving)

    def is_stranger(self, visitor: Hashable) -> bool:
        return visitor in self._strangers

    def arrived(self, visitor: Hashable, source: str, *, now_s: float, expected: int = 0) -> list[TurnedAway]:
        """A visitor connected. ``expected``: how many strangers may come from this address because they have
        tickets.
        """
        if expected and self._expected_from(source) < expected:
            self._strangers[visitor] = _Visit(source, now_s, True)
            return []
        if not self._in_time(source, now_s):
            return [self._turned(visitor, source, TurnReason.RATE)]
        full = len(self) >= self._limits.connections
        if full and not self._unexpected:
            return [self._turned(visitor, source, TurnReason.FULL)]
        self._strangers[visitor] = _Visit(source, now_s, False)
        self._unexpected[source] += 1
        if self._unexpected[source] > self._limits.strangers_per_address:
            return [self._turn_oldest(source, TurnReason.ADDRESS)]
        if full or self._unexpected.total() > self._limits.strangers:
            most = max(self._unexpected, key=self._unexpected.__getitem__)
            return [self._turn_oldest(most, TurnReason.STRANGERS)]
        return []

    def identified(self, visitor: Hashable, node: str) -> list[TurnedAway]:
        """A stranger has shown that it belongs to ``node``."""
        visit = self._remove_stranger(visitor)
        if visit is None:
            return []
        visit.node = node
        self._known[visitor] = visit
        self._per_node[node] += 1
        if self._per_node[node] <= self._limits.per_peer:
            return []
        oldest = next(key for key, other in self._known.items() if other.node == node)
        source = self._known[oldest].source
        self._remove_known(oldest)
        return [self._turned(oldest, source, TurnReason.PEER)]

    def gone(self, visitor: Hashable) -> bool:
        """A connection is closed; returns whether it was a stranger that had not been turned away."""
        self._leaving.discard(visitor)
        self._remove_known(visitor)
        return self._remove_stranger(visitor) is not None

    def overdue(self, now_s: float) -> list[TurnedAway]:
        """Strangers whose time is over."""
        found = []
        for visitor, visit in list(self._strangers.items()):
            if now_s - visit.since_s < self._limits.patience_s:
                break
            self._remove_stranger(visitor)
            found.append(self._turned(visitor, visit.source, TurnReason.SILENT))
        return found

    def due_s(self, now_s: float) -> float:
        """Seconds until a stranger is overdue."""
        for visit in self._strangers.values():
            return max(0.0, visit.since_s + self._limits.patience_s - now_s)
        return float("inf")

    # --- the table ---

    def _expected_from(self, source: str) -> int:
        return sum(v.expected and v.source == source for v in self._strangers.values())

    def _turn_oldest(self, source: str, reason: TurnReason) -> TurnedAway:
        oldest = next(key for key, v in self._strangers.items() if v.source == source and not v.expected)
        self._remove_stranger(oldest)
        return self._turned(oldest, source, reason)

    def _turned(self, visitor: Hashable, source: str, reason: TurnReason) -> TurnedAway:
        self._leaving.add(visitor)
        return TurnedAway(visitor, source, reason)

    def _remove_stranger(self, visitor: Hashable) -> _Visit | None:
        visit = self._strangers.pop(visitor, None)
        if visit is not None and not visit.expected:
            _decrement(self._unexpected, visit.source)
        return visit

    def _remove_known(self, visitor: Hashable) -> None:
        visit = self._known.pop(visitor, None)
        if visit is not None:
            _decrement(self._per_node, visit.node)

    def _in_time(self, source: str, now_s: float) -> bool:
        """Take one token of an address; tokens come back with time."""
        tokens, at_s = self._rates.pop(source, (self._limits.arrivals_burst, now_s))
        tokens += max(0.0, now_s - at_s) * self._limits.arrivals_per_s
        tokens = min(self._limits.arrivals_burst, tokens)
        good = tokens >= 1
        self._rates[source] = (tokens - good, now_s)
        if len(self._rates) > MAX_SOURCES:
            self._rates.popitem(last=False)
        return good


def _decrement(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]


def source_of(host: str) -> str:
    """The unit that limits apply to: an IPv4 address, or the /64 of an IPv6 address. Any other host is
    returned as it is.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{ip_address(int(address) & IPV6_SITE)}/64"
