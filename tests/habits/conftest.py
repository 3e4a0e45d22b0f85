"""One daemon for all rows that a worker process plays, and processes that have imported what their
lives import.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.harness import DaemonProcess, own_daemon
from tests.habits.driver import Parents


@pytest.fixture(scope="session")
def daemon() -> Iterator[DaemonProcess]:
    with own_daemon("--memory", "2GiB") as process:
        yield process


@pytest.fixture(scope="session")
def parents() -> Iterator[Parents]:
    made = Parents()
    yield made
    made.close()
