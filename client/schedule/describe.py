"""The table that ``Checkpointer.describe()`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from ckptd.client.model.operators import Operator
from ckptd.core.schedule import OperatorCost, Schedule

__all__ = ["describe_table"]


def describe_table(
    operators: Sequence[Operator],
    costs: Sequence[OperatorCost],
    schedule: Schedule | None,
    owners: Sequence[int],
    head: Sequence[str],
) -> str:
    """Operators with kind, bytes anchored and not, the phase in which they are anchored, and who
    captures them.

    Args:
        owners: the rank that captures each; negative (or none given): every rank that has it.
    """
    phase_of = schedule.phase_of if schedule is not None else None
    rows = [("operator", "kind", "params", "anchor", "compute", "phase", "captured by")]
    for i, (op, cost) in enumerate(zip(operators, costs, strict=True)):
        phase = str(phase_of[i]) if phase_of is not None else "-"
        rows.append(
            (
                op.name,
                str(op.kind),
                str(len(op.members)),
                human(cost.anchor_bytes),
                human(cost.compute_bytes),
                phase,
                f"rank {owners[i]}" if owners and owners[i] >= 0 else "each",
            )
        )
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if c < 2 else cell.rjust(w)
            for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    total = (
        f"{len(operators)} operators, dense {human(sum(c.anchor_bytes for c in costs))}, "
        f"compute weights {human(sum(c.compute_bytes for c in costs))}"
    )
    return "\n".join([*head, lines[0], "-" * len(lines[0]), *lines[1:], total])


def human(size: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
