"""The image: the bytes of a snapshot in a slot and in a store, one valid safetensors file per snapshot.

``docs/architecture.md`` section 3 is the specification. `ImageLayout` plans an image once; a header is
then one copy of a template and three patches, without serialization. `seal` computes the digests of bytes
that are in place already, `verify` compares them, and `ImageView` reads an image in place.

A buffer may be longer than its image (as a slot is); no function touches the bytes after the image.

Every header begins with the same bytes, so the mutable fields are found without parsing::

    {"__metadata__":{"format":"ckptd/1","iteration":"<20>","previous":"<20>","scalars_len":"<12>",
    "digests":"<32 per tensor>", …

(in one line). The *layout id* is the xxh3_64 of bytes [0, 8 + header_len) with the first three fields
blanked to spaces and the digests to zeros; headers are parsed once per layout id. Every value is checked
before it is used: a hostile header raises `ImageError` and costs no more than its own length.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import xxhash

from ckptd.storage.image_format import (
    DATA_ALIGNMENT,
    DIGEST_HEX,
    DTYPE_SIZE,
    FORMAT,
    LENGTH_BYTES,
    MAX_DIMS,
    MAX_HEADER_BYTES,
    SCALARS,
    HeaderError,
    ImageError,
    ImageTensor,
    TensorEntry,
    parse_safetensors_header,
    render_header,
)

_ITERATION_WIDTH = 20
_SCALARS_WIDTH = 12
# Metadata keys that ``identity`` must not contain.
_OWN_KEYS = frozenset(
    {"format", "iteration", "previous", "scalars_len", "digests", "num_operators", "anchors"}
)
_AT_ITERATION = LENGTH_BYTES + len(f'{{"__metadata__":{{"format":"{FORMAT}","iteration":"')
_AT_PREVIOUS = _AT_ITERATION + _ITERATION_WIDTH + len('","previous":"')
_AT_SCALARS = _AT_PREVIOUS + _ITERATION_WIDTH + len('","scalars_len":"')
_AT_DIGESTS = _AT_SCALARS + _SCALARS_WIDTH + len('","digests":"')
# The first bytes of every header with blanked mutable fields.
_PREFIX = (
    f'{{"__metadata__":{{"format":"{FORMAT}","iteration":"{" " * _ITERATION_WIDTH}"'
    f',"previous":"{" " * _ITERATION_WIDTH}","scalars_len":"{" " * _SCALARS_WIDTH}","digests":"'
).encode("ascii")
assert LENGTH_BYTES + len(_PREFIX) == _AT_DIGESTS

_BATCH_BYTES = 4 << 20  # handing a smaller batch to a thread takes longer than hashing it (16 GB/s)
_MAX_CACHED_LAYOUTS = 1024
_MAX_CACHED_TENSORS = 500_000
_NUMBER = re.compile(rb" *(-?[0-9]+)")


# -- layout --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The offsets of all parts of an image, and its header as a template.

    Tensor data are contiguous, begin at a multiple of 64, and lie in order of item size (descending), so that
    every tensor is aligned to its items.
    """

    entries: tuple[TensorEntry, ...]
    header_len: int
    data_offset: int
    image_len: int
    layout_id: int
    num_operators: int
    anchors: int
    _offsets: Mapping[str, int]
    _template: bytes

    @classmethod
    def build(
        cls,
        entries: Iterable[TensorEntry],
        *,
        identity: Mapping[str, str],
        num_operators: int,
        anchors: int,
        data_offset: int | None = None,
    ) -> ImageLayout:
        """Plan the image of ``entries``, ordered by item size (descending, stable).

        Args:
            identity: further metadata of the header: job, run, rank, world_size.
            num_operators: number of operators of the model.
            anchors: bitmask over operator ids: the operators with an anchor in this image.
            data_offset: offset (a multiple of 64) of data that are in place already, in the order of
                ``entries``; None: the data follow the header, ordered by item size.
        Raises:
            ValueError: a duplicate name, an unknown dtype, a bad shape, an anchor out of range, or
                a header that does not fit before ``data_offset``.
        """
        checked = _checked(entries)
        if data_offset is None:
            checked = sorted(checked, key=lambda entry: -DTYPE_SIZE[entry.dtype])
        ordered = tuple(checked)
        metadata = _metadata(identity, len(ordered), num_operators, anchors)
        ends = list(itertools.accumulate((entry.nbytes for entry in ordered), initial=0))
        template = _padded(render_header(metadata, ordered), data_offset)
        data_offset = len(template)
        return cls(
            entries=ordered,
            header_len=data_offset - LENGTH_BYTES,
            data_offset=data_offset,
            image_len=data_offset + ends[-1],
            layout_id=xxhash.xxh3_64_intdigest(template),
            num_operators=num_operators,
            anchors=anchors,
            _offsets={e.name: data_offset + at for e, at in zip(ordered, ends, strict=False)},
            _template=template,
        )

    def offset_of(self, name: str) -> int:
        """The offset of tensor ``name`` in the image; KeyError if unknown."""
        return self._offsets[name]

    def write_header(self, buf: memoryview, *, iteration: int, previous: int, scalars_len: int) -> None:
        """Write the header to the beginning of ``buf``, with blank digests.

        Raises:
            ValueError: ``buf`` is shorter than the image, or a number does not fit its field.
        """
        if len(buf) < self.image_len:
            raise ValueError(f"the buffer has {len(buf)} bytes, the image needs {self.image_len}")
        fields = (
            (_AT_ITERATION, _field("iteration", iteration, _ITERATION_WIDTH)),
            (_AT_PREVIOUS, _field("previous", previous, _ITERATION_WIDTH)),
            (_AT_SCALARS, _field("scalars_len", scalars_len, _SCALARS_WIDTH)),
        )
        buf[: self.data_offset] = self._template
        for at, text in fields:
            buf[at : at + len(text)] = text


