"""Verification of a checkpoint, a run, or a whole store. Changes nothing.

With ``full`` every byte of every object of the committed checkpoints is read; without it, only the
existence and size of objects are checked. Findings are data, see
`ckptd.storage.checkpoints.findings`. Errors of the store itself are raised (`StoreError`), because
they say nothing about the stored data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ckptd.storage.checkpoints.catalog import Catalog, CheckpointState, StoredCheckpoint
from ckptd.storage.checkpoints.checkpoint_check import Checker
from ckptd.storage.checkpoints.findings import Finding, Progress, Severity, VerifyReport, is_whole
from ckptd.storage.checkpoints.manifest import ManifestError
from ckptd.storage.checkpoints.names import CheckpointId, IncarnationName, RunName, parse
from ckptd.storage.checkpoints.reader import MapFunction, read_catalog, read_identity
from ckptd.storage.stores.objects import ObjectStore, TooLarge

__all__ = [
    "Finding",
    "Progress",
    "Severity",
    "VerifyReport",
    "verify_checkpoint",
    "verify_run",
    "verify_store",
]


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
    checker = Checker(store, full=full, progress=progress)
    run_id, findings = _identity(store, catalog)
    found = checker.check(checkpoint, run_id, map_fn)
    whole = [checkpoint.id] if is_whole(found) else []
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
    return _run(store, job, run, full, map_fn, progress)


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
    reports = [_run(store, job, run, full, map_fn, progress) for job, run in sorted(runs)]
    findings = {finding for report in reports for finding in report.findings}
    return VerifyReport(
        _sorted(findings | _foreign(outside)),
        tuple([checkpoint for report in reports for checkpoint in report.whole]),
        sum(report.num_objects for report in reports),
        sum(report.read_bytes for report in reports),
    )


def _run(
    store: ObjectStore,
    job: str,
    run: str,
    full: bool,
    map_fn: MapFunction,
    progress: Callable[[Progress], None] | None,
) -> VerifyReport:
    checker = Checker(store, full=full, progress=progress)
    catalog = read_catalog(store, job, run)
    run_id, findings = _identity(store, catalog)
    whole: list[CheckpointId] = []
    for checkpoint in catalog.checkpoints:
        if checkpoint.state is CheckpointState.COMMITTED:
            found = checker.check(checkpoint, run_id, map_fn)
            if is_whole(found):
                whole.append(checkpoint.id)
        else:
            found = {_state(checkpoint)} | checker.mention(checkpoint, map_fn)
        findings |= found
    for listed in catalog.objects.values():
        for _, info in listed:
            if info.key not in checker.mentioned:
                findings.add(Finding(Severity.INFO, info.key, "no manifest refers to it"))
    return _report(checker, findings | _foreign(catalog.foreign), catalog, whole)


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


def _report(
    checker: Checker, findings: set[Finding], catalog: Catalog, whole: Iterable[CheckpointId]
) -> VerifyReport:
    named = tuple([(catalog.job, catalog.run, checkpoint) for checkpoint in whole])
    return VerifyReport(_sorted(findings), named, checker.num_objects, checker.read_bytes)


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    order = {severity: number for number, severity in enumerate(Severity)}
    return tuple(sorted(findings, key=lambda f: (order[f.severity], f.key, f.tensor, f.what)))
