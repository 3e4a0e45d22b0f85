"""docs/reference/events.md has every kind of event of the code, with its levels, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.docs.code_blocks import ROOT

LEVELS = {"info", "warning", "error"}
# Kinds that the code puts together.
MADE = {
    "dash": {"info"},
    "fetch_ended": {"info"},
    "fetched": {"info"},
    "metrics": {"info"},
    "persist.<code>": {"warning"},
    "recovery_phases": {"info"},
    "refused.<code>": {"warning"},
    "replica_damaged": {"error"},
    "replica_forged": {"error"},
    "start_phases": {"info"},
    "store_resumed": {"info"},
    "store_paused": {"error"},
}


def of_the_code() -> dict[str, set[str]]:
    """Each kind that is passed beside a level, with these levels."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for folder in ("ckptd", "client"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if (ROOT / "ckptd/client") in path.parents:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    for level, kind in zip(
                        map(literal, node.args), map(literal, node.args[1:]), strict=False
                    ):
                        if level in LEVELS and kind and kind not in LEVELS:
                            kinds[kind].add(level)
    return kinds


def literal(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def rows_of_the_page() -> list[tuple[list[str], set[str]]]:
    """The kinds of each row, and its levels."""
    text = (ROOT / "docs/reference/events.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \| ([a-z, ]+) \|", text, re.MULTILINE)
    return [(re.findall("`(.*?)`", kinds), set(levels.split(", "))) for kinds, levels in rows]


def of_the_page() -> set[str]:
    return {kind for kinds, _ in rows_of_the_page() for kind in kinds}


def test_the_page_has_every_kind() -> None:
    found = of_the_code()
    assert len(found) > 80, "the events were not found"
    found |= MADE
    assert found.keys() == of_the_page()
    wrong = {
        kind: (found[kind], levels)
        for kinds, levels in rows_of_the_page()
        for kind in kinds
        if levels != set().union(*(found[each] for each in kinds))
    }
    assert wrong == {}, "the levels of the code, and those of the row"
