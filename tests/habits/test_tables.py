"""The tables of the pages keep what was played before, and say why something is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.habits.driver import Row
from tests.habits.tables import Table, reason_of

ROWS = [Row("m", name, window, ranks) for name in "ab" for window in (1, 3) for ranks in (1, 2)]
BEFORE = """| thing | W = 1, 1 rank | W = 1, 2 ranks | W = 3, 1 rank | W = 3, 2 ranks |
|---|---|---|---|---|
| a | exact | not played | refused: x \\| y | not played |
| gone | exact | exact | exact | exact |
"""


def test_a_cell_that_was_not_played_keeps_what_the_table_says() -> None:
    table = Table("things", Path("unused"), "thing")
    text = table.text(ROWS, {("a", 1, 2): "exact", ("b", 3, 2): "different"}, BEFORE)
    assert text.splitlines()[2:] == [
        "| a | exact | exact | refused: x \\| y | not played |",
        "| b | not played | not played | not played | different |",
    ]
    assert table.text(ROWS, {}, text) == text
    few = [row for row in ROWS if (row.name, row.ranks) != ("b", 1)]
    assert table.text(few, {}, text).splitlines()[3] == "| b | – | not played | – | different |"  # noqa: RUF001


def test_the_reason_of_a_refusal_is_without_what_to_do() -> None:
    log = "Traceback\nValueError: the DataLoader has in_order=False: which batch comes when depends\n"
    assert reason_of(log) == "the DataLoader has in_order=False"
    log = "ckptd: optimizer A keeps state[0]['p'] (type x.Y, made in a step), which cannot be captured: no"
    assert reason_of(log) == "keeps `state[0]['p'] (type x.Y, made in a step)`"
    with pytest.raises(ValueError, match="a refusal without a reason"):
        reason_of("Killed\n")


def test_what_cannot_be_played_is_said_in_a_row_of_its_own() -> None:
    """FSDP2 through Hugging Face was in no row, so a reader could take it for tried."""
    table = Table("things", Path("unused"), "thing", (("c", "not possible: why"),))
    text = table.text(ROWS, {}, BEFORE)
    assert text.splitlines()[-1] == "| c |" + " not possible: why |" * 4
    assert table.text(ROWS, {}, text) == text
