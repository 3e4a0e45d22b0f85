"""Where the tensors of some layers are, also for a rank that holds no expert and so has none to look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ckptd.client.elastic.layer.elastic_layer import ElasticExperts
from ckptd.client.ranks.collectives import Collectives

__all__ = ["common_device"]


def common_device(layers: Iterable[ElasticExperts], group: Any, *, what: str) -> torch.device:
    """The device of this rank's experts; where it has none, one of the kind that others have; a
    collective call.

    Args:
        what: what is not done otherwise, as the beginning of the message.
    Raises:
        ValueError: on all ranks: experts of one rank are on several devices, or those of several
            ranks on several kinds of them.
    """
    own = sorted({str(p.device) for layer in layers for p in layer.experts.parameters()})

    def own_device() -> str:
        if len(own) > 1:
            raise ValueError(f"experts are on several devices: {', '.join(own)}")
        return own[0] if own else ""

    devices = Collectives.of_group(group).check(own_device, str, what=what)
    kinds = {device.split(":")[0] for device in devices} - {""}
    if len(kinds) > 1:
        raise ValueError(f"{what}: experts are on devices of several kinds: {sorted(kinds)}")
    if own:
        return torch.device(own[0])
    kind = kinds.pop()
    index = None if kind == "cpu" else torch.accelerator.current_device_index()
    return torch.device(kind) if index is None else torch.device(kind, index)
