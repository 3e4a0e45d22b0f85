"""torchrun in a host without the imports: its agent, its store and its ranks are forked from a process with torch.

An agent and each rank of each life would spend two to four seconds of a core on importing torch. Here the agent is
torchrun's own code in a fork (`tests.forked`), which forks its ranks as it would start them: as its children, leaders
of sessions, with its output. What torchrun is told to start from elsewhere than `tests`, such as ``ckptd.host``, is
started. Only in a network namespace, by which the processes of a host are found: the environment that the kernel
shows of a fork is that of the server.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptd.core.state_machine import validate_always
from tests.cluster.leftovers import NETNS_FOLDER, REPOSITORY
from tests.forked import FORKED

__all__ = ["ForkedModule"]

_CLONE_NEWNET = 0x40000000
_TORCHRUN = "torch.distributed.run"


class ForkedModule:
    """``python -m module arguments`` in a namespace, in a session of its own; as much of `subprocess.Popen` as a host
    takes. Output is appended to ``log``.
    """

    def __init__(self, namespace: str, words: Sequence[str], env: Mapping[str, str], *, log: Path) -> None:
        log.touch()  # there, whenever the fork comes to write
        arguments = (namespace, list(words), dict(env), str(log))
        self._process = FORKED.Process(target=_act, args=arguments, daemon=False)
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


def _act(namespace: str, words: list[str], env: dict[str, str], log: str) -> None:
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    with (NETNS_FOLDER / namespace).open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns of {namespace}: {os.strerror(number)}")
    os.chdir(REPOSITORY)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(sink, descriptor)
    os.close(sink)
    if words[0] == _TORCHRUN:
        from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
            SubprocessHandler,
        )
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous

        # For what it logs, each operation looks through all modules. With as many as a fork has, four agents never
        # agreed: the state that one had read was another one by then.
        dynamic_rendezvous.get_method_name = lambda depth=2: "forked"
        SubprocessHandler._popen = _popen  # type: ignore[method-assign, assignment]
    _become(words, env)


def _become(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Make this fork what a new interpreter would be, to the end of the module."""
    os.environ.clear()
    os.environ.update(env)
    validate_always("CKPTD_VALIDATE" in os.environ)  # read when a module is imported
    sys.argv = ["-m", *words[1:]]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


class _Rank(subprocess.Popen[bytes]):
    """A child of the agent that is forked in place of being executed."""

    def _execute_child(self, args: Sequence[str], *others: Any) -> None:
        env: Mapping[str, str] = others[5]  # after executable, preexec_fn, close_fds, pass_fds and cwd
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            _be_rank(list(args[args.index("-m") + 1 :]), env)


def _popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """In place of the method of torch's `SubprocessHandler`."""
    ours = "-m" in args and args[args.index("-m") + 1].startswith("tests.")
    if ours and handler._stdout is None and handler._stderr is None:
        return _Rank(args, env=env)
    return subprocess.Popen(
        args, env=env, stdout=handler._stdout, stderr=handler._stderr, start_new_session=True
    )


def _be_rank(words: list[str], env: Mapping[str, str]) -> None:
    """Never returns: above are frames of the agent, whose objects must not be freed here."""
    code = 1
    try:
        gc.freeze()
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        _become(words, env)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter does
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - nothing of a rank may go on in the agent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
