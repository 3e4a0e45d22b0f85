"""Iterations that a run can go back to: ``saved_iterations``."""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.config.daemon_config import default_endpoint
from ckptd.core.recovery.global_plan import VERIFY_ITERATIONS, reachable
from ckptd.core.recovery.held import STORE_NODE
from ckptd.errors import DaemonUnavailable, RemoteProtocolError
from ckptd.holdings import newest_history
from ckptd.launch import connect
from ckptd.transport.messages import GetStatus, RunSeen, SeeRun, Status
from ckptd.transport.wire import RefusedError, RequestTimeout, WireError

_ANSWER_S = 10.0
_STORE_S = 900.0  # a store may take its time; the daemon gives up on it by itself


@dataclass(frozen=True, slots=True)
class SavedIteration:
    """An iteration that all ranks can go back to.

    Attributes:
        replay_from: the first iteration that is run again for it, or to verify it.
        durable: whether storage alone has it.
    """

    iteration: int
    replay_from: int
    durable: bool


def saved_iterations(
    job: str, run: str, *, daemon: str | None = None, verify_iterations: int = VERIFY_ITERATIONS
) -> list[SavedIteration]:
    """The iterations that ``RecoveryOptions(resume_at=)`` can go back to, newest first.

    They are in memory, on peers and (the newest few) in storage.

    Args:
        job: as in the first line of a trainer's log.
        run: as in the first line of a trainer's log.
        daemon: its endpoint; None: that of this user.
        verify_iterations: as of the ``Checkpointer`` that will go back.

    Raises:
        DaemonUnavailable: no daemon answers, or not as it should.
    """
    try:
        with connect(daemon or default_endpoint(), _ANSWER_S) as client:
            stored = client.ask(GetStatus(), Status).durable is not None
            seen = client.ask(
                SeeRun(job, run, (), stored, every_rank=True),
                RunSeen,
                timeout_s=_STORE_S if stored else _ANSWER_S,
            )
        held = newest_history(seen)
    except (WireError, RefusedError, RequestTimeout, RemoteProtocolError) as error:
        raise DaemonUnavailable(str(error), operation="list what is saved") from error
    if not held.world_size:
        return []
    world_size, epochs = held.world_size, held.history.begun
    durable = {
        end
        for _, end in reachable(
            (h for h in held.snapshots if h.node == STORE_NODE), world_size, epochs=epochs
        )
    }
    return [
        SavedIteration(end, start, end in durable)
        for start, end in reachable(
            held.snapshots, world_size, epochs=epochs, verify_iterations=verify_iterations
        )
    ]
