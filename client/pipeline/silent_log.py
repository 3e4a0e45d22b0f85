"""What a hand-written pipeline calls, and what it does where nothing is logged."""

from __future__ import annotations

from torch import Tensor

__all__ = ["SilentLog"]


class SilentLog:
    """The log of a checkpointer that is off: it takes everything and keeps nothing."""

    def activation(
        self,
        tensor: Tensor,
        *,
        micro_batch: int,
        stage: int = 0,
        index: int = 0,
        dest: int | None = None,
    ) -> bool:
        """Nothing happens: send it."""
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
        """Nothing happens: send it."""
        return True

    def receive_activation(
        self, buffer: Tensor, *, source: int, micro_batch: int, stage: int = 0, index: int = 0
    ) -> bool:
        """Nothing happens: receive it."""
        return False

    def receive_gradient(
        self, buffer: Tensor, *, source: int, micro_batch: int, stage: int = 0, index: int = 0
    ) -> bool:
        """Nothing happens: receive it."""
        return False
