"""Real daemons and small trainers for the tests of `ckptd`."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptd.config.daemon_config import endpoint_for
from ckptd.core.slots.segment_format import (
    OWNER_LOCK_BYTE,
    Kind,
    SegmentDescriptor,
    SlotHeader,
    encode_descriptor,
    slot_lock_byte,
    slot_view,
)
from ckptd.core.slots.slots import SlotState
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment, open_segment
from ckptd.storage.image import ImageLayout
from ckptd.storage.image_format import TensorEntry
from ckptd.transport.messages import Attach, Attached, Filled, Hello, Reserve, Reserved
from ckptd.transport.wire import ControlClient
from tests import programs
from tests.ckptd.memory.fresh import put_header

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
FRESH = (sys.executable, "-m", "ckptd", "run")


class DaemonProcess:
    """A daemon of the test's own.

    Attributes:
        command: starts it in a fresh interpreter, as a user would; without, it is forked (`tests.programs`).
    """

    def __init__(self, **settings: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ckptd-t-"))
        self.segment_dir = Path(f"/dev/shm/ckptd-test-{secrets.token_hex(6)}")
        self.settings = {
            "CKPTD_RUNTIME_DIR": str(self.folder / "run"),
            "CKPTD_SEGMENT_DIR": str(self.segment_dir),
            "CKPTD_MEMORY": "64MiB",
            **{"CKPTD_" + key.upper(): value for key, value in settings.items()},
        }
        self.segment_dir = Path(self.settings["CKPTD_SEGMENT_DIR"])
        self.runtime_dir = Path(self.settings["CKPTD_RUNTIME_DIR"])
        self.endpoint = endpoint_for(str(self.runtime_dir))
        self.log = self.folder / "log"
        self.process: subprocess.Popen[bytes] | programs.Program | None = None
        self.command: list[str] = []

    @property
    def env(self) -> dict[str, str]:
        """The environment of this daemon and of `ckptctl` for it."""
        own = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
        return own | self.settings

    def start(self, *flags: str) -> None:
        """Start, and wait until it answers."""
        self.spawn(*flags)
        self.ctl("wait", "--timeout", "20")

    def spawn(self, *flags: str, files: int | None = None) -> subprocess.Popen[bytes] | programs.Program:
        """Start without waiting; with at most so many open files."""
        with self.log.open("ab") as log:
            if not self.command:
                self.process = programs.start(
                    "ckptd", "run", *flags, env=self.env, stdout=log, stderr=log, files=files
                )
                return self.process
            self.process = subprocess.Popen(
                [*self.command, *flags],
                env=self.env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.process

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)

    def ctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `ckptctl` against this daemon."""
        done = programs.run("ckptd.ctl", *arguments, env=self.env, timeout=60)
        if check:
            assert done.returncode == 0, f"{done.stderr}\n{self.log_text()}"
        return done

    def client(self) -> ControlClient:
        """A connection to it."""
        return ControlClient(self.endpoint, timeout_s=20)

    def log_text(self) -> str:
        """What it has logged."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def clean_up(self) -> None:
        """End it and remove all it left."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.segment_dir, ignore_errors=True)


@contextmanager
def running_daemon(**settings: str) -> Iterator[DaemonProcess]:
    """A daemon that answers, and is gone with all its files after the block."""
    daemon = DaemonProcess(**settings)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.clean_up()


@contextmanager
def busy_daemon() -> Iterator[tuple[DaemonProcess, ControlClient]]:
    """A daemon with two sealed slots, and the client that is attached as their trainer."""
    with running_daemon() as daemon, daemon.client() as client:
        attach(client)
        segment = reserve(client)
        for index in (0, 1):
            fill(segment, index, 5 + index, anchors=1 << index)
            client.send(Filled(0, index, 5 + index))
        eventually(lambda: all(state_of(segment, i) == 3 for i in (0, 1)), "sealed")
        yield daemon, client


@contextmanager
def running_in_own_pid_namespace() -> Iterator[DaemonProcess]:
    """A daemon as in a container; skips with the reason where this user cannot make a namespace."""
    daemon = DaemonProcess()
    unshare = [
        shutil.which("unshare") or "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
    ]
    if os.geteuid() != 0:
        pytest.skip("a pid namespace of its own needs root and the unshare command")
    daemon.command = [*unshare, *FRESH]
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.clean_up()


