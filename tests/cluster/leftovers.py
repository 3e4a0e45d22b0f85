"""What a cluster leaves on the machine, and its removal: processes, namespaces, folders.

`Leftovers` names all of it from the moment a cluster begins, so that removal needs nothing but those names,
may be repeated, and touches nothing of anybody else: names carry the pid of their owner and a random part.

Run as a program (`python -m tests.cluster.leftovers`), it is the guardian of one cluster: it reads
the names from its standard input and removes everything when the owner is gone without having done
so, however it went.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["MARKER", "Guardian", "Leftovers", "kill_processes", "processes_of"]

MARKER = "TEST_CLUSTER_HOST"  # environment variable by which a host's processes are found
NETNS_FOLDER = Path("/run/netns")
REPOSITORY = Path(__file__).resolve().parents[2]
KILL_TIMEOUT_S = 20.0
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The names of everything that one cluster makes; `hosts` are markers."""

    hosts: tuple[str, ...]
    namespaces: tuple[str, ...]
    folders: tuple[str, ...]

    def remove(self) -> None:
        """Kill the processes, then delete the namespaces (their links go with them) and the folders."""
        for host in self.hosts:
            kill_processes(host, None)
        for name in self.namespaces:
            if (NETNS_FOLDER / name).exists():
                kill_processes(None, name)
                subprocess.run(["ip", "netns", "del", name], check=True)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def processes_of(marker: str | None, namespace: str | None) -> set[int]:
    """Pids of all live processes that carry the marker or live in the namespace; zombies have neither."""
    wanted_env = f"{MARKER}={marker}".encode() if marker else None
    wanted_net = _inode(NETNS_FOLDER / namespace) if namespace else None
    found = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if _belongs(Path(entry.path), wanted_env, wanted_net):
                found.add(int(entry.name))
        except OSError:
            continue  # it ended meanwhile, is a zombie, or is another user's and so not ours
    return found


def _belongs(process: Path, wanted_env: bytes | None, wanted_net: int | None) -> bool:
    if wanted_net is not None and (process / "ns/net").stat().st_ino == wanted_net:
        return True
    return wanted_env is not None and wanted_env in (process / "environ").read_bytes().split(b"\0")


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def kill_processes(marker: str | None, namespace: str | None) -> None:
    """SIGKILL them all, again and again until none is left: a process may fork while it is being killed.

    Raises:
        TimeoutError: some are still there after `KILL_TIMEOUT_S`.
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S
    ending: set[int] = set()
    while pids := processes_of(marker, namespace) | _closing(ending):
        ending |= pids
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it went by itself
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(pids)} survive SIGKILL")
        time.sleep(POLL_S)


def _closing(pids: set[int]) -> set[int]:
    """Those of which a thread is not over yet.

    The first thread of a process may be, and with it its environment and namespace, while others
    still hold the sockets: who takes the network away now does so before the peers are told.
    """
    return {pid for pid in pids if any(map(_runs, _threads(pid)))}


def _threads(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []  # somebody has waited for it


def _runs(task: Path) -> bool:
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False  # it ended meanwhile
    return state not in ("Z", "X")


class Guardian:
    """A process that outlives us if we are killed, and then removes what we left."""

    def __init__(self, leftovers: Leftovers) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.leftovers"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(leftovers)).encode() + b"\n")
        self._process.stdin.flush()

    def dismiss(self) -> None:
        """Everything was removed: it has nothing to do any more."""
        self._process.communicate(b"done\n", timeout=20)


def main() -> None:
    """Guard until the owner says that it is done, or is gone."""
    given = json.loads(sys.stdin.readline())
    if sys.stdin.readline() != "done\n":
        Leftovers(**{key: tuple(names) for key, names in given.items()}).remove()


if __name__ == "__main__":
    main()
