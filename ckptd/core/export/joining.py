"""Joins the images of several ranks to the model of one rank. Pure.

If several ranks have the same parameter (under data parallelism all of them), one of them captures it
for all, so the image of one rank contains only a part of the parameters; the trainer reports the ranks
whose images contain the rest (`SharedRows`). An export is the model of one rank: its own image, with
its unshared parameters, buffers and step scalars, completed by the tensors that other ranks' images of
the same iteration contain for it. Other tensors of those images are not used: another rank's parameter
of the same name may be another expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptd.core.export.entry_names import BUFFER, OURS, param_and_key, split_rows
from ckptd.core.export.export_plan import SharedRows, SnapshotFacts, smallest_dtypes
from ckptd.storage.image_format import ImageTensor

__all__ = ["JoinedSnapshot", "RankImage", "join", "lacking"]

Rows = tuple[int, int]


@dataclass(frozen=True)
class RankImage:
    """One rank's snapshot of the iteration.

    Attributes:
        tensors: all its tensors, in the order of its bytes.
        dense: it anchors every operator of its rank.
        snapshots: the tensors of all snapshots of the same rank, including this one; they show the
            compute dtypes.
    """

    tensors: Sequence[ImageTensor]
    dense: bool
    snapshots: Sequence[Sequence[ImageTensor]] = field(default=())


@dataclass(frozen=True)
class JoinedSnapshot:
    """A rank's snapshot with the tensors that other ranks captured for it.

    Attributes:
        tensors: the rank's own tensors in the order of their bytes, then those of other ranks, rank by rank.
        ranks: by name, the rank whose image contains the tensor.
    """

    facts: SnapshotFacts
    tensors: tuple[ImageTensor, ...]
    ranks: Mapping[str, int]


def lacking(
    tensors: Iterable[ImageTensor], shares: Iterable[SharedRows]
) -> dict[int, tuple[SharedRows, ...]]:
    """The rows that other ranks captured and that these tensors lack, by rank."""
    held: dict[str, list[Rows | None]] = {}
    for tensor in tensors:
        name, rows = split_rows(tensor.name)
        held.setdefault(name, []).append(rows)
    found: dict[int, list[SharedRows]] = {}
    for share in shares:
        if not _holds(held.get(share.param, ()), share.rows):
            found.setdefault(share.rank, []).append(share)
    return {rank: tuple(found[rank]) for rank in sorted(found)}


def join(
    rank: int,
    image: RankImage,
    facts: SnapshotFacts,
    lacks: Mapping[int, Sequence[SharedRows]],
    others: Mapping[int, RankImage],
) -> JoinedSnapshot:
    """Complete the image of ``rank`` with the rows that it lacks; `plan_export` checks that the
    result is whole.

    Args:
        facts: the facts from the trainer; the other facts are computed here.
        lacks: the result of `lacking`.
        others: the images of those ranks.
    """
    tensors, ranks = list(image.tensors), {tensor.name: rank for tensor in image.tensors}
    dense, snapshots = image.dense, list(image.snapshots)
    for owner, shares in lacks.items():
        other, params = others[owner], {share.param for share in shares}
        taken = [t for t in _taken(shares, other.tensors) if t.name not in ranks]
        tensors += taken
        ranks.update({tensor.name: owner for tensor in taken})
        # A sparse image has no optimizer state for these rows.
        dense = dense and other.dense
        snapshots += [[t for t in found if _param(t) in params] for found in other.snapshots]
    # A dense image contains the parameters in their trained dtype.
    compute = {} if dense else smallest_dtypes(snapshots)
    return JoinedSnapshot(replace(facts, dense=dense, compute=compute), tuple(tensors), ranks)


def _taken(shares: Sequence[SharedRows], tensors: Iterable[ImageTensor]) -> list[ImageTensor]:
    """The tensors within the shares: rows of parameters, and their masters and optimizer state."""
    wanted: dict[str, list[Rows | None]] = {}
    for share in shares:
        wanted.setdefault(share.param, []).append(share.rows)
    named = [(t, *split_rows(t.name)) for t in tensors if not t.name.startswith((OURS, BUFFER))]
    # State has the same rows as its parameter; the number of rows is known only for the parameter.
    within = {
        (name, rows)
        for tensor, name, rows in named
        if name in wanted and _holds(wanted[name], rows or _all_rows(tensor, wanted[name]))
    }
    return [tensor for tensor, name, rows in named if (param_and_key(name)[0], rows) in within]


def _all_rows(tensor: ImageTensor, wanted: Sequence[Rows | None]) -> Rows | None:
    """The row range of a whole tensor, if the share is given in rows."""
    return None if None in wanted or not tensor.shape else (0, tensor.shape[0])


def _holds(held: Sequence[Rows | None], rows: Rows | None) -> bool:
    """Whether ``held`` contains all of these rows (None: the whole tensor)."""
    if None in held:
        return True
    if rows is None:
        return False
    at, end = rows
    for begin, stop in sorted(found for found in held if found is not None):
        if begin <= at < stop:
            at = stop
    return at >= end and bool(held)


def _param(tensor: ImageTensor) -> str:
    return param_and_key(split_rows(tensor.name)[0])[0]
