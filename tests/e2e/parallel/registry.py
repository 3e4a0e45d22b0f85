"""The parallelism matrix: one case is one function in the file of its family (``ddp.py``, ``fsdp.py``, …).

A case builds the job of one rank; the process group exists when it is called, so it may wrap, shard
and make groups. Every rank draws data of its own, and the weights do not depend on the rank. What a
case must show is in ``checks.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.e2e.cases import Body, Data, Job, Model, plain_body
from tests.long import long

__all__ = ["Case", "Family", "build", "find_parallel_case", "job_of"]

KILL_AT, TOTAL = 14, 18


@dataclass(frozen=True)
class Case:
    """How to build one rank's job, on how many ranks, and whether the default test run plays it."""

    name: str
    build: Callable[[int], Job]
    ranks: int
    quick: bool
    total: int
    kill_at: int
    victim: int


class Family:
    """The cases of one kind of parallelism.

    Args:
        name: that of the module in ``tests.e2e.parallel`` which defines it, as ``CASES``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: dict[str, Case] = {}

    def case(
        self,
        *,
        ranks: int = 2,
        quick: bool = False,
        total: int = TOTAL,
        kill_at: int = KILL_AT,
        victim: int = 1,
    ) -> Callable[[Callable[[int], Job]], Callable[[int], Job]]:
        """Register a builder ``(seed) -> Job`` under its own name.

        Args:
            ranks: the world's size.
            quick: part of ``make test``; the others run with ``CKPTD_LONG=1``.
            total, kill_at: steps in all, and the one in whose middle ``victim`` kills itself.
        """

        def register(builder: Callable[[int], Job]) -> Callable[[int], Job]:
            name = builder.__name__
            self.cases[name] = Case(f"{self.name}/{name}", builder, ranks, quick, total, kill_at, victim)
            return builder

        return register

    def parameters(self) -> list[object]:
        """All cases for ``parametrize``: those that are not quick are skipped, with the reason,
        unless asked for.
        """
        return [
            pytest.param(case, id=name, marks=[] if case.quick else [long])
            for name, case in self.cases.items()
        ]


def find_parallel_case(name: str) -> Callable[[int], Job]:
    """The builder of ``family/case``.

    Raises:
        ValueError: there is no such case.
    """
    family, _, case = name.partition("/")
    cases: dict[str, Case] = importlib.import_module(f"tests.e2e.parallel.{family}").CASES.cases
    if case not in cases:
        raise ValueError(f"no case {case!r} in {family}; there are {', '.join(sorted(cases))}")
    return cases[case].build


def build(seed: int, **model_args: object) -> Model:
    """The model of ``cases.py``, initialised from ``seed`` alike on all ranks."""
    torch.manual_seed(seed)
    return Model(**model_args).to(Data.device)  # type: ignore[arg-type]


def job_of(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | list[torch.optim.Optimizer],
    body: Body = plain_body,
    **options: object,
) -> Job:
    """This rank's job: data and random numbers of its own, which do not depend on the initialisation's seed."""
    data = Data()
    data.position = 10_000 * dist.get_rank()
    torch.manual_seed(99 + dist.get_rank())
    made = optimizers if isinstance(optimizers, list) else [optimizers]
    return Job(model, made, {"data": data}, body, options=options)
