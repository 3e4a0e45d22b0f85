"""Turns of experts, sizes, and what is lost: against counts by hand and exhaustive enumeration."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptd.core.partial_experts import (
    LayerTokens,
    experts_of_layers,
    iterations_at_risk,
    plan_partial,
    popularity,
    proportion_lost,
    rooms,
    rotation,
    select_by_risk,
    share_experts,
    turns_of_owners,
    window_for,
    window_within,
)
from ckptd.core.snapshot_policy import OperatorCost, OperatorKind, PartialPolicy, PartialScope


def model(layers: int, experts: int) -> list[tuple[str, int] | None]:
    """Of each layer one operator that is no expert, then its experts."""
    found: list[tuple[str, int] | None] = []
    for layer in range(layers):
        found += [None, *((f"layer {layer}", index) for index in range(experts))]
    return found


class TestTurns:
    @given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 12))
    def test_each_layer_has_k_experts_in_each_phase(self, layers: int, experts: int, selected: int) -> None:
        window = window_for(experts, selected)
        everything = model(layers, experts)
        phases = rotation(everything, window)
        of = Counter((e[0], p) for e, p in zip(everything, phases, strict=True) if e is not None)
        # Phases of equal size, if K divides E; else they differ by one expert at most.
        sizes = {of[f"layer {layer}", phase] for layer in range(layers) for phase in range(window)}
        assert sizes <= {experts // window, -(-experts // window)}
        assert max(sizes) <= min(selected, experts)

    @pytest.mark.parametrize(
        ("ranks", "local", "layers", "selected"), [(4, 2, 4, 1), (2, 4, 3, 2), (8, 1, 8, 1), (4, 2, 8, 4)]
    )
    def test_ranks_have_their_share_of_every_phase(
        self, ranks: int, local: int, layers: int, selected: int
    ) -> None:
        """As in MoC-System's figure 4: layers are shifted, so that no rank copies what all layers select."""
        total = ranks * local
        window = window_for(total, selected)
        busy = Counter[tuple[int, int]]()
        of_layer = Counter[tuple[str, int]]()
        for rank in range(ranks):
            mine = model(layers, local)
            phases = rotation(mine, window, first=rank * local, num_experts=total)
            for expert, phase in zip(mine, phases, strict=True):
                if expert is not None:
                    busy[rank, phase] += 1
                    of_layer[expert[0], phase] += 1
        assert {*of_layer.values()} == {selected}
        each = [busy[rank, phase] for rank in range(ranks) for phase in range(window)]
        assert max(each) - min(each) <= 1, each

    @given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 36))
    def test_snapshots_and_ranks_differ_by_one_expert_at_most(
        self, ranks: int, local: int, layers: int, window: int
    ) -> None:
        """Also where the window does not divide the experts: the longer turns of layers do not meet."""
        total = ranks * local
        window = min(window, total)
        busy = Counter[tuple[int, int]]()
        for rank in range(ranks):
            mine = model(layers, local)
            phases = rotation(mine, window, first=rank * local, num_experts=total)
            busy.update((rank, p) for e, p in zip(mine, phases, strict=True) if e is not None)
        each = [busy[rank, phase] for rank in range(ranks) for phase in range(window)]
        assert max(each) - min(each) <= 1, each

    def test_numbers_need_not_be_consecutive(self) -> None:
        """An elastic layer has some of the experts only."""
        experts = [("layer", 3), ("layer", 7), ("layer", 5)]
        assert sorted(rotation(experts, 3)) == [0, 1, 2]
        assert experts_of_layers(experts) == {"layer": 3}


def costs(layers: int, experts: int, *, anchor: int, otherwise: int) -> list[OperatorCost]:
    return [
        OperatorCost(f"{i}", OperatorKind.DENSE, 1000, 1000)
        if expert is None
        else OperatorCost(f"{i}", OperatorKind.EXPERT, anchor, otherwise)
        for i, expert in enumerate(model(layers, experts))
    ]


