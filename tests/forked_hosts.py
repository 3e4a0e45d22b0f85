"""Hosts (`ckptd.host`) and torchrun without the imports: forked from a process that has torch (`tests.forked`).

A zygote imports torch, three seconds of a core for each rank of each start of a job, and so does an agent of torchrun.
Here a host is a fork that has torch, and forks its zygote in place of executing it; an agent is torchrun's own code in
a fork, which forks its ranks. Code, arguments, environment, sessions and descriptors are those of programs that are
executed. Such are started in ``tests/ckptd/host`` and `tests.test_slurm`, and by some tests of `tests.e2e.test_host`
and ``tests/cluster``.

The environment that the kernel shows of a fork is that of the server.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import itertools
import logging
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, Never

from ckptd.client import identity
from ckptd.core.state_machine import validate_always
from ckptd.host import process_control
from ckptd.host.process_control import HostProcess, die_with_parent, name_process
from ckptd.host.zygotes import zygote_link
from tests.forked import FORKED

__all__ = [
    "RANKS_VARIABLE",
    "ForkedProcess",
    "ForkedProgram",
    "become",
    "end_as_program",
    "fork_ranks",
    "fork_zygotes",
]

RANKS_VARIABLE = "CKPTD_TEST_RANKS"
"""A folder, to which a rank that an agent forks writes its process id, as ``rank<RANK>``."""

_HOST, _ZYGOTE, _TORCHRUN = "ckptd.host", "ckptd.host.zygotes.zygote", "torch.distributed.run"
_PYTHON = "python"
_interpreter = sys.executable


class ForkedProcess:
    """A process forked by the server of `tests.forked`; as much of `subprocess.Popen` as tests of hosts take.

    Args:
        act: runs in it, with these arguments and at last the path of ``log``, to which its output shall be appended.
    """

    def __init__(self, act: Callable[..., None], *arguments: object, log: Path) -> None:
        log.touch()  # there, whenever the fork comes to write
        self._process = FORKED.Process(target=act, args=(*arguments, str(log)), daemon=False)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it runs for longer than ``timeout`` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedProgram(ForkedProcess):
    """``python words`` in a session of its own. A host forks its zygotes, and torchrun its ranks.

    Args:
        words: ``-m`` and a module, or the path of a script, and arguments.
    """

    def __init__(self, words: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: Path) -> None:
        super().__init__(_host, list(words), str(cwd), dict(env), log=log)


def _host(words: list[str], cwd: str, env: dict[str, str], log: str) -> None:
    os.setsid()
    os.chdir(cwd)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(sink, descriptor)
    if words[:2] == ["-m", _TORCHRUN]:
        fork_ranks()
    elif words[:2] == ["-m", _HOST]:
        fork_zygotes()
    end_as_program(lambda: become(words, env))


def fork_zygotes() -> None:
    """In a host: its zygotes will be forked."""
    zygote_link.spawn = _spawn  # type: ignore[attr-defined]


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], *, own_session: bool, keep: Sequence[int] = ()
) -> HostProcess:
    """In place of `ckptd.host.process_control.spawn`, for a zygote."""
    assert _ZYGOTE in command
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        if own_session:
            os.setsid()
        die_with_parent(parent)
        for limits in process_control._descriptors_given:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        end_as_program(lambda: become(command[1:], environment), keep)
    return HostProcess(pid, own_session)


def fork_ranks() -> None:
    """In an agent of torchrun: its ranks will be forked, if they are hosts, scripts or modules of tests."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
        SubprocessHandler,
    )
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # For what it logs, each operation looks through all modules. With as many as a fork has, four agents never
    # agreed: the state that one had read was another one by then.
    dynamic_rendezvous.get_method_name = lambda depth=2: "forked"
    SubprocessHandler._popen = _popen  # type: ignore[method-assign, assignment]


def _popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """In place of the method of torch's `SubprocessHandler`."""
    module = args[args.index("-m") + 1] if "-m" in args else ""
    is_script = not module and args[0] == _interpreter
    ours = is_script or module == _HOST or module.startswith("tests.")
    if ours and handler._stdout is None and handler._stderr is None:
        return _Rank(args, env=env)
    return subprocess.Popen(
        args, env=env, stdout=handler._stdout, stderr=handler._stderr, start_new_session=True
    )


