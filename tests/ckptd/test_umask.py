"""What is written for others to read has the mode that the umask gives; what is private is private
under any umask. Real processes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ckptd.launch import ensure_daemon
from ckptd.transport.access.keys import Keys
from tests.ckptd.export.samples import entries, segment_folder, snapshot
from tests.ckptd.nodes import Net
from tests.ckptd.peers_harness import Job
from tests.ckptd.running import DaemonProcess, eventually

pytestmark = pytest.mark.timeout(180)

UMASKS = [
    pytest.param(0o077, 0o600, 0o700, id="077"),
    pytest.param(0o022, 0o644, 0o755, id="022"),
]


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Of this process and of those that it starts."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path, *, files: bool) -> set[int]:
    """Of all files, or of all folders, below a folder and with it."""
    every = [folder, *folder.rglob("*")]
    return {
        stat.S_IMODE(path.lstat().st_mode) for path in every if (path.is_file() if files else path.is_dir())
    }


@pytest.mark.parametrize(("mask", "file", "folder"), UMASKS)
def test_a_file_store_has_the_modes_of_the_daemons_umask(
    mask: int, file: int, folder: int, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with umask(mask):
        nodes = Net(1, store=f"file://{store}", persist_every_s="0", replicas="0")
        with nodes.up() as net:
            job = Job(net, net.nodes, replicas=0)
            job.start()
            job.record(0, 1)
            eventually(lambda: net[0].saw("persisted", "is durable"), "a checkpoint is stored")
            job.end()
    assert modes(store, files=True) == {file}
    assert modes(store, files=False) == {folder}


@pytest.mark.parametrize(("mask", "file", "folder"), UMASKS)
def test_exports_have_the_modes_of_the_users_umask(mask: int, file: int, folder: int, tmp_path: Path) -> None:
    tool = DaemonProcess()  # only for its environment: it is not started
    with segment_folder() as segments, umask(mask):
        snapshot(segments, 3, entries(w=torch.arange(12.0).reshape(3, 4)))
        for form in ("safetensors", "hf", "dcp"):
            target = tmp_path / form
            told = ("--segment-dir", str(segments), "--format", form, "--to", str(target))
            tool.ctl("export", *told)
            assert modes(target, files=True) == {file}, form
            if form != "safetensors":
                assert modes(target, files=False) == {folder}, form
    tool.clean_up()


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077], ids=oct)
def test_keys_logs_and_what_a_daemon_keeps_for_itself_are_private(mask: int) -> None:
    """With umask 0 the log of a daemon that a trainer started, its node id and the records of runs
    could be written by everybody who could enter the folder, such as the members of trainer_group.
    """
    daemon = DaemonProcess()
    environment = {key: value for key, value in os.environ.items() if key.startswith("CKPTD_")}
    with pytest.MonkeyPatch.context() as patch, umask(mask):
        for key in environment:
            patch.delenv(key)
        for key, value in daemon.settings.items():
            patch.setenv(key, value)
        try:
            ensure_daemon(idle_exit_s=2.0)
            daemon.ctl("keys", "new")
            daemon.ctl("keys", "new-signer")
            other = Keys.create(daemon.folder / "other")
            daemon.ctl("keys", "trust", "other", other.public)
            written = {path.name for path in daemon.folder.rglob("*") if path.is_file()}
            assert {"ckptd.log", "node-id", "node.key_secret", "sign.key", "other.key"} <= written
            for folder in (daemon.folder, daemon.segment_dir):
                assert all(mode & 0o077 == 0 for mode in modes(folder, files=True))
                assert all(mode & 0o077 == 0 for mode in modes(folder, files=False))
        finally:
            daemon.clean_up()
