"""A kernel of few programs that copies words into memory of the host which the device can write (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["store_kernel"]


@triton.jit(do_not_specialize=["words"])
def store_kernel(source, target, words, BLOCK: tl.constexpr):
    """Each program takes one block of ``BLOCK`` words after the other, as far apart as there are programs.

    Args:
        source: int64 ``[words]``, on the device.
        target: int64 ``[words]``, pinned memory of the host.
    """
    step = tl.num_programs(0) * BLOCK
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for begin in range(tl.program_id(0) * BLOCK, words, step):
        at = begin + lanes
        known = at < words
        tl.store(target + at, tl.load(source + at, mask=known), mask=known)
