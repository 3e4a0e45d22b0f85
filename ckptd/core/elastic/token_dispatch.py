"""The assignment of tokens to ranks, when experts have different numbers of replicas on different ranks
(docs/elastic.md, section 7).

Every token goes to exactly one holder of its expert; every replica of an expert computes equally many
tokens, within one; as many tokens as possible stay on their rank. All ranks all-gather the counts,
and each computes the same answer.

Method (Lazarus, Algorithm 1, with integers that add up). The tokens of an expert are divided over its
replicas; the remainder goes to consecutive replicas, and each expert begins where the one before
ended, so that remainders do not pile up on the first rank. That gives the *quota* of each rank. A
rank keeps its own tokens up to its quota. The rest of each expert, surplus on some ranks and room on
others, is laid out on two lines in the order of ranks, and a token goes to the rank whose room lies
where its surplus lies; if the nodes of ranks are known, within each node first. No loop over tokens
or pairs of ranks: prefix sums, minima and differences, the same on a GPU. By position, at most
``2 R`` pairs of ranks exchange tokens of an expert; in proportion to the room, as in the paper, up to
``R * R / 4``.

Complexity: ``R * E`` for the plan and for one rank's tokens, ``R * E * log(R * E)`` for those of all.

Shapes: ``R`` ranks, ``E`` experts, ``G`` groups of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ckptd.core.elastic.elastic_types import integers
from ckptd.errors import ElasticError

Ints = NDArray[np.int64]

_MOST_TOKENS = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class Sends:
    """The tokens that one rank sends, to itself, too.

    Args:
        tokens: ``[R, E]``, tokens for each expert on each rank.
        first: ``[R, E]``, the first of them among this rank's tokens of that expert, in the order of
            the rank's batch; the others follow it. 0 without any.
    """

    tokens: Ints
    first: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The tokens that all ranks send, without zeros: four arrays of the same length, ordered by source,
    expert and first token.
    """

    source: Ints
    target: Ints
    expert: Ints
    tokens: Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Leg:
    """Matched surplus and room: intervals on one line for each expert; all ``[R, E]``."""

    sent: Ints
    sent_at: Ints
    got: Ints
    got_at: Ints
    begun: Ints  # the sender's first token on this leg


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """The target of every token; made by :func:`plan_dispatch`.

    Args:
        quotas: ``[R, E]``, tokens that each rank computes for each expert.
        kept: ``[R, E]``, those of them that are its own.
    """

    quotas: Ints
    kept: Ints
    legs: tuple[_Leg, ...]

    def sends(self, rank: int) -> Sends:
        """The tokens that ``rank`` sends to each rank."""
        tokens = np.zeros_like(self.quotas)
        first = np.zeros_like(self.quotas)
        tokens[rank] = self.kept[rank]
        for leg in self.legs:
            begins = np.maximum(leg.sent_at[rank], leg.got_at)
            ends = np.minimum(leg.sent_at[rank] + leg.sent[rank], leg.got_at + leg.got)
            some = ends > begins
            tokens += np.where(some, ends - begins, 0)
            first += np.where(some, leg.begun[rank] + begins - leg.sent_at[rank], 0)
        return Sends(tokens, first)

    def receives(self, rank: int) -> Ints:
        """``[R, E]``: tokens for each expert that ``rank`` gets from each rank, itself included."""
        tokens = np.zeros_like(self.quotas)
        tokens[rank] = self.kept[rank]
        for leg in self.legs:
            begins = np.maximum(leg.sent_at, leg.got_at[rank])
            ends = np.minimum(leg.sent_at + leg.sent, leg.got_at[rank] + leg.got[rank])
            tokens += np.maximum(ends - begins, 0)
        return tokens

    def entries(self) -> Entries:
        """The tokens that all ranks send, for predictions: a rank needs `sends` and `receives` only."""
        rank, expert = np.nonzero(self.kept)
        parts = [np.stack([rank, rank, expert, np.zeros_like(rank), self.kept[rank, expert]])]
        parts += [_pairs(leg) for leg in self.legs]
        source, target, expert, first, tokens = np.concatenate(parts, axis=1)
        order = np.lexsort((first, expert, source))
        return Entries(source[order], target[order], expert[order], tokens[order])

    def matrix(self) -> Ints:
        """``[R, R, E]``: tokens from each rank to each rank for each expert; for small numbers of ranks."""
        ranks, experts = self.quotas.shape
        out = np.zeros((ranks, ranks, experts), dtype=np.int64)
        entries = self.entries()
        out[entries.source, entries.target, entries.expert] = entries.tokens
        return out


