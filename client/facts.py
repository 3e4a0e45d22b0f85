"""What a rank communicates with in a step, kept with its boundary log: who recovers together with whom.

The facts lie in the ``client`` payload of the log segment's descriptor, beside ``data_offset``, so that they are there when the
process is gone. When they change, a log of the next generation is asked for: those of the newest generation count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptd.client import values

__all__ = ["Facts", "data_offset_of", "facts_of", "log_payload"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one rank; all ranks are numbers in the job, sorted.

    Attributes:
        neighbours: with whom it exchanges what is logged.
        domain: itself, and with whom it communicates otherwise within a step, as far as it knows by itself: who is joined by way
            of a third rank is joined, too, which only the facts of all ranks tell.
        alike: other ranks with which it has all operators alike.
        reasons: why others are in the domain, for people.
    """

    neighbours: tuple[int, ...] = ()
    domain: tuple[int, ...] = ()
    alike: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()


def log_payload(data_offset: int, facts: Facts) -> bytes:
    """The ``client`` payload of a log segment."""
    told = {
        "neighbours": list(facts.neighbours),
        "domain": list(facts.domain),
        "alike": list(facts.alike),
        "reasons": list(facts.reasons),
    }
    return values.pack({"data_offset": data_offset, "facts": told}, "boundary log")


def data_offset_of(payload: bytes) -> int:
    """Where records begin in the slots of a log."""
    return int(values.unpack(payload)["data_offset"])


def facts_of(payload: bytes) -> Facts | None:
    """The facts of a log's payload; None if it was written by a version that kept none."""
    found: dict[str, Any] | None = values.unpack(payload).get("facts")
    if found is None:
        return None
    return Facts(
        tuple(found["neighbours"]),
        tuple(found["domain"]),
        tuple(found["alike"]),
        tuple(found["reasons"]),
    )
