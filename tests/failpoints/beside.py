"""What else happens to a job beside a strike: what operators, service managers, other programs and failing
memory do to its daemons. Some points are reached in no other way.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from select import select

import zmq

from ckptd.core.slots.segment_format import RECORD_ENDS, SlotHeader, set_slot_state
from ckptd.core.slots.slots import SlotState
from ckptd.errors import DaemonUnavailable, SegmentError
from ckptd.memory.segment_file import ASIDE, Segment, open_segment
from ckptd.transport.messages import Drill, DrillReport, Park, Parks, Request
from ckptd.transport.wire import ControlClient, RefusedError, RequestTimeout, WireError
from tests.ckptd.nodes import Node
from tests.ckptd.running import FRESH, ROOT
from tests.e2e.test_bad_input import flip

__all__ = [
    "NO_ANSWER",
    "Beside",
    "Command",
    "ServiceManager",
    "ask_beside",
    "command",
    "damage_front",
    "damage_headers",
    "flip_bits",
    "flip_replicas",
    "let_time_pass",
    "put_aside",
    "sealed",
    "start_another",
]

NO_ANSWER = (DaemonUnavailable, RefusedError, RequestTimeout, WireError)
Command = subprocess.Popen[bytes]

_ASK_S = 10.0
_FRONT_BYTES = 64
_WRITTEN_S, _DAY_S = 15.0, 86_400.0


class Beside(StrEnum):
    """What happens."""

    END = "end"
    """A daemon gets SIGTERM, and is started again."""
    RELOAD = "reload"
    """A daemon gets SIGHUP."""
    SECOND = "second"
    """An operator starts a daemon where one runs."""
    PARK = "park"
    """`ckptctl park`."""
    DRILL = "drill"
    """`ckptctl drill`."""
    MOVE = "move"
    """The job is started again with its ranks on other nodes."""
    FOLDER = "folder"
    """The segment folder of a running daemon is removed, as logind does."""
    AGE = "age"
    """What has been in storage for a while has been there for a day: what is replaced may go."""
    FLIP = "flip"
    """A bit flips in the sealed slots of a file at rest; the job is started again."""
    FRONT = "front"
    """The first bytes of a file at rest are wrong; the job is started again."""
    HEADER = "header"
    """Headers of slots of a file at rest are wrong, or say that somebody was writing; the job is started again."""
    LIAR = "liar"
    """A node is lost, and a bit flips in all replicas on another; the job is started again."""
    ASIDE = "aside"
    """A file at rest was put aside by an earlier daemon, which has left a reader's copy, too; the job is started
    again.
    """
    TORN = "torn"
    """A rank records a snapshot wrong, before its digest is made; the job is started again until no replay meets it."""
    KEYS = "keys"
    """`ckptctl keys trust` and `untrust`, of a node that is none of the job's."""
    VERIFY = "verify"
    """`ckptctl verify`."""
    ASKS = "asks"
    """`ckptctl iterations`, `snapshots` and `drill`."""

    @property
    def loses(self) -> bool:
        """Whether something has to be there on another node, or in storage."""
        return self in (Beside.FOLDER, Beside.FLIP, Beside.FRONT, Beside.HEADER)

    @property
    def ends_ranks(self) -> bool:
        return self in (
            Beside.MOVE,
            Beside.FLIP,
            Beside.FRONT,
            Beside.HEADER,
            Beside.LIAR,
            Beside.ASIDE,
            Beside.TORN,
        )

    @property
    def is_damage(self) -> bool:
        """Whether nobody knows what is left until it is read."""
        return self in (Beside.FLIP, Beside.FRONT, Beside.HEADER, Beside.LIAR)

    @property
    def is_command(self) -> bool:
        """Whether it is a process of `ckptctl`, which may be hurt itself."""
        return self in (Beside.KEYS, Beside.VERIFY, Beside.ASKS)


