"""Restarts of this rank in its process (`RecoveryOptions.in_process`).

The host tells of an epoch that has begun because another rank failed. A thread hears it, and ends whatever
the training thread waits for. The error that this causes in the loop's body is caught there
(`Checkpointer.restartable`); then groups are made anew, and the state is restored as in a new process.

Wherever this is not possible the process ends, and its host starts another one: during a start, a replay
or the restart itself, outside of the loop, and for an error that no failure of another rank explains.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckptd.client.data import Batches
from ckptd.client.in_process.process_groups import abort_groups, calls_so_far, leave_groups
from ckptd.client.in_process.rank_links import RankLinks
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.recovery.replay import ReplayMismatch
from ckptd.cuda.quiet_threads import start_loud, waiting
from ckptd.restart_line import NextEpoch, TrainerEnd, inherited_line

logger = get_logger(__name__)

# Their parameters are kept by groups that would end.
_SHARDED = ("FSDPModule", "FullyShardedDataParallel")
# What a collective call raises if another rank has failed: torch.distributed.DistError is one of the first.
_OF_CALLS = (RuntimeError, OSError)
# A failure of another rank is known within milliseconds; that of its node, within seconds.
_EPOCH_S = 5.0
# Those that start may have to import everything first.
_CONNECT_S = 300.0


class Modes:
    """What a script sets once, a step may change, and no snapshot has: training or evaluation, and which
    parameters want gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._training = [(module, module.training) for module in model.modules()]
        self._wants = [(param, param.requires_grad) for param in model.parameters()]

    def restore(self) -> None:
        """As they were."""
        for module, training in self._training:
            module.training = training
        for param, wants in self._wants:
            param.requires_grad_(wants)


class InProcessRestarts:
    """Follows the epochs of the job, for a process that can go on in the next one.

    Args:
        connect: the user's function.
        line: to the host.
        connect_s: if the function lasts longer, it hangs.
    Attributes:
        used: the body of a step was in `Checkpointer.restartable`.
    """

    def __init__(
        self, connect: Callable[[], Any], line: TrainerEnd, *, connect_s: float = _CONNECT_S
    ) -> None:
        self._connect, self._line, self._connect_s = connect, line, connect_s
        self._calls = calls_so_far()
        self._links = RankLinks()
        self._armed = self._refused = False
        self.used = False
        self._modes: Modes | None = None
        self._told = threading.Condition()
        self._next: NextEpoch | None = None
        self._told_s = 0.0
        start_loud(self._listen, name="ckptd-restarts")

    def _listen(self) -> None:
        while True:
            try:
                with waiting():
                    epoch = self._line.receive()
            except OSError as error:
                logger.info("no restart in this process: %s", error)
                return
            if isinstance(epoch, NextEpoch):
                told_s = time.monotonic()
                abort_groups(self._links)  # first: those of the next life must not be among them
                with self._told:
                    self._next, self._told_s = epoch, told_s
                    self._told.notify_all()

    def use(self, links: RankLinks) -> None:
        """The process groups of this life are made."""
        self._links = links

    @property
    def settled(self) -> bool:
        """Whether it is clear if this process can restart from the steps that it does now."""
        return self._armed or self._refused

    def settle(self, model: nn.Module, why_not: str) -> None:
        """A step begins; from its middle on this process can restart, unless there is a reason why not."""
        if why_not:
            self._refused = True
            logger.warning("no restart in this process: %s", why_not)
            return
        self._armed = True
        self._modes = self._modes or Modes(model)
        self._line.can_stay(now=True)

    def check_used(self) -> None:
        """The body of a step is over."""
        if not self.used and not self._refused:
            self._refused = True
            logger.warning(
                "no restart in this process: the body of the loop is not in `with ckpt.restartable():`"
            )

    def disarm(self) -> None:
        """The loop is over."""
        if self._armed:
            self._armed = False
            self._line.can_stay(now=False)

    def epoch_after(self, error: Exception) -> NextEpoch | None:
        """The epoch that begins because of what has caused this error, too; None if it is only our own."""
        if not self._armed or isinstance(error, ReplayMismatch):
            return None
        with self._told:
            if isinstance(error, _OF_CALLS):
                self._told.wait_for(lambda: self._next is not None, _EPOCH_S)
            return self._next

    def move_to(self, epoch: NextEpoch, parameters: Mapping[str, torch.Tensor]) -> tuple[Any, float]:
        """Leave the groups of the last epoch, and make those of this one.

        Args:
            parameters: of the model, and masters: their gradients are of a step that does not count.
        Returns:
            What the user's function has returned; and when the epoch was told (monotonic clock).
        Raises:
            RuntimeError: the user's function does not do what the script does before its `Checkpointer`.
        """
        for tensor in parameters.values():
            tensor.grad = None
        if self._modes is not None:
            self._modes.restore()
        leave_groups()
        with self._told:
            if self._next is not None:
                epoch = self._next
            self._next, self._armed = None, False
        os.environ.update(epoch.environment)
        self._line.stayed(epoch.number)
        hangs = threading.Timer(self._connect_s, self._end)
        hangs.daemon = True
        hangs.start()
        returned = self._connect()
        hangs.cancel()
        if (calls := calls_so_far()) != self._calls:
            raise RuntimeError(
                f"the function in RecoveryOptions(in_process=...) has made {calls} collective calls, and "
                f"this script had made {self._calls} before its Checkpointer: ranks that stay must make "
                "the same calls as those that start, or they wait for each other"
            )
        return returned, self._told_s

    def _end(self) -> None:
        """The others come to another epoch, in which all of them begin anew."""
        logger.error(
            "the function in RecoveryOptions(in_process=...) has not returned for %g s: this process ends. "
            "Does the function make all collective calls that the script makes before its Checkpointer?",
            self._connect_s,
        )
        os._exit(1)


def why_not(
    model: nn.Module,
    binding: LiveState,
    stateful: Mapping[str, Any],
    batches: Sequence[Batches],
    *,
    logs: bool,
    found_masters: bool,
) -> str:
    """What neither a snapshot nor the user's function sets back; "" if there is nothing.

    Args:
        model: the script's, with its wrappers.
        stateful: what the user has passed as ``state=``.
        logs: whether boundaries of stages are logged.
        found_masters: master weights were found by their values. A new rank would not find its own: what
            makes the wrappers (`DistributedDataParallel`) sends it the weights of a rank that has trained on.
    """
    if logs:
        return "boundaries of stages are logged"
    if found_masters:
        return "master weights were found by their values; pass layout=LayoutOptions(masters={name: tensor})"
    kinds = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    sharded = any(hasattr(param, "to_local") for param in binding.params.values())
    if sharded or binding.elsewhere or kinds.intersection(_SHARDED):
        return "the model or its optimizer's state is spread over ranks, and holds groups that would end"
    for name, item in stateful.items():
        iterated = hasattr(item, "__iter__") and not hasattr(item, "__next__")
        if iterated and not any(each.is_of(item) for each in batches):
            return (
                f"state[{name!r}] is iterated by the script, and its iterators cannot be set back; use "
                "ckpt.batches(loader)"
            )
    return ""


def in_process_restarts(connect: Callable[[], Any] | None) -> InProcessRestarts | None:
    """None if nobody asked for them, or no host can tell of an epoch."""
    line = inherited_line()
    if connect is None:
        return None
    if line is None:
        logger.info("in_process= has no effect without a host (python -m ckptd.host)")
        return None
    return InProcessRestarts(connect, line)
