"""Processes of other users: begun as root, which then change to a user that need not exist by name."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["DAEMON", "GROUP", "STRANGER", "TRAINER", "needs_users", "spawn_as"]

ROOT = Path(__file__).resolve().parents[1]
DAEMON, TRAINER, STRANGER, GROUP = 54_101, 54_102, 54_103, 54_110

needs_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of several users")

# Everything is imported before the change: the other user may not be able to read what root runs from.
_CHANGE = """
import os, sys
{imports}
os.setgroups([int(group) for group in sys.argv[2].split(",") if group])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
"""


def spawn_as(
    uid: int,
    script: str,
    *arguments: str,
    imports: str = "",
    groups: tuple[int, ...] = (),
    env: dict[str, str] | None = None,
    keep: socket.socket | None = None,
) -> subprocess.Popen[str]:
    """Run a script as this user, its primary group of the same number; ``sys.argv[3:]`` are the
    arguments, ``keep`` stays open.
    """
    command = [sys.executable, "-c", _CHANGE.format(imports=imports) + script]
    return subprocess.Popen(
        [*command, str(uid), ",".join(map(str, groups)), *arguments],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=() if keep is None else (keep.fileno(),),
        text=True,
    )
