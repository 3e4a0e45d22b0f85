"""What an object keeps, as a tree, and put into the object of another process."""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.optimizers.value_trees import (
    Baseline,
    NotCapturable,
    TreeReader,
    TreeWriter,
    flat_state,
    part_of,
    unlike,
)
from tests.client.doubled import Doubled


class AThing:
    def __init__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)


def Thing(**attributes: Any) -> Any:
    return AThing(attributes)


class Slotted:
    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


def written(thing: Any, baseline: Baseline | None = None, known: Tensor | None = None) -> Any:
    """Packed and unpacked, as through a snapshot."""

    def tell(what: Tensor | int) -> list[str] | None:
        ids = (what,) if isinstance(what, int) else (id(what),)
        return ["param", "it"] if known is not None and id(known) in ids else None

    writer = TreeWriter(tell, baseline, lambda value: False)
    return values.unpack(values.pack(writer.attributes(thing, "")))


def baseline_of(thing: Any) -> Baseline:
    writer = TreeWriter(lambda tensor: None, None, lambda value: False)
    writer.attributes(thing, "")
    return writer.made


def read(tree: Any, into: Any, known: Any = None) -> Any:
    reader = TreeReader(lambda ref: known)
    reader.begin(into)
    reader.put_attributes(into, tree)
    return into


def test_values_of_every_kind_come_back() -> None:
    here = Thing(
        n=3,
        x=0.1,
        name="a",
        none=None,
        yes=True,
        raw=b"\0",
        t=(1, [2]),
        s={1, 2},
        a=np.arange(3),
        d={"k": [torch.ones(2)], 3: -0.0},
        q=deque([1, 2], maxlen=2),
        dtype=torch.bfloat16,
    )
    there = read(written(here), Thing())
    assert unlike(["o", written(there)], ["o", written(here)]) == ""
    assert there.q.maxlen == 2
    assert (there.t, there.s, there.dtype) == ((1, [2]), {1, 2}, torch.bfloat16)


def test_what_is_there_is_filled_in_place() -> None:
    """Another attribute, or a closure, may hold the same list, dict or tensor: it sees what was restored."""
    here = Thing(history=[1, 2, 3], options={"a": 1}, m=torch.full((2,), 5.0), inner=Slotted(7))
    there = Thing(history=[0], options={"b": 0}, m=torch.zeros(2), inner=Slotted(0))
    parts = there.history, there.options, there.m, there.inner
    read(written(here, baseline_of(there)), there)
    now = there.history, there.options, there.m, there.inner
    assert all(a is b for a, b in zip(parts, now, strict=True))
    assert (parts[0], parts[1], parts[2].tolist(), parts[3].count) == (
        [1, 2, 3],
        {"a": 1},
        [5, 5],
        7,
    )


def test_what_two_places_have_in_common_stays_common() -> None:
    shared = [torch.ones(1)]
    there = read(written(Thing(a=shared, b={"also": shared}, c=shared[0])), Thing())
    assert there.b["also"] is there.a
    assert there.c is there.a[0]


def test_a_cycle_is_no_trouble() -> None:
    here = Thing(ring=[1])
    here.ring.append(here.ring)
    there = read(written(here), Thing())
    assert there.ring[1] is there.ring


def test_tensors_that_are_captured_elsewhere_are_told_by_name() -> None:
    """Parameters in a list of their own, as keys, and by their identity (``id(p)``), which is
    another in each process.
    """
    mine, theirs = torch.ones(2), torch.ones(2)
    here = Thing(params=[mine], by_param={mine: 1}, by_id={id(mine): 2})
    there = read(written(here, known=mine), Thing(), theirs)
    assert there.params[0] is theirs
    assert there.by_param == {theirs: 1}
    assert there.by_id == {id(theirs): 2}


def test_a_set_of_such_tensors_holds_the_tensors_of_the_new_process() -> None:
    """Megatron-Core's buckets have a set of their parameters. A copy of one would be no member of it."""
    param, theirs = torch.ones(2), torch.zeros(2)
    tree = written(Thing(params={param}, fixed=frozenset({param})), known=param)
    assert not unlike(tree, written(Thing(params={theirs}, fixed=frozenset({theirs})), known=theirs))
    into = Thing(params={theirs, torch.ones(1)}, fixed=frozenset())
    members = into.params
    read(tree, into, known=theirs)
    assert into.params is members
    assert members == {theirs}
    assert into.fixed == frozenset({theirs})
    assert read(tree, Thing(), known=theirs).params == {theirs}


def test_a_set_of_tensors_that_nothing_else_captures_is_refused() -> None:
    with pytest.raises(NotCapturable, match=r"seen \(type set of objects\)"):
        written(Thing(seen={torch.ones(1)}), baseline_of(Thing(seen={1})))


