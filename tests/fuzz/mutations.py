"""Mutations of inputs, of their bytes and of the values in them; each follows from its `random.Random`.

A format with checksums is mutated inside of them: a parser that only ever sees wrong checksums is not tested.
A mutated value that its format cannot spell is mutated as bytes instead.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

import msgspec
import xxhash

from ckptd.storage.checkpoints.sealed_json import seal_json

__all__ = [
    "MAX_INPUT_BYTES",
    "Mutate",
    "changed_bytes",
    "in_json",
    "in_msgpack",
    "in_safetensors",
    "in_sealed_json",
    "packed",
]

Mutate = Callable[[Random, bytes], bytes]

MAX_INPUT_BYTES = 64 << 10
_INTERESTING = (0, 1, 7, 8, 0x22, 0x2F, 0x5B, 0x7B, 0x7F, 0x80, 0x91, 0xC1, 0xFF)
_WORDS = (b"", b"\0" * 8, b"\xff" * 8, b"[" * 3000, b"\x91" * 3000, b"9" * 5000, b"1e999", b"NaN", b"\r\n")
_ODD: tuple[object, ...] = (
    *(0, 1, -1, 2, 63, 255, 65_536, -(1 << 31), (1 << 32) - 1, (1 << 53) + 1, 1 << 62, (1 << 63) - 1),
    *((1 << 64) - 1, 1.5, -0.0, float("nan"), float("inf"), 1e308, True, None, "", "\0", "..", "a/b"),
    *("x" * 300, "\u0663", "1e9", "9" * 5000, b"", b"\0", bytes(range(256)), [], {}, [[]], [None], {"": 0}),
)


def changed_bytes(random: Random, data: bytes) -> bytes:
    """The bytes with a few of them flipped, cut out, repeated, moved or put in."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 8))):
        at = random.randrange(len(changed) + 1)
        end = min(len(changed), at + random.choice((1, 1, 2, 4, 8, 64)))
        match random.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 1 if at < len(changed):
                changed[at] = random.choice(_INTERESTING)
            case 2:
                del changed[at:end]
            case 3:
                changed[at:at] = changed[at:end] * random.choice((1, 2, 100))
            case 4:
                changed[at:end] = random.choice(_WORDS)
            case _:
                changed[at:end] = random.randbytes(end - at)
    return bytes(changed[:MAX_INPUT_BYTES])


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each place of a value: what holds it, and its key there."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def changed_tree(random: Random, tree: Any) -> Any:
    """The value with a few values in it replaced, removed, doubled, exchanged or varied; it is used up."""
    root = [tree]
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        places = list(_places(root))
        holder, key = random.choice(places)
        match random.randrange(6):
            case 0 | 1:
                holder[key] = random.choice(_ODD)
            case 2 if holder is not root:
                del holder[key]
            case 3 if isinstance(holder, list) and holder is not root:
                holder[key:key] = [holder[key]] * random.choice((1, 3, 200))
            case 4:
                other, where = random.choice(places)
                taken = other.get(where) if isinstance(other, dict) else (other[where:] or [0])[0]
                holder[key] = deepcopy(taken)  # it may be what holds it
            case _:
                holder[key] = _varied(random, holder[key])
        if not root:
            break
    return root[0]


def _varied(random: Random, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return random.choice((value + 1, value - 1, -value, value * 2, value ^ 1 << random.randrange(63)))
    if isinstance(value, float):
        return random.choice((-value, value * 1e9, value / 3, int(value) if abs(value) < 1e9 else 0))
    if isinstance(value, str):
        at = random.randrange(len(value) + 1)
        return value[:at] + random.choice(("", "~", "0", "/", "\0", "é", value)) + value[at + 1 :]
    if isinstance(value, bytes):  # often msgpack again
        return in_msgpack(random, value)
    if isinstance(value, msgspec.msgpack.Ext):
        return msgspec.msgpack.Ext(value.code, in_msgpack(random, bytes(value.data)))
    return [value]


def _in(
    decode: Callable[[bytes], Any], encode: Callable[[Any], bytes], errors: tuple[type[Exception], ...]
) -> Mutate:
    def mutate(random: Random, data: bytes) -> bytes:
        if random.randrange(4):
            try:
                mutated = encode(changed_tree(random, decode(data)))
            except errors:
                return changed_bytes(random, data)
            if len(mutated) <= MAX_INPUT_BYTES:
                return mutated
        return changed_bytes(random, data)

    return mutate


# A mutated tree may hold what the format does not have.
_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, LookupError, struct.error, AttributeError)

in_msgpack = _in(msgspec.msgpack.decode, msgspec.msgpack.encode, _ERRORS)
in_json = _in(json.loads, lambda tree: json.dumps(tree).encode(), _ERRORS)


def _without_digest(data: bytes) -> Any:
    fields = json.loads(data)
    del fields["digest"]
    return fields


in_sealed_json = _in(_without_digest, seal_json, _ERRORS)


def _header(data: bytes) -> Any:
    end = 8 + int.from_bytes(data[:8], "little")
    return [json.loads(data[8:end]), base64.b64encode(data[end:]).decode()]


def _with_header(tree: Any) -> bytes:
    text = json.dumps(tree[0], separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text + base64.b64decode(tree[1])


in_safetensors = _in(_header, _with_header, _ERRORS)


def packed(front: struct.Struct, *, seal: Callable[[bytes], bytes], body: bool = True) -> Mutate:
    """Mutates the numbers of a binary front, and msgpack behind it; ``seal`` makes the checksums anew."""

    def decode(data: bytes) -> Any:
        numbers = list(front.unpack_from(data))
        return [numbers, msgspec.msgpack.decode(data[front.size :])] if body else [numbers]

    def encode(tree: Any) -> bytes:
        payload = msgspec.msgpack.encode(tree[1]) if body else b""
        return seal(front.pack(*tree[0]) + payload)

    return _in(decode, encode, _ERRORS)


def crc(data: bytes) -> bytes:
    """CRC-32, as segments have it."""
    return zlib.crc32(data).to_bytes(4, "little")


def xxh3(data: bytes) -> bytes:
    """xxh3_64, as streams and records have it."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")
