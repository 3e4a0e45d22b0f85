"""Verification of checkpoints in a store that jobs may be changing, and advice for its findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptd.ctl.progress import ProgressBar
from ckptd.ctl.store.store_access import ListedStore, OpenedStore
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

__all__ = ["Advised", "Checked", "check_checkpoint", "check_run", "check_store"]


@dataclass(frozen=True, slots=True)
class Advised:
    """A finding and the advice for it ("": none is needed)."""

    severity: str
    key: str
    tensor: str
    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class WholeCheckpoint:
    """A checkpoint that was verified and is whole."""

    job: str
    run: str
    iteration: int
    epoch: int
    agreement: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a verification; ``full``: every byte was read."""

    ok: bool
    full: bool
    findings: tuple[Advised, ...]
    whole: tuple[WholeCheckpoint, ...]
    num_objects: int
    read_bytes: int


_RESTORE_COPY = "restore it from an older version or a backup of the store"

_Look = Callable[[ListedStore, bool, ProgressBar], VerifyReport]


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

    def look(listed: ListedStore, full: bool, bar: ProgressBar) -> VerifyReport:
        seen = read_catalog(listed, job, run)
        found = next((c for c in seen.checkpoints if c.id == checkpoint.id), None)
        if found is None:
            return VerifyReport((), (), 0, 0)  # it was removed during the verification
        return verify_checkpoint(
            listed, seen, found, full=full, map_fn=opened.map, progress=_progress_of(bar)
        )

    return _check(opened, f"{job}/{run}/", look, full=full, quiet=quiet, total_bytes=total_bytes)


def check_run(opened: OpenedStore, job: str, run: str, *, full: bool, quiet: bool) -> Checked:
    """Verify all checkpoints and other objects of a run."""

    def look(listed: ListedStore, full: bool, bar: ProgressBar) -> VerifyReport:
        return verify_run(listed, job, run, full=full, map_fn=opened.map, progress=_progress_of(bar))

    return _check(opened, f"{job}/{run}/", look, full=full, quiet=quiet)


def check_store(opened: OpenedStore, *, full: bool, quiet: bool) -> Checked:
    """Verify everything in the store."""

    def look(listed: ListedStore, full: bool, bar: ProgressBar) -> VerifyReport:
        return verify_store(listed, full=full, map_fn=opened.map, progress=_progress_of(bar))

    return _check(opened, "", look, full=full, quiet=quiet)


def _check(
    opened: OpenedStore,
    prefix: str,
    look: _Look,
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
        report = look(listed, full, bar)
        if not report.ok:
            now = ListedStore(opened.store, opened.store.list(prefix))
            report = _without_removed(report, listed, now, look(now, False, bar))
    whole = [WholeCheckpoint(job, run, c.end, c.epoch, c.agreement) for job, run, c in report.whole]
    findings = tuple([_advised(finding, report) for finding in report.findings])
    return Checked(report.ok, full, findings, tuple(whole), report.num_objects, report.read_bytes)


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


def _progress_of(bar: ProgressBar) -> Callable[[Progress], None]:
    return lambda progress: bar.update(progress.read_bytes)


def _advised(finding: Finding, report: VerifyReport) -> Advised:
    advice = _advice(finding, report)
    return Advised(str(finding.severity), finding.key, finding.tensor, finding.what, advice)


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
