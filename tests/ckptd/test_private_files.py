"""Small private files: never half there, never open to others, never replaced unless asked."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.private_files import new_private_file, replace_private_file
from tests.ckptd.running import ROOT


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_the_owner_may_read_and_write_whatever_the_umask_is(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        new_private_file(tmp_path / "new", b"secret")
        replace_private_file(tmp_path / "other", b"secret")
    finally:
        os.umask(before)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_bytes() == b"secret"


def test_a_new_file_replaces_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    new_private_file(tmp_path / "key", b"first")
    with pytest.raises(FileExistsError):
        new_private_file(tmp_path / "key", b"second")
    replace_private_file(tmp_path / "key", b"third")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"third"]


KILLED = """
import os, signal, sys
from pathlib import Path
from ckptd.storage.checkpoints.signing import create_signer
from ckptd.transport.access.keys import Keys

def killed(fd):
    os.kill(os.getpid(), signal.SIGKILL)

os.fsync = killed
{"signer": create_signer, "node": Keys.create}[sys.argv[1]](Path(sys.argv[2]))
"""


@pytest.mark.parametrize(("kind", "name"), [("signer", "sign.key"), ("node", "node.key_secret")])
def test_a_command_that_is_killed_leaves_no_part_of_a_key(tmp_path: Path, kind: str, name: str) -> None:
    """Keys were written under their own names: after a kill (or a power cut) there was an empty
    key, which was damaged and never overwritten.
    """
    keys = tmp_path / "keys"
    killed = [sys.executable, "-c", KILLED, kind, str(keys)]
    assert subprocess.run(killed, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert not (keys / name).exists()
    command = ["new-signer" if kind == "signer" else "new", "--keys-dir", str(keys)]
    made = [sys.executable, "-m", "ckptd.ctl", "keys", *command]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
    assert (keys / name).stat().st_size > 0


def test_a_second_signer_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """`ckptctl keys new-signer` ended with a traceback where there was a key already."""
    made = [sys.executable, "-m", "ckptd.ctl", "keys", "new-signer", "--keys-dir", str(tmp_path)]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
    again = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert again.stderr.startswith("ckptctl: ")
    assert "is not overwritten" in again.stderr
    assert "Traceback" not in again.stderr
