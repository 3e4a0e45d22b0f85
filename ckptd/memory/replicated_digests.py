"""The digests of the tensors that a snapshot has in common with those of other ranks (`ReplicaGroup`).

Sealing has made them; they are read from the header of the image. Which tensors are replicated is the same
in all images of one layout, and found once.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from ckptd.core.export_plan import BUFFER, OURS, param_and_key, split_rows
from ckptd.core.replication.replica_comparison import DIGEST_BYTES
from ckptd.core.slots.segment_format import SegmentDescriptor
from ckptd.storage.image import sealed_digests
from ckptd.storage.image_format import ImageTensor

MAX_REPLICATED_TENSORS = 1 << 17  # of a group; those of a larger set that come first by name are compared
_MAX_LAYOUTS = 256  # of a segment: a window has one for each phase
_WHOLE_BYTES = 16  # of an xxh3_128


@dataclass(frozen=True, slots=True, eq=False)
class ReplicatedSet:
    """The tensors of an image that these ranks hold with the same bits.

    Args:
        group: a name of the ranks.
        number: equal on all ranks that have the same tensors: names, dtypes and shapes.
        names, dtypes, rows: of each tensor; ``rows`` are their places in the image.
    """

    ranks: tuple[int, ...]
    group: str
    number: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReplicatedDigests:
    """``DIGEST_BYTES`` for each tensor of a set, in one snapshot."""

    of: ReplicatedSet
    digests: bytes


# By the layout id of an image.
ReplicatedSets = MutableMapping[int, tuple[ReplicatedSet, ...]]


def replicated_digests(
    descriptor: SegmentDescriptor, image: memoryview, known: ReplicatedSets
) -> tuple[ReplicatedDigests, ...]:
    """The digests of a sealed image that other ranks' images have, too.

    Args:
        known: the sets of layouts that were seen in this segment; added to.
    Raises:
        ImageError: it is no image.
    """
    if not descriptor.replica_groups:
        return ()
    layout_id, tensors, digests = sealed_digests(image)
    if layout_id not in known:
        if len(known) >= _MAX_LAYOUTS:  # of schedules that are gone
            known.clear()
        known[layout_id] = _sets_of(descriptor, tensors)
    shortened = memoryview(digests).cast("Q").tolist()[:: _WHOLE_BYTES // DIGEST_BYTES]
    return tuple(
        ReplicatedDigests(each, array("Q", map(shortened.__getitem__, each.rows)).tobytes())
        for each in known[layout_id]
    )


def _sets_of(descriptor: SegmentDescriptor, tensors: Sequence[ImageTensor]) -> tuple[ReplicatedSet, ...]:
    rows: dict[str, list[int]] = {}
    for row, tensor in enumerate(tensors):
        if tensor.nbytes and not tensor.name.startswith((OURS, BUFFER)):
            rows.setdefault(param_and_key(split_rows(tensor.name)[0])[0], []).append(row)
    found = []
    for group in descriptor.replica_groups:
        if descriptor.rank not in group.ranks:
            continue
        mine = [row for param in group.params for row in rows.get(param, ())]
        mine = sorted(mine, key=lambda row: tensors[row].name)[:MAX_REPLICATED_TENSORS]
        if mine:
            found.append(_set_of(group.ranks, tensors, mine))
    return tuple(found)


def _set_of(ranks: tuple[int, ...], tensors: Sequence[ImageTensor], rows: Sequence[int]) -> ReplicatedSet:
    described = [[tensors[row].name, tensors[row].dtype, list(tensors[row].shape)] for row in rows]
    return ReplicatedSet(
        ranks,
        xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(ranks)),
        xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(described)) >> 2,  # as messages bound numbers
        tuple(tensors[row].name for row in rows),
        tuple(tensors[row].dtype for row in rows),
        tuple(rows),
    )