class TestSizes:
    @pytest.mark.parametrize(("experts", "selected"), list(itertools.product([4, 8, 16], [1, 2, 4])))
    def test_snapshots_have_the_bytes_of_equation_6(self, experts: int, selected: int) -> None:
        layers, anchor = 3, 1600
        window = window_for(experts, selected)
        schedule = plan_partial(
            costs(layers, experts, anchor=anchor, otherwise=0),
            rotation(model(layers, experts), window),
            window,
            fixed_bytes=0,
            budget_bytes=None,
        )
        equation_6 = layers * 1000 + selected / experts * layers * experts * anchor
        assert set(schedule.phase_bytes) == {equation_6}
        assert schedule.dense_bytes == layers * (1000 + experts * anchor)

    def test_a_budget_that_is_not_met_is_said(self) -> None:
        schedule = plan_partial(
            costs(1, 2, anchor=500, otherwise=100), [0, 0, 1], 2, fixed_bytes=7, budget_bytes=1600
        )
        assert schedule.phase_bytes == (1607, 1607)
        assert not schedule.fits
        assert "does not fit 1,600" in schedule.reason
        assert schedule.reason.endswith("whichever experts it anchors, is 1,207 bytes")

    def test_a_budget_below_what_is_always_saved_is_met_by_no_number_of_experts(self) -> None:
        """Two experts of 500 bytes, of which 100 are always there, and 1,007 bytes of everything else."""
        for budget, none_fits in ((1207, True), (1208, False)):
            schedule = plan_partial(
                costs(1, 2, anchor=500, otherwise=100), [0, 0, 1], 2, fixed_bytes=7, budget_bytes=budget
            )
            assert not schedule.fits
            assert "is 1,207 bytes" in schedule.reason
            assert ("so no number of experts fits" in schedule.reason) == none_fits


@pytest.mark.parametrize("scope", PartialScope)
@pytest.mark.parametrize("every", [1, 3])
def test_any_window_of_snapshots_has_every_expert(scope: PartialScope, every: int) -> None:
    experts = model(2, 5)
    window = 3
    schedule = plan_partial(
        costs(2, 5, anchor=10, otherwise=0),
        rotation(experts, window),
        window,
        fixed_bytes=0,
        budget_bytes=None,
    )
    always = [i for i, expert in enumerate(experts) if expert is None]
    policy = PartialPolicy(schedule, always, every=every, scope=scope)
    taken = [i for i in range(40) if policy.levels_for(i) is not None]
    assert taken == list(range(0, 40, every))
    for start in range(len(taken) - window):
        anchored: set[int] = set()
        for iteration in taken[start : start + window]:
            levels = policy.levels_for(iteration)
            assert levels is not None
            assert set(always) <= {*levels.anchored}
            rest = {*range(len(experts))} - {*levels.anchored}
            assert {*levels.compute} == (rest if scope is PartialScope.OPTIMIZER else set())
            assert {*levels.state} == (rest if scope is PartialScope.WEIGHTS else set())
            anchored |= {*levels.anchored}
        assert anchored == {*range(len(experts))}


