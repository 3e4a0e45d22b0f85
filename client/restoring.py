"""Go on from what a start has found: load it into the model, and have the loop replay from there."""

from __future__ import annotations

import logging
import time

from ckptd.client.agreement import Exchange, all_or_none
from ckptd.client.buckets import Buckets
from ckptd.client.loop_side import LoopSide
from ckptd.client.memory import RankMemory
from ckptd.client.recovery import Resumption
from ckptd.client.replay import Replay
from ckptd.client.stats import Stats
from ckptd.cuda.engine import CopyEngine

__all__ = ["restore"]

logger = logging.getLogger(__name__)


def restore(
    found: Resumption,
    loop: LoopSide,
    memory: RankMemory,
    *,
    engine: CopyEngine,
    buckets: Buckets,
    meet: Exchange,
    stats: Stats,
    started_s: float,
) -> None:
    """Load what was found; replay begins at the loop's first top. A collective call.

    Args:
        started_s: when this start began to look, by the performance counter.
    Raises:
        DaemonUnavailable: another rank cannot go on; here it is that rank's own error.
    """
    replay = found.replay
    _load(replay, buckets, meet, memory.session.node_id)
    for segment in memory.table.segments:
        engine.register(segment.memory, segment.regions())
    loop.resume(found)
    if found.apart is not None:
        stages = replay.oldest_scalars.get("stages", {})
        with all_or_none(meet, memory.session.node_id):
            assert loop.recorder is not None
            loop.recorder.scalars.stage_shapes = loop.pipeline.run_apart(
                memory.identity.rank, found.apart, stages
            )
    stats.restore_s = time.perf_counter() - started_s
    stats.restored_bytes = replay.bytes_loaded
    text = (
        f"resuming at iteration {replay.end}, replay begins at {replay.start}: {found.reason}; "
        f"loaded {replay.bytes_loaded} bytes in {stats.restore_s:.3f} s, freezing: {replay.freezing}"
    )
    # A warning, so that it is seen without any logging set-up: the run does not begin at its beginning.
    logger.warning("%s", text)
    memory.session.notice("info", "restored", text)


def _load(replay: Replay, buckets: Buckets, meet: Exchange, node: str) -> None:
    with all_or_none(meet, node):
        replay.load_state()
    # Ranks hand over tensors from here on: whoever fails before must not leave the others waiting.
    with all_or_none(meet, node):
        replay.load_tensors()
        layouts = replay.bucket_layouts
    buckets.put_back(layouts, meet)
    if replay.buffer_senders is not None:
        buckets.send_next(replay.buffer_senders)
