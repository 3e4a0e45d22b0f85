"""A daemon that an operator starts gets the folders of one that a trainer had started: that one is
asked to end, and leaves the memory.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ckptd.config.runtime_dir import AlreadyRunning, claim
from ckptd.config.settings import DaemonConfig
from ckptd.errors import DaemonUnavailable
from ckptd.launch import connect
from ckptd.transport.messages import Done, StepAside
from ckptd.transport.wire import RefusedError, RequestTimeout, WireError

__all__ = ["take_over"]

logger = logging.getLogger(__name__)

_ASK_S = 2.0
_LOOK_S = 0.1
_BEYOND_DRAIN_S = 5.0


def take_over(folder: Path, what: str, config: DaemonConfig) -> int:
    """The lock of a folder; waits for the end of a daemon that makes way, or that ends anyway.

    Raises:
        AlreadyRunning: another daemon uses the folder, and goes on.
    """
    deadline = time.monotonic() + config.drain_timeout_s + _BEYOND_DRAIN_S
    told = False
    while True:
        try:
            return claim(folder, what, config.listen)
        except AlreadyRunning as error:
            if config.started_by_trainer or not _goes(error) or time.monotonic() > deadline:
                raise
            if not told:
                told = True
                logger.warning("waiting for the end of the daemon that uses the %s %s", what, folder)
        time.sleep(_LOOK_S)


def _goes(holder: AlreadyRunning) -> bool:
    """Ask who holds the lock to end; false if it will not. One that does not answer is beginning,
    or ending.
    """
    if not holder.endpoint:
        return False  # it is of a version that does not tell, or has just begun
    try:
        with connect(holder.endpoint, _ASK_S) as client:
            client.ask(StepAside(), Done)
    except RequestTimeout:
        return True
    except (RefusedError, WireError, DaemonUnavailable) as error:
        logger.info("the daemon on %s does not make way: %s", holder.endpoint, error)
        return False
    return True
