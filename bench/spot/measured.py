"""What the logs of a real stretch tell (`bench.spot.real`), and the simulation of the same stretch
with what was measured. All of it is pure.

A *life* is the time from one meeting of the ranks to the next. Time is divided so:

- *train*: from when a life's ranks have their state until its last step is done, and the iteration
  that a change cut off, or the end;
- *restore*: from when they have met until they have it: plans, reading, exchange, a new checkpointer;
- *halt*: neither, while there are fewer hosts than the strategy can train on;
- *restart*: the rest. Until a loss is noticed, until there are processes, and until they have met;
  also what came to nothing because of the next change.

Steps count as *useful* the first time they are done, as *computed* each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from bench.spot.model import Job, placed
from bench.spot.trace import Trace

__all__ = [
    "Account",
    "Life",
    "Pauses",
    "account",
    "lives_of",
    "measured_job",
    "pauses_of",
    "wrong_losses",
]

Event = Mapping[str, Any]
_CUT_OFF = 3  # a last iteration is not taken to have lasted for more than so many


@dataclass(frozen=True, slots=True)
class Life:
    """Times in seconds since the stretch began; steps by number, with when the first rank had done them.

    Args:
        ranks: that train.
        source: where its state came from: nothing, memory or disk.
        saves_s: seconds of each state that was written to disk.
    """

    met_s: float
    ready_s: float
    ranks: int
    source: str
    done_s: tuple[tuple[int, float], ...]
    saves_s: tuple[float, ...] = ()

    @property
    def last_s(self) -> float:
        """When its last step was done; when it had its state if it did none."""
        return self.done_s[-1][1] if self.done_s else self.ready_s

    @property
    def iteration_s(self) -> float | None:
        """The median; None with fewer than three steps, of which the first is another one."""
        times = [at_s for _, at_s in self.done_s[1:]]
        return median(b - a for a, b in pairwise(times)) if len(times) > 1 else None


@dataclass(frozen=True, slots=True)
class Account:
    """What came of a strategy in a stretch."""

    seconds: Mapping[str, float]
    useful_s: tuple[float, ...]
    computed: int
    lives: tuple[Life, ...]

    @property
    def useful(self) -> int:
        return len(self.useful_s)

    @property
    def rollbacks(self) -> int:
        """Starts from disk."""
        return sum(life.source == "disk" for life in self.lives)

    def useful_between(self, start_s: float, end_s: float) -> int:
        """Steps done for the first time within a time."""
        return sum(start_s <= at_s < end_s for at_s in self.useful_s)


def lives_of(events: Iterable[Event], begun_s: float, end_s: float) -> list[Life]:
    """The lives in which ranks got a state, in their order, as far as they are within the stretch.

    Args:
        events: of all ranks, in any order, with ``time_s`` as unix time.
        begun_s: unix time.
        end_s: seconds after it.
    """
    by_life: dict[int, list[Event]] = {}
    for event in events:
        if event["time_s"] - begun_s < end_s:
            by_life.setdefault(event["life"], []).append(event)
    found = []
    for told in by_life.values():
        ready = [e for e in told if e["event"] == "ready"]
        if not ready or len(ready) < ready[0]["ranks"]:
            continue
        done: dict[int, float] = {}
        for event in told:
            if event["event"] == "step":
                at_s = event["time_s"] - begun_s
                done[event["step"]] = min(at_s, done.get(event["step"], at_s))
        met_s = max(e["time_s"] for e in told if e["event"] == "met") - begun_s
        ready_s = max(e["time_s"] for e in ready) - begun_s
        source = str(ready[0]["source"])
        saves_s = tuple(e["seconds"] for e in told if e["event"] == "saved")
        found.append(Life(met_s, ready_s, ready[0]["ranks"], source, tuple(sorted(done.items())), saves_s))
    return sorted(found, key=lambda life: life.met_s)


def account(lives: Sequence[Life], stretch: Trace, *, fewest: int) -> Account:
    """Where the time went, and what was done in it.

    Args:
        fewest: hosts that the strategy needs in order to train.
    """
    seconds = dict.fromkeys(("train", "restore", "restart", "halt"), 0.0)
    cursor_s = 0.0
    for number, life in enumerate(lives):
        _add_gap(seconds, cursor_s, max(cursor_s, life.met_s), stretch, fewest)
        begun_s = max(cursor_s, life.ready_s)
        seconds["restore"] += begun_s - max(cursor_s, life.met_s)
        until_s = lives[number + 1].met_s if number + 1 < len(lives) else stretch.end_s
        cursor_s = max(begun_s, _trained_until(life, until_s, stretch))
        seconds["train"] += cursor_s - begun_s
    _add_gap(seconds, cursor_s, stretch.end_s, stretch, fewest)
    first: dict[int, float] = {}
    for life in lives:
        for step, at_s in life.done_s:
            first[step] = min(at_s, first.get(step, at_s))
    computed = sum(len(life.done_s) for life in lives)
    return Account(seconds, tuple(sorted(first.values())), computed, tuple(lives))


def _trained_until(life: Life, until_s: float, stretch: Trace) -> float:
    """When a life's last iteration was cut off by a change, or the end; when its last step was
    done, if by neither.
    """
    cuts = [c.at_s for c in stretch.changes if life.last_s < c.at_s < until_s] + [stretch.end_s]
    longest_s = _CUT_OFF * (life.iteration_s or 0.0)
    return cuts[0] if cuts[0] <= min(until_s, life.last_s + longest_s) else life.last_s


def _add_gap(seconds: dict[str, float], start_s: float, end_s: float, stretch: Trace, fewest: int) -> None:
    halt_s = _with_fewer(stretch, start_s, end_s, fewest)
    seconds["halt"] += halt_s
    seconds["restart"] += end_s - start_s - halt_s


def _with_fewer(stretch: Trace, start_s: float, end_s: float, fewest: int) -> float:
    """Seconds within a time in which there are fewer nodes than that."""
    ends = [change.at_s for change in stretch.changes[1:]] + [stretch.end_s]
    return sum(
        max(0.0, min(end_s, until_s) - max(start_s, change.at_s))
        for change, until_s in zip(stretch.changes, ends, strict=True)
        if change.nodes < fewest
    )


def wrong_losses(expected: Mapping[int, float], events: Iterable[Event], *, close: float) -> list[str]:
    """Steps that nobody did before later ones, and losses that are not the expected ones; those of
    repeated steps, too.

    Args:
        expected: by step, of a run that nobody disturbed.
        close: how far they may be off, relative.
    """
    told = [event for event in events if event["event"] == "step"]
    done = {event["step"] for event in told}
    lacking = [step for step in range(max(done, default=-1) + 1) if step not in done]
    far = {
        event["step"]: event["loss"]
        for event in told
        if event["step"] not in expected
        or not abs(event["loss"] - expected[event["step"]]) <= close * abs(expected[event["step"]])
    }
    return [
        *(f"step {step} was not done" for step in lacking),
        *(f"loss of step {s}: {far[s]!r}, undisturbed {expected.get(s)!r}" for s in sorted(far)),
    ]


# --- for the simulation ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds from a change until training goes on; None: not measured."""

    start_s: float | None
    after_loss_s: float | None
    after_coming_s: float | None


