"""Partial experts: which ones each snapshot anchors, and what a failure loses by that. Pure.

A snapshot of a *partial* policy holds everything but the experts, and of each layer's E experts about
K = E / window. So a recovery finds each expert as it was up to ``window - 1`` snapshots ago, and the updates
since then are lost. The *proportion of lost tokens* (PLT) is the mean over layers of the tokens whose updates
of experts were lost in all failures so far, over all tokens that the layer's experts were given.

While the windows are short enough, a failure does not raise the PLT above a limit (`window_within`): this is
known before the failure. MoC-System raises K after the failure that exceeded the limit. It holds for even
tokens. Of uneven ones turns lose as much on average over the moments of a failure, and at most twice as
much at any of them.

Experts take turns (`rotation`), or are selected by tokens at risk (`select_by_risk`): those that an expert
was given since it was in a snapshot last. None is left out for longer than two windows, which the ring holds.
Of ranks that hold the same experts, one selects and captures each (`share_experts`).

Source: MoC-System (ASPLOS '25), sections 3 (equations 6 and 7) and 5.3; MoEtion, section 4.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from ckptd.core.snapshot_policy import OperatorCost, PolicyKind, Schedule

LOST_TOKENS_LIMIT = 0.0375
"""The PLT below which MoC-System found no effect on the loss (section 3.1.2)."""

_GOLDEN = 0.618  # parts of a circle so far apart are spread evenly over it, however many there are

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
) -> list[int]:
    """The phase of each operator: experts take turns, those of other layers and ranks interleaved.

    In each phase a layer has E / window experts (rounded up or down) on all of its ranks together. They are
    on different ranks as far as possible, and the turns of each layer begin where those of the one before
    end, so that the ranks' shares of a phase differ by one expert at most (MoC-System, 3.2 and figure 4).

    Args:
        first: the number of this rank's first expert among those of a layer.
        num_experts: of a whole layer; None: this rank has all of them.
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
            # Where the window does not divide the experts, the longer phases of a layer follow those of the
            # one before, too.
            phases[i] = (position * window // total + layers[name]) % window
    return phases


def plan_partial(
    costs: Sequence[OperatorCost],
    phases: Sequence[int],
    window: int,
    *,
    fixed_bytes: int,
    budget_bytes: int | None,
    whole: Sequence[tuple[int, Collection[int]]] = (),
) -> Schedule:
    """The schedule in which operator i is in phase ``phases[i]``.

    Args:
        costs: of an expert, ``compute_bytes`` is what is captured of it while it is not selected; of another
            operator both sizes are those of an anchor.
        fixed_bytes: the bytes of every snapshot besides operators.
        budget_bytes: the bytes that can be copied per snapshot; None for no limit.
        whole: numbers of ranks, and the experts that these share, so that one of them selects each and
            captures it whole; their costs are the mean over the ranks. Whatever their phases are, a snapshot
            has as many as any (`turns_of_owners`, `rooms`). The sizes are those of the rank with the most.
    """
    members: list[list[int]] = [[] for _ in range(window)]
    for i, phase in enumerate(phases):
        members[phase].append(i)
    floor = fixed_bytes + sum(cost.compute_bytes for cost in costs)
    extra = [cost.anchor_bytes - cost.compute_bytes for cost in costs]
    filled = 0.0
    for ranks, experts in whole:
        owned = -(-len(experts) // ranks)
        floor += math.ceil(sum(costs[i].compute_bytes for i in experts) * (owned * ranks / len(experts) - 1))
        filled += sum(extra[i] for i in experts) * -(-owned // window) * ranks / len(experts)
        extra = [0 if i in experts else each for i, each in enumerate(extra)]
    sizes = [floor + math.ceil(filled) + sum(extra[i] for i in phase) for phase in members]
    peak = max(sizes)
    fits = budget_bytes is None or peak <= budget_bytes
    compared = "" if budget_bytes is None else f", {'fits' if fits else 'does not fit'} {budget_bytes:,}"
    if budget_bytes is not None and not fits:
        compared += f"; what every snapshot has, whichever experts it anchors, is {floor:,} bytes"
        compared += ", so no number of experts fits" if floor >= budget_bytes else ""
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
    layers = dict.fromkeys(itertools.chain.from_iterable(ranks))
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


class Selection(StrEnum):
    """Which experts a snapshot has."""

    TURNS = "turns"  # all in turn (MoC-System's sequential selection)
    LAYER = "layer"  # of each layer those with the most tokens at risk (MoC-System's load-aware selection)
    MODEL = "model"  # of all layers together those with the most (as MoEtion)


def select_by_risk(tokens: ArrayLike, ages: ArrayLike, capacities: Sequence[int], longest: int) -> list[int]:
    """The experts with the most tokens at risk for which a snapshot has room.

    The sum of the selected tokens is the largest that leaves it possible for every later snapshot to keep the
    rule of ``longest``. To that end, of the experts that must be in one of the next D + 1 snapshots, as many
    are selected now as the next D have no room for; each such bound limits how many of the others are.

    Args:
        tokens: by expert, those that it was given since it was in a snapshot last.
        ages: by expert, the number of snapshots since then; 1: the last one had it.
        capacities: how many experts this snapshot has room for, and those that follow, in turn.
        longest: any so many consecutive snapshots have every expert.
    Returns:
        The numbers of the selected experts. Of those with equal tokens, older ones come first.
    Source: MoC-System (ASPLOS '25), section 3.2; MoEtion, section 4.3. Its algorithm 1 divides the room over
    layers in proportion to their tokens at risk; over all experts together no fewer tokens are selected.
    """
    since = np.asarray(ages)
    order = np.lexsort((-since, -np.asarray(tokens)))
    here = min(capacities[0], len(order))
    can_wait = np.maximum(longest - since, 0)  # so many snapshots
    due = np.cumsum(np.bincount(can_wait, minlength=longest)[:longest])
    following = np.resize(np.roll(capacities, -1), longest - 1)
    needed = np.minimum(due - np.concatenate(([0], np.cumsum(following))), here)
    # By D; where no more are needed than for a smaller D, that one limits the others more.
    before = np.maximum.accumulate(np.concatenate(([0], needed[:-1])))
    for wait in np.flatnonzero(needed > before)[::-1]:
        others = np.flatnonzero(can_wait[order] > wait)
        order = np.delete(order, others[here - needed[wait] :])
    found: list[int] = order[:here].tolist()
    return found


def share_experts(
    experts: Sequence[tuple[str, int]], sizes: Sequence[int], phases: Sequence[int], ranks: Sequence[int]
) -> list[int]:
    """Of ranks that hold the same experts, the one that captures each.

    Each rank computes the same. In each phase the ranks have as many experts as each other, up to one; over
    all phases, as many bytes as possible, and of experts of one size as many, up to one. The experts of a
    layer are spread over the ranks, so that each selects among experts of all layers.

    Args:
        experts: container and index of each; equal ones are parts of one expert, and stay together.
        sizes: the bytes of each.
        phases: in which they have their turns.
    """
    members = sorted(ranks)
    parts: dict[tuple[str, int], list[int]] = {}
    for i, expert in enumerate(experts):
        parts.setdefault(expert, []).append(i)
    size = {expert: sum(sizes[i] for i in of) for expert, of in parts.items()}
    turn = {expert: phases[of[0]] for expert, of in parts.items()}
    in_phase, in_layer = Counter[tuple[int, int]](), Counter[tuple[int, str]]()
    in_all = Counter[int]()
    found = [members[0]] * len(experts)
    for expert in sorted(parts, key=lambda each: (turn[each], -size[each], each)):
        phase, layer = turn[expert], expert[0]
        chosen = min(
            members, key=lambda rank: (in_phase[rank, phase], in_all[rank], in_layer[rank, layer], rank)
        )
        in_phase[chosen, phase] += 1
        in_layer[chosen, layer] += 1
        in_all[chosen] += size[expert]
        for i in parts[expert]:
            found[i] = chosen
    return found


def turns_of_owners(
    phases: Sequence[int], owners: Sequence[int], shared: Sequence[Collection[int]], window: int
) -> list[int]:
    """Other phases for experts that several ranks hold: each owner has as many in each, up to one.

    Owners outlive windows. Those that were dealt for one may have many of another one's experts in one phase.

    Args:
        phases: of each operator.
        owners: of each operator; negative: each rank captures its own.
        shared: the experts of each group of ranks. All of its members compute the same.
    """
    found = list(phases)
    for experts in shared:
        owned: dict[int, list[int]] = {}
        for i in sorted(experts, key=lambda i: (phases[i], i)):
            owned.setdefault(owners[i], []).append(i)
        owned.pop(-1, None)
        for number, owner in enumerate(sorted(owned)):
            for place, i in enumerate(owned[owner]):
                found[i] = (place * window // len(owned[owner]) + number) % window
    return found


def rooms(phases: Sequence[Sequence[int]], selectable: Collection[int]) -> list[int]:
    """For how many selectable experts each snapshot of a window has room.

    Where the turns leave a snapshot smaller than the largest one, further experts fill it: copies hide as
    well, and no slot is larger.

    Args:
        phases: the experts whose turn each snapshot is; those that are not selectable are in it anyway.
    """
    most = max(map(len, phases))
    return [most - sum(i not in selectable for i in phase) for phase in phases]


def popularity(experts: int, skew: float) -> list[float]:
    """Shares of a layer's tokens, the largest first, each the same part of the one before.

    Args:
        skew: their Herfindahl-Hirschman index between that of even tokens, 0, and of one expert with all, 1;
            below 1.
    Source: MoEvement (NSDI '26), appendix D, which draws the shares at random.
    """
    even, ratios = 1 / experts, [0.0, 1.0]
    for _ in range(60):
        ratio = sum(ratios) / 2
        total = sum(ratio**n for n in range(experts))
        shares = [ratio**n / total for n in range(experts)]
        found = sum(share * share for share in shares)
        ratios[found < even + skew * (1 - even)] = ratio
    return shares


@lru_cache(maxsize=1024)
def iterations_at_risk(experts: int, skew: float, window: int) -> float:
    """Tokens of all experts since these were in a snapshot last, as iterations of all tokens: what a failure
    loses between two snapshots of successive iterations, on average, if `select_by_risk` selects.

    Args:
        skew: of their `popularity`, which does not change, and has nothing to do with their order.
    """
    if skew <= 0 or window == 1:
        return (window - 1) / 2  # they take turns
    # The most popular ones far from each other: if they were neighbours, they would be due together.
    stride = next(n for n in itertools.count(round(experts * _GOLDEN)) if math.gcd(n, experts) == 1)
    sorted_shares = popularity(experts, skew)
    shares = [sorted_shares[n * stride % experts] for n in range(experts)]
    capacities = deque(Counter(n * window // experts for n in range(experts)).values())
    last = [n * window // experts - window for n in range(experts)]
    found = []
    for number in range(4 * window):
        ages = [number - each for each in last]
        tokens = [share * age for share, age in zip(shares, ages, strict=True)]
        for expert in select_by_risk(tokens, ages, capacities, 2 * window):
            last[expert] = number
        capacities.rotate(-1)
        found.append(sum(share * (number - each) for share, each in zip(shares, last, strict=True)))
    return sum(found[2 * window :]) / (2 * window)
