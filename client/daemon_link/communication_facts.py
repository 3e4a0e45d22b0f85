"""What a rank communicates with in a step, kept with its boundary log: who recovers together with whom.

The facts lie in the ``client`` payload of the log segment's descriptor, beside ``data_offset``, so
that they are there when the process is gone. When they change, a log of the next generation is
asked for: those of the newest generation count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckptd.client import values
from ckptd.client.model.communication import Communication

__all__ = [
    "LogFacts",
    "data_offset_of",
    "facts_of",
    "find_facts",
    "log_payload",
    "recorded_facts",
]


@dataclass(frozen=True, slots=True)
class LogFacts:
    """Of one rank, with the reasons that its log tells people (plans go by ``RankFacts``); all
    ranks are numbers in the job, sorted.

    Attributes:
        neighbours: with whom it exchanges what is logged.
        domain: itself, and with whom it communicates otherwise within a step, as far as it knows by
            itself: who is joined by way of a third rank is joined, too, which only the facts of all
            ranks tell.
        alike: other ranks with which it has all operators alike.
        reasons: why others are in the domain, for people.
    """

    neighbours: tuple[int, ...] = ()
    domain: tuple[int, ...] = ()
    alike: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()

    def same_as(self, other: LogFacts) -> bool:
        """Whether both mean the same for a recovery, whatever their reasons are."""
        return (self.neighbours, self.domain, self.alike) == (
            other.neighbours,
            other.domain,
            other.alike,
        )

    def warnings(self) -> list[str]:
        """Why this rank recovers together with ranks on the other side of a boundary, and what to
        do about it.
        """
        both = sorted(set(self.neighbours) & set(self.domain))
        if not both:
            return []
        ranks = ", ".join(map(str, both))
        what = f"never apart from rank {ranks}, though a boundary is logged"
        todo = (
            "What all ranks compute together (a gradient norm, a loss to show) goes into "
            "ckpt.shared_value(name, compute); "
            "sends and receives are told to the log (dest=, source=)"
        )
        return [f"localized recovery: {what}: {'; '.join(self.reasons)}. {todo}"]


def find_facts(
    rank: int, communication: Communication | None, alike: Iterable[int], known: LogFacts | None
) -> LogFacts | None:
    """What is known by now, together with what an earlier trainer has told; None before a step was seen."""
    if communication is None or not communication.observed:
        return known
    before = known or LogFacts()
    joined = communication.joined
    reasons = dict.fromkeys([*before.reasons, *(joined[rank] for rank in sorted(joined))])
    return LogFacts(
        tuple(sorted({*before.neighbours, *communication.neighbours})),
        tuple(sorted({*before.domain, *joined, rank})),
        tuple(sorted(alike)),
        tuple(reasons),
    )


def recorded_facts(payloads: Iterable[bytes]) -> LogFacts | None:
    """The facts of a rank whose logs have these payloads, oldest generation first."""
    found = [facts for payload in payloads if (facts := facts_of(payload)) is not None]
    return found[-1] if found else None


def log_payload(data_offset: int, facts: LogFacts | None) -> bytes:
    """The ``client`` payload of a log segment; None: nothing is known, and nobody recovers apart."""
    payload: dict[str, Any] = {"data_offset": data_offset}
    if facts is not None:
        payload["facts"] = {
            "neighbours": list(facts.neighbours),
            "domain": list(facts.domain),
            "alike": list(facts.alike),
            "reasons": list(facts.reasons),
        }
    return values.pack(payload, "boundary log")


def data_offset_of(payload: bytes) -> int:
    """Where records begin in the slots of a log."""
    return int(values.unpack(payload)["data_offset"])


def facts_of(payload: bytes) -> LogFacts | None:
    """The facts of a log's payload; None if it was written by a version that kept none."""
    found: dict[str, Any] | None = values.unpack(payload).get("facts")
    if found is None:
        return None
    return LogFacts(
        tuple(found["neighbours"]),
        tuple(found["domain"]),
        tuple(found["alike"]),
        tuple(found["reasons"]),
    )
