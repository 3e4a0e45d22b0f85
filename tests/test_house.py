"""The rules that keep the tree easy to enter (docs/decisions/house.md)."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ckptd", "client", "cuda", "storage", "transport")
MODULES_MAX = 15
# Used alike by users of two frameworks.
CLASSES_TWICE = {"CkptdCallback"}


def modules() -> list[Path]:
    found = []
    for top in FOLDERS:
        for path in sorted((ROOT / top).rglob("*.py")):
            inner = path.relative_to(ROOT).parents
            linked = any((ROOT / each).is_symlink() for each in inner)
            if not linked and path.name not in ("__init__.py", "__main__.py"):
                found.append(path.relative_to(ROOT))
    return found


def test_a_folder_is_seen_at_one_glance() -> None:
    count: dict[Path, int] = defaultdict(int)
    for path in modules():
        count[path.parent] += 1
    assert len(count) > 30, "the tree was not found"
    full = {str(folder): n for folder, n in count.items() if n > MODULES_MAX}
    assert not full, f"more than {MODULES_MAX} modules: {full}"


def test_file_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        places[path.name].append(str(path))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice


def test_names_of_public_classes_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert twice.keys() == CLASSES_TWICE, twice
