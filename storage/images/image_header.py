"""Reading of image headers without their mutable fields; parsed once per layout id.

Every value is checked before it is used: a hostile header raises `ImageError` and costs no more than
its own length.
"""

from __future__ import annotations

import base64
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from ckptd.storage.images.image_format import (
    AT_DIGESTS,
    AT_ITERATION,
    AT_PREVIOUS,
    AT_SCALARS,
    DATA_ALIGNMENT,
    DIGEST_HEX,
    FORMAT,
    ITERATION_WIDTH,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    OWN_KEYS,
    PREFIX,
    SCALARS_WIDTH,
    ImageError,
    ImageTensor,
)
from ckptd.storage.images.safetensors_header import HeaderError, parse_safetensors_header

__all__ = ["Batch", "ParsedHeader", "find_data_offset", "parse_image_header", "read_number"]

_BATCH_BYTES = 4 << 20  # below this, handing a batch to a thread takes longer than hashing it (16 GB/s)
_MAX_CACHED_LAYOUTS = 1024
_MAX_CACHED_TENSORS = 500_000
_NUMBER = re.compile(rb" *(-?[0-9]+)")


@dataclass(frozen=True, slots=True)
class Batch:
    """Adjacent tensors that one call digests; ``order`` is the batch's position in the image."""

    order: int
    tensors: tuple[ImageTensor, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ParsedHeader:
    """The contents of a header without its mutable fields."""

    tensors: tuple[ImageTensor, ...]
    by_name: Mapping[str, ImageTensor]
    batches: tuple[Batch, ...]  # largest first, so that the threads of a pool finish together
    identity: Mapping[str, str]
    num_operators: int
    anchors: int
    data_offset: int
    image_len: int


class _LayoutCache:
    """The most recently used headers by layout id; bounded in layouts and in tensors."""

    def __init__(self, max_layouts: int, max_tensors: int) -> None:
        self._max_layouts = max_layouts
        self._max_tensors = max_tensors
        self._lock = threading.Lock()
        self._layouts: OrderedDict[int, ParsedHeader] = OrderedDict()
        self._num_tensors = 0

    def get(self, layout_id: int) -> ParsedHeader | None:
        """Return the parsed header, and mark it as the most recent one."""
        with self._lock:
            parsed = self._layouts.get(layout_id)
            if parsed is not None:
                self._layouts.move_to_end(layout_id)
            return parsed

    def put(self, layout_id: int, parsed: ParsedHeader) -> None:
        """Add ``parsed``, and evict the oldest headers beyond the bounds."""
        if len(parsed.tensors) > self._max_tensors:
            return
        with self._lock:
            if layout_id in self._layouts:
                return
            self._layouts[layout_id] = parsed
            self._num_tensors += len(parsed.tensors)
            while len(self) > self._max_layouts or self._num_tensors > self._max_tensors:
                _, oldest = self._layouts.popitem(last=False)
                self._num_tensors -= len(oldest.tensors)

    def __len__(self) -> int:
        return len(self._layouts)


_parsed_layouts = _LayoutCache(_MAX_CACHED_LAYOUTS, _MAX_CACHED_TENSORS)


def read_number(buf: memoryview, name: str, at: int, width: int) -> int:
    """The number in a mutable field of the header; raises ImageError if it is malformed."""
    text = bytes(buf[at : at + width])
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ImageError(f"the image header has {text!r} for {name}")
    return int(match[1])


def find_data_offset(buf: memoryview) -> int:
    """The offset of the data, checked against the buffer and the limit."""
    if len(buf) < LENGTH_BYTES:
        raise ImageError(f"{len(buf)} bytes are too few for an image")
    offset = LENGTH_BYTES + int.from_bytes(buf[:LENGTH_BYTES], "little")
    if offset > min(len(buf), LENGTH_BYTES + MAX_HEADER_BYTES):
        raise ImageError(f"the image header would end at {offset}, the buffer at {len(buf)}")
    if offset % DATA_ALIGNMENT or offset < AT_DIGESTS:
        raise ImageError(f"image data cannot begin at {offset}")
    return offset


def parse_image_header(buf: memoryview) -> tuple[ParsedHeader, int]:
    """Parse the header; returns its contents and its layout id.

    Raises:
        ImageError: it is not an image header, or the buffer ends before the image.
    """
    data_offset = find_data_offset(buf)
    blanked, num_tensors = _blanked(buf, data_offset)
    layout_id = xxhash.xxh3_64_intdigest(blanked)
    parsed = _parsed_layouts.get(layout_id)
    if parsed is None:
        parsed = _parse_blanked(blanked, num_tensors)
        _parsed_layouts.put(layout_id, parsed)
    if parsed.image_len > len(buf):
        raise ImageError(f"the image is truncated: it has {parsed.image_len} bytes, the buffer {len(buf)}")
    return parsed, layout_id


def _blanked(buf: memoryview, data_offset: int) -> tuple[bytearray, int]:
    """The header with its mutable fields blanked, and the number of its digests."""
    header = bytearray(buf[:data_offset])
    end = header.find(b'"', AT_DIGESTS)
    digits = header[AT_DIGESTS : max(end, AT_DIGESTS)]
    if end < 0 or len(digits) % DIGEST_HEX or digits.strip(b"0123456789abcdef"):
        raise ImageError("the digests field of the image header is damaged")
    header[AT_ITERATION : AT_ITERATION + ITERATION_WIDTH] = b" " * ITERATION_WIDTH
    header[AT_PREVIOUS : AT_PREVIOUS + ITERATION_WIDTH] = b" " * ITERATION_WIDTH
    header[AT_SCALARS : AT_SCALARS + SCALARS_WIDTH] = b" " * SCALARS_WIDTH
    header[AT_DIGESTS:end] = b"0" * len(digits)
    if not header.startswith(PREFIX, LENGTH_BYTES):
        raise ImageError(f"the header is not one of format {FORMAT}")
    return header, len(digits) // DIGEST_HEX


def _parse_blanked(blanked: bytearray, num_tensors: int) -> ParsedHeader:
    try:
        header = parse_safetensors_header(blanked[LENGTH_BYTES:])
    except HeaderError as error:
        raise ImageError(f"the image header: {error}") from error
    tensors, metadata = header.tensors, header.metadata
    assert metadata is not None, "the prefix was checked"
    if len(tensors) != num_tensors:
        raise ImageError(f"the image has {len(tensors)} tensors and {num_tensors} digests")
    num_operators, anchors = _operators(metadata)
    return ParsedHeader(
        tensors=tensors,
        by_name={tensor.name: tensor for tensor in tensors},
        batches=_batches(tensors),
        identity={key: value for key, value in metadata.items() if key not in OWN_KEYS},
        num_operators=num_operators,
        anchors=anchors,
        data_offset=len(blanked),
        image_len=header.end,
    )


def _operators(metadata: Mapping[str, str]) -> tuple[int, int]:
    try:
        count = metadata["num_operators"]
        bitmap = base64.b64decode(metadata["anchors"], validate=True)
    except (KeyError, ValueError) as error:
        raise ImageError(f"the image header lacks its operators ({error!r})") from error
    if not re.fullmatch("[0-9]{1,9}", count) or len(bitmap) != (int(count) + 7) // 8:
        raise ImageError(f"{len(bitmap)} bytes of anchors do not fit {count[:20]} operators")
    anchors = int.from_bytes(bitmap, "little")
    if anchors >> int(count):
        raise ImageError(f"the image anchors operators beyond the model's {count}")
    return int(count), anchors


def _batches(tensors: Sequence[ImageTensor]) -> tuple[Batch, ...]:
    """Group adjacent tensors into batches that are worth a call, the largest first."""
    groups: list[list[ImageTensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = _BATCH_BYTES
        groups[-1].append(tensor)
        room -= tensor.nbytes
    batches = [
        Batch(order, tuple(group), sum(tensor.nbytes for tensor in group))
        for order, group in enumerate(groups)
    ]
    return tuple(sorted(batches, key=lambda batch: -batch.nbytes))
