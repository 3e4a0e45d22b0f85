"""The GPU form of the token dispatcher: the same integers as ``ckptd.core.elastic.token_dispatch``, without
the host.

That module states the problem and the method. Here each step is a kernel over all ranks and experts
(``dispatch_kernels``):

1. *quotas*: tokens that each rank computes, and those of them that it has already;

2. *match*, once within nodes if they are known, and once among all ranks: surplus and room of each expert are
laid out on two lines;

3. *share*: what one rank sends and gets, from the places where its part of the lines meets that of others.

Nothing waits for the device, and nothing but the numbers depends on the counts, so all of it can be captured
in a CUDA graph. Therefore counts are not checked: they must not be negative, nor add up to more than an int64
holds. A placement is checked once, when it is brought to the device. Triton, which torch for CUDA includes,
is imported then, and the kernels are compiled.

Complexity: ``R * E`` each, 5 launches, 12 ``[R, E]`` of int64 of device memory for a plan and 3 for a share.

Shapes: ``R`` ranks, ``E`` experts, ``L`` legs (1, or 2 where nodes are known).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Numbers of a tile: 8 for each thread of a program's default 4 warps.
_TILE = 1024
# Neighbouring columns read at once: 4 int64 are a sector of 32 bytes.
_COLUMNS = 4
_MOST_NUMBERS = 1 << 31  # kernels count in int32


class KernelsUnavailable(RuntimeError):
    """This machine cannot run the kernels; says why. The CPU form gives the same numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSends:
    """The tokens that one rank sends, to itself included; int64 on the device.

    Args:
        tokens: ``[R, E]``, tokens for each expert on each rank.
        first: ``[R, E]``, the index of the first of them among this rank's tokens of that expert; 0 if
            there are none.
    """

    tokens: Tensor
    first: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Leg:
    """Groups of ranks that exchange tokens with each other; int32 on the device.

    Args:
        order: ``[R]``, the ranks group by group.
        starts: where each group begins in ``order``, and ``R``.
        largest: the size of the largest group.
    """

    order: Tensor
    starts: Tensor
    largest: int


