"""Which modules a zygote imports ahead of a script, and whether what it has imported may be used.

A trainer's `ImportRecorder` writes down what the script imports. A zygote imports the same modules in the
same order, except the script and the modules of its folder, which often do things when they are imported
(they read the time, open files, parse options).

A script may set environment variables before it imports more, in a function for example. So the trainer notes
these variables in their place among the modules (``=NAME``), and if one of the modules after it reads such a
variable when the zygote imports it, it has another value than the script wants (`import_recorded`).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import random
import re
import sys
import sysconfig
from collections.abc import Collection, ItemsView, Iterator, Sequence, ValuesView
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeGuard

from ckptd.host.zygotes.script_main import Script, own_folder
from ckptd.private_files import replace_private_file

# What every trainer needs, where no script has told more yet.
FIRST_MODULES = ("torch", "torch.distributed", "numpy", "numpy.random")
# What trainers with an optimizer of torch need: its constructor imports this, with sympy.
TRAINING_MODULES = (*FIRST_MODULES, "torch._dynamo")
_FIRST_ROOTS = {name.partition(".")[0] for name in FIRST_MODULES}
_NAMES_MAX = 20_000
_RECORD_BYTES_MAX = 4 << 20
_PENDING_MAX = 256
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_SET = re.compile(r"=\w+")  # a variable, among the names of modules
_NEVER = ("__main__", "ckptd.host")


class ImportRecorder:
    """The first finder of a trainer: finds nothing, and writes the names of modules that were imported.

    A name is written when a later search shows that it was imported, and not only looked for: libraries
    look for many optional ones. Once all is imported, it is never called.

    Args:
        fd: a file, to which lines are appended.
    Attributes:
        known: variables that have changed.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._pid = fd, os.getpid()
        self._file = self._file_now()
        self._pending: list[str] = []
        self.known: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Part of the import system."""
        if os.getpid() == self._pid:  # and no worker that was forked
            self.flush()
            self._pending.append(name)
        return None

    def flush(self) -> None:
        """Write the names of those that are imported by now."""
        imported = [name for name in self._pending if name in sys.modules]
        self._pending = [name for name in self._pending if name not in sys.modules][-_PENDING_MAX:]
        if imported:
            self._write(imported)

    def changed(self, variable: str) -> None:
        """Write that the script sets it before whatever it imports from here on."""
        if os.getpid() == self._pid and _SET.fullmatch(f"={variable}"):
            self.known.add(variable)
            self.flush()
            self._write([f"={variable}"])

    def _write(self, names: Sequence[str]) -> None:
        try:
            # A script that closes what is not its own may have a file of its own under that number.
            ours = self._file_now() == self._file
            if ours:
                os.write(self._fd, "".join(f"{name}\n" for name in names).encode())
        except OSError:
            ours = False
        if not ours:
            self._pid = -1  # the record ends here

    def _file_now(self) -> tuple[int, int]:
        info = os.fstat(self._fd)
        return info.st_dev, info.st_ino


def names_in(data: bytes) -> list[str]:
    """The names in what a recorder wrote; a line that a SIGKILL tore is left out."""
    lines = data.decode("utf-8", errors="replace").split("\n")[:-1]
    return [name for name in dict.fromkeys(lines) if _usable(name)][:_NAMES_MAX]


def _usable(name: object) -> bool:
    if not isinstance(name, str) or not (_NAME.fullmatch(name) or _SET.fullmatch(name)):
        return False
    return not any(name == each or name.startswith(f"{each}.") for each in _NEVER)


def read_record(path: Path) -> tuple[list[str], str]:
    """What a script's earlier trainers imported, and why it must not be imported ahead ("" if it may be).
    Nothing, if there is no record that can be used.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            if os.fstat(fd).st_uid != os.getuid():
                return [], ""
            found = json.loads(file.read(_RECORD_BYTES_MAX))
        names, unfit = [name for name in found["modules"] if _usable(name)], found["unfit"]
        has_modules = any(not name.startswith("=") for name in names)
        return names[:_NAMES_MAX] if has_modules else [], str(unfit)
    except (OSError, ValueError, KeyError, TypeError):
        return [], ""


