"""The keys and values that one device has: of each request, in the heads that it computes for it.

A request's KV in a head is one tensor ``[2, capacity, head_dim]`` (keys, values), made when the device first
computes the head, and as long as the request may become: it never moves while others are written. A *block*
is ``block_tokens`` of its tokens. Once all of them are computed a block never changes, so that it can be
copied away beside generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ckptd.core.serving.served_model import ServedModel

Head = tuple[int, int]
"""Layer, and number of a KV head."""


class KvCache:
    """KV by request, layer and head.

    Args:
        dtype, device: of the tensors.
    """

    def __init__(self, model: ServedModel, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._model, self._dtype, self._device = model, dtype, torch.device(device)
        self._capacity: dict[str, int] = {}
        self._held: dict[str, dict[Head, Tensor]] = {}

    def begin(self, request: str, capacity: int) -> None:
        """A request that may have so many tokens; nothing changes if it has begun already."""
        self._capacity.setdefault(request, capacity)
        self._held.setdefault(request, {})

    def head(self, request: str, layer: int, head: int) -> Tensor:
        """``[2, capacity, head_dim]``; made if it is not there, without content."""
        held = self._held[request]
        if (layer, head) not in held:
            shape = (2, self._capacity[request], self._model.head_dim)
            with torch.inference_mode(mode=False):  # else what is read from a backup could not be put into it
                held[layer, head] = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return held[layer, head]

    def has(self, request: str, layer: int, head: int) -> bool:
        """Whether the device has computed or received it."""
        return (layer, head) in self._held.get(request, {})

    def tokens(self, request: str, layer: int, head: int, begin: int, end: int) -> Tensor:
        """``[2, end - begin, head_dim]``: a view of some tokens."""
        return self.head(request, layer, head)[:, begin:end]

    def keep(self, needed: Callable[[str, int, int], bool]) -> None:
        """Give up what is not needed, by request, layer and head."""
        for request, held in self._held.items():
            self._held[request] = {at: kv for at, kv in held.items() if needed(request, *at)}

    def end(self, request: str) -> None:
        """A request has ended, or is not known any more."""
        self._capacity.pop(request, None)
        self._held.pop(request, None)

    def requests(self) -> Iterator[str]:
        """Those that have begun."""
        return iter(list(self._capacity))

    @property
    def held_bytes(self) -> int:
        """Of all tensors."""
        return sum(kv.nbytes for held in self._held.values() for kv in held.values())
