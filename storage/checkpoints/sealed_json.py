"""JSON files that end with their own digest, and the simplest of them, ``run.json``.

Each value has one spelling: fields in the given order, one per line, indented by one blank; a list of numbers
or strings on one line, a list of lists or objects with one item per line; ASCII. The last field is
``digest``, the xxh3_128 of all bytes before its line; so readers need no canonical JSON.
``docs/format.md`` section 3 is the specification.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from ckptd.storage.checkpoints.names import check_name

MAX_TEXT = 256

_T = TypeVar("_T")
_encode = json.JSONEncoder(separators=(",", ":")).encode  # created once: json.dumps creates one per call
_quoted = json.encoder.encode_basestring_ascii
_TAIL = re.compile(rb' "digest": "([0-9a-f]{32})"\n\}\n')
_TAIL_BYTES = len(' "digest": ""\n}\n') + 32


class ManifestError(ValueError):
    """The bytes are not a manifest or ``run.json``, or contradict themselves."""


def seal_json(fields: Mapping[str, object]) -> bytes:
    """Encode ``fields`` (at least one) and their digest."""
    head = head_of(fields)
    digest = xxhash.xxh3_128_hexdigest(head)
    return head + f' "digest": "{digest}"\n}}\n'.encode("ascii")


def head_of(fields: Mapping[str, object]) -> bytes:
    """Encode ``fields`` (at least one) in the form that precedes another field."""
    return f"{_text(fields, 1)[:-2]},\n".encode("ascii")  # without "\n}", which follows the last


def _check_seal(data: bytes) -> None:
    """Check that ``data`` ends with the digest of the bytes before it; raises ManifestError otherwise."""
    head, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    found = _TAIL.fullmatch(tail)
    if found is None:
        raise ManifestError("it does not end with a digest: it is truncated, or ckptd did not write it")
    if xxhash.xxh3_128_hexdigest(head).encode("ascii") != found[1]:
        raise ManifestError("its digest does not match: its bytes were changed")


def decode_sealed(data: bytes, limit: int, decoder: msgspec.json.Decoder[_T]) -> _T:
    """Check the seal of ``data`` and decode it; raises ManifestError if either fails."""
    if len(data) > limit:
        raise ManifestError(f"it has {len(data)} bytes, the limit is {limit}")
    _check_seal(data)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"it cannot be read ({error})") from error


def from_base64(what: str, text: str) -> bytes:
    """Decode base64; raises ManifestError if ``text`` is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ManifestError(f"{what}: not base64 ({error})") from error


def in_range(what: str, value: int, least: int, most: int) -> None:
    """Check that ``value`` is in the range; raises ManifestError otherwise."""
    if not least <= value <= most:
        shown = value if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"
        raise ManifestError(f"{what} must be from {least} to {most}, but is {shown}")


def _text(value: object, depth: int) -> str:
    if type(value) is int:  # most values are numbers and texts: no encoder is made for each
        return str(value)
    if isinstance(value, str):
        return _quoted(value)
    pad, end = "\n" + " " * depth, "\n" + " " * (depth - 1)
    if isinstance(value, Mapping) and value:
        lines = [f"{pad}{_quoted(key)}: {_text(item, depth + 1)}" for key, item in value.items()]
        return "{" + ",".join(lines) + end + "}"
    if isinstance(value, list) and value and isinstance(value[0], list | Mapping):
        lines = [f"{pad}{_text(item, depth + 1)}" for item in value]
        return "[" + ",".join(lines) + end + "]"
    return _encode(value)


_RUN_FORMAT = "ckptd.run/1"
MAX_RUN_BYTES = 64 << 10
_MAX_TIME_NS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """A run; ``run_id`` distinguishes runs that use the same names one after the other."""

    job: str
    run: str
    run_id: str
    created_at_ns: int
    tool: str

    def __post_init__(self) -> None:
        check_run(self.job, self.run, self.run_id, self.tool)
        in_range("created_at_ns", self.created_at_ns, 0, _MAX_TIME_NS)

    def to_bytes(self) -> bytes:
        return seal_json({"format": _RUN_FORMAT, **asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes) -> RunIdentity:
        """Parse the output of `to_bytes`; raises ManifestError for anything else."""
        wire = decode_sealed(data, MAX_RUN_BYTES, _decoder)
        identity = cls(wire.job, wire.run, wire.run_id, wire.created_at_ns, wire.tool)
        if identity.to_bytes() != data:
            raise ManifestError("it is not in the form that this version writes")
        return identity


def check_run(job: str, run: str, run_id: str, tool: str) -> None:
    """Check that these values are valid in a manifest; raises ManifestError otherwise."""
    try:
        check_name(job, "job")
        check_name(run, "run")
        check_name(run_id, "run_id")
    except ValueError as error:
        raise ManifestError(str(error)) from error
    in_range("characters of the tool's name", len(tool), 0, MAX_TEXT)


class _WireRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Annotated[str, Meta(pattern=f"^{_RUN_FORMAT}$")]
    job: str
    run: str
    run_id: str
    created_at_ns: int
    tool: str
    digest: str


_decoder = msgspec.json.Decoder(_WireRun)