def plan_dispatch(tokens: ArrayLike, replicas: ArrayLike, *, nodes: ArrayLike | None = None) -> Dispatch:
    """Decide which rank computes every token; see the module.

    Args:
        tokens: ``[R, E]``, tokens of each rank for each expert.
        replicas: ``[R, E]``, replicas of each expert on each rank.
        nodes: ``[R]``, the number of each rank's node; None: every rank is alone on one.
    Raises:
        ValueError: no integers, negative numbers, or shapes that do not fit each other.
        ElasticError: an expert that no rank holds, with or without tokens.
    """
    tokens_RE = _counts(tokens, "tokens")
    replicas_RE = _counts(replicas, "replicas")
    if tokens_RE.shape != replicas_RE.shape:
        raise ValueError(
            f"tokens of shape {tokens_RE.shape}, replicas of shape {replicas_RE.shape}: both have a row "
            "for each rank and a column for each expert"
        )
    quotas_RE = token_quotas(tokens_RE.sum(axis=0), replicas_RE)
    kept = np.minimum(tokens_RE, quotas_RE)
    surplus, room, begun = tokens_RE - kept, quotas_RE - kept, kept
    legs = []
    for groups in _groupings(nodes, len(tokens_RE)):
        leg = _match(surplus, room, begun, groups)
        surplus, room, begun = surplus - leg.sent, room - leg.got, begun + leg.sent
        legs.append(leg)
    return Dispatch(quotas_RE, kept, tuple(legs))


def token_quotas(totals: ArrayLike, replicas: ArrayLike) -> Ints:
    """``[R, E]``: tokens that each rank computes for each expert; columns add up to ``totals``.

    Example: 7 tokens for each of two experts with a replica on each of three ranks: quotas 3, 2, 2 for
    the first expert and 2, 3, 2 for the second.

    Args:
        totals: ``[E]``, tokens of all ranks for each expert.
        replicas: ``[R, E]``, replicas of each expert on each rank.
    Raises:
        ValueError: as for :func:`plan_dispatch`.
        ElasticError: an expert that no rank holds.
    """
    totals_E = integers(totals, "totals", ndim=1)
    replicas_RE = _counts(replicas, "replicas")
    if totals_E.shape != replicas_RE.shape[1:]:
        raise ValueError(f"{len(totals_E)} totals for {replicas_RE.shape[1]} experts")
    replicas_E = replicas_RE.sum(axis=0)
    if not replicas_E.all():
        expert = int(np.argmin(replicas_E))
        raise ElasticError(
            "no rank holds the expert",
            operation="dispatch",
            ids={"expert": expert, "tokens": int(totals_E[expert])},
            hint="Place at least one replica of every expert before tokens are dispatched",
        )
    each_E, rest_E = np.divmod(totals_E, replicas_E)
    turn_E = (np.cumsum(rest_E) - rest_E) % replicas_E
    upto_RE = np.cumsum(replicas_RE, axis=0)
    extra_RE = np.diff(_extras_before(upto_RE, turn_E, rest_E, replicas_E), axis=0, prepend=np.int64(0))
    return np.asarray(replicas_RE * each_E + extra_RE)


def _extras_before(upto_RE: Ints, turn_E: Ints, rest_E: Ints, replicas_E: Ints) -> Ints:
    """How many of the first ``upto`` replicas take a token of the remainder: ``rest`` from ``turn`` on."""
    wrapped_E = np.maximum(turn_E + rest_E - replicas_E, 0)
    return np.asarray(np.clip(upto_RE - turn_E, 0, rest_E - wrapped_E) + np.minimum(upto_RE, wrapped_E))


