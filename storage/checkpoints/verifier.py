"""Whether what is stored is whole: a checkpoint, a run, or all of a store. Nothing is changed.

With ``full`` every byte of every object that a committed checkpoint refers to is read; without,
objects are only looked for, and must be as long as they were. What is found is data, see
`ckptd.storage.checkpoints.findings`; trouble with the store itself is raised (`StoreError`),
because it says nothing about what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ckptd.storage.checkpoints.catalog import Catalog, CheckpointState, StoredCheckpoint
from ckptd.storage.checkpoints.checkpoint_check import Checker
from ckptd.storage.checkpoints.findings import Finding, Progress, Severity, VerifyReport, is_whole
from ckptd.storage.checkpoints.manifest import ManifestError
from ckptd.storage.checkpoints.names import CheckpointId, RunName, WorldName, parse
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
    told: Callable[[Progress], None] | None = None,
) -> VerifyReport:
    """Whether a checkpoint is whole; one that lacks a rank is not.

    Args:
        full: read every byte, and not only what is needed to know that it is there.
        map_fn: the ``map`` of a thread pool; ranks are verified side by side.
        told: called with the progress, by one thread at a time.
    """
    checker = Checker(store, full=full, told=told)
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
    told: Callable[[Progress], None] | None = None,
) -> VerifyReport:
    """Whether all committed checkpoints of a run are whole, and what else lies there."""
    return _run(store, job, run, full, map_fn, told)


def verify_store(
    store: ObjectStore,
    *,
    full: bool = True,
    map_fn: MapFunction = map,
    told: Callable[[Progress], None] | None = None,
) -> VerifyReport:
    """Whether all committed checkpoints of all runs are whole, and what else lies there."""
    runs: set[tuple[str, str]] = set()
    foreign: list[str] = []
    for info in store.list(""):
        name = parse(info.key)
        if name is None:
            foreign.append(info.key)
        elif not isinstance(name, WorldName):  # what it names is a run of its own
            runs.add((name.job, name.run))
    outside = [key for key in foreign if tuple(key.split("/")[:2]) not in runs]
    reports = [_run(store, job, run, full, map_fn, told) for job, run in sorted(runs)]
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
    told: Callable[[Progress], None] | None,
) -> VerifyReport:
    checker = Checker(store, full=full, told=told)
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
    """The run's id as ``run.json`` tells it."""
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
    return {Finding(Severity.INFO, key, "it is none of ours") for key in keys}


def _report(
    checker: Checker, findings: set[Finding], catalog: Catalog, whole: Iterable[CheckpointId]
) -> VerifyReport:
    named = tuple([(catalog.job, catalog.run, checkpoint) for checkpoint in whole])
    return VerifyReport(_sorted(findings), named, checker.num_objects, checker.read_bytes)


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    order = {severity: number for number, severity in enumerate(Severity)}
    return tuple(sorted(findings, key=lambda f: (order[f.severity], f.key, f.tensor, f.what)))
