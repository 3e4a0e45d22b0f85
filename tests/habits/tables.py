"""The tables of docs/optimizers.md and docs/data.md, from what the tests of this folder found.

``make campaign-habits`` plays all rows, and each test notes what its row came to in ``out/habits``;
``python -m tests.habits.tables`` writes the tables. A cell that was not played keeps what the table
says of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.habits.driver import Outcome, Row, Verdict

__all__ = ["DATA", "OPTIMIZERS", "Table", "reason_of"]

_ROOT = Path(__file__).parents[2]
_COLUMNS = [(1, 1), (1, 2), (3, 1), (3, 2)]
_NOT_PLAYED = "not played"
_NO_ROW = "–"  # noqa: RUF001 - a dash in a table: it exists on other numbers of ranks only

# What a log says of a refusal, the first that is found, with what is written of it. Without what to
# do: the page says that.
_REASONS = [
    (r"keeps (\S.*?\)), which cannot be captured", "keeps `{}`"),
    (r"updates each parameter independently: (.*?)\. Pass snapshots=SnapshotOptions", "{}"),
    (r"\n\w*Error: (.*?)(?:: |\n|$)", "{}"),
]


@dataclass(frozen=True, slots=True)
class Table:
    """One of a page; ``name``: also of the folder under ``out/habits``; ``impossible``: rows that
    cannot be played here, with the reason.
    """

    name: str
    page: Path
    head: str
    impossible: tuple[tuple[str, str], ...] = ()

    def note(self, row: Row, outcome: Outcome) -> None:
        """Keep what a row came to."""
        folder = _ROOT / "out" / "habits" / self.name
        folder.mkdir(parents=True, exist_ok=True)
        text = outcome.verdict.value
        if outcome.verdict is Verdict.REFUSED:
            text = f"refused: {reason_of(outcome.text)}"
        told = {"name": row.name, "at": [row.window, row.ranks], "text": text}
        path = folder / re.sub(r"[^A-Za-z0-9]+", "_", row.id)
        path.with_suffix(".json").write_text(json.dumps(told))

    def write(self, rows: Iterable[Row]) -> None:
        """Write it into its page, with what was noted of ``rows``."""
        page = self.page.read_text()
        start = page.index(f"| {self.head} |")
        before, rest = _split(page[start:])
        told = [
            json.loads(path.read_text())
            for path in sorted((_ROOT / "out" / "habits" / self.name).glob("*.json"))
        ]
        found = {(t["name"], *t["at"]): t["text"] for t in told}
        self.page.write_text(page[:start] + self.text(list(rows), found, before) + rest)

    def text(self, rows: Sequence[Row], found: dict[tuple[str, int, int], str], before: str) -> str:
        """The table as Markdown.

        Args:
            rows: all of the table.
            found: by name, window and ranks.
            before: the table as it is.
        """
        there = {(row.name, row.window, row.ranks) for row in rows}
        cells: dict[str, list[str]] = {row.name: [_NOT_PLAYED] * len(_COLUMNS) for row in rows}
        for line in before.splitlines()[2:]:
            old = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
            if len(old) == 1 + len(_COLUMNS) and old[0] in cells:
                cells[old[0]] = old[1:]
        for (name, window, ranks), text in found.items():
            if name in cells:
                cells[name][_COLUMNS.index((window, ranks))] = text.replace("|", "\\|")
        for name, of_name in cells.items():
            for place, at in enumerate(_COLUMNS):
                if (name, *at) not in there:
                    of_name[place] = _NO_ROW
        columns = [f"W = {window}, {ranks} rank{'s' * (ranks > 1)}" for window, ranks in _COLUMNS]
        lines = [[self.head, *columns], ["---"] * (1 + len(_COLUMNS))]
        lines += [[name, *of_name] for name, of_name in cells.items()]
        lines += [[name, *[why] * len(_COLUMNS)] for name, why in self.impossible]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


OPTIMIZERS = Table("optimizers", _ROOT / "docs" / "optimizers.md", "optimizer")
# Accelerate looks at the setting only for devices; without one its plugin is left aside.
_FSDP2_OF_TRAINER = "not possible on a CPU: Accelerate ignores `fsdp=` there, and trains with DDP"
DATA = Table("data", _ROOT / "docs" / "data.md", "data", (("trainer, FSDP2", _FSDP2_OF_TRAINER),))


def reason_of(log: str) -> str:
    """Why, in the words of the log, without what to do.

    Raises:
        ValueError: the log gives none.
    """
    for pattern, text in _REASONS:
        found = re.search(pattern, log, re.DOTALL)
        if found is not None:
            return text.format(re.sub(r"\s+", " ", found[1].split("; ")[0]).rstrip(" :,."))
    raise ValueError(f"a refusal without a reason:\n{log}")


def _split(text: str) -> tuple[str, str]:
    """A table, and what follows it."""
    lines = text.splitlines(keepends=True)
    end = next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return "".join(lines[:end]), "".join(lines[end:])


def main() -> None:
    from tests.habits import test_optimizers, test_pipelines

    OPTIMIZERS.write(test_optimizers.ROWS)
    DATA.write(test_pipelines.ROWS)


if __name__ == "__main__":
    main()
