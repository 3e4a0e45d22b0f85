"""One S3 server for all tests of this folder; each has a folder of its own in it, a run, and a
daemon that it starts itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.bucket import Bucket
from tests.e2e.harness import Jobs
from tests.e2e.s3.training import TOTAL
from tests.storage.fault_proxy import FaultProxy
from tests.storage.s3_server import S3Server


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    running = S3Server.start()
    yield running
    running.stop()


@pytest.fixture
def bucket(server: S3Server) -> Bucket:
    return Bucket(server)


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as running:
        yield running


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    """Without the file's daemon: each test has its own."""
    return Jobs(tmp_path, "none")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The end of a job that knows nothing of ckptd."""
    return Jobs(tmp_path_factory.mktemp("reference"), "none").run("plain", "--total", str(TOTAL))
