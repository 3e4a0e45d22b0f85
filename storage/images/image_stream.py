"""Verification of a stored image against the cryptographic digest in its manifest, in one pass and in
bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import xxhash
from blake3 import blake3

from ckptd.storage.checkpoints.manifest_snapshots import StoredSnapshot
from ckptd.storage.checkpoints.reader import SnapshotDamaged, read_image_bytes
from ckptd.storage.images.stored_headers import ObjectHeader
from ckptd.storage.images.strong_digest import Digesting
from ckptd.storage.stores.objects import ObjectStore

__all__ = ["has_its_digest", "vouched_tensors"]

_CHUNK_BYTES = 16 << 20


def has_its_digest(store: ObjectStore, snapshot: StoredSnapshot) -> bool:
    """Whether the image has the digest in its manifest; true if the manifest has none (version 1).

    Raises:
        ObjectMissing, Damaged: an object is missing, or too short.
    """
    if not snapshot.image_digest:
        return True
    made = Digesting(snapshot.image_digest)
    for chunk in _chunks(store, snapshot):
        made.update(chunk)
    return made.agrees


def vouched_tensors(
    store: ObjectStore, snapshot: StoredSnapshot, head: bytes, header: ObjectHeader
) -> dict[str, bytes]:
    """Verify an image against the digest in its manifest, and return BLAKE3 digests of its tensors, with
    which later reads of single tensors are verified. Empty if the manifest has no digest (version 1).

    Args:
        head: the bytes of the image's header, which may still be forged; ``header`` is its contents.
    Raises:
        SnapshotDamaged: it is not the image of the manifest; names the tensors whose xxh3 digests differ.
        ObjectMissing, Damaged: an object is missing, or too short.
    """
    if not snapshot.image_digest:
        return {}
    made = Digesting(snapshot.image_digest)
    start = blake3()
    wanted = [(t.name, t.offset, t.offset + t.nbytes) for t in header.tensors]
    hashes = {name: (blake3(), xxhash.xxh3_128()) for name, _, _ in wanted}
    first, at = 0, 0
    for chunk in _chunks(store, snapshot):
        made.update(chunk)
        start.update(chunk[: max(0, len(head) - at)])
        while first < len(wanted) and wanted[first][2] <= at:
            first += 1
        for name, begin, end in wanted[first:]:
            if begin >= at + len(chunk):
                break
            for one in hashes[name]:
                one.update(chunk[max(0, begin - at) : end - at])
        at += len(chunk)
    if not made.agrees or start.digest() != blake3(head).digest():
        pairs = zip(header.tensors, header.digests, strict=True)
        bad = [t.name for t, digest in pairs if hashes[t.name][1].digest() != digest]
        keys = tuple(stored.key for stored in snapshot.objects)
        raise SnapshotDamaged(snapshot.iteration, tuple(bad) or ("the image",), keys)
    return {name: strong.digest() for name, (strong, _) in hashes.items()}


def _chunks(store: ObjectStore, snapshot: StoredSnapshot) -> Iterator[memoryview]:
    """All bytes of the image in chunks; reads the next chunk in the background."""

    def read(begin: int) -> memoryview:
        into = memoryview(bytearray(min(_CHUNK_BYTES, snapshot.image_len - begin)))
        read_image_bytes(store, snapshot, begin, into)
        return into

    with ThreadPoolExecutor(1, thread_name_prefix="image") as thread:
        coming = thread.submit(read, 0)
        for begin in range(_CHUNK_BYTES, snapshot.image_len, _CHUNK_BYTES):
            chunk, coming = coming.result(), thread.submit(read, begin)
            yield chunk
        yield coming.result()
