"""Which transfers a list of copies becomes: large dense tensors each by itself, runs of small ones
and casts through a pack.

A list of copies is planned once and used at every boundary for which it is handed over again: what
is left to do in the training thread is then two or three calls into torch, whatever the number of
tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ckptd.cuda.engine import CopyItem

__all__ = ["PACK_BYTES", "CopyTransfers", "Pack", "plan_transfers"]

# What crosses the link at a stretch, a third of a millisecond at 50 GB/s, and the length of the
# pack. A copy engine goes on with one stream while that has a copy that is ready, whatever its
# priority: the trainer's own small copies (the size of a `nonzero`, an `item`) would wait for the
# whole snapshot. A kernel between two copies makes the engine look at the other streams. Observed
# by TorchRec, https://github.com/meta-pytorch/torchrec/pull/4315 and /4339.
PACK_BYTES = 16 << 20
# What is dense and at least this long needs no pack. A launch takes the training thread about 8 us
# for each tensor; packed, under 1 us (measured on an H100, bench.gpu), and packing is a copy at the
# speed of the device's memory.
SMALL_BYTES = 4 << 20
# What a pack's address is a multiple of, so that items are as aligned in it as they are in the image.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Pack:
    """Adjacent blocks of the image that cross the link together.

    Args:
        places: views of the pack, one for each of ``tensors``, with its shape and the image's dtype.
        lead: where in the pack it begins, in bytes.
    """

    places: list[Tensor]
    tensors: list[Tensor]
    offset: int
    nbytes: int
    lead: int


@dataclass(slots=True)
class CopyTransfers:
    """What is done with the items of one list, in any order.

    Args:
        pack: ``uint8``, on the device: what ``packs`` go through, one after the other on one stream.
        direct: flat ``uint8`` views of tensors on the device, or of parts of them, that need no pack.
        stretches: which of ``direct`` cross the link at a stretch.
        sizes: of the bytes before, of and between them in the image, alternately, from ``begin`` on.
        host: items that are in the host's memory already.
    """

    pack: Tensor
    direct: list[Tensor] = field(default_factory=list)
    stretches: list[slice] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    begin: int = 0
    packs: list[Pack] = field(default_factory=list)
    host: list[CopyItem] = field(default_factory=list)

    def send(self, image: Tensor) -> None:
        """Copy to the host's memory (``uint8``, which begins with the image), on the current stream."""
        for item in self.host:
            view = item.view()
            _place(item, view, image).copy_(view)
        for pack in self.packs:
            torch._foreach_copy_(pack.places, pack.tensors)
            image[pack.offset : pack.offset + pack.nbytes].copy_(
                self.pack[pack.lead : pack.lead + pack.nbytes], non_blocking=True
            )
        places = self._places(image)
        for part in self.stretches:
            torch._foreach_copy_(places[part], self.direct[part], non_blocking=True)
            self.pack[-1:].zero_()  # makes way; nothing else uses this byte

    def receive(self, image: Tensor) -> None:
        """Copy from the host's memory into the tensors, on the current stream."""
        for item in self.host:
            view = item.view()
            view.copy_(_place(item, view, image))
        for pack in self.packs:
            self.pack[pack.lead : pack.lead + pack.nbytes].copy_(
                image[pack.offset : pack.offset + pack.nbytes], non_blocking=True
            )
            torch._foreach_copy_(pack.tensors, pack.places)
        places = self._places(image)
        for part in self.stretches:
            torch._foreach_copy_(self.direct[part], places[part], non_blocking=True)

    def _places(self, image: Tensor) -> list[Tensor]:
        """Where each of ``direct`` belongs."""
        if not self.direct:
            return []
        end = self.begin + sum(self.sizes)
        return list(image[self.begin : end].split_with_sizes(self.sizes)[1::2])


def _place(item: CopyItem, view: Tensor, image: Tensor) -> Tensor:
    raw = image[item.offset : item.offset + item.nbytes]
    return raw.view(item.dtype).view(view.shape)


@dataclass(frozen=True, slots=True)
class _Block:
    view: Tensor
    offset: int
    nbytes: int


