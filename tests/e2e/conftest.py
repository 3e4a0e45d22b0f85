"""One daemon for the end-to-end tests of a file: what they leave in its memory ends with the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import DaemonProcess, Jobs, own_daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with own_daemon("--memory", "2GiB") as process:
        yield process


@pytest.fixture
def jobs(tmp_path: Path, daemon: DaemonProcess) -> Jobs:
    return Jobs(tmp_path, daemon.endpoint)
