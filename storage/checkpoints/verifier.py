"""Verification of a checkpoint, a run, or a whole store. Changes nothing.

With ``full`` every byte of every object of the committed checkpoints is read; without it, only the existence
and size of objects are checked. An object is verified by itself, once: its key contains the hash of its
header, and its header the digests of its tensors. An image is verified by its header's digest, then by
comparing its digests with those of the tensors that its extents point to, and last, in a second pass, by the
cryptographic digest in its manifest, because xxh3 digests can be forged.

Findings are returned as data. Errors of the store itself (`StoreError`, except for an object that is missing
or too short) are raised, because they say nothing about the stored data.
"""

from __future__ import annotations

import base64
import mmap
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import xxhash

from ckptd.storage.checkpoints.catalog import Catalog, CheckpointState, StoredCheckpoint
from ckptd.storage.checkpoints.manifest import RankManifest, StoredObject, StoredSnapshot
from ckptd.storage.checkpoints.names import CheckpointId, IncarnationName, ObjectName, RunName, parse
from ckptd.storage.checkpoints.reader import (
    MapFunction,
    SnapshotDamaged,
    has_its_digest,
    read_catalog,
    read_head,
    read_identity,
    read_image_header,
    read_manifest,
)
from ckptd.storage.checkpoints.sealed_json import ManifestError
from ckptd.storage.image_format import HeaderError, ObjectHeader, parse_header, tag_of
from ckptd.storage.stores.objects import Damaged, ObjectInfo, ObjectMissing, ObjectStore, Range, TooLarge

_BUFFER_BYTES = 16 << 20
_NUM_BUFFERS = 4
_CACHED_CONTENTS = 64

StreamBuffers = tuple[memoryview, ...]  # for one thread at a time
_Contents = Mapping[int, tuple[int, bytes]]  # of an object: length and digest of a tensor by offset


class Severity(StrEnum):
    """The severity of a finding: data are lost, an operator should look, or information."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A finding about a key, and about one ``tensor`` of it if that is not empty."""

    severity: Severity
    key: str
    what: str
    tensor: str = ""

    def __str__(self) -> str:
        tensor = f" (tensor {self.tensor!r})" if self.tensor else ""
        return f"{self.severity}: {self.key}: {self.what}{tensor}"


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a verification: the key being read, and the amount read so far."""

    key: str
    num_objects: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The findings, errors first, and the checkpoints that are whole: (job, run, id)."""

    findings: tuple[Finding, ...]
    whole: tuple[tuple[str, str, CheckpointId], ...]
    num_objects: int
    read_bytes: int

    @property
    def ok(self) -> bool:
        """Whether no data are lost."""
        return _is_whole(self.findings)


def verify_checkpoint(
    store: ObjectStore,
    catalog: Catalog,
    checkpoint: StoredCheckpoint,
    *,
    full: bool = True,
    map_fn: MapFunction = map,
    progress: Callable[[Progress], None] | None = None,
) -> VerifyReport:
    """Verify a checkpoint; one that lacks a rank is not whole.

    Args:
        full: read every byte, instead of checking existence and size.
        map_fn: the ``map`` of a thread pool; ranks are verified in parallel.
        progress: called with the progress, by one thread at a time.
    """
    checker = _Checker(store, full=full, progress=progress)
    run_id, findings = _identity(store, catalog)
    found = checker.check(checkpoint, run_id, map_fn)
    whole = [checkpoint.id] if _is_whole(found) else []
    return _report(checker, findings | found, catalog, whole)


def verify_run(
    store: ObjectStore,
    job: str,
    run: str,
    *,
    full: bool = True,
    map_fn: MapFunction = map,
    progress: Callable[[Progress], None] | None = None,
) -> VerifyReport:
    """Verify all committed checkpoints of a run, and report its other objects."""
    checker = _Checker(store, full=full, progress=progress)
    catalog = read_catalog(store, job, run)
    run_id, findings = _identity(store, catalog)
    whole: list[CheckpointId] = []
    for checkpoint in catalog.checkpoints:
        if checkpoint.state is CheckpointState.COMMITTED:
            found = checker.check(checkpoint, run_id, map_fn)
            if _is_whole(found):
                whole.append(checkpoint.id)
        else:
            found = {_state(checkpoint)} | checker.mention(checkpoint, map_fn)
        findings |= found
    for listed in catalog.objects.values():
        for _, info in listed:
            if info.key not in checker.mentioned:
                findings.add(Finding(Severity.INFO, info.key, "no manifest refers to it"))
    return _report(checker, findings | _foreign(catalog.foreign), catalog, whole)


