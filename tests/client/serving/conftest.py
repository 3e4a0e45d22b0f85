"""One tiny model of each family for all tests of a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.client.serving.tiny_models import save_tiny

__all__ = ["tiny_model"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's model."""

    @cache
    def make(kind: str) -> Path:
        return save_tiny(kind, tmp_path_factory.mktemp(kind))

    return make
