"""A setting whose workers end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.memory.segment_store import SegmentStore
from ckptd.workers import Workers
from tests.ckptd.restore.setting import MIB, Setting


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    workers = Workers("test", 1, 100, lambda: None)
    store = SegmentStore(tmp_path, 64 * MIB, "here", mlock="off", hugepages="off")
    yield Setting(store, workers)
    workers.close(5.0)
