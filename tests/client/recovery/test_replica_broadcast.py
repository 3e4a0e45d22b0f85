"""In replay, who has recorded something hands it to the others: from whom, and the bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.model.operators import Operator, ParameterRows
from ckptd.client.model.replicated_params import EVERY_RANK, Replicas, ReplicatedParams
from ckptd.client.model.snapshot_layout import EntrySource
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery import replica_broadcast
from ckptd.client.recovery.replica_broadcast import ReplicaBroadcast, arrange
from ckptd.core.snapshot_policy import OperatorKind
from ckptd.cuda.engine import HostMemory
from tests.client.gloo_ranks import run_in_ranks
from tests.client.rank_threads import outcomes

NAMES = ("a", "b", "c", "d")


def operators(names: tuple[str, ...] = NAMES) -> list[Operator]:
    return [Operator(n, OperatorKind.DENSE, (ParameterRows(n),)) for n in names]


def shared(num_ranks: int, names: tuple[str, ...] = NAMES) -> ReplicatedParams:
    return ReplicatedParams(dict.fromkeys(names, Replicas(tuple(range(num_ranks)), None)))


def arranged(*owners: list[int], sharing: list[ReplicatedParams] | None = None) -> list[Any]:
    """What each rank hands over, by what each has planned; or what it raises."""
    sharings = sharing or [shared(len(owners))] * len(owners)

    def work(rank: int, ranks: Collectives) -> ReplicaBroadcast:
        return arrange(sharings[rank], operators(), owners[rank], ranks)

    found = outcomes([lambda e, r=r: work(r, e) for r in range(len(owners))])  # type: ignore[misc]
    return [f.sends() if isinstance(f, ReplicaBroadcast) else f for f in found]


def image(iteration: int, anchors: int) -> SnapshotImage:
    """A snapshot of which nothing but this is known yet."""
    memory = HostMemory(memoryview(bytearray(1)))
    return SnapshotImage(iteration, lambda: pytest.fail("it has not arrived"), memory, 0, anchors=anchors)


def selected(*owners: list[int], suffixes: list[list[SnapshotImage]]) -> list[Any]:
    """As `arranged`, of snapshots with selected experts."""

    def work(rank: int, ranks: Collectives) -> ReplicaBroadcast:
        return arrange(shared(len(owners)), operators(), owners[rank], ranks, suffixes[rank])

    return outcomes([lambda e, r=r: work(r, e) for r in range(len(owners))])  # type: ignore[misc]


class TestFromWhom:
    def test_each_hands_over_what_it_owns(self) -> None:
        assert arranged([0, 1, 1, 0], [0, 1, 1, 0]) == [{0, 3}, {1, 2}]

    def test_where_all_have_everything_nothing_is_handed(self) -> None:
        assert arranged([], [EVERY_RANK] * 4) == [frozenset(), frozenset()]

    def test_where_all_have_everything_their_operators_may_differ(self) -> None:
        """Told to be alike and found not to be, so that each captured its own, of another number:
        such a run must be able to resume.
        """
        names = [NAMES, NAMES[:3]]

        def work(rank: int, ranks: Collectives) -> ReplicaBroadcast:
            return arrange(shared(2), operators(names[rank]), [], ranks)

        found = outcomes([lambda e: work(0, e), lambda e: work(1, e)])
        assert [isinstance(f, ReplicaBroadcast) and f.sends() for f in found] == [
            frozenset(),
            frozenset(),
        ]

    def test_of_several_who_have_it_the_first(self) -> None:
        """Rank 1 captured everything (its plan differed); ranks 0 and 2 still rely on each other, and on it."""
        alone = [EVERY_RANK] * 4
        assert arranged([0, 1, 2, 0], alone, [0, 1, 2, 0]) == [{0, 3}, {1, 2}, frozenset()]

    def test_what_owners_have_selected_comes_from_the_snapshot_that_has_it(self) -> None:
        """What a rank's own snapshots say of operators that another one captures does not count."""
        everything, own = 0b1111, {0: 0b1001, 1: 0b0110}
        chosen = {0: [0b1000, 0b0001, 0b1001], 1: [0b0000, 0b0010, 0b0100]}  # newest first
        suffixes = [
            [image(9 - age, of | everything & ~own[rank]) for age, of in enumerate(chosen[rank])]
            for rank in range(2)
        ]
        for found, suffix in zip(
            selected([0, 1, 1, 0], [0, 1, 1, 0], suffixes=suffixes), suffixes, strict=True
        ):
            loaded: set[int] = set()
            at = {}
            for each in suffix:
                fresh = {i for i in range(4) if found.anchors(each) >> i & 1} - loaded
                at.update(dict.fromkeys(fresh, each.iteration))
                loaded |= fresh
            assert at == {3: 9, 0: 8, 1: 8, 2: 7}

    def test_of_several_who_have_it_the_one_with_the_newest(self) -> None:
        """Rank 0 captured everything, by turns; rank 1 still selects what it owns, and relies on rank 0."""
        turns = [image(9, 0b0011), image(8, 0b1100)]
        owned = [image(9, 0b1101), image(8, 0b1011)]
        found = selected([EVERY_RANK] * 4, [0, 1, 1, 0], suffixes=[turns, owned])
        assert [each.sends() for each in found] == [{0, 1, 3}, {2}]
        assert [found[0].anchors(each) for each in turns] == [0b0111, 0b1000]
        assert [found[1].anchors(each) for each in owned] == [0b0111, 0b1000]

    def test_where_all_have_everything_in_the_same_snapshots_nothing_is_handed(self) -> None:
        """Told to be alike and found not to be: each goes on from its own."""
        turns = [image(9, 0b0011), image(8, 0b1100)]
        found = selected([EVERY_RANK] * 4, [], suffixes=[turns, turns])
        assert [each.sends() for each in found] == [frozenset(), frozenset()]
        assert [each.anchors(turns[0]) for each in found] == [0b0011, 0b0011]

    def test_snapshots_of_other_iterations_are_told(self) -> None:
        suffixes = [[image(9, 0b1111), image(8, 0b1111)], [image(9, 0b1111), image(7, 0b1111)]]
        for error in selected([0, 1, 1, 0], [0, 1, 1, 0], suffixes=suffixes):
            assert "those are of other operators or iterations" in str(error)

    def test_what_nobody_recorded_is_told_on_every_rank(self) -> None:
        for error in arranged([0, 1, 1, 1], [0, 1, 1, 0]):
            assert isinstance(error, ValueError)
            assert "no rank of [0, 1] has recorded d" in str(error)

    def test_a_rank_without_such_operators_is_told(self) -> None:
        for error in arranged([0, 1, 1, 0], [], sharing=[shared(2), shared(2, NAMES[:2])])[:1]:
            assert isinstance(error, ValueError)
            assert "rely on those of rank 1 for a and others" in str(error)

    def test_without_a_group_there_is_nobody_to_ask(self) -> None:
        """The run had a DDP wrapper, and has none now."""
        first, second = arranged([0, 1, 1, 0], [0, 1, 1, 0], sharing=[ReplicatedParams(), ReplicatedParams()])
        assert "b was captured on rank 1, with which this rank shares nothing now" in str(first)
        assert "a was captured on rank 0" in str(second)


