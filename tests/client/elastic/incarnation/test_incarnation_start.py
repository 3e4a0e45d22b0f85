"""Ranks that start an incarnation: all get the same number and plan, or all raise the error of any of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from ckptd.client.elastic.incarnation import incarnation_start
from ckptd.client.elastic.incarnation.image_inventory import Unreadable
from ckptd.client.elastic.incarnation.incarnation_start import (
    Discovery,
    JobSettings,
    LocalNode,
    Started,
    discover,
    start_incarnation,
)
from ckptd.client.options import PlacementOptions
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.incarnation_plan import Seat, nodes_of, plan_incarnation
from ckptd.core.elastic.incarnations import ExpertLayers, HeldImage, NodeHeld, Unit
from ckptd.core.slots.segment_format import WORLD_TOPOLOGY, encode_descriptor
from ckptd.errors import DaemonUnavailable, ElasticError
from ckptd.storage.checkpoints.names import run_of_incarnation
from ckptd.transport import messages as m
from tests.ckptd.running import MIB, DaemonProcess, attach, descriptor, running_daemon
from tests.client.rank_threads import outcomes

HOUR_S = 3600
WISHES = JobSettings("job", "run", ExpertLayers(("a",), 2), PlacementOptions(threshold=1, max_straggler=None))


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon() as process:
        yield process


def next_worlds(daemon: DaemonProcess, stored: tuple[int, ...] = ()) -> list[int]:
    """What each of two ranks takes for the number of the next world: one on the daemon's node, and
    one on a node that has nothing.
    """
    holder = LocalNode(Seat("b", "b", 2), daemon.segment_dir)
    empty = daemon.folder / "empty"
    empty.mkdir(exist_ok=True)
    places = [LocalNode(Seat("a", "a", 2), empty), holder]
    work = [partial(_look, place, stored) for place in places]
    found = outcomes(work)
    assert all(isinstance(one, int) for one in found), found
    return [one for one in found if isinstance(one, int)]


def _look(place: LocalNode, stored: tuple[int, ...], ranks: Collectives) -> int:
    return discover(place, WISHES, ranks, frozenset()).next_incarnation(stored)


def begin(daemon: DaemonProcess, world: int) -> None:
    """A trainer of that world makes its ring, as each rank of a world does first."""
    with daemon.client() as client:
        attach(client, run=run_of_incarnation("run", world), topology=WORLD_TOPOLOGY)
        told = descriptor(run=run_of_incarnation("run", world), topology=WORLD_TOPOLOGY)
        client.ask(m.Reserve(MIB, 4, encode_descriptor(told)), m.Reserved)
        client.request(m.Detach())


def test_a_clock_that_stepped_back_an_hour_gives_no_number_below_one_that_was_used(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A world with a lower number would be passed over for the one before: all that it trained
    would be lost at the next start.
    """
    right = time.time
    used: list[int] = []
    for off_s in (0, -HOUR_S, -HOUR_S, 0, -2 * HOUR_S):
        monkeypatch.setattr("time.time", lambda off_s=off_s: right() + off_s)
        first, second = next_worlds(daemon)
        assert first == second
        assert first > max(used, default=-1)
        used.append(first)
        begin(daemon, first)
    assert used[1] < used[0] + HOUR_S, "it is next to the one before, and no guess of the time"


