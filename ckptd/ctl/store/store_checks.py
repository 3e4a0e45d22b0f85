"""Verifying what is stored while jobs may be writing and deleting there, and what to do about what is found."""

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
    """A finding, and what to do about it ("": nothing)."""

    severity: str
    key: str
    tensor: str
    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class WholeCheckpoint:
    """One that was found whole."""

    job: str
    run: str
    iteration: int
    epoch: int
    agreement: str


@dataclass(frozen=True, slots=True)
class Checked:
    """What a verification found; ``full``: every byte was read."""

    ok: bool
    full: bool
    findings: tuple[Advised, ...]
    whole: tuple[WholeCheckpoint, ...]
    num_objects: int
    read_bytes: int


_BRING_BACK = "bring it back from a version or a backup of the store"

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
    """One checkpoint; ``total_bytes`` are those of its objects, 0 if that is not known."""
    job, run = catalog.job, catalog.run

    def look(listed: ListedStore, full: bool, bar: ProgressBar) -> VerifyReport:
        seen = read_catalog(listed, job, run)
        found = next((c for c in seen.checkpoints if c.id == checkpoint.id), None)
        if found is None:
            return VerifyReport((), (), 0, 0)  # it was removed while it was verified
        return verify_checkpoint(
            listed, seen, found, full=full, map_fn=opened.map, told=_telling(bar)
        )

    return _check(opened, f"{job}/{run}/", look, full=full, quiet=quiet, total_bytes=total_bytes)


def check_run(opened: OpenedStore, job: str, run: str, *, full: bool, quiet: bool) -> Checked:
    """All checkpoints of a run, and what else lies there."""

    def look(listed: ListedStore, full: bool, bar: ProgressBar) -> VerifyReport:
        return verify_run(listed, job, run, full=full, map_fn=opened.map, told=_telling(bar))

    return _check(opened, f"{job}/{run}/", look, full=full, quiet=quiet)


def check_store(opened: OpenedStore, *, full: bool, quiet: bool) -> Checked:
    """Everything in the store."""

    def look(listed: ListedStore, full: bool, bar: ProgressBar) -> VerifyReport:
        return verify_store(listed, full=full, map_fn=opened.map, told=_telling(bar))

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
    """Look once; and where something seems to be lost, once more, because a job may just have removed it."""
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
    """What was found, without what concerns keys that have been removed meanwhile.

    ``again`` is what a quick look finds now: an object that should be there still is among it.
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


def _telling(bar: ProgressBar) -> Callable[[Progress], None]:
    return lambda progress: bar.update(progress.read_bytes)


def _advised(finding: Finding, report: VerifyReport) -> Advised:
    advice = _advice(finding, report)
    return Advised(str(finding.severity), finding.key, finding.tensor, finding.what, advice)


def _advice(finding: Finding, report: VerifyReport) -> str:
    if finding.severity is Severity.INFO:
        return ""
    if isinstance(parse(finding.key), RunName):
        return f"{_BRING_BACK}: it says whose checkpoints these are"
    if finding.severity is Severity.WARNING:
        return (
            "nothing while it may still be being written; `ckptctl checkpoints gc` removes it "
            "when newer ones are committed"
        )
    job, run, iteration, *rest = finding.key.split("/")
    # An object may belong to several checkpoints; a manifest and its folder say which one it is.
    which = str(int(iteration)) if rest and rest[0].startswith("commit-") else "ITERATION"
    remove = f"remove what needs it: `ckptctl checkpoints rm {job} {run} {which}`"
    return f"{_BRING_BACK}, or {remove}; {_instead(job, run, report)}"


def _instead(job: str, run: str, report: VerifyReport) -> str:
    """What a restore does without a damaged checkpoint."""
    ends = [checkpoint.end for j, r, checkpoint in report.whole if (j, r) == (job, run)]
    if not ends:
        return "no other one was seen to be whole"
    return f"a restore uses iteration {max(ends)}, which is whole"