def _counts(values: ArrayLike, name: str) -> Ints:
    array = integers(values, name, ndim=2)
    if not array.size:
        raise ValueError(f"{name} of shape {array.shape}: there must be a rank and an expert")
    if int(array.min()) < 0:
        rank, expert = (int(i) for i in np.unravel_index(int(array.argmin()), array.shape))
        raise ValueError(f"{name}[{rank}, {expert}] is {array[rank, expert]}, below zero")
    if int(array.max()) * array.size >= _MOST_TOKENS:
        raise ValueError(f"{name} add up to more than an int64 holds")
    return array


def _groupings(nodes: ArrayLike | None, num_ranks: int) -> list[Ints]:
    """The groupings of ranks within which tokens are exchanged, one after the other."""
    everyone = np.zeros(num_ranks, dtype=np.int64)
    if nodes is None:
        return [everyone]
    node_R = integers(nodes, "nodes", ndim=1)
    if len(node_R) != num_ranks:
        raise ValueError(f"nodes of {len(node_R)} ranks for {num_ranks} ranks")
    return [node_R, everyone]


def _match(surplus: Ints, room: Ints, begun: Ints, groups: Ints) -> _Leg:
    """Match surplus with room within each group; groups are laid end to end, so that they never meet."""
    order: Ints | slice = np.argsort(groups, kind="stable")
    _, starts, group = np.unique(groups[order], return_index=True, return_inverse=True)
    if (np.diff(groups) >= 0).all():
        order = slice(None)  # in order already: saves copies, which take most of the time
    surplus, room = surplus[order], room[order]
    matched_GE = np.minimum(np.add.reduceat(surplus, starts, axis=0), np.add.reduceat(room, starts, axis=0))
    at_GE = np.cumsum(matched_GE, axis=0) - matched_GE

    def lay_out(amount: Ints) -> tuple[Ints, Ints]:
        at = np.cumsum(amount, axis=0)
        at -= amount
        if len(starts) > 1:
            at -= at[starts][group]
        taken = matched_GE[group]
        taken -= at
        np.clip(taken, 0, amount, out=taken)
        if len(starts) > 1:
            at += at_GE[group]
        return _undone(taken, order), _undone(at, order)

    return _Leg(*lay_out(surplus), *lay_out(room), begun)


def _undone(rows: Ints, order: Ints | slice) -> Ints:
    """Rows taken in that order, back in their own."""
    if isinstance(order, slice):
        return rows
    out = np.empty_like(rows)
    out[order] = rows
    return out


def _pairs(leg: _Leg) -> Ints:
    """``[5, n]``: source, target, expert, first token and number of the tokens of a leg."""
    source, source_ends, first = _line(leg.sent, leg.sent_at, leg.begun)
    target, target_ends, _ = _line(leg.got, leg.got_at, leg.begun)
    ends = np.union1d(source_ends, target_ends)
    starts = np.concatenate([np.zeros(min(1, len(ends)), dtype=np.int64), ends[:-1]])
    i = np.searchsorted(source_ends, starts, side="right")
    j = np.searchsorted(target_ends, starts, side="right")
    tokens = ends - starts
    experts = leg.sent.shape[1]
    begins = first[i] + starts - (source_ends - _lengths(source_ends))[i]
    return np.stack([source[i] // experts, target[j] // experts, source[i] % experts, begins, tokens])


def _line(length: Ints, at: Ints, begun: Ints) -> tuple[Ints, Ints, Ints]:
    """The intervals of all experts on one line: (rank, expert) as one number, end, and first token."""
    rank, expert = np.nonzero(length)
    order = np.lexsort((at[rank, expert], expert))
    rank, expert = rank[order], expert[order]
    ends = np.cumsum(length[rank, expert])
    return rank * length.shape[1] + expert, ends, begun[rank, expert]


def _lengths(ends: Ints) -> Ints:
    return np.diff(ends, prepend=np.int64(0))
