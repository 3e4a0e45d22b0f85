"""Gradients of a stage, summed over micro-batches and pipelines in one order, whoever computed which.

Floating-point sums depend on their order. The order here is that of an undisturbed job: the micro-batches
of each pipeline by number, then the pipelines by number. A worker keeps one sum of a pipeline as long as it
has its micro-batches from the first on without a gap, and each later one by itself: a *part*.

Every worker of the stage owns a slice of all elements. It receives this slice of all parts, sums up, and
sends the result to the others. What a peer sends follows from the plan, so nobody asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Part = tuple[int, int]
"""A pipeline, and the first micro-batch of what was summed up."""

Exchange = Callable[[Mapping[int, list[Tensor]], Mapping[int, list[Tensor]]], None]
"""Sends tensors to workers (pipelines of this stage), and fills tensors with what they send, in order."""

_DIGEST_BYTES = 8


def parts_of(order: Iterable[Part]) -> tuple[Part, ...]:
    """The parts that a worker has in the end, from the micro-batches of its second phases in order.

    Example: ``[(0, 0), (1, 0), (0, 1), (1, 2)]`` -> ``(0, 0), (1, 0), (1, 2)``
    """
    upto: dict[int, int] = {}
    found = []
    for pipeline, micro_batch in order:
        if micro_batch == upto.get(pipeline, 0):
            upto[pipeline] = micro_batch + 1
            if micro_batch:
                continue
        found.append((pipeline, micro_batch))
    return tuple(sorted(found))


class GradientParts:
    """The parts of this worker.

    Args:
        params: of the stage. Their ``grad`` is taken after each second phase.
        separate: False: one sum of everything, in the order of the schedule.
    """

    def __init__(self, params: Sequence[nn.Parameter], *, separate: bool = True) -> None:
        self._params, self._separate = params, separate
        self._upto: dict[int, int] = {}
        self.held: dict[Part, list[Tensor | None]] = {}

    def take(self, pipeline: int, micro_batch: int) -> None:
        """Take the gradients of a micro-batch from the parameters."""
        grads = [p.grad for p in self._params]
        for param in self._params:
            param.grad = None
        if not self._separate:
            self._add((0, 0), grads)
        elif micro_batch == self._upto.get(pipeline, 0):
            self._upto[pipeline] = micro_batch + 1
            self._add((pipeline, 0), grads)
        else:
            self.held[pipeline, micro_batch] = grads

    def _add(self, part: Part, grads: list[Tensor | None]) -> None:
        self.held[part] = [
            _sum(a, b) for a, b in zip(self.held.get(part, [None] * len(grads)), grads, strict=True)
        ]


def _sum(sum_: Tensor | None, more: Tensor | None) -> Tensor | None:
    if sum_ is None or more is None:
        return more if sum_ is None else sum_
    return sum_.add_(more)


@dataclass(frozen=True, slots=True)
class _Slice:
    """A part of all elements, and the parameters in it."""

    begin: int
    end: int


def sum_parts(
    params: Sequence[nn.Parameter],
    mine: Mapping[Part, list[Tensor | None]],
    parts: Mapping[int, Sequence[Part]],
    worker: int,
    exchange: Exchange,
    *,
    micro_batches: int,
    pipelines: int,
) -> None:
    """Set ``grad`` of all parameters to the mean over all micro-batches of all pipelines.

    Args:
        mine: of each part of this worker, a gradient for each parameter; None where it has none.
        parts: of each worker that is there, in the order in which it sends them.
        micro_batches: that each sum of a pipeline is divided by.
        pipelines: that the sum of all pipelines is divided by.
    Raises:
        ValueError: the parameters of a peer have other names, shapes or types.
    """
    present = torch.tensor([[g is not None for g in mine[part]] for part in parts[worker]], dtype=torch.uint8)
    tables = _tables(params, present.reshape(-1, len(params)), parts, worker, exchange)
    summed = [tables[w][i] for w in parts for i in range(len(parts[w]))]
    any_grad = torch.stack(summed).any(dim=0).tolist() if summed else [False] * len(params)
    for dtype in dict.fromkeys(p.dtype for p in params):
        of = [i for i, p in enumerate(params) if p.dtype == dtype and any_grad[i]]
        if of:
            chosen = [params[i] for i in of]
            flat = _sum_flat(chosen, of, mine, parts, tables, worker, exchange, micro_batches)
            flat.div_(pipelines)
            for i, piece in zip(of, torch.split(flat, [p.numel() for p in chosen]), strict=True):
                params[i].grad = piece.view(params[i].shape).clone()


def _tables(
    params: Sequence[nn.Parameter],
    present: Tensor,
    parts: Mapping[int, Sequence[Part]],
    worker: int,
    exchange: Exchange,
) -> dict[int, Tensor]:
    """Which parameters have a gradient in which part of each worker."""
    layout = "".join(f"{tuple(p.shape)}{p.dtype};" for p in params).encode()
    digested = hashlib.blake2b(layout, digest_size=_DIGEST_BYTES).digest()
    digest = torch.tensor(list(digested), dtype=torch.uint8)
    others = [w for w in parts if w != worker]
    message = torch.cat([digest, present.flatten()])
    sizes = {w: _DIGEST_BYTES + len(parts[w]) * len(params) for w in others}
    got = {w: torch.zeros(size, dtype=torch.uint8) for w, size in sizes.items()}
    exchange({w: [message] for w in others}, {w: [t] for w, t in got.items()})
    for w, table in got.items():
        if not torch.equal(table[:_DIGEST_BYTES], digest):
            raise ValueError(
                f"this stage has other parameters in pipeline {w} than in pipeline {worker}: "
                "its work cannot be re-routed"
            )
    tables = {w: table[_DIGEST_BYTES:].view(-1, len(params)) for w, table in got.items()}
    return tables | {worker: present}


def _sum_flat(
    params: Sequence[nn.Parameter],
    numbers: Sequence[int],
    mine: Mapping[Part, list[Tensor | None]],
    parts: Mapping[int, Sequence[Part]],
    tables: Mapping[int, Tensor],
    worker: int,
    exchange: Exchange,
    micro_batches: int,
) -> Tensor:
    """The sum of all parts, flat."""
    sizes = [p.numel() for p in params]
    total, owners = sum(sizes), sorted(parts)
    bounds = [total * i // len(owners) for i in range(len(owners) + 1)]
    slices = {w: _Slice(*bounds[i : i + 2]) for i, w in enumerate(owners)}
    flats = {part: _flat(params, [mine[part][i] for i in numbers]) for part in parts[worker]}
    others = [w for w in owners if w != worker]
    own = slices[worker]
    got = {w: {part: params[0].new_empty(own.end - own.begin) for part in parts[w]} for w in others}
    exchange(
        {w: [flats[part][slices[w].begin : slices[w].end] for part in parts[worker]] for w in others},
        {w: list(each.values()) for w, each in got.items()},
    )
    got[worker] = {part: flat[own.begin : own.end] for part, flat in flats.items()}
    whole = params[0].new_empty(total)
    whole[own.begin : own.end] = _fold(got, parts, tables, numbers, sizes, own, micro_batches)
    results = {w: whole[s.begin : s.end] for w, s in slices.items()}
    exchange({w: [results[worker]] for w in others}, {w: [results[w]] for w in others})
    return whole


def _flat(params: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> Tensor:
    zeros = (torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True))
    return torch.cat([g.detach().reshape(-1) for g in zeros])


def _fold(
    got: Mapping[int, Mapping[Part, Tensor]],
    parts: Mapping[int, Sequence[Part]],
    tables: Mapping[int, Tensor],
    numbers: Sequence[int],
    sizes: Sequence[int],
    own: _Slice,
    micro_batches: int,
) -> Tensor:
    """Sum up a slice: within each parameter the parts that have a gradient of it."""
    order = sorted((part, w, i) for w in parts for i, part in enumerate(parts[w]))
    out = torch.zeros_like(next(t for each in got.values() for t in each.values()))
    begin = 0
    for number, size in zip(numbers, sizes, strict=True):
        low, high = max(begin, own.begin) - own.begin, min(begin + size, own.end) - own.begin
        begin += size
        if low >= high:
            continue
        sums: dict[int, Tensor] = {}
        for part, w, i in order:
            if tables[w][i, number]:
                piece = got[w][part][low:high]
                sums[part[0]] = sums[part[0]] + piece if part[0] in sums else piece
        total: Tensor | None = None
        for pipeline in sorted(sums):
            scaled = sums[pipeline].div(micro_batches)
            total = scaled if total is None else total.add_(scaled)
        if total is not None:
            out[low:high] = total
    return out
