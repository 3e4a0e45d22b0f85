"""One daemon for the tests of a file, with a runtime and a segment folder of its own.

One for all files kept some 200 runs, and looked at each of them once a second until the session's end.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.e2e.harness import DaemonProcess


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real daemon."""
    runtime = tmp_path_factory.mktemp("daemon") / "run"
    runtime.mkdir(mode=0o700)
    segments = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
    try:
        with DaemonProcess(runtime, segments, "--memory", "4GiB").running() as daemon:
            yield daemon.endpoint
    finally:
        shutil.rmtree(segments)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
