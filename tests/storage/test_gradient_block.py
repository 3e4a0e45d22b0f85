"""Gradients behind an image: what is written is read, what is sent is enough, and nothing damaged is
believed.
"""

from __future__ import annotations

import msgspec
import pytest

from ckptd.storage.gradient_block import (
    GradientBlock,
    aligned,
    block_bytes_max,
    first_gradient,
    gradient_range,
    pack_pieces,
    read_block,
    unpack_pieces,
    write_block,
)
from ckptd.storage.image import ImageView
from ckptd.storage.image_format import ImageError
from tests.ckptd.recomputed import Step, step_of


@pytest.fixture(scope="module")
def step() -> Step:
    return step_of("AdamW", lr=1e-3)


def block_of(step: Step, slot: bytes) -> GradientBlock | None:
    header = step.after.header
    return read_block(
        memoryview(slot), header.image_len, iteration=header.iteration, sequence=header.sequence
    )


def sent(step: Step) -> tuple[bytearray, list[tuple[int, memoryview]]]:
    """What arrives in the slot of a peer, and the pieces that were put."""
    slot = memoryview(step.slot)
    block, view = block_of(step, step.slot), ImageView(slot[: len(step.after.image)])
    assert block is not None
    pieces, there = pack_pieces(slot, view, block), bytearray(b"\xee" * len(slot))
    for offset, piece in pieces:
        there[offset : offset + len(piece)] = piece
    return there, pieces


def test_a_block_is_read_as_it_was_written(step: Step) -> None:
    block = block_of(step, step.slot)
    assert block is not None
    assert block.record == step.record
    assert block.start % 64 == 0
    assert block.start >= step.after.header.image_len


@pytest.mark.parametrize(("iteration", "sequence"), [(9, 9), (8, 10)])
def test_a_slot_that_was_filled_again_has_no_gradients(step: Step, iteration: int, sequence: int) -> None:
    """Its tail still has those of the snapshot before."""
    image_len = step.after.header.image_len
    assert read_block(memoryview(step.slot), image_len, iteration=iteration, sequence=sequence) is None


def test_a_damaged_description_is_refused(step: Step) -> None:
    block = block_of(step, step.slot)
    assert block is not None
    slot = bytearray(step.slot)
    slot[block.stop - 1] ^= 1
    with pytest.raises(ImageError, match="digest"):
        block_of(step, bytes(slot))


def test_what_is_sent_lacks_only_what_is_computed(step: Step) -> None:
    there, pieces = sent(step)
    header = step.after.header
    block = unpack_pieces(
        memoryview(there), header.image_len, iteration=header.iteration, sequence=header.sequence
    )
    assert block.record == step.record
    view, whole = ImageView(memoryview(there)[: header.image_len]), ImageView(memoryview(step.after.image))
    differ = {t.name for t in view if view.data(t.name) != whole.data(t.name)}
    assert differ == step.record.computed
    names = {t.name for t in whole} - step.record.computed
    assert names == {"buffer/seen", "ckptd.scalars", "ckptd.optim_scalars/F32"}
    for each in step.record.parameters:
        if each.gradient >= 0:
            begin, end = gradient_range(block, view, each)
            assert there[begin:end] == step.slot[begin:end]
    assert sum(len(piece) for _, piece in pieces) < len(step.after.image) / 3


def test_a_damaged_piece_is_refused(step: Step) -> None:
    there, pieces = sent(step)
    header = step.after.header
    names = {"iteration": header.iteration, "sequence": header.sequence}
    offset, last = pieces[-1]
    there[offset + len(last) // 2] ^= 1
    with pytest.raises(ImageError, match="digest"):
        unpack_pieces(memoryview(there), header.image_len, **names)
    with pytest.raises(ImageError, match="no gradients"):
        unpack_pieces(memoryview(there), header.image_len, iteration=1, sequence=1)


def test_offsets_outside_of_the_block_are_refused(step: Step) -> None:
    block = block_of(step, step.slot)
    assert block is not None
    view = ImageView(memoryview(step.after.image))
    first = next(step.record.parameters)
    for gradient, weight in (
        (1 << 40, first.weight),
        (-1, first.weight),
        (65, first.weight),
        (64, "nothing"),
    ):
        wrong = msgspec.structs.replace(first, gradient=gradient, weight=weight)
        with pytest.raises(ImageError, match=r"gradient of"):
            gradient_range(block, view, wrong)


def test_a_description_of_other_tensors_is_not_sent(step: Step) -> None:
    block = block_of(step, step.slot)
    assert block is not None
    (group,) = step.record.groups
    other = msgspec.structs.replace(group.parameters[0], weight="gone")
    record = msgspec.structs.replace(step.record, groups=[msgspec.structs.replace(group, parameters=[other])])
    view = ImageView(memoryview(step.after.image))
    with pytest.raises(ImageError, match="'gone'"):
        pack_pieces(memoryview(step.slot), view, msgspec.structs.replace(block, record=record))


def test_the_planned_room_is_enough_and_a_smaller_slot_has_no_block(step: Step) -> None:
    image_len = step.after.header.image_len
    sizes = [(p.weight, 37 * 11 * 4) for p in step.record.parameters]
    room = block_bytes_max(sizes, num_groups=1)
    data_len = first_gradient() + sum(aligned(size) for _, size in sizes)
    slot = memoryview(bytearray(image_len + room))
    assert write_block(slot, image_len, step.record, data_len, iteration=8, sequence=9)
    assert not write_block(slot[: image_len + 100], image_len, step.record, data_len, iteration=8, sequence=9)
