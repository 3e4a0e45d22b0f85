"""What every rank has to say before something is done together: compared, and refused on all ranks
or on none.

A rank that finds something wrong must not stop alone: the others would wait for it in their next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from ckptd.client.ranks.rank_exchange import gather_bytes

__all__ = ["agree_on", "refused"]

_TOLD_PROBLEMS = 4
_SAID, _PROBLEM = b"+", b"-"


def agree_on(say: Callable[[], bytes], group: Any, *, what: str, other: str = "") -> list[bytes]:
    """What every rank says; a collective call.

    Args:
        say: what this rank says; raises if it cannot go on.
        what: what is not done if any cannot, as the beginning of the message.
        other: what is wrong with a rank that says something else than rank 0; empty: nothing is.
    Raises:
        ValueError: the same on every rank, if any cannot go on, or says something else.
    """
    try:
        mine, failed = _SAID + say(), None
    except Exception as error:  # noqa: BLE001
        # The user's own functions run in there, and the other ranks wait to hear of whatever they raise.
        mine, failed = _PROBLEM + _words(error).encode(), error
    said = gather_bytes(mine, dist.get_world_size(group), group)
    problems = {rank: one[1:].decode() for rank, one in enumerate(said) if one.startswith(_PROBLEM)}
    if not problems and other:
        problems = {rank: other for rank, one in enumerate(said) if one != said[0]}
    if problems:
        raise refused(what, problems) from failed
    return [one[1:] for one in said]


def _words(error: Exception) -> str:
    own = isinstance(error, ValueError | TypeError) and str(error)
    return str(error) if own else f"{type(error).__name__}: {error}"


def refused(what: str, problems: Mapping[int, str]) -> ValueError:
    """The error that names the ranks with problems, the first few; what all have alike is told once."""
    if len(problems) > 1 and len(set(problems.values())) == 1:
        ranks = ", ".join(map(str, list(problems)[:_TOLD_PROBLEMS]))
        more = ", …" if len(problems) > _TOLD_PROBLEMS else ""
        return ValueError(f"{what}: ranks {ranks}{more}: {next(iter(problems.values()))}")
    told = [f"rank {rank}: {text}" for rank, text in problems.items()]
    more_ranks = len(told) - _TOLD_PROBLEMS
    text = "; ".join(told[:_TOLD_PROBLEMS])
    return ValueError(
        f"{what}: {text}" + (f"; and {more_ranks} more ranks" if more_ranks > 0 else "")
    )