class TestShares:
    """Ranks that hold the same experts, of several expert-parallel ones."""

    @given(
        st.integers(1, 5),
        st.integers(1, 6),
        st.integers(1, 4),
        st.integers(2, 6),
        st.integers(1, 24),
        st.data(),
    )
    def test_each_expert_has_one_owner_and_all_have_as_much(
        self, layers: int, local: int, places: int, replicas: int, window: int, data: st.DataObject
    ) -> None:
        total, place = local * places, data.draw(st.integers(0, places - 1))
        sizes = data.draw(st.lists(st.sampled_from([1, 2, 5]), min_size=layers, max_size=layers))
        experts = [(f"layer {n}", i) for n in range(layers) for i in range(local)]
        phases = rotation(experts, min(window, total), first=place * local, num_experts=total)
        ranks = [place + places * replica for replica in range(replicas)]
        size = [sizes[int(name[-1])] for name, _ in experts]
        owners = share_experts(experts, size, phases, data.draw(st.permutations(ranks)))
        assert owners == share_experts(experts, size, phases, ranks), "what every rank computes"

        def spread_of(counts: dict[int, int]) -> int:
            each = [counts.get(rank, 0) for rank in ranks]
            return max(each) - min(each)

        for phase in set(phases):
            turns = [owner for owner, turn in zip(owners, phases, strict=True) if turn == phase]
            assert spread_of(Counter(turns)) <= 1
        held = Counter[int]()
        for owner, nbytes in zip(owners, size, strict=True):
            held[owner] += nbytes
        assert spread_of(held) <= max(size)
        if len(set(size)) == 1:
            assert spread_of(Counter(owners)) <= 1

    def test_the_experts_of_a_layer_have_several_owners(self) -> None:
        experts = [(f"layer {n}", i) for n in range(4) for i in range(4)]
        owners = share_experts(experts, [1] * 16, rotation(experts, 4), [3, 7])
        layers = [owners[n : n + 4] for n in range(0, 16, 4)]
        assert all(sorted(layer) == [3, 3, 7, 7] for layer in layers), layers

    def test_parts_of_an_expert_stay_together(self) -> None:
        experts = [("layer", i // 2) for i in range(8)]
        owners = share_experts(experts, [1] * 8, [0] * 8, [0, 1])
        assert owners[::2] == owners[1::2]
        assert Counter(owners) == {0: 4, 1: 4}

    @given(st.integers(1, 5), st.integers(1, 6), st.integers(2, 6), st.integers(1, 24), st.integers(1, 24))
    def test_owners_have_even_turns_in_a_window_for_which_they_were_not_dealt(
        self, layers: int, local: int, replicas: int, window: int, dealt: int
    ) -> None:
        experts = [(f"layer {n}", i) for n in range(layers) for i in range(local)]
        numbers, total = range(len(experts)), 4 * local
        first = rotation(experts, min(dealt, total), num_experts=total)
        owners = share_experts(experts, [1] * len(experts), first, range(replicas))
        window = min(window, total)
        phases = rotation(experts, window, num_experts=total)
        turns = turns_of_owners([*phases, 0], [*owners, 0], [numbers], window)
        assert turns.pop() == 0, "what is no expert"
        assert {*turns} <= set(range(window))
        for owner in range(replicas):
            mine = Counter(turn for turn, of in zip(turns, owners, strict=True) if of == owner)
            each = [mine[phase] for phase in range(window)]
            assert max(each) - min(each) <= 1
        assert turns_of_owners(phases, [-1] * len(experts), [numbers], window) == phases

    @given(st.integers(1, 4), st.integers(1, 6), st.integers(2, 5), st.integers(1, 12), st.integers(0, 40))
    def test_plans_have_the_bytes_of_the_rank_with_the_most(
        self, layers: int, local: int, replicas: int, window: int, otherwise: int
    ) -> None:
        experts = [(f"layer {n}", i) for n in range(layers) for i in range(local)]
        window = min(window, local)
        phases = rotation(experts, window)
        whole, few = 60 * replicas, otherwise * replicas  # bytes of an expert, and while it is not selected
        plan = plan_partial(
            [OperatorCost(f"{e}", OperatorKind.EXPERT, 60, otherwise) for e in experts],
            phases,
            window,
            fixed_bytes=7,
            budget_bytes=None,
            whole=[(replicas, range(len(experts)))],
        )
        owners = share_experts(experts, [1] * len(experts), phases, range(replicas))
        turns = turns_of_owners(phases, owners, [range(len(experts))], window)
        most = max(Counter(zip(owners, turns, strict=True)).values())
        always = 7 + few * max(Counter(owners).values())
        for told in plan.phase_bytes:
            assert told - (always + (whole - few) * most) in (0, 1, 2)  # fractions are rounded up


def played(skew: float, apart: float, by: str) -> float:
    """Iterations of all tokens that a failure loses on average, of 12 layers of 8 experts that four ranks share.

    Args:
        apart: how much the popularity of an expert differs from rank to rank: the deviation of its logarithm.
        by: which experts a snapshot has: those whose turn it is (``turns``), or those with the most tokens of
            their owner (``owner``) or of all ranks together (``all``).
    """
    ranks, window, drawn, length = 4, 8, 1000, 160
    experts = [(f"layer {n}", i) for n in range(12) for i in range(8)]
    phases = rotation(experts, window)
    owners = np.array(share_experts(experts, [1] * 96, phases, range(ranks)))
    owned = [np.flatnonzero(owners == rank) for rank in range(ranks)]
    turns = [[i for i, turn in enumerate(phases) if turn == phase] for phase in range(window)]
    room = [rooms([[i for i in t if owners[i] == r] for t in turns], owned[r].tolist()) for r in range(ranks)]
    rng = np.random.default_rng(1)
    popular = np.stack([rng.permutation(popularity(8, skew)) for _ in range(12)])
    shares = popular * np.exp(apart * rng.standard_normal((ranks, 12, 8)))
    shares /= shares.sum(-1, keepdims=True)
    given, captured, seen = (np.zeros((ranks, 96)) for _ in range(3))
    last, lost = np.array(phases) - window, 0.0
    for n in range(length):
        given += rng.multinomial(drawn, shares).reshape(ranks, 96)
        chosen = turns[n % window]
        if by != "turns":
            at_risk = seen - captured
            counts = at_risk if by == "owner" else np.broadcast_to(at_risk.sum(0), at_risk.shape)
            found = []
            for rank, of in enumerate(owned):
                following = np.roll(room[rank], -(n % window)).tolist()
                some = select_by_risk(counts[rank, of], n - last[of], following, 2 * window)
                found += of[some].tolist()
            chosen = found
        captured[:, chosen], last[chosen], seen = given[:, chosen], n, given.copy()
        lost += (given - captured).sum() / (ranks * 12 * drawn) * (n >= 2 * window)
    return lost / (length - 2 * window)


class TestSamples:
    """An owner counts its own tokens: a part of those for which its experts compute."""

    def test_they_serve_as_well_as_all_counts_where_ranks_see_the_same_on_average(self) -> None:
        owner = played(0.25, 0.0, "owner")
        assert owner == pytest.approx(played(0.25, 0.0, "all"), rel=0.02)
        assert owner < 0.7 * played(0.25, 0.0, "turns")

    def test_where_ranks_see_other_data_they_serve_less(self) -> None:
        """With even tokens of all ranks together even less than turns."""
        assert 1.05 * played(0.25, 0.7, "all") < played(0.25, 0.7, "owner") < 0.8 * played(0.25, 0.7, "turns")
        assert played(0.0, 0.7, "owner") > 1.1 * played(0.0, 0.7, "turns")


class TestLoss:
    def test_the_share_is_the_mean_over_layers_of_all_ranks_together(self) -> None:
        ranks = [
            {"a": LayerTokens(100, 10), "b": LayerTokens(50, 0)},
            {"a": LayerTokens(300, 30), "c": LayerTokens(0, 0)},
        ]
        assert proportion_lost(ranks) == (40 / 400 + 0) / 2
        assert proportion_lost([]) == 0.0

    @given(st.floats(0, 0.2), st.integers(0, 3000), st.floats(0, 50), st.integers(1, 9), st.integers(1, 64))
    def test_a_failure_never_exceeds_the_limit_if_tokens_are_even(
        self, limit: float, iteration: int, lost: float, every: int, longest: int
    ) -> None:
        """By enumeration of what each expert loses: those of phase p are p snapshots old."""
        window = window_within(limit, iteration, lost_iterations=lost, every=every, longest=longest)
        ages = [every * age for age in range(window)]
        mean = sum(ages) / len(ages)
        assert window == 1 or lost + mean <= limit * iteration
        longer = 2 * window
        if longer <= longest:
            assert lost + every * (longer - 1) / 2 > limit * iteration or longest % longer

    def test_windows_are_halves_of_the_one_that_is_wanted(self) -> None:
        windows = [window_within(0.0375, i, lost_iterations=0, every=1, longest=12) for i in range(200)]
        assert sorted({*windows}) == [1, 2, 3, 6, 12]
        assert windows == sorted(windows)
        assert windows[13] == 1
        assert windows[14] == 2


def possible(ages: dict[int, int], capacities: list[int], longest: int) -> bool:
    """Whether every rule can be kept from here on, by playing earliest deadline first for some windows."""
    ages = dict(ages)
    for n in range(3 * longest):
        if any(age > longest for age in ages.values()):
            return False
        room = capacities[n % len(capacities)]
        for operator in sorted(ages, key=lambda i: -ages[i])[:room]:
            ages[operator] = 0
        ages = {operator: age + 1 for operator, age in ages.items()}
    return all(age <= longest for age in ages.values())


class TestSelection:
    @given(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8)), min_size=1, max_size=6),
        st.lists(st.integers(0, 3), min_size=1, max_size=3),
        st.integers(1, 8),
    )
    def test_the_most_tokens_that_leave_every_rule_possible(
        self, experts: list[tuple[int, int]], capacities: list[int], longest: int
    ) -> None:
        """Against all choices of as many experts."""
        ages = {i: age for i, (_, age) in enumerate(experts)}
        assume(possible(ages, capacities, longest))
        following = capacities[1:] + capacities[:1]

        def kept(some: tuple[int, ...]) -> bool:
            after = {i: 1 if i in some else age + 1 for i, age in ages.items()}
            return possible(after, following, longest)

        room = min(capacities[0], len(experts))
        sums = [
            sum(experts[i][0] for i in some)
            for some in itertools.combinations(range(len(experts)), room)
            if kept(some)
        ]
        tokens, given_ages = zip(*experts, strict=True)
        chosen = select_by_risk(tokens, given_ages, capacities, longest)
        assert len(chosen) == len({*chosen}) == room
        assert kept(tuple(chosen))
        assert sum(experts[i][0] for i in chosen) == max(sums)

    @given(st.integers(2, 9), st.integers(1, 3), st.randoms(use_true_random=False))
    def test_none_is_left_out_for_longer_than_two_windows(
        self, number: int, selected: int, rng: random.Random
    ) -> None:
        window = window_for(number, selected)
        turns = Counter(rotation([("layer", i) for i in range(number)], window))
        capacities = [turns[phase] for phase in range(window)]
        popular = [rng.random() ** 4 for _ in range(number)]
        tokens = [0.0] * number
        last = [-(window - phase) for phase in rotation([("layer", i) for i in range(number)], window)]
        for n in range(60):
            tokens = [t + p for t, p in zip(tokens, popular, strict=True)]
            rooms = [capacities[(n + ahead) % window] for ahead in range(window)]
            for i in select_by_risk(tokens, [n - each for each in last], rooms, 2 * window):
                tokens[i], last[i] = 0.0, n
            assert all(n - each < 2 * window for each in last)

    @given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.sets(st.integers(0, 30)))
    def test_further_experts_fill_the_room_that_turns_leave(
        self, layers: int, experts: int, window: int, fixed: set[int]
    ) -> None:
        """Against all choices of experts with which no snapshot is larger than the largest one of the turns."""
        window = min(window, experts)
        turns: list[list[int]] = [[] for _ in range(window)]
        for i, phase in enumerate(
            rotation([(f"{n}", e) for n in range(layers) for e in range(experts)], window)
        ):
            turns[phase].append(i)
        selectable = set(range(layers * experts)) - fixed
        largest = max(map(len, turns))
        for turn, room in zip(turns, rooms(turns, selectable), strict=True):
            others = len(set(turn) - selectable)
            fitting = [n for n in range(len(selectable) + largest + 1) if others + n <= largest]
            assert room == max(fitting)
            assert room >= len(set(turn) & selectable)

    def test_filled_room_leaves_less_at_risk(self) -> None:
        """Turns of 3, 3 and 2 of eight experts with even tokens; a snapshot has room for three."""

        def lost(capacities: list[int]) -> int:
            last, found = [-3, -3, -3, -2, -2, -2, -1, -1], 0
            for n in range(48):
                ages = [n - each for each in last]
                for i in select_by_risk([float(age) for age in ages], ages, capacities, 6):
                    last[i] = n
                capacities = capacities[1:] + capacities[:1]
                found += sum(n - each for each in last)
            return found

        turns = [[0, 1, 2], [3, 4, 5], [6, 7]]
        filled = rooms(turns, range(8))
        assert filled == [3, 3, 3]
        assert lost(filled) == pytest.approx(7 / 8 * lost([3, 3, 2]), rel=0.02)

    def test_with_even_tokens_experts_take_turns(self) -> None:
        """So nothing is lost by selecting where there is nothing to gain."""
        assert select_by_risk([40.0, 30.0, 20.0, 10.0], [4, 3, 2, 1], [1], 8) == [0]
        assert select_by_risk([0.0] * 4, [1, 3, 4, 2], [2], 8) == [2, 1]

    def test_a_large_model_is_selected_from(self) -> None:
        """61 layers of 256 experts, each by itself and all together; bench.policies measures the time."""
        tokens, ages = [float(31 * i % 97) for i in range(61 * 256)], [1 + i % 32 for i in range(61 * 256)]
        assert len(select_by_risk(tokens[:256], ages[:256], [8], 64)) == 8
        assert len(select_by_risk(tokens, ages, [61 * 8], 64)) == 61 * 8


