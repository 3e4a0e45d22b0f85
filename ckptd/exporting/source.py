"""The seam between where a snapshot lies and what is made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ckptd.exporting.plan import SnapshotFacts, smallest_dtypes
from ckptd.storage.image import ImageTensor

__all__ = ["CHUNK_BYTES", "Origin", "TensorSource", "facts_of"]

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Which snapshot it is, and where it was found: ``memory``, or a store's URL without secrets."""

    job: str
    run: str
    rank: int
    world_size: int
    iteration: int
    place: str


class TensorSource(Protocol):
    """One snapshot that stays as it is for as long as it is open."""

    @property
    def origin(self) -> Origin:
        """Whose it is."""

    @property
    def facts(self) -> SnapshotFacts:
        """What is known of its tensors beside themselves."""

    @property
    def tensors(self) -> Sequence[ImageTensor]:
        """All that the snapshot holds, in the order of its bytes."""

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
    transient_buffers: list[str] = []
    aliases: dict[str, str] = {}
    groups: dict[str, tuple[int, int]] = {}


def facts_of(
    client: bytes, *, dense: bool, alike: Iterable[Iterable[ImageTensor]]
) -> SnapshotFacts:
    """What is known of a snapshot beside its tensors.

    Args:
        client: the trainer's part of the segment's descriptor; what it does not tell is not known.
        dense: whether every operator is anchored.
        alike: the tensors of other snapshots of the same rank, and its own.
    """
    try:
        told = msgspec.msgpack.decode(client, type=_Told)
    except msgspec.MsgspecError:
        told = _Told()
    return SnapshotFacts(
        dense=dense,
        # Of a dense one nothing is lost: it holds the parameters as they are trained.
        compute={} if dense else smallest_dtypes(alike),
        rows=_rows(told.operators),
        transient=frozenset(told.transient_buffers),
        aliases=told.aliases,
        groups=told.groups,
    )


def _rows(operators: Iterable[Any]) -> dict[str, int]:
    """Each parameter that some operator has, and how many rows at least (0: it is whole)."""
    rows: dict[str, int] = {}
    for operator in operators:
        if isinstance(operator, list) and operator and isinstance(operator[-1], list):
            for name, _, stop in operator[-1]:
                rows[name] = max(rows.get(name, 0), stop or 0)
    return rows