def descriptor(
    job: str = "job",
    run: str = "run",
    rank: int = 0,
    *,
    world_size: int = 1,
    topology: str = "dp1",
    generation: int = 0,
    node_id: str = "",
    created_at_ns: int = 0,
    window: int = 2,
    num_operators: int = 2,
    client: bytes = b"",
    kind: Kind = "snapshots",
) -> SegmentDescriptor:
    """What a trainer says of its segment."""
    return SegmentDescriptor(
        job=job,
        run=run,
        rank=rank,
        world_size=world_size,
        topology=topology,
        layout_version=1,
        generation=generation,
        node_id=node_id,
        created_at_ns=created_at_ns,
        window=window,
        num_operators=num_operators,
        client=client,
        kind=kind,
    )


def attach(
    client: ControlClient,
    *,
    job: str = "job",
    run: str = "run",
    rank: int = 0,
    world_size: int = 1,
    topology: str = "dp1",
    layout_version: int = 1,
    needed_bytes: int = 8 * MIB,
    held: tuple[int, ...] = (),
    pid: int | None = None,
    token: bytes | None = None,
) -> Attached:
    """Hello and Attach, as a process of its own has a ``token`` of its own."""
    client.request(Hello("test", os.getpid() if pid is None else pid))
    wish = Attach(
        job,
        run,
        rank,
        world_size,
        topology,
        layout_version,
        needed_bytes,
        "for a test",
        held,
        b"the token of %d" % os.getpid() if token is None else token,
    )
    return client.ask(wish, Attached)


def reserve(
    client: ControlClient, *, slots: int = 4, slot_bytes: int = MIB, run: str = "run", rank: int = 0
) -> Segment:
    """Reserve a generation and map it."""
    wish = Reserve(slot_bytes, slots, encode_descriptor(descriptor(run=run, rank=rank)))
    return open_segment(Path(client.ask(wish, Reserved).segment.path))


def own(segment: Segment) -> int:
    """Take the owner lock on a description of its own; closing it gives the lock up."""
    fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    assert locks.try_lock(fd, OWNER_LOCK_BYTE, True)
    return fd


def fill(
    segment: Segment,
    index: int,
    iteration: int,
    *,
    anchors: int = 3,
    state: SlotState = SlotState.FILLED,
    tensors: tuple[tuple[str, str, tuple[int, ...], bytes], ...] = (),
    scalars_len: int = 0,
    epoch: int = 0,
) -> None:
    """Put an image of `iteration` into a slot and mark it filled (or what `state` says)."""
    entries = [TensorEntry(name, dtype, shape) for name, dtype, shape, _ in tensors] or [
        TensorEntry("w", "F32", (64, 16))
    ]
    layout = ImageLayout.build(entries, identity={"job": "job"}, num_operators=2, anchors=anchors)
    slot = slot_view(segment.buffer, segment.geometry, index)
    layout.write_header(slot, iteration=iteration, previous=iteration - 1, scalars_len=scalars_len)
    for name, _, _, data in tensors:
        slot[layout.offset_of(name) : layout.offset_of(name) + len(data)] = data
    header = SlotHeader(
        state=state,
        iteration=iteration,
        previous=iteration - 1,
        image_len=layout.image_len,
        sequence=iteration + 1,
        layout_id=layout.layout_id,
        filled_at_ns=time.time_ns(),
        writer_pid=os.getpid(),
        epoch=epoch,
    )
    put_header(segment.buffer, segment.geometry, index, header)


def state_of(segment: Segment, index: int) -> SlotState | None:
    """The state word of a slot now."""
    header = segment.header(index)
    return None if header is None else header.state


def eventually(condition: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = 60.0) -> None:
    """Wait, bounded, until the condition holds.

    Args:
        what: names the condition; called only when time is up, it can say how things are then.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"never came true: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)


@contextmanager
def small_tmpfs(size: str) -> Iterator[Path]:
    """A tmpfs of its own; skips with the reason where this user cannot mount one."""
    folder = Path(tempfile.mkdtemp(prefix="ckptd-tmpfs-"))
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", f"size={size},mode=0700", "ckptd-test", str(folder)]
    if mount is None or os.geteuid() != 0:
        folder.rmdir()
        pytest.skip("mounting a small tmpfs needs root and the mount command")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        folder.rmdir()
        pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def main() -> None:
    """A trainer that owns a rank, has filled slot 0 and dies while it fills slot 1."""
    endpoint, run = sys.argv[1:3]
    with ControlClient(endpoint, timeout_s=20) as client:
        attach(client, run=run)
        segment = reserve(client, run=run)
        fd = own(segment)
        fill(segment, 0, 7)
        fill(segment, 1, 8, state=SlotState.FILLING)
        assert locks.try_lock(fd, slot_lock_byte(1), True)
        sys.stdout.write(f"{segment.path}\n")
        sys.stdout.flush()
        time.sleep(60)


if __name__ == "__main__":
    main()
