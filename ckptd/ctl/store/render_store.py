"""The answers of `ckptctl checkpoints` and `ckptctl verify` as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptd.ctl.store.store_changes import Pinned, Removed
from ckptd.ctl.store.store_checks import Advised, Checked
from ckptd.ctl.store.store_gc import Collected, Gone
from ckptd.ctl.store.store_views import CheckpointRow, CheckpointShown, RankShown, RunShown
from ckptd.units import format_age, format_bytes, format_table

__all__ = ["checked", "checkpoint", "collected", "pinned", "planned", "removed", "runs"]

_MAX_RANKS = 64
_MAX_FINDINGS = 50


def runs(found: Sequence[RunShown], store: str) -> str:
    """One table per run."""
    if not found:
        return f"{store} contains no checkpoints"
    return "\n\n".join([f"store {store}", *(_run(run) for run in found)])


def checkpoint(shown: CheckpointShown, *, only_rank: int | None) -> str:
    """The ranks and snapshots of a checkpoint, and its use by a restore; the objects of ``only_rank``."""
    row = shown.checkpoint
    lines = [
        f"{row.job}/{row.run} iteration {row.iteration} (epoch {row.epoch}, agreement {row.agreement}):"
        f" {row.state}, {row.reason}; written {format_age(row.age_s)} ago"
        + (", pinned" if row.pinned else ""),
        f"{_size(row.size_bytes)} in all, {_size(row.own_bytes)} in no other checkpoint",
        _restore(shown),
        "",
    ]
    ranks = [rank for rank in shown.ranks if only_rank in (None, rank.rank)]
    header = ("rank", "window", "snapshots", "image", "uploaded", "shared", "objects", "manifest")
    lines.append(format_table(header, [_rank(rank) for rank in ranks[:_MAX_RANKS]]))
    if len(ranks) > _MAX_RANKS:
        lines.append(f"… and {len(ranks) - _MAX_RANKS} more ranks (--json has all)")
    lines += ["", _snapshots(ranks[:_MAX_RANKS])]
    if only_rank is not None:
        lines += ["", _objects(ranks)]
    return "\n".join(lines)


def checked(found: Checked) -> str:
    """The findings, each with its advice, and the whole checkpoints."""
    lines = [line for finding in found.findings[:_MAX_FINDINGS] for line in _finding(finding)]
    if len(found.findings) > _MAX_FINDINGS:
        lines.append(f"… and {len(found.findings) - _MAX_FINDINGS} more findings (--json has all)")
    lines += [
        f"whole: {each.job}/{each.run} iteration {each.iteration} (epoch {each.epoch})"
        for each in found.whole
    ]
    how = f"{format_bytes(found.read_bytes)} read" if found.full else "only sizes were compared"
    errors = sum(finding.severity == "error" for finding in found.findings)
    verdict = "nothing is damaged" if found.ok else f"DAMAGED: {_count(errors, 'error')}"
    whole = f"{_count(len(found.whole), 'checkpoint')} whole"
    lines.append(f"{verdict}; {whole}, {_count(found.num_objects, 'object')}, {how}")
    return "\n".join(lines)


def pinned(done: Pinned) -> str:
    """Whether the checkpoint is pinned now."""
    name = f"{done.job}/{done.run} iteration {done.iteration} (epoch {done.epoch})"
    state = "pinned" if done.pinned else "not pinned"
    return f"{name} is {state}" + ("" if done.changed else ", as before")


def removed(done: Removed) -> str:
    """The deleted objects, and those that stay for now."""
    text = (
        f"removed {done.job}/{done.run} iteration {done.iteration} (epoch {done.epoch}): "
        f"{_count(done.num_manifests, 'manifest')} and {_count(done.num_objects, 'object')}, "
        f"{format_bytes(done.freed_bytes)}"
    )
    if not done.left:
        return text
    return (
        f"{text}\n{_count(done.left, 'object')} that no other checkpoint needs stay for now, "
        f"because {done.reason}; "
        "`ckptctl checkpoints gc` deletes them later"
    )


def planned(plan: Collected) -> str:
    """The keys of a run that stay and those that are deleted, with reasons."""
    name = f"{plan.job}/{plan.run}"
    if plan.refused:
        return f"{name}: nothing is deleted: {plan.refused}"
    lines = [name]
    lines += [f"  keep    iteration {k.iteration} (epoch {k.epoch}): {k.reason}" for k in plan.kept]
    lines += _going("manifest", plan.manifests) + _going("object", plan.objects)
    lines += _going("name", plan.names)
    if not (plan.manifests or plan.objects or plan.names):
        lines.append("  nothing to delete")
    return "\n".join(lines)


def collected(found: Sequence[Collected], *, dry_run: bool) -> str:
    """A summary in one line."""
    freed = format_bytes(sum(plan.freed_bytes for plan in found))
    num = sum(len(plan.manifests) + len(plan.objects) + len(plan.names) for plan in found)
    if dry_run:
        return f"would delete {_count(num, 'key')}, {freed}; nothing was deleted"
    ended = sum(max(0, plan.uploads_ended) for plan in found)
    uploads = f"; ended {_count(ended, 'half-finished upload')}" if ended else ""
    return f"deleted {_count(num, 'key')}, {freed}{uploads}"


def _run(run: RunShown) -> str:
    name = f"{run.job}/{run.run}"
    if run.elastic:
        name += f" (elastic run {run.elastic}, {run.standing})"
    if not run.checkpoints:
        return f"{name}\nno checkpoint yet"
    header = ("iteration", "state", "epoch", "ranks", "size", "only here", "age", "pinned", "note")
    lines = [name, format_table(header, [_row(row) for row in run.checkpoints])]
    lines += [f"damaged: {why}" for why in run.unreadable.values()]
    return "\n".join(lines)


def _row(row: CheckpointRow) -> tuple[object, ...]:
    return (
        row.iteration,
        row.state,
        row.epoch,
        row.world_size,
        _size(row.size_bytes),
        _size(row.own_bytes),
        format_age(row.age_s),
        "yes" if row.pinned else "-",
        "-" if row.state == "committed" else row.reason,
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _size(size: int | None) -> str:
    return "?" if size is None else format_bytes(size)


def _restore(shown: CheckpointShown) -> str:
    end = shown.checkpoint.iteration
    if shown.checkpoint.state != "committed":
        return f"a restore does not use it: {shown.checkpoint.reason}"
    if shown.replayed < 0:
        return "a restore cannot use it: no manifest can be read"
    if shown.damaged:
        return "a restore does not use it: a manifest is damaged"
    replayed = _count(shown.replayed, "iteration")
    return f"a restore loads snapshots {shown.start} to {end}, and replays {replayed}"


def _rank(rank: RankShown) -> tuple[object, ...]:
    if rank.damage:
        return (rank.rank, "-", "-", "-", "-", "-", "-", f"DAMAGED: {rank.damage}")
    return (
        rank.rank,
        rank.window,
        len(rank.snapshots),
        format_bytes(rank.image_bytes),
        format_bytes(rank.uploaded_bytes),
        format_bytes(rank.shared_bytes),
        rank.num_objects,
        f"by {rank.tool}",
    )


def _snapshots(ranks: Iterable[RankShown]) -> str:
    rows = [
        (
            rank.rank,
            snapshot.iteration,
            snapshot.phase,
            f"{snapshot.num_anchors} of {snapshot.num_operators}",
            format_bytes(snapshot.image_bytes),
            format_bytes(snapshot.uploaded_bytes),
            format_bytes(snapshot.shared_bytes),
            len(snapshot.objects),
        )
        for rank in ranks
        for snapshot in rank.snapshots
    ]
    header = ("rank", "snapshot", "phase", "anchored", "image", "uploaded", "shared", "objects")
    return format_table(header, rows)


def _objects(ranks: Iterable[RankShown]) -> str:
    sizes = {k: n for rank in ranks for s in rank.snapshots for k, n in s.objects.items()}
    rows = [(key, format_bytes(size)) for key, size in sorted(sizes.items())]
    return format_table(("object", "size"), rows)


def _finding(finding: Advised) -> list[str]:
    tensor = f" (tensor {finding.tensor!r})" if finding.tensor else ""
    lines = [f"{finding.severity.upper():<7}  {finding.key}: {finding.what}{tensor}"]
    return [*lines, f"         -> {finding.advice}"] if finding.advice else lines


def _going(what: str, going: Iterable[Gone]) -> list[str]:
    """The number of deleted keys for each reason."""
    by_reason: dict[str, list[int]] = {}
    for gone in going:
        by_reason.setdefault(gone.reason, []).append(gone.size)
    return [
        f"  delete  {_count(len(sizes), what)}, {format_bytes(sum(sizes))}: {reason}"
        for reason, sizes in by_reason.items()
    ]
