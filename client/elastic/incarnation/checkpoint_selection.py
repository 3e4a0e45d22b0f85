"""The state from which an incarnation continues: the newest whole one, in the nodes' memory or in storage
(docs/elastic.md, section 14).

One rank of each node asks its daemon which checkpoints of the run are durable, and tells the other
ranks. All ranks take the same decision: the newest incarnation of which anything is whole, in
memory or in storage, is the history of the job, and the state is that of its newest iteration. If
storage has it, the images that no node holds are divided over the nodes by their bytes. Each is
brought by one daemon into its memory and verified; then the ranks plan as if it had always been there.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

import msgspec

from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import Collectives, TryAgain
from ckptd.core.elastic.incarnations import ChosenState, ExpertLayers, NodeHeld, choose
from ckptd.errors import DaemonUnavailable, ElasticError, LocalProtocolError
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

logger = get_logger(__name__)

# A job that ended within its first steps may have left parts of a state only: a rank died before it
# had a snapshot, and the others are parked. To repeat these few steps costs less than a person's look.
_FEW_STEPS = 10
# Where memory suffices, a start does not wait for an absent store. Where it does not, the daemon gives
# up before this (`store_deadline_s`).
_GLANCE_S, _LOOK_S = 30.0, 900.0
# A daemon answers these requests at once. A restarted daemon does not know an earlier request, and a
# dead one does not answer.
_ANSWER_S, _ASKED = 5.0, 3
_POLL_S, _LOOK_POLL_S = 0.1, 0.01
_PROGRESS_S = 30.0
_OPERATION = "start an incarnation"
_Reply = TypeVar("_Reply", bound=Reply)


@dataclass(frozen=True, slots=True)
class DurableState:
    """The durable checkpoints of a run, the same on all ranks.

    Args:
        nodes: by number, those whose daemons have the store and can bring images from it.
        worlds: the numbers of all incarnations.
        checkpoints: newest first, without damaged ones.
    """

    nodes: tuple[int, ...] = ()
    worlds: tuple[int, ...] = ()
    checkpoints: tuple[DurableWorld, ...] = ()


def choose_state(
    held: Sequence[NodeHeld], layers: ExpertLayers, reporters: Sequence[int], storage: Storage
) -> tuple[ChosenState | None, DurableState]:
    """The state to continue from (None: the job begins), and what is durable; a collective call.

    Args:
        held: of each node.
        reporters: the rank that reports for each node.
    Raises:
        TryAgain: on all ranks: daemons brought images from storage, or failed to; look again.
        ElasticError: the nodes hold parts of states but no whole one, and nothing is durable.
        DaemonUnavailable: on all ranks: storage is needed, but does not answer or cannot be used.
    """
    chosen, lacking = None, None
    try:
        chosen = choose(held, layers)
    except ElasticError as error:  # the same on all ranks; storage may have what is missing
        lacking = error
    stored = storage.look(reporters, enough=chosen is not None)
    wanted = newer_than(chosen, stored)
    if wanted is not None:
        if lacking is not None:
            logger.warning("%s", lacking.message)
        missing = missing_ranks(wanted, held)
        if not missing:
            _explain(held, layers, (wanted.world, wanted.iteration))
        storage.bring(wanted, missing, stored, reporters)
        raise TryAgain
    if lacking is not None:
        reached = max((image.iteration for node in held for image in node.images), default=-1)
        if reached <= _FEW_STEPS:
            logger.warning("%s; these are the job's first steps: it begins anew", lacking.message)
            return None, stored
        if not stored.nodes:
            raise lacking
        raise ElasticError(
            f"{lacking.message}; and no checkpoint of this run is durable",
            operation=lacking.operation,
            hint=lacking.hint,
        )
    if chosen is not None and (chosen.world, chosen.iteration) == storage.brought:
        chosen = replace(chosen, reason=f"{chosen.reason}; it was brought from storage")
    return chosen, stored


def _explain(held: Sequence[NodeHeld], layers: ExpertLayers, which: tuple[int, int]) -> NoReturn:
    """Raise why the images of a durable checkpoint, all of them here, are no whole state."""
    nodes = [
        msgspec.structs.replace(node, images=tuple(i for i in node.images if (i.world, i.iteration) == which))
        for node in held
    ]
    choose(nodes, layers)
    raise LocalProtocolError(f"{which} is whole, and was not chosen", operation=_OPERATION)


def newer_than(chosen: ChosenState | None, stored: DurableState) -> DurableWorld | None:
    """The durable checkpoint to continue from; None if memory has a newer state, or none is durable.

    The incarnation counts first: a later one continued from an earlier one, which may have
    iterations that were abandoned since.
    """
    newest = max(stored.checkpoints, key=lambda c: (c.world, c.iteration), default=None)
    if newest is None or chosen is None:
        return newest
    held = chosen.world, chosen.iteration
    return newest if (newest.world, newest.iteration) > held else None


def missing_ranks(wanted: DurableWorld, held: Sequence[NodeHeld]) -> list[int]:
    """The ranks whose image of that checkpoint no node holds."""
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
    """The ranks whose images each node brings: largest first, each to the node with the fewest bytes."""
    load, found = dict.fromkeys(nodes, 0), {node: list[int]() for node in nodes}
    for rank in sorted(ranks, key=lambda r: (-sizes[r], r)):
        node = min(nodes, key=lambda n: (load[n], len(found[n]), n))
        found[node].append(rank)
        load[node] += sizes[rank]
    return {node: tuple(sorted(each)) for node, each in found.items()}


class Storage:
    """Storage for one start: all ranks call the same methods in the same order.

    Args:
        find_endpoint: of this node's daemon; None without one.

    Attributes:
        brought: incarnation and iteration that daemons brought.
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

    def look(self, reporters: Sequence[int], *, enough: bool) -> DurableState:
        """The durable checkpoints of the run; a collective call.

        Args:
            reporters: the rank that reports for each node.
            enough: memory holds a whole state: then the start goes on if no store answers.
        Raises:
            DaemonUnavailable: on all ranks: memory is not enough, and no configured store answers
                or all checkpoints are damaged; or no store answers that answered this start before:
                then it has what memory does not.
        """
        # The first look verifies again what looked damaged to an earlier start; what this start has
        # found damaged stays left out.
        again, self._looked = self._looked, True
        timeout_s = _GLANCE_S if enough else _LOOK_S

        def look() -> DurableWorlds:
            if self._find_endpoint is None or self._ranks.rank not in reporters:
                return DurableWorlds(configured=False)
            with _daemon_errors("look for what is durable"):
                return self._list(self._find_endpoint, again=again, timeout_s=timeout_s)

        found = self._ranks.outcomes(look, DurableWorlds)
        seen = [found.values[rank] or DurableWorlds(configured=False) for rank in reporters]
        able = [node for node, one in enumerate(seen) if one.configured]
        silent = [found.failures[rank] for rank in reporters if found.failures[rank].text]
        if silent and not able and (self._answered or not enough):
            found.raise_failures()
        self._answered = bool(able)
        for failure in silent:
            logger.warning("node %s: %s; the ranks go on without its store", failure.node, failure.text)
        if not able:
            return DurableState()
        return self._usable([seen[node] for node in able], able, enough=enough)

    def _list(self, find_endpoint: Callable[[], str], *, again: bool, timeout_s: float) -> DurableWorlds:
        """Ask this node's daemon until its store has answered."""
        message = GetDurableWorlds(self._job, self._run, secrets.token_hex(8), again)
        until_s = time.monotonic() + timeout_s
        with connect(find_endpoint(), _ANSWER_S) as client:
            while (seen := _ask(client, message, DurableWorlds)).running:
                if time.monotonic() > until_s:
                    text = f"the store has not answered for {timeout_s:.0f} s"
                    raise DaemonUnavailable(text, operation="look for what is durable")
                time.sleep(_LOOK_POLL_S)
        return seen

    def _usable(self, seen: Sequence[DurableWorlds], able: Sequence[int], *, enough: bool) -> DurableState:
        """The first node's list without the checkpoints that any node has found damaged."""
        damaged = {which for one in seen for which in one.damaged}
        usable = [c for c in seen[0].checkpoints if (c.world, c.iteration) not in damaged]
        if damaged and not usable and not enough:
            raise DaemonUnavailable(
                f"nothing stored of {self._job}/{self._run} can be used: {len(damaged)} "
                "checkpoints are damaged",
                operation=_OPERATION,
                hint="`ckptctl events` and `ckptctl checkpoints verify` name what is damaged. To "
                "begin anew remove it with `ckptctl checkpoints rm`, or pass run= a new name",
            )
        return DurableState(tuple(able), seen[0].worlds, tuple(usable))

    def bring(
        self,
        wanted: DurableWorld,
        missing: Sequence[int],
        stored: DurableState,
        reporters: Sequence[int],
    ) -> bool:
        """Have the daemons bring these ranks' images; a collective call. True if all came; else
        another checkpoint may do.

        Raises:
            DaemonUnavailable: on all ranks: a node has no memory for them, or its daemon is gone.
        """
        shares = share_out(missing, wanted.sizes, stored.nodes)
        what = f"iteration {wanted.iteration} of incarnation {wanted.world}"
        logger.warning(
            "the job goes on from storage: the daemons bring %d of %d images of %s",
            len(missing),
            len(wanted.sizes),
            what,
        )
        rank = self._ranks.rank
        mine = shares.get(reporters.index(rank), ()) if rank in reporters else ()

        def bring() -> bool:
            if not mine:
                return True
            name = run_of_incarnation(self._run, wanted.world)
            with _daemon_errors("bring what is durable"):
                brought = self._await(BringStored(self._job, name, wanted.iteration, mine))
            if brought.state == "done":
                return True
            logger.error("%s: %s", what, brought.reason)
            if brought.state == "refused":
                text = f"{what} cannot be brought from storage: {brought.reason}"
                raise DaemonUnavailable(text, operation=_OPERATION)
            return False

        came = all(self._ranks.agree(bring, bool))
        if came:
            self.brought = wanted.world, wanted.iteration
        return came

    def _await(self, message: BringStored) -> Brought:
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
    """Errors of a request to the daemon, as the error that all ranks raise."""
    try:
        yield
    except (RefusedError, RequestTimeout, WireError, OSError) as error:
        raise DaemonUnavailable(str(error), operation=operation) from error


def _ask(client: ControlClient, message: Request, kind: type[_Reply]) -> _Reply:
    """Send an idempotent request, again if no answer comes: the daemon may have been restarted."""
    for _ in range(_ASKED - 1):
        with contextlib.suppress(RequestTimeout):
            return client.ask(message, kind)
        logger.warning("the daemon does not answer; it is asked again")
    return client.ask(message, kind)
