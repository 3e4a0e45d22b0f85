"""Gradients behind an image: what a peer needs to compute a snapshot from the one before it.

Algorithm 3 of MoEtion (section 5.2): while a peer holds the weights and the optimizer state of iteration t,
the gradients of that iteration suffice for those of t + 1. They lie in the slot of snapshot t + 1, behind
its image, so the image, its digests, storage and recoveries know nothing of them. ``docs/recompute.md``
section 4 has the bytes. `pack_pieces` makes what a peer cannot compute.

Invariants: a block names the snapshot that it belongs to, so a slot that was filled again has none; offsets
in it are within it, and names in it are tensors of the image, or it is refused.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta, Struct

from ckptd.storage.image import ImageView
from ckptd.storage.image_format import DTYPE_SIZE, OWN_PREFIX, ImageError
from ckptd.unpacking import unpack

# Optimizers of `torch.optim` whose update of a parameter depends on its own gradient and state alone.
OPTIMIZERS = ("AdamW", "Adam", "SGD")
GRADIENT_ALIGNMENT = 64
_MAGIC = b"CKPTDGRD"
_FRONT = struct.Struct("<8sqQQII16s8x")  # 64 bytes
_PLAIN, _PACKED = 1, 2  # the description as it is; or compressed, with the small parts of the image
_LEVEL = 1  # of zlib
_RECORD_BYTES = 4096  # the options of a group, and what the record begins with
_PARAMETER_BYTES = 256  # of the record, besides names
_Offset = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]


class UpdatedParameter(Struct, frozen=True, array_like=True):
    """One parameter of a step: the tensors of the image that the step has changed."""

    weight: str
    """What the optimizer updates: the weight, or its master."""

    states: dict[str, str]
    """By the optimizer's key: the tensor of the image."""

    scalars: dict[str, tuple[str, Annotated[int, Meta(ge=0)]]]
    """By the optimizer's key: the tensor of the image with packed values, and the position there."""

    gradient: _Offset
    """Bytes from the beginning of the block, in the weight's dtype and shape; -1: it had no gradient."""


class UpdatedGroup(Struct, frozen=True, array_like=True):
    """One parameter group of a step, with the options of that step."""

    optimizer: str
    options: dict[str, bool | int | float | str | list[float] | None]
    parameters: list[UpdatedParameter]


class UpdateRecord(Struct, frozen=True, array_like=True):
    """The optimizers' steps between two snapshots.

    ``base`` is the iteration of the snapshot before; ``threads`` and ``torch`` are those of the trainer.
    """

    base: Annotated[int, Meta(ge=0)]
    threads: Annotated[int, Meta(ge=1, le=1 << 12)]
    torch: str
    groups: list[UpdatedGroup]

    @property
    def parameters(self) -> Iterator[UpdatedParameter]:
        """Those of all groups."""
        return chain.from_iterable(group.parameters for group in self.groups)

    @property
    def computed(self) -> set[str]:
        """The tensors of the image that follow from the base and the gradients."""
        return {name for p in self.parameters for name in (p.weight, *p.states.values())}


class GradientBlock(Struct, frozen=True):
    """A block as it lies in a slot: ``start`` to ``stop`` in bytes from the beginning of the slot.

    Its gradients end ``data_len`` bytes behind the start; ``sequence`` is that of the slot's snapshot.
    """

    start: int
    stop: int
    data_len: int
    sequence: int
    record: UpdateRecord


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[UpdateRecord] = msgspec.msgpack.Decoder(UpdateRecord)