class _Rank(subprocess.Popen[bytes]):
    """A child of the agent that is forked in place of being executed, as the leader of a session."""

    def _execute_child(self, args: Sequence[str], *others: Any) -> None:
        env: Mapping[str, str] = others[5]  # after executable, preexec_fn, close_fds, pass_fds and cwd
        _flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            os.setsid()
            if folder := env.get(RANKS_VARIABLE):
                new = Path(folder, f"rank{env['RANK']}.new")
                new.write_text(f"{os.getpid()}")
                new.rename(new.with_suffix(""))
            if _HOST in args:
                fork_zygotes()
            end_as_program(lambda: become(args[1:], env))


def become(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Run ``python words`` as a new interpreter would, to its end.

    Args:
        words: flags, ``-m`` and a module or the path of a script, and arguments.
    """
    os.environ.clear()
    os.environ.update(env)
    validate_always("CKPTD_VALIDATE" in os.environ)  # read when a module is imported
    identity._begun_in = Path.cwd()  # found out when it is imported
    begin = next(i for i, word in enumerate(words) if word == "-m" or not word.startswith("-"))
    if "-u" in words[:begin]:
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
    sys.orig_argv = [_interpreter, *words]
    is_module = words[begin] == "-m"
    first = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[begin]))
    paths = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*paths, *(path for path in sys.path if path and path not in paths)]
    if not is_module:
        sys.argv = list(words[begin:])
        runpy.run_path(words[begin], run_name="__main__")
        return
    module = words[begin + 1]
    sys.argv = list(words[begin : begin + 1]) + list(words[begin + 2 :])
    sys.modules.pop(module, None)  # as in an interpreter, it is `__main__` and not yet imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_as_program(run: Callable[[], None], keep: Sequence[int] = ()) -> Never:
    """Make a fork what an executed process is, and end it as an interpreter ends. Never returns: above are frames of
    its parent, whose objects must not be freed here.

    Args:
        keep: descriptors that it inherits, beside standard input, output and error.
    """
    code = 1
    try:
        gc.freeze()
        name_process(_PYTHON)
        _reset_signals()
        _reset_logging()
        _close_all_but({0, 1, 2, *keep})
        _reset_multiprocessing()
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except KeyboardInterrupt:
        traceback.print_exc()
        _flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - nothing of it may go on in the code of its parent
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter does
        atexit._run_exitfuncs()
    finally:
        _flush()
        os._exit(code)


def _close_all_but(kept: Collection[int]) -> None:
    """Nor pipes of which both ends are here: libuv, which torch's stores have, makes one anew after each fork, and then
    closes the numbers that the last one had.
    """
    pipes: dict[str, list[int]] = {}
    for number in set(map(int, os.listdir("/proc/self/fd"))) - {*kept}:
        with contextlib.suppress(OSError):  # that of the listing
            pipes.setdefault(os.readlink(f"/proc/self/fd/{number}"), []).append(number)
    for name, numbers in pipes.items():
        if not (name.startswith("pipe:") and len(numbers) > 1):
            for number in numbers:
                os.close(number)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _reset_signals() -> None:
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)


def _reset_multiprocessing() -> None:
    """What a child of the server of forks has, and a program has not: a parent, and "forkserver" as the method by
    which it starts processes unless it names one. Workers of a loader then import the script: one without a guard
    starts further workers there, fails, and begins again and again under a host.
    """
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # closed: whoever shares memory starts its own
    forkserver._forkserver.__init__()  # type: ignore[misc]
    multiprocessing.set_start_method(None, force=True)
    process: Any = multiprocessing.process
    process._parent_process = None
    process._process_counter = itertools.count(1)
    process._children = set()
    own: Any = multiprocessing.current_process()
    own._identity, own._name, own._parent_pid, own._popen = (), "MainProcess", None, None


def _reset_logging() -> None:
    """What the parent has set up for itself."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)
    logging.raiseExceptions = True
