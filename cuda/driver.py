"""The few functions of CUDA's driver that torch does not offer."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)

_LIBRARY = "libcuda.so.1"
_RELAXED = 2


@functools.cache
def cuda_driver() -> Any:
    """The driver's library; None where there is none (no device, or one of another maker)."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        logger.info("no driver of CUDA here: %s", error)
        return None


def ignore_captures() -> None:
    """From now on calls of this thread that wait or allocate are allowed while another one captures a graph.

    Otherwise they would fail, and the training's capture with them: `torch.cuda.graph` captures in the mode
    that forbids such calls to all threads. This thread never captures: nothing of it can get into a graph.
    """
    driver = cuda_driver()
    if driver is None:
        return
    code = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
    if code != 0:
        logger.warning(
            "a graph that is captured while snapshots are copied may fail: the driver says %d", code
        )
