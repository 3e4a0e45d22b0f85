"""Ranks exchange what they know over the job's own process group, so that each computes the same
plan and takes the same decision.

Between two exchanges no rank may go on or give up alone: the others would wait for it in the next
one until the process group times out. What may fail on one rank therefore ends in a vote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from ckptd.errors import DaemonUnavailable

__all__ = ["Exchange", "Failure", "all_or_none", "raise_together", "vote"]

# Gives what this rank says, gets what every rank said, in the order of ranks. A collective call.
Exchange = Callable[[bytes], list[bytes]]

_FAILURES_TOLD = 4
_TEXT_LIMIT = 2000


class Failure(msgspec.Struct, frozen=True):
    """What went wrong on a rank's node; an empty text: nothing."""

    node: str = ""
    text: str = ""

    @classmethod
    def of(cls, node: str, error: Exception | None) -> Failure:
        """The failure as the other ranks are told."""
        if error is None:
            return cls(node)
        return cls(node, (str(error) or type(error).__name__)[:_TEXT_LIMIT])


class _Vote(msgspec.Struct, frozen=True):
    """Fine; or once more, from the beginning; or (with a text in ``fatal``) not at all."""

    again: bool
    fatal: Failure


def vote(
    exchange: Exchange, node: str, *, again: bool = False, fatal: Exception | None = None
) -> bool:
    """Whether any rank wants all to try again; a collective call.

    Args:
        node: where this rank is.
        again: this rank wants to.
        fatal: why this rank cannot go on at all.
    Raises:
        DaemonUnavailable: a rank cannot go on (``raise_together``).
    """
    mine = _Vote(again, Failure.of(node, fatal))
    said = [
        msgspec.msgpack.decode(data, type=_Vote) for data in exchange(msgspec.msgpack.encode(mine))
    ]
    raise_together([told.fatal for told in said], fatal)
    return any(told.again for told in said)


@contextmanager
def all_or_none(exchange: Exchange, node: str) -> Iterator[None]:
    """Either every rank has come through the block, or every rank raises; a collective call at its end.

    Raises:
        DaemonUnavailable: it failed on a rank (``raise_together``).
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the others wait to hear of it; raised below
        failed = error
    try:
        vote(exchange, node, fatal=failed)
    except ValueError as error:  # no process group: nobody can be told, and nobody waits
        if failed is None or failed is error:
            raise
        raise failed from error
    except DaemonUnavailable as error:
        # Where others did not even come to hear of it, what went wrong here is the better answer.
        if failed is None or failed in (error, error.__cause__):
            raise
        raise failed from error


def raise_together(failures: Sequence[Failure], own: Exception | None) -> None:
    """Raise on every rank if there was a failure on any.

    Args:
        failures: by rank, the same on all of them.
        own: this rank's.
    Raises:
        DaemonUnavailable: names the ranks that failed, and their nodes. Where something else than a missing daemon was the
            matter, that is raised on the rank where it happened: its type tells the user what to do about it.
    """
    failed = [(rank, told) for rank, told in enumerate(failures) if told.text]
    if not failed:
        return
    if own is not None and (len(failures) == 1 or not isinstance(own, DaemonUnavailable)):
        raise own
    texts = [f"rank {rank} on node {told.node}: {told.text}" for rank, told in failed]
    more = len(texts) - _FAILURES_TOLD
    text = "; ".join(texts[:_FAILURES_TOLD]) + (f"; and {more} more ranks" if more > 0 else "")
    raise DaemonUnavailable(text, operation="recover") from own
