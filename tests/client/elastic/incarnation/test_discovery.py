"""The number of a new world: above every one that was used, whatever the clock of rank 0 says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest

from ckptd.client.elastic.incarnation.discovery import Discovery, Here, Wishes, look
from ckptd.client.options import PlacementOptions
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.incarnation_plan import Seat
from ckptd.core.elastic.incarnations import ExpertLayers, NodeHeld
from ckptd.core.slots.segment_format import WORLD_TOPOLOGY, encode_descriptor
from ckptd.storage.checkpoints.names import run_of_incarnation
from ckptd.transport import messages as m
from tests.ckptd.running import MIB, DaemonProcess, attach, descriptor, running_daemon
from tests.client.rank_threads import outcomes

HOUR_S = 3600
WISHES = Wishes("job", "run", ExpertLayers(("a",), 2), PlacementOptions(threshold=1, max_straggler=None))


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon() as process:
        yield process


def next_worlds(daemon: DaemonProcess, stored: tuple[int, ...] = ()) -> list[int]:
    """What each of two ranks takes for the number of the next world: one on the daemon's node, and
    one on a node that has nothing.
    """
    holder = Here(Seat("b", "b", 2), daemon.segment_dir)
    empty = daemon.folder / "empty"
    empty.mkdir(exist_ok=True)
    places = [Here(Seat("a", "a", 2), empty), holder]
    work = [partial(_look, place, stored) for place in places]
    found = outcomes(work)
    assert all(isinstance(one, int) for one in found), found
    return [one for one in found if isinstance(one, int)]


def _look(place: Here, stored: tuple[int, ...], ranks: Collectives) -> int:
    return look(place, WISHES, ranks, frozenset()).next_world(stored)


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
    assert (mine.next_world(()), theirs.next_world(())) == (1003, 1700)