def write_record(path: Path, names: Sequence[str], unfit: str) -> None:
    """Keep them for the next start of the same script.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps({"modules": list(names), "unfit": unfit})
    replace_private_file(path, text.encode(), synced=False)


def note_changes_of_environment(recorder: ImportRecorder, script: Script) -> None:
    """Tell the recorder of each variable that the script changes in `os.environ`, itself or by a function
    that it calls; not of those that a library changes when it is imported: it does so in a zygote, too.
    """
    own = own_folder(script)
    kind: Any = type(os.environ)
    usual_set, usual_delete = kind.__setitem__, kind.__delitem__

    def set_item(environ: Any, name: Any, value: Any) -> None:
        before = environ.get(name) if isinstance(name, str) else None
        usual_set(environ, name, value)
        if environ is os.environ and value != before and name not in recorder.known and _by_script(own):
            recorder.changed(name)

    def delete_item(environ: Any, name: Any) -> None:
        usual_delete(environ, name)
        if environ is os.environ and name not in recorder.known and _by_script(own):
            recorder.changed(name)

    kind.__setitem__, kind.__delitem__ = set_item, delete_item


def _by_script(own: str) -> bool:
    """Whether code of the script is nearer in the stack than an import."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return False
        if frame.f_globals.get("__name__") == "__main__" or (own and _below(os.path.realpath(file), own)):
            return True
        frame = frame.f_back
    return False


def import_ahead(names: Sequence[str], script: Script) -> list[str]:
    """Import those that are not the script's own; returns those that could not be imported."""
    own = own_folder(script)
    failed = []
    for name in names:
        root = name.partition(".")[0]
        if name in sys.modules or belongs(root, own) or name == script.target:
            continue
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):  # noqa: BLE001 - of any code; the trainer meets it, too
            failed.append(name)
    return failed


def import_recorded(names: Sequence[str], script: Script, read: set[str]) -> list[str]:
    """Import what a trainer has written down; returns variables that a module reads although the script sets
    them before it imports that module.

    Args:
        read: variables that are read by their names are added.
    """
    changed, wrong = set[str](), set[str]()
    for name in names:
        if name.startswith("="):
            changed.add(name[1:])
        elif name not in sys.modules:
            own: set[str] = set()
            with noting_reads(own):
                import_ahead([name], script)
            read |= own
            wrong |= own & changed
    return sorted(wrong)


def belongs(root: str, own: str) -> bool:
    """Whether a top-level module is the script's own. ckptd is not, wherever it is installed."""
    if not own or root == "ckptd":
        return False
    module = sys.modules.get(root)
    try:
        spec = module.__spec__ if module is not None else importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return True
    if spec is None:
        return False
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location else [])]
    return any(_below(os.path.realpath(place or ""), own) for place in places)


def _below(path: str, folder: str) -> bool:
    """Whether a file is below a folder or contains it, and was not installed there by a package manager."""
    if any(path.startswith(f"{library}/") for library in _libraries()) or "/site-packages/" in path:
        return False
    return f"{path}/".startswith(f"{folder}/") or f"{folder}/".startswith(f"{path}/")


@cache
def _libraries() -> tuple[str, ...]:
    paths = map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
    return tuple(os.path.realpath(each) for each in paths if each)


