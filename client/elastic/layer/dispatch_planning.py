"""Who computes which tokens, planned where the counts are: on the CPU
(``ckptd.core.elastic.token_dispatch``) or on a CUDA device (``ckptd.cuda.dispatch``).

Both give the same integers, so it does not matter to the other ranks which of them a rank takes. A
rank whose results differed would make all of them hang in the exchange of tokens. Therefore the
first plan on a device is made in both ways and compared; if the kernels cannot be compiled there,
or say something else, a warning says so and the CPU plans from then on.

Shapes: ``R`` ranks, ``E`` experts.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ckptd.client.elastic.layer.token_rows import RowCounts
from ckptd.client.log_lines import get_logger
from ckptd.core.elastic.token_dispatch import plan_dispatch
from ckptd.cuda.dispatch import DeviceDispatcher, KernelsUnavailable

__all__ = ["Dispatcher"]

logger = get_logger(__name__)

Ints = NDArray[np.int64]


class Dispatcher:
    """The dispatcher of one rank for one placement.

    Args:
        replicas_RE: replicas of each expert on each rank; every expert has a holder.
        nodes_R: the number of each rank's node; None: not known.
        rank: whose share is wanted.
    """

    def __init__(self, replicas_RE: Ints, nodes_R: Ints | None, rank: int) -> None:
        self._replicas_RE = replicas_RE
        self._nodes_R = nodes_R
        self._rank = rank
        self._on_device: dict[torch.device, DeviceDispatcher | None] = {}

    def share(self, counts: Tensor) -> RowCounts:
        """What this rank sends and gets.

        Args:
            counts: int64 ``[R, E]``, tokens of each rank for each expert, on any device.
        """
        device = counts.device
        if device.type != "cuda":
            return self._by_cpu(counts)
        if device not in self._on_device:
            self._on_device[device] = self._tried(counts)
        planner = self._on_device[device]
        return self._by_cpu(counts) if planner is None else self._by(planner, counts)

    def _by_cpu(self, counts: Tensor) -> RowCounts:
        plan = plan_dispatch(counts.cpu().numpy(), self._replicas_RE, nodes=self._nodes_R)
        sends = plan.sends(self._rank)
        arrays = (sends.tokens, sends.first, plan.receives(self._rank))
        return RowCounts(*(torch.from_numpy(array) for array in arrays))

    def _by(self, planner: DeviceDispatcher, counts: Tensor) -> RowCounts:
        sends, received = planner.plan(counts).share(self._rank)
        return RowCounts(sends.tokens, sends.first, received)

    def _tried(self, counts: Tensor) -> DeviceDispatcher | None:
        """The GPU form, if it works on this machine."""
        try:
            planner = self._planner_on(counts.device)
            differs = not _same(self._by(planner, counts), self._by_cpu(counts))
        except KernelsUnavailable as error:
            logger.warning(
                "tokens are dispatched by the CPU, which takes longer: the kernels do not run on %s: %s",
                counts.device,
                error,
            )
            return None
        if differs:
            logger.warning(
                "tokens are dispatched by the CPU, which takes longer: on %s the kernels of this "
                "Triton gave other numbers; please report it",
                counts.device,
            )
            return None
        return planner

    def _planner_on(self, device: torch.device) -> DeviceDispatcher:
        nodes = None if self._nodes_R is None else torch.tensor(self._nodes_R)
        return DeviceDispatcher(torch.tensor(self._replicas_RE), device, nodes=nodes)


def _same(one: RowCounts, other: RowCounts) -> bool:
    return (
        torch.equal(one.tokens_RE.cpu(), other.tokens_RE)
        and torch.equal(one.first_RE.cpu(), other.first_RE)
        and torch.equal(one.received_RE.cpu(), other.received_RE)
    )
