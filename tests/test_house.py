"""The rules that keep the tree easy to enter (docs/decisions/house.md)."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ckptd", "client", "cuda", "storage", "transport")
MODULES_MAX = 15
COLUMNS_MAX = 110
# A shorter module is worth a door of its own only where several others come in.
LINES_MIN = 76
# Users import it by this name.
PUBLIC_DOORS = {"ckptd/saved.py"}
# The field has a word for each of these (docs/decisions/house.md).
PRIVATE_WORDS = {
    *("apart", "beside", "handing", "telling", "told", "alike", "lending", "leasing", "bringing", "alongside")
}
# A line for each module that has no test of its own name.
COVERED = Path("tests", "covered_by.txt")
# The reference of the documentation shows these, and no imports.
NAMES_LISTED = {"ckptd/errors.py"}
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


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Of a module; who looks at it changes nothing."""
    return ast.parse((ROOT / path).read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All of a module's tree: one walk for all tests."""
    return list(ast.walk(tree_of(path)))


def dotted(path: Path) -> str:
    """The module's name in imports."""
    name = ".".join(path.with_suffix("").parts)
    return name if name.startswith("ckptd.") else f"ckptd.{name}"


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
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert twice.keys() == CLASSES_TWICE, twice


def test_a_module_has_a_subject_or_several_importers() -> None:
    """A reader opens no file for twenty lines that one other file needs."""
    importers: dict[str, set[Path]] = defaultdict(set)
    for path in modules():
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{each.name}" for each in node.names)):
                    importers[name].add(path)
    short = []
    for path in modules():
        name = dotted(path)
        lines = len((ROOT / path).read_text().splitlines())
        if lines < LINES_MIN and len(importers[name]) < 2 and str(path) not in PUBLIC_DOORS:
            short.append(f"{path}: {lines} lines, {len(importers[name])} importers")
    assert len(importers) > 500, "the imports were not found"
    assert not short


def test_a_name_is_imported_from_where_it_is_defined() -> None:
    """A second address sends a reader to a file that has nothing of it. Packages may offer names of their modules."""
    trees = {dotted(path): tree_of(path) for path in modules()}
    nodes = {dotted(path): nodes_of(path) for path in modules()}
    borrowed = {
        (module, each.asname or each.name)
        for module, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module in trees
        for each in node.names
    }
    second_hand = {
        f"{module} takes {each.name} from {node.module}"
        for module, found in nodes.items()
        for node in found
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if (node.module, each.name) in borrowed
    }
    assert len(borrowed) > 1000, "the imports were not found"
    assert not second_hand


def test_only_packages_list_their_names() -> None:
    """In a module an underscore says what is private, as linters and mypy see it. Nothing held a list of names
    to that: 97 listed ones were imported by nobody, and 16 that other modules import were not listed.
    """
    lists = {
        str(path)
        for path in modules()
        for node in tree_of(path).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and "__all__" in ast.unparse(node).split(" = ")[0]
    }
    assert lists == NAMES_LISTED


def test_functions_and_classes_have_the_words_of_the_field() -> None:
    private = []
    for path in modules():
        for node in nodes_of(path):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if PRIVATE_WORDS & set(node.name.strip("_").split("_")):
                private.append(f"{path}:{node.name}")
    assert not private


# -- wiring ---------------------------------------------------------------------------------------

PARAMETERS_MAX = 8
# Only ever shorter. Kernels: Triton has neither dataclasses nor keyword groups, each pointer is a parameter.
MANY_PARAMETERS = {
    "client/pipeline/boundary_log.py:BoundaryLog.__init__",
    "cuda/dispatch_kernels.py:match_kernel",
    "cuda/dispatch_kernels.py:quotas_kernel",
    "cuda/dispatch_kernels.py:share_kernel",
}
# Only ever shorter: callables that are set from outside after the object was made.
SET_AFTERWARDS = {
    "ckptd/node/service.py:store.promised",
}


def functions(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each with its name; that of a method begins with its class."""
    owners = {
        id(inner): f"{node.name}." for node in nodes if isinstance(node, ast.ClassDef) for inner in node.body
    }
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owners.get(id(node), "") + node.name, node


def test_no_function_has_more_parameters_than_a_reader_keeps_in_mind() -> None:
    """What belongs together goes into a frozen dataclass, or is one object with methods."""
    many = set()
    for path in modules():
        for name, function in functions(nodes_of(path)):
            given = function.args
            parameters = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            if sum(each not in ("self", "cls") for each in parameters) > PARAMETERS_MAX:
                many.add(f"{path}:{name}")
    assert not many - MANY_PARAMETERS, "too many parameters"
    assert not MANY_PARAMETERS - many, "these are no exceptions any more: take them off the list"


def is_callable(annotation: ast.AST | None, value: ast.AST | None, methods: set[str]) -> bool:
    """Whether an attribute holds a function, as far as its annotation and its value tell."""
    if isinstance(value, ast.Lambda):
        return True
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        return value.value.id == "self" and value.attr in methods
    return annotation is not None and ast.unparse(annotation).startswith("Callable")


def assignments(nodes: list[ast.AST]) -> Iterator[tuple[ast.Attribute, ast.AST | None, ast.AST | None]]:
    """Attribute, annotation and value."""
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            yield node.target, node.annotation, node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                pair = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                targets = target.elts if isinstance(target, ast.Tuple) else [target]
                values = node.value.elts if pair else [node.value] * len(targets)  # type: ignore[attr-defined]
                for each, value in zip(targets, values, strict=False):
                    if isinstance(each, ast.Attribute):
                        yield each, None, value


def of_self(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def test_no_callable_is_set_on_an_object_that_was_made_before() -> None:
    """Who is told of something is an argument of the constructor: a listener with methods."""
    trees = {path: nodes_of(path) for path in modules()}
    # Attributes that some class makes as a place for a callable: with a lambda, or annotated as one.
    places = {
        attribute.attr
        for nodes in trees.values()
        for attribute, annotation, value in assignments(nodes)
        if of_self(attribute) and is_callable(annotation, value, set())
    }
    found = set()
    for path, nodes in trees.items():
        methods = {f.name for _, f in functions(nodes) if not f.decorator_list}
        for attribute, _, value in assignments(nodes):
            empty = isinstance(value, ast.Constant) and value.value is None
            called = attribute.attr in places and not empty
            if not of_self(attribute) and (called or is_callable(None, value, methods)):
                found.add(f"{path}:{ast.unparse(attribute)}")
    assert places, "the places for callables were not found"
    assert not found - SET_AFTERWARDS, "callables that are set after construction"
    assert not SET_AFTERWARDS - found, "these are no exceptions any more: take them off the list"


def test_lines_are_short() -> None:
    long = [
        f"{path}:{number}"
        for path in modules()
        for number, line in enumerate((ROOT / path).read_text().splitlines(), start=1)
        if len(line) > COLUMNS_MAX
    ]
    assert not long


def mirror_of(path: Path) -> Path:
    """Where the tests of a module stand by themselves."""
    return Path("tests", path.parent, f"test_{path.name}")


def covered_by() -> dict[str, str]:
    """Of tests/covered_by.txt: module, and the test that covers it instead."""
    rows = [line.split(": ", 1) for line in (ROOT / COVERED).read_text().splitlines()]
    return {module: rest.split(" ", 1)[0] for module, rest in rows}


def test_each_module_has_its_test() -> None:
    """In the same place under tests/, or named in the list, with the module through which it gets there."""
    listed = covered_by()
    mirrored = {str(path) for path in modules() if (ROOT / mirror_of(path)).is_file()}
    every = {str(path) for path in modules()}
    assert not every - mirrored - listed.keys(), f"add a test, or a line in {COVERED}"
    assert not listed.keys() - (every - mirrored), f"strike these from {COVERED}"
    assert all((ROOT / test).is_file() for test in listed.values())
