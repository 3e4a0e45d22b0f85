"""Samples: a few elements of every copied tensor, read in place, to find torn copies.

Not every write moves a version counter: ``p.data.mul_(…)``, a numpy view, a foreign kernel. So elements are
read three times: at the top of the step, in the finished copy, and in the tensors once the copy is
complete, before the optimizer's step at the latest. The copy must hold the values of the top; comparing it
with the tensors alone would not show a write before the copy, because that is in both. And the tensors must
still hold them: if not, something wrote during the copy, which may be torn where no sample is.

All samples of a snapshot are read in one vectorised gather, so thousands of small tensors cost what a few
large ones do: the machine words at their addresses, out of one array that spans from the lowest address to
the highest. Nothing between them is read.

Positions are the first and the last element, and one in each stretch between them. They change with each
snapshot, at distances of the golden ratio, so that a regular write hits one in time. The same snapshot number
gives the same positions, so that a run can be repeated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Samples of one tensor: the fewest, and one for each MiB more, within bounds. Reading an uncached word takes
# about 10 ns of the training thread: 16,000 of them 150 us (2,000 tensors), 3,200 of them 50 us (50 tensors
# of a GiB).
_FEWEST = 8
_MOST = 64
_PER_SAMPLE_BYTES = 1 << 20
# Of all tensors together, but at least two of each.
_MOST_PER_KERNEL = 1 << 15

_GOLDEN = 2_654_435_769  # 2**32 divided by the golden ratio
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Words = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


class Sampled(Protocol):
    """The description of a copy: ``view()``, rows of ``tensor``, goes to ``offset`` as ``dtype``."""

    @property
    def tensor(self) -> Tensor: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def view(self) -> Tensor: ...


class AddressSpan:
    """Memory from an address on, as numpy and torch import it: nothing is copied or read."""

    def __init__(self, address: int, words: int, *, device: bool) -> None:
        about = {"data": (address, False), "shape": (words,), "typestr": "<i8", "version": 3}
        setattr(self, "__cuda_array_interface__" if device else "__array_interface__", about)


class SamplePlan:
    """The possible samples of some copies; valid as long as their tensors are the same.

    Args:
        items: the copies, on one device; tensors elsewhere, and empty ones, have no samples.
        device: where the tensors are.
    """

    def __init__(self, items: Sequence[Sampled], device: torch.device) -> None:
        self.device = device
        self._places: list[_Place] = [
            _Place(number, item)
            for number, item in enumerate(items)
            if item.nbytes and item.tensor.device.type == device.type
        ]
        self._numbers = [p.number for p in self._places]
        self._tensors = [p.tensor for p in self._places]
        self._at = [p.tensor.data_ptr() for p in self._places]
        self._span: Any = None
        if self._places:
            self._lay_out()

    def __len__(self) -> int:
        """The number of copies with samples."""
        return len(self._places)

    def draw(self, number: int, *, in_place: int = 0) -> Samples:
        """The samples of snapshot ``number``.

        Args:
            in_place: the caller has just found this many of the first items in their places, so the first
                reading does not check them again. Checking thousands of tensors takes longer than all
                else here.
        """
        checked = bisect_left(self._numbers, in_place)
        if not self._places:
            nothing = np.empty(0, np.int64)
            return Samples(self, nothing.view(np.uint64), nothing, nothing, checked)
        turn = self._turns + np.uint32(number * _GOLDEN & 0xFFFF_FFFF)  # wraps around
        within = turn * self._lengths
        within >>= np.uint64(32)
        addresses = self._address_of(within)
        return Samples(self, within, addresses, addresses >> 3, checked)

    def moved(self, first: int = 0) -> bool:
        """Whether a tensor's memory has moved; then it must not be read at the old place.

        Args:
            first: index of the first tensor to check, of those that have samples.
        """
        return list(map(Tensor.data_ptr, self._tensors[first:])) != self._at[first:]

    @property
    def span(self) -> Any:
        """An array of words over everything, for numpy or, on a device, for torch."""
        if self._span is None:
            there = self.device.type != "cpu"
            span = AddressSpan(self.base, self._num_words, device=there)
            self._span = torch.as_tensor(span, device=self.device) if there else np.asarray(span).view("u8")
        return self._span

    # -- for Samples -------------------------------------------------------------------------------

    def differ(self, samples: Samples, first: Words, last: Words) -> set[int]:
        """The items with a sampled element that differs between ``first`` and ``last``."""
        # A word may contain elements of another tensor.
        of = np.flatnonzero(first != last)
        addresses, masks = samples.addresses[of], self._masks[of]
        differs = _bits(first[of], addresses, masks) != _bits(last[of], addresses, masks)
        return self._items_of(self._owners[of][differs])

    def _items_of(self, owners: npt.NDArray[np.int32]) -> set[int]:
        return {self._places[i].number for i in set(owners.tolist())}

    def items_moved(self) -> set[int]:
        """The items whose memory has moved."""
        pairs = zip(self._places, self._at, strict=True)
        return {p.number for p, address in pairs if p.tensor.data_ptr() != address}

    def unlike(self, samples: Samples, words: Words, image: Words, base: int) -> set[int]:
        """The items whose copies, in an image that begins at ``base`` of ``image``'s bytes, do not hold the
        values of ``words``.
        """
        of: Any = slice(None)
        if self._copy_shift is not None and not base & 7:
            # Equal words have equal elements. In other words an element of another tensor may differ.
            there = np.take(image, samples.index + self._copy_shift + (base >> 3))
            of = np.flatnonzero(there != words)
        element = (self._begins[of] + samples.within[of]).view(np.int64)
        position = self._offsets[of] + element * self._image_sizes[of]
        position += base
        copied = _bits(np.take(image, position >> 3), position, self._image_masks[of])
        values = _bits(words[of], samples.addresses[of], self._masks[of])
        differs = values != copied
        for cast, source, target in self._casts:
            differs[cast] = _differ_when_cast(values[cast], copied[cast], source, target)
        return self._items_of(self._owners[of][differs])

    # -- made once ---------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        places = self._places
        fewest = max(2, min(_FEWEST, _MOST_PER_KERNEL // len(places)))
        counts = np.array([p.samples(fewest) for p in places], np.int64)
        total = int(counts.sum())

        def each(values: Any, dtype: Any = np.int64) -> Any:
            return np.repeat(np.array(values, dtype), counts)

        self._owners = np.repeat(np.arange(len(places), dtype=np.int32), counts)
        nth = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        self._begins, self._lengths = _stretches(nth, each([p.elements for p in places]), each(counts))
        self._turns = np.random.default_rng(0).integers(0, 1 << 32, total, dtype=np.uint64).astype(np.uint32)
        self.base = min(p.start for p in places) & ~7
        starts = each([p.start - self.base for p in places])
        self._sizes = each([p.size for p in places])
        self._offsets = each([p.offset for p in places])
        self._image_sizes = each([p.image_dtype.itemsize for p in places])
        self._image_masks = each([p.image_mask for p in places], np.uint64)
        self._masks = each([p.mask for p in places], np.uint64)
        # Tensors with gaps: how an element's number becomes steps along each dimension.
        self._strided = np.flatnonzero(each([p.strides is not None for p in places], np.bool_))
        dims = max((len(p.shape) for p in places if p.strides is not None), default=1)
        strided = [p.padded(dims) for p in places if p.strides is not None]
        of = np.repeat(np.arange(len(strided)), counts[[p.strides is not None for p in places]])
        self._steps = np.array(strided, np.int64).reshape(-1, 3, dims)[of]
        self._strided_starts = starts[self._strided]
        self._stretch_starts = starts + self._begins.view(np.int64) * self._sizes
        pairs = {(p.tensor.dtype, p.image_dtype) for p in places if p.casts}
        self._casts = [
            (np.flatnonzero(each([(p.tensor.dtype, p.image_dtype) == pair for p in places], np.bool_)), *pair)
            for pair in sorted(pairs, key=str)
        ]
        # From the word of a sample to that of its copy, where both have the same position in their words.
        shift = self._offsets - starts
        aligned = all(p.strides is None and not p.casts for p in places) and not (shift & 7).any()
        self._copy_shift: Indices | None = shift >> 3 if aligned else None
        self._num_words = (max(p.highest for p in places) - self.base + 7) >> 3

    def _address_of(self, within: Words) -> Indices:
        address: Indices = within.view(np.int64) * self._sizes
        address += self._stretch_starts
        if len(self._strided):
            number = (self._begins + within).view(np.int64)[self._strided, None]
            divisor, size, stride = self._steps[:, 0], self._steps[:, 1], self._steps[:, 2]
            steps = (number // divisor % size * stride).sum(1)
            address[self._strided] = self._strided_starts + steps
        return address


@dataclass(slots=True, weakref_slot=True, eq=False)
class Samples:
    """The samples of one snapshot: their places, and the words found there at each reading of an engine.

    Args:
        within: the number of each sample within its stretch.
        addresses: in bytes from the beginning of ``plan.span`` on.
        index: the words of ``plan.span`` that contain them.
        checked: this many of the plan's first tensors are known to be in place, until the first reading.
        prepared: what a device's engine keeps for the second reading.
    """

    plan: SamplePlan
    within: Words
    addresses: Indices
    index: Indices
    checked: int = 0
    found: list[Words] = field(default_factory=list)
    moved: set[int] = field(default_factory=set)
    prepared: Any = None

    def can_be_read(self) -> bool:
        """Whether there are samples, all in place. What has moved since the plan was made counts as
        changed.
        """
        checked, self.checked = self.checked, 0
        if self.plan.moved(checked):
            self.moved |= self.plan.items_moved()
        return bool(len(self.plan)) and not self.moved

    def changed(self) -> set[int]:
        """The items that do not hold the values of the first reading any more."""
        found = set(self.moved)
        if len(self.found) > 1 and not np.array_equal(self.found[0], self.found[-1]):
            found |= self.plan.differ(self, self.found[0], self.found[-1])
        return found

    def unlike(self, image: Words, base: int) -> set[int]:
        """The items whose copies do not hold the values of the first reading.

        Args:
            image: the words of the memory that was copied to.
            base: where the image begins in it, in bytes.
        """
        if not self.found:
            return set(self.moved)
        return self.moved | self.plan.unlike(self, self.found[0], image, base)


class _Place:
    """An item in memory: ``elements`` from the address ``start`` on, each ``size`` bytes; with ``strides`` if
    they have gaps.
    """

    # There are thousands, and each collection of garbage visits their dictionaries, too.
    __slots__ = (
        *("number", "tensor", "offset", "start", "elements", "size", "shape", "strides"),
        *("image_dtype", "mask", "image_mask"),
    )

    def __init__(self, number: int, item: Sampled) -> None:
        view = item.view()
        self.number, self.tensor = number, item.tensor
        self.offset, self.image_dtype = item.offset, item.dtype
        self.start, self.elements, self.size = view.data_ptr(), view.numel(), view.element_size()
        self.shape = tuple(view.shape)
        self.strides = None if view.is_contiguous() else view.stride()
        self.mask = (1 << 8 * self.size) - 1
        self.image_mask = (1 << 8 * item.dtype.itemsize) - 1
        if self.start % self.size and view.dtype is item.dtype:
            # Elements may span two words: compare the part of each that is certain to be in one.
            self.mask = self.image_mask = (1 << 8 * (self.start & -self.start)) - 1

    @property
    def casts(self) -> bool:
        return self.tensor.dtype is not self.image_dtype

    def samples(self, fewest: int) -> int:
        more = self.elements * self.size // _PER_SAMPLE_BYTES
        return min(self.elements, max(fewest, min(_MOST, fewest + more)))

    def padded(self, dims: int) -> tuple[list[int], list[int], list[int]]:
        """Divisors, sizes and strides in bytes of the dimensions, preceded by ones."""
        assert self.strides is not None
        shape = [1] * (dims - len(self.shape)) + list(self.shape)
        strides = [0] * (dims - len(self.shape)) + [s * self.size for s in self.strides]
        divisors = [1] * dims
        for d in range(dims - 1, 0, -1):
            divisors[d - 1] = divisors[d] * shape[d]
        return divisors, shape, strides

    @property
    def highest(self) -> int:
        if self.strides is None:
            return self.start + self.elements * self.size
        pairs = zip(self.shape, self.strides, strict=True)
        return self.start + sum((n - 1) * s * self.size for n, s in pairs) + self.size


def _stretches(nth: Indices, elements: Indices, counts: Indices) -> tuple[Words, Words]:
    """Where each sample's stretch begins, and its elements: the first, the last, and equal parts between."""
    inner = np.maximum(counts - 2, 1)
    begin = 1 + (elements - 2) * (nth - 1) // inner
    end = 1 + (elements - 2) * nth // inner
    last = nth == counts - 1
    begin = np.where(nth == 0, 0, np.where(last, elements - 1, begin))
    end = np.where(nth == 0, 1, np.where(last, elements, end))
    return begin.astype(np.uint64), (end - begin).astype(np.uint64)


def _bits(words: Words, addresses: Indices, masks: Words) -> Words:
    """The elements at these addresses, out of the words that contain them."""
    found: Words = words >> ((addresses & 7) << 3).view(np.uint64)
    found &= masks
    return found


def _differ_when_cast(
    values: Words, copied: Words, source: torch.dtype, target: torch.dtype
) -> npt.NDArray[np.bool_]:
    """Whether elements differ from a copy's in another dtype. A NaN may become any NaN."""
    whole = torch.from_numpy(values.astype(_INTEGERS[source.itemsize])).view(source)
    narrow = torch.from_numpy(copied.astype(_INTEGERS[target.itemsize])).view(target)
    bits = _INTEGERS[target.itemsize]
    expected = whole.to(target)
    found = expected.view(torch.uint8).numpy().view(bits) != narrow.view(torch.uint8).numpy().view(bits)
    both_nan: npt.NDArray[np.bool_] = (expected.isnan() & narrow.isnan()).numpy()
    differs: npt.NDArray[np.bool_] = found & ~both_nan
    return differs
