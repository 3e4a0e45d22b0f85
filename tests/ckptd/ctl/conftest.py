"""A folder with checkpoints, and `ckptctl` on it, for the tests of what is durable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd.storage.stores.objects import ObjectStore
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.stored import Ctl, fill_store


@pytest.fixture
def no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the environment's nor this machine's."""
    for name in [name for name in os.environ if name.startswith("CKPTD_")]:
        monkeypatch.delenv(name)
    empty = tmp_path / "empty.toml"
    empty.touch()
    monkeypatch.setenv("CKPTD_CONFIG", str(empty))
    monkeypatch.setenv("CKPTD_LISTEN", f"ipc://{tmp_path}/no-daemon.sock")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Not there yet; with a blank in its name, as people have it."""
    return tmp_path / "the store"


@pytest.fixture
def store(folder: Path) -> ObjectStore:
    """Checkpoints 11, 21 and 31 of two ranks."""
    opened = open_store(str(folder))
    fill_store(opened)
    return opened


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str], folder: Path) -> Ctl:
    return Ctl(capsys, str(folder))
