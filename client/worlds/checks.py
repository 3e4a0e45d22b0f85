"""What users pass to an elastic job, looked at before anything is done with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from ckptd.client.agreement import Exchange
from ckptd.client.elastic import ElasticExperts
from ckptd.client.names import named_modules
from ckptd.elastic.worlds import ExpertLayers

__all__ = ["check_options", "layers_of", "same_total", "wrong_arguments"]

_MAX_RUN = 50  # a world's number follows it, and a run's name has 64 characters at most
_GIVEN = frozenset(
    {
        "job",
        "run",
        "rank",
        "world_size",
        "daemon",
        "policy",
        "window",
        "park",
        "replicated",
        "start_from",
        "topology",
        "keep_floor",
    }
)


def wrong_arguments(layers: object, slots: int, run: str) -> str:
    """What cannot be used; empty if nothing."""
    if not isinstance(layers, Mapping):
        return f"layers={layers!r}: a dict from the name of each mixture layer to its number of experts"
    counts = set(layers.values())
    if not layers or len(counts) != 1 or not _is_count(next(iter(counts))):
        return f"layers={dict(layers)!r}: name the mixture layers, each with its number of experts, which is the same for all"
    if not _is_count(slots):
        return f"slots={slots!r}: a rank has room for one expert of each layer at least, and for whole ones"
    if len(run) > _MAX_RUN:
        return f"run={run!r} has more than {_MAX_RUN} characters"
    return ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 1


def check_options(options: Iterable[str]) -> None:
    """No option of the checkpointer is passed that the job sets.

    Raises:
        ValueError: names one that is.
    """
    if wrong := sorted(_GIVEN.intersection(options)):
        raise ValueError(f"{wrong[0]}= is the ElasticJob's own: leave it out")


def layers_of(
    model: nn.Module, layers: ExpertLayers, made: Mapping[str, ElasticExperts]
) -> list[ElasticExperts]:
    """The model's mixture layers, in the order of ``layers``.

    Args:
        made: those that the job has made, by name.
    Raises:
        ValueError: the model has others.
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


def same_total(meet: Exchange, total: int) -> None:
    """A collective call: all ranks are to do as many steps.

    Raises:
        ValueError: on all ranks: they were given other totals.
    """
    totals = [said.decode() for said in meet(str(total).encode())]
    if any(other != totals[0] for other in totals):
        raise ValueError(
            f"the ranks were given other totals, [{', '.join(totals)}]: pass the same to steps() on all"
        )
