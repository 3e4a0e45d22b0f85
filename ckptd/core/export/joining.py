"""From which ranks' images a rank's model is read. Pure.

Where several ranks have the same parameter (under data parallelism all of them), one of them
captures it for all, so that the image of one rank holds a share of it only: the trainer tells whose
images hold the rest (`SharedRows`). An export is the model of one rank: its own image, which has
everything that it does not share, all its buffers and step scalars, completed by the tensors that
other ranks' images of the same iteration hold for it. Nothing else of these is taken: another
rank's parameter of the same name may be another expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptd.core.export.entry_names import BUFFER, OURS, param_and_key, split_rows
from ckptd.core.export.export_plan import SharedRows, SnapshotFacts, smallest_dtypes
from ckptd.storage.images.image_format import ImageTensor

__all__ = ["JoinedSnapshot", "RankImage", "join", "lacking"]

Rows = tuple[int, int]


@dataclass(frozen=True)
class RankImage:
    """One rank's snapshot of the iteration.

    Attributes:
        tensors: all that it holds, in the order of its bytes.
        dense: it anchors every operator of its rank.
        alike: the tensors of snapshots of the same rank, this one among them: they show in which dtype parameters compute.
    """

    tensors: Sequence[ImageTensor]
    dense: bool
    alike: Sequence[Sequence[ImageTensor]] = field(default=())


@dataclass(frozen=True)
class JoinedSnapshot:
    """A rank's snapshot with what other ranks hold of it.

    Attributes:
        tensors: the rank's own in the order of their bytes, then those of other ranks, one rank after the other.
        ranks: whose image each of them lies in, by name.
    """

    facts: SnapshotFacts
    tensors: tuple[ImageTensor, ...]
    ranks: Mapping[str, int]


def lacking(
    tensors: Iterable[ImageTensor], shares: Iterable[SharedRows]
) -> dict[int, tuple[SharedRows, ...]]:
    """What other ranks capture and these tensors do not hold, by rank."""
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
    """Complete the image of ``rank`` by what it lacks; whether it is whole then is `plan_export`'s affair.

    Args:
        facts: what the trainer told; the rest of the facts is found here.
        lacks: as `lacking` found it.
        others: the images of these ranks.
    """
    tensors, ranks = list(image.tensors), {tensor.name: rank for tensor in image.tensors}
    dense, alike = image.dense, list(image.alike)
    for owner, shares in lacks.items():
        other, params = others[owner], {share.param for share in shares}
        taken = [t for t in _taken(shares, other.tensors) if t.name not in ranks]
        tensors += taken
        ranks.update({tensor.name: owner for tensor in taken})
        # One that is sparse has no optimizer state for what it holds here.
        dense = dense and other.dense
        alike += [[t for t in found if _param(t) in params] for found in other.alike]
    # Of a dense one nothing is lost: it holds the parameters as they are trained.
    compute = {} if dense else smallest_dtypes(alike)
    return JoinedSnapshot(replace(facts, dense=dense, compute=compute), tuple(tensors), ranks)


def _taken(shares: Sequence[SharedRows], tensors: Iterable[ImageTensor]) -> list[ImageTensor]:
    """The tensors that lie within the shares: rows of parameters, and their masters and optimizer state."""
    wanted: dict[str, list[Rows | None]] = {}
    for share in shares:
        wanted.setdefault(share.param, []).append(share.rows)
    named = [(t, *split_rows(t.name)) for t in tensors if not t.name.startswith((OURS, BUFFER))]
    # State lies in the same rows as its parameter, of which alone it is known how many rows there are.
    within = {
        (name, rows)
        for tensor, name, rows in named
        if name in wanted and _holds(wanted[name], rows or _all_rows(tensor, wanted[name]))
    }
    return [tensor for tensor, name, rows in named if (param_and_key(name)[0], rows) in within]


def _all_rows(tensor: ImageTensor, wanted: Sequence[Rows | None]) -> Rows | None:
    """The rows of a whole tensor, where rows are what is wanted."""
    return None if None in wanted or not tensor.shape else (0, tensor.shape[0])


def _holds(held: Sequence[Rows | None], rows: Rows | None) -> bool:
    """Whether all of these rows (None: the whole, however many there are) are among what is held."""
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
