"""What the ranks of these tests have in common: the layer of a case, what is raised, and what is
told at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptd.client.elastic import ElasticExperts
from tests.client.elastic.mixtures import Case, expert

__all__ = ["Found", "elastic_layer", "told", "work_through"]

Found = dict[str, Any]


def elastic_layer(
    case: Case, replicas: Sequence[Sequence[int]] | None = None, group: Any = None
) -> ElasticExperts:
    """This rank's layer.

    Args:
        replicas: ``[R, E]``, where they are not the case's.
    """
    placed = [list(row) for row in replicas or case.replicas]
    held = [number for number, count in enumerate(placed[dist.get_rank(group)]) if count]
    experts = {number: expert(number, case.dtype, trained=case.trained) for number in held}
    return ElasticExperts(experts, placed, group=group, nodes=case.nodes, reduce=case.reduce)


def told(work: Callable[[], object]) -> str:
    """What it raised."""
    try:
        work()
    except ValueError as error:
        return str(error)
    return ""


def work_through(rank: int, folder: str, found: Found, works: Iterable[Callable[[int], Any]]) -> None:
    """Each work's result under its name; all of them, with ``found``, go to ``<folder>/<rank>.pt``."""
    for work in works:
        found[work.__name__] = work(rank)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
