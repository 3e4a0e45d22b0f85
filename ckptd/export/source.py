"""The interface between sources of snapshots (memory, stores) and exports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ckptd.core.export_plan import ExportError, SharedRows, SnapshotFacts
from ckptd.storage.image_format import ImageTensor
from ckptd.unpacking import unpack

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """The identity of a snapshot and its place: ``memory``, or a store's URL without secrets.

    ``joined``: other ranks whose images contain parts of it. ``older``: the iterations of tensors that come
    from older snapshots, by name; only if that was asked for.
    """

    job: str
    run: str
    rank: int
    world_size: int
    iteration: int
    place: str
    joined: tuple[int, ...] = ()
    older: Mapping[str, int] = field(default_factory=dict)


class TensorSource(Protocol):
    """One rank's snapshot, completed with the parameters that other ranks captured for it. It does not
    change while it is open.

    Names of its tensors are unique.
    """

    @property
    def origin(self) -> Origin:
        """The identity of the snapshot."""

    @property
    def facts(self) -> SnapshotFacts:
        """Facts about its tensors."""

    @property
    def tensors(self) -> Sequence[ImageTensor]:
        """All tensors of the snapshot, in the order of its bytes; then those from other ranks, rank by
        rank.
        """

    @property
    def scalars_len(self) -> int:
        """The number of used bytes of ``ckptd.scalars``."""

    def prepare(self, order: Sequence[ImageTensor]) -> None:
        """Announce the tensors that will be read, in this order, so that they are read ahead."""

    def chunks(self, tensor: ImageTensor) -> Iterator[memoryview]:
        """The tensor's bytes in chunks of whole items, each valid until the next one.

        Raises:
            DamagedSnapshot: they differ from the sealed bytes (raised at the latest after the last chunk).
        """


class _TrainerFacts(msgspec.Struct, frozen=True):
    """The fields of the trainer's part of a segment's descriptor that an export needs; all are optional."""

    operators: list[Any] = []
    # For each operator the rank whose images contain it; -1: this rank. Absent: all are this rank's.
    owners: list[int] = []
    policy: str = "aligned"
    transient_buffers: list[str] = []
    aliases: dict[str, str] = {}
    groups: dict[str, tuple[int, int]] = {}


_decoder = msgspec.msgpack.Decoder(_TrainerFacts)


def check_older(facts: SnapshotFacts) -> None:
    """Check that experts can be taken from older snapshots.

    Raises:
        ExportError: the snapshot is not partial.
    """
    if not facts.partial:
        raise ExportError(
            "--older-experts is for partial snapshots, and this one is not: a snapshot of an exact policy is "
            "the model of its iteration"
        )


def facts_of(client: bytes, rank: int) -> SnapshotFacts:
    """The facts that a trainer recorded about its snapshots; facts of a single snapshot are added later.

    Args:
        client: the trainer's part of the segment's descriptor; missing fields are not known.
        rank: the rank of the descriptor.
    Raises:
        ExportError: the descriptor contradicts itself.
    """
    try:
        recorded = unpack(_decoder, client)
    except ValueError as error:
        if b"owners" in client:  # otherwise a part of the model could be in other images without notice
            raise ExportError(
                f"the descriptor of rank {rank} has malformed owners of operators ({error}); "
                "export with the version of ckptd that trained"
            ) from error
        recorded = _TrainerFacts()
    try:
        rows, shares = _rows(recorded.operators), _shares(recorded, rank)
    except (TypeError, ValueError) as error:
        raise ExportError(
            f"the descriptor of rank {rank} has malformed operators ({error}); "
            "export with the version of ckptd that trained"
        ) from error
    return SnapshotFacts(
        rows=rows,
        transient=frozenset(recorded.transient_buffers),
        aliases=recorded.aliases,
        groups=recorded.groups,
        shares=shares,
        aligned=recorded.policy == "aligned",
        partial=recorded.policy == "partial",
    )


def _rows(operators: Iterable[Any]) -> dict[str, int]:
    """Each parameter of the operators, with its minimum number of rows (0: whole)."""
    rows: dict[str, int] = {}
    for operator in operators:
        for name, _, stop in _members(operator):
            rows[name] = max(rows.get(name, 0), stop or 0)
    return rows


def _shares(recorded: _TrainerFacts, rank: int) -> tuple[SharedRows, ...]:
    """The rows that other ranks capture, member by member."""
    if not recorded.owners:
        return ()
    if len(recorded.owners) != len(recorded.operators):
        raise ExportError(
            f"the descriptor of rank {rank} lists owners of {len(recorded.owners)} operators, but "
            f"has {len(recorded.operators)} operators: "
            "another version of ckptd wrote it; export with the version that trained"
        )
    return tuple(
        SharedRows(name, None if start is None else (start, stop), owner)
        for operator, owner in zip(recorded.operators, recorded.owners, strict=True)
        if owner >= 0 and owner != rank
        for name, start, stop in _members(operator)
    )


def _members(operator: Any) -> list[Any]:
    """(parameter, first row, row after the last) of each member of an operator; no rows: all of it."""
    valid = isinstance(operator, list) and operator and isinstance(operator[-1], list)
    return operator[-1] if valid else []
