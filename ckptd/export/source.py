"""The seam between where a snapshot lies and what is made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ckptd.core.export.export_errors import ExportError
from ckptd.core.export.export_plan import SharedRows, SnapshotFacts
from ckptd.storage.images.image_format import ImageTensor
from ckptd.unpacking import unpack

__all__ = ["CHUNK_BYTES", "Origin", "TensorSource", "facts_of"]

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Which snapshot it is, and where it was found: ``memory``, or a store's URL without secrets.

    ``joined``: the other ranks in whose images shares of it lie.
    """

    job: str
    run: str
    rank: int
    world_size: int
    iteration: int
    place: str
    joined: tuple[int, ...] = ()


class TensorSource(Protocol):
    """One rank's snapshot, completed by what other ranks captured for it; it stays as it is for as
    long as it is open.

    No two of its tensors have one name.
    """

    @property
    def origin(self) -> Origin:
        """Whose it is."""

    @property
    def facts(self) -> SnapshotFacts:
        """What is known of its tensors beside themselves."""

    @property
    def tensors(self) -> Sequence[ImageTensor]:
        """All that the snapshot holds, in the order of its bytes; then what other ranks hold of it,
        rank by rank.
        """

    @property
    def scalars_len(self) -> int:
        """How many bytes of ``ckptd.scalars`` mean something."""

    def prepare(self, order: Sequence[ImageTensor]) -> None:
        """The tensors that will be asked for, in this order: they are read ahead."""

    def chunks(self, tensor: ImageTensor) -> Iterator[memoryview]:
        """The tensor's bytes in pieces of whole items, each valid until the next one.

        Raises:
            DamagedSnapshot: they are not what was sealed (at the latest behind the last piece).
        """


class _Told(msgspec.Struct, frozen=True):
    """The trainer's part of a segment's descriptor, as far as an export needs it; all of it may be missing."""

    operators: list[Any] = []
    # Beside `operators`: the rank whose images hold each of them, or -1: this rank's own. Absent:
    # all are its own.
    owners: list[int] = []
    policy: str = "aligned"
    transient_buffers: list[str] = []
    aliases: dict[str, str] = {}
    groups: dict[str, tuple[int, int]] = {}


_decoder = msgspec.msgpack.Decoder(_Told)


def facts_of(client: bytes, rank: int) -> SnapshotFacts:
    """What a trainer told of its snapshots; what can only be seen in them is left open.

    Args:
        client: the trainer's part of the segment's descriptor; what it does not tell is not known.
        rank: whose descriptor it is.
    Raises:
        ExportError: it contradicts itself.
    """
    try:
        told = unpack(_decoder, client)
    except ValueError as error:
        if (
            b"owners" in client
        ):  # then a part of the model may be elsewhere, and nobody would notice
            raise ExportError(
                f"what rank {rank} tells of who captures its operators is not understood ({error}); "
                "export with the version that trained"
            ) from error
        told = _Told()
    return SnapshotFacts(
        rows=_rows(told.operators),
        transient=frozenset(told.transient_buffers),
        aliases=told.aliases,
        groups=told.groups,
        shares=_shares(told, rank),
        aligned=told.policy == "aligned",
    )


def _rows(operators: Iterable[Any]) -> dict[str, int]:
    """Each parameter that some operator has, and how many rows at least (0: it is whole)."""
    rows: dict[str, int] = {}
    for operator in operators:
        for name, _, stop in _members(operator):
            rows[name] = max(rows.get(name, 0), stop or 0)
    return rows


def _shares(told: _Told, rank: int) -> tuple[SharedRows, ...]:
    """What other ranks capture, member by member."""
    if not told.owners:
        return ()
    if len(told.owners) != len(told.operators):
        raise ExportError(
            f"rank {rank} tells who captures {len(told.owners)} operators, and has {len(told.operators)}: "
            "its descriptor was written by another version; export with the version that trained"
        )
    return tuple(
        SharedRows(name, None if start is None else (start, stop), owner)
        for operator, owner in zip(told.operators, told.owners, strict=True)
        if owner >= 0 and owner != rank
        for name, start, stop in _members(operator)
    )


def _members(operator: Any) -> list[Any]:
    """(parameter, first row, row after the last) of each member of an operator; no rows: all of it."""
    told = isinstance(operator, list) and operator and isinstance(operator[-1], list)
    return operator[-1] if told else []
