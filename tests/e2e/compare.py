"""Bit-for-bit comparison of two final states written by ``job.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["differences", "same_values"]


def differences(reference: Path, other: Path) -> list[str]:
    """Names of everything that is not identical; empty if all is."""
    a: dict[str, Any] = torch.load(reference, weights_only=False, map_location="cpu")
    b: dict[str, Any] = torch.load(other, weights_only=False, map_location="cpu")
    found = [f"only in one: {n}" for n in a.keys() ^ b.keys()]
    return found + [n for n in a.keys() & b.keys() if not same_values(a[n], b[n])]


def same_values(a: Any, b: Any) -> bool:
    """True if two values, or containers of values, are identical to the bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        # The bytes, so that NaN equals NaN and 0.0 does not equal -0.0; stricter than torch.equal.
        return torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8),
            b.contiguous().reshape(-1).view(torch.uint8),
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_values(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same_values(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)