def _checked(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    seen: set[str] = set()
    checked = list(entries)
    for entry in checked:
        if entry.name in seen or entry.name == "__metadata__":
            raise ValueError(f"two tensors have the name {entry.name!r}")
        seen.add(entry.name)
        if entry.dtype not in DTYPE_SIZE:
            raise ValueError(f"tensor {entry.name!r} has unknown dtype {entry.dtype!r}")
        if len(entry.shape) > MAX_DIMS or min(entry.shape, default=0) < 0:
            raise ValueError(f"tensor {entry.name!r} has bad shape {entry.shape}")
    return checked


def _metadata(
    identity: Mapping[str, str], num_tensors: int, num_operators: int, anchors: int
) -> dict[str, str]:
    taken = _OWN_KEYS.intersection(identity)
    if taken:
        raise ValueError(f"identity must not contain {', '.join(sorted(taken))}")
    if anchors < 0 or anchors >> num_operators:
        raise ValueError(f"anchors name operators beyond the model's {num_operators}")
    bitmap = anchors.to_bytes((num_operators + 7) // 8, "little")
    return {
        "format": FORMAT,
        "iteration": " " * _ITERATION_WIDTH,
        "previous": " " * _ITERATION_WIDTH,
        "scalars_len": " " * _SCALARS_WIDTH,
        "digests": "0" * (DIGEST_HEX * num_tensors),
        **identity,
        "num_operators": str(num_operators),
        "anchors": base64.b64encode(bitmap).decode("ascii"),
    }


def _padded(header: bytes, data_offset: int | None) -> bytes:
    """The header, padded so that the data begin at ``data_offset``."""
    if data_offset is None or len(header) == data_offset:
        return header
    if data_offset % DATA_ALIGNMENT or len(header) > data_offset:
        raise ValueError(f"a header of {len(header)} bytes cannot be padded to {data_offset} bytes")
    text = header[LENGTH_BYTES:] + b" " * (data_offset - len(header))
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _field(name: str, value: int, width: int) -> bytes:
    text = b"%*d" % (width, value)
    if len(text) > width:
        raise ValueError(f"{name} {value} has more than {width} digits")
    return text


# -- reading a header ----------------------------------------------------------------------------


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
        with self._lock:
            parsed = self._layouts.get(layout_id)
            if parsed is not None:
                self._layouts.move_to_end(layout_id)
            return parsed

    def put(self, layout_id: int, parsed: ParsedHeader) -> None:
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


def _read_number(buf: memoryview, name: str, at: int, width: int) -> int:
    text = bytes(buf[at : at + width])
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ImageError(f"the image header has {text!r} for {name}")
    return int(match[1])


def _find_data_offset(buf: memoryview) -> int:
    """The offset of the data, checked against the buffer and the limit."""
    if len(buf) < LENGTH_BYTES:
        raise ImageError(f"{len(buf)} bytes are too few for an image")
    offset = LENGTH_BYTES + int.from_bytes(buf[:LENGTH_BYTES], "little")
    if offset > min(len(buf), LENGTH_BYTES + MAX_HEADER_BYTES):
        raise ImageError(f"the image header would end at {offset}, the buffer at {len(buf)}")
    if offset % DATA_ALIGNMENT or offset < _AT_DIGESTS:
        raise ImageError(f"image data cannot begin at {offset}")
    return offset


def _parse_header(buf: memoryview) -> tuple[ParsedHeader, int]:
    """The contents of the header, and its layout id."""
    data_offset = _find_data_offset(buf)
    blanked, num_tensors = _blanked(buf, data_offset)
    layout_id = xxhash.xxh3_64_intdigest(blanked)
    parsed = _parsed_layouts.get(layout_id)
    if parsed is None:
        parsed = _parse_blanked(blanked, num_tensors)
        _parsed_layouts.put(layout_id, parsed)
    if parsed.image_len > len(buf):
        raise ImageError(f"the image is truncated: it has {parsed.image_len} bytes, the buffer {len(buf)}")
    return parsed, layout_id


def layout_id_of(header: bytes) -> int:
    """The layout id of an image with this header; raises ImageError if it is not the header of one."""
    buf = memoryview(header)
    return xxhash.xxh3_64_intdigest(_blanked(buf, _find_data_offset(buf))[0])


def _blanked(buf: memoryview, data_offset: int) -> tuple[bytearray, int]:
    """The header with its mutable fields blanked, and the number of its digests."""
    header = bytearray(buf[:data_offset])
    end = header.find(b'"', _AT_DIGESTS)
    digits = header[_AT_DIGESTS : max(end, _AT_DIGESTS)]
    if end < 0 or len(digits) % DIGEST_HEX or digits.strip(b"0123456789abcdef"):
        raise ImageError("the digests field of the image header is damaged")
    header[_AT_ITERATION : _AT_ITERATION + _ITERATION_WIDTH] = b" " * _ITERATION_WIDTH
    header[_AT_PREVIOUS : _AT_PREVIOUS + _ITERATION_WIDTH] = b" " * _ITERATION_WIDTH
    header[_AT_SCALARS : _AT_SCALARS + _SCALARS_WIDTH] = b" " * _SCALARS_WIDTH
    header[_AT_DIGESTS:end] = b"0" * len(digits)
    if not header.startswith(_PREFIX, LENGTH_BYTES):
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
        identity={key: value for key, value in metadata.items() if key not in _OWN_KEYS},
        num_operators=num_operators,
        anchors=anchors,
        data_offset=len(blanked),
        image_len=header.end,
    )


def _operators(metadata: Mapping[str, str]) -> tuple[int, int]:
    """The number of operators, and the bitmask of those with an anchor."""
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


class ImageView:
    """An image in a buffer, with a checked header; `verify` checks the digests.

    Iterating yields the tensors in data order. Nothing is copied; the view is valid as long as the
    buffer is.

    Attributes:
        entries: the tensors in data order, with offsets from the beginning of the image.
        identity: the metadata that was passed to `ImageLayout.build`.
        anchors: bitmask over operator ids: the operators with an anchor in this image.
    Raises:
        ImageError: the header is not an image header, or the buffer ends before the image.
    """

    __slots__ = (
        "_buf",
        "_by_name",
        "anchors",
        "data_offset",
        "entries",
        "identity",
        "image_len",
        "iteration",
        "layout_id",
        "num_operators",
        "previous",
        "scalars_len",
    )

    def __init__(self, buf: memoryview) -> None:
        parsed, self.layout_id = _parse_header(buf)
        self._buf, self._by_name = buf, parsed.by_name
        self.entries, self.identity = parsed.tensors, parsed.identity
        self.num_operators, self.anchors = parsed.num_operators, parsed.anchors
        self.data_offset, self.image_len = parsed.data_offset, parsed.image_len
        self.iteration = _read_number(buf, "iteration", _AT_ITERATION, _ITERATION_WIDTH)
        self.previous = _read_number(buf, "previous", _AT_PREVIOUS, _ITERATION_WIDTH)
        self.scalars_len = _read_number(buf, "scalars_len", _AT_SCALARS, _SCALARS_WIDTH)
        if self.iteration < 0 or self.previous < -1 or self.scalars_len < 0:
            raise ImageError("a number in the image header is negative")

    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def tensor(self, name: str) -> ImageTensor:
        """The description of tensor ``name``; KeyError if the image has none."""
        return self._by_name[name]

    def data(self, name: str) -> memoryview:
        """The bytes of tensor ``name``, in place; KeyError if the image has none."""
        tensor = self._by_name[name]
        return self._buf[tensor.offset : tensor.offset + tensor.nbytes]

    @property
    def scalars(self) -> memoryview:
        """The step's scalars, packed, in place; KeyError if the image has none."""
        return self.data(SCALARS)[: self.scalars_len]

    def __iter__(self) -> Iterator[ImageTensor]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name


# -- digests -------------------------------------------------------------------------------------


class DigestMismatch(ImageError):
    """The bytes differ from the sealed ones; ``tensor`` is the first tensor that differs."""

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor)  # the argument from which pickle rebuilds it
        self.tensor = tensor

    def __str__(self) -> str:
        return f"the digest of {self.tensor!r} does not match: its bytes were changed"