def verify_store(
    store: ObjectStore,
    *,
    full: bool = True,
    map_fn: MapFunction = map,
    progress: Callable[[Progress], None] | None = None,
) -> VerifyReport:
    """Verify all committed checkpoints of all runs, and report the other objects."""
    runs: set[tuple[str, str]] = set()
    foreign: list[str] = []
    for info in store.list(""):
        name = parse(info.key)
        if name is None:
            foreign.append(info.key)
        elif not isinstance(name, IncarnationName):  # the incarnation that it marks is a run of its own
            runs.add((name.job, name.run))
    outside = [key for key in foreign if tuple(key.split("/")[:2]) not in runs]
    reports = [
        verify_run(store, job, run, full=full, map_fn=map_fn, progress=progress) for job, run in sorted(runs)
    ]
    findings = {finding for report in reports for finding in report.findings}
    return VerifyReport(
        _sorted(findings | _foreign(outside)),
        tuple([checkpoint for report in reports for checkpoint in report.whole]),
        sum(report.num_objects for report in reports),
        sum(report.read_bytes for report in reports),
    )


class _Checker:
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
        try:
            memory = self._memory.pop()
        except IndexError:  # in effect, one per thread
            memory = stream_buffers()
        try:
            header, _ = self._load(stored)
            count = self._count_reads(stored.key)
            count(header.data_offset)
            for tensor in check_tensors(self._store, stored.key, header, memory, count):
                yield Finding(Severity.ERROR, stored.key, "its digest does not match", tensor)
        except _ObjectDamaged as error:
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
        except (SnapshotDamaged, HeaderError, _ObjectDamaged, ObjectMissing, Damaged) as error:
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
        header = _read_object_header(self._store, stored)
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


def _unlike(parsed: ObjectHeader, manifest: RankManifest, snapshot: StoredSnapshot) -> str:
    """The first difference between an image and its description in the manifest; "" if there is none."""
    wanted = {
        "job": manifest.job,
        "run": manifest.run,
        "rank": str(manifest.rank),
        "iteration": str(snapshot.iteration),
        "num_operators": str(snapshot.num_operators),
        "anchors": base64.b64encode(snapshot.anchor_bitmap).decode("ascii"),
    }
    for what, value in wanted.items():
        recorded = parsed.metadata.get(what, "").strip()
        if recorded != value:
            return f"{what} is {recorded[:40]!r} in the image and {value[:40]!r} in the manifest"
    if parsed.size != snapshot.image_len:
        return f"the image has {parsed.size} bytes, but the manifest says {snapshot.image_len}"
    return ""


def _identity(store: ObjectStore, catalog: Catalog) -> tuple[str | None, set[Finding]]:
    """The run's id in ``run.json``."""
    key = RunName(catalog.job, catalog.run).key
    try:
        identity = read_identity(store, catalog.job, catalog.run)
    except (ManifestError, TooLarge) as error:
        return None, {Finding(Severity.ERROR, key, str(error))}
    if identity is None:
        return None, {Finding(Severity.WARNING, key, "it is missing")}
    return identity.run_id, set()


def _state(checkpoint: StoredCheckpoint) -> Finding:
    stale = checkpoint.state is CheckpointState.STALE
    folder = next(iter(checkpoint.manifests.values())).key.rpartition("/")[0]
    severity = Severity.INFO if stale else Severity.WARNING
    return Finding(severity, folder, f"{checkpoint.state}: {checkpoint.reason}")


def _foreign(keys: Iterable[str]) -> set[Finding]:
    return {Finding(Severity.INFO, key, "ckptd did not write it") for key in keys}


