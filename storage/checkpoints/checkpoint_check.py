"""Verification of one checkpoint, from its manifests to the last byte of their objects.

An object is checked by itself (`ckptd.storage.images.object_check`), once; an image by its header's
digest, then by comparing its digests with those of the tensors that its extents point to, and last, in
a second pass, by the cryptographic digest in its manifest, because xxh3 digests can be forged.

Findings are returned as data. Errors of the store itself (`StoreError`, except for an object that is
missing or too short) are raised, because they say nothing about the stored data.
"""

from __future__ import annotations

import base64
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping

from ckptd.storage.checkpoints.catalog import StoredCheckpoint
from ckptd.storage.checkpoints.findings import Finding, Progress, Severity
from ckptd.storage.checkpoints.manifest import (
    ManifestError,
    RankManifest,
    StoredObject,
    StoredSnapshot,
)
from ckptd.storage.checkpoints.names import ObjectName, parse
from ckptd.storage.checkpoints.reader import (
    MapFunction,
    SnapshotDamaged,
    read_image_header,
    read_manifest,
)
from ckptd.storage.images.image_stream import has_its_digest
from ckptd.storage.images.object_check import (
    ObjectDamaged,
    StreamBuffers,
    check_tensors,
    read_object_header,
)
from ckptd.storage.images.safetensors_header import HeaderError
from ckptd.storage.images.stored_headers import ObjectHeader, parse_header
from ckptd.storage.stores.objects import Damaged, ObjectInfo, ObjectMissing, ObjectStore, TooLarge

__all__ = ["Checker"]

_CACHED_CONTENTS = 64

_Contents = Mapping[int, tuple[int, bytes]]  # of an object: length and digest of a tensor by offset