def aligned(offset: int) -> int:
    """The next offset at which a gradient, or a block behind an image, may begin."""
    return -(-offset // GRADIENT_ALIGNMENT) * GRADIENT_ALIGNMENT


def first_gradient() -> int:
    """The offset of a block's first gradient."""
    return aligned(_FRONT.size)


def block_bytes_max(gradients: Sequence[tuple[str, int]], num_groups: int) -> int:
    """Room for a block behind an image.

    Args:
        gradients: the name and the bytes of each parameter.
    """
    data = sum(aligned(size) for _, size in gradients)
    names = [name for name, _ in gradients]
    return GRADIENT_ALIGNMENT + first_gradient() + data + record_bytes_max(names, num_groups)


def record_bytes_max(names: Sequence[str], num_groups: int) -> int:
    """Room for the description of these parameters."""
    described = sum(6 * len(name.encode()) + _PARAMETER_BYTES for name in names)
    return described + (1 + num_groups) * _RECORD_BYTES


def write_block(
    slot: memoryview, image_len: int, record: UpdateRecord, data_len: int, *, iteration: int, sequence: int
) -> bool:
    """Complete a block whose gradients are in place; false if the record does not fit.

    Args:
        slot: the whole slot.
        data_len: bytes from the beginning of the block to the end of its last gradient.
        iteration, sequence: of the slot's snapshot.
    """
    start, body = aligned(image_len), _encoder.encode(record)
    stop = start + data_len + len(body)
    if stop > len(slot):
        return False
    slot[start + data_len : stop] = body
    digest = xxhash.xxh3_128_digest(body)
    _FRONT.pack_into(slot, start, _MAGIC, iteration, sequence, data_len, len(body), _PLAIN, digest)
    return True


def read_block(slot: memoryview, image_len: int, *, iteration: int, sequence: int) -> GradientBlock | None:
    """The block behind an image; None if there is none for this snapshot.

    Raises:
        ImageError: there is one, and it is damaged.
    """
    start = aligned(image_len)
    found = _read_front(slot, start, iteration, sequence, _PLAIN)
    if found is None:
        return None
    data_len, body = found
    return GradientBlock(start, start + data_len + len(body), data_len, sequence, _decoded(body))


def _read_front(
    slot: memoryview, start: int, iteration: int, sequence: int, version: int
) -> tuple[int, memoryview] | None:
    """Where the description begins in a block, and its bytes."""
    if start + _FRONT.size > len(slot):
        return None
    magic, *its_names, data_len, length, its_version, digest = _FRONT.unpack_from(slot, start)
    if (magic, its_names, its_version) != (_MAGIC, [iteration, sequence], version):
        return None
    stop = start + data_len + length
    if data_len < first_gradient() or stop > len(slot):
        raise ImageError(f"gradients of {data_len} bytes do not fit the slot of {len(slot)}")
    body = slot[start + data_len : stop]
    if xxhash.xxh3_128_digest(body) != digest:
        raise ImageError("the digest of the gradients' description does not match")
    return data_len, body


def gradient_range(block: GradientBlock, view: ImageView, parameter: UpdatedParameter) -> tuple[int, int]:
    """Where the gradient of a parameter lies, in bytes from the beginning of the slot.

    Raises:
        ImageError: the image has no such weight, or the range is not in the block.
    """
    if parameter.weight not in view or parameter.gradient < first_gradient():
        raise ImageError(f"the block has no gradient of {parameter.weight!r}")
    weight = view.tensor(parameter.weight)
    begin = block.start + parameter.gradient
    if begin + weight.nbytes > block.stop or begin % DTYPE_SIZE.get(weight.dtype, 1):
        raise ImageError(f"the gradient of {parameter.weight!r} would lie outside of the block")
    return begin, begin + weight.nbytes


def pack_pieces(slot: memoryview, view: ImageView, block: GradientBlock) -> list[tuple[int, memoryview]]:
    """What of a slot a peer with the base cannot compute: bytes, and where they go in its slot.

    The header, step scalars and packed state, and the block's description, take one compressed piece behind
    the gradients; other tensors and the gradients go as they are.

    Raises:
        ImageError: the block names a tensor that the image does not have.
    """
    computed = block.record.computed
    if unknown := sorted(computed.difference(view.names())):
        raise ImageError(f"the gradients are for {unknown[0]!r}, which the image does not have")
    small = [view.data(t.name) for t in view if t.name.startswith(OWN_PREFIX)]
    compressor = zlib.compressobj(_LEVEL)
    packed = b"".join(compressor.compress(piece) for piece in (slot[: view.data_offset], *small))
    packed += compressor.compress(_encoder.encode(block.record)) + compressor.flush()
    front = bytearray(_FRONT.size)
    data_len, digest = block.data_len, xxhash.xxh3_128_digest(packed)
    _FRONT.pack_into(front, 0, _MAGIC, view.iteration, block.sequence, data_len, len(packed), _PACKED, digest)
    others = (t for t in view if t.nbytes and not t.name.startswith(OWN_PREFIX))
    kept = [t for t in others if t.name not in computed]
    return [
        *(
            (start, slot[start:stop])
            for start, stop in _merged((t.offset, t.offset + t.nbytes) for t in kept)
        ),
        (block.start, memoryview(front)),
        (block.start + first_gradient(), slot[block.start + first_gradient() : block.start + data_len]),
        (block.start + data_len, memoryview(packed)),
    ]


def unpack_pieces(slot: memoryview, image_len: int, *, iteration: int, sequence: int) -> GradientBlock:
    """Put the compressed piece of a slot that was filled with `pack_pieces` in place; returns its block.

    Raises:
        ImageError: the slot has no such piece, or it is damaged.
    """
    start = aligned(image_len)
    found = _read_front(slot, start, iteration, sequence, _PACKED)
    if found is None:
        raise ImageError("the slot has no gradients of this snapshot")
    data_len, packed = found
    content = memoryview(_decompressed(packed, len(slot)))
    header_len = 8 + int.from_bytes(content[:8], "little")
    if header_len > min(image_len, len(content)):
        raise ImageError(f"an image header of {header_len} bytes does not fit {image_len}")
    slot[:header_len] = content[:header_len]
    view, at = ImageView(slot[:image_len]), header_len
    for tensor in view:
        if tensor.name.startswith(OWN_PREFIX):
            piece, at = content[at : at + tensor.nbytes], at + tensor.nbytes
            if len(piece) != tensor.nbytes:
                raise ImageError(f"the compressed piece ends in {tensor.name!r}")
            view.data(tensor.name)[:] = piece
    return GradientBlock(start, start + data_len + len(packed), data_len, sequence, _decoded(content[at:]))


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and start == merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _decompressed(packed: memoryview, most: int) -> bytes:
    machine = zlib.decompressobj()
    try:
        content = machine.decompress(packed, most)
    except zlib.error as error:
        raise ImageError(f"the compressed piece: {error}") from error
    if not machine.eof:
        raise ImageError(f"the compressed piece is incomplete, or has more than {most} bytes")
    return content


def _decoded(body: memoryview) -> UpdateRecord:
    try:
        return unpack(_decoder, body)
    except ValueError as error:
        raise ImageError(f"the gradients' description: {error}") from error
