"""The step of a peer has the bits of the step of the trainer, or nothing comes of it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ckptd.recompute import recompute_worker
from ckptd.recompute.recompute_worker import CannotRecompute, Slot, recompute, serve
from ckptd.storage.gradient_block import UpdateRecord, pack_pieces, read_block, write_block
from ckptd.storage.image import ImageView, verify
from ckptd.transport.fabric.short_cut import is_being_filled
from tests.ckptd.recomputed import SLOT_BYTES, Step, step_of

ADAM: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


def slots_of(step: Step, record: UpdateRecord | None = None) -> tuple[Slot, Slot]:
    """The base, and the slot as it arrives at a peer; ``record``: another one."""
    before, after = step.before.header, step.after.header
    names = {"iteration": after.iteration, "sequence": after.sequence}
    sent = memoryview(bytearray(step.slot))
    block = read_block(sent, after.image_len, **names)
    assert block is not None
    if record is not None:
        assert write_block(sent, after.image_len, record, block.data_len, **names)
        block = read_block(sent, after.image_len, **names)
        assert block is not None
    there = memoryview(bytearray(SLOT_BYTES))
    for offset, piece in pack_pieces(sent, ImageView(sent[: after.image_len]), block):
        there[offset : offset + len(piece)] = piece
    base = memoryview(bytearray(SLOT_BYTES))
    base[: before.image_len] = step.before.image
    return Slot(base, before.image_len, before.iteration, before.sequence), Slot(
        there, after.image_len, **names
    )


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("AdamW", ADAM),
        ("AdamW", ADAM | {"amsgrad": True, "betas": (0.8, 0.95)}),
        ("AdamW", ADAM | {"foreach": True}),
        ("AdamW", ADAM | {"fused": True}),
        ("AdamW", ADAM | {"dtype": torch.bfloat16}),
        ("Adam", ADAM | {"maximize": True}),
        ("SGD", SGD),
        ("SGD", SGD | {"nesterov": True, "weight_decay": 0.01}),
        ("SGD", SGD | {"dampening": 0.1, "fused": True}),
    ],
)
def test_a_step_has_the_bits_of_the_trainer(optimizer: str, options: dict[str, Any]) -> None:
    step = step_of(optimizer, **options)
    base, slot = slots_of(step)
    assert recompute(base, slot) > 0
    verify(slot.memory[: slot.image_len], step.after.header.header_digest)
    assert slot.memory[: slot.image_len] == step.after.image


def test_a_step_of_another_kernel_is_close_and_not_the_same() -> None:
    """What a peer with another kernel would keep: the distance is a few units in the last place of the
    weights, which the digests of the sender show. So none of it is ever sealed.
    """
    step = step_of("AdamW", **ADAM, fused=True)
    (group,) = step.record.groups
    other = msgspec.structs.replace(group, options=group.options | {"fused": False})
    base, slot = slots_of(step, msgspec.structs.replace(step.record, groups=[other]))
    recompute(base, slot)
    view, whole = ImageView(slot.memory[: slot.image_len]), ImageView(memoryview(step.after.image))
    for name in step.record.computed:
        here, there = (np.frombuffer(v.data(name), np.float32) for v in (view, whole))
        np.testing.assert_allclose(here, there, rtol=2e-6, atol=1e-9, err_msg=name)
    assert slot.memory[: slot.image_len] != step.after.image


def changed(step: Step, **changes: Any) -> UpdateRecord:
    (group,) = step.record.groups
    return msgspec.structs.replace(step.record, groups=[msgspec.structs.replace(group, **changes)])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"optimizer": "Lion"}, r"'Lion' is not known here .*known: AdamW, Adam, SGD"),
        ({"options": {"lr": 0.1, "eps": "small"}}, "AdamW: TypeError"),
        ({"options": {"lr": 0.1, "betas": [0.9]}}, "AdamW: "),
    ],
)
def test_what_cannot_be_computed_says_why(changes: dict[str, Any], why: str) -> None:
    step = step_of("AdamW", **ADAM)
    with pytest.raises(CannotRecompute, match=why):
        recompute(*slots_of(step, changed(step, **changes)))


def swapped(step: Step, **changes: Any) -> UpdateRecord:
    """A record that says something else of the first parameter."""
    first, *others = step.record.groups[0].parameters
    return changed(step, parameters=[msgspec.structs.replace(first, **changes), *others])


@pytest.mark.parametrize(
    ("optimizer", "options", "changes", "why"),
    [
        ("AdamW", ADAM, {"states": {"exp_avg": "small", "exp_avg_sq": "small"}}, r"'small' is .*\(16,\)"),
        ("AdamW", ADAM, {"states": {"exp_avg": "buffer/seen"}}, "'buffer/seen' has dtype U8"),
        ("AdamW", ADAM, {"states": {"step": "a"}}, "'step', and no other state of 'a'"),
        (
            "AdamW",
            ADAM,
            {"scalars": {"exp_avg": ("ckptd.optim_scalars/F32", 0)}},
            "'step', and no other state of 'a'",
        ),
        ("SGD", SGD, {"states": {"momentum_buffer": "small"}}, r"'small' is .*\(16,\)"),
    ],
)
def test_state_that_is_not_like_its_weight_is_refused_before_the_step(
    optimizer: str, options: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    """A fused kernel would write beyond it, into the memory of others."""
    step = step_of(optimizer, **options, fused=True, small=True)
    with pytest.raises(CannotRecompute, match=why):
        recompute(*slots_of(step, swapped(step, **changes)))


def test_a_gap_is_noticed() -> None:
    """The base is not the snapshot that the gradients continue."""
    step = step_of("SGD", **SGD)
    with pytest.raises(CannotRecompute, match="continue iteration 6, the base is of 7"):
        recompute(*slots_of(step, msgspec.structs.replace(step.record, base=6)))


def test_a_base_without_the_state_is_noticed() -> None:
    step, other = step_of("AdamW", **ADAM), step_of("SGD", **SGD)
    base, _ = slots_of(other)
    _, slot = slots_of(step)
    with pytest.raises(CannotRecompute, match="does not have 'optim/exp_avg/a'"):
        recompute(base, slot)


def test_a_request_is_answered_by_a_line_whatever_it_says(tmp_path: Path) -> None:
    answers = io.StringIO()
    told = {"offset": 0, "image_len": 1, "iteration": 1, "sequence": 1}
    request = {"path": str(tmp_path / "gone"), "slot_bytes": 4096, "base": told, "slot": told}
    serve(io.StringIO(json.dumps(request) + "\n"), answers)
    assert "No such file" in json.loads(answers.getvalue())["failed"]


def in_file(path: Path, base: Slot, slot: Slot) -> str:
    """A segment file with both slots, and the request that computes the second one."""
    path.write_bytes(bytes(base.memory) + bytes(slot.memory))
    places = {
        name: {
            "offset": offset,
            "image_len": of.image_len,
            "iteration": of.iteration,
            "sequence": of.sequence,
        }
        for name, of, offset in (("base", base, 0), ("slot", slot, SLOT_BYTES))
    }
    return json.dumps({"path": str(path), "slot_bytes": SLOT_BYTES, **places}) + "\n"


def test_no_request_ends_the_process_or_keeps_the_file_mapped(tmp_path: Path) -> None:
    """The second one names an empty weight, of which torch makes no tensor."""
    path, step = tmp_path / "segment", step_of("AdamW", **ADAM, small=True)
    good, bad = slots_of(step), slots_of(step, swapped(step, weight="empty", states={}, scalars={}))
    answers = io.StringIO()
    for slots in (good, bad, good):
        serve(io.StringIO(in_file(path, *slots)), answers)
        assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    first, second, third = map(json.loads, answers.getvalue().splitlines())
    assert first == third
    assert first["computed_bytes"] > 0
    assert "ValueError" in second["failed"]


def test_the_successor_of_a_killed_daemon_sees_the_slot_that_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would give the slot to a peer whose image the old process overwrites, after it was verified."""
    path, seen = tmp_path / "segment", []
    request = in_file(path, *slots_of(step_of("AdamW", **ADAM)))

    def look(base: Slot, slot: Slot) -> int:
        with path.open("rb") as file:
            fd = file.fileno()
            seen.append((is_being_filled(fd, SLOT_BYTES, 1), is_being_filled(fd, 0, SLOT_BYTES)))
        return recompute(base, slot)

    monkeypatch.setattr(recompute_worker, "recompute", look)
    answers = io.StringIO()
    serve(io.StringIO(request), answers)
    assert json.loads(answers.getvalue())["computed_bytes"] > 0
    assert seen == [(True, False)]
    with path.open("rb") as file:
        assert not is_being_filled(file.fileno(), 0, 2 * SLOT_BYTES)


def test_nothing_is_computed_for_a_daemon_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "segment"
    request = in_file(path, *slots_of(step_of("AdamW", **ADAM)))
    before, parents = path.read_bytes(), iter([5, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    answers = io.StringIO()
    serve(io.StringIO(request), answers)
    assert json.loads(answers.getvalue()) == {"failed": "the daemon that asked is gone"}
    assert path.read_bytes() == before


def test_the_process_steps_as_this_one_does(tmp_path: Path) -> None:
    """In a file, as daemons have it; what libraries print does not come between the answers."""
    step = step_of("AdamW", **ADAM)
    base, slot = slots_of(step)
    path = tmp_path / "segment"
    done = subprocess.run(
        [sys.executable, "-m", "ckptd.recompute.recompute_worker"],
        input=in_file(path, base, slot),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    greeting, answer = map(json.loads, done.stdout.splitlines())
    assert greeting == {"torch": str(torch.__version__)}
    assert answer["computed_bytes"] > 0
    assert path.read_bytes()[SLOT_BYTES:][: slot.image_len] == step.after.image
