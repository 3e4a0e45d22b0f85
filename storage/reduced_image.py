"""What a checkpoint stores of a snapshot that is not replayed: the tensors that no newer snapshot has.

Of partial snapshots (``ckptd.core.partial_experts``) a recovery loads the newest one whole, and from older
ones the experts that no newer one anchors. So a *reduced image* of an older one is enough: an image with
fewer tensors and anchors, whose bytes are ranges of the image in memory. Nothing is copied but the header.
A *bare* image is one of the newest snapshot without its experts, which are then taken from older ones.
``docs/format.md`` section 5 is the specification.

Invariants: a reduced image is an image, with digests of its own; each operator that it anchors, and no newer
snapshot does, is as whole in it as in the image that it was made of.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from ckptd.storage.image import ImageView, layout_id_of
from ckptd.storage.image_format import OWN_PREFIX, ImageTensor, parse_header, render_header

_ROWS = re.compile(r"(?P<name>.*)\[(?P<begin>\d+):(?P<end>\d+)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StorableImage:
    """An image to store, whole or reduced. ``pieces`` are its bytes in order; the first has the header."""

    pieces: tuple[memoryview, ...]
    header_digest: bytes
    image_len: int
    layout_id: int
    num_operators: int
    anchors: int
    data_offset: int

    @classmethod
    def whole(cls, image: memoryview, view: ImageView, header_digest: bytes) -> StorableImage:
        """The image as it is in memory."""
        return cls(
            (image[: view.image_len],),
            header_digest,
            view.image_len,
            view.layout_id,
            view.num_operators,
            view.anchors,
            view.data_offset,
        )

    @property
    def header(self) -> bytes:
        """The bytes before the data."""
        return bytes(self.pieces[0][: self.data_offset])


class NewerSnapshots:
    """The anchors and tensors of snapshots from which a recovery takes what they have."""

    def __init__(self) -> None:
        self.anchors = 0
        self._rows: dict[str, list[tuple[int, int]] | None] = {}  # None: the whole tensor

    def add(self, view: ImageView) -> None:
        self.anchors |= view.anchors
        for tensor in view:
            name, rows = _split(tensor.name)
            known = self._rows.setdefault(name, [])
            if rows is None:
                self._rows[name] = None
            elif known is not None:
                known.append(rows)

    def have(self, tensor: ImageTensor) -> bool:
        """Whether they have all rows of this tensor."""
        name, rows = _split(tensor.name)
        known = self._rows.get(name, [])
        if known is None or rows is None:
            return known is None
        at, end = rows
        for begin, stop in sorted(known):
            if begin <= at:
                at = max(at, stop)
        return at >= end


def reduced(image: memoryview, view: ImageView, newer: NewerSnapshots) -> StorableImage | None:
    """The image without what newer snapshots have; None if they have nothing of it.

    The bytes of the image must have their digests: those of the kept tensors are taken from its header.
    """
    if not any(newer.have(tensor) for tensor in view if not tensor.name.startswith(OWN_PREFIX)):
        return None
    return _keeping(image, view, lambda tensor: not newer.have(tensor), view.anchors & ~newer.anchors)


def bare(
    image: memoryview, view: ImageView, experts: int, parameters: Collection[str], another: NewerSnapshots
) -> StorableImage | None:
    """The image without the experts that it anchors; None if it anchors none.

    What a snapshot has of experts that it does not anchor stays. Experts that another rank captures have no
    tensors here, but anchors.

    Args:
        experts: bitmap of the operators that are experts.
        parameters: the names of their parameters.
        another: a snapshot that anchors other experts: what it has of these, this image keeps.
    """

    def stays(tensor: ImageTensor) -> bool:
        return another.have(tensor) or _parameter_of(tensor.name) not in parameters

    if not view.anchors & experts:
        return None
    return _keeping(image, view, stays, view.anchors & ~experts)


def _keeping(
    image: memoryview, view: ImageView, stays: Callable[[ImageTensor], bool], anchors: int
) -> StorableImage:
    """The image with fewer tensors and anchors."""
    parsed = parse_header(bytes(image[: view.data_offset]))
    pairs = zip(parsed.tensors, parsed.digests, strict=True)
    kept = [(t, d) for t, d in pairs if t.name.startswith(OWN_PREFIX) or stays(t)]
    bitmap = anchors.to_bytes((view.num_operators + 7) // 8, "little")
    own = {
        "digests": b"".join([digest for _, digest in kept]).hex(),
        "anchors": base64.b64encode(bitmap).decode("ascii"),
    }
    header = render_header({**parsed.metadata, **own}, [tensor for tensor, _ in kept])
    data = tuple([image[begin:end] for begin, end in _runs([tensor for tensor, _ in kept])])
    return StorableImage(
        (memoryview(header), *data),
        xxhash.xxh3_128_digest(header),
        len(header) + sum(len(piece) for piece in data),
        layout_id_of(header),
        view.num_operators,
        anchors,
        len(header),
    )


def cut(pieces: Sequence[memoryview], at: int, length: int) -> list[memoryview]:
    """A range of bytes that lie in several pieces, without a copy."""
    found = []
    for piece in pieces:
        if at < len(piece) and length:
            found.append(piece[at : at + length])
            length -= len(found[-1])
            at = 0
        else:
            at -= len(piece)
    return found


def _split(name: str) -> tuple[str, tuple[int, int] | None]:
    """The name of a tensor without the rows, and the rows (None: all)."""
    match = _ROWS.fullmatch(name)
    return (name, None) if match is None else (match["name"], (int(match["begin"]), int(match["end"])))


def _parameter_of(name: str) -> str:
    """The parameter to which a tensor belongs; "" for a buffer."""
    kind, _, rest = name.partition("/")
    if kind == "optim":
        rest = rest.partition("/")[2]
    elif kind == "buffer":
        return ""
    elif kind != "master":
        rest = name
    return _split(rest)[0]


def _runs(tensors: Sequence[ImageTensor]) -> Iterator[tuple[int, int]]:
    """The ranges of adjacent tensors, in the order of the image."""
    begin = end = 0
    for tensor in tensors:
        if tensor.offset != end:
            if begin < end:
                yield begin, end
            begin = tensor.offset
        end = tensor.offset + tensor.nbytes
    if begin < end:
        yield begin, end
