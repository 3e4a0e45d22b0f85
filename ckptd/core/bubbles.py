"""When ranks of a pipeline wait: predicted from its schedule's actions, and measured. Pure.

A rank of a pipeline runs its *actions* in a fixed order: forwards and backwards of its stages, one for each
micro-batch. An action needs the result of the neighbouring stage, so a rank may have to wait for it. The time
without an action is the *bubble*. A snapshot that is copied then takes no time from the training.

`play` runs the actions of all ranks against each other, and `rank_bubbles` finds where one of them waits.
`GapMeter` has what was measured, and `split_bytes` which part of a snapshot fits there: what does not is
copied beside the actions.

Source: MoEtion, section 5.3 and algorithm 4, which estimates the bubble of 1F1B by its closed form.
"""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class ActionKind(StrEnum):
    """What is computed for a micro-batch, by the letters of ``torch.distributed.pipelining``."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class PipelineAction:
    """One computation of a rank."""

    stage: int
    kind: ActionKind
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Timed:
    """An action, and when it ran, in seconds."""

    action: PipelineAction
    start_s: float
    end_s: float


Orders = Mapping[int, Sequence[PipelineAction]]
"""The actions of each rank, in its order."""

UNIT_DURATIONS = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.BACKWARD_INPUT: 1.0,
    ActionKind.BACKWARD_WEIGHT: 1.0,
}
"""The usual proportions, as long as nothing is measured."""

# Computations in torch's notation, "2F0", also within "(2F0;1B3)OVERLAP_F_B". Sends and receives are left
# out: torch posts them as soon as it can, so an action waits for the result it needs, and for nothing else.
_COMPUTATION = re.compile(r"(?:^|[(;\s])(\d+)([FBIW])(\d+)(?=$|[);\s])")


def parse_actions(texts: Iterable[object]) -> tuple[PipelineAction, ...]:
    """The computations in a rank's list of actions, each as torch writes it; None is a pause.

    Example: ``["0F0", "0SEND_F0", None, "(0F1;0B0)OVERLAP_F_B", "0REDUCE_GRAD"]`` -> 0F0, 0F1, 0B0
    """
    found = []
    for text in texts:
        for match in _COMPUTATION.finditer("" if text is None else str(text)):
            stage, kind, number = match.groups()
            found.append(PipelineAction(int(stage), ActionKind(kind), int(number)))
    return tuple(found)


def gpipe_orders(num_stages: int, micro_batches: int) -> dict[int, tuple[PipelineAction, ...]]:
    """GPipe with one stage on each rank: all forwards, then all backwards."""
    return {
        stage: tuple(
            PipelineAction(stage, kind, m)
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
            for m in range(micro_batches)
        )
        for stage in range(num_stages)
    }


def one_f_one_b_orders(num_stages: int, micro_batches: int) -> dict[int, tuple[PipelineAction, ...]]:
    """1F1B with one stage on each rank: a stage begins with a forward for each stage from it on."""
    orders = {}
    for stage in range(num_stages):
        forwards = [PipelineAction(stage, ActionKind.FORWARD, m) for m in range(micro_batches)]
        backwards = [PipelineAction(stage, ActionKind.BACKWARD, m) for m in range(micro_batches)]
        first = min(micro_batches, num_stages - stage)
        order = forwards[:first]
        for m, backward in enumerate(backwards):
            order += [backward, *forwards[first + m : first + m + 1]]
        orders[stage] = tuple(order)
    return orders


def by_kind(seconds: Mapping[ActionKind, float]) -> Callable[[PipelineAction], float]:
    """Durations that are equal for all stages; a whole backward may be given, or its two halves."""
    found = dict(seconds)
    halves = found.get(ActionKind.BACKWARD_INPUT, 0.0) + found.get(ActionKind.BACKWARD_WEIGHT, 0.0)
    found.setdefault(ActionKind.BACKWARD, halves)
    for half in (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT):
        found.setdefault(half, found[ActionKind.BACKWARD] / 2)
    return lambda action: found[action.kind]


def play(
    orders: Orders,
    duration_s: Callable[[PipelineAction], float],
    *,
    link_s: float = 0.0,
    update_s: float = 0.0,
    iterations: int = 1,
) -> dict[int, list[list[Timed]]]:
    """Run the actions: each as soon as its rank is free and the result that it needs has arrived.

    Args:
        link_s: from the end of an action to the arrival of its result at another rank.
        update_s: from a rank's last action to the top of its next iteration. Ranks do not wait for each
            other there.
    Returns:
        For each rank, the timed actions of each iteration. All ranks begin at 0.
    Raises:
        ValueError: the actions wait for each other, or for one that no rank runs; or a number is negative.
    """
    if min(link_s, update_s) < 0 or iterations < 1:
        raise ValueError(
            f"{link_s=}, {update_s=}, {iterations=}: pass seconds from 0 and iterations from 1 on"
        )
    last_stage = max((a.stage for order in orders.values() for a in order), default=0)
    rank_of = {a.stage: rank for rank, order in orders.items() for a in order}
    ended: dict[tuple[int, PipelineAction], float] = {}
    queues = {
        rank: deque((i, action) for i in range(iterations) for action in order)
        for rank, order in orders.items()
    }
    free_s = dict.fromkeys(orders, 0.0)
    timed: dict[int, list[list[Timed]]] = {rank: [[] for _ in range(iterations)] for rank in orders}
    while any(queues.values()):
        moved = False
        for rank, queue in queues.items():
            while queue:
                number, action = queue[0]
                arrival = _arrival(number, action, last_stage, rank_of, ended, link_s)
                if arrival is None:
                    break
                queue.popleft()
                start = max(free_s[rank], arrival)
                end = start + duration_s(action)
                timed[rank][number].append(Timed(action, start, end))
                ended[number, action] = end
                free_s[rank] = end + (update_s if not queue or queue[0][0] > number else 0.0)
                moved = True
        if not moved:
            stuck = ", ".join(
                f"rank {rank} at {_text(queue[0][1])}" for rank, queue in queues.items() if queue
            )
            raise ValueError(f"the schedule cannot be run: {stuck} wait(s) for a result that never comes")
    return timed


def _arrival(
    number: int,
    action: PipelineAction,
    last_stage: int,
    rank_of: Mapping[int, int],
    ended: Mapping[tuple[int, PipelineAction], float],
    link_s: float,
) -> float | None:
    """When the results are there that an action needs; None: not known yet."""
    arrival = 0.0
    for alternatives in _needs(action, last_stage):
        found = [(a, ended[number, a]) for a in alternatives if (number, a) in ended]
        if not found:
            return None
        needed, at = found[0]
        arrival = max(arrival, at + (link_s if rank_of[needed.stage] != rank_of[action.stage] else 0.0))
    return arrival


def _needs(action: PipelineAction, last_stage: int) -> list[tuple[PipelineAction, ...]]:
    """The actions whose results are needed; of each tuple one."""
    stage, m = action.stage, action.micro_batch
    if action.kind is ActionKind.FORWARD:
        return [(PipelineAction(stage - 1, ActionKind.FORWARD, m),)] if stage else []
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return [(PipelineAction(stage, ActionKind.BACKWARD_INPUT, m),)]
    own = (PipelineAction(stage, ActionKind.FORWARD, m),)
    if stage == last_stage:
        return [own]
    gradients = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    return [own, tuple(PipelineAction(stage + 1, kind, m) for kind in gradients)]


def _text(action: PipelineAction) -> str:
    return f"{action.stage}{action.kind}{action.micro_batch}"


@dataclass(frozen=True, slots=True)
class RankBubbles:
    """Where a rank waits within an iteration.

    Attributes:
        gaps_s: seconds without an action before each of its actions; the first: since the top.
        tail_s: seconds after its last action, until all ranks are done.
        period_s: of the iteration, without the update.
    """

    gaps_s: tuple[float, ...]
    tail_s: float
    period_s: float

    @property
    def fraction(self) -> float:
        """The part of the iteration in which the rank waits."""
        return (sum(self.gaps_s) + self.tail_s) / self.period_s if self.period_s else 0.0


_STEADY = 4


def rank_bubbles(
    orders: Orders,
    duration_s: Callable[[PipelineAction], float],
    *,
    link_s: float = 0.0,
    update_s: float = 0.0,
    steady: bool = False,
) -> dict[int, RankBubbles]:
    """Where each rank waits in an iteration that all begin together.

    Args:
        steady: instead, in one after several others, in which each rank begins as soon as it is done with the
            one before: what was a tail is then a part of the first gap.
    Raises:
        ValueError: as `play`.
    """
    iterations = _STEADY if steady else 1
    timed = play(orders, duration_s, link_s=link_s, update_s=update_s, iterations=iterations)
    ends = [rounds[-1][-1].end_s for rounds in timed.values() if rounds[-1]]
    found = {}
    for rank, rounds in timed.items():
        actions = rounds[-1]
        top = rounds[-2][-1].end_s + update_s if steady and actions else 0.0
        before = [top, *(t.end_s for t in actions)]
        gaps = tuple(t.start_s - end for t, end in zip(actions, before, strict=False))
        tail = 0.0 if steady else max(ends) - before[-1]
        found[rank] = RankBubbles(gaps, tail, before[-1] + tail - top)
    return found


def split_bytes(total_bytes: int, gaps_s: Sequence[float], bytes_per_s: float) -> tuple[int, int]:
    """The bytes of a snapshot that are copied in bubbles, and the rest (MoEtion's ``SplitParameter``).

    Args:
        gaps_s: the bubbles that may be used.
        bytes_per_s: at which bytes are copied; 0: not known, so none is copied in a bubble.
    """
    inside = min(total_bytes, int(sum(gaps_s) * bytes_per_s))
    return inside, total_bytes - inside


class GapMeter:
    """The gaps of a rank, as measured in the newest iterations.

    An iteration with another number of actions counts for nothing: the schedule ran twice, or not to its end.

    Args:
        num_actions: of the rank, in an iteration.
        kept: the number of iterations, of which the medians count.
    """

    def __init__(self, num_actions: int, *, kept: int = 9) -> None:
        self.num_actions = num_actions
        self._measured: deque[tuple[float, ...]] = deque(maxlen=kept)
        self._medians: tuple[float, ...] = ()

    def note(self, gaps_s: Sequence[float]) -> bool:
        """Note what was measured in an iteration; returns whether it counts."""
        if len(gaps_s) != self.num_actions:
            return False
        self._measured.append(tuple(gaps_s))
        self._medians = tuple(map(statistics.median, zip(*self._measured, strict=True)))
        return True

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """The median of the measured gaps before each action; empty before the first iteration."""
        return self._medians
