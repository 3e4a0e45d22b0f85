"""The forms of the dispatcher, as one kind of function, so that the same tests are run over all of them.

Without a device the kernels run in Triton's interpreter, in a process that was started with
``TRITON_INTERPRET=1`` (``tests/cuda/test_dispatch.py`` starts one).
"""

from __future__ import annotations

import os
from functools import partial
from typing import Protocol

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray

from ckptd.core.elastic.token_dispatch import Sends, plan_dispatch
from ckptd.cuda.dispatch import DeviceDispatcher

__all__ = ["FORMS", "INTERPRETED", "NEEDS_CUDA", "Form", "on_device"]

Ints = NDArray[np.int64]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class Planned(Protocol):
    """What every form answers."""

    @property
    def quotas(self) -> Ints: ...
    @property
    def kept(self) -> Ints: ...
    def sends(self, rank: int) -> Sends: ...
    def receives(self, rank: int) -> Ints: ...
    def matrix(self) -> Ints: ...


class Form(Protocol):
    def __call__(
        self, tokens: ArrayLike, replicas: ArrayLike, *, nodes: ArrayLike | None = None
    ) -> Planned: ...


class _FromDevice:
    """A plan that was made on a device."""

    def __init__(self, device: str, tokens: ArrayLike, replicas: ArrayLike, nodes: ArrayLike | None) -> None:
        nodes_R = None if nodes is None else torch.tensor(np.asarray(nodes))
        planner = DeviceDispatcher(torch.tensor(np.asarray(replicas)), device, nodes=nodes_R)
        self._plan = planner.plan(torch.tensor(np.asarray(tokens)).to(device))
        self.quotas = self._plan.quotas.cpu().numpy()
        self.kept = self._plan.kept.cpu().numpy()

    def sends(self, rank: int) -> Sends:
        sends = self._plan.sends(rank)
        return Sends(sends.tokens.cpu().numpy(), sends.first.cpu().numpy())

    def receives(self, rank: int) -> Ints:
        return np.asarray(self._plan.receives(rank).cpu().numpy(), dtype=np.int64)

    def matrix(self) -> Ints:
        return np.stack([self.sends(rank).tokens for rank in range(len(self.quotas))])


def on_device(
    tokens: ArrayLike, replicas: ArrayLike, *, nodes: ArrayLike | None = None, device: str = "cuda"
) -> Planned:
    """The GPU form."""
    return _FromDevice(device, tokens, replicas, nodes)


FORMS = [
    pytest.param(plan_dispatch, id="cpu"),
    pytest.param(on_device, id="gpu", marks=[pytest.mark.gpu, NEEDS_CUDA]),
    pytest.param(
        partial(on_device, device="cpu"),
        id="interpreted",
        marks=pytest.mark.skipif(
            not INTERPRETED, reason="TRITON_INTERPRET=1 is not set: the kernels are not interpreted"
        ),
    ),
]
