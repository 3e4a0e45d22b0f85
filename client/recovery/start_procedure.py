"""The one procedure by which all ranks start: inventory, plan, retrieve, vote.

1. *Inventory*: the ranks tell each other what their nodes hold. A collective call.
2. *Plan*: each rank computes the same plan from that. The planners are pure and stand in
   `ckptd.core`: `recovery.global_plan` (all ranks go back), `recovery.localized_plan` (only some do),
   `elastic.incarnation_plan` (an elastic job goes on with other ranks).
3. *Retrieve*: each rank has here, verified, what its part of the plan needs, or has it on its way.
4. *Vote*: the plan counts if every rank has what it needs. Otherwise each rank gives back what it
   retrieved, and all begin again with another inventory: what one rank lacks changes the plan of all.

Where a rank vanishes meanwhile, the next collective call fails on the others, the launcher starts
the job again, and that start plans from what is there then: nothing was freed.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import Collectives, TryAgain
from ckptd.core.recovery.global_plan import NoRecovery
from ckptd.core.recovery.localized_plan import NotLocalized

__all__ = ["AgreedPlan", "StartProcedure", "agree_on_plan"]

logger = get_logger(__name__)

Inventory = TypeVar("Inventory")
Plan = TypeVar("Plan")
Vote = TypeVar("Vote")


class StartProcedure(Protocol[Inventory, Plan, Vote]):
    """One kind of start. Each method may raise `TryAgain`: `inventory` and `plan` on all ranks, `retrieve`
    on one of them.
    """

    attempts: int
    vote: type[Vote]

    def inventory(self, undo: ExitStack) -> Inventory:
        """What there is, the same on all ranks. A collective call.

        Args:
            undo: closed unless the plan counts.
        """

    def plan(self, inventory: Inventory) -> Plan:
        """The plan, the same on all ranks; `NoRecovery` or `NotLocalized` if there is none."""

    def retrieve(self, inventory: Inventory, plan: Plan, undo: ExitStack) -> Vote:
        """Have what this rank needs; returns what the other ranks have to know of it."""


@dataclass(frozen=True, slots=True)
class AgreedPlan(Generic[Inventory, Plan, Vote]):
    """A plan of which every rank has what it needs; or that there is none, and then no rank has voted.

    Attributes:
        votes: by rank.
        undo: gives back what was retrieved, unless it is emptied.
    """

    inventory: Inventory
    plan: Plan
    votes: list[Vote]
    undo: ExitStack


def agree_on_plan(
    ranks: Collectives, procedure: StartProcedure[Inventory, Plan, Vote]
) -> AgreedPlan[Inventory, Plan, Vote] | None:
    """Go through the procedure until all ranks have what a plan needs; a collective call.

    Returns:
        None on all ranks where no plan held in so many attempts.
    Raises:
        DaemonUnavailable: a rank cannot go on (`Collectives.agree`).
    """
    for _ in range(procedure.attempts):
        with ExitStack() as undo:
            try:
                inventory = procedure.inventory(undo)
                plan = procedure.plan(inventory)
                votes: list[Any] = []
                if not isinstance(plan, NoRecovery | NotLocalized):
                    votes = ranks.agree(
                        lambda: procedure.retrieve(inventory, plan, undo),  # noqa: B023 - called at once
                        procedure.vote,
                    )
            except TryAgain as error:
                if str(error):
                    logger.warning("%s; the ranks plan again", error)
                continue
            return AgreedPlan(inventory, plan, votes, undo.pop_all())
    return None
