"""Checks of what users pass to an elastic job, before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from ckptd.client.elastic import ElasticExperts
from ckptd.client.identity import Identity, identify
from ckptd.client.model.live_state import named_modules
from ckptd.client.options import (
    LayoutOptions,
    PlacementOptions,
    RecoveryOptions,
    RunOptions,
    SnapshotOptions,
    check_keywords,
    run_options,
)
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.incarnations import ExpertLayers

_MAX_RUN = 50  # the incarnation's number follows it, and a run's name has 64 characters at most
DENSE = SnapshotOptions(policy="dense")
_GROUPS = ("snapshots", "recovery", "layout")
_OF_THE_JOB = ("run", "daemon", "placement")


def identify_anyway(run: str | RunOptions | None) -> tuple[Identity, str]:
    """The identity of this rank, and what is wrong with it, or "". A rank with an unusable identity
    gets its place in the process group, so that the other ranks learn of the error.
    """
    try:
        who = run_options(run)
        wrong = "topology= is the ElasticJob's own: leave it out" if who.topology else ""
        return identify(who.job, who.name, who.rank, who.world_size), wrong
    except ValueError as error:
        there = dist.is_available() and dist.is_initialized()
        place = (dist.get_rank(), dist.get_world_size()) if there else (0, 1)
        return Identity("elastic", "nameless", *place), str(error)


def wrong_arguments(layers: object, slots: object, placement: PlacementOptions, run: str) -> str:
    """The first unusable argument, as a message; empty if all are usable."""
    threshold, max_straggler = placement.threshold, placement.max_straggler
    if not isinstance(layers, Mapping):
        return f"layers={layers!r}: a dict from the name of each mixture layer to its number of experts"
    counts = set(layers.values())
    if not layers or len(counts) != 1 or not _is_count(next(iter(counts))):
        return (
            f"layers={dict(layers)!r}: name the mixture layers, each with its number of "
            "experts, which is the same for all"
        )
    if not _is_count(slots):
        return f"slots={slots!r}: a rank has room for one expert of each layer at least, and for whole ones"
    if not _is_count(threshold):
        return f"threshold={threshold!r}: so many replicas every expert should have, a whole number from 1 on"
    number = isinstance(max_straggler, int | float) and not isinstance(max_straggler, bool)
    if max_straggler is not None and not number:
        return f"max_straggler={max_straggler!r}: a number from 1 on, or None"
    if len(run) > _MAX_RUN:
        return f"run={run!r} has more than {_MAX_RUN} characters"
    return ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_groups(given: Mapping[str, Any]) -> None:
    """Check the option groups of the job's checkpointer.

    Raises:
        TypeError: an unknown keyword, or a group of another type.
    """
    if own := [name for name in given if name in _OF_THE_JOB]:
        raise TypeError(f"{own[0]}= is the ElasticJob's own: pass it to ElasticJob()")
    check_keywords("checkpointer()", given, _GROUPS)


def check_options(snapshots: SnapshotOptions, recovery: RecoveryOptions, layout: LayoutOptions) -> None:
    """Check that no option of the checkpointer conflicts with the value that the job gives it.

    Raises:
        ValueError: names one that does.
    """
    if not snapshots.dense:
        raise ValueError(
            "policy= is the ElasticJob's own, whose snapshots are dense: pass "
            "snapshots=SnapshotOptions(policy='dense', ...)"
        )
    set_here = {
        "window": snapshots.window is not None,
        "park": recovery.park is False,
        "start_from": recovery.start_from is not None,
        "replicated": layout.replicated is not None,
    }
    if wrong := [name for name, is_set in set_here.items() if is_set]:
        raise ValueError(f"{wrong[0]}= is the ElasticJob's own: leave it out")


def layers_of(
    model: nn.Module, layers: ExpertLayers, made: Mapping[str, ElasticExperts]
) -> list[ElasticExperts]:
    """The model's mixture layers, in the order of ``layers``.

    Args:
        made: by the job, by name.
    Raises:
        ValueError: the model has other ones.
    """
    found = {name: m for name, m in named_modules(model) if isinstance(m, ElasticExperts)}
    if found.keys() != set(layers.names):
        raise ValueError(
            f"the model has the mixture layers {sorted(found)}, and layers= named {sorted(layers.names)}"
        )
    for name, layer in made.items():
        if found[name] is not layer:
            raise ValueError(f"the model's layer {name} is not the one that layer({name!r}) made")
    return [found[name] for name in layers.names]


def same_total(ranks: Collectives, total: int) -> None:
    """Check that all ranks have the same total; a collective call.

    Raises:
        ValueError: on all ranks: they have not.
    """
    totals = ranks.gather(str(total), str)
    if any(other != totals[0] for other in totals):
        raise ValueError(
            f"the ranks were given other totals, [{', '.join(totals)}]: pass the same to steps() on all"
        )