BF16 = torch.arange(6, dtype=torch.float32).view(2, 3).to(torch.bfloat16)
PARTS: dict[str, list[tuple[EntrySource, Tensor]]] = {
    "a": [(EntrySource("param", "a", dtype=torch.bfloat16), BF16)],
    "b": [
        (EntrySource("param", "b", "", 2, 4, torch.float32), torch.tensor([[1.5], [-0.0]])),
        (EntrySource("optim", "b", "exp_avg", None, None, torch.float64), torch.rand(3).double()),
        (EntrySource("master", "b", dtype=torch.float32), torch.tensor(7.25)),
    ],
    "c": [],
    "d": [(EntrySource("param", "d", dtype=torch.float32), torch.empty(0, 5))],
}


def handed_with_long_headers(rank: int) -> None:
    replica_broadcast._HEAD_BYTES = 16  # none fits
    handed(rank)


def handed(rank: int) -> None:
    replica_broadcast._CHUNK_BYTES = 100  # several chunks, and a part that is larger than one
    sharing = ReplicatedParams(dict.fromkeys(NAMES, Replicas((0, 1, 2), dist.group.WORLD)))

    owners = [1, 2, 1, 0]
    found = arrange(sharing, operators(), owners, Collectives.of_group(dist.group.WORLD))
    torch.manual_seed(3)
    parts = {n: [(s, torch.rand_like(t) if s.key else t) for s, t in p] for n, p in PARTS.items()}
    got: list[tuple[EntrySource, Tensor]] = []

    def mine(of: frozenset[int]) -> tuple[list[tuple[EntrySource, Tensor]], list[str]]:
        return [p for i in sorted(of) for p in parts[NAMES[i]]], [NAMES[i] for i in of if i == 2]

    absent = found.hand(mine, lambda source, data: got.append((source, data.clone())))
    expected = [p for owner in (0, 1, 2) if owner != rank for p in _of(owner, owners, parts)]
    assert [s for s, _ in got] == [s for s, _ in expected]
    for (_, here), (_, there) in zip(got, expected, strict=True):
        assert here.dtype == there.dtype
        assert here.shape == there.shape
        assert torch.equal(here.reshape(-1).view(torch.uint8), there.reshape(-1).view(torch.uint8))
    assert absent == (set() if rank == 1 else {"c"})
    assert (found.bytes_sent > 0) == (rank != 0)
    got.clear()
    found.hand(mine, lambda source, data: got.append((source, data)), among=frozenset({1, 3}))
    assert {s.name for s, _ in got} == {0: {"b"}, 1: {"b", "d"}, 2: {"d"}}[rank]
    # An optimizer of this rank's own has stepped: nobody else comes, and it must not wait.
    if rank == 1:
        assert found.hand(mine, lambda source, data: None, among=frozenset()) == set()
    dist.barrier()
    dist.destroy_process_group()


def _of(owner: int, owners: list[int], parts: Any) -> list[tuple[EntrySource, Tensor]]:
    return [p for name, o in zip(NAMES, owners, strict=True) if o == owner for p in parts[name]]


@pytest.mark.slow
@pytest.mark.parametrize("work", [handed, handed_with_long_headers])
def test_bytes_arrive_as_they_were_sent(work: Callable[[int], None], tmp_path: Path) -> None:
    """Slices, other dtypes, a scalar, an empty tensor, a negative zero, nothing at all; on three real ranks."""
    run_in_ranks(work, 3, tmp_path)


@pytest.mark.parametrize(
    ("backend", "device"),
    [("fake", "cpu"), ("cpu:fake,cuda:fake", "cpu"), ("cuda:fake", "cuda"), ("cpu:fake", "cpu")],
)
def test_the_device_is_one_that_the_group_can_reach(backend: str, device: str) -> None:
    """Its name need not be "nccl" for a group to have nothing but GPUs."""
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=2)
    try:
        wire = replica_broadcast._Wire(Replicas((0, 1), dist.group.WORLD))
        assert wire._device.type == device
    finally:
        dist.destroy_process_group()
