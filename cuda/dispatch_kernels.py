"""The dispatcher's three Triton kernels; ``ckptd.cuda.dispatch`` says what they compute and calls them.

All numbers are int64, none negative, so ``//`` and ``%`` are those of Python. Tensors are row-major ``[R,
E]``, *planes* of ``R * E`` numbers; sizes that do not fill a block are masked. There are no atomics and no
order between programs, so a repetition has the same bits.

- ``state[l, side]``: tokens dealt with before leg l, at the ranks that have them (side 0) and at those that
  compute them (side 1). Before the first leg these are the tokens that stay where they are.
- ``lines[l, side]``: where the tokens of leg l begin on their group's line, on either side.

Numbers that vary from call to call or between layers are not specialised on: one compilation serves them all.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _extras_before(upto, turn, rest, wrapped):
    """How many of the first ``upto`` replicas take a token of the remainder: ``rest`` from ``turn`` on."""
    straight = tl.minimum(tl.maximum(upto - turn, 0), rest - wrapped)
    return straight + tl.minimum(upto, wrapped)


@triton.jit(do_not_specialize=["row", "ranks", "experts"])
def quotas_kernel(
    tokens,
    row,
    totals,
    replicas,
    upto,
    holders,
    quotas,
    state,
    ranks,
    experts,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Quotas, and what each rank keeps. A program has some ranks and all experts, since remainders go round
    over the experts.

    Args:
        tokens: ``[R, E]`` with ``row`` numbers from one rank's to the next one's.
        totals, holders: ``[E]``, all tokens and all replicas of an expert.
        upto: replicas on the ranks up to this one, itself included.
        state: its first leg is written.
    """
    expert = tl.arange(0, BLOCK_E)
    known = expert < experts
    total = tl.load(totals + expert, mask=known, other=0)
    slots = tl.load(holders + expert, mask=known, other=1)
    rest = total % slots
    turn = (tl.cumsum(rest, 0) - rest) % slots
    wrapped = tl.maximum(turn + rest - slots, 0)
    rank = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = (rank < ranks)[:, None] & known[None, :]
    at = rank[:, None] * experts + expert[None, :]
    here = tl.load(replicas + at, mask=mask, other=0)
    last = tl.load(upto + at, mask=mask, other=0)
    turn, rest, wrapped = turn[None, :], rest[None, :], wrapped[None, :]
    extra = _extras_before(last, turn, rest, wrapped) - _extras_before(last - here, turn, rest, wrapped)
    quota = here * (total // slots)[None, :] + extra
    own = tl.load(tokens + rank[:, None] * row + expert[None, :], mask=mask, other=0)
    kept = tl.minimum(own, quota)
    tl.store(quotas + at, quota, mask=mask)
    tl.store(state + at, kept, mask=mask)
    tl.store(state + ranks * experts + at, kept, mask=mask)


@triton.jit
def _laid_out(amount, matched):
    """Where each rank's amount begins on the line, and how much of it is matched."""
    at = tl.cumsum(amount, 0) - amount
    return at, tl.minimum(tl.maximum(matched - at, 0), amount)


@triton.jit(do_not_specialize=["row", "leg", "ranks", "experts"])
def match_kernel(
    tokens,
    row,
    quotas,
    state,
    lines,
    order,
    starts,
    leg,
    ranks,
    experts,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Match surplus with room within a group, as much as there is of both. A program has one group and some
    experts.

    Example: surplus 3, 0, 1 and room 0, 2, 0 begin at 0, 3, 3 and at 0, 0, 2; two tokens are matched, both of
    the first rank.

    Args:
        order: ``[R]``, ranks group by group.
        starts: where each group begins in it, and ``R``.
        state: leg ``leg`` is read, the next one written.
        lines: leg ``leg`` is written.
    """
    group = tl.program_id(0)
    place = tl.load(starts + group) + tl.arange(0, BLOCK_R)
    member = place < tl.load(starts + group + 1)
    rank = tl.load(order + place, mask=member, other=0)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask = member[:, None] & (expert < experts)[None, :]
    plane = ranks * experts
    at = rank[:, None] * experts + expert[None, :]
    state += 2 * leg * plane
    lines += 2 * leg * plane
    sent_before = tl.load(state + at, mask=mask, other=0)
    got_before = tl.load(state + plane + at, mask=mask, other=0)
    own = tl.load(tokens + rank[:, None] * row + expert[None, :], mask=mask, other=0)
    surplus = own - sent_before
    room = tl.load(quotas + at, mask=mask, other=0) - got_before
    matched = tl.minimum(tl.sum(surplus, 0), tl.sum(room, 0))[None, :]
    sent_at, sent = _laid_out(surplus, matched)
    got_at, got = _laid_out(room, matched)
    tl.store(lines + at, sent_at, mask=mask)
    tl.store(lines + plane + at, got_at, mask=mask)
    tl.store(state + 2 * plane + at, sent_before + sent, mask=mask)
    tl.store(state + 3 * plane + at, got_before + got, mask=mask)


@triton.jit
def _interval(state, lines, side, at, mask, plane):
    """Where tokens of a leg begin and end on the line; ``state`` and ``lines`` begin at the leg."""
    begin = tl.load(lines + side * plane + at, mask=mask, other=0)
    before = tl.load(state + side * plane + at, mask=mask, other=0)
    after = tl.load(state + (2 + side) * plane + at, mask=mask, other=0)
    return begin, begin + after - before


@triton.jit
def _overlap(state, lines, side: tl.constexpr, mine, known, at, mask, plane):
    """Where interval ``mine`` meets interval ``at`` on the other side, and the length of the overlap."""
    begin, end = _interval(state, lines, side, mine, known, plane)
    begin_o, end_o = _interval(state, lines, 1 - side, at, mask, plane)
    begins = tl.maximum(begin[None, :], begin_o)
    return begins - begin[None, :], tl.minimum(end[None, :], end_o) - begins


@triton.jit(do_not_specialize=["rank", "ranks", "experts"])
def share_kernel(
    state,
    lines,
    groups,
    rank,
    shared,
    ranks,
    experts,
    LEGS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """What ``rank`` exchanges with every rank: the overlaps of its own interval with those of the others.

    Args:
        groups: ``[LEGS, R]``, the group of each rank; on a leg tokens stay within it.
        shared: three planes are written: tokens sent to each rank, the first of them, tokens received
            from each rank.
    """
    other = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    known = expert < experts
    mask = (other < ranks)[:, None] & known[None, :]
    plane = ranks * experts
    at = other[:, None] * experts + expert[None, :]
    mine = rank * experts + expert
    kept = tl.load(state + mine, mask=known, other=0)
    sent = tl.where((other == rank)[:, None], kept[None, :], 0)
    got = sent
    first = tl.zeros([BLOCK_R, BLOCK_E], tl.int64)
    for leg in tl.static_range(LEGS):
        state_l = state + 2 * leg * plane
        lines_l = lines + 2 * leg * plane
        group = tl.load(groups + leg * ranks + other, mask=other < ranks, other=-1)
        same_group = (group == tl.load(groups + leg * ranks + rank))[:, None]
        into, length = _overlap(state_l, lines_l, 0, mine, known, at, mask, plane)
        before = tl.load(state_l + mine, mask=known, other=0)[None, :]
        some = same_group & (length > 0)
        sent += tl.where(some, length, 0)
        first += tl.where(some, before + into, 0)
        into, length = _overlap(state_l, lines_l, 1, mine, known, at, mask, plane)
        got += tl.where(same_group & (length > 0), length, 0)
    tl.store(shared + at, sent, mask=mask)
    tl.store(shared + plane + at, first, mask=mask)
    tl.store(shared + 2 * plane + at, got, mask=mask)
