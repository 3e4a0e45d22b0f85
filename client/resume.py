"""Go on from what a start has found: load it into the model, and have the loop replay from there."""

from __future__ import annotations

import logging
import time

from ckptd.client.capture.ddp_buckets import Buckets
from ckptd.client.capture.program import Program, apply_options, differences, options_differ
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.options import RecoveryOptions
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery.replay import Replay
from ckptd.client.recovery.start import Resumption
from ckptd.client.stats import Stats
from ckptd.client.train_loop import LoopSide
from ckptd.client.training_state import TrainingState
from ckptd.cuda.engine import CopyEngine

__all__ = ["RECORDED_COUNTS", "heed_program", "restore", "tell_differences"]

logger = get_logger(__name__)

RECORDED_COUNTS = (
    "What was recorded counts. To go on with the script's options, pass "
    'recovery=RecoveryOptions(param_groups="script"); to begin anew, run= a new name'
)


def restore(
    found: Resumption,
    loop: LoopSide,
    memory: RankMemory,
    *,
    engine: CopyEngine,
    buckets: Buckets,
    ranks: Collectives,
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
    _load(replay, buckets, ranks)
    for segment in memory.table.segments:
        engine.register(segment.memory, segment.regions())
    loop.resume(found)
    if found.apart is not None:
        stages = replay.oldest_scalars.get("stages", {})
        with ranks.all_or_none():
            assert loop.recorder is not None
            shapes = loop.pipeline.run_isolated(memory.identity.rank, found.apart, stages)
            loop.recorder.scalars.know_stages(shapes)
    stats.restore_s = time.perf_counter() - started_s
    stats.restored_bytes = replay.bytes_loaded
    text = (
        f"{memory.identity}: resuming at iteration {replay.end}, replay begins at {replay.start}: "
        f"{found.reason}; "
        f"loaded {replay.bytes_loaded} bytes in {stats.restore_s:.3f} s, freezing: "
        f"{replay.freezing}{_not_compared(found)}"
    )
    # A warning, so that it is seen without any logging set-up: the run does not begin at its beginning.
    logger.warning("%s", text)
    memory.session.notice("info", "restored", text)


def heed_program(
    replay: Replay, here: Program, loop: LoopSide, subject: TrainingState, options: RecoveryOptions
) -> None:
    """Say how this program differs from the one that began the run, and see to it that the right
    one's options of parameter groups count.
    """
    recorded: Program = replay.oldest_scalars.get("program", {})  # absent in what 0.4 recorded
    assert loop.recorder is not None
    if not recorded:
        return
    if options.param_groups == "script":
        binding, stateful = subject.binding, subject.stateful

        def apply() -> None:
            assert loop.recorder is None or loop.recorder.scalars.program is recorded
            apply_options(binding, stateful, recorded, here)
            if loop.recorder is not None:
                loop.recorder.scalars.go_by(here)
                # What comes now does not follow from the snapshots before by a replay.
                loop.recorder.break_chain()

        if options_differ(recorded, here):
            loop.do_when_exact(apply)
        what = f"The script's options count from iteration {replay.end} on"
    else:
        what = RECORDED_COUNTS
    loop.recorder.scalars.go_by(recorded)
    tell_differences(recorded, here, what, rank=subject.identity.rank)


def tell_differences(recorded: Program, here: Program, what: str, *, rank: int) -> None:
    """Say how two programs differ, with both values; one rank speaks for all.

    Args:
        what: follows from it.
    """
    if text := "; ".join(differences(recorded, here)):
        level = logging.INFO if rank else logging.WARNING
        logger.log(level, "THIS PROGRAM DIFFERS from the one that began the run: %s. %s", text, what)


def _not_compared(found: Resumption) -> str:
    if not found.unverified:
        return ""
    what = "nothing" if found.replay.start == found.replay.end else "not all of the newest snapshot"
    return f"; {what} can be compared with a replay ({found.unverified})"


def _load(replay: Replay, buckets: Buckets, ranks: Collectives) -> None:
    with ranks.all_or_none():
        replay.load_state()
    # Ranks hand over tensors from here on: whoever fails before must not leave the others waiting.
    with ranks.all_or_none():
        replay.load_tensors()
        layouts = replay.bucket_layouts
    buckets.put_back(layouts, ranks)
    if replay.buffer_senders is not None:
        buckets.send_next(replay.buffer_senders)
