"""Runs in which ranks share what they have in common: images as their trainers would fill them,
made of given tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from tests.ckptd.export.samples import Tensors, entries

Rows = tuple[int, int] | None


@dataclass(frozen=True)
class Op:
    """An operator of one member; ``owner``: whose images hold it (-1: each rank has its own)."""

    param: str
    rows: Rows
    owner: int


def client_payload(operators: Sequence[Op]) -> bytes:
    """What a trainer tells of them."""
    table = [
        [f"op {i}", "dense", "", None, None, [[op.param, *(op.rows or (None, None))]]]
        for i, op in enumerate(operators)
    ]
    owners = [op.owner for op in operators]
    return msgspec.msgpack.encode({"operators": table, "owners": owners})


def rank_tensors(
    rank: int,
    operators: Sequence[Op],
    state: Mapping[str, torch.Tensor],
    anchored: Callable[[int], bool] = lambda index: True,
    compute: torch.dtype | None = None,
) -> Tensors:
    """What the image of a rank holds of a state: its own, its share of the rest, all buffers and
    entries of the client.

    Args:
        state: by the names of an image, without rows; optimizer state and masters are that of anchored operators only.
        anchored: of an operator's index.
        compute: the dtype of what is not anchored.
    """
    found = {n: t for n, t in state.items() if n.startswith(("buffer/", "ckptd."))}
    for index, op in enumerate(operators):
        if op.owner not in (-1, rank):
            continue
        for name, tensor in state.items():
            if name != op.param and not (anchored(index) and name.endswith(f"/{op.param}")):
                continue
            if name.startswith("buffer/"):
                continue
            value = tensor if op.rows is None else tensor[slice(*op.rows)]
            if compute is not None and not anchored(index):
                value = value.to(compute)
            rows = "" if op.rows is None else f"[{op.rows[0]}:{op.rows[1]}]"
            found[f"{name}{rows}"] = value
    return entries(**found)