class TestTokensAtRisk:
    @pytest.mark.parametrize("experts", [2, 8, 64])
    @pytest.mark.parametrize("skew", [0.0, 0.05, 0.5, 0.95])
    def test_shares_have_the_skew_that_is_asked_for(self, experts: int, skew: float) -> None:
        """The normalized Herfindahl-Hirschman index of MoEvement's appendix D."""
        shares = popularity(experts, skew)
        assert sum(shares) == pytest.approx(1.0)
        assert shares == sorted(shares, reverse=True)
        found = (sum(share**2 for share in shares) - 1 / experts) / (1 - 1 / experts)
        assert found == pytest.approx(skew, abs=1e-6)

    @pytest.mark.parametrize(("experts", "window"), [(8, 4), (16, 4), (16, 8)])
    @pytest.mark.parametrize("skew", [0.0, 0.05, 0.3])
    def test_they_are_those_of_tokens_that_are_drawn(self, experts: int, window: int, skew: float) -> None:
        """Tokens drawn by their popularity, the experts in several orders; a failure may come any time."""
        rng = random.Random(experts + window)
        phases = rotation([("layer", i) for i in range(experts)], window)
        turns = Counter(phases)
        length, drawn, orders = 12 * window, 1000, 6
        lost = 0
        for _ in range(orders):
            shares = popularity(experts, skew)
            rng.shuffle(shares)
            tokens, last = [0] * experts, [phase - window for phase in phases]
            for n in range(length):
                for i in rng.choices(range(experts), shares, k=drawn):
                    tokens[i] += 1
                rooms = [turns[(n + ahead) % window] for ahead in range(window)]
                for i in select_by_risk(tokens, [n - each for each in last], rooms, 2 * window):
                    tokens[i], last[i] = 0, n
                lost += sum(tokens)
        expected = iterations_at_risk(experts, skew, window)
        assert lost / drawn / length / orders == pytest.approx(expected, rel=0.15)
        assert expected <= (window - 1) / 2

    def test_without_a_window_nothing_is_at_risk(self) -> None:
        assert iterations_at_risk(8, 0.5, 1) == 0.0
