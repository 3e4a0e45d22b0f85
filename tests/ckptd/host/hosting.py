"""Runs scripts with and without a host, as users would start them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ckptd.host.host_options import options_from
from ckptd.host.trainer_host import record_name
from ckptd.host.zygotes.preload import write_record

__all__ = ["Hosting", "children_of", "gone", "trainers_of", "until", "zygote_of"]

ROOT = Path(__file__).resolve().parents[3]
# What the launcher of the tests themselves may have set.
FOREIGN = ("CKPTD_HOST_", "TORCHELASTIC_", "MASTER_", "GROUP_", "LOCAL_", "RANK", "WORLD_SIZE", "SLURM_")
TIMEOUT_S = 120


class Hosting:
    """Starts processes in one folder, with a runtime folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runtime = folder, folder / "runtime"

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
        return {**kept, "PYTHONPATH": str(ROOT), "CKPTD_RUNTIME_DIR": str(self.runtime), **more}

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def known(self, *words: str, modules: Sequence[str] = ("json",)) -> None:
        """As if earlier trainers of this script had imported these: the zygote then imports no torch."""
        (self.runtime / "host").mkdir(parents=True, exist_ok=True)
        for folder in (self.runtime, self.runtime / "host"):
            folder.chmod(0o700)
        script = options_from(words, {}).script
        file = self._module_file(script.target) if script.is_module else str(self.folder / script.target)
        write_record(
            self.runtime / "host" / record_name(os.path.realpath(file), str(self.folder)), list(modules), ""
        )

    def _module_file(self, name: str) -> str:
        place = self.folder.joinpath(*name.split("."))
        file = place.with_suffix(".py")
        return os.path.realpath(file if file.is_file() else place / "__main__.py")

    def start(
        self, *words: str, flags: Sequence[str] = (), host: bool = True, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """The process, as a leader of its session as torchrun makes one; its output is piped."""
        module = ["-m", "ckptd.host"] if host else []
        return subprocess.Popen(
            [sys.executable, *flags, *module, *words],
            cwd=self.folder,
            env=self.environment(**(env or {})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, *words: str, flags: Sequence[str] = (), host: bool = True, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        with self.start(*words, flags=flags, host=host, env=env) as process:
            try:
                out, err = process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def both(
        self, *words: str, flags: Sequence[str] = ()
    ) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
        """A script without a host, and forked under a host that does not restart it."""
        plain = self.run(*words, flags=flags, host=False)
        self.known(*words)
        hosted = self.run("--max-restarts", "0", *words, flags=flags)
        assert "forked" in hosted.stderr, hosted.stderr
        return plain, hosted


def until(condition: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it does not in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.01)


def children_of(pid: int) -> dict[str, int]:
    """Its children by the name that `ps` shows; of several with the same name, one."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                name, rest = (path / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            except OSError:
                continue  # it ended meanwhile
            if int(rest.split()[1]) == pid and rest.split()[0] != "Z":
                found[name] = int(path.name)
    return found


def zygote_of(host: int) -> int | None:
    """Its child, or the one that it has taken over: that of the same place under the same torchrun."""
    if (child := children_of(host).get("ckptd-zygote")) is not None:
        return child
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            named = path.name.isdecimal() and (path / "comm").read_text().strip() == "ckptd-zygote"
            if named and _place(int(path.name)) == _place(host):
                return int(path.name)
    return None


def _place(pid: int) -> tuple[str, list[bytes]]:
    """Its network, which tells the nodes of a cluster apart, and what tells their ranks apart. Nothing is known of the
    variables of a fork.
    """
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    named = (b"TORCHELASTIC_RUN_ID=", b"LOCAL_RANK=", b"GROUP_RANK=")
    return os.readlink(f"/proc/{pid}/ns/net"), sorted(v for v in environ if v.startswith(named))


def trainers_of(host: int) -> list[int]:
    """One, or none: a child of the host, or of a zygote that it has taken over."""
    zygote = zygote_of(host)
    children = {**children_of(host), **({} if zygote is None else children_of(zygote))}
    return [pid for name, pid in children.items() if not name.startswith("ckptd-")]


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
