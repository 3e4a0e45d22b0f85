"""What a `Checkpointer` is given, looked at before any daemon is asked: what is to be protected,
and whether it can be.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.capture.step_state import Stateful
from ckptd.client.data import BatchLedger
from ckptd.client.data.ledger import BATCHES
from ckptd.client.identity import Identity, identify
from ckptd.client.model.freezing import choose_freezing
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.operators import Grouping, Operator
from ckptd.client.model.replicated_params import ReplicatedParams, find_replicas
from ckptd.client.model.tensor_sharding import check_sharded
from ckptd.client.optimizers.optimizer_probe import unwrap_optimizer
from ckptd.client.option_checks import all_operators, check_state
from ckptd.client.ranks.collectives import Collectives

__all__ = ["TrainingState", "examine"]


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A model, its optimizers and the user's objects, as this rank of the job has them.

    Attributes:
        freezing: how operators are frozen in a replay, and why.
        sharing: what several ranks have alike. Told by structure, so the same on all ranks.
    """

    binding: LiveState
    stateful: Mapping[str, Stateful]
    identity: Identity
    freezing: tuple[str, str]
    operators: list[Operator]
    sharing: ReplicatedParams

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        params = self.binding.params.values()
        return next((local(p).device for p in params), torch.device("cpu"))


def examine(
    model: nn.Module,
    optimizer: Any,
    state: Mapping[str, Stateful] | None,
    *,
    who: tuple[str | None, str | None, int | None, int | None],
    policy: str,
    masters: Mapping[str, Tensor] | None,
    freeze: str,
    operators: Grouping | None,
    replicated: Mapping[str, Any] | None,
    ledger: BatchLedger | None = None,
) -> TrainingState:
    """Look at the arguments of `Checkpointer`.

    Args:
        who: job, run, rank, world size; from the environment where None.
        ledger: what batches the loop has; it is captured beside the user's objects.
    Raises:
        ValueError: something passed is unusable; the message says what and what to do.
    """
    stateful = check_state(state)
    if ledger is not None:
        stateful[BATCHES] = ledger
    listed = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    binding = LiveState(model, [unwrap_optimizer(o) for o in listed], masters, listed)
    check_sharded(binding)
    if policy != "dense" and (reasons := binding.dependent()):
        raise ValueError(
            f"sparse snapshots need an optimizer that updates each parameter independently: {'; '.join(reasons)}. "
            "Pass policy='dense' to capture everything in every snapshot"
        )
    identity = agreed_identity(identify(*who))
    freezing = choose_freezing(
        model,
        masters=bool(binding.masters),
        wanted=freeze,
        world_size=identity.world_size,
        spread=bool(binding.elsewhere),
    )
    found = all_operators(model, binding, operators)
    sharing = ReplicatedParams()
    if identity.world_size > 1 and dist.is_available() and dist.is_initialized():
        sharing = ReplicatedParams(find_replicas(binding, replicated, identity.rank))
    return TrainingState(binding, stateful, identity, freezing, found, sharing)


def agreed_identity(mine: Identity) -> Identity:
    """This rank under the names that rank 0 has: a script may lie elsewhere on another node. A
    collective call if there are several ranks.

    Raises:
        ValueError: ranks were passed different names; on every rank.
        DaemonUnavailable: a rank did not come.
    """
    # What several ranks without a process group lack is said at their first collective call.
    there = dist.is_available() and dist.is_initialized()
    if mine.world_size == 1 or not there or dist.get_world_size() != mine.world_size:
        return mine
    # Under one name whatever the ranks are called, so that all come to the same barrier.
    ranks = Collectives.of_job(replace(mine, job="ckptd", run="names"), node=platform.node())
    found = ranks.gather((mine.job, mine.run, mine.told), tuple[str, str, str])
    job, run, how = found[0]
    for rank, (other_job, other_run, other_how) in enumerate(found):
        if (other_job, other_run) != (job, run) and not other_how:
            raise ValueError(
                f"rank 0 is of job {job}, run {run}, and rank {rank} of job {other_job}, run {other_run}: pass all ranks the same "
                "job= and run=, or world_size=1 for independent trainers"
            )
    return replace(mine, job=job, run=run, told=how)