class DeviceDispatcher:
    """A placement on a device; made once, it plans any number of calls.

    Args:
        replicas: int64 ``[R, E]``, replicas of each expert on each rank.
        device: where the counts will be.
        nodes: ``[R]``, the number of each rank's node; None: as if every rank had a node of its own.
    Raises:
        ValueError: invalid tensors, or an expert that no rank holds.
        KernelsUnavailable: Triton is not installed, or cannot compile or start the kernels.
    """

    def __init__(self, replicas: Tensor, device: torch.device | str, *, nodes: Tensor | None = None) -> None:
        replicas_RE = _checked(replicas.cpu())
        self.shape = (len(replicas_RE), replicas_RE.shape[1])
        self.device = torch.device(device)
        groupings = _groupings(nodes, len(replicas_RE))
        self._kernels = _kernels()
        self._replicas = replicas_RE.to(self.device)
        self._upto = replicas_RE.cumsum(0).to(self.device)
        self._holders = replicas_RE.sum(0).to(self.device)
        self._legs = [_leg(groups, self.device) for groups in groupings]
        self._groups = torch.stack(groupings).to(torch.int32).to(self.device)
        self._compile()

    def plan(self, tokens: Tensor) -> DeviceDispatch:
        """Decide where every token goes; the host does not wait for the device.

        Args:
            tokens: int64 ``[R, E]`` on the device, tokens of each rank for each expert, none negative;
                rows may have gaps between them.
        Raises:
            ValueError: another shape, dtype or device.
        """
        if tokens.shape != self.shape or tokens.dtype != torch.int64:
            raise ValueError(
                f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}; this placement needs "
                f"int64 of {self.shape}"
            )
        if tokens.device.type != self.device.type:
            raise ValueError(f"tokens are on {tokens.device}, the placement is on {self.device}")
        tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
        ranks, experts = self.shape
        with torch.cuda.device_of(tokens):
            quotas = torch.empty(self.shape, dtype=torch.int64, device=tokens.device)
            state = quotas.new_empty((len(self._legs) + 1, 2, ranks, experts))
            lines = quotas.new_empty((len(self._legs), 2, ranks, experts))
            self._write_quotas(tokens, quotas, state)
            for number, leg in enumerate(self._legs):
                self._match(number, leg, tokens, quotas, state, lines)
        return DeviceDispatch(quotas, state[0, 0], state, lines, self)

    def _compile(self) -> None:
        """Plan for no tokens: a machine that cannot is known at once, and the first call is fast."""
        try:
            self.plan(torch.zeros_like(self._replicas)).share(0)
        # The errors of compilers, linkers and drivers have no common base; each means that the CPU must plan.
        except Exception as error:
            raise KernelsUnavailable(f"{type(error).__name__}: {error}") from error

    def _write_quotas(self, tokens: Tensor, quotas: Tensor, state: Tensor) -> None:
        ranks, experts = self.shape
        columns = _block(experts)
        rows = max(1, _TILE // columns)
        self._kernels.quotas_kernel[(_blocks(ranks, rows),)](
            tokens,
            tokens.stride(0),
            tokens.sum(0),
            self._replicas,
            self._upto,
            self._holders,
            quotas,
            state,
            ranks,
            experts,
            BLOCK_R=rows,
            BLOCK_E=columns,
            num_warps=_warps(rows * columns),
        )

    def _match(
        self, number: int, leg: _Leg, tokens: Tensor, quotas: Tensor, state: Tensor, lines: Tensor
    ) -> None:
        ranks, experts = self.shape
        rows = _block(leg.largest)
        columns = max(_COLUMNS if rows <= 4 * _TILE else 1, min(_TILE // rows, _block(experts)))
        self._kernels.match_kernel[(len(leg.starts) - 1, _blocks(experts, columns))](
            tokens,
            tokens.stride(0),
            quotas,
            state,
            lines,
            leg.order,
            leg.starts,
            number,
            ranks,
            experts,
            BLOCK_R=rows,
            BLOCK_E=columns,
            num_warps=_warps(rows * columns),
        )

    def _share(self, rank: int, state: Tensor, lines: Tensor) -> Tensor:
        """``[3, R, E]``: tokens that ``rank`` sends, the first of them, tokens that it gets."""
        ranks, experts = self.shape
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks} ranks")
        columns = min(_block(experts), 128)
        rows = _TILE // columns
        with torch.cuda.device_of(state):
            shared = state.new_empty((3, ranks, experts))
            self._kernels.share_kernel[(_blocks(ranks, rows), _blocks(experts, columns))](
                state,
                lines,
                self._groups,
                rank,
                shared,
                ranks,
                experts,
                LEGS=len(self._legs),
                BLOCK_R=rows,
                BLOCK_E=columns,
                num_warps=_warps(rows * columns),
            )
        return shared


@dataclass(frozen=True, slots=True, eq=False)
class DeviceDispatch:
    """Where every token goes; made by :meth:`DeviceDispatcher.plan`. int64 on the device.

    Args:
        quotas: ``[R, E]``, tokens that each rank computes for each expert.
        kept: ``[R, E]``, those of them that were on that rank already.
    """

    quotas: Tensor
    kept: Tensor
    _state: Tensor
    _lines: Tensor
    _dispatcher: DeviceDispatcher

    def share(self, rank: int) -> tuple[DeviceSends, Tensor]:
        """The result of `sends` and of `receives`, in one launch.

        Raises:
            ValueError: there is no such rank.
        """
        sent, first, received = self._dispatcher._share(rank, self._state, self._lines).unbind()
        return DeviceSends(sent, first), received

    def sends(self, rank: int) -> DeviceSends:
        """What ``rank`` sends to each rank."""
        return self.share(rank)[0]

    def receives(self, rank: int) -> Tensor:
        """``[R, E]``: tokens for each expert that ``rank`` gets from each rank, itself included."""
        return self.share(rank)[1]


def _kernels() -> Any:
    try:
        from ckptd.cuda import dispatch_kernels
    except ImportError as error:
        raise KernelsUnavailable(f"Triton is not installed ({error})") from error
    return dispatch_kernels


def _checked(replicas: Tensor) -> Tensor:
    if replicas.ndim != 2 or replicas.dtype != torch.int64 or not replicas.numel():
        raise ValueError(
            f"replicas are {replicas.dtype} of shape {tuple(replicas.shape)}: they must be int64 "
            "with a row for each rank and a column for each expert"
        )
    if replicas.numel() * 6 >= _MOST_NUMBERS:
        raise ValueError(f"replicas of shape {tuple(replicas.shape)} are too many for the kernels")
    if int(replicas.min()) < 0:
        raise ValueError("replicas has negative numbers of replicas")
    lonely = torch.nonzero(replicas.sum(0) == 0).flatten().tolist()
    if lonely:
        raise ValueError(f"no rank holds expert {lonely[0]}: place at least one replica of it")
    return replicas


def _groupings(nodes: Tensor | None, ranks: int) -> list[Tensor]:
    """For each leg the group of each rank, numbered from 0."""
    everyone = torch.zeros(ranks, dtype=torch.int64)
    if nodes is None:
        return [everyone]
    if nodes.shape != (ranks,) or nodes.is_floating_point():
        raise ValueError(
            f"nodes are {nodes.dtype} of shape {tuple(nodes.shape)}: integers for {ranks} ranks are needed"
        )
    return [torch.unique(nodes.cpu(), return_inverse=True)[1], everyone]


def _leg(groups: Tensor, device: torch.device) -> _Leg:
    sizes = torch.bincount(groups)
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    order = torch.argsort(groups, stable=True)
    return _Leg(order.to(torch.int32).to(device), starts.to(torch.int32).to(device), int(sizes.max()))


def _block(size: int) -> int:
    """The power of two that holds ``size``; at least 16, so that small sizes share a compilation."""
    return max(16, 1 << (size - 1).bit_length())


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _warps(numbers: int) -> int:
    """About 8 numbers of a tile for each thread, as far as a program may have that many threads."""
    return max(4, min(32, numbers // 256))
