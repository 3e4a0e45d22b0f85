"""One daemon for all end-to-end tests of a worker process, with folders of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import DaemonProcess, Jobs


@pytest.fixture(scope="session")
def segment_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory, segment_dir: Path) -> Iterator[DaemonProcess]:
    runtime = tmp_path_factory.mktemp("daemon") / "run"
    runtime.mkdir(mode=0o700)
    with DaemonProcess(runtime, segment_dir, "--memory", "2GiB").running() as process:
        yield process


@pytest.fixture
def jobs(tmp_path: Path, daemon: DaemonProcess) -> Jobs:
    return Jobs(tmp_path, daemon.endpoint)
