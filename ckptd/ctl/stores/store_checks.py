"""Verification of checkpoints in a store that jobs may be changing, and advice for its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckptd.ctl.command import ProgressBar
from ckptd.ctl.stores.store_access import OpenedStore
from ckptd.ctl.stores.store_lookup import NamedCheckpoint
from ckptd.storage.checkpoints.catalog import Catalog, StoredCheckpoint
from ckptd.storage.checkpoints.names import ObjectName, RunName, parse
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.checkpoints.verifier import (
    Finding,
    Progress,
    Severity,
    VerifyReport,
    verify_checkpoint,
    verify_run,
    verify_store,
)
from ckptd.storage.stores.objects import ObjectInfo, ObjectStore, Range, StoreFacts, StoreRefused

_READ_ONLY = "this view is read-only"
_RESTORE_COPY = "restore it from an older version or a backup of the store"


@dataclass(frozen=True, slots=True)
class Advised:
    """A finding and the advice for it ("": none is needed)."""

    severity: str
    key: str
    tensor: str
    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a verification; ``full``: every byte was read. ``whole`` are the verified checkpoints
    without damage.
    """

    ok: bool
    full: bool
    findings: tuple[Advised, ...]
    whole: tuple[NamedCheckpoint, ...]
    num_objects: int
    read_bytes: int


class ListedStore:
    """A read-only view of a store with a listing that was made before: ``info`` and ``list`` send no
    request. Implements `ObjectStore`.
    """

    def __init__(self, store: ObjectStore, listing: Iterable[ObjectInfo]) -> None:
        self._store = store
        self.listing = {info.key: info for info in listing}

    @property
    def facts(self) -> StoreFacts:
        return self._store.facts

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        """Refused."""
        raise StoreRefused(key, _READ_ONLY)

    def read(self, key: str, *, limit: int) -> bytes:
        return self._store.read(key, limit=limit)

    def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
        self._store.read_ranges(key, ranges)

    def info(self, key: str) -> ObjectInfo | None:
        return self.listing.get(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (info for key, info in self.listing.items() if key.startswith(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """Refused."""
        raise StoreRefused(keys[0] if keys else "", _READ_ONLY)

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        """Refused."""
        raise StoreRefused(prefix, _READ_ONLY)

    def close(self) -> None:
        """Do nothing: the caller that opened the store closes it."""


def check_checkpoint(
    opened: OpenedStore,
    catalog: Catalog,
    checkpoint: StoredCheckpoint,
    *,
    total_bytes: int,
    full: bool,
    quiet: bool,
) -> Checked:
    """Verify one checkpoint; ``total_bytes`` is the size of its objects, 0 if not known."""
    job, run = catalog.job, catalog.run

    def verify(listed: ListedStore, **how: Any) -> VerifyReport:
        seen = read_catalog(listed, job, run)
        found = next((c for c in seen.checkpoints if c.id == checkpoint.id), None)
        if found is None:
            return VerifyReport((), (), 0, 0)  # it was removed during the verification
        return verify_checkpoint(listed, seen, found, **how)

    return _check(opened, f"{job}/{run}/", verify, full=full, quiet=quiet, total_bytes=total_bytes)


def check_run(opened: OpenedStore, job: str, run: str, *, full: bool, quiet: bool) -> Checked:
    """Verify all checkpoints and other objects of a run."""
    return _check(opened, f"{job}/{run}/", partial(verify_run, job=job, run=run), full=full, quiet=quiet)


def check_store(opened: OpenedStore, *, full: bool, quiet: bool) -> Checked:
    """Verify everything in the store."""
    return _check(opened, "", verify_store, full=full, quiet=quiet)


def _check(
    opened: OpenedStore,
    prefix: str,
    verify: Callable[..., VerifyReport],
    *,
    full: bool,
    quiet: bool,
    total_bytes: int | None = None,
) -> Checked:
    """Verify once. If an object seems to be lost, list again: a job may have removed it meanwhile."""
    listed = ListedStore(opened.store, opened.store.list(prefix))
    if total_bytes is None:
        sizes = [i.size for i in listed.listing.values() if isinstance(parse(i.key), ObjectName)]
        total_bytes = sum(sizes)
    with ProgressBar("verifying", total_bytes, quiet=quiet or not full) as bar:

        def progress(done: Progress) -> None:
            bar.update(done.read_bytes)

        report = verify(listed, full=full, map_fn=opened.map, progress=progress)
        if not report.ok:
            now = ListedStore(opened.store, opened.store.list(prefix))
            again = verify(now, full=False, map_fn=opened.map, progress=progress)
            report = _without_removed(report, listed, now, again)
    whole = [NamedCheckpoint(job, run, c.end, c.epoch, c.agreement) for job, run, c in report.whole]
    findings = [
        Advised(str(found.severity), found.key, found.tensor, found.what, _advice(found, report))
        for found in report.findings
    ]
    return Checked(report.ok, full, tuple(findings), tuple(whole), report.num_objects, report.read_bytes)


def _without_removed(
    report: VerifyReport, then: ListedStore, now: ListedStore, again: VerifyReport
) -> VerifyReport:
    """The report without the findings about keys that have been removed meanwhile.

    ``again`` is a fast verification made now: an object that is really lost is in its findings, too.
    """
    gone = {key for key in then.listing if key not in now.listing}
    if not gone:
        return report
    staying = {f for f in report.findings if f.key not in gone}
    lost = {f for f in again.findings if f.severity is Severity.ERROR}
    order = {severity: number for number, severity in enumerate(Severity)}
    findings = sorted(staying | lost, key=lambda f: (order[f.severity], f.key, f.tensor, f.what))
    whole = tuple([checkpoint for checkpoint in report.whole if checkpoint in again.whole])
    return replace(report, findings=tuple(findings), whole=whole)


def _advice(finding: Finding, report: VerifyReport) -> str:
    if finding.severity is Severity.INFO:
        return ""
    if isinstance(parse(finding.key), RunName):
        return f"{_RESTORE_COPY}: it names the job and run of these checkpoints"
    if finding.severity is Severity.WARNING:
        return (
            "none while a job may be writing it; `ckptctl checkpoints gc` removes it when newer "
            "ones are committed"
        )
    job, run, iteration, *rest = finding.key.split("/")
    # An object may belong to several checkpoints; a manifest and its folder name one.
    which = str(int(iteration)) if rest and rest[0].startswith("commit-") else "ITERATION"
    remove = f"remove the checkpoint that needs it: `ckptctl checkpoints rm {job} {run} {which}`"
    return f"{_RESTORE_COPY}, or {remove}; {_alternative(job, run, report)}"


def _alternative(job: str, run: str, report: VerifyReport) -> str:
    """The checkpoint that a restore uses instead of a damaged one."""
    ends = [checkpoint.end for j, r, checkpoint in report.whole if (j, r) == (job, run)]
    if not ends:
        return "this verification found no other whole checkpoint"
    return f"a restore uses iteration {max(ends)}, which is whole"
