"""Floats from one dtype to another, without torch."""

from __future__ import annotations

from ckptd.core.export_plan import ExportError

__all__ = ["convert"]


def convert(data: memoryview, source: str, target: str) -> memoryview:
    """Floats in another float dtype, rounded to nearest even as a GPU does; NaN stays NaN.

    Raises:
        ExportError: a pair that is not supported.
    """
    if source == target:
        return data
    import numpy as np  # only where something is converted: `ckptctl` starts faster without

    floats = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
    if source in floats and target in floats:
        with np.errstate(over="ignore"):
            return np.frombuffer(data, floats[source]).astype(floats[target]).data.cast("B")
    if source != "F32" or target != "BF16":
        raise ExportError(f"a tensor is stored as {source} and computes in {target}: unsupported")
    bits = np.frombuffer(data, "<u4")
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype("<u2")
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype("<u2")
    return np.where(nan, quiet, rounded).astype("<u2").data.cast("B")
