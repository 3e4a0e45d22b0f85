"""One daemon for all rows that a worker process plays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.harness import DaemonProcess, own_daemon


@pytest.fixture(scope="session")
def daemon() -> Iterator[DaemonProcess]:
    with own_daemon("--memory", "2GiB") as process:
        yield process
