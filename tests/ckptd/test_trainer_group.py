"""Trainers that are other users than the daemon: members of a group may attach, nobody else may,
and no key is within reach.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.config.runtime_dir import UnusableFolder, group_number
from tests.ckptd.running import eventually
from tests.users import DAEMON, GROUP, STRANGER, TRAINER, needs_users, spawn_as

TRAIN = """
from pathlib import Path
endpoint, keys = sys.argv[3:5]
try:
    with connect(endpoint, 20) as client:
        attach(client)
        wish = m.Reserve(1 << 20, 3, encode_descriptor(descriptor()))
        info = client.ask(wish, m.Reserved).segment
        segment = MappedSegment(info.path, info.generation)
        segment.hint = 5
        client.request(m.Drop(info.generation))
    print("attached")
except Exception as error:
    print(type(error).__name__, error)
try:
    print(os.listdir(keys))
except PermissionError:
    print("no keys")
"""
IMPORTS = """
import torch
from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.launch import connect
from ckptd.core.slots.segment_format import encode_descriptor
from ckptd.transport import messages as m
from tests.ckptd.running import attach, descriptor
"""
DAEMON_IMPORTS = (
    "import ckptd.cli, ckptd.node.daemon, encodings.idna, encodings.ascii, gettext, grp, locale, shutil"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of the daemon's user, as its home would be."""
    path = Path(tempfile.mkdtemp(prefix="ckptd-g-", dir="/tmp"))
    path.chmod(0o755)
    os.chown(path, DAEMON, DAEMON)
    yield path
    shutil.rmtree(path)


def train(uid: int, folder: Path, *, groups: tuple[int, ...], trusts: str) -> list[str]:
    """What a trainer of this user prints."""
    env = dict(os.environ, CKPTD_DAEMON_USER=trusts)
    endpoint = f"ipc://{folder}/run/ckptd.sock"
    arguments = (endpoint, f"{folder}/run/keys")
    process = spawn_as(uid, TRAIN, *arguments, imports=IMPORTS, groups=groups, env=env)
    said, _ = process.communicate(timeout=90)
    return said.splitlines()


@needs_users
def test_a_group_of_users_attaches_to_a_daemon_of_another_user(folder: Path) -> None:
    segments = Path(f"/dev/shm/{folder.name}")
    env = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    env |= {
        "CKPTD_RUNTIME_DIR": f"{folder}/run",
        "CKPTD_SEGMENT_DIR": str(segments),
        "CKPTD_MEMORY": "64MiB",
        "CKPTD_TRAINER_GROUP": str(GROUP),
    }
    script = "os.mkdir(sys.argv[3])\nos.chmod(sys.argv[3], 0o750)\n"
    script += "os.mkdir(sys.argv[3] + '/keys', 0o700)\nsys.exit(ckptd.cli.main(['run']))\n"
    daemon = spawn_as(DAEMON, script, f"{folder}/run", imports=DAEMON_IMPORTS, groups=(GROUP,), env=env)
    try:
        socket = folder / "run" / "ckptd.sock"
        eventually(lambda: socket.exists() or daemon.poll() is not None, "it listens")
        assert daemon.poll() is None
        eventually(lambda: stat.S_IMODE(socket.stat().st_mode) == 0o660, "its mode is set")
        assert train(TRAINER, folder, groups=(GROUP,), trusts=str(DAEMON)) == [
            "attached",
            "no keys",
        ]
        # A member that was not told whose daemon to trust says nothing to it.
        (said, _) = train(TRAINER, folder, groups=(GROUP,), trusts="")
        assert f"owner {DAEMON}, mode" in said
        # Who is no member does not even find the socket.
        (said, _) = train(STRANGER, folder, groups=(), trusts=str(DAEMON))
        assert "trainer_group" in said
        assert stat.S_IMODE(segments.stat().st_mode) == 0o750
        assert segments.stat().st_gid == GROUP
        assert stat.S_IMODE((segments / ".owners").stat().st_mode) == 0o600
    finally:
        daemon.kill()
        daemon.communicate()
        shutil.rmtree(segments, ignore_errors=True)


def test_a_group_that_is_not_there_is_named() -> None:
    assert group_number("") is None
    assert group_number("12") == 12
    with pytest.raises(UnusableFolder, match="trainer_group = 'nobody-here'"):
        group_number("nobody-here")