class DigestMap(Protocol):
    """``map``, or the ``map`` of a thread pool: results in the order of the arguments."""

    def __call__(
        self, function: Callable[[Batch], list[bytes]], arguments: Iterable[Batch], /
    ) -> Iterable[list[bytes]]: ...


class Mismatch(NamedTuple):
    """A range ``[start, stop)`` of an image that differs from the sealed bytes: the tensor ``name``, or
    the ``"header"``.
    """

    name: str
    start: int
    stop: int


def seal(buf: memoryview, *, map_fn: DigestMap | None = None) -> bytes:
    """Digest every tensor, write the digests into the header, return the header's digest.

    Args:
        buf: the image, complete except for its digests; only the digests field is written.
        map_fn: the ``map`` of a thread pool; digesting releases the GIL.
    Raises:
        ImageError: the header is not an image header.
    """
    parsed, _ = _parse_header(buf)
    digests = b"".join(_digests(buf, parsed, map_fn))
    buf[_AT_DIGESTS : _AT_DIGESTS + 2 * len(digests)] = binascii.hexlify(digests)
    return xxhash.xxh3_128_digest(buf[: parsed.data_offset])


def sealed_digests(buf: memoryview) -> tuple[int, tuple[ImageTensor, ...], bytes]:
    """The layout id of a sealed image, its tensors in data order, and their digests, 16 bytes each.

    Raises:
        ImageError: the header is not an image header.
    """
    parsed, layout_id = _parse_header(buf)
    return layout_id, parsed.tensors, _stored_digests(buf, parsed)


