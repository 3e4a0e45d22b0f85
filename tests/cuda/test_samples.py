"""Samples: elements read from where tensors lie, and compared with a copy of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from ckptd.cuda.samples import SamplePlan, Samples

BASE = 64  # where the image begins in its memory
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Copied:
    """An item whose copy lies at ``offset`` of the image."""

    tensor: Tensor
    offset: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    def view(self) -> Tensor:
        return self.tensor


class Image:
    """Tensors and what was copied of them; ``gap``: bytes between two copies."""

    def __init__(self, tensors: list[Tensor], *, gap: int = 0, dtype: torch.dtype | None = None):
        self.items: list[Copied] = []
        end = 0
        for tensor in tensors:
            self.items.append(Copied(tensor, end, dtype or tensor.dtype))
            end += self.items[-1].nbytes + gap
        self.bytes = np.full(BASE + end // 8 * 8 + 16, 0xAB, np.uint8)
        for item in self.items:
            copy = item.tensor.to(item.dtype).contiguous().view(-1).view(torch.uint8).numpy()
            self.bytes[BASE + item.offset :][: item.nbytes] = copy
        self.plan = SamplePlan(self.items, CPU)

    def read(self, samples: Samples) -> None:
        """As an engine does."""
        assert samples.can_be_read()
        samples.found.append(np.take(self.plan.span, samples.index))

    def unlike(self, number: int = 0) -> set[int]:
        samples = self.plan.draw(number)
        self.read(samples)
        return samples.unlike(self.bytes.view(np.uint64), BASE)


def images() -> dict[str, Image]:
    torch.manual_seed(0)
    many = [torch.randn(16, 16) for _ in range(5)]
    odd = [torch.randn(()) for _ in range(3)] + [torch.randn(7), torch.randn(3, 5)]
    return {
        "words alike": Image(many),
        "elements beside others' in a word": Image(odd),
        "copies that lie otherwise in their words": Image([*odd, *many], gap=4),
        "with strides": Image([t.t() for t in many]),
        "as another dtype": Image(many, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("how", images())
def test_an_element_that_differs_is_found_and_its_neighbours_do_not_count(how: str) -> None:
    """Of a tensor the first and the last element are always among the samples. What lies beside a copy
    in its last word is another tensor's, or nobody's.
    """
    image = images()[how]
    for number in range(4):
        assert image.unlike(number) == set()
    for nth, item in enumerate(image.items):
        for byte in (item.offset + item.dtype.itemsize - 1, item.offset + item.nbytes - 1):
            image.bytes[BASE + byte] ^= 0x41
            assert image.unlike(3) == {nth}
            image.bytes[BASE + byte] ^= 0x41
    assert image.unlike(5) == set()


def test_a_change_is_that_of_the_tensor_and_not_of_what_shares_its_word() -> None:
    both = torch.randn(4)
    image = Image([both[0], both[1], torch.randn(9)])
    samples = image.plan.draw(1)
    image.read(samples)
    both[1] += 1
    image.read(samples)
    assert samples.changed() == {1}


@pytest.mark.parametrize("first", [0, 1])
def test_what_has_moved_is_not_read(first: int) -> None:
    """Where a tensor was may be nobody's memory by now. What the caller has found in place is not
    asked again at the first reading, and is at the second.
    """
    image = Image([torch.randn(64), torch.randn(64), torch.randn(64)])
    samples = image.plan.draw(1, in_place=first)
    image.read(samples)
    image.items[0].tensor.data = torch.randn(64)
    assert not samples.can_be_read()
    assert samples.changed() == {0}


def test_what_was_not_found_in_place_is_asked_before_the_first_reading() -> None:
    image = Image([torch.randn(64), torch.empty(0), torch.randn(64)])
    samples = image.plan.draw(1, in_place=2)
    image.items[2].tensor.data = torch.randn(64)
    assert not samples.can_be_read()
    assert samples.changed() == {2}
