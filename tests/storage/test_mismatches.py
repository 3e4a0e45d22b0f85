"""Everything that is damaged in an image, found in one pass."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptd.storage.image import (
    DigestMismatch,
    ImageLayout,
    ImageView,
    Mismatch,
    mismatches,
    seal,
    verify,
)
from ckptd.storage.image_format import ImageError, TensorEntry

NAMES = [f"t{i}" for i in range(40)]


def sealed(*, spare: int = 0) -> tuple[memoryview, bytes]:
    """An image of tensors of many sizes, an empty one among them, and its header digest."""
    entries = [TensorEntry(name, "F32", (i * i * 1000,)) for i, name in enumerate(NAMES)]
    layout = ImageLayout.build(entries, identity={"job": "job"}, num_operators=1, anchors=1)
    buffer = memoryview(bytearray(random.Random(1).randbytes(layout.image_len + spare)))
    layout.write_header(buffer, iteration=3, previous=2, scalars_len=0)
    return buffer, seal(buffer)


def of(buffer: memoryview, name: str) -> Mismatch:
    tensor = ImageView(buffer).tensor(name)
    return Mismatch(name, tensor.offset, tensor.offset + tensor.nbytes)


@pytest.mark.parametrize("threads", [0, 3])
def test_all_tensors_that_differ_are_named_in_order_and_no_other(threads: int) -> None:
    buffer, digest = sealed(spare=100)
    assert mismatches(buffer, digest) == []
    wrong = [of(buffer, name) for name in ("t7", "t8", "t30", "t39")]
    for one, at in zip(wrong, (0, -1, 5, -1), strict=True):
        buffer[range(one.start, one.stop)[at]] ^= 1
    buffer[-1] ^= 1  # what follows the image is not of it
    with ThreadPoolExecutor(max(threads, 1)) as pool:
        found = mismatches(buffer, digest, map_fn=pool.map if threads else None)
    assert found == wrong
    with pytest.raises(DigestMismatch, match="'t7'"):
        verify(buffer, digest)


def test_a_damaged_header_is_named_alone_and_to_its_end() -> None:
    buffer, digest = sealed()
    begin = of(buffer, "t1").start
    buffer[begin] ^= 1
    buffer[100] ^= 1
    assert mismatches(buffer, digest) == [Mismatch("header", 0, begin)]
    buffer[100] ^= 1
    assert [one.name for one in mismatches(buffer, digest)] == ["t1"]


@pytest.mark.parametrize("length", [0, 7, 1 << 40, (1 << 64) - 1])
def test_of_a_header_whose_length_cannot_be_only_the_length_is_named(length: int) -> None:
    buffer, digest = sealed()
    true = bytes(buffer[:8])
    buffer[:8] = length.to_bytes(8, "little")
    assert mismatches(buffer, digest) == [Mismatch("header", 0, 8)]
    buffer[:8] = true
    assert mismatches(buffer, digest) == []


def test_what_was_sealed_and_does_not_fit_is_an_error() -> None:
    """No other copy mends that."""
    buffer, digest = sealed()
    for cut in (len(buffer) - 1, 5):
        with pytest.raises(ImageError):
            mismatches(buffer[:cut], digest)