def flip_bits(node: Node, rng: random.Random) -> str:
    """Flip a bit in a sealed slot, or in each, of a file whose daemon is not there; its name, or ""."""
    files = [path for path in node.files() if sealed(path)]
    if not files:
        return ""
    path = rng.choice(files)
    segment = open_segment(path)
    try:
        found = sorted(sealed(path))
        victims = found if rng.random() < 0.3 else [rng.choice(found)]
        for index, header in segment.headers():
            if header.state is SlotState.SEALED and header.iteration in victims:
                flip(segment, index, header)
    finally:
        segment.close()
    return path.name


def damage_front(node: Node, rng: random.Random) -> str:
    """Overwrite the first bytes of a file, or of the record of a run; its name, or ""."""
    files = [*node.files(), *node.segment_dir.glob(f"*{RECORD_ENDS}")]
    if not files:
        return ""
    path = rng.choice(sorted(files))
    with path.open("r+b") as file:
        file.write(bytes(_FRONT_BYTES))
    return path.name


def damage_headers(node: Node, rng: random.Random) -> str:
    """Damage the headers of slots of a file whose daemon is not there, or make them those of slots that were being
    filled or digested; its name, or "".
    """
    files = [path for path in node.files() if sealed(path)]
    if not files:
        return ""
    path = rng.choice(files)
    segment = open_segment(path)
    try:
        found = [(i, header) for i, header in segment.headers() if header.state is SlotState.SEALED]
        for index, header in found if rng.random() < 0.3 else [rng.choice(found)]:
            _damage_header(segment, index, header, rng.choice(("crc", "filling", "filled")))
    finally:
        segment.close()
    return path.name


def _damage_header(segment: Segment, index: int, header: SlotHeader, how: str) -> None:
    if how == "crc":
        segment.buffer[segment.geometry.header_offset(index) + 8] ^= 1
        return
    if how == "filled":  # and no image is there
        segment.image(index, header)[:8] = bytes(8)
    state = SlotState.FILLING if how == "filling" else SlotState.FILLED
    set_slot_state(segment.buffer, segment.geometry, index, state)


def flip_replicas(node: Node) -> int:
    """Flip a bit in each sealed slot of all replicas on a node, whose daemon knows nothing of it; how many."""
    flipped = 0
    for path in node.replicas():
        segment = open_segment(path)
        try:
            for index, header in segment.headers():
                if header.state is SlotState.SEALED:
                    flip(segment, index, header)
                    flipped += 1
        finally:
            segment.close()
    return flipped


def put_aside(node: Node, rng: random.Random) -> str:
    """Leave a file, whose daemon is not there, as if an earlier one had put it aside, and a copy for a reader that is
    gone; the file's name, or "". An older generation of a rank stays aside: its run has gone on without it.
    """
    newest: dict[str, tuple[int, Path]] = {}
    for path in node.files():
        rank, generation = re.fullmatch(r"(.*~r\d+)~g(\d+)(?:~.*)?\.\w+", path.name).groups()  # type: ignore[union-attr]
        key = rank if path.suffix == ".seg" else path.name  # replicas all come back
        newest[key] = max(newest.get(key, (-1, path)), (int(generation), path))
    if not newest:
        return ""
    _, path = rng.choice(sorted(newest.values()))
    job, run, _ = path.name.split("~", 2)
    shutil.copyfile(path, path.with_name(f"{job}~{run}~r0~c1073741825.fetched"))
    path.rename(path.with_name(path.name + ASIDE))
    return path.name


