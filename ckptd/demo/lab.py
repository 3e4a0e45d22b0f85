"""The demo's processes: a daemon and a trainer of its own, started, watched and killed for real.

Nothing here knows ckptd from the inside. A process is started as a user would start it, followed by the
lines it appends to its log, and ended by SIGKILL. Every wait has a deadline; a process that ends by
itself when it should not raises `ProcessDied` with the last lines it printed.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.launch import answers

Event = dict[str, Any]

# Torch's threads otherwise spin at every barrier while one of them waits for a core that somebody else
# has: iterations were up to twenty times longer. Large copies bypass the cache.
SHARED_CORES = {
    "GOMP_SPINCOUNT": "1000",
    "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x40000",
}
REPOSITORY = Path(__file__).resolve().parents[2]
SEGMENT_BYTES_WANTED = 1 << 30
POLL_S = 0.01
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 30.0
TAIL_BYTES = 3000
MAX_RESTARTS = "1000"  # by a host: the demo kills more often than a job's trainers should fail


class ProcessDied(RuntimeError):
    """A process of the demo ended, or hung, when it should have been running."""


def read_events(path: Path) -> list[Event]:
    """Every whole line of an event log; a line that a SIGKILL tore is skipped."""
    if not path.exists():
        return []
    events = []
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the torn line of a killed process, ended by its successor
    return events


def in_shared_environment() -> None:
    """Start this program again with the settings for shared cores, unless it has some.

    They must be there when a process starts: what is measured here is then what its trainers take.
    """
    missing = {name: value for name, value in SHARED_CORES.items() if name not in os.environ}
    if missing:
        os.execve(sys.executable, sys.orig_argv, os.environ | missing)


def _environment() -> dict[str, str]:
    """The caller's environment, with what suits a trainer that shares its cores (docs/integration.md)."""
    env = dict(os.environ)
    for name, value in SHARED_CORES.items():
        env.setdefault(name, value)
    env["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [env.get("PYTHONPATH")])])
    return env


def _spawn(
    module: str, *args: str, output: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    with output.open("ab") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", module, *args],
            cwd=REPOSITORY,
            env={**_environment(), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )


def _tail(path: Path) -> str:
    if not path.exists():
        return "(no output)"
    text = path.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
    return text or "(no output)"


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=END_TIMEOUT_S)


def _kill_other(pid: int) -> None:
    """SIGKILL a process that is no child of this one, and wait until it has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise ProcessDied(f"process {pid} had ended before it was killed") from None
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        if not select.select([process], [], [], END_TIMEOUT_S)[0]:
            raise ProcessDied(f"process {pid} does not end by SIGKILL")
    except ProcessLookupError:
        raise ProcessDied(f"process {pid} had ended before it was killed") from None
    finally:
        os.close(process)


@contextmanager
def daemon_folders() -> Iterator[tuple[Path, Path]]:
    """A runtime folder and a segment folder of the demo's own, removed afterwards.

    Segments belong in memory: the segment folder is on /dev/shm where that has room, else in the
    temporary folder (slower, and said so by the daemon).
    """
    runtime = Path(tempfile.mkdtemp(prefix="ckptd-demo-"))
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and shutil.disk_usage(shm).free > SEGMENT_BYTES_WANTED
    segments = Path(tempfile.mkdtemp(prefix="ckptd-demo-", dir=shm if roomy else None))
    try:
        yield runtime, segments
    finally:
        shutil.rmtree(segments, ignore_errors=True)
        shutil.rmtree(runtime, ignore_errors=True)


class DemoDaemon:
    """`ckptd run` in folders of its own; `start`, `kill` and `start` again."""

    def __init__(self, runtime: Path, segments: Path, *, memory: str = "1GiB") -> None:
        self._output = runtime / "daemon.log"
        self._args = [
            *("--runtime-dir", str(runtime)),
            *("--segment-dir", str(segments)),
            *("--memory", memory),
        ]
        if not str(segments).startswith("/dev/shm"):
            self._args.append("--allow-disk-segments")
        self.endpoint = f"ipc://{runtime}/ckptd.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start it and wait until it answers; the seconds that took."""
        begun = time.monotonic()
        self._process = _spawn("ckptd", "run", *self._args, output=self._output)
        while not answers(self.endpoint):
            if self._process.poll() is not None or time.monotonic() - begun > START_TIMEOUT_S:
                raise ProcessDied(f"the daemon did not come up; it said:\n{_tail(self._output)}")
            time.sleep(POLL_S)
        return time.monotonic() - begun

    def kill(self) -> None:
        """SIGKILL: no handler runs, nothing is flushed."""
        assert self._process is not None, "kill() before start()"
        _kill(self._process)

    def stop(self) -> None:
        """Ask it to drain and exit; used at the end of the demo only."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            _kill(self._process)


@dataclass(slots=True)
class Trainer:
    """One training run, over as many processes as it takes; it is followed by its event log.

    Attributes:
        host_folder: if set, the run has a host (`python -m ckptd.host`), with its files in this folder. The
            host starts the next process when one has died. Without it, the demo does.
    """

    name: str
    folder: Path
    args: list[str]
    host_folder: Path | None = None
    events: list[Event] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _offset: int = 0

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    @property
    def final(self) -> Path:
        return self.folder / f"{self.name}.pt"

    @property
    def output(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self, *, init_seed: int) -> None:
        """Start a process; `init_seed` is the only thing in which it differs from the one before. A host
        counts the seeds of its further processes up from it.
        """
        own = ["--init-seed", str(init_seed), "--log", str(self.log), "--final", str(self.final)]
        script = ["ckptd.demo.train", *self.args, *own]
        if self.host_folder is None:
            self._process = _spawn(*script, output=self.output)
        else:
            self._process = _spawn(
                *("ckptd.host", "--max-restarts", MAX_RESTARTS, "-m", *script),
                output=self.output,
                environment={"CKPTD_RUNTIME_DIR": str(self.host_folder)},
            )

    def follow(self, until: Callable[[Event], bool], *, timeout_s: float) -> Iterator[Event]:
        """Events as they come, up to and including the first for which `until` holds."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self._process is not None and self._process.poll() is not None
            for event in self._new_events():
                yield event
                if until(event):
                    return
            if ended:
                raise ProcessDied(f"the {self.name} run ended early; it said:\n{_tail(self.output)}")
            if time.monotonic() > deadline:
                raise ProcessDied(
                    f"the {self.name} run made no progress for {timeout_s:.0f} s; it said:\n"
                    + _tail(self.output)
                )
            time.sleep(POLL_S)

    def _new_events(self) -> Iterator[Event]:
        """One whole line at a time, so that a caller may stop after any of them."""
        if not self.log.exists():
            return
        with self.log.open("rb") as source:
            source.seek(self._offset)
            lines = source.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue  # torn by a SIGKILL
            self.events.append(event)
            yield event

    def drain(self) -> list[Event]:
        """Read what is left in the log, without waiting; every event there has been so far."""
        for _ in self._new_events():
            pass  # reading it is what appends it to `events`
        return self.events

    def kill(self) -> float:
        """SIGKILL the training process, wherever it is, and wait until it has ended; the wall-clock time of
        the kill. Its host lives on.
        """
        assert self._process is not None, "kill() before start()"
        pid = self._process.pid if self.host_folder is None else self.drain()[-1]["pid"]
        killed_s = time.time()
        if self.host_folder is None:
            _kill(self._process)
        else:
            _kill_other(pid)
        return killed_s

    def wait(self, *, timeout_s: float) -> None:
        """Wait for the process to end by itself, successfully."""
        assert self._process is not None, "wait() before start()"
        code = self._process.wait(timeout=timeout_s)
        if code != 0:
            raise ProcessDied(f"the {self.name} run ended with code {code}; it said:\n{_tail(self.output)}")

    def stop(self) -> None:
        """End the process if it still runs (the demo itself was interrupted). A host takes its trainer
        along.
        """
        if self._process is not None and self._process.poll() is None:
            _kill(self._process)
