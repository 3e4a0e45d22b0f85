"""Random-number state of the process: torch (host and every device), numpy's global generator, Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["capture_rng", "restore_rng"]


def capture_rng() -> dict[str, Any]:
    """All global generators, as values of the closed set; consumes no random number and
    synchronises no device.
    """
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": [kind, np.asarray(keys).tobytes(), int(position), int(has_gauss), float(cached)],
        "python": [version, np.asarray(internal, dtype=np.uint32).tobytes(), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()]
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Set every generator to a captured state.

    Raises:
        ValueError: the state was taken with more CUDA devices than are here.
    """
    torch.set_rng_state(_tensor(state["torch"]))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(internal, dtype=np.uint32).tolist()), gauss))
    devices = state.get("cuda", [])
    if devices:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count < len(devices):
            raise ValueError(
                f"the snapshot holds random state of {len(devices)} CUDA devices, this process sees {count}"
            )
        torch.cuda.set_rng_state_all([_tensor(s) for s in devices])


def _tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
