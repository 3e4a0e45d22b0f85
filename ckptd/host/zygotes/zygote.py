"""A process that has imported what a script needs, and from which the host has trainers forked.

``python -m ckptd.host.zygotes.zygote <settings> [-m] script arguments``: the host starts it and talks to it
over a socket; each request is a JSON object in one packet, with at most one descriptor.

    preload     {"do": "import"} and a file of names: import these, too
    fork        {"do": "fork", "environment": {...}} and a file for the imports → {"forked": pid}
    store       {"do": "store"} and a socket → {"store": pid}, see `serve_stores`
    errand      {"do": "errand"} and a socket → {"errand": pid}, see `ckptd.host.job_store`
    signals     {"do": "signals"} → {"signals": [...]}: those that have reached the zygote since
    ended       {"do": "ended"}: the trainer's process group is no more
    wait        {"do": "wait", "folder", "name", "within_s"} and a pidfd of torchrun, or none and a time: the
                host ends, and another one may take this zygote over (`ckptd.host.zygotes.zygote_handover`)

After each import the zygote says ``{"ready": true}``, or ``{"unfit": reason}`` and exits: a fork has only the
thread that forked, and shares sockets, devices and the state of generators with its parent. (One that was
taken over stays, as the parent of its trainer, and forks no further one.)

A trainer is forked twice, so that its parent is the host, which waits for it. It begins when the zygote lets
it, and by then the zygote knows that the intermediate process is gone: only then may the trainer ask for a
signal when its parent dies. When the host dies, the zygote ends the trainer's process group.

After a takeover the zygote is no child of its host, and so the trainer is the zygote's: it dies with that,
which says how it ended (``{"ended": pid, "status": …}``) and waits for it once the host has heard that.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import math
import os
import signal
import socket
import stat
import sys
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ckptd.host.job_store import run_errand
from ckptd.host.process_control import (
    die_with_parent,
    end_group,
    name_process,
    outlive_parent,
    process_traits,
)
from ckptd.host.signal_witness import WITNESSED, take_pending
from ckptd.host.zygotes.preload import (
    FIRST_MODULES,
    TRAINING_MODULES,
    ImportRecorder,
    SourceFiles,
    generator_marks,
    import_ahead,
    import_recorded,
    names_in,
    note_changes_of_environment,
    noting_reads,
    read_record,
)
from ckptd.host.zygotes.script_imports import Imported, import_named, imports_of_script
from ckptd.host.zygotes.script_main import Script, run_script, set_up_path
from ckptd.host.zygotes.zygote_handover import (
    differing_variable,
    moved_environment,
    ready_of,
    wait_for_successor,
)
from ckptd.progress_page import PAGE_VARIABLE
from ckptd.restart_line import LINE_VARIABLE

_PACKET_MAX = 64 << 10
_NAMES_BYTES_MAX = 4 << 20
# A trainer's place in the job, which changes when nodes are lost.
_PLACE = {"RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
_STORES_KEPT = 3  # of the epoch before, of this one, of the next one
_HARMLESS_DEVICES = {"/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"}


def unfit_because(given: frozenset[int], own: Collection[int] = ()) -> str:
    """Why this process must not be forked, or "".

    Args:
        given: descriptors that it had before it imported anything, or got from us since.
        own: children that no import has started.
    """
    if threads := _threads_after_a_fork():
        return f"what it imports starts threads ({threads})"
    if children := len(_children() - {*own}):
        return f"what it imports starts processes ({children})"
    for fd in _open_descriptors() - given:
        if what := _not_to_be_shared(fd):
            return f"what it imports opens {what}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "what it imports initializes CUDA"
    return ""


def _threads_after_a_fork() -> int:
    """The number of threads that a fork would lose. OpenBLAS has some, and ends them before each fork."""
    if len(os.listdir("/proc/self/task")) == 1:
        return 0
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) - 1


def _children() -> set[int]:
    """Those of this process; none if the kernel does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(map(int, file.read().split()))
    except OSError:
        return set()


def _open_descriptors() -> frozenset[int]:
    found = frozenset(map(int, os.listdir("/proc/self/fd")))
    return frozenset(
        fd for fd in found if os.path.exists(f"/proc/self/fd/{fd}")
    )  # without that of the listing


