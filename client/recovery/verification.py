"""What follows when a replay does not reproduce what was recorded: all ranks learn of it, the
daemons keep it, and the replay ends.

Replay runs in the user's own loop, which cannot be taken back to an earlier step. So a rank that
finds a difference ends its process, on every rank, and what it found waits for the next start at
the daemons. What that start does follows from all that is known (`ckptd.core.recovery.quarantine`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from ckptd.client.capture.comparison import Differences
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery.replay import Replay, ReplayMismatch
from ckptd.core.recovery.quarantine import (
    ReplayVerdict,
    Used,
    describe_failure,
    judge_replay,
    reason_of,
)
from ckptd.core.slots.segment_hints import HINT_DROP_GRADIENTS
from ckptd.transport.messages import RankMismatch, ReplayFailure

__all__ = ["Replayed", "Verification"]

logger = get_logger(__name__)

_TEXT_LIMIT = 1000
_RANKS_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Replayed:
    """What is replayed: the snapshots of this rank; and who replays the same iterations at the same time.

    Attributes:
        everybody: all ranks do. Otherwise each decides for itself.
        localized: only some do, fed from the logs of the others.
    """

    snapshots: tuple[Used, ...]
    everybody: bool
    localized: bool = False


class _Said(msgspec.Struct, frozen=True):
    """What a rank found at a boundary; ``heeds``: it is to end the replay (``on_mismatch="raise"``)."""

    found: RankMismatch | None
    heeds: bool


class _Evidence(msgspec.Struct, frozen=True):
    """What a rank has used, and how its machine differs from the one that recorded that."""

    snapshots: tuple[Used, ...]
    changed: str


class Verification:
    """Sees one replay through.

    Args:
        ranks: of which all replay, or only some.
        on_mismatch: ``raise`` or ``warn``.
        changed: how this machine differs from the one that recorded; empty: not in what is known to
            change bits.
        causes: what usually leads to such a difference, for the message.
    """

    def __init__(
        self,
        memory: RankMemory,
        ranks: Collectives,
        replayed: Replayed,
        *,
        on_mismatch: str,
        changed: str,
        causes: Callable[[str], str] = lambda what: "",
    ) -> None:
        self._causes = causes
        self._memory, self._replayed, self._changed = memory, replayed, changed
        self._ranks = ranks if replayed.everybody else Collectives.alone(ranks.node)
        self._heeds = on_mismatch == "raise"

    def advance(self, replay: Replay, sent: Differences) -> None:
        """The top of a replayed step. A collective call if all ranks replay.

        Args:
            sent: what the step sent to other stages otherwise than when it ran first.
        Raises:
            ReplayMismatch: what was recomputed is not what was recorded, here or on another rank.
        """
        boundary = replay.next_iteration
        found = replay.advance()
        found.extend(sent)
        mine = _Said(_mismatch(self._memory.identity.rank, found), self._heeds)
        said = self._ranks.gather(mine, _Said)
        if any(s.found is not None and s.heeds for s in said):
            replay.abandon()
            self._fail(boundary, replay.freezing, [s.found for s in said if s.found is not None])

    def reproduced(self) -> None:
        """The state is dense, and the run goes on from it."""
        if self._memory.failures:
            self._memory.session.tell_replay(None)

    def _fail(self, boundary: int, freezing: str, ranks: Sequence[RankMismatch]) -> None:
        used = tuple(s for s in self._replayed.snapshots if s[0] <= boundary)
        evidence = self._ranks.gather(_Evidence(used, self._changed), _Evidence)
        snapshots = tuple(sorted({snapshot for each in evidence for snapshot in each.snapshots}))
        changed = next((each.changed for each in evidence if each.changed), "")
        result = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode([(r.rank, r.count, r.got) for r in ranks]))
        failure = ReplayFailure(
            boundary,
            snapshots,
            tuple(ranks[:_RANKS_SHOWN]),
            result,
            freezing,
            ReplayVerdict.WIDENED,
        )
        known = self._memory.failures
        if not self._replayed.localized:
            verdict = judge_replay(failure, known, changed=changed)
            failure = msgspec.structs.replace(failure, verdict=verdict)
        reason = reason_of(failure, changed=changed)
        failure = msgspec.structs.replace(failure, reason=reason)
        self._memory.session.tell_replay(failure)
        self._hint(failure)
        text = (
            f"{describe_failure(failure)}. Either the step is not deterministic, or the restart "
            "differs, or memory was corrupted. "
            f"{reason}; RecoveryOptions(on_mismatch='warn') trains on regardless. "
            f"{self._causes(ranks[0].what)}"
        )
        logger.error("%s", reason)
        raise ReplayMismatch(text)

    def _hint(self, failure: ReplayFailure) -> None:
        """How the next start is to freeze."""
        if failure.verdict == ReplayVerdict.QUARANTINED:
            # It came to the same both times, so it was not for want of gradients.
            if any(k.freezing == "inputs" for k in self._memory.failures):
                self._memory.take_back_hint(HINT_DROP_GRADIENTS)
        elif failure.freezing == "inputs":
            # User code may read all gradients in a way that no tap sees; dropping them is exact for it.
            logger.error("the next start of this run replays with freezing 'drop' instead of 'inputs'")
            self._memory.leave_hint(HINT_DROP_GRADIENTS)


def _mismatch(rank: int, found: Differences) -> RankMismatch | None:
    if not found:
        return None
    more = len(found.texts) - 1
    what = found.texts[0][:_TEXT_LIMIT] + (f" and {more} more" if more else "")
    return RankMismatch(rank, what, len(found.texts), found.expected, found.got)