def pauses_of(lives: Sequence[Life], stretch: Trace, *, fewest: int) -> Pauses:
    """Medians, over the changes that were the only one since training stood still, or that brought
    back hosts enough.

    The start is the first of these pauses.
    """
    nodes = [0, *(change.nodes for change in stretch.changes)]
    after: dict[bool, list[float]] = {True: [], False: []}
    start_s = None
    trained = [life for life in lives if life.done_s]
    for since_s, life in zip([-1.0, *(life.met_s for life in trained)], trained, strict=False):
        between = [n for n, c in enumerate(stretch.changes) if since_s < c.at_s < life.met_s]
        if not between or stretch.changes[between[-1]].nodes < fewest:
            continue
        before, now = nodes[between[-1]], nodes[between[-1] + 1]
        if len(between) > 1 and before >= fewest:
            continue
        pause_s = _begins_s(life) - stretch.changes[between[-1]].at_s
        if life is trained[0]:
            start_s = pause_s
        else:
            after[now < before].append(pause_s)
    middle = {lost: median(found) if found else None for lost, found in after.items()}
    return Pauses(start_s, middle[True], middle[False])


def _begins_s(life: Life) -> float:
    """When its first iteration began."""
    return max(life.ready_s, life.done_s[0][1] - (life.iteration_s or 0.0))


def measured_job(
    found: Account,
    pauses: Pauses,
    *,
    batch: int,
    experts: int,
    layers: int,
    slots: int,
    elastic: bool,
) -> Job | None:
    """The simulation's job with what was measured of one strategy: how fast a node trains, how long
    it pauses, how long it saves.

    What moves is in the pauses, and so is what is read from disk, which the simulation adds again:
    milliseconds here. All loads are alike, and hosts that come are used at once, as torchrun does.

    Returns:
        None if too few steps were done to tell how long one takes.
    """
    bare = Job(
        layers=layers,
        experts=experts,
        slots=slots,
        expert_bytes=1.0,
        dense_bytes=1.0,
        batch=batch,
        node_samples_per_s=1.0,
        skew=(1,) * experts,
        plan_s=0.0,
        process_s=0.0,
        node_bytes_per_s=1e12,
        snapshot_overhead=0.0,
        window=1,
        gather_s=0.0,
        gather_most_s=0.0,
    )
    rates = [
        bare.iteration_s(life.ranks, placed(bare, life.ranks)[1] if elastic else 1.0) / life.iteration_s
        for life in found.lives
        if life.iteration_s
        for _ in life.done_s  # a life counts by its steps
    ]
    known = [s for s in (pauses.after_coming_s, pauses.start_s, pauses.after_loss_s) if s is not None]
    if not rates or not known:
        return None
    loss_s = known[0] if pauses.after_loss_s is None else pauses.after_loss_s
    saves = [s for life in found.lives for s in life.saves_s]
    save_s = median(saves) if saves else 0.0
    return replace(
        bare,
        node_samples_per_s=median(rates),
        detect_s=max(0.0, loss_s - known[0]),
        groups_s=min(known[0], loss_s),
        store_bytes_per_s=bare.state_bytes / save_s if save_s else 1e12,
    )