def verify(buf: memoryview, header_digest: bytes, *, map_fn: DigestMap | None = None) -> None:
    """Check that the image is, bit for bit, the one that was sealed with ``header_digest``.

    Raises:
        DigestMismatch: names the first damaged tensor, or ``"header"``.
        ImageError: the header is truncated, or not an image header.
    """
    if xxhash.xxh3_128_digest(buf[: _find_data_offset(buf)]) != header_digest:
        raise DigestMismatch("header")
    first = next(_changed(buf, map_fn), None)
    if first is not None:
        raise DigestMismatch(first.name)


def mismatches(buf: memoryview, header_digest: bytes, *, map_fn: DigestMap | None = None) -> list[Mismatch]:
    """All ranges of the image that differ from the one sealed with ``header_digest``, in order and in
    one pass.

    If the header is damaged, the tensors cannot be checked: the result is the header alone, as far as
    its length is known (8 bytes, if the length itself is damaged). Repair it and call again.

    Raises:
        ImageError: the sealed bytes are not an image, or do not fit into the buffer; this cannot be repaired.
    """
    if len(buf) < LENGTH_BYTES:
        raise ImageError(f"{len(buf)} bytes are too few for an image")
    try:
        data_offset = _find_data_offset(buf)
    except ImageError:
        return [Mismatch("header", 0, LENGTH_BYTES)]
    if xxhash.xxh3_128_digest(buf[:data_offset]) != header_digest:
        return [Mismatch("header", 0, data_offset)]
    return [Mismatch(t.name, t.offset, t.offset + t.nbytes) for t in _changed(buf, map_fn)]


def _digests(buf: memoryview, parsed: ParsedHeader, map_fn: DigestMap | None) -> list[bytes]:
    """The digest of each tensor in data order."""

    def digest(batch: Batch) -> list[bytes]:
        return [xxhash.xxh3_128_digest(buf[t.offset : t.offset + t.nbytes]) for t in batch.tensors]

    results = (map if map_fn is None else map_fn)(digest, parsed.batches)
    in_order = sorted(zip(parsed.batches, results, strict=True), key=lambda pair: pair[0].order)
    return [one for _, group in in_order for one in group]


def _stored_digests(buf: memoryview, parsed: ParsedHeader) -> bytes:
    return binascii.unhexlify(buf[_AT_DIGESTS : _AT_DIGESTS + DIGEST_HEX * len(parsed.tensors)])


def _changed(buf: memoryview, map_fn: DigestMap | None) -> Iterator[ImageTensor]:
    """The tensors whose bytes do not match the digests in the header."""
    parsed, _ = _parse_header(buf)
    stored = _stored_digests(buf, parsed)
    at = 0
    for tensor, digest in zip(parsed.tensors, _digests(buf, parsed, map_fn), strict=True):
        if stored[at : at + len(digest)] != digest:
            yield tensor
        at += len(digest)
