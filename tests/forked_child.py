"""Children with torch of exports and imports, forked: a fresh one spends three seconds of a core on importing it."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import IO

import pytest

from tests.forked import PipedChild

__all__ = ["forked_child"]


def _child(command: Sequence[str], *, stdin: int, stdout: int, stderr: IO[bytes]) -> PipedChild:
    assert (stdin, stdout) == (subprocess.PIPE, subprocess.PIPE)
    return PipedChild(_serve, command[-1], env=os.environ, stderr=stderr)


def _serve(module: str) -> object:
    return importlib.import_module(module).main()


@pytest.fixture
def forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports and imports of this test fork their child; those of fixtures of a module start fresh ones."""
    instead = SimpleNamespace(Popen=_child, PIPE=subprocess.PIPE)
    monkeypatch.setattr("ckptd.export.dcp.subprocess", instead)
