"""Other bytes with the same xxh3 digests: what somebody can make who knows how xxh3 works, and no
cryptographic digest lets pass.

xxh3 adds up products of the halves of 8-byte words, each word combined with a constant of the
algorithm. Where one half of a combined word is zero its product is zero, whatever the other half
is; what remains is a sum, and two of such words may change as long as their sum stays. `plant`
makes two words of this kind, which stand for any content that an attacker chooses or waits for;
`forge` changes them.
"""

from __future__ import annotations

import struct
from pathlib import Path

import xxhash

from ckptd.core.slots.slots import SlotState
from ckptd.memory.segment_file import open_segment
from ckptd.storage.image import ImageView, verify

__all__ = ["FORGEABLE_BYTES", "forge", "forge_slot", "forged", "plant"]

FORGEABLE_BYTES = 256  # a shorter tensor is digested otherwise
_WORD = struct.Struct("<II")  # what makes the product zero, and what may be anything
_FIRST, _SECOND = 0x396CFEB8, 0x2C81017C  # of the secret of xxh3, at 0 and 8
_SECOND_AT = 64  # a stripe later, in the same lane


def plant(data: memoryview | bytearray, offset: int = 0) -> None:
    """Make the tensor that begins there one that can be forged; it has `FORGEABLE_BYTES` at least."""
    _WORD.pack_into(data, offset, _FIRST, 1000)
    _WORD.pack_into(data, offset + _SECOND_AT, _SECOND, 1000)


def forge(data: memoryview | bytearray, offset: int = 0) -> None:
    """Change the planted words of a tensor. Its digest stays."""
    for at, low, step in ((offset, _FIRST, 1), (offset + _SECOND_AT, _SECOND, -1)):
        found, high = _WORD.unpack_from(data, at)
        assert found == low, "nothing was planted there"
        _WORD.pack_into(data, at, low, high + step)


def forged(image: bytes, header_digest: bytes, name: str = "w") -> bytes:
    """The image with another content of one tensor, which verifies all the same."""
    changed = bytearray(image)
    forge(changed, ImageView(memoryview(changed)).tensor(name).offset)
    assert bytes(changed) != image
    verify(memoryview(changed), header_digest)
    assert xxhash.xxh3_128_digest(changed) != xxhash.xxh3_128_digest(image)
    return bytes(changed)


def forge_slot(path: Path, iteration: int) -> None:
    """Forge the one sealed snapshot of this iteration in a segment file, as somebody does who may
    write to a node's memory.
    """
    segment = open_segment(path)
    changed = 0
    for index, header in segment.headers():
        if header.state is SlotState.SEALED and header.iteration == iteration:
            image = segment.image(index, header)
            image[:] = forged(bytes(image), header.header_digest)
            image.release()
            changed += 1
    segment.close()
    assert changed == 1
