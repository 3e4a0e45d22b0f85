"""How the files of segments are named, and what may stand in such a name: job, run, rank,
generation, what it holds, and of a replica its primary.

A segment and its replicas on other nodes are told apart by their names alone; what is in them is
`ckptd.core.slots.segment_format`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

__all__ = [
    "FILE_ENDS",
    "REPLICA_ENDS",
    "Kind",
    "ReplicaName",
    "SegmentName",
    "check_name",
    "parse_replica_file_name",
    "parse_segment_file_name",
    "replica_file_name",
    "segment_file_name",
]

Kind = Literal["snapshots", "log", "parked"]
FILE_ENDS: Mapping[Kind, str] = {"snapshots": ".seg", "log": ".boundary", "parked": ".parked"}
REPLICA_ENDS: Mapping[Kind, str] = {
    "snapshots": ".rep",
    "log": ".logrep",
}  # no others have replicas
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FILE_NAME = re.compile(
    r"(?P<job>[A-Za-z0-9._-]{1,64})~(?P<run>[A-Za-z0-9._-]{1,64})"
    r"~r(?P<rank>0|[1-9][0-9]{0,9})~g(?P<generation>0|[1-9][0-9]{0,9})"
    r"(?P<end>\.seg|\.boundary|\.parked|~(?P<origin>[0-9a-f]{16})\.(?:log)?rep)"
)
_ORIGIN = re.compile(r"[0-9a-f]{16}")


class SegmentName(NamedTuple):
    """What a segment's file name says."""

    job: str
    run: str
    rank: int
    generation: int


class ReplicaName(NamedTuple):
    """What a replica's file name says; ``origin`` names the primary (`origin_of`)."""

    job: str
    run: str
    rank: int
    generation: int
    origin: str


def check_name(name: str, what: str) -> str:
    """``name`` itself, if it can be a job or a run.

    Raises:
        ValueError: naming the character that cannot stand in a file name or a URL.
    """
    if _NAME.fullmatch(name) and name not in (".", ".."):
        return name
    if not name or len(name) > 64:
        raise ValueError(f"{what} has {len(name)} characters, must have 1 to 64")
    bad = next((char for char in name if not _NAME.fullmatch(char)), None)
    if bad is None:
        raise ValueError(f"{what} must not be {name!r}")
    raise ValueError(f"{what} {name!r} contains {bad!r}; allowed are letters, digits, '.', '_' and '-'")


def segment_file_name(job: str, run: str, rank: int, generation: int, kind: Kind = "snapshots") -> str:
    """``<job>~<run>~r<rank>~g<generation>.seg``; ``.boundary`` for a log, ``.parked`` for parked state."""
    return f"{_stem(job, run, rank, generation)}{FILE_ENDS[kind]}"


def replica_file_name(
    job: str, run: str, rank: int, generation: int, origin: str, kind: Kind = "snapshots"
) -> str:
    """``<job>~<run>~r<rank>~g<generation>~<origin>.rep``; ``.logrep`` for that of a boundary log.

    Raises:
        ValueError: there are no replicas of this kind, or something cannot stand in such a name.
    """
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"origin {origin!r} is not 16 hex digits")
    if kind not in REPLICA_ENDS:
        raise ValueError(f"{kind} state is not replicated")
    return f"{_stem(job, run, rank, generation)}~{origin}{REPLICA_ENDS[kind]}"


def parse_segment_file_name(name: str, kind: Kind = "snapshots") -> SegmentName:
    """What `segment_file_name` was called with.

    Raises:
        ValueError: ``name`` was not made by it for this kind.
    """
    return _parse(name, FILE_ENDS[kind])


def parse_replica_file_name(name: str, kind: Kind = "snapshots") -> ReplicaName:
    """What `replica_file_name` was called with.

    Raises:
        ValueError: ``name`` was not made by it for this kind.
    """
    match, end = _FILE_NAME.fullmatch(name), REPLICA_ENDS[kind]
    if match is None or match["origin"] is None or not name.endswith(end):
        raise ValueError(f"{name!r} is not <job>~<run>~r<rank>~g<generation>~<origin>{end}")
    return ReplicaName(*_parsed(match), match["origin"])


def _stem(job: str, run: str, rank: int, generation: int) -> str:
    if rank < 0 or generation < 0:
        raise ValueError(f"rank {rank} and generation {generation} must not be negative")
    return f"{check_name(job, 'job')}~{check_name(run, 'run')}~r{rank}~g{generation}"


def _parse(name: str, end: str) -> SegmentName:
    match = _FILE_NAME.fullmatch(name)
    if match is None or match["end"] != end:
        raise ValueError(f"{name!r} is not <job>~<run>~r<rank>~g<generation>{end}")
    return _parsed(match)


def _parsed(match: re.Match[str]) -> SegmentName:
    return SegmentName(
        check_name(match["job"], "job"),
        check_name(match["run"], "run"),
        int(match["rank"]),
        int(match["generation"]),
    )
