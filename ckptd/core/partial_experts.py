"""Partial experts: which ones each snapshot anchors, and what a failure loses by that. Pure.

A snapshot of a *partial* policy holds everything but the experts, and of each layer's E experts about
K = E / window. So a recovery finds each expert as it was up to ``window - 1`` snapshots ago, and the updates
since then are lost. The *proportion of lost tokens* (PLT) is the mean over layers of the tokens whose updates
of experts were lost in all failures so far, over all tokens that the layer's experts were given.

While the windows are short enough, a failure cannot raise the PLT above a limit (`window_within`): this is
known before the failure. MoC-System raises K after the failure that exceeded the limit.

Experts take turns (`rotation`). They may be selected by tokens at risk, too (`select_by_risk`): those that an
expert was given since it was in a snapshot last. One half of each snapshot still goes to those whose turn it
is, in windows that are twice as long, so that none is left out for longer than the ring can wait.

Source: MoC-System (ASPLOS '25), sections 3 (equations 6 and 7) and 5.3; MoEtion, section 4.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from ckptd.core.snapshot_policy import OperatorCost, PolicyKind, Schedule

__all__ = [
    "LOST_TOKENS_LIMIT",
    "LayerTokens",
    "RiskedExpert",
    "Selection",
    "experts_of_layers",
    "plan_partial",
    "proportion_lost",
    "rotation",
    "select_by_risk",
    "window_for",
    "window_within",
]

LOST_TOKENS_LIMIT = 0.0375
"""The PLT below which MoC-System found no effect on the loss (section 3.1.2)."""

# (container, index) of an operator that is an expert; None of one that is not.
Expert = tuple[str, int] | None


def experts_of_layers(experts: Sequence[Expert]) -> dict[str, int]:
    """The number of experts in each container, in the order of the model."""
    found: dict[str, set[int]] = {}
    for expert in experts:
        if expert is not None:
            found.setdefault(expert[0], set()).add(expert[1])
    return {name: len(indices) for name, indices in found.items()}


def window_for(experts: int, selected: int) -> int:
    """The snapshots until each of a layer's experts was selected, ``selected`` at a time."""
    return math.ceil(experts / min(selected, experts))


