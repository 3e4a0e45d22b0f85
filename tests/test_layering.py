"""The layers of the code: the contracts in pyproject.toml hold, and cover every module there is.

The contracts name modules; a module that nobody named would be in no layer. So this file also checks
what the contracts promise against the import graph itself.
"""

from __future__ import annotations

import graphlib
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
# The last one is a process of its own, which a daemon starts and never imports.
USES_TORCH = ("ckptd.demo", "ckptd.client", "ckptd.cuda", "ckptd.recompute.recompute_worker")
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
PURE = ("ckptd.core", "ckptd.errors", "ckptd.units", "ckptd.unpacking")
KNOWN_ENGINES = {
    tuple(told.split(" -> ")) for told in CONTRACTS["the-core-knows-no-engine"]["ignore_imports"]
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        "ckptd",
        "ckptd.cuda",  # no __init__.py: a namespace package, which is seen only when named
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )


def _modules_without_torch(graph: grimp.ImportGraph) -> list[str]:
    return sorted(
        module
        for module in graph.modules
        if module.startswith("ckptd.") and not module.startswith(USES_TORCH)
    )


def test_the_contracts_are_kept() -> None:
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    done = subprocess.run(
        [sys.executable, "-c", command],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_graph_sees_the_linked_folders(graph: grimp.ImportGraph) -> None:
    """The packages are links: a tool that does not follow them would find every contract kept."""
    for module in (
        "ckptd.client.daemon_link.session",
        "ckptd.cuda.engine",
        "ckptd.storage.image",
        "ckptd.transport.wire",
    ):
        assert module in graph.modules


def test_no_module_outside_client_and_cuda_reaches_torch(graph: grimp.ImportGraph) -> None:
    for module in _modules_without_torch(graph):
        chain = graph.find_shortest_chain(module, "torch") if "torch" in graph.modules else None
        assert chain is None, f"{module} reaches torch: {' -> '.join(chain or ())}"


def test_importing_everything_but_the_client_does_not_load_torch(graph: grimp.ImportGraph) -> None:
    """The same promise kept at run time, lazily imported modules and third parties included."""
    modules = [m for m in _modules_without_torch(graph) if not m.endswith("__main__")]
    program = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "sys.exit(int('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"torch was imported, or an import failed:\n{done.stderr}"


BELOW = (
    "ckptd.private_files",
    "ckptd.unpacking",
)  # what all may use, and nothing of ours is used by


def test_engines_import_nothing_of_ours(graph: grimp.ImportGraph) -> None:
    for engine in ("ckptd.transport", "ckptd.storage", "ckptd.cuda"):
        for module in {engine} | graph.find_descendants(engine):
            for imported in graph.find_modules_directly_imported_by(module):
                own = imported == engine or imported.startswith(engine + ".") or imported in BELOW
                assert own or not imported.startswith("ckptd"), f"{module} imports {imported}"
    for module in BELOW:
        assert not [m for m in graph.find_modules_directly_imported_by(module) if m.startswith("ckptd")]


@pytest.mark.parametrize("package", PURE)
def test_the_core_imports_only_itself_and_pure_libraries(graph: grimp.ImportGraph, package: str) -> None:
    # `sys` is asked for the byte order and nothing else.
    pure_stdlib = {
        "__future__",
        "base64",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "math",
        "operator",
        "re",
        "statistics",
        "struct",
        "sys",
        "types",
        "typing",
        "zlib",
    }
    for module in {package} | graph.find_descendants(package):
        elastic = module.startswith("ckptd.core.elastic.")
        libraries = {"msgspec", "xxhash"} | ({"numpy", "scipy"} if elastic else set())
        # Sorting the experts of a large model without it takes longer than their choice may.
        libraries |= {"numpy"} if module == "ckptd.core.partial_experts" else set()
        for imported in graph.find_modules_directly_imported_by(module):
            pure = imported in libraries | pure_stdlib or (module, imported) in KNOWN_ENGINES
            own = any(f"{imported}.".startswith(f"{core}.") for core in PURE)
            assert pure or own, f"{module} imports {imported}"


def test_imports_are_acyclic(graph: grimp.ImportGraph) -> None:
    own = {module for module in graph.modules if module.startswith("ckptd")}
    imports = {
        module: {m for m in graph.find_modules_directly_imported_by(module) if m in own} for module in own
    }
    list(graphlib.TopologicalSorter(imports).static_order())  # a cycle raises, and names itself


def test_the_page_on_architecture_names_every_module(graph: grimp.ImportGraph) -> None:
    """A page that is not kept true sends a reader to files that are gone."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = {
        line.split("|")[1].strip().strip("`"): line.split("|")[2]
        for line in page.splitlines()
        if line.startswith("| `")
    }
    for module in sorted(graph.modules):
        file = Path(*module.split("."))
        if module.startswith("ckptd") and (ROOT / file.with_suffix(".py")).is_file():
            folder = str(file.parent)
            if folder.split("/")[1:2] and (ROOT / Path(*file.parts[:2])).is_symlink():
                folder = str(Path(*file.parts[1:-1]))
            assert f"`{file.name}`" in rows.get(folder, "") or file.name == "__main__", (
                f"docs/architecture.md does not name {file.name} beside `{folder}`"
            )
