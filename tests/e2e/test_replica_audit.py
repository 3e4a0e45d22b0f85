"""A bit that flips in the live memory of one data parallel rank is named by tensor, iteration and rank; a job
without a fault gives no alarm.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from ckptd.transport.messages import ComparedRanks, EventInfo, Events, GetEvents, GetPeers, Peers
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.ranks import Ranks, story
from tests.long import long

pytestmark = pytest.mark.slow

EACH_CAPTURES = ("--set", "capture_once=false")
PEERS = ("--memory", "256MiB", "--peer-listen", "tcp://127.0.0.1:0", "--peer-security", "plain")
SAYS = ("replicas_differ", "replicas_diverged")


@pytest.fixture
def nodes() -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    """Two daemons that are peers, as on two nodes."""
    with (
        own_daemon(*PEERS, "--node-id", "first") as first,
        own_daemon(*PEERS, "--node-id", "second") as second,
    ):
        yield first, second


def told(daemon: DaemonProcess, run: str) -> list[EventInfo]:
    """The events about ranks that are not alike."""
    events = daemon.ask(GetEvents(limit=10_000), Events).events
    return [event for event in events if event.kind in SAYS and event.run == run]


def compared(daemon: DaemonProcess, run: str) -> ComparedRanks:
    rows = [row for row in daemon.ask(GetPeers(), Peers).compared if row.run == run]
    assert len(rows) == 1, rows
    return rows[0]


def until_compared(daemon: DaemonProcess, run: str, iteration: int) -> ComparedRanks:
    """The row of a run, once this iteration is compared: seals come after the training."""
    deadline = time.monotonic() + 60
    while (row := compared(daemon, run)).iteration < iteration:
        assert time.monotonic() < deadline, row
        time.sleep(0.05)
    return row


def named_at(event: EventInfo) -> tuple[int, int]:
    """The iteration of an alarm, and the last one at which all was equal; -1: in another schedule."""
    match = re.search(r"iteration (\d+): .* They were the same (?:at iteration (\d+)|before)", event.message)
    assert match is not None, event.message
    return int(match[1]), int(match[2] or -1)


def patient(total: int) -> tuple[str, ...]:
    """Each rank captures all it has; these tiny steps wait for slots, so that each has a snapshot."""
    return ("--set", "capture_once=false", "--patient-until", str(total))


def test_one_flipped_bit_among_three_ranks_on_two_nodes_is_named(
    jobs: Jobs, nodes: tuple[DaemonProcess, DaemonProcess], run: str
) -> None:
    """Before it there is no alarm in 150 iterations. The wrong rank is on the node that does not compare."""
    first, second = nodes
    flipped, total = 150, 165
    each = {
        0: ("--daemon", first.endpoint),
        1: ("--daemon", first.endpoint),
        2: ("--daemon", second.endpoint, "--flip-at", f"{flipped}:exp_avg_sq/embed.weight"),
    }
    dense = (*patient(total), "--set", "window=1")  # every snapshot has every moment
    life = Ranks(jobs, run, *dense, case="ddp/three_ranks", world_size=3, total=total, each=each)
    life.end()
    row = until_compared(first, run, total - 5)
    assert row.ranks == (0, 1, 2)
    assert "optim/exp_avg_sq/embed.weight" in row.differing, story(first, run, life)
    alarm, *others = told(first, run)
    assert (alarm.kind, alarm.level, alarm.rank) == ("replicas_differ", "error", 2), story(first, run, life)
    iteration, equal_at = named_at(alarm)
    # Where seals overtake each other, the next snapshot is compared in its place.
    assert equal_at <= flipped < iteration <= flipped + 5, story(first, run, life)
    assert "optim/exp_avg_sq/embed.weight (rank 2 against the others)" in alarm.message
    # The wrong moment makes a wrong weight, which comes an iteration later.
    assert all("embed.weight (rank 2 against the others)" in event.message for event in others)
    assert told(second, run) == []


@long
def test_two_ranks_of_which_one_has_a_flipped_bit_differ_also_in_windows(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    """Weights are in every snapshot of a window. Of two values neither is known to be right."""
    flipped, total = 300, 320
    each = {1: ("--flip-at", f"{flipped}:embed.weight")}
    life = Ranks(jobs, run, *patient(total), case="ddp/plain", total=total, each=each)
    life.end()
    until_compared(daemon, run, total - 10)
    alarms = told(daemon, run)
    assert alarms, story(daemon, run, life)
    assert {event.kind for event in alarms} == {"replicas_differ"}, story(daemon, run, life)
    assert flipped < named_at(alarms[0])[0] <= flipped + 5, story(daemon, run, life)
    for words in ("the ranks 0, 1 should", "embed.weight", "which of them is wrong is not known"):
        assert words in alarms[0].message, story(daemon, run, life)


@long
def test_a_rank_that_skips_an_update_is_no_alarm(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """Everything differs from then on, and between two ranks nothing says which of them is right."""
    total = 140
    each = {1: ("--odd-step", "100:skip")}
    life = Ranks(jobs, run, *patient(total), case="ddp/plain", total=total, each=each)
    life.end()
    until_compared(daemon, run, total - 10)
    events = told(daemon, run)
    assert {event.kind for event in events} == {"replicas_diverged"}, story(daemon, run, life)
    assert any("param" in event.message for event in events), story(daemon, run, life)


@long
def test_a_recovery_and_its_replay_give_no_alarm(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """A rank is killed; both come back, replay, and train on."""
    total = 200
    before = Ranks(jobs, run, *EACH_CAPTURES, case="ddp/plain", total=total, killed=1, kill_at=100)
    before.end_by_the_death_of(1)
    after = Ranks(jobs, run, *patient(total), case="ddp/plain", total=total)
    after.end()
    until_compared(daemon, run, total - 20)
    assert told(daemon, run) == [], story(daemon, run, before, after)
