"""A real systemd in namespaces of its own, with the units of `deploy/`: on a copy of this machine's files
that vanishes with it.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Self

__all__ = ["SYSTEMD", "Systemd", "why_no_systemd"]

ROOT = Path(__file__).resolve().parents[1]
SYSTEMD = Path("/lib/systemd/systemd")
CGROUPS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
START_S, STOP_S = 30.0, 10.0
# What would touch this machine, or is of no use here.
MASKED = [
    "udevd",
    "udev-trigger",
    "journald",
    "logind",
    "resolved",
    "networkd",
    "timesyncd",
    "firstboot",
    "tmpfiles-setup",
]
# Everybody may read these copies: homes are closed to services.
PYTHON, PACKAGES, SOURCE = "/opt/python", "/opt/packages", "/opt/source"
# A shared libpython is looked up where it was installed, which is in a home.
ENVIRONMENT = (f"PYTHONPATH={SOURCE}:{PACKAGES}", f"LD_LIBRARY_PATH={PYTHON}/lib")
LOG = "/run/services.log"

_TRIAL = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/changes /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/changes,workdir=/mnt/work overlay /mnt/root
"""
_SETUP = f"""
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$1"
mkdir "$1/changes" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=/,upperdir=$1/changes,workdir=$1/work" overlay "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/pts dev/shm
mount -t tmpfs -o size=256m,mode=1777 tmpfs dev/shm
for name in null zero full random urandom tty; do cp -a "/dev/$name" dev/; done
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mkdir -p opt{{,/python,/packages,/source}} usr/local/bin
mount --bind "$2" .{PYTHON}
mount --bind "$3" .{PACKAGES}
mount --bind "$4" .{SOURCE}
rm -rf etc/systemd/system
mkdir -p etc/systemd/system
for name in {" ".join(MASKED)}; do ln -s /dev/null "etc/systemd/system/systemd-$name.service"; done
printf '[Unit]\\nRequires=basic.target\\nAfter=basic.target\\n' > etc/systemd/system/tested.target
printf '#!/bin/sh\\nexec env {" ".join(ENVIRONMENT)} {PYTHON}/bin/python3 -m ckptd "$@"\\n' > usr/local/bin/ckptd
chmod 755 usr/local/bin/ckptd
cp .{SOURCE}/deploy/*.service etc/systemd/system/
# There is no journal here.
mkdir etc/systemd/system/service.d
printf '[Service]\\nStandardError=append:{LOG}\\n' > etc/systemd/system/service.d/log.conf
systemd-sysusers --root="$PWD" "$PWD{SOURCE}/deploy/sysusers.conf"
for name in alice bob; do useradd --root "$PWD" --no-create-home --groups ckptd-trainers "$name"; done
useradd --root "$PWD" --no-create-home mallory
exec chroot . /usr/bin/env -i container=ckptd PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
    {SYSTEMD} --system --unit=tested.target --log-target=null --show-status=no
"""


@cache
def why_no_systemd() -> str:
    """Why none can be started here; "" if it can."""
    if os.geteuid() != 0:
        return "a systemd of the test's own needs root"
    if not SYSTEMD.exists():
        return f"systemd is not installed: no {SYSTEMD}"
    if _cgroups() is None:
        return "there is no cgroup v2 hierarchy to make a group in"
    missing = [
        name for name in ("unshare", "nsenter", "systemd-sysusers", "setpriv") if not shutil.which(name)
    ]
    if missing:
        return f"not installed: {', '.join(missing)}"
    trial = ["unshare", "--pid", "--fork", "--mount", "--uts", "--ipc", "--cgroup", "bash", "-c", _TRIAL]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=20, check=False)
    return f"no namespaces for a systemd here: {done.stderr.strip()}" if done.returncode else ""


def _cgroups() -> Path | None:
    return next((path for path in CGROUPS if (path / "cgroup.procs").exists()), None)


class Systemd:
    """Started by `with`; its services and their memory end with it.

    Its network is this machine's. Users: ckptd, alice and bob (in ckptd-trainers), mallory.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ckptd-systemd-"))
        cgroups = _cgroups()
        assert cgroups is not None
        self._cgroup = cgroups / self._folder.name
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = 0

    @property
    def root(self) -> Path:
        """Its files."""
        return Path(f"/proc/{self.pid}/root")

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self) -> None:
        self._cgroup.mkdir()
        packages = site.getsitepackages()[0]
        # It enters its group first, so that the group is the root of its namespace.
        enter = f'echo $$ > {self._cgroup}/cgroup.procs; exec unshare --pid --fork --kill-child "$@"'
        spaces = ["--mount", "--uts", "--ipc", "--cgroup"]
        setup = ["bash", "-c", _SETUP, "setup", str(self._folder), sys.base_prefix, packages, str(ROOT)]
        with (self._folder.parent / f"{self._folder.name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", enter, "enter", *spaces, *setup],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        deadline = time.monotonic() + START_S
        while not self._is_up():
            log_text = Path(log.name).read_text(errors="replace")
            alive = self._process.poll() is None and time.monotonic() < deadline
            assert alive, f"no systemd:\n{log_text}"
            time.sleep(0.1)

    def _is_up(self) -> bool:
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        if not children:
            return False
        self.pid = int(children[0])
        if Path(f"/proc/{self.pid}/exe").resolve().name != SYSTEMD.name:
            return False
        return self.ctl("is-active", "tested.target", check=False).stdout.strip() == "active"

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()  # and with it, by --kill-child, all processes of the namespace
            self._process.wait(STOP_S)
        deadline = time.monotonic() + STOP_S
        while self._cgroup.exists() and time.monotonic() < deadline:
            for folder, _, _ in os.walk(self._cgroup, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:  # its processes are still ending
                    time.sleep(0.05)
        assert not self._cgroup.exists(), f"processes are left in {self._cgroup}"
        self._folder.rmdir()
        Path(f"{self._folder}.log").unlink()

    # -- inside it -------------------------------------------------------------------------------

    def run(self, *command: str, user: str = "root", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as one of its users."""
        done = subprocess.run(
            self.command(*command, user=user), capture_output=True, text=True, timeout=90, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def command(self, *command: str, user: str = "root") -> list[str]:
        """How to run a command in it from outside."""
        there = f"/proc/{self.pid}/root"
        enter = ["nsenter", "--target", str(self.pid), "--all", f"--root={there}", f"--wd={there}"]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user != "root" else []
        path = "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return [*enter, *become, "env", "-i", path, *ENVIRONMENT, *command]

    def ctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `systemctl`."""
        done = self.run("systemctl", "--no-pager", *arguments, check=False)
        assert not check or done.returncode == 0, f"{arguments}: {done.stderr}\n{self.log}"
        return done

    @property
    def log(self) -> str:
        """What all services have logged."""
        path = self.root / LOG.lstrip("/")
        return path.read_text(errors="replace") if path.exists() else ""

    def shows(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.ctl("show", "--value", f"--property={name}", unit).stdout.strip()
