"""A folder in which scripts run, with and without a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ckptd.host.hosting import Hosting


@pytest.fixture
def hosting(tmp_path: Path) -> Hosting:
    return Hosting(tmp_path)
