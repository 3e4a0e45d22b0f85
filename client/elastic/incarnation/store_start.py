"""Where the nodes' memory holds no whole state, or an older one, a world goes on from storage
(docs/elastic.md §14).

One rank of each node asks its daemon what is durable of the run's worlds, and tells the others. All
decide alike: the newest world of which anything is whole is the history of the job, in memory or in
storage, and of that world its newest iteration. If that is in storage, the images that no node
holds are shared out over the nodes by their bytes, each is brought by one daemon into its memory,
verified, and then the ranks plan as if it had always been there.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.incarnations import Chosen, NodeHeld
from ckptd.errors import DaemonUnavailable
from ckptd.launch import connect
from ckptd.storage.checkpoints.names import run_of_incarnation
from ckptd.transport.messages import (
    BringStored,
    Brought,
    DurableWorld,
    DurableWorlds,
    GetDurableWorlds,
    Reply,
    Request,
)
from ckptd.transport.wire import ControlClient, RefusedError, RequestTimeout, WireError

__all__ = ["DurableState", "Storage", "missing_ranks", "newer_than", "share_out"]

logger = get_logger(__name__)

# Where memory is enough, a store that is away is not waited for. Where it is not, the daemon gives
# up before this (`store_deadline_s`).
_GLANCE_S, _LOOK_S = 30.0, 900.0
# A daemon answers what is asked here at once. One that was started again knows nothing of an
# earlier request, and one that is dead says nothing.
_ANSWER_S, _ASKED = 5.0, 3
_POLL_S, _LOOK_POLL_S = 0.1, 0.01
_PROGRESS_S = 30.0
_Reply = TypeVar("_Reply", bound=Reply)
_DAEMON_FAILS = (RefusedError, RequestTimeout, WireError, OSError)


@dataclass(frozen=True, slots=True)
class DurableState:
    """What is durable of a run, the same on all ranks.

    Args:
        nodes: by number, those whose daemons have the store, and can bring something from it.
        worlds: the numbers of all.
        checkpoints: newest first, without the damaged ones.
    """

    nodes: tuple[int, ...] = ()
    worlds: tuple[int, ...] = ()
    checkpoints: tuple[DurableWorld, ...] = ()


class Storage:
    """Storage as one start of a world uses it: all ranks call the same methods in the same order.

    Args:
        find_endpoint: of this node's daemon; None where there is none.
    """

    def __init__(
        self,
        find_endpoint: Callable[[], str] | None,
        job: str,
        run: str,
        ranks: Collectives,
    ) -> None:
        self._find_endpoint, self._ranks = find_endpoint, ranks
        self._job, self._run = job, run
        self._looked = self._answered = False
        self.brought: tuple[int, int] | None = None
        """World and iteration of what came."""

    def look(self, speakers: Sequence[int], *, enough: bool) -> DurableState:
        """What is durable of the run; a collective call.

        Args:
            speakers: the rank that speaks for each node.
            enough: whether memory holds a whole state: then a store that does not answer stops nobody.
        Raises:
            DaemonUnavailable: on all ranks: memory is not enough, and no store that is configured
                answers, or all that is there is damaged; or one has answered this start before:
                then it holds what memory does not.
        """
        # What looked damaged to an earlier start is looked at once more; what this one has found
        # stays passed over.
        again, self._looked = self._looked, True
        timeout_s = _GLANCE_S if enough else _LOOK_S

        def look() -> DurableWorlds:
            if self._find_endpoint is None or self._ranks.rank not in speakers:
                return DurableWorlds(configured=False)
            with _daemon_errors("look for what is durable"):
                return self._see(again=again, timeout_s=timeout_s)

        found = self._ranks.outcomes(look, DurableWorlds)
        seen = [found.values[rank] or DurableWorlds(configured=False) for rank in speakers]
        able = [n for n, one in enumerate(seen) if one.configured]
        silent = [found.failures[rank] for rank in speakers if found.failures[rank].text]
        if silent and not able and (self._answered or not enough):
            found.raise_failures()
        self._answered = bool(able)
        for failure in silent:
            logger.warning("node %s: %s; the ranks go on without its store", failure.node, failure.text)
        return self._common([seen[n] for n in able], able, enough=enough)

    def _see(self, *, again: bool, timeout_s: float) -> DurableWorlds:
        """What this node's daemon sees; it is asked until it has heard of its store."""
        assert self._find_endpoint is not None, "it was looked at"
        message = GetDurableWorlds(self._job, self._run, secrets.token_hex(8), again)
        until_s = time.monotonic() + timeout_s
        with connect(self._find_endpoint(), _ANSWER_S) as client:
            while (seen := _ask(client, message, DurableWorlds)).running:
                if time.monotonic() > until_s:
                    text = f"the store has not answered for {timeout_s:.0f} s"
                    raise DaemonUnavailable(text, operation="look for what is durable")
                time.sleep(_LOOK_POLL_S)
        return seen

    def _common(self, seen: Sequence[DurableWorlds], able: Sequence[int], *, enough: bool) -> DurableState:
        """What one node sees, without what any has found to be damaged."""
        if not able:
            return DurableState()
        damaged = {which for one in seen for which in one.damaged}
        usable = [c for c in seen[0].checkpoints if (c.world, c.iteration) not in damaged]
        if damaged and not usable and not enough:
            raise DaemonUnavailable(
                f"nothing stored of {self._job}/{self._run} can be used: {len(damaged)} "
                "checkpoints are damaged",
                operation="start a world",
                hint="`ckptctl events` and `ckptctl checkpoints verify` name what is damaged. To "
                "begin anew remove it with "
                "`ckptctl checkpoints rm`, or pass run= a new name",
            )
        return DurableState(tuple(able), seen[0].worlds, tuple(usable))

    def bring(
        self,
        wanted: DurableWorld,
        missing: Sequence[int],
        stored: DurableState,
        speakers: Sequence[int],
    ) -> bool:
        """Have the nodes' daemons bring these ranks' images; a collective call. Whether all came:
        else another checkpoint may do.

        Raises:
            DaemonUnavailable: on all ranks: a node has no memory for them, or its daemon is gone.
        """
        shares = share_out(missing, wanted.sizes, stored.nodes)
        logger.warning(
            "the job goes on from storage: iteration %d of world %d, of which %d of %d images are "
            "brought here",
            wanted.iteration,
            wanted.world,
            len(missing),
            len(wanted.sizes),
        )
        rank = self._ranks.rank
        mine = shares.get(speakers.index(rank), ()) if rank in speakers else ()

        def bring() -> bool:
            if not mine:
                return True
            name = run_of_incarnation(self._run, wanted.world)
            with _daemon_errors("bring what is durable"):
                brought = self._await(BringStored(self._job, name, wanted.iteration, mine))
            if brought.state == "done":
                return True
            what = f"iteration {wanted.iteration} of world {wanted.world}"
            logger.error("%s: %s", what, brought.reason)
            if brought.state == "refused":
                text = f"{what} cannot be brought from storage: {brought.reason}"
                raise DaemonUnavailable(text, operation="start a world")
            return False

        came = all(self._ranks.agree(bring, bool))
        if came:
            self.brought = wanted.world, wanted.iteration
        return came

    def _await(self, message: BringStored) -> Brought:
        """Ask until it is over."""
        assert self._find_endpoint is not None, "its node has a store"
        next_s = time.monotonic() + _PROGRESS_S
        with connect(self._find_endpoint(), _ANSWER_S) as client:
            while (brought := _ask(client, message, Brought)).state == "running":
                if time.monotonic() > next_s:
                    next_s += _PROGRESS_S
                    logger.info("%d of %d bytes came from storage", brought.bytes_done, brought.bytes_total)
                time.sleep(_POLL_S)
        return brought


