"""A rank that runs on another node than before: what its boundary log there tells of it is brought, before anybody plans.

With whom it communicates lies beside its log (``ckptd.client.facts``). A plan made without that would take all ranks that moved for one
domain, which starts together.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ckptd.client.facts import Facts, facts_of
from ckptd.client.fed_logs import BringsLogs
from ckptd.client.membership import RunView
from ckptd.client.slot_file import SlotFile
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.recovery.held import HeldRecords
from ckptd.recovery.holdings import fetch_piece
from ckptd.recovery.pieces import Piece, Source

__all__ = ["bring_facts", "logs_left_behind"]

logger = logging.getLogger(__name__)

_GRANT_S = 60.0  # only the smallest iteration is asked for


def logs_left_behind(view: RunView) -> dict[int, Piece]:
    """By rank: an iteration of its newest log, of ranks whose newest log lies on another node than they do; the same on all ranks."""
    logs: dict[int, dict[str, list[HeldRecords]]] = {}
    for held in view.logs:
        if held.records:
            logs.setdefault(held.rank, {}).setdefault(held.node, []).append(held)
    left: dict[int, Piece] = {}
    for rank, home in view.homes.items():
        by_node = logs.get(rank, {})
        newest = max(by_node, key=lambda node: (_last(by_node[node]), node), default=home)
        if newest != home:
            # The facts of the highest generation count; an older one is outgrown, whatever is in it.
            left[rank] = _smallest(max(by_node[newest], key=lambda h: h.records[0].generation))
    return left


def bring_facts(view: RunView, session: BringsLogs, rank: int, piece: Piece) -> Facts | None:
    """What the log of this piece tells of its rank; None if it cannot be had: the ranks then plan without. Never raises."""
    try:
        wanted = (fetch_piece(piece, sealed_at_ns=time.time_ns()),)
        asked = session.fetch_for_reading(rank, "log", wanted, view.everybody)
        info = asked.result(_GRANT_S)
        try:
            # Its beginning is there with the memory; what was sent is not waited for.
            return facts_of(SlotFile(Path(info.path), "log").told.client)
        finally:
            session.drop(info.generation)
    except (AttachRefused, DaemonUnavailable, TimeoutError) as error:
        logger.warning("with whom this rank communicates is not known: %s", error)
    except Exception:  # the other ranks wait for what this one tells
        logger.exception("with whom this rank communicates is not known")
    return None


def _last(logs: list[HeldRecords]) -> tuple[int, int]:
    """When the newest iteration in them was logged."""
    return max((record.epoch, record.iteration) for held in logs for record in held.records)


def _smallest(held: HeldRecords) -> Piece:
    record = min(held.records, key=lambda r: (r.image_len, r.index))
    return Piece(record, (Source(held.node, held.segment, record.index),))
