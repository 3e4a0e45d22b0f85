"""Reading msgpack that somebody else wrote: one function for all of it, with one error for whatever is wrong.

The decoder's types bound what may be in it (lengths of lists and texts, ranges of numbers). msgspec
compares a length that is announced with the bytes that are there before it makes room, skips what
no field takes without making it, and counts how deep it is. What is untyped (``Any``) may cost a
hundred times its bytes: decoders for the messages of others have none.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

__all__ = ["MAX_PACKED_BYTES", "unpack"]

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
        ValueError: it is larger than ``max_bytes``, no msgpack, nested too deeply, or not what the
            decoder takes.
    """
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes; at most {max_bytes} are read")
    try:
        return decoder.decode(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
