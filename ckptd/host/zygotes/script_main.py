"""Runs a script in a forked process as `python script.py` or `python -m module` would.

Not by `runpy`: `run_path` and `run_module` execute in a module that is taken out of `sys.modules` when the
code ends, while threads, atexit functions and pickles of `__main__` still need it; the function of `runpy`
that the interpreter itself uses is private. So the code object is made by the public loaders and executed
in a new `__main__`, which stays.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import pkgutil
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

_USAGE_ERROR = 2


@dataclass(frozen=True, slots=True)
class Script:
    """What the trainer runs.

    Attributes:
        target: a file, a folder or zip file with a `__main__`, or the name of a module.
        is_module: ``target`` is the name of a module.
        arguments: its command line.
        flags: those of the interpreter, as in `sys.orig_argv`.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    flags: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """Its part of a command line."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    @property
    def command(self) -> list[str]:
        """The command that starts it without a host."""
        return [sys.executable, *self.flags, *self.words]


def _is_container(target: str) -> bool:
    """Whether the file is a folder or zip file (`.pyz`, `.pex`), which is run by its own `__main__`."""
    return pkgutil.get_importer(target) is not None


def set_up_path(script: Script) -> None:
    """Set ``sys.path[0]``, `sys.argv` and `sys.orig_argv` to what the script would find; from a process
    that was started by ``-m``.
    """
    sys.argv = ["-m" if script.is_module else script.target, *script.arguments]
    sys.orig_argv = [sys.orig_argv[0], *script.flags, *script.words]
    if script.is_module:
        return
    if _is_container(script.target):
        first = os.path.abspath(script.target)
    elif sys.flags.safe_path:
        return
    else:
        first = os.path.dirname(os.path.realpath(script.target))
    if sys.flags.safe_path:
        sys.path.insert(0, first)
    else:
        sys.path[0] = first


def script_file(script: Script) -> str:
    """The file that is run, as far as that is known without an import; "" if it is not."""
    if not script.is_module:
        return os.path.realpath(script.target)
    for base in sys.path:
        # An import of the package would run its code.
        place = os.path.join(base or os.curdir, *script.target.split("."))
        for file in (f"{place}.py", os.path.join(place, "__main__.py")):
            if os.path.isfile(file):
                return os.path.realpath(file)
    return ""


def own_folder(script: Script) -> str:
    """The folder whose modules belong to the script; "" if there is none.

    That of its file. For a top-level module there is none: ``sys.path[0]`` is the working folder then, which
    may have everything in it.
    """
    file = script_file(script)
    if not script.is_module and _is_container(file):
        return file
    if script.is_module and "." not in script.target and not file.endswith("/__main__.py"):
        return ""
    return os.path.dirname(file)


def run_script(script: Script) -> None:
    """Run it in a new `__main__`. An error is printed as the interpreter prints it, without our frames.

    Raises:
        SystemExit: with the exit code, after an error or if the script says so.
        KeyboardInterrupt: of the script; the interpreter then ends by SIGINT.
    """
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    try:
        code = _module_code(script.target, main) if script.is_module else _file_code(script.target, main)
        sys.modules["__main__"] = main
        exec(code, main.__dict__)  # noqa: S102 - as the interpreter does
    except SystemExit:
        raise
    except KeyboardInterrupt as interrupt:
        _hide_our_frames(interrupt)
        raise
    except BaseException as error:  # noqa: BLE001 - the interpreter reports every error
        _report(error)
        raise SystemExit(1) from None


def _trace_of_script(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _hide_our_frames(interrupt: KeyboardInterrupt) -> None:
    """When the interpreter reports it, which then ends by SIGINT: so it must come to its end with this."""
    trace, report = _trace_of_script(interrupt), sys.excepthook

    def of_script(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> object:
        return report(kind, error.with_traceback(trace), trace)

    sys.excepthook = of_script


def _report(error: BaseException) -> None:
    trace = error.__traceback__ = _trace_of_script(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)


def _refuse(text: str, code: int = _USAGE_ERROR) -> SystemExit:
    """As the interpreter does."""
    sys.stderr.write(f"{sys.executable}: {text}\n")
    return SystemExit(code)


def _file_code(path: str, main: ModuleType) -> CodeType:
    if _is_container(path):
        spec = PathFinder.find_spec("__main__", [path])
        if spec is None:
            raise _refuse(f"can't find '__main__' module in {os.path.abspath(path)!r}", 1)
        return _code_of(spec, main)
    loader: Any
    path = os.path.abspath(path)  # as the interpreter does; `sys.argv` keeps what was given
    try:
        if path.endswith(".pyc"):
            loader = SourcelessFileLoader("__main__", path)
            code = loader.get_code("__main__")
        else:
            loader = SourceFileLoader("__main__", path)
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        raise _refuse(f"can't open file {path!r}: {error}") from None
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None, __package__=None)
    assert isinstance(code, CodeType)
    return code


def _module_code(name: str, main: ModuleType) -> CodeType:
    spec = _spec_of(name)
    if spec.submodule_search_locations is not None:
        spec = _spec_of(f"{name}.__main__", f"; {name!r} is a package and cannot be directly executed")
    code = _code_of(spec, main)
    sys.argv[0] = spec.origin or sys.argv[0]
    return code


def _spec_of(name: str, why: str = "") -> ModuleSpec:
    """
    Raises:
        SystemExit: there is none.
        BaseException: an error of the package's own, which tells more than that nothing was found.
    """
    package = name.rpartition(".")[0]
    if package:
        try:
            __import__(package)
        except ImportError as error:
            if not f"{package}.".startswith(f"{error.name}."):
                raise  # it is there, and lacks something itself
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        hint = (
            f". Try using {name[:-3]!r} instead of {name!r} as the module name." if name[-3:] == ".py" else ""
        )
        text = f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})"
        raise _refuse(f"{text}{hint or why}", 1) from None
    if spec is None:
        raise _refuse(f"No module named {name}{why}", 1)
    return spec


def _code_of(spec: ModuleSpec, main: ModuleType) -> CodeType:
    loader: Any = spec.loader
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None:
        raise _refuse(f"no code object available for {spec.name}")
    main.__dict__.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    found: CodeType = code
    return found