def plan_transfers(
    items: Sequence[CopyItem], pack: Tensor, *, small_bytes: int = SMALL_BYTES
) -> CopyTransfers:
    """The transfers for ``items``, which do not overlap.

    Args:
        pack: ``uint8``, on the device: what small and cast items go through, in parts where they are larger.
        small_bytes: dense tensors from this size on need no pack.

    Raises:
        RuntimeError, ValueError: an item's bytes do not fit its shape, or those of two dense ones overlap.
    """
    found = CopyTransfers(pack)
    run: list[tuple[_Block, torch.dtype]] = []
    limit = pack.numel() - _ALIGNMENT

    def flush() -> None:
        if run:
            found.packs.append(_packed(run, pack))
            run.clear()

    end = None
    for item in sorted((i for i in items if i.nbytes), key=lambda i: i.offset):
        view = item.view().detach()
        if view.numel() * item.dtype.itemsize != item.nbytes:
            raise ValueError(f"{tuple(view.shape)} of {item.dtype} are not {item.nbytes} bytes")
        if view.device.type != pack.device.type:
            found.host.append(item)
        elif view.dtype is item.dtype and item.nbytes >= small_bytes and view.is_contiguous():
            if end is None:
                found.begin = end = item.offset
            if item.offset < end:
                raise ValueError(f"two items overlap at byte {item.offset}")
            gap = item.offset - end
            for part in view.view(-1).view(torch.uint8).split(pack.numel()):
                found.direct.append(part)
                found.sizes += [gap, part.numel()]
                gap = 0
            end = item.offset + item.nbytes
        else:
            for block in _blocks(view, item.dtype, item.offset, limit):
                if run and not _joins(run, block, limit):
                    flush()
                run.append((block, item.dtype))
    flush()
    found.stretches = _stretches([t.numel() for t in found.direct], pack.numel())
    return found


def _stretches(sizes: Sequence[int], limit: int) -> list[slice]:
    """Neighbours that are ``limit`` bytes together, at most; each is no longer than that by itself."""
    found: list[slice] = []
    first = total = 0
    for i, size in enumerate(sizes):
        if total and total + size > limit:
            found.append(slice(first, i))
            first, total = i, 0
        total += size
    if total:
        found.append(slice(first, len(sizes)))
    return found


def _joins(run: list[tuple[_Block, torch.dtype]], block: _Block, limit: int) -> bool:
    """Whether the run may go on with this block: it follows immediately, and there is room."""
    first, last = run[0][0], run[-1][0]
    adjacent = last.offset + last.nbytes == block.offset
    return adjacent and block.offset + block.nbytes - first.offset <= limit


def _packed(run: list[tuple[_Block, torch.dtype]], pack: Tensor) -> Pack:
    first, last = run[0][0], run[-1][0]
    lead = first.offset % _ALIGNMENT
    shift = lead - first.offset
    places = [
        pack[p.offset + shift : p.offset + shift + p.nbytes].view(dtype).view(p.view.shape)
        for p, dtype in run
    ]
    nbytes = last.offset + last.nbytes - first.offset
    return Pack(places, [p.view for p, _ in run], first.offset, nbytes, lead)


def _blocks(view: Tensor, dtype: torch.dtype, offset: int, limit: int) -> Iterator[_Block]:
    """Parts of at most ``limit`` bytes, each dense in the image."""
    nbytes = view.numel() * dtype.itemsize
    if nbytes <= limit:
        yield _Block(view, offset, nbytes)
    elif view.is_contiguous():
        flat = view.view(-1)
        step = limit // dtype.itemsize
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            yield _Block(part, offset + start * dtype.itemsize, part.numel() * dtype.itemsize)
    elif view.shape[0] == 1:
        yield from _blocks(view[0], dtype, offset, limit)
    else:
        row = nbytes // view.shape[0]
        rows = max(1, limit // row)
        for start in range(0, view.shape[0], rows):
            yield from _blocks(view[start : start + rows], dtype, offset + start * row, limit)