class Checker:
    """Checks checkpoints of one store, and each of their objects once. Thread-safe.

    ``mentioned`` contains the keys of all objects that the manifests read so far refer to.
    """

    def __init__(
        self, store: ObjectStore, *, full: bool, progress: Callable[[Progress], None] | None
    ) -> None:
        self.mentioned: set[str] = set()
        self.num_objects = 0
        self.read_bytes = 0
        self._store = store
        self._full = full
        self._progress = progress
        self._lock = threading.Lock()
        self._checked: dict[StoredObject, tuple[Finding, ...]] = {}
        self._contents: OrderedDict[str, _Contents] = OrderedDict()
        self._memory: deque[StreamBuffers] = deque()

    def check(self, checkpoint: StoredCheckpoint, run_id: str | None, map_fn: MapFunction) -> set[Finding]:
        """The findings about a checkpoint; ``run_id`` is that of the run, None if not known."""
        infos = [checkpoint.manifests[rank] for rank in sorted(checkpoint.manifests)]
        found = map_fn(lambda info: list(self._rank(info, run_id)), infos)
        findings = {finding for one in found for finding in one}
        if checkpoint.missing and infos:
            folder = infos[0].key.rpartition("/")[0]
            findings.add(Finding(Severity.ERROR, folder, checkpoint.reason))
        return findings

    def mention(self, checkpoint: StoredCheckpoint, map_fn: MapFunction) -> set[Finding]:
        """Add the objects of an unfinished checkpoint to ``mentioned``, without checking them."""
        found = map_fn(lambda info: self._read(info.key, Severity.WARNING), checkpoint.manifests.values())
        return {finding for _, findings in found for finding in findings}

    def _rank(self, info: ObjectInfo, run_id: str | None) -> Iterator[Finding]:
        manifest, findings = self._read(info.key, Severity.ERROR)
        yield from findings
        if manifest is None:
            return
        if run_id is not None and manifest.run_id != run_id:
            yield Finding(Severity.ERROR, info.key, f"it is of run {manifest.run_id}, not {run_id}")
        for snapshot in manifest.snapshots:
            damaged = [f for stored in snapshot.objects for f in self._object(stored)]
            yield from damaged
            if self._full and not damaged:
                yield from self._image(info.key, manifest, snapshot)

    def _read(self, key: str, severity: Severity) -> tuple[RankManifest | None, tuple[Finding, ...]]:
        try:
            manifest = read_manifest(self._store, key)
        except (ManifestError, ObjectMissing, TooLarge) as error:
            return None, (Finding(severity, key, str(error)),)
        with self._lock:
            self.mentioned |= manifest.object_keys
        return manifest, ()

    def _object(self, stored: StoredObject) -> tuple[Finding, ...]:
        """The findings about an object; each object is checked once."""
        known = self._checked.get(stored)
        if known is not None:
            return known
        with self._lock:
            self.num_objects += 1
        findings = tuple(self._object_findings(stored))
        self._checked[stored] = findings
        return findings

    def _object_findings(self, stored: StoredObject) -> Iterator[Finding]:
        info = self._store.info(stored.key)
        if info is None:
            yield Finding(Severity.ERROR, stored.key, "it is missing")
        elif info.size != stored.size:
            what = f"it has {info.size} bytes, but its manifest says {stored.size}"
            yield Finding(Severity.ERROR, stored.key, what)
        elif self._full:
            yield from self._content_findings(stored)

    def _content_findings(self, stored: StoredObject) -> Iterator[Finding]:
        memory = self._take_memory()
        try:
            header, _ = self._load(stored)
            count = self._count_reads(stored.key)
            count(header.data_offset)
            for tensor in check_tensors(self._store, stored.key, header, memory, count):
                yield Finding(Severity.ERROR, stored.key, "its digest does not match", tensor)
        except ObjectDamaged as error:
            yield Finding(Severity.ERROR, stored.key, str(error))
        except ObjectMissing:
            yield Finding(Severity.ERROR, stored.key, "it disappeared")
        finally:
            self._memory.append(memory)

    def _image(self, key: str, manifest: RankManifest, snapshot: StoredSnapshot) -> Iterator[Finding]:
        """Check that a snapshot's extents form the image that was sealed."""
        where = f"iteration {snapshot.iteration}"
        try:
            parsed = parse_header(read_image_header(self._store, snapshot))
            wrong = _unlike(parsed, manifest, snapshot)
            if wrong:
                yield Finding(Severity.ERROR, key, f"{where}: {wrong}")
                return
            for tensor in self._misplaced(parsed, snapshot):
                what = f"{where}: its extent points to other bytes"
                yield Finding(Severity.ERROR, key, what, tensor)
                return
            if not has_its_digest(self._store, snapshot):
                what = "its cryptographic digest does not match, but its xxh3 digests do"
                yield Finding(Severity.ERROR, key, f"{where}: {what}: an object or the manifest was forged")
        except (SnapshotDamaged, HeaderError, ObjectDamaged, ObjectMissing, Damaged) as error:
            yield Finding(Severity.ERROR, key, f"{where}: {error}")

    def _misplaced(self, parsed: ObjectHeader, snapshot: StoredSnapshot) -> Iterator[str]:
        """The tensors whose extents point to other contents."""
        starts = [extent.image_offset for extent in snapshot.extents]
        contents = [self._contents_of(stored) for stored in snapshot.objects]
        for tensor, digest in zip(parsed.tensors, parsed.digests, strict=True):
            if not tensor.nbytes:
                continue
            extent = snapshot.extents[bisect_right(starts, tensor.offset) - 1]
            inside = tensor.offset - extent.image_offset
            stored = contents[extent.object].get(extent.object_offset + inside)
            if stored != (tensor.nbytes, digest) or inside + tensor.nbytes > extent.length:
                yield tensor.name

    def _contents_of(self, stored: StoredObject) -> _Contents:
        with self._lock:
            known = self._contents.get(stored.key)
        return self._load(stored)[1] if known is None else known

    def _load(self, stored: StoredObject) -> tuple[ObjectHeader, _Contents]:
        name = parse(stored.key)
        assert isinstance(name, ObjectName), "a manifest contains no other keys"
        header = read_object_header(self._store, stored.key, stored.size, name.tag)
        contents = {
            tensor.offset: (tensor.nbytes, digest)
            for tensor, digest in zip(header.tensors, header.digests, strict=True)
            if tensor.nbytes
        }
        with self._lock:
            self._contents[stored.key] = contents
            while len(self._contents) > _CACHED_CONTENTS:
                self._contents.popitem(last=False)
        return header, contents

    def _count_reads(self, key: str) -> Callable[[int], None]:
        def count(num_bytes: int) -> None:
            with self._lock:
                self.read_bytes += num_bytes
                if self._progress is not None:
                    self._progress(Progress(key, self.num_objects, self.read_bytes))

        return count

    def _take_memory(self) -> StreamBuffers:
        try:
            return self._memory.pop()
        except IndexError:  # in effect, one per thread
            return StreamBuffers.allocate()


def _unlike(parsed: ObjectHeader, manifest: RankManifest, snapshot: StoredSnapshot) -> str:
    """The first difference between an image and its description in the manifest; "" if there is none."""
    bitmap = snapshot.anchors.to_bytes((snapshot.num_operators + 7) // 8, "little")
    wanted = {
        "job": manifest.job,
        "run": manifest.run,
        "rank": str(manifest.rank),
        "iteration": str(snapshot.iteration),
        "num_operators": str(snapshot.num_operators),
        "anchors": base64.b64encode(bitmap).decode("ascii"),
    }
    for what, value in wanted.items():
        recorded = parsed.metadata.get(what, "").strip()
        if recorded != value:
            return f"{what} is {recorded[:40]!r} in the image and {value[:40]!r} in the manifest"
    if parsed.size != snapshot.image_len:
        return f"the image has {parsed.size} bytes, but the manifest says {snapshot.image_len}"
    return ""
