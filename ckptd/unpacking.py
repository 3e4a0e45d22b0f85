"""Decoding msgpack from others: one function, and one error for everything that can be wrong.

The decoder's types bound the content (lengths of lists and texts, ranges of numbers). msgspec compares an
announced length with the bytes that exist before it allocates, skips fields that no type takes, and counts
the depth. Untyped content (``Any``) may cost a hundred times its bytes: decoders for messages of others
have none.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

MAX_PACKED_BYTES = 32 << 20

T = TypeVar("T")


def unpack(
    decoder: msgspec.msgpack.Decoder[T],
    data: bytes | memoryview,
    *,
    max_bytes: int = MAX_PACKED_BYTES,
) -> T:
    """The value in ``data``.

    Raises:
        ValueError: it is larger than ``max_bytes``, no msgpack, nested too deeply, or of another type.
    """
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes; at most {max_bytes} are read")
    try:
        return decoder.decode(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
