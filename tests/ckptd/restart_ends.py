"""A trainer's end of the line to its host, as a forked trainer inherits it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckptd.restart_line import LINE_VARIABLE, HostEnd, TrainerEnd, inherited_line

__all__ = ["inherited_end"]


@contextmanager
def inherited_end(host: HostEnd, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerEnd]:
    """The end that this process would have inherited from the host; nothing of it is left afterwards."""
    monkeypatch.setenv(LINE_VARIABLE, str(host.descriptor))
    inherited_line.cache_clear()
    end = inherited_line()
    assert end is not None
    yield end
    inherited_line.cache_clear()
    end._socket.close()