def test_generators_go_on_where_they_were() -> None:
    here = Thing(
        torch=torch.Generator().manual_seed(3),
        python=random.Random(4),
        numpy=np.random.default_rng(5),
        old=np.random.RandomState(6),
    )
    tree = written(here)
    expected = [
        torch.rand(2, generator=here.torch).tolist(),
        here.python.random(),
        here.numpy.random(),
        here.old.rand(),
    ]
    for there in (Thing(), Thing(torch=torch.Generator(), python=random.Random())):
        read(tree, there)
        drawn = [
            torch.rand(2, generator=there.torch).tolist(),
            there.python.random(),
            there.numpy.random(),
            there.old.rand(),
        ]
        assert drawn == expected


def test_tensors_that_are_made_of_others_are_made_again() -> None:
    """8-bit and 4-bit state (torchao): codes and scales, behind a tensor that has no memory of its own."""
    there = read(written(Thing(m=Doubled(torch.tensor([1.0, 2.0])))), Thing())
    assert type(there.m) is Doubled
    assert there.m.half.tolist() == [1, 2]
    other = Thing(m=Doubled(torch.zeros(2)))
    m, half = other.m, other.m.half
    read(written(Thing(m=Doubled(torch.tensor([3.0, 4.0])))), other)
    assert (other.m is m, half.tolist()) == (True, [3, 4])


def test_state_is_flat_with_the_parts_of_such_tensors() -> None:
    inner = Doubled(torch.tensor([1.0, 2.0]))
    state = {"step": 3, "m": inner, "n": Doubled(inner), "odd:key": torch.ones(1)}
    flat = flat_state(state)
    assert list(flat) == ["step", "m:half", "n:half:half", "odd:key"]
    assert flat["m:half"] is flat["n:half:half"] is inner.half
    assert all(part_of(state, key) is value for key, value in flat.items())
    assert part_of(state, "m") is inner
    assert part_of(state, "m:scale") is part_of(state, "v:half") is None


def test_functions_and_hooks_are_left_as_they_are() -> None:
    here = Thing(f=len, _forward_hooks={7: print}, table={"f": print, "n": 1})
    there = read(written(here), Thing(f=max, _forward_hooks={9: print}, table={"f": max, "n": 0}))
    assert (there.f, there._forward_hooks, there.table) == (max, {9: print}, {"f": max, "n": 1})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (itertools.count(), r"kept.x\[0\] \(type itertools.count, whose position cannot be told\)"),
        (Thing(a=1), r"kept.x\[0\] \(type .*Thing, made in a step\)"),
        (torch.ones(2).to_sparse(), r"kept.x\[0\] \(type torch.sparse_coo"),
        (np.array([object()]), r"kept.x\[0\] \(an array of objects\)"),
        ({Thing(): 1}, r"kept.x\[0\]\[...\] \(a key of type AThing\)"),
        (1 + 2j, r"kept.x\[0\] \(type complex, which has changed\)"),
    ],
)
def test_what_cannot_be_held_is_refused_by_its_path(value: object, message: str) -> None:
    here = Thing(kept=Thing(x=[]))
    baseline = baseline_of(here)
    here.kept.x.append(value)
    with pytest.raises(NotCapturable, match=message):
        written(here, baseline)


def test_what_never_changed_is_no_trouble() -> None:
    here = Thing(z=1 + 2j, inner=Thing(a=1))
    baseline = baseline_of(here)
    here.inner.a = 2
    there = read(written(here, baseline), Thing(z=1 + 2j, inner=Thing(a=1)))
    assert (there.z, there.inner.a) == (1 + 2j, 2)


def test_depth_and_size_have_bounds() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(NotCapturable, match="nested deeper than"):
        written(Thing(deep=deep))
    with pytest.raises(NotCapturable, match="more than 100000 values"):
        written(Thing(wide=[[] for _ in range(100_001)]))


def test_a_difference_is_named_by_its_path() -> None:
    a = Thing(inner={"list": [1, {"m": torch.zeros(2)}]}, n=1)
    b = Thing(inner={"list": [1, {"m": torch.tensor([0.0, -0.0])}]}, n=1)
    assert unlike(["o", written(a)], ["o", written(b)]) == ".inner['list'][1]['m']"


def test_strides_come_back() -> None:
    """SOAP keeps what an eigendecomposition returns, whose columns are contiguous. With rows
    contiguous, its products had other bits.
    """
    q = torch.linalg.qr(torch.randn(3, 3))[0].flip(1).T.contiguous().T
    for there in (Thing(), Thing(q=torch.zeros(3, 3))):
        read(written(Thing(q=q)), there)
        assert there.q.stride() == (1, 3)
        assert torch.equal(there.q, q)
