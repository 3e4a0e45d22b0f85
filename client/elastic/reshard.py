"""Shards for another number of ranks, from those of all ranks: weights and optimizer state.

Pure: it reads the ``state_dict()`` of ``ExpertShards`` and of their optimizer on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ckptd.client.elastic.layer.expert_tensors import cut, joined

__all__ = ["recut"]

_EXTRA = "_extra_state"


def recut(
    weights: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]], ranks: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each of ``ranks`` ranks, the states that its ``ExpertShards`` and their optimizer load.

    No element changes, and its optimizer state goes with it.

    Args:
        weights: by rank, the state of its shards.
        optimizers: by rank, the state of their optimizer. Tensors as long as a shard are cut like
            it; anything else (the number of steps) must be equal on all ranks.
    Raises:
        ValueError: states of some ranks are missing or twice, or they are not of one job.
    """
    _check(weights, optimizers, ranks)
    extra = weights[0][_EXTRA]
    new_weights: list[dict[str, Any]] = [{} for _ in range(ranks)]
    new_states: list[dict[int, Any]] = [{} for _ in range(ranks)]
    for name, numel in extra["numels"].items():
        shards = [one[name] for one in weights]
        for to, shard in zip(new_weights, _recut(shards, numel, ranks), strict=True):
            to[name] = shard
        place = extra["places"][name]
        states = [one["state"].get(place) for one in optimizers]
        if any(state is not None for state in states):
            for rank, state in enumerate(_states(name, states, shards, numel, ranks)):
                new_states[rank][place] = state
    for rank, one in enumerate(new_weights):
        one[_EXTRA] = {**extra, "ranks": ranks, "rank": rank}
    return [
        (one, {**optimizers[0], "state": state}) for one, state in zip(new_weights, new_states, strict=True)
    ]


def _check(weights: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]], ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: there is at least one")
    if not weights or len(weights) != len(optimizers):
        raise ValueError(f"{len(weights)} states of shards, and {len(optimizers)} of optimizers")
    extras = [one[_EXTRA] for one in weights]
    if [extra["rank"] for extra in extras] != list(range(extras[0]["ranks"])):
        raise ValueError(
            f"the states are of the ranks {[extra['rank'] for extra in extras]}: all "
            f"{extras[0]['ranks']} are needed, in their order"
        )
    for rank, extra in enumerate(extras):
        if any(extra[key] != extras[0][key] for key in ("ranks", "numels", "places")):
            raise ValueError(f"the state of rank {rank} is of other shards than that of rank 0")


def _recut(shards: Sequence[Tensor], numel: int, ranks: int) -> list[Tensor]:
    # Copies: a view would keep the tensor of all ranks alive, and a file would contain it.
    return [row.clone() for row in cut(joined(shards, numel), ranks)]


def _states(
    name: str,
    states: Sequence[Mapping[str, Any] | None],
    shards: Sequence[Tensor],
    numel: int,
    ranks: int,
) -> list[dict[str, Any]]:
    """The optimizer's state of one parameter, by rank."""
    known = [state for state in states if state is not None]
    if len(known) < len(states) or any(state.keys() != known[0].keys() for state in known):
        raise ValueError(f"the optimizer states of {name} are not of one step")
    found: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for key, value in known[0].items():
        values = [state[key] for state in known]
        if isinstance(value, Tensor) and value.shape == shards[0].shape:
            parts: Sequence[Any] = _recut(values, numel, ranks)
        elif all(_same(one, value) for one in values):
            parts = [value.clone() if isinstance(value, Tensor) else value for _ in found]
        else:
            raise ValueError(
                f"{key} in the optimizer's state of {name} differs between ranks and is not as "
                "long as a shard"
            )
        for state, part in zip(found, parts, strict=True):
            state[key] = part
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
