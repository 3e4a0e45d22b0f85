"""What an elastic job tells its daemon of where its experts are, and what `ckptctl elastic` hears
of it; and what is durable of its worlds.

The daemon keeps the last of it for each run and understands nothing in it. `Elastic` is also what a file for
`ckptctl elastic` holds, as JSON.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ckptd.transport.control.message_parts import (
    Count,
    Iteration,
    Labels,
    Name,
    Rank,
    ShortText,
    Text,
)

__all__ = [
    "BringStored",
    "Brought",
    "DurableWorld",
    "DurableWorlds",
    "Elastic",
    "ElasticNode",
    "ElasticTold",
    "ElasticWhen",
    "GetDurableWorlds",
    "GetElastic",
    "SeenElastic",
    "TellElastic",
]

Loads = Annotated[tuple[Annotated[tuple[Count, ...], Meta(max_length=1 << 16)], ...], Meta(max_length=4096)]


class ElasticNode(Struct, frozen=True, forbid_unknown_fields=True):
    """A node of an elastic job.

    Args:
        name: as its daemon is called.
        slots: replicas of experts that it holds in each layer.
        ranks: of it, which share the slots.
        labels: such as ``{"rack": "A"}``; ``Elastic.domain`` names the one that says what fails together.
        holds: for each layer the experts that it holds now, one entry for each replica; empty:
            nothing, or not known.
        bytes_per_s: how fast it sends and gets; 0: not known.
    """

    name: Name
    slots: Annotated[int, Meta(ge=1, le=1 << 20)]
    ranks: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    labels: Labels = {}
    holds: Loads = ()
    bytes_per_s: Count = 0


class ElasticWhen(Struct, frozen=True, forbid_unknown_fields=True):
    """What decides when experts are placed anew, as
    `ckptd.core.elastic.rebalance_policy.TimesConfig` has it.

    Args:
        placed_step: when they were last.
        expert_s: time of a step that grows with the tokens of the busiest rank; 0: not measured.
        pause_s: what placing anew costs beside the transfers; 0: not measured.
        remaining_steps: until the end of training; -1: not told.
    """

    check_steps: Annotated[int, Meta(ge=1)] = 50
    every_steps: Count = 0
    horizon_steps: Annotated[int, Meta(ge=1)] = 1000
    margin: Annotated[float, Meta(ge=0)] = 0.5
    placed_step: Iteration = -1
    expert_s: Annotated[float, Meta(ge=0)] = 0.0
    pause_s: Annotated[float, Meta(ge=0)] = 0.0
    remaining_steps: Iteration = -1


class Elastic(Struct, frozen=True, forbid_unknown_fields=True):
    """The nodes of a job, the load of its experts, and who holds which.

    Args:
        loads: for each layer the tokens routed to each of its experts, in the newest period.
        nodes: in the order of the plan.
        step: of which this is told; -1: none.
        threshold: on how many nodes every expert shall be.
        max_straggler: bound on the busiest rank over the mean; 0: none.
        domain: the label whose value fails together; "": each node for itself.
        expert_bytes: of a replica, for each expert of each layer; or one row with one number that
            holds for all; empty: not known.
        layers: their names.
        history: loads of earlier periods, the oldest first.
        method, reason: how the placement was found, and why it was made.
        when: what decides about the next one.
    """

    loads: Loads
    nodes: Annotated[tuple[ElasticNode, ...], Meta(min_length=1, max_length=1 << 16)]
    step: Iteration = -1
    threshold: Annotated[int, Meta(ge=1, le=1 << 16)] = 2
    max_straggler: Annotated[float, Meta(ge=0)] = 0.0
    domain: ShortText = ""
    expert_bytes: Loads = ()
    layers: Annotated[tuple[ShortText, ...], Meta(max_length=4096)] = ()
    history: Annotated[tuple[Loads, ...], Meta(max_length=64)] = ()
    method: Text = ""
    reason: Text = ""
    when: ElasticWhen = ElasticWhen()


class TellElastic(Struct, frozen=True, tag=True):
    """A trainer tells what its job has placed where; the newest of a run counts."""

    elastic: Elastic


class GetElastic(Struct, frozen=True, tag=True):
    """What elastic jobs have told this node; empty names mean all."""

    job: ShortText = ""
    run: ShortText = ""


class ElasticTold(Struct, frozen=True):
    """What rank ``rank`` of a run told, so many seconds ago."""

    job: str
    run: str
    rank: int
    ago_s: float
    elastic: Elastic


class SeenElastic(Struct, frozen=True, tag=True):
    """The answer: of every run that was asked for, the last that was told."""

    told: tuple[ElasticTold, ...]


class GetDurableWorlds(Struct, frozen=True, tag=True):
    """What is durable of the worlds of an elastic run? Asked again and again, until the answer is
    not ``running``.

    Args:
        asker: names this question: another one looks anew.
        again: it is of a start that has found some of it to be damaged.
    """

    job: Name
    run: Name
    asker: ShortText
    again: bool = False


class DurableWorld(Struct, frozen=True):
    """A committed checkpoint of a world: ``sizes`` are about the bytes of each of its ranks."""

    world: Count
    iteration: Iteration
    sizes: tuple[Count, ...]


class DurableWorlds(Struct, frozen=True, tag=True):
    """The answer: ``configured`` is false where the daemon has no store; ``running``: the store has
    not told yet.

    Args:
        worlds: the numbers of all, also of those of which no checkpoint is committed.
        checkpoints: the newest ones of the latest worlds, newest first.
        damaged: world and iteration of those that this node has found to be.
    """

    configured: bool
    worlds: tuple[Count, ...] = ()
    checkpoints: tuple[DurableWorld, ...] = ()
    damaged: tuple[tuple[Count, Iteration], ...] = ()
    running: bool = False


class BringStored(Struct, frozen=True, tag=True):
    """Bring what these ranks have in the committed checkpoint of a run into this node's memory,
    unless that is under way.

    Asked again and again, until it is over: the answer is `Brought`. Nobody has to be attached as
    these ranks.
    """

    job: Name
    run: Name
    iteration: Iteration
    ranks: Annotated[tuple[Rank, ...], Meta(min_length=1, max_length=1 << 20)]


class Brought(Struct, frozen=True, tag=True):
    """``state`` is running, done, failed (``reason`` says why; an older checkpoint may do), or
    refused: there is no memory for any.
    """

    state: str
    reason: str
    bytes_done: int
    bytes_total: int
