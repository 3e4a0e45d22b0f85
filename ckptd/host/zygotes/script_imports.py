"""What a script imports, from its text: for a zygote on a machine where no trainer has recorded it yet.

Only import statements at module level, of the script and of its own modules, are read, and those under a
condition are left to the trainer. What they name in other modules is loaded, so that packages which load
their parts when they are asked for (`transformers`, `ckptd`) load what the script needs. Its own modules are
not imported (`ckptd.host.zygotes.preload`).
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptd.host.zygotes.preload import belongs
from ckptd.host.zygotes.script_main import Script, own_folder, script_file

_FILES_MAX = 500


class Imported(NamedTuple):
    """A module, and what a script takes from it."""

    module: str
    names: tuple[str, ...]


def imports_of_script(script: Script) -> list[Imported]:
    """Of modules that are not the script's own, in the order of the text.

    A script that cannot be read has none: the interpreter will say why.
    """
    found: list[Imported] = []
    own, seen = own_folder(script), set[str]()
    waiting = [(script_file(script), script.target.rpartition(".")[0] if script.is_module else "")]
    while waiting and len(seen) < _FILES_MAX:
        file, package = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        for each in _imports_in(file, package):
            if belongs(each.module.partition(".")[0], own):
                waiting += _files_of(each)
            elif each not in found:
                found.append(each)
    return found


def import_named(imports: Sequence[Imported]) -> list[str]:
    """Import them; returns the modules that could not be imported, or lack what is named."""
    failed = []
    for module, names in imports:
        try:
            loaded = importlib.import_module(module)
            for name in names:
                if not hasattr(loaded, name):
                    importlib.import_module(f"{module}.{name}")
        except (Exception, SystemExit):  # noqa: BLE001 - of any code; the trainer meets it, too
            failed.append(module)
    return failed


def _imports_in(file: str, package: str) -> Iterator[Imported]:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Try):
            waiting[:0] = node.body
        elif isinstance(node, ast.Import):
            yield from (Imported(alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (module := _full_name(node, package)):
            yield Imported(module, tuple(alias.name for alias in node.names if alias.name != "*"))


def _full_name(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return (node.module or "").replace("__future__", "")
    parents = package.split(".") if package else []
    if node.level > len(parents):
        return ""  # beyond its top-level package, which the interpreter refuses
    base = parents[: len(parents) + 1 - node.level]
    return ".".join([*base, *([node.module] if node.module else [])])


def _files_of(imported: Imported) -> list[tuple[str, str]]:
    """The files of a module of the script's own, and of modules that may be named in it, each with its
    package. Nothing is imported for that.
    """
    found = []
    for name in (imported.module, *(f"{imported.module}.{each}" for each in imported.names)):
        for base in sys.path:
            place = os.path.join(base or os.curdir, *name.split("."))
            for file, package in (
                (f"{place}.py", name.rpartition(".")[0]),
                (os.path.join(place, "__init__.py"), name),
            ):
                if os.path.isfile(file):
                    found.append((os.path.realpath(file), package))
    return found