def _is_whole(findings: Iterable[Finding]) -> bool:
    return all(finding.severity is not Severity.ERROR for finding in findings)


def _report(
    checker: _Checker, findings: set[Finding], catalog: Catalog, whole: Iterable[CheckpointId]
) -> VerifyReport:
    named = tuple([(catalog.job, catalog.run, checkpoint) for checkpoint in whole])
    return VerifyReport(_sorted(findings), named, checker.num_objects, checker.read_bytes)


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    order = {severity: number for number, severity in enumerate(Severity)}
    return tuple(sorted(findings, key=lambda f: (order[f.severity], f.key, f.tensor, f.what)))


# -- one object, in bounded memory ---------------------------------------------------------------


class _ObjectDamaged(ValueError):
    """The object does not match its key or its size."""


def _read_object_header(store: ObjectStore, stored: StoredObject) -> ObjectHeader:
    """The header of an object; `_ObjectDamaged` if its hash or its size is not that of ``stored``."""
    name = parse(stored.key)
    assert isinstance(name, ObjectName), "a manifest contains no other keys"
    try:
        head = read_head(lambda at, into: _read(store, stored.key, [Range(at, into)]), stored.size)
        if tag_of(head) != name.tag:
            raise _ObjectDamaged("the header is not the one that the key names")
        header = parse_header(head)
    except HeaderError as error:
        raise _ObjectDamaged(str(error)) from error
    if header.size != stored.size:
        raise _ObjectDamaged(f"the object has {stored.size} bytes, but its header says {header.size}")
    return header


def stream_buffers(size: int = _BUFFER_BYTES, count: int = _NUM_BUFFERS) -> StreamBuffers:
    """Buffers for `check_tensors`; the system commits their pages at first use."""
    return tuple([memoryview(mmap.mmap(-1, size)) for _ in range(count)])


def check_tensors(
    store: ObjectStore,
    key: str,
    header: ObjectHeader,
    memory: StreamBuffers,
    count: Callable[[int], None],
) -> list[str]:
    """Read all of an object's tensors; returns the names of those whose digests do not match.

    Args:
        count: called with the number of bytes after each read.
    """
    check = _TensorCheck(header)
    for filled in _stream(store, key, header.data_offset, header.size, memory):
        check.feed(filled)
        count(len(filled))
    return check.end()


class _TensorCheck:
    """Digests consecutive tensors from chunks of any size."""

    def __init__(self, header: ObjectHeader) -> None:
        self._tensors, self._digests = header.tensors, header.digests
        self._number = 0
        self._seen = 0  # bytes of the current tensor
        self._hash = xxhash.xxh3_128()
        self._bad: list[str] = []

    def feed(self, data: memoryview) -> None:
        while len(data):
            self._finish()
            chunk = data[: self._tensors[self._number].nbytes - self._seen]
            self._hash.update(chunk)
            self._seen += len(chunk)
            data = data[len(chunk) :]

    def end(self) -> list[str]:
        """The tensors that did not match; call it after the last `feed`."""
        self._finish()
        return self._bad

    def _finish(self) -> None:
        """Advance to the next tensor with missing bytes."""
        while self._number < len(self._tensors) and self._seen == self._tensors[self._number].nbytes:
            if self._hash.digest() != self._digests[self._number]:
                self._bad.append(self._tensors[self._number].name)
            self._number += 1
            self._seen = 0
            self._hash.reset()


def _stream(
    store: ObjectStore, key: str, begin: int, end: int, memory: StreamBuffers
) -> Iterator[memoryview]:
    """Bytes [begin, end) in order; fills all buffers at once."""
    while begin < end:
        ranges: list[Range] = []
        for buffer in memory:
            into = buffer[: min(len(buffer), end - begin)]
            if len(into):
                ranges.append(Range(begin, into))
                begin += len(into)
        _read(store, key, ranges)
        for filled in ranges:
            yield filled.into


def _read(store: ObjectStore, key: str, ranges: Sequence[Range]) -> None:
    try:
        store.read_ranges(key, ranges)
    except Damaged as error:
        raise _ObjectDamaged(f"the object is shorter than listed ({error.detail})") from error
