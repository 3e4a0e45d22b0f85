"""Numbers and tables as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def format_bytes(size: int) -> str:
    """Bytes with a binary unit and three significant digits: 1536 -> "1.5 KiB"."""
    if abs(size) < 1024:
        return f"{size} B"
    power = min((abs(size).bit_length() - 1) // 10, 4)
    return f"{size / (1 << 10 * power):.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def format_age(seconds: float) -> str:
    """A duration in its largest sensible unit: 5400 -> "90 min"."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"


def count_of(number: int, what: str) -> str:
    """A number with its noun: "1 object", "2 objects"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def first_of(texts: Iterable[object], most: int, *, between: str = ", ", what: str = "more") -> str:
    """The first texts, and the number of others: "a, b and 3 more", or "a; b; and 3 more ranks"."""
    found = list(map(str, texts))
    if len(found) <= most:
        return between.join(found)
    last = " and" if between == ", " else f"{between}and"
    return f"{between.join(found[:most])}{last} {len(found) - most} {what}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned by spaces, numbers to the right; no rows give the header alone."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    numeric = [
        bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))
    ]
    lines = []
    for line in [list(header), *cells]:
        fitted = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        lines.append("  ".join(fitted).rstrip())
    return "\n".join(lines)