class SourceFiles:
    """The files of imported modules as they were when they were imported."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def note(self) -> None:
        """Note the files of modules that are new in `sys.modules`."""
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if isinstance(path, str) and path not in self._seen and (mark := _file_mark(path)):
                self._seen[path] = mark

    def changed(self) -> str:
        """A file that is another one now, or ""."""
        return next((path for path, mark in self._seen.items() if _file_mark(path) != mark), "")


def _file_mark(path: str) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size


def environment_set_by(path: str) -> list[str]:
    """Variables that a script sets before its last import at module level, or in a function or a module of
    its folder before torch or numpy is imported, which are imported ahead in any case: these may read them.

    Found in its text: ``os.environ[...] = ...``, ``os.environ.setdefault(...)``, ``.update``, ``os.putenv``.
    """
    if (tree := _tree_of(path)) is None:
        return []
    found: list[str] = []
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    for scope in (tree, *functions):
        nodes = list(_nodes_of(scope))
        imports = [node.lineno for node in nodes if _is_import_of(node, _FIRST_ROOTS)]
        if scope is tree:
            imports += [node.lineno for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        last = max(imports, default=0)
        found += filter(
            None, (_environment_set(node) for node in nodes if getattr(node, "lineno", last) < last)
        )
    return list(dict.fromkeys([*found, *_set_before_first(path)]))


def _tree_of(path: str) -> ast.Module | None:
    try:
        return ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # for the interpreter to report


def _set_before_first(path: str) -> list[str]:
    """Variables that modules of the script set at their top level before torch or numpy is imported."""
    found, waiting, imported = list[str](), list[str](), set[str]()
    for variable, root in _at_import(path, os.path.dirname(path)):
        if variable:
            waiting.append(variable)
        elif root not in imported:
            imported.add(root)
            found, waiting = [*found, *waiting], []
    return found


def _at_import(path: str, folder: str) -> Iterator[tuple[str, str]]:
    """What happens when a module is imported: a variable is set, or torch or numpy is imported.

    Args:
        folder: of modules that are looked into; "" in one of these.
    """
    tree = _tree_of(path)
    for node in _nodes_of(tree) if tree is not None else ():
        if variable := _environment_set(node) or _loads_dotenv(node):
            yield variable, ""
        for name in _imported_by(node):
            if (root := name.partition(".")[0]) in _FIRST_ROOTS:
                yield "", root
            elif folder:
                place = os.path.join(folder, *name.split("."))
                for file in (f"{place}.py", os.path.join(place, "__init__.py")):
                    if os.path.isfile(file):
                        yield from _at_import(file, "")


def _imported_by(node: ast.AST) -> list[str]:
    """The modules that a statement may import, packages first; relative ones as if on the path."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level <= 1:
        base = [node.module] if node.module else []
        names = [*base, *(".".join([*base, alias.name]) for alias in node.names)]
    else:
        return []
    whole = [name.split(".") for name in names]
    return list(dict.fromkeys(".".join(each[:end]) for each in whole for end in range(1, len(each) + 1)))


def _loads_dotenv(node: ast.AST) -> str:
    called = node.func if isinstance(node, ast.Call) else None
    name = getattr(called, "attr", getattr(called, "id", ""))
    return "a variable" if name == "load_dotenv" else ""


def _nodes_of(scope: ast.AST) -> Iterator[ast.AST]:
    """Those that run with it, and not when a function in it is called."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
            yield from _nodes_of(node)


def _is_import_of(node: ast.AST, roots: Collection[str]) -> TypeGuard[ast.stmt]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = [node.module or ""]
    return any(name.partition(".")[0] in roots for name in names)


def _environment_set(node: ast.AST) -> str:
    """The variable that a statement sets; "a variable" if its name is not a constant."""
    key: ast.AST | None = None
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and _is_environ(node.value)
    ):
        key = node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        changes = node.func.attr in ("setdefault", "update", "pop", "clear") and _is_environ(node.func.value)
        if not changes and node.func.attr not in ("putenv", "unsetenv"):
            return ""
        key = node.args[0] if node.args else node
    if key is None:
        return ""
    return str(key.value) if isinstance(key, ast.Constant) else "a variable"


def _is_environ(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute | ast.Name)
        and getattr(node, "attr", getattr(node, "id", "")) == "environ"
    )


@contextmanager
def noting_reads(names: set[str]) -> Iterator[None]:
    """Add the environment variables that are read by their names meanwhile; not those that are read with all
    others, as when the environment is copied or searched. C code is not seen.
    """
    kind: Any = type(os.environ)
    usual = kind.__getitem__
    reads_all = (kind.copy, ItemsView.__iter__, ValuesView.__iter__, ValuesView.__contains__)
    codes = [each.__code__ for each in reads_all]

    def noted(environ: object, name: str) -> object:
        if sys._getframe(1).f_code not in codes:
            names.add(name)
        return usual(environ, name)

    kind.__getitem__ = noted
    try:
        yield
    finally:
        kind.__getitem__ = usual


def generator_marks() -> dict[str, int]:
    """A hash of the state of each global generator that a script may seed or draw from. Those of libraries
    that are not imported are left out.
    """
    marks = {"random": hash(random.getstate())}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and "numpy.random" in sys.modules:
        state = numpy.random.get_state(legacy=False)["state"]
        marks["numpy"] = hash((state["key"].tobytes(), state["pos"]))
    if torch is not None and hasattr(torch, "get_rng_state"):
        marks["torch"] = hash(torch.get_rng_state().numpy().tobytes())
    return marks
