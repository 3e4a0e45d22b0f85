"""The image: what a slot holds and what is stored, one valid safetensors file per snapshot.

``docs/architecture.md`` section 3 is the specification. The layout of an image is planned once
(`ImageLayout`); from then on writing its header is one copy of a template and three patches, and
sealing it is digesting bytes that are already in place. Nothing is serialised, nothing is copied.

So that the mutable fields are found without parsing, every header begins with the same bytes::

    {"__metadata__":{"format":"ckptd/1","iteration":"<20>","previous":"<20>","scalars_len":"<12>",
    "digests":"<32 per tensor>", …

(in one line). The *layout id* is the xxh3_64 of bytes [0, 8 + header_len) with the first three fields
blanked to spaces and the digests to zeros; what a header says is parsed once per layout id.

Invariants: tensor data is contiguous, begins at a multiple of 64, and lies in order of item size
(descending), so every tensor is aligned to its items. Whatever is read is checked before it is used:
a hostile header raises `ImageError` and costs no more than its own length.

A buffer may be longer than its image (a slot is); what follows the image is never touched.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import xxhash

__all__ = [
    "DTYPE_SIZE",
    "FORMAT",
    "DigestMismatch",
    "ImageError",
    "ImageLayout",
    "ImageTensor",
    "ImageView",
    "MapFunction",
    "Mismatch",
    "TensorEntry",
    "mismatches",
    "seal",
    "verify",
]

FORMAT = "ckptd/1"

DTYPE_SIZE: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}

_LENGTH_BYTES = 8
_DATA_ALIGNMENT = 64
_MAX_HEADER_BYTES = 100_000_000  # what safetensors itself accepts
_MAX_DIMS = 64
_ITERATION_WIDTH = 20
_SCALARS_WIDTH = 12
_DIGEST_HEX = 32
_BATCH_BYTES = 4 << 20  # below this a thread's hand-over costs more than it hashes (16 GB/s)
_MAX_CACHED_LAYOUTS = 1024
_MAX_CACHED_TENSORS = 500_000
_FIXED_KEYS = ("format", "iteration", "previous", "scalars_len", "digests")
_OWN_KEYS = frozenset({*_FIXED_KEYS, "num_operators", "anchors"})

_AT_ITERATION = _LENGTH_BYTES + len(f'{{"__metadata__":{{"format":"{FORMAT}","iteration":"')
_AT_PREVIOUS = _AT_ITERATION + _ITERATION_WIDTH + len('","previous":"')
_AT_SCALARS = _AT_PREVIOUS + _ITERATION_WIDTH + len('","scalars_len":"')
_AT_DIGESTS = _AT_SCALARS + _SCALARS_WIDTH + len('","digests":"')
_NUMBER = re.compile(rb" *(-?[0-9]+)")


class ImageError(ValueError):
    """The bytes are not an image, or not a whole one."""


class DigestMismatch(ImageError):
    """The bytes are not those that were sealed; ``tensor`` is the first that differs."""

    def __init__(self, tensor: str) -> None:
        super().__init__(f"the digest of {tensor!r} does not match: its bytes were changed")
        self.tensor = tensor
        self.args = (tensor,)  # what rebuilds it from a pickle

    def __str__(self) -> str:
        """What does not match."""
        return f"the digest of {self.tensor!r} does not match: its bytes were changed"


class MapFunction(Protocol):
    """``map``, or the ``map`` of a thread pool: results in the order of the arguments."""

    def __call__(
        self, function: Callable[[_Batch], list[bytes]], arguments: Iterable[_Batch], /
    ) -> Iterable[list[bytes]]:
        """Call ``function`` for each argument."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to lay out."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_SIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class ImageTensor:
    """A tensor of an image; ``offset`` counts from the beginning of the image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Mismatch(NamedTuple):
    """Bytes ``[start, stop)`` of an image that are not those that were sealed: of a tensor, or of the ``"header"``."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Where everything of an image lies, and its header ready to be copied."""

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
        """Plan the image of ``entries``, which are ordered by item size, descending and stable.

        Args:
            identity: further metadata of the header: job, run, rank, world_size.
            num_operators: how many operators the model has.
            anchors: bitmask over operator ids: those whose anchor is in this image.
            data_offset: where data is to begin (a multiple of 64), for data that is in place already, in the order of
                ``entries``; None lets it follow the header, in the order said above.
        Raises:
            ValueError: a name twice, an unknown dtype, a bad shape, an anchor out of range, a header longer than
                ``data_offset`` leaves room for.
        """
        checked = _checked(entries)
        if data_offset is None:
            checked = sorted(checked, key=lambda entry: -DTYPE_SIZE[entry.dtype])
        ordered = tuple(checked)
        metadata = _metadata(identity, len(ordered), num_operators, anchors)
        ends = list(itertools.accumulate((entry.nbytes for entry in ordered), initial=0))
        template = _padded(_render(metadata, ordered, ends), data_offset)
        data_offset = len(template)
        return cls(
            entries=ordered,
            header_len=data_offset - _LENGTH_BYTES,
            data_offset=data_offset,
            image_len=data_offset + ends[-1],
            layout_id=xxhash.xxh3_64_intdigest(template),
            num_operators=num_operators,
            anchors=anchors,
            _offsets={e.name: data_offset + at for e, at in zip(ordered, ends, strict=False)},
            _template=template,
        )

    def offset_of(self, name: str) -> int:
        """Where tensor ``name`` begins, from the beginning of the image; KeyError if unknown."""
        return self._offsets[name]

    def write_header(
        self, buf: memoryview, *, iteration: int, previous: int, scalars_len: int
    ) -> None:
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