@contextlib.contextmanager
def _daemon_errors(operation: str) -> Iterator[None]:
    """What a daemon does not answer, as the error that all ranks raise."""
    try:
        yield
    except _DAEMON_FAILS as error:
        raise DaemonUnavailable(str(error), operation=operation) from error


def _ask(client: ControlClient, message: Request, kind: type[_Reply]) -> _Reply:
    """What may be asked twice; again where no answer comes, since the daemon may have been started
    again meanwhile.

    Raises:
        RefusedError, RequestTimeout, WireError: as of the client.
    """
    for _ in range(_ASKED - 1):
        with contextlib.suppress(RequestTimeout):
            return client.ask(message, kind)
        logger.warning("the daemon does not answer; it is asked again")
    return client.ask(message, kind)


def newer_than(chosen: Chosen | None, stored: DurableState) -> DurableWorld | None:
    """The durable checkpoint to go on from; None: what memory holds is newer, or there is none.

    A later world went on from an earlier one, which may hold iterations that were abandoned since:
    the world counts first.
    """
    newest = max(stored.checkpoints, key=lambda c: (c.world, c.iteration), default=None)
    if newest is None or chosen is None:
        return newest
    held = chosen.world, chosen.iteration
    return newest if (newest.world, newest.iteration) > held else None


def missing_ranks(wanted: DurableWorld, held: Sequence[NodeHeld]) -> list[int]:
    """The ranks of whose state in that checkpoint no node holds an image."""
    there = {
        image.rank
        for node in held
        for image in node.images
        if (image.world, image.iteration) == (wanted.world, wanted.iteration)
    }
    return [rank for rank in range(len(wanted.sizes)) if rank not in there]


def share_out(
    ranks: Sequence[int], sizes: Sequence[int], nodes: Sequence[int]
) -> Mapping[int, tuple[int, ...]]:
    """Whose images each of these nodes brings: the largest first, each to the node that has least
    to bring so far.
    """
    load, found = dict.fromkeys(nodes, 0), {node: list[int]() for node in nodes}
    for rank in sorted(ranks, key=lambda r: (-sizes[r], r)):
        node = min(nodes, key=lambda n: (load[n], len(found[n]), n))
        found[node].append(rank)
        load[node] += sizes[rank]
    return {node: tuple(sorted(each)) for node, each in found.items()}