def _not_to_be_shared(fd: int) -> str:
    """What an open file is, if a parent and a child must not both have it; or ""."""
    try:
        mode, name = os.fstat(fd).st_mode, os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""  # closed meanwhile
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or name in _HARMLESS_DEVICES:
        return ""
    return f"a socket ({name})" if stat.S_ISSOCK(mode) else name


class Zygote:
    """The zygote's side of the conversation with its host.

    Args:
        control: the socket to the host.
        host: the process id of the host.
        keep: descriptors that trainers inherit.
        own_session: trainers lead sessions of their own, and the zygote leads one, so that a signal to the
            host's process group does not reach them.
    """

    def __init__(
        self,
        script: Script,
        control: socket.socket,
        *,
        host: int,
        own_session: bool,
        keep: Sequence[int] = (),
    ) -> None:
        self._script, self._control, self._host, self._own_session = script, control, host, own_session
        self._kept = list(keep)
        self._taken_over = False
        self._unfit = ""  # since it was taken over
        self._children: dict[int, int] = {}  # after a takeover: their pidfds
        self._environment = dict(os.environ)  # before the imports
        self._given = _open_descriptors()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, WITNESSED)
        self._sources = SourceFiles()
        self._read: set[str] = set()  # variables
        self._group: int | None = None
        self._marks: dict[str, int] = {}
        self._name = _own_name()
        name_process("ckptd-zygote")

    def preload(self, names: Sequence[str], named: Sequence[Imported] = ()) -> None:
        """Import these, and tell the host whether the process may be forked.

        Args:
            named: what the script's text imports, too.
        """
        begun = time.monotonic()
        if not self._taken_over:
            die_with_parent(self._host)  # an import may hang, and then nobody reads the socket
        with noting_reads(self._read):
            if not self._marks:
                import_ahead([name for name in FIRST_MODULES if name in names], self._script)
                self._marks = generator_marks()
        wrong = import_recorded(names, self._script, self._read)
        with noting_reads(self._read):
            import_named(named)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # a fork would print it again
        self._sources.note()
        # A trainer that has ended is a child until the host has heard of it.
        own = {*self._children, *([] if self._group is None else [self._group])}
        reason = unfit_because(self._given | {*self._children.values()}, own)
        if wrong:
            reason = reason or f"what it imports reads {' and '.join(wrong)}, which the script sets before"
        now = generator_marks()
        if moved := [name for name, mark in self._marks.items() if now.get(name) != mark]:
            reason = (
                reason or f"what it imports draws from the generator of {' and '.join(moved)}, or seeds it"
            )
        if reason and self._taken_over:
            self._unfit = reason  # a trainer would die with this process; no other is forked from it
            self._tell({"unfit": reason})
            return
        if reason:
            self._tell({"unfit": reason})
            os._exit(0)
        gc.collect()
        gc.freeze()  # the collector of a fork then writes to none of the shared pages
        outlive_parent()
        self._tell({"ready": True, "modules": len(sys.modules), "took_s": time.monotonic() - begun})

    def serve(self) -> None:
        """Do what the host asks for; returns in a trainer only."""
        while True:
            if self._taken_over:
                self._wait_for_request()
            packet, fds, _, _ = socket.recv_fds(self._control, _PACKET_MAX, 1)
            if not packet:
                self._host_is_gone()
            request: dict[str, Any] = json.loads(packet)
            try:
                if self._answer(request, fds):
                    return
            finally:
                for fd in fds:
                    os.close(fd)

    def _answer(self, request: dict[str, Any], fds: list[int]) -> bool:
        """Returns whether this process is a trainer."""
        match request["do"]:
            case "import":
                self.preload(names_in(os.pread(fds[0], _NAMES_BYTES_MAX, 0)))
            case "fork":
                return self._fork_trainer(request["environment"], fds[0])
            case "store":
                self._fork_helper("store", fds[0])
            case "errand":
                self._fork_helper("errand", fds[0])
            case "signals":
                self._tell({"signals": take_pending()})
            case "ended":
                if self._taken_over and self._group is not None:
                    os.waitpid(self._group, 0)
                self._group = None
            case "wait":
                agent, within_s = (fds[0], math.inf) if fds else (None, request["within_s"])
                self._wait_for_successor(Path(request["folder"]), request["name"], agent, within_s)
        return False

    def _wait_for_successor(self, folder: Path, name: str, agent: int | None, within_s: float) -> None:
        """Be the zygote of another host; or end with torchrun, or when the time is over."""
        self._control.close()
        for fd in self._kept:
            os.close(fd)
        found = wait_for_successor(folder, name, agent, within_s=within_s)
        if found is None:
            os._exit(0)
        self._control, self._host, self._kept = found.control, found.pid, list(found.kept)
        own = process_traits()
        differs = differing_variable(self._environment, found.environment, self._read)
        differs = differs or next((k for k in own if own[k] != found.traits.get(k)), "")
        if differs:
            self._tell({"refused": differs})
            os._exit(0)
        moved = moved_environment(self._environment, os.environ, found.environment)
        os.environ.clear()
        os.environ.update(moved)
        self._environment = found.environment
        self._taken_over = True
        self._given = _open_descriptors()
        self._group = None
        take_pending()  # those of the last host
        self._tell({"taken_over": os.getpid(), "modules": len(sys.modules)})

    def _wait_for_request(self) -> None:
        """Until the host asks for something; tell it how the trainer has ended, if it has."""
        while True:
            ready = ready_of(self._control.fileno(), *self._children.values())
            for pid, fd in list(self._children.items()):
                if fd in ready:
                    self._on_end(pid)
            if self._control.fileno() in ready:
                return

    def _on_end(self, pid: int) -> None:
        os.close(self._children.pop(pid))
        if pid != self._group:  # a server of stores, an errand
            os.waitpid(pid, 0)
            return
        # It is waited for when the host knows: until then its number is no other process's.
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        exited = result.si_code == os.CLD_EXITED
        self._tell({"ended": pid, "status": result.si_status << 8 if exited else result.si_status})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:
            self._host_is_gone()

    def _host_is_gone(self) -> None:
        if self._group is not None:
            end_group(self._group)
        os._exit(0)

    def _fork_trainer(self, environment: dict[str, str], imports: int) -> bool:
        changed = self._sources.changed() or self._place_changed(environment)
        if self._unfit or changed:
            self._tell({"stale": self._unfit or f"{changed} has changed"})
            return False
        try:
            pid = self._fork("forked", dies_with_parent=True)
        except OSError as error:
            self._tell({"failed": str(error)})
            return False
        if pid:
            self._group = pid if self._own_session else None
            return False
        name_process(self._name)
        os.environ.update(environment)
        for fd in self._kept:  # after a takeover they have other numbers than in the host
            line = stat.S_ISSOCK(os.fstat(fd).st_mode)
            os.environ[LINE_VARIABLE if line else PAGE_VARIABLE] = str(fd)
        recorder = ImportRecorder(os.dup(imports))
        atexit.register(recorder.flush)
        sys.meta_path.insert(0, recorder)
        note_changes_of_environment(recorder, self._script)
        _seed_anew()
        return True

    def _place_changed(self, environment: dict[str, str]) -> str:
        """A variable that differs, and that imports may have remembered; or "". A port or a count of restarts
        that was remembered harms less than an import for each epoch.
        """
        place = {name: text for name, text in environment.items() if name in _PLACE}
        return differing_variable(os.environ, {**os.environ, **place}, self._read)

    def _fork_helper(self, kind: str, fd: int) -> None:
        """A child that does one thing with torch for the host."""
        try:
            pid = self._fork(kind, dies_with_parent=not self._taken_over)
        except OSError as error:
            self._tell({"failed": str(error)})
            return
        if pid == 0:
            name_process(f"ckptd-{kind}")
            try:
                for number in WITNESSED:
                    signal.signal(number, signal.SIG_IGN)  # trainers that park still need the store
                (serve_stores if kind == "store" else run_errand)(socket.socket(fileno=os.dup(fd)))
            finally:
                os._exit(0)

    def _fork(self, answer: str, *, dies_with_parent: bool) -> int:
        """A child of the host, or after a takeover of this process; or 0 in the child, once it may begin.

        Args:
            dies_with_parent: if not, it has a socket to the host, and ends with that.
        Raises:
            OSError: there is no memory, or there are too many processes.
        """
        if not self._taken_over:
            return self._fork_for_host(answer)
        return self._fork_own(answer, os.getpid() if dies_with_parent else None)

    def _fork_own(self, answer: str, parent: int | None) -> int:
        go_read, go_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            for fd in (go_write, *self._children.values()):
                os.close(fd)
            self._begin(go_read, parent)
            return 0
        os.close(go_read)
        self._children[pid] = os.pidfd_open(pid)
        self._tell({answer: pid})
        with contextlib.suppress(BrokenPipeError):
            os.write(go_write, b"1")
        os.close(go_write)
        return pid

    def _fork_for_host(self, answer: str) -> int:
        go_read, go_write = os.pipe()
        pid_read, pid_write = os.pipe()
        middle = os.fork()
        if middle == 0:
            self._fork_again(go_write, pid_read, pid_write)
            self._begin(go_read, self._host)
            return 0
        os.close(pid_write)
        os.close(go_read)
        try:
            with open(pid_read, "rb") as report:
                words = report.read().split()
            os.waitpid(middle, 0)
            number, error = map(int, words or (0, 0))
            if number == 0:
                raise OSError(error, os.strerror(error))
            self._tell({answer: number})
            with contextlib.suppress(BrokenPipeError):  # it was killed already
                os.write(go_write, b"1")
        finally:
            os.close(go_write)
        return number

    def _fork_again(self, go_write: int, pid_read: int, pid_write: int) -> None:
        """In the intermediate process; returns in its child."""
        try:
            child, error = os.fork(), 0
        except OSError as refused:
            child, error = 0, refused.errno or 0
            os.write(pid_write, f"0 {error}".encode())
            os._exit(0)
        if child:
            os.write(pid_write, f"{child} 0".encode())
            os._exit(0)
        for fd in (go_write, pid_read, pid_write):
            os.close(fd)

    def _begin(self, go_read: int, parent: int | None) -> None:
        """In the new child: wait until it has its last parent, and be as a program at its start.

        Args:
            parent: with which it dies; None: with none.
        """
        if os.read(go_read, 1) != b"1":
            os.kill(os.getpid(), signal.SIGKILL)  # the zygote has died
        os.close(go_read)
        if parent is not None:
            die_with_parent(parent)
        self._control.close()
        if self._own_session:
            os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def serve_stores(requests: socket.socket) -> None:
    """A `TCPStore` on a port of its own for each byte that is read; writes the port, as a line. Returns when
    the other side has gone.

    Trainers are clients, as they are of torchrun's. With a store for each epoch nobody reads an address of an
    earlier life, and rank 0 need not bind the port of its predecessor again.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    kept: deque[Any] = deque(maxlen=_STORES_KEPT)
    while requests.recv(1):
        store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        kept.append(store)
        requests.sendall(f"{store.port}\n".encode())


def _seed_anew() -> None:
    """Seed the generators that a library seeds from the system when it is imported; Python's own does so by
    itself after a fork. Those of devices begin with a constant.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _own_name() -> str:
    with open("/proc/self/comm") as file:
        return file.read().rstrip("\n")


def _from_words(words: Sequence[str], flags: Sequence[str]) -> Script:
    is_module = words[0] == "-m"
    target, *arguments = words[1:] if is_module else words
    return Script(target, is_module, tuple(arguments), tuple(flags))


def main() -> None:
    """Serve the host; in a trainer, run the script."""
    settings = json.loads(sys.argv[1])
    script = _from_words(sys.argv[2:], settings["flags"])
    control = socket.socket(fileno=settings["control"])
    for descriptor in (control.fileno(), *settings["keep"]):
        os.set_inheritable(descriptor, False)
    zygote = Zygote(
        script,
        control,
        host=settings["host"],
        own_session=settings["own_session"],
        keep=settings["keep"],
    )
    set_up_path(script)
    names, _ = read_record(settings["record"]) if settings["record"] else ([], "")
    from_text = settings["script_imports"] and not names
    if from_text:
        zygote.preload(TRAINING_MODULES, imports_of_script(script))
    else:
        zygote.preload(names or FIRST_MODULES)
    zygote.serve()
    run_script(script)


if __name__ == "__main__":
    main()
