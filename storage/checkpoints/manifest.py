"""The manifest of one rank's part of a checkpoint: written last, and checked completely when it is read.

``docs/format.md`` section 4 is the specification. The constructors check that all numbers are in range,
keys are object keys below the run's prefix, extents cover each image without gap or overlap and stay
within their objects, every object is used, and the snapshots are an unbroken chain that anchors every
operator.

`RankManifest.from_bytes` accepts only the one spelling that `to_bytes` writes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec
import xxhash
from msgspec import Meta

from ckptd.storage.checkpoints.names import (
    MAX_EPOCH,
    MAX_ITERATION,
    MAX_RANKS,
    MAX_SEQUENCE,
    CheckpointId,
    ManifestName,
    ObjectName,
    parse,
    run_prefix,
)
from ckptd.storage.checkpoints.sealed_json import (
    MAX_TEXT,
    ManifestError,
    check_run,
    decode_sealed,
    from_base64,
    head_of,
    in_range,
    seal_json,
)
from ckptd.storage.checkpoints.signing import SIGNER, ManifestSigner
from ckptd.storage.strong_digest import STRONG_DIGEST, is_strong_digest

MAX_MANIFEST_BYTES = 64 << 20
_FORMAT = "ckptd.manifest/2"
_FORMATS = {1: "ckptd.manifest/1", 2: _FORMAT}
_MAX_BYTES = 1 << 50  # of an image or an object; a store's own limits are lower
_MAX_OPERATORS = 10**9 - 1  # as in an image
_MAX_U32 = 2**32 - 1  # of a phase or a window
_MAX_TIME_NS = 2**63 - 1
_MAX_SLOTS = 1 << 16
_MAX_DESCRIPTOR_BYTES = 16 << 20
_DIGEST_BYTES = 16
_SIGNATURE_BYTES = 64


class StoredObject(NamedTuple):
    """An object as the store reported it after the upload; ``etag`` is "" if the store has none."""

    key: str
    size: int
    etag: str


class Extent(NamedTuple):
    """A range of an image and its place; ``object`` is an index into the snapshot's objects."""

    image_offset: int
    length: int
    object: int
    object_offset: int


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """One snapshot of a rank: the facts of its slot, and the extents of its image."""

    iteration: int
    previous: int
    sequence: int
    phase: int
    epoch: int
    epoch_start: int
    filled_at_ns: int
    header_digest: bytes
    image_len: int
    layout_id: int
    num_operators: int
    anchors: int
    objects: tuple[StoredObject, ...]
    extents: tuple[Extent, ...]
    image_digest: str = ""  # see `ckptd.storage.strong_digest`; "" in manifests of version 1

    def __post_init__(self) -> None:
        in_range("iteration", self.iteration, 0, MAX_ITERATION)
        in_range("previous", self.previous, -1, self.iteration - 1)
        in_range("sequence", self.sequence, 0, MAX_SEQUENCE)
        in_range("phase", self.phase, 0, _MAX_U32)
        in_range("epoch", self.epoch, 0, MAX_EPOCH)
        in_range("epoch_start", self.epoch_start, -1, MAX_ITERATION)
        in_range("filled_at_ns", self.filled_at_ns, 0, _MAX_TIME_NS)
        in_range("image_len", self.image_len, 1, _MAX_BYTES)
        in_range("layout_id", self.layout_id, 0, 2**64 - 1)
        in_range("num_operators", self.num_operators, 0, _MAX_OPERATORS)
        if len(self.header_digest) != _DIGEST_BYTES:
            raise ManifestError(f"a header digest has {len(self.header_digest)} bytes")
        if self.image_digest and not is_strong_digest(self.image_digest):
            raise ManifestError(f"{self.image_digest[:80]!r} is not the digest of an image")
        if self.anchors < 0 or self.anchors >> self.num_operators:
            raise ManifestError(f"iteration {self.iteration} anchors operators that do not exist")
        _check_objects(self.objects)
        _check_extents(self)

    @property
    def anchor_bitmap(self) -> bytes:
        """``anchors`` as a little-endian bitmap over all operators."""
        return self.anchors.to_bytes((self.num_operators + 7) // 8, "little")


def _check_objects(objects: Sequence[StoredObject]) -> None:
    for stored in objects:
        if not isinstance(parse(stored.key), ObjectName):
            raise ManifestError(f"{stored.key[:120]!r} is not the key of an object")
        in_range("the size of an object", stored.size, 1, _MAX_BYTES)
        in_range("characters of an etag", len(stored.etag), 0, MAX_TEXT)
    if len({stored.key for stored in objects}) != len(objects):
        raise ManifestError("an object is listed twice")


def _check_extents(snapshot: StoredSnapshot) -> None:
    """The extents cover the image from the first byte to the last, and all objects are used."""
    objects, at = snapshot.objects, 0
    for extent in snapshot.extents:
        if extent.image_offset != at or extent.length < 1:
            raise ManifestError(f"an extent leaves a gap at byte {at} of the image, or overlaps")
        if not 0 <= extent.object < len(objects) or extent.object_offset < 0:
            raise ManifestError(f"the extent at byte {at} of the image is in no object")
        if extent.object_offset + extent.length > objects[extent.object].size:
            raise ManifestError(f"the extent at byte {at} of the image exceeds its object")
        at += extent.length
    if at != snapshot.image_len:
        raise ManifestError(f"extents cover {at} bytes of an image of {snapshot.image_len}")
    if {extent.object for extent in snapshot.extents} != set(range(len(objects))):
        raise ManifestError("an object is listed but not used")


@dataclass(frozen=True)  # no slots, because of the cached property
class RankManifest:
    """One rank's part of a checkpoint: its snapshots, and the objects that contain them.

    Attributes:
        every: iterations between checkpoints.
        slot_bytes: the size of a slot, sufficient for any image of this window.
        num_slots: the number of slots of the ring.
        descriptor: the segment's descriptor, opaque to storage.
        tool: name and version of the writer.
        version: of the format. Version 1, which has no digests of images and no signatures, is read but not
            written any more.
        signer: public key of the signer (`ckptd.storage.checkpoints.signing`); "" if it is not signed.
        signature: 64 bytes over `signed_bytes`; empty if it is not signed.
    """

    job: str
    run: str
    run_id: str
    rank: int
    world_size: int
    window: int
    every: int
    written_at_ns: int
    slot_bytes: int
    num_slots: int
    descriptor: bytes
    tool: str
    snapshots: tuple[StoredSnapshot, ...]
    version: int = 2
    signer: str = ""
    signature: bytes = b""

    def __post_init__(self) -> None:
        check_run(self.job, self.run, self.run_id, self.tool)
        in_range("world_size", self.world_size, 1, MAX_RANKS)
        in_range("rank", self.rank, 0, self.world_size - 1)
        in_range("window", self.window, 1, _MAX_U32)
        in_range("every", self.every, 1, MAX_ITERATION)
        in_range("written_at_ns", self.written_at_ns, 0, _MAX_TIME_NS)
        in_range("slot_bytes", self.slot_bytes, 1, _MAX_BYTES)
        in_range("num_slots", self.num_slots, 1, _MAX_SLOTS)
        in_range("bytes of the descriptor", len(self.descriptor), 0, _MAX_DESCRIPTOR_BYTES)
        _check_chain(self.snapshots)
        self._check_version()
        prefix = run_prefix(self.job, self.run)
        for snapshot in self.snapshots:
            if snapshot.image_len > self.slot_bytes:
                raise ManifestError(f"the image of iteration {snapshot.iteration} is larger than a slot")
            if not all(stored.key.startswith(prefix) for stored in snapshot.objects):
                raise ManifestError(f"an object lies outside {prefix}")

    def _check_version(self) -> None:
        if self.version not in _FORMATS:
            raise ManifestError(f"version {self.version} of the manifest is unsupported")
        if (len(self.signature), bool(self.signer)) not in ((0, False), (_SIGNATURE_BYTES, True)):
            raise ManifestError("a signature needs a signer and 64 bytes")
        if self.version == 1 and (self.signer or any(s.image_digest for s in self.snapshots)):
            raise ManifestError("version 1 has no digests of images, and no signature")

    @property
    def start(self) -> int:
        return self.snapshots[0].iteration

    @property
    def end(self) -> int:
        return self.snapshots[-1].iteration

    @cached_property
    def checkpoint(self) -> CheckpointId:
        last = self.snapshots[-1]
        agreed = agreement(
            job=self.job,
            run=self.run,
            run_id=self.run_id,
            world_size=self.world_size,
            epoch=last.epoch,
            epoch_start=last.epoch_start,
            phases=[(snapshot.iteration, snapshot.phase) for snapshot in self.snapshots],
        )
        return CheckpointId(self.end, last.epoch, last.epoch_start, agreed)

    @property
    def key(self) -> str:
        return ManifestName(self.job, self.run, self.checkpoint, self.rank, self.world_size).key

    @property
    def object_keys(self) -> frozenset[str]:
        """The keys of all objects that a restore needs."""
        return frozenset(stored.key for snapshot in self.snapshots for stored in snapshot.objects)

    def to_bytes(self) -> bytes:
        """The stored form; raises ManifestError if it exceeds `MAX_MANIFEST_BYTES`."""
        body = self._body()
        if self.version > 1:
            body["signature"] = base64.b64encode(self.signature).decode("ascii")
        data = seal_json(body)
        if len(data) > MAX_MANIFEST_BYTES:
            raise ManifestError(f"the manifest has {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}")
        return data

    def signed_by(self, signer: ManifestSigner | None) -> RankManifest:
        """The same manifest, signed; unsigned if ``signer`` is None."""
        if signer is None:
            return self
        named = replace(self, signer=signer.public, signature=bytes(_SIGNATURE_BYTES))
        return replace(named, signature=signer.sign(named.signed_bytes))

    @property
    def signed_bytes(self) -> bytes:
        """The bytes that a signature covers: everything before the signature."""
        return head_of(self._body())

    def _body(self) -> dict[str, object]:
        """The fields before the signature, in the order of the format."""
        body: dict[str, object] = {"format": _FORMATS[self.version]}
        body |= {name: getattr(self, name) for name in _MANIFEST_FIELDS}
        body["descriptor"] = base64.b64encode(self.descriptor).decode("ascii")
        body["snapshots"] = [_snapshot_fields(snapshot, self.version) for snapshot in self.snapshots]
        if self.version > 1:
            body["signer"] = self.signer
        return body

    @classmethod
    def from_bytes(cls, data: bytes) -> RankManifest:
        """Parse the output of `to_bytes`; raises ManifestError for anything else."""
        wire = decode_sealed(data, MAX_MANIFEST_BYTES, _manifest_decoder)
        values = {name: getattr(wire, name) for name in _MANIFEST_FIELDS if name not in ("start", "end")}
        values |= {
            "descriptor": from_base64("descriptor", wire.descriptor),
            "snapshots": tuple([_snapshot(fields) for fields in wire.snapshots]),
            "version": 2 if wire.format == _FORMAT else 1,
            "signer": wire.signer,
            "signature": from_base64("signature", wire.signature),
        }
        manifest = cls(**values)
        if manifest.to_bytes() != data:
            raise ManifestError("the manifest is not in the form that this version writes")
        return manifest


def agreement(
    *,
    job: str,
    run: str,
    run_id: str,
    world_size: int,
    epoch: int,
    epoch_start: int,
    phases: Sequence[tuple[int, int]],
) -> str:
    """A hash of the values that all ranks must share: manifests with the same hash form one checkpoint.

    Args:
        phases: (iteration, phase) of each snapshot, from the start of the checkpoint to its end.
    """
    start, end = phases[0][0], phases[-1][0]
    spans = [list(pair) for pair in phases]
    values = [job, run, run_id, world_size, start, end, epoch, epoch_start, spans]
    return xxhash.xxh3_128_hexdigest(json.dumps(values, separators=(",", ":")).encode("ascii"))


# The fields in the order of the format. The constructors above check the ranges.
class _WireSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    iteration: int
    previous: int
    sequence: int
    phase: int
    epoch: int
    epoch_start: int
    filled_at_ns: int
    header_digest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    image_len: int
    layout_id: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    num_operators: int
    anchors: str
    objects: tuple[StoredObject, ...]
    extents: tuple[Extent, ...]
    image_digest: Annotated[str, Meta(pattern=f"^({STRONG_DIGEST})?$")] = ""


class _WireManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Annotated[str, Meta(pattern=f"^({'|'.join(_FORMATS.values())})$")]
    job: str
    run: str
    run_id: str
    rank: int
    world_size: int
    start: int
    end: int
    window: int
    every: int
    written_at_ns: int
    slot_bytes: int
    num_slots: int
    descriptor: str
    tool: str
    snapshots: list[_WireSnapshot]
    digest: str
    signer: Annotated[str, Meta(pattern=f"^({SIGNER})?$")] = ""
    signature: Annotated[str, Meta(max_length=88)] = ""


_manifest_decoder = msgspec.json.Decoder(_WireManifest)
_FIELDS = _WireManifest.__struct_fields__
_MANIFEST_FIELDS = _FIELDS[_FIELDS.index("job") : _FIELDS.index("digest")]


def _snapshot_fields(snapshot: StoredSnapshot, version: int) -> dict[str, object]:
    fields: dict[str, object] = {name: getattr(snapshot, name) for name in _WireSnapshot.__struct_fields__}
    fields |= {
        "header_digest": snapshot.header_digest.hex(),
        "layout_id": f"{snapshot.layout_id:016x}",
        "anchors": base64.b64encode(snapshot.anchor_bitmap).decode("ascii"),
        "objects": [list(stored) for stored in snapshot.objects],
        "extents": [list(extent) for extent in snapshot.extents],
    }
    if version == 1:
        del fields["image_digest"]
    return fields


def _snapshot(fields: _WireSnapshot) -> StoredSnapshot:
    bitmap = from_base64("anchors", fields.anchors)
    if len(bitmap) != (fields.num_operators + 7) // 8:
        raise ManifestError(f"{len(bitmap)} bytes of anchors do not fit {fields.num_operators} operators")
    values = msgspec.structs.asdict(fields) | {
        "header_digest": bytes.fromhex(fields.header_digest),
        "layout_id": int(fields.layout_id, 16),
        "anchors": int.from_bytes(bitmap, "little"),
    }
    return StoredSnapshot(**values)


def _check_chain(snapshots: Sequence[StoredSnapshot]) -> None:
    """Each snapshot follows the one before it, and together they anchor every operator."""
    if not snapshots:
        raise ManifestError("the manifest has no snapshot")
    for before, after in pairwise(snapshots):
        if after.previous != before.iteration:
            raise ManifestError(f"iteration {after.iteration} does not follow {before.iteration}")
        if after.epoch < before.epoch:
            raise ManifestError(f"iteration {after.iteration} belongs to an earlier history")
        if after.num_operators != before.num_operators:
            raise ManifestError("the number of operators changes")
    anchored = 0
    for snapshot in snapshots:
        anchored |= snapshot.anchors
    if anchored != (1 << snapshots[0].num_operators) - 1:
        raise ManifestError("no snapshot anchors some of the operators")
