"""The interface of a boundary log for hand-written pipelines that are not logged."""

from __future__ import annotations

from torch import Tensor

__all__ = ["SilentLog"]


class SilentLog:
    """The log of a disabled checkpointer: accepts all calls and records nothing."""

    def activation(
        self,
        tensor: Tensor,
        *,
        micro_batch: int,
        stage: int = 0,
        index: int = 0,
        dest: int | None = None,
    ) -> bool:
        """Records nothing; returns True: send it."""
        return True

    def gradient(
        self,
        tensor: Tensor,
        *,
        micro_batch: int,
        stage: int = 0,
        index: int = 0,
        dest: int | None = None,
    ) -> bool:
        """Records nothing; returns True: send it."""
        return True

    def receive_activation(
        self, buffer: Tensor, *, source: int, micro_batch: int, stage: int = 0, index: int = 0
    ) -> bool:
        """Fills nothing; returns False: receive it."""
        return False

    def receive_gradient(
        self, buffer: Tensor, *, source: int, micro_batch: int, stage: int = 0, index: int = 0
    ) -> bool:
        """Fills nothing; returns False: receive it."""
        return False