def test_a_number_that_only_the_store_knows_counts(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = int(time.time()) + HOUR_S
    numbers = next_worlds(daemon, stored=(ahead, 7))
    assert len({*numbers}) == 1
    assert numbers[0] > ahead


def test_two_starts_that_know_the_same_hardly_take_one_number() -> None:
    """Nodes that are away may begin a world of their own meanwhile: behind a known number, the next
    one is drawn by lot.
    """
    seats = [Seat("a", "a", 1)]
    held = [NodeHeld(worlds=(1000,))]
    mine, theirs = (Discovery(seats, [0], held, None, 500, drawn) for drawn in (3, 700))
    assert (mine.next_incarnation(()), theirs.next_incarnation(())) == (1003, 1700)


LAYERS = ExpertLayers(("a", "b"), 6)


def wishes(threshold: int = 2) -> JobSettings:
    return JobSettings("job", "run", LAYERS, PlacementOptions(threshold=threshold))


def here(node: str, slots: int = 4) -> LocalNode:
    return LocalNode(Seat(node, node, slots), None)


def started(
    places: Sequence[LocalNode | Exception], each: Sequence[JobSettings] | None = None
) -> list[Started | Exception]:
    asked = each or [wishes()] * len(places)

    def start(ranks: Collectives) -> Started:
        place = places[ranks.rank]
        if isinstance(place, LocalNode):
            ranks = ranks.on_node(place.seat.node)
        return start_incarnation(place, asked[ranks.rank], ranks)

    return outcomes([start] * len(places))


def test_the_first_world_is_the_same_for_all() -> None:
    found = started([here("x"), here("y"), here("x"), here("z")])
    plans = [one.plan for one in found if isinstance(one, Started)]
    assert len(plans) == 4, found
    assert len({plan.digest for plan in plans}) == 1
    plan = plans[0]
    assert (plan.start, plan.nodes, plan.node_of) == (0, ("x", "y", "z"), (0, 1, 0, 2))
    assert plan.handover is None
    assert (plan.replicas_LRE.sum(axis=2) <= 4).all(), "no rank has more than its slots"
    assert (plan.replicas_LRE.sum(axis=1) >= 2).all(), "16 slots hold two of each"


def test_other_wishes_are_told_to_all() -> None:
    found = started([here("x"), here("y"), here("z")], [wishes(), wishes(), wishes(1)])
    for one in found:
        assert isinstance(one, ValueError)
        assert "rank 2 was started with" in str(one)


def test_a_rank_without_a_daemon_is_named_to_all() -> None:
    lost = DaemonUnavailable("nobody answers", operation="start a world")
    found = started([here("x"), lost, here("z")])
    assert all(isinstance(one, DaemonUnavailable) for one in found)
    assert all("rank 1" in str(one) and "nobody answers" in str(one) for one in found)


def test_what_a_user_passed_wrongly_is_raised_where_it_was_and_told_to_the_others() -> None:
    wrong, other = started([ValueError("slots=0: a rank has room"), here("y")])
    assert isinstance(wrong, ValueError)
    assert isinstance(other, DaemonUnavailable)
    assert "slots=0" in str(other)


def test_too_few_slots_are_refused_on_all() -> None:
    found = started([here("x", 2), here("y", 3)])
    assert all(isinstance(one, ElasticError) for one in found)
    assert all("5 slots on 2 nodes cannot hold 6 experts" in str(one) for one in found)


def test_a_folder_that_cannot_be_read_stops_all(tmp_path: Path) -> None:
    """Not one of them goes on with less than what there is."""
    seat = Seat("y", "y", 6)
    broken = LocalNode(seat, Unlistable(tmp_path))
    found = started([here("x", 6), broken])
    assert all(isinstance(one, OSError | DaemonUnavailable) for one in found), found
    assert "rank 1 on node y" in str(found[0])


class Unlistable(type(Path())):  # type: ignore[misc]
    """A folder whose disk is gone."""

    def glob(self, pattern: str) -> None:
        raise OSError("input/output error")


@pytest.mark.parametrize("order", [["x", "x", "y", "y"], ["x", "y", "x", "y"], ["y", "x", "x", "y"]])
def test_experts_of_a_node_are_split_over_its_ranks_wherever_they_stand(order: list[str]) -> None:
    """Whatever the order of ranks, a node's replicas are on ranks of that node."""
    seats = [Seat(node, node, 2 if node == "x" else 3) for node in order]
    loads = np.arange(12, dtype=np.int64).reshape(2, 6)
    plan = plan_incarnation(7, seats, LAYERS, loads, None, threshold=1, max_straggler=None)
    assert nodes_of(seats) == plan.nodes
    for number in range(2):
        ranks = [rank for rank, node in enumerate(plan.node_of) if node == number]
        held = plan.replicas_LRE[:, ranks].sum(axis=1)
        assert np.array_equal(held, plan.placement.counts[:, number])
    for rank, seat in enumerate(seats):
        assert (plan.replicas_LRE[:, rank].sum(axis=1) <= seat.slots).all()


class Held:
    """An inventory that found a whole state, of one rank."""

    def __init__(self, *_: object) -> None:
        units = tuple(Unit(f"{n}.experts.{e}.w") for n in LAYERS.names for e in range(6))
        image = HeldImage(5, 0, 9, True, 0)
        numbers = tuple(range(len(units)))
        self.of_node = NodeHeld(tuple((u, 8) for u in units), (numbers,), (image,), {5: units}, (5,))
        self.images = [SimpleNamespace(held=image, key=("file", 0, 1))]


class Torn:
    """What lies there cannot be read."""

    closed = 0

    def __init__(self, *_: object) -> None: ...

    def state(self, rank: int) -> dict[str, bytes]:
        raise OSError(f"input/output error, rank {rank}")

    def close(self) -> None:
        Torn.closed += 1


def test_loads_that_cannot_be_read_are_told_to_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only one rank reads them. It raised alone what was neither a damaged nor a vanished image,
    and the others waited for half an hour.
    """
    monkeypatch.setattr(incarnation_start, "Inventory", Held)
    monkeypatch.setattr(incarnation_start, "LocalState", Torn)
    monkeypatch.setattr(Torn, "closed", 0)
    places = [LocalNode(Seat(node, node, 6), tmp_path) for node in "xy"]
    reader, other = started(places)
    assert isinstance(reader, OSError)
    assert isinstance(other, DaemonUnavailable)
    assert "input/output error" in str(other)
    assert Torn.closed == 2, "no slot stays locked"


def test_a_rank_that_keeps_nothing_is_told_to_all(tmp_path: Path) -> None:
    """It would not take part when the others attach, and they would wait for it."""
    kept = LocalNode(Seat("x", "x", 6), tmp_path)
    for found in started([kept, here("y", 6)]):
        assert isinstance(found, ValueError)
        assert "rank 1 was started with daemon=None, rank 0 was not" in str(found)
    for found in started([here("y", 6), kept]):
        assert "rank 0 was started with daemon=None, rank 1 was not" in str(found)


def test_ranks_of_a_node_with_other_numbers_of_slots_are_refused_on_all() -> None:
    """A node's slots are shared evenly over its ranks: the one with room for 2 was given 4 experts
    of each layer.
    """
    for found in started([here("x", 6), here("x", 2), here("y", 4)]):
        assert isinstance(found, ValueError)
        assert "rank 1 was started with slots=2, rank 0 on the same node x with slots=6" in str(found)


class Damaged(Torn):
    """One image after the other turns out to be damaged."""

    left = 0

    def state(self, rank: int) -> dict[str, bytes]:
        return {}

    def open_for(self, units: Sequence[Unit], ranks: Sequence[int]) -> None:
        if Damaged.left:
            Damaged.left -= 1
            image = SimpleNamespace(
                file=SimpleNamespace(path=Path("file")), index=0, key=("f", Damaged.left, 1)
            )
            raise Unreadable(image, "its digest differs")  # type: ignore[arg-type]


def test_many_damaged_images_are_left_out_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each attempt finds one; after five the start was given up, though there was a whole state behind them."""
    monkeypatch.setattr(incarnation_start, "Inventory", Held)
    monkeypatch.setattr(incarnation_start, "LocalState", Damaged)
    monkeypatch.setattr(Damaged, "left", 9)
    (found,) = started([LocalNode(Seat("x", "x", 6), tmp_path)])
    assert isinstance(found, Started), found
    assert found.plan.start == 9


def test_a_clock_that_is_behind_draws_the_number_of_the_world(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was the next one, which nodes that are away may have seen in use: what they hold would
    have been mixed with what is recorded now.
    """
    seen = 2**36
    told = Held().of_node
    monkeypatch.setattr(Held, "of_node", msgspec.structs.replace(told, worlds=(5, seen)), raising=False)
    monkeypatch.setattr(Held, "__init__", lambda self, *_: setattr(self, "images", []))
    monkeypatch.setattr(incarnation_start, "Inventory", Held)
    monkeypatch.setattr(incarnation_start, "LocalState", Damaged)
    monkeypatch.setattr(secrets, "randbelow", lambda below: 41)
    found = started([LocalNode(Seat(node, node, 6), tmp_path) for node in "xy"])
    assert [one.plan.number for one in found if isinstance(one, Started)] == [seen + 42] * 2


@pytest.mark.parametrize(("iteration", "begins"), [(10, True), (11, False)])
def test_a_job_that_ended_in_its_first_steps_begins_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, iteration: int, begins: bool
) -> None:
    """A rank died before it had a snapshot, the others were parked: the job could not be started
    any more, though nothing was lost (elastic campaign, seed 300).
    """
    image = HeldImage(5, 0, iteration, True, 0)
    part = NodeHeld(((Unit("dense"), 8),), ((0,),), (image,), {5: (Unit("dense"),)}, (5,))
    monkeypatch.setattr(Held, "__init__", lambda self, *_: setattr(self, "of_node", part))
    monkeypatch.setattr(incarnation_start, "Inventory", Held)
    for found in started([LocalNode(Seat(node, node, 6), tmp_path) for node in "xy"]):
        if begins:
            assert isinstance(found, Started), found
            assert (found.plan.start, found.plan.handover) == (0, None)
        else:
            assert isinstance(found, ElasticError)
            assert "at iteration 11 of incarnation 5" in str(found)
