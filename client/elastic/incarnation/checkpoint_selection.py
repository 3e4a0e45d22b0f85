"""Where a world goes on: the newest whole state in the nodes' memory, or what storage has, where
that is newer or memory has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import msgspec

from ckptd.client.elastic.incarnation.store_start import (
    DurableState,
    Storage,
    missing_ranks,
    newer_than,
)
from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import TryAgain
from ckptd.core.elastic.incarnations import Chosen, ExpertLayers, NodeHeld, choose
from ckptd.errors import ElasticError, LocalProtocolError

__all__ = ["choose_with_storage"]

logger = get_logger(__name__)

# A job that ended within its first steps has parts of a state, if a rank died before it had a
# snapshot: whoever was left is parked. To do these few steps again costs less than somebody who has
# to look at it.
_FEW_STEPS = 10


def choose_with_storage(
    held: Sequence[NodeHeld], layers: ExpertLayers, speakers: Sequence[int], storage: Storage
) -> tuple[Chosen | None, DurableState]:
    """Where to go on, and what is durable; a collective call.

    Args:
        held: what lies on each node.
        speakers: the rank that speaks for each node.
    Raises:
        TryAgain: on all ranks: something was brought from storage, or could not be, so all look again.
        ElasticError: something is held, and of no iteration all; and nothing is durable.
        DaemonUnavailable: on all ranks: storage is needed, and does not answer, or what is wanted
            of it cannot be brought.
    """
    chosen, lacking = None, None
    try:
        chosen = choose(held, layers)
    except ElasticError as error:  # the same on all ranks; storage may have what is lacking
        lacking = error
    stored = storage.look(speakers, enough=chosen is not None)
    wanted = newer_than(chosen, stored)
    if wanted is not None:
        if lacking is not None:
            logger.warning("%s", lacking.message)
        missing = missing_ranks(wanted, held)
        if not missing:
            _explain(held, layers, (wanted.world, wanted.iteration))
        storage.bring(wanted, missing, stored, speakers)
        raise TryAgain
    reached = max((image.iteration for node in held for image in node.images), default=-1)
    if lacking is not None and reached <= _FEW_STEPS:
        logger.warning("%s; these are the job's first steps: it begins anew", lacking.message)
        return None, stored
    if lacking is not None and stored.nodes:
        raise ElasticError(
            f"{lacking.message}; and no checkpoint of this run is durable",
            operation=lacking.operation,
            hint=lacking.hint,
        )
    if lacking is not None:
        raise lacking
    if chosen is not None and (chosen.world, chosen.iteration) == storage.brought:
        chosen = replace(chosen, reason=f"{chosen.reason}; it was brought from storage")
    return chosen, stored


def _explain(held: Sequence[NodeHeld], layers: ExpertLayers, which: tuple[int, int]) -> NoReturn:
    """All ranks' images of a durable checkpoint are here, and make up no whole state.

    Raises:
        ElasticError: names what is lacking.
    """
    choose(
        [
            msgspec.structs.replace(
                node, images=tuple(i for i in node.images if (i.world, i.iteration) == which)
            )
            for node in held
        ],
        layers,
    )
    raise LocalProtocolError(f"{which} is whole, and was not chosen", operation="start a world")