def rotation(
    experts: Sequence[Expert],
    window: int,
    *,
    first: int = 0,
    num_experts: int | None = None,
    shifts: int | None = None,
) -> list[int]:
    """The phase of each operator: experts take turns, those of other layers and ranks interleaved.

    In each phase a layer has E / window experts (rounded up or down) on all of its ranks together. They are
    on different ranks as far as possible, and the turns of each layer begin where those of the one before
    end, so that the ranks' shares of a phase differ by one expert at most (MoC-System, 3.2 and figure 4).

    Args:
        first: the number of this rank's first expert among those of a layer.
        num_experts: of a whole layer; None: this rank has all of them.
        shifts: the window by which layers are shifted against each other; None: ``window``.
    Returns:
        Phases below ``window``; 0 for operators that are no experts.
    """
    here = experts_of_layers(experts)
    layers = {name: number for number, name in enumerate(here)}
    places: dict[str, dict[int, int]] = {name: {} for name in here}
    for name, index in sorted(e for e in experts if e is not None):
        places[name].setdefault(index, len(places[name]))
    phases = [0] * len(experts)
    for i, expert in enumerate(experts):
        if expert is not None:
            name, index = expert
            total, place = num_experts or here[name], places[name][index]
            if total % here[name]:  # ranks have different numbers of experts
                position = first + place
            else:
                ranks = total // here[name]
                position = place * ranks + first // here[name] % ranks
            position = (position + layers[name] * total // (shifts or window)) % total
            phases[i] = position * window // total
    return phases


def plan_partial(
    costs: Sequence[OperatorCost],
    phases: Sequence[int],
    window: int,
    *,
    fixed_bytes: int,
    budget_bytes: int | None,
) -> Schedule:
    """The schedule in which operator i is in phase ``phases[i]``.

    Args:
        costs: of an expert, ``compute_bytes`` is what is captured of it while it is not selected; of another
            operator both sizes are those of an anchor.
        fixed_bytes: the bytes of every snapshot besides operators.
        budget_bytes: the bytes that can be copied per snapshot; None for no limit.
    """
    members: list[list[int]] = [[] for _ in range(window)]
    for i, phase in enumerate(phases):
        members[phase].append(i)
    floor = fixed_bytes + sum(cost.compute_bytes for cost in costs)
    sizes = [floor + sum(costs[i].anchor_bytes - costs[i].compute_bytes for i in phase) for phase in members]
    peak = max(sizes)
    fits = budget_bytes is None or peak <= budget_bytes
    compared = "" if budget_bytes is None else f", {'fits' if fits else 'does not fit'} {budget_bytes:,}"
    return Schedule(
        window=window,
        phases=tuple(map(tuple, members)),
        phase_bytes=tuple(sizes),
        peak_bytes=peak,
        dense_bytes=fixed_bytes + sum(cost.anchor_bytes for cost in costs),
        fits=fits,
        reason=f"each expert in one of {window} snapshots: the largest has {peak:,} bytes{compared}",
        policy=PolicyKind.PARTIAL,
    )


# -- what is lost ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerTokens:
    """Of one layer: tokens that its experts were given, each counted once for each of its experts, and those
    of them whose updates were lost.
    """

    given: float
    lost: float


def proportion_lost(ranks: Sequence[Mapping[str, LayerTokens]]) -> float:
    """The PLT (equation 7), from what each rank has counted in its own experts.

    Layers without tokens do not count.
    """
    layers = dict.fromkeys(chain.from_iterable(ranks))
    shares = []
    for layer in layers:
        found = [rank[layer] for rank in ranks if layer in rank]
        given = sum(tokens.given for tokens in found)
        if given:
            shares.append(sum(tokens.lost for tokens in found) / given)
    return sum(shares) / len(shares) if shares else 0.0


def window_within(limit: float, iteration: int, *, lost_iterations: float, every: int, longest: int) -> int:
    """The longest window with which a failure at ``iteration`` keeps the PLT within ``limit``; at least 1.

    If tokens are spread evenly over iterations, a failure loses ``every * (window - 1) / 2`` iterations of
    all experts' tokens. Windows are halved or doubled (as K is in section 5.3), since each change takes a
    further ring.

    Args:
        limit: of the PLT, such as 0.0375.
        lost_iterations: what earlier failures have lost, as iterations of all experts' tokens.
        every: iterations between two snapshots.
        longest: the window that is wanted otherwise.
    """
    window = 1
    for candidate in _halvings(longest):
        if lost_iterations + every * (candidate - 1) / 2 <= limit * iteration:
            window = max(window, candidate)
    return window


def _halvings(window: int) -> list[int]:
    """The window, half of it (rounded up), and so on down to 1."""
    found = [window]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


# -- by tokens at risk -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RiskedExpert:
    """An expert that may be selected.

    Args:
        operator: its number.
        layer: of which it is.
        tokens: that it was given since it was in a snapshot last.
    """

    operator: int
    layer: str
    tokens: float


class Selection(StrEnum):
    """Which experts a snapshot has."""

    TURNS = "turns"  # all in turn (MoC-System's sequential selection)
    LAYER = "layer"  # of each layer those with the most tokens at risk (MoC-System's load-aware selection)
    MODEL = "model"  # more of the layers that have more tokens at risk (MoEtion, algorithm 1)


def select_by_risk(
    experts: Sequence[RiskedExpert], rooms: Mapping[str, int], selection: Selection
) -> list[int]:
    """The operators of the experts with the most tokens at risk, besides those whose turn it is.

    Args:
        experts: those whose turn it is not.
        rooms: by layer, how many there is room for.
        selection: by layer, or over all layers: then each gets a part of all rooms in proportion to its
            tokens at risk. What exceeds a layer's experts goes to the other layers.
    Source: MoC-System (ASPLOS '25), section 3.2; MoEtion, section 4.3 and algorithm 1, corrected: a layer's
    share is limited to its experts, and the rest is given to the others.
    """
    by_layer: dict[str, list[RiskedExpert]] = {layer: [] for layer in rooms}
    for expert in experts:
        if expert.tokens > 0:
            by_layer[expert.layer].append(expert)
    counts = dict(rooms)
    if selection is Selection.MODEL:
        risks = {layer: sum(e.tokens for e in found) for layer, found in by_layer.items()}
        most = {layer: len(found) for layer, found in by_layer.items()}
        counts = _shares(risks, most, sum(rooms.values()))
    chosen: list[int] = []
    for layer, found in by_layer.items():
        best = heapq.nsmallest(counts[layer], found, key=lambda e: (-e.tokens, e.operator))
        chosen += [expert.operator for expert in best]
    return chosen


def _shares(risks: Mapping[str, float], most: Mapping[str, int], total: int) -> dict[str, int]:
    """``total`` divided in proportion to ``risks``, at most ``most`` for each; the rest to the largest
    remainders.
    """
    given = dict.fromkeys(risks, 0)
    left = min(total, sum(most.values()))
    while left:
        open_ = {layer: risk for layer, risk in risks.items() if given[layer] < most[layer]}
        whole = sum(open_.values())
        exact = {layer: left * risk / whole for layer, risk in open_.items()}
        step = {layer: min(int(exact[layer]), most[layer] - given[layer]) for layer in open_}
        if not any(step.values()):
            order = sorted(open_, key=lambda layer: (-exact[layer], layer))
            step = dict.fromkeys(order[:left], 1)
        for layer, count in step.items():
            given[layer] += count
        left -= sum(step.values())
    return given
