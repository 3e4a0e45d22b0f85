"""The table of docs/optimizers.md, from what ``tests/habits/test_optimizers.py`` found.

``CKPTD_LONG=1 python -m pytest tests/habits/test_optimizers.py`` plays the rows, and notes what each came to in ``out/habits``;
``python -m tests.habits.optimizer_table`` writes the table. A row that was not played keeps what the table says of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.habits.driver import Outcome, Row, Verdict
from tests.habits.optimizers import MAKERS

__all__ = ["note", "reason_of", "table"]

_ROOT = Path(__file__).parents[2]
_FOUND = _ROOT / "out" / "habits" / "optimizers"
_PAGE = _ROOT / "docs" / "optimizers.md"
_HEAD = "| optimizer | W = 1, 1 rank | W = 1, 2 ranks | W = 3, 1 rank | W = 3, 2 ranks |\n|---|---|---|---|---|\n"
_COLUMNS = [(1, 1), (1, 2), (3, 1), (3, 2)]


def note(row: Row, outcome: Outcome) -> None:
    """Keep what a row came to."""
    _FOUND.mkdir(parents=True, exist_ok=True)
    text = outcome.verdict.value
    if outcome.verdict is Verdict.REFUSED:
        text = f"refused: {reason_of(outcome.text)}"
    told = {"name": row.name, "at": [row.window, row.ranks], "text": text}
    path = _FOUND / re.sub(r"[^A-Za-z0-9]+", "_", row.id)
    path.with_suffix(".json").write_text(json.dumps(told))


def reason_of(log: str) -> str:
    """Why, in the words of the log, without what to do."""
    kept = re.search(r"keeps (\S.*?\)), which cannot be captured", log)
    if kept is not None:
        return f"keeps `{kept[1]}`"
    found = re.search(r"updates each parameter independently: (.*?)\. Pass policy='dense'", log, re.DOTALL)  # fmt: skip
    if found is None:
        return "see the log"
    reason = found[1].split("; ")[0]
    return re.sub(r"\s+", " ", reason)


def table(found: dict[tuple[str, int, int], str], before: str) -> str:
    """The table as Markdown.

    Args:
        found: by optimizer, window and ranks.
        before: the table as it is.
    """
    rows: dict[str, list[str]] = {name: ["not played"] * len(_COLUMNS) for name in MAKERS}
    for line in before.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 1 + len(_COLUMNS) and cells[0] in rows:
            rows[cells[0]] = cells[1:]
    for (name, window, ranks), text in found.items():
        rows[name][_COLUMNS.index((window, ranks))] = text.replace("|", "\\|")
    return _HEAD + "".join(f"| {name} | {' | '.join(cells)} |\n" for name, cells in rows.items())


def main() -> None:
    told = [json.loads(path.read_text()) for path in sorted(_FOUND.glob("*.json"))]
    found = {(t["name"], *t["at"]): t["text"] for t in told}
    page = _PAGE.read_text()
    start = page.index("| optimizer |")
    _PAGE.write_text(page[:start] + table(found, page[start:]))


if __name__ == "__main__":
    main()
