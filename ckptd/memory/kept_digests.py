"""The cryptographic digest of an image, kept in the header page of its slot behind the header
(``docs/architecture.md`` section 2).

It has a checksum of its own and names the snapshot that it is of. What is of another snapshot (the
slot was filled again), was damaged, or was never written (by a daemon of before) counts as unknown.
It does not follow from the image: somebody who changes an image in memory, together with the xxh3
digests that stand in it, does not change what was kept of it.
"""

from __future__ import annotations

import struct
import zlib

from ckptd.core.slots.segment_format import SLOT_HEADER_LEN, SegmentGeometry, SlotHeader
from ckptd.storage.images.strong_digest import is_strong_digest

__all__ = ["KEPT_DIGEST_AT", "keep_digest", "kept_digest"]

KEPT_DIGEST_AT = 128  # in the slot's header page
_MAGIC = b"IMGD"
_NUMBERS = {"blake3": 1, "sha256": 2}
_NAMES = {number: name for name, number in _NUMBERS.items()}
_FRONT = struct.Struct("<4sI")
_SNAPSHOT = struct.Struct("<qQQQI")  # iteration, sequence, image_len, filled_at_ns, epoch
_DIGEST_BYTES = 32
_CRC = struct.Struct("<I")
_LENGTH = _FRONT.size + _SNAPSHOT.size + _DIGEST_BYTES
assert KEPT_DIGEST_AT >= SLOT_HEADER_LEN


def kept_digest(buf: memoryview, geometry: SegmentGeometry, index: int, header: SlotHeader) -> str:
    """What was kept of the image that slot ``index`` holds under ``header``, as `strong_digest`
    spells it; "" if nothing is known.
    """
    start = geometry.header_offset(index) + KEPT_DIGEST_AT
    data = bytes(buf[start : start + _LENGTH + _CRC.size])
    magic, number = _FRONT.unpack_from(data)
    if magic != _MAGIC or number not in _NAMES:
        return ""
    if _CRC.unpack_from(data, _LENGTH)[0] != zlib.crc32(data[:_LENGTH]):
        return ""
    if data[_FRONT.size : _LENGTH - _DIGEST_BYTES] != _snapshot(header):
        return ""
    return f"{_NAMES[number]}:{data[_LENGTH - _DIGEST_BYTES : _LENGTH].hex()}"


def keep_digest(
    buf: memoryview, geometry: SegmentGeometry, index: int, header: SlotHeader, digest: str
) -> None:
    """Keep the digest of the image that slot ``index`` holds under ``header``; "" forgets what was kept.

    Whoever writes has the slot's lock, for reading at least.

    Raises:
        ValueError: it is no digest.
    """
    start = geometry.header_offset(index) + KEPT_DIGEST_AT
    if not digest:
        buf[start : start + _LENGTH + _CRC.size] = bytes(_LENGTH + _CRC.size)
        return
    if not is_strong_digest(digest):
        raise ValueError(f"{digest[:80]!r} is no digest")
    name, _, text = digest.partition(":")
    data = _FRONT.pack(_MAGIC, _NUMBERS[name]) + _snapshot(header) + bytes.fromhex(text)
    buf[start : start + _LENGTH + _CRC.size] = data + _CRC.pack(zlib.crc32(data))


def _snapshot(header: SlotHeader) -> bytes:
    return _SNAPSHOT.pack(
        header.iteration, header.sequence, header.image_len, header.filled_at_ns, header.epoch
    )