def command(beside: Beside, node: Node, *, run: tuple[str, str], store: tuple[str, str]) -> Command:
    """Processes of `ckptctl`, one after the other, in the group of a shell: they may be hurt.

    Args:
        run: job and run.
        store: URL and options.
    """
    ctl = f"{shlex.quote(sys.executable)} -m ckptd.ctl"
    if beside is Beside.VERIFY:
        url, options = map(shlex.quote, store)
        lines = [f"{ctl} verify --store-options {options} {url}"]
    elif beside is Beside.ASKS:
        which = shlex.join(["--job", run[0], "--run", run[1]])
        lines = [
            f"{ctl} {what} {which}" for what in ("iterations", "snapshots", "drill --timeout 60 --rank 0")
        ]
    else:
        keys = [shlex.quote(zmq.curve_keypair()[0].decode("ascii")) for _ in range(2)]
        lines = [
            f"rm -f {shlex.quote(str(node.keys_dir))}/sign.*",
            f"{ctl} keys new-signer",
            *(f"{ctl} keys trust stranger -- {key}" for key in keys),
            f"{ctl} keys untrust stranger",
        ]
    with node.log.open("ab") as out:
        return subprocess.Popen(
            ["bash", "-c", "\n".join(lines)],
            env=node.env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def let_time_pass(store: Path) -> None:
    """The files of a store that nobody writes any more are a day older."""
    for path in store.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and time.time() - (then_s := path.stat().st_mtime) > _WRITTEN_S:
                os.utime(path, (then_s - _DAY_S, then_s - _DAY_S))


def ask_beside(node: Node, beside: Beside, job: str, run: str, rank: int) -> threading.Thread:
    """Ask as `ckptctl` does; whoever dies meanwhile does not answer."""
    request: Request = Park(job, run, _ASK_S / 2) if beside is Beside.PARK else Drill(job, run, rank)
    reply: type[Parks | DrillReport] = Parks if beside is Beside.PARK else DrillReport

    def ask() -> None:
        with contextlib.suppress(*NO_ANSWER), ControlClient(node.endpoint, timeout_s=_ASK_S) as client:
            client.ask(request, reply)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def start_another(node: Node) -> subprocess.Popen[bytes]:
    """A second daemon for the same folders, which ends at once."""
    with node.log.open("ab") as log:
        return subprocess.Popen(
            FRESH, env=node.env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


class ServiceManager:
    """Keeps the files of daemons over their restarts, as systemd does (``FileDescriptorStoreMax=``)."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._kept: dict[str, dict[str, int]] = {node.name: {} for node in nodes}
        self._sockets: dict[socket.socket, str] = {}
        for node in nodes:
            address = str(node.folder / "notify")
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            sock.bind(address)
            node.settings["NOTIFY_SOCKET"] = address
            self._sockets[sock] = node.name
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def hand_over(self, node: Node) -> None:
        """Start the node's next daemon with what was kept for it."""
        self._take(0.0)
        with self._lock:
            kept = self._kept[node.name]
            names, words = ":".join(kept), []
            for number, fd in enumerate(kept.values(), start=3):
                words.append(f"exec {number}</proc/{os.getpid()}/fd/{fd}")
        words.append(f"export LISTEN_PID=$$ LISTEN_FDS={len(kept)} LISTEN_FDNAMES={shlex.quote(names)}")
        node.command = ["bash", "-c", "\n".join([*words, 'exec "$@"']), "bash", *FRESH]

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for sock in self._sockets:
            sock.close()
        for kept in self._kept.values():
            for fd in kept.values():
                os.close(fd)

    def _serve(self) -> None:
        while not self._over.is_set():
            self._take(0.1)

    def _take(self, wait_s: float) -> None:
        while ready := select(list(self._sockets), [], [], wait_s)[0]:
            with self._lock:
                for sock in ready:
                    self._heard(sock)
            wait_s = 0.0

    def _heard(self, sock: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(sock, 65_536, 8, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # the other thread was here first
        lines = data.decode().split("\n")
        kept = self._kept[self._sockets[sock]]
        name = next((line.partition("=")[2] for line in lines if line.startswith("FDNAME=")), "")
        if "FDSTOREREMOVE=1" in lines and name in kept:
            os.close(kept.pop(name))
        for fd in fds:
            if name in kept:
                os.close(kept.pop(name))
            kept[name] = fd


def sealed(path: Path) -> set[int]:
    """The iterations of the sealed slots of a file, whoever writes to it meanwhile."""
    try:
        segment = open_segment(path, readonly=True)
    except (OSError, ValueError, SegmentError):
        return set()  # being made, or removed
    try:
        return {header.iteration for _, header in segment.headers() if header.state is SlotState.SEALED}
    finally:
        segment.close()
