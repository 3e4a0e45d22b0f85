"""Both forms of the token dispatcher against a reference that deals tokens out one by one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptd.core.elastic.token_dispatch import plan_dispatch, token_quotas
from ckptd.errors import ElasticError
from tests.ckptd.core.elastic.forms import FORMS, INTERPRETED, Form
from tests.long import LONG

Ints = NDArray[np.int64]
EXAMPLES = 8 if INTERPRETED else 2000 if LONG else 60


def _reference(tokens: Ints, replicas: Ints, nodes: list[int] | None) -> list[list[list[list[int]]]]:
    """For each source, target and expert: which of the source's tokens go there. No arithmetic but
    adding one.
    """
    ranks, experts = tokens.shape
    sent: list[list[list[list[int]]]] = [
        [[[] for _ in range(experts)] for _ in range(ranks)] for _ in range(ranks)
    ]
    turn = 0
    for expert in range(experts):
        holders = [rank for rank in range(ranks) for _ in range(replicas[rank, expert])]
        quota = [0] * ranks
        total = int(tokens[:, expert].sum())
        even = total - total % len(holders)
        for number in range(even):
            quota[holders[number % len(holders)]] += 1
        for number in range(total - even):
            quota[holders[(turn + number) % len(holders)]] += 1
        turn += total - even
        left = [list(range(tokens[rank, expert])) for rank in range(ranks)]
        for groups in (list(range(ranks)), nodes or [], [0] * ranks):
            for source, target in itertools.product(range(ranks), repeat=2):
                while (
                    groups
                    and groups[source] == groups[target]
                    and left[source]
                    and len([t for s in sent for t in s[target][expert]]) < quota[target]
                ):
                    sent[source][target][expert].append(left[source].pop(0))
        assert not any(left)
    return sent


@dataclass(frozen=True)
class Case:
    tokens: Ints
    replicas: Ints
    nodes: list[int] | None = None


@st.composite
def cases(draw: st.DrawFn, *, most_tokens: int = 9) -> Case:
    ranks, experts = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    size = ranks * experts
    tokens = draw(st.lists(st.integers(0, most_tokens), min_size=size, max_size=size))
    replicas = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    holders = draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts))
    replicas_RE = np.array(replicas, dtype=np.int64).reshape(ranks, experts)
    replicas_RE[holders, range(experts)] += 1
    nodes = draw(st.none() | st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
    return Case(np.array(tokens, dtype=np.int64).reshape(ranks, experts), replicas_RE, nodes)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(case=cases())
def test_it_is_what_dealing_them_out_one_by_one_gives(form: Form, case: Case) -> None:
    plan = form(case.tokens, case.replicas, nodes=case.nodes)
    expected = _reference(case.tokens, case.replicas, case.nodes)
    ranks, experts = case.tokens.shape
    for source in range(ranks):
        sends = plan.sends(source)
        for target, expert in itertools.product(range(ranks), range(experts)):
            first = int(sends.first[target, expert])
            tokens = list(range(first, first + int(sends.tokens[target, expert])))
            assert tokens == expected[source][target][expert]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(case=cases(most_tokens=1 << 40))
def test_what_must_hold_for_any_numbers(form: Form, case: Case) -> None:
    plan = form(case.tokens, case.replicas, nodes=case.nodes)
    ranks = len(case.tokens)
    matrix = plan.matrix()
    assert (matrix >= 0).all()
    assert np.array_equal(matrix.sum(axis=1), case.tokens), "every token is sent, once"
    assert np.array_equal(matrix.sum(axis=0), plan.quotas), "and is computed where it is to be"
    assert not plan.quotas[case.replicas == 0].any(), "by a holder of its expert"
    replicas = case.replicas.sum(axis=0)
    each = case.tokens.sum(axis=0) // replicas
    assert (plan.quotas >= each * case.replicas).all()
    assert (plan.quotas <= (each + 1) * case.replicas).all()
    diagonal = matrix[range(ranks), range(ranks)]
    assert np.array_equal(diagonal, np.minimum(case.tokens, plan.quotas)), "local capacity first"
    for rank in range(ranks):
        assert np.array_equal(plan.sends(rank).tokens, matrix[rank])
        assert np.array_equal(plan.receives(rank), matrix[:, rank])
    if case.nodes is not None:
        for node in set(case.nodes):
            here = np.array(case.nodes) == node
            needed = np.maximum(case.tokens[here].sum(0) - plan.quotas[here].sum(0), 0)
            left = matrix[here][:, ~here].sum(axis=(0, 1))
            assert np.array_equal(left, needed), "only what the node has no room for leaves it"


@settings(max_examples=1000 if LONG else 25, deadline=None)
@given(cases())
def test_entries_are_in_the_order_of_each_source_s_tokens(case: Case) -> None:
    plan = plan_dispatch(case.tokens, case.replicas, nodes=case.nodes)
    entries = plan.entries()
    assert (entries.tokens > 0).all()
    at = np.zeros_like(case.tokens)
    for source, target, expert, tokens in zip(
        entries.source, entries.target, entries.expert, entries.tokens, strict=True
    ):
        assert plan.sends(int(source)).first[target, expert] == at[source, expert]
        at[source, expert] += tokens
    assert np.array_equal(at, case.tokens)


@settings(max_examples=1000 if LONG else 40, deadline=None)
@given(
    st.integers(1, 9).flatmap(
        lambda ranks: st.tuples(st.just(ranks), st.lists(st.integers(0, 40), min_size=1))
    )
)
def test_remainders_go_round(case: tuple[int, list[int]]) -> None:
    """Where all ranks hold all experts, they compute equally many tokens, within one over all experts."""
    ranks, totals = case
    loads = token_quotas(totals, np.ones((ranks, len(totals)), dtype=np.int64)).sum(axis=1)
    assert loads.max() - loads.min() <= 1


def test_small_quotas_by_hand() -> None:
    # The docstring's example; the remainder of the second expert begins where the first one's ended.
    assert token_quotas([7, 7], np.ones((3, 2), dtype=int)).tolist() == [[3, 2], [2, 3], [2, 2]]
    # Fewer tokens than replicas, none at all, and a rank with two replicas.
    assert token_quotas([1, 0, 5], [[1, 1, 2], [1, 1, 1]]).tolist() == [[1, 0, 3], [0, 0, 2]]


@pytest.mark.parametrize("form", FORMS)
def test_small_cases_by_hand(form: Form) -> None:
    # Rank 2 holds nothing and sends all it has; rank 0 has no tokens and only receives.
    plan = form([[0], [2], [4]], [[1], [1], [0]])
    assert plan.matrix()[:, :, 0].tolist() == [[0, 0, 0], [0, 2, 0], [3, 1, 0]]
    assert plan.sends(2).first[:, 0].tolist() == [0, 3, 0]
    # The same on two nodes: what rank 1 cannot keep goes to its neighbour before anybody else.
    crowded = form([[6], [6], [0], [0]], [[1], [0], [0], [1]], nodes=[0, 1, 0, 1])
    assert crowded.matrix()[:, :, 0].tolist() == [[6, 0, 0, 0], [0, 0, 0, 6], [0] * 4, [0] * 4]


def test_an_expert_that_nobody_holds_is_refused_even_without_tokens() -> None:
    with pytest.raises(ElasticError, match=r"expert=1 tokens=0\]: no rank holds the expert"):
        plan_dispatch([[3, 0]], [[1, 0]])


@pytest.mark.parametrize(
    ("tokens", "replicas", "nodes", "message"),
    [
        ([[1, -2]], [[1, 1]], None, r"tokens\[0, 1\] is -2, below zero"),
        ([[1, 2]], [[1, -1]], None, r"replicas\[0, 1\] is -1, below zero"),
        ([[1.0, 2.0]], [[1, 1]], None, "tokens must be integers, not float64"),
        ([[float("nan")]], [[1]], None, "tokens must be integers, not float64"),
        ([[1, 2]], [[1, 1], [1, 1]], None, r"shape \(1, 2\), replicas of shape \(2, 2\)"),
        ([1, 2], [[1, 1]], None, "tokens must have 2 dimensions"),
        (np.zeros((0, 2), dtype=int), [[1, 1]], None, "there must be a rank and an expert"),
        ([[1 << 62]], [[1]], None, "more than an int64 holds"),
        ([[1], [1]], [[1], [1]], [0], "nodes of 1 ranks for 2 ranks"),
    ],
)
def test_bad_input_is_named(tokens: object, replicas: object, nodes: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_dispatch(tokens, replicas, nodes=nodes)  # type: ignore[arg-type]


def test_totals_must_fit_the_experts() -> None:
    with pytest.raises(ValueError, match="1 totals for 2 experts"):
        token_quotas([3], [[1, 1]])
