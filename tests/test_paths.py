"""docs/paths.md shows four trees of calls. Each function is there, and calls what stands below it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "paths.md"
PATHS = 4
# How often a path comes back to a file that it had left. Fewer is better; no more than these.
RETURNS_MAX = [5, 5, 5, 5]


@dataclass
class Row:
    """A function of a tree, and what it calls or hands over to, by their names."""

    depth: int
    name: str
    file: str
    calls: list[str] = field(default_factory=list)
    hands_over: list[str] = field(default_factory=list)


def trees() -> dict[str, list[Row]]:
    """Headline: its rows."""
    found: dict[str, list[Row]] = {}
    text = PAGE.read_text()
    for title, block in re.findall(r"^## (.*?)$.*?^```path\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        rows: list[Row] = []
        above: list[Row] = []
        for line in block.splitlines():
            depth = (len(line) - len(line.lstrip())) // 2
            del above[depth:]
            if (word := line.split()[0]) == "==>":
                above[-1].hands_over.append(line.split()[1])
                continue
            row = Row(depth, word, line.split()[1])
            assert len(above) == depth, f"{title}: {word} is indented too far"
            if above:
                above[-1].calls.append(word)
            above.append(row)
            rows.append(row)
        found[title] = rows
    return found


@cache
def module(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def body(name: str, file: str) -> ast.AST:
    """A function, or a method as ``Class.method``."""
    at: ast.AST = module(file)
    for part in name.split("."):
        defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        inner = [n for n in ast.iter_child_nodes(at) if isinstance(n, defined) and n.name == part]
        assert inner, f"{file} has no {name}"
        at = inner[0]
    return at


def names_in(at: ast.AST) -> set[str]:
    """Names and attributes that are used there, those of annotations, too."""
    used = {n.id for n in ast.walk(at) if isinstance(n, ast.Name)}
    return used | {n.attr for n in ast.walk(at) if isinstance(n, ast.Attribute)}


def test_the_page_shows_all_paths() -> None:
    assert len(trees()) == PATHS
    assert all(len(rows) > 10 for rows in trees().values())


def test_paths_return_seldom() -> None:
    found = []
    for rows in trees().values():
        stays = [
            row.file
            for row, before in zip(rows, [None, *rows[:-1]], strict=True)
            if not before or before.file != row.file
        ]
        found.append(len(stays) - len(set(stays)))
    assert all(now <= most for now, most in zip(found, RETURNS_MAX, strict=True)), found


@pytest.mark.parametrize("title", list(trees()))
def test_each_function_calls_what_stands_below_it(title: str) -> None:
    for row in trees()[title]:
        used = names_in(body(row.name, row.file))
        for called in row.calls:
            assert called.rpartition(".")[2] in used, f"{row.name} ({row.file}) calls no {called}"


@pytest.mark.parametrize("title", list(trees()))
def test_what_is_handed_over_is_sent_and_taken(title: str) -> None:
    """A callback is passed on in the file above it; a message is made in the function above it, and
    handled by the next one of the tree.
    """
    rows = trees()[title]
    for index, row in enumerate(rows):
        for what in row.hands_over:
            if any(what == other.name for other in rows):
                used = names_in(module(row.file))
                assert what.rpartition(".")[2] in used, f"{row.file} passes on no {what}"
                continue
            assert what in names_in(body(row.name, row.file)), f"{row.name} makes no {what}"
            taker = rows[index + 1]
            text = ast.unparse(body(taker.name, taker.file))
            assert re.search(rf"\b{what}\b", text), f"{taker.name} does not handle {what}"