class ImageView:
    """An image in a buffer, its header checked; digests are `verify`'s affair.

    Iterating yields the tensors in data order. Nothing is copied; the view is valid as long as the
    buffer is.

    Raises:
        ImageError: the header is not that of an image, or the buffer ends before the image does.
    """

    __slots__ = ("_buf", "_parsed", "iteration", "layout_id", "previous", "scalars_len")

    def __init__(self, buf: memoryview) -> None:
        self._parsed, self.layout_id = _parse(buf)
        self._buf = buf
        self.iteration = _number(buf, "iteration", _AT_ITERATION, _ITERATION_WIDTH)
        self.previous = _number(buf, "previous", _AT_PREVIOUS, _ITERATION_WIDTH)
        self.scalars_len = _number(buf, "scalars_len", _AT_SCALARS, _SCALARS_WIDTH)
        if self.iteration < 0 or self.previous < -1 or self.scalars_len < 0:
            raise ImageError("a number in the image header is negative")

    @property
    def entries(self) -> tuple[ImageTensor, ...]:
        """The tensors in data order, with offsets from the beginning of the image."""
        return self._parsed.tensors

    @property
    def identity(self) -> Mapping[str, str]:
        """The metadata that `ImageLayout.build` was given."""
        return self._parsed.identity

    @property
    def num_operators(self) -> int:
        """How many operators the model has."""
        return self._parsed.num_operators

    @property
    def anchors(self) -> int:
        """Bitmask over operator ids: those whose anchor is here."""
        return self._parsed.anchors

    @property
    def data_offset(self) -> int:
        """Where tensor data begins."""
        return self._parsed.data_offset

    @property
    def image_len(self) -> int:
        """Where the image ends."""
        return self._parsed.image_len

    def names(self) -> tuple[str, ...]:
        """The names of the tensors in data order."""
        return tuple(self._parsed.by_name)

    def tensor(self, name: str) -> ImageTensor:
        """Where and what tensor ``name`` is; KeyError if it is not here."""
        return self._parsed.by_name[name]

    def data(self, name: str) -> memoryview:
        """The bytes of tensor ``name``, in place; KeyError if it is not here."""
        tensor = self._parsed.by_name[name]
        return self._buf[tensor.offset : tensor.offset + tensor.nbytes]

    def __iter__(self) -> Iterator[ImageTensor]:
        return iter(self._parsed.tensors)

    def __len__(self) -> int:
        return len(self._parsed.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._parsed.by_name


def seal(buf: memoryview, *, map_fn: MapFunction | None = None) -> bytes:
    """Digest every tensor, write the digests into the header, return the header's digest.

    Args:
        buf: the image, complete but for its digests; only its digests field is written.
        map_fn: the ``map`` of a thread pool; digesting releases the GIL.
    Raises:
        ImageError: the header is not that of an image.
    """
    parsed, _ = _parse(buf)
    digests = b"".join(_digests(buf, parsed, map_fn))
    buf[_AT_DIGESTS : _AT_DIGESTS + 2 * len(digests)] = binascii.hexlify(digests)
    return xxhash.xxh3_128_digest(buf[: parsed.data_offset])


def verify(buf: memoryview, header_digest: bytes, *, map_fn: MapFunction | None = None) -> None:
    """Return if the image is, bit for bit, what was sealed with ``header_digest``.

    Raises:
        DigestMismatch: naming the first damaged tensor, or ``"header"``.
        ImageError: the header is truncated, or not that of an image.
    """
    if xxhash.xxh3_128_digest(buf[: _data_offset(buf)]) != header_digest:
        raise DigestMismatch("header")
    first = next(_changed(buf, map_fn), None)
    if first is not None:
        raise DigestMismatch(first.name)


def mismatches(
    buf: memoryview, header_digest: bytes, *, map_fn: MapFunction | None = None
) -> list[Mismatch]:
    """Everything in the image that is not, bit for bit, what was sealed with ``header_digest``, in order and in one pass.

    A damaged header hides which tensors are damaged: it is named alone, as far as its length can be told (8 bytes, if that is
    what is damaged). Who mends it asks again.

    Raises:
        ImageError: what was sealed is not an image, or does not fit into the buffer: nothing mends that.
    """
    if len(buf) < _LENGTH_BYTES:
        raise ImageError(f"{len(buf)} bytes are too few for an image")
    try:
        data_offset = _data_offset(buf)
    except ImageError:
        return [Mismatch("header", 0, _LENGTH_BYTES)]
    if xxhash.xxh3_128_digest(buf[:data_offset]) != header_digest:
        return [Mismatch("header", 0, data_offset)]
    return [Mismatch(t.name, t.offset, t.offset + t.nbytes) for t in _changed(buf, map_fn)]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Neighbouring tensors that one call digests; ``order`` is its place in the image."""

    order: int
    tensors: tuple[ImageTensor, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Parsed:
    """What a header says, apart from its mutable fields."""

    tensors: tuple[ImageTensor, ...]
    by_name: Mapping[str, ImageTensor]
    batches: tuple[_Batch, ...]  # largest first, so that a pool ends evenly
    identity: Mapping[str, str]
    num_operators: int
    anchors: int
    data_offset: int
    image_len: int


class _LayoutCache:
    """The headers parsed last, by layout id; bounded in layouts and in tensors."""

    def __init__(self, max_layouts: int, max_tensors: int) -> None:
        self._max_layouts = max_layouts
        self._max_tensors = max_tensors
        self._lock = threading.Lock()
        self._layouts: OrderedDict[int, _Parsed] = OrderedDict()
        self._num_tensors = 0

    def get(self, layout_id: int) -> _Parsed | None:
        """The parsed header, which becomes the most recent one."""
        with self._lock:
            parsed = self._layouts.get(layout_id)
            if parsed is not None:
                self._layouts.move_to_end(layout_id)
            return parsed

    def put(self, layout_id: int, parsed: _Parsed) -> None:
        """Keep ``parsed``, and as many of the others as the bounds allow."""
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


def _checked(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    seen: set[str] = set()
    checked = list(entries)
    for entry in checked:
        if entry.name in seen or entry.name == "__metadata__":
            raise ValueError(f"tensor name {entry.name!r} is taken")
        seen.add(entry.name)
        if entry.dtype not in DTYPE_SIZE:
            raise ValueError(f"tensor {entry.name!r} has unknown dtype {entry.dtype!r}")
        if len(entry.shape) > _MAX_DIMS or any(size < 0 for size in entry.shape):
            raise ValueError(f"tensor {entry.name!r} has bad shape {entry.shape}")
    return checked


def _metadata(
    identity: Mapping[str, str], num_tensors: int, num_operators: int, anchors: int
) -> dict[str, str]:
    taken = _OWN_KEYS.intersection(identity)
    if taken:
        raise ValueError(f"identity must not contain {', '.join(sorted(taken))}")
    if anchors < 0 or anchors >> num_operators:
        raise ValueError(f"anchors name operators beyond the {num_operators} there are")
    bitmap = anchors.to_bytes((num_operators + 7) // 8, "little")
    return {
        "format": FORMAT,
        "iteration": " " * _ITERATION_WIDTH,
        "previous": " " * _ITERATION_WIDTH,
        "scalars_len": " " * _SCALARS_WIDTH,
        "digests": "0" * (_DIGEST_HEX * num_tensors),
        **identity,
        "num_operators": str(num_operators),
        "anchors": base64.b64encode(bitmap).decode("ascii"),
    }


def _render(
    metadata: Mapping[str, str], ordered: Sequence[TensorEntry], ends: Sequence[int]
) -> bytes:
    """The header with its length in front and blank mutable fields, padded up to the data."""
    header: dict[str, object] = {"__metadata__": metadata}
    for entry, begin, end in zip(ordered, ends, ends[1:], strict=False):
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _DATA_ALIGNMENT)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(text)} bytes, limit {_MAX_HEADER_BYTES}")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _padded(header: bytes, data_offset: int | None) -> bytes:
    """The same header, longer, so that data begins at ``data_offset``."""
    if data_offset is None or len(header) == data_offset:
        return header
    if data_offset % _DATA_ALIGNMENT or len(header) > data_offset:
        raise ValueError(f"a header of {len(header)} bytes does not end at {data_offset}")
    text = header[_LENGTH_BYTES:] + b" " * (data_offset - len(header))
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _field(name: str, value: int, width: int) -> bytes:
    text = b"%*d" % (width, value)
    if len(text) > width:
        raise ValueError(f"{name} {value} has more than {width} digits")
    return text


def _number(buf: memoryview, name: str, at: int, width: int) -> int:
    text = bytes(buf[at : at + width])
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ImageError(f"the image header has {text!r} for {name}")
    return int(match[1])


def _data_offset(buf: memoryview) -> int:
    """Where data begins, checked against the buffer and the limit."""
    if len(buf) < _LENGTH_BYTES:
        raise ImageError(f"{len(buf)} bytes are too few for an image")
    offset = _LENGTH_BYTES + int.from_bytes(buf[:_LENGTH_BYTES], "little")
    if offset > min(len(buf), _LENGTH_BYTES + _MAX_HEADER_BYTES):
        raise ImageError(f"the image header would end at {offset}, the buffer at {len(buf)}")
    if offset % _DATA_ALIGNMENT or offset < _AT_DIGESTS:
        raise ImageError(f"image data cannot begin at {offset}")
    return offset


def _parse(buf: memoryview) -> tuple[_Parsed, int]:
    """What the header says, and its layout id."""
    data_offset = _data_offset(buf)
    blanked, num_tensors = _blanked(buf, data_offset)
    layout_id = xxhash.xxh3_64_intdigest(blanked)
    parsed = _parsed_layouts.get(layout_id)
    if parsed is None:
        parsed = _parse_blanked(blanked, num_tensors)
        _parsed_layouts.put(layout_id, parsed)
    if parsed.image_len > len(buf):
        raise ImageError(
            f"the image is truncated: it has {parsed.image_len} bytes, the buffer {len(buf)}"
        )
    return parsed, layout_id


def _blanked(buf: memoryview, data_offset: int) -> tuple[bytearray, int]:
    """The header with its mutable fields blanked, and how many digests it holds."""
    header = bytearray(buf[:data_offset])
    end = header.find(b'"', _AT_DIGESTS)
    digits = header[_AT_DIGESTS : max(end, _AT_DIGESTS)]
    if end < 0 or len(digits) % _DIGEST_HEX or digits.strip(b"0123456789abcdef"):
        raise ImageError("the digests field of the image header is damaged")
    header[_AT_ITERATION : _AT_ITERATION + _ITERATION_WIDTH] = b" " * _ITERATION_WIDTH
    header[_AT_PREVIOUS : _AT_PREVIOUS + _ITERATION_WIDTH] = b" " * _ITERATION_WIDTH
    header[_AT_SCALARS : _AT_SCALARS + _SCALARS_WIDTH] = b" " * _SCALARS_WIDTH
    header[_AT_DIGESTS:end] = b"0" * len(digits)
    if not header.startswith(_PREFIX, _LENGTH_BYTES):
        raise ImageError(f"the header does not begin as one of format {FORMAT}")
    return header, len(digits) // _DIGEST_HEX


def _parse_blanked(blanked: bytearray, num_tensors: int) -> _Parsed:
    try:
        text = blanked[_LENGTH_BYTES:].decode("utf-8")
        header = json.loads(text, object_pairs_hook=_unique)
    except ImageError:
        raise
    except (ValueError, RecursionError) as error:
        raise ImageError(f"the image header is not JSON ({error})") from error
    metadata = header.pop("__metadata__", None)  # it is an object: the prefix was checked
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ImageError("the metadata of the image header are not strings")
    tensors = _tensors(cast("dict[str, object]", header), len(blanked))
    if len(tensors) != num_tensors:
        raise ImageError(f"the image has {len(tensors)} tensors and {num_tensors} digests")
    num_operators, anchors = _operators(metadata)
    last = tensors[-1] if tensors else None
    return _Parsed(
        tensors=tensors,
        by_name={tensor.name: tensor for tensor in tensors},
        batches=_batches(tensors),
        identity={key: value for key, value in metadata.items() if key not in _OWN_KEYS},
        num_operators=num_operators,
        anchors=anchors,
        data_offset=len(blanked),
        image_len=last.offset + last.nbytes if last else len(blanked),
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ImageError("the image header has a key twice")
    return found


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
        raise ImageError(f"the image anchors operators beyond the {count} there are")
    return int(count), anchors


def _tensors(header: Mapping[str, object], data_offset: int) -> tuple[ImageTensor, ...]:
    found = sorted(
        (_tensor(name, value, data_offset) for name, value in header.items()),
        key=lambda tensor: (tensor.offset, tensor.nbytes),
    )
    end = data_offset
    for tensor in found:
        if tensor.offset != end:
            raise ImageError(f"tensor {tensor.name!r} overlaps its neighbour or leaves a gap")
        end += tensor.nbytes
    return tuple(found)


def _tensor(name: str, value: object, data_offset: int) -> ImageTensor:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ImageError(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_SIZE:
        raise ImageError(f"tensor {name!r} has unknown dtype {str(dtype)[:20]!r}")
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise ImageError(f"tensor {name!r} has a bad shape")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ImageError(f"tensor {name!r} has bad offsets")
    begin, end = offsets
    if math.prod(shape) * DTYPE_SIZE[dtype] != end - begin:
        raise ImageError(f"tensor {name!r} is {end - begin} bytes long, not as its shape says")
    return ImageTensor(name, dtype, tuple(shape), data_offset + begin, end - begin)


def _naturals(value: object) -> bool:
    """Whether it is a list of integers from 0 to 2^63."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def _batches(tensors: Sequence[ImageTensor]) -> tuple[_Batch, ...]:
    """Neighbours together until they are worth a call, largest batch first."""
    groups: list[list[ImageTensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = _BATCH_BYTES
        groups[-1].append(tensor)
        room -= tensor.nbytes
    batches = [
        _Batch(order, tuple(group), sum(tensor.nbytes for tensor in group))
        for order, group in enumerate(groups)
    ]
    return tuple(sorted(batches, key=lambda batch: -batch.nbytes))


def _digests(buf: memoryview, parsed: _Parsed, map_fn: MapFunction | None) -> list[bytes]:
    """The digest of each tensor in data order."""

    def digest(batch: _Batch) -> list[bytes]:
        return [xxhash.xxh3_128_digest(buf[t.offset : t.offset + t.nbytes]) for t in batch.tensors]

    results = (map if map_fn is None else map_fn)(digest, parsed.batches)
    in_order = sorted(zip(parsed.batches, results, strict=True), key=lambda pair: pair[0].order)
    return [one for _, group in in_order for one in group]


def _changed(buf: memoryview, map_fn: MapFunction | None) -> Iterator[ImageTensor]:
    """The tensors whose bytes do not match the digests in the header."""
    parsed, _ = _parse(buf)
    stored = binascii.unhexlify(buf[_AT_DIGESTS : _AT_DIGESTS + _DIGEST_HEX * len(parsed.tensors)])
    at = 0
    for tensor, digest in zip(parsed.tensors, _digests(buf, parsed, map_fn), strict=True):
        if stored[at : at + len(digest)] != digest:
            yield tensor
        at += len(digest)


def _fixed_prefix() -> bytes:
    blank = json.dumps({"__metadata__": _metadata({}, 0, 0, 0)}, separators=(",", ":"))
    return blank[: _AT_DIGESTS - _LENGTH_BYTES].encode("ascii")


_PREFIX = _fixed_prefix()
