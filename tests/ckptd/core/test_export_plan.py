"""From which rank's image each tensor comes: nothing is asked for twice, and of other ranks only
what they captured for this one.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from ckptd.core.export_plan import (
    ExportError,
    JoinedSnapshot,
    RankImage,
    SharedRows,
    SnapshotFacts,
    join,
    lacking,
    plan_export,
)
from ckptd.export.source import facts_of
from ckptd.storage.image_format import ImageTensor


def image(*names: str, rows: int = 6, dtype: str = "F32") -> list[ImageTensor]:
    """Tensors of 4 bytes a row; a name without rows has all of them."""
    found = []
    for number, name in enumerate(names):
        begin, _, end = name.rpartition("[")[2].removesuffix("]").partition(":")
        count = int(end) - int(begin) if end else rows
        found.append(ImageTensor(name, dtype, (count, 1), 1000 * number, 4 * count))
    return found


def joined(
    own: list[ImageTensor], others: dict[int, list[ImageTensor]], *shares: SharedRows
) -> JoinedSnapshot:
    lacks = lacking(own, shares)
    assert set(lacks) == set(others)
    images = {rank: RankImage(tensors, True, [tensors]) for rank, tensors in others.items()}
    facts = SnapshotFacts(shares=shares)
    return join(0, RankImage(own, True, [own]), facts, lacks, images)


def places(found: JoinedSnapshot) -> dict[str, int]:
    assert {tensor.name for tensor in found.tensors} == set(found.ranks)
    return dict(found.ranks)


def test_what_is_shared_comes_from_its_owner_and_nothing_else_does() -> None:
    own = image("a", "expert", "buffer/mean", "ckptd.scalars")
    theirs = image("b", "expert", "master/b", "optim/exp_avg/b", "optim/exp_avg/expert", "buffer/mean", "c")
    found = joined(own, {3: theirs}, SharedRows("b", None, 3))
    assert places(found) == {
        **dict.fromkeys(["a", "expert", "buffer/mean", "ckptd.scalars"], 0),
        **dict.fromkeys(["b", "master/b", "optim/exp_avg/b"], 3),
    }


def test_rows_of_one_parameter_come_from_several_ranks() -> None:
    own = image("w[2:4]", "optim/m/w[2:4]")
    shares = (SharedRows("w", (0, 1), 1), SharedRows("w", (1, 2), 1), SharedRows("w", (4, 6), 2))
    first = image("w[0:2]", "optim/m/w[0:2]")  # neighbours are one entry
    last = image("w[4:6]", "optim/m/w[4:6]", "w[6:9]", "optim/m/w[6:9]")
    found = joined(own, {1: first, 2: last}, *shares)
    assert sorted(name for name, rank in found.ranks.items() if rank == 2) == [
        "optim/m/w[4:6]",
        "w[4:6]",
    ]
    plan = plan_export(found.tensors, found.facts, optimizer=True)
    assert [(w.name, w.shape) for w in plan.model] == [("w", (6, 1))]
    assert [p.name for p in plan.model[0].pieces] == ["w[0:2]", "w[2:4]", "w[4:6]"]
    assert [(w.name, w.shape) for w in plan.optimizer] == [("state.w.m", (6, 1))]


def test_one_who_captured_all_rows_has_them_whole() -> None:
    """Its image has no slices then; state that is not per row goes with its parameter."""
    shares = (SharedRows("w", (0, 2), 1), SharedRows("w", (2, 6), 1), SharedRows("q", None, 1))
    other = [*image("w", "optim/m/w", "q"), ImageTensor("optim/row/q", "F32", (1,), 9000, 4)]
    assert places(joined([], {1: other}, *shares)) == dict.fromkeys(["w", "optim/m/w", "q", "optim/row/q"], 1)


def test_what_every_image_holds_is_asked_of_nobody() -> None:
    """Where ranks update only all together, each has all of it in all snapshots."""
    shares = (SharedRows("w", (0, 3), 1), SharedRows("w", (3, 6), 2), SharedRows("q", None, 3))
    assert lacking(image("w", "q"), shares) == {}
    assert lacking(image("w[0:2]", "w[2:4]", "w[4:6]", "q"), shares) == {}
    assert lacking(image("w[0:2]", "w[4:6]", "q"), shares) == {1: shares[:1], 2: shares[1:2]}
    assert lacking(image("w"), shares) == {3: shares[2:]}
    assert set(lacking(image("optim/m/w", "buffer/q"), shares)) == {1, 2, 3}


def test_a_sparse_share_makes_a_sparse_model_in_compute_precision() -> None:
    own, theirs = image("a", "optim/m/a"), image("b")
    low = image("b", "a", dtype="BF16")
    share = SharedRows("b", None, 1)
    other = RankImage(theirs, False, [theirs, low])
    found = join(0, RankImage(own, True, [own]), SnapshotFacts(), {1: (share,)}, {1: other})
    assert not found.facts.dense
    assert found.facts.compute["b"] == "BF16"
    assert found.facts.compute["a"] == "F32"  # what the other rank calls so is not this one


def test_tensors_are_read_rank_by_rank() -> None:
    own, first, second = image("z"), image("a", "c"), image("b")
    shares = (SharedRows("a", None, 1), SharedRows("b", None, 2), SharedRows("c", None, 1))
    found = joined(own, {1: first, 2: second}, *shares)
    assert [p.name for p in plan_export(found.tensors, found.facts).pieces] == ["z", "a", "c", "b"]


def test_partial_snapshots_are_called_so() -> None:
    facts = SnapshotFacts(rows={"w": 6, "v": 0}, aligned=False, partial=True)
    with pytest.raises(ExportError, match=r"does not contain v: a partial snapshot has the weights of all"):
        plan_export(image("w"), facts)
    with pytest.raises(ExportError, match=r"gap or overlap at row 2: a partial snapshot has the weights of"):
        plan_export(image("w[0:2]", "w[4:6]", "v"), facts)
    with pytest.raises(ExportError, match=r"of an older partial snapshot storage has only .* iteration 40$"):
        plan_export(image("w"), replace(facts, newest=40))
    assert facts_of(msgspec.msgpack.encode({"policy": "partial"}), rank=0).partial


def test_only_aligned_windows_are_called_so() -> None:
    for aligned in (True, False):
        facts = SnapshotFacts(rows={"w": 6, "v": 0}, aligned=aligned)
        for tensors in (image("w"), image("w[0:2]", "w[4:6]")):
            with pytest.raises(ExportError) as caught:
                plan_export(tensors, facts)
            assert ("aligned window" in str(caught.value)) == aligned
    assert not facts_of(msgspec.msgpack.encode({"policy": "sliding"}), rank=0).aligned
    assert facts_of(msgspec.msgpack.encode({"policy": "aligned"}), rank=0).aligned


@pytest.mark.parametrize("members", [[["w", 0]], [7], [[[], 0, 4]], [["w", 0, "4"]]])
def test_malformed_operators_are_refused(members: object) -> None:
    for more in ({}, {"owners": [1]}):
        with pytest.raises(ExportError, match="malformed operators"):
            facts_of(msgspec.msgpack.encode({"operators": [["o", members]], **more}), rank=0)


def test_state_that_lacks_rows_is_refused() -> None:
    tensors = image("w[0:2]", "w[2:4]", "optim/m/w[0:2]")
    with pytest.raises(ExportError, match=r"only 2 of 4 rows of the optimizer's state 'm' of w"):
        plan_export(tensors, SnapshotFacts(dense=True), optimizer=True)


# -- what is told --------------------------------------------------------------------------------


def told(owners: object) -> bytes:
    operators = [
        ["one", "dense", "", None, None, [["a", None, None], ["b", 0, 2]]],
        ["two", "dense", "", None, None, [["b", 2, 5]]],
    ]
    return msgspec.msgpack.encode({"operators": operators, "owners": owners})


def test_owners_are_told_beside_operators() -> None:
    shares = (SharedRows("a", None, 7), SharedRows("b", (0, 2), 7))
    assert facts_of(told([7, -1]), rank=0).shares == shares
    assert facts_of(told([7, 0]), rank=0).shares == shares
    assert facts_of(told([7, 7]), rank=7).shares == ()
    assert facts_of(told([]), rank=0).shares == ()
    assert facts_of(told([7, 7]), rank=0).rows == {"a": 0, "b": 5}


@pytest.mark.parametrize(
    ("owners", "reason"),
    [
        ([7], "1 operators, but has 2"),
        (["x", 1], "malformed owners"),
        ({"a": 1}, "malformed owners"),
    ],
)
def test_owners_that_are_not_understood_are_not_passed_over(owners: object, reason: str) -> None:
    """Otherwise a part of the model would be taken for all of it."""
    with pytest.raises(ExportError, match=reason):
        facts_of(told(owners), rank=0)
