"""The job's configuration: nested dataclasses, and their fields as options (`--training.steps
100`), as in torchtitan.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

__all__ = ["JobConfig", "parse_config"]


@dataclass(frozen=True, slots=True)
class Model:
    dim: int = 64
    n_layers: int = 2
    n_heads: int = 4
    max_seq_len: int = 64
    vocab_size: int = 256  # bytes
    dropout: float = 0.1


@dataclass(frozen=True, slots=True)
class Optimizer:
    lr: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 10


@dataclass(frozen=True, slots=True)
class Training:
    steps: int = 40
    local_batch_size: int = 4
    gradient_accumulation_steps: int = 2
    max_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Parallelism:
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1  # -1: all ranks that are left


@dataclass(frozen=True, slots=True)
class Fault:
    """Something to see: a rank that kills itself, once."""

    rank: int = 1
    at_step: int = -1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    job: str = "torchtitan_style"
    run: str = "default"
    daemon: str = "auto"  # "none": off
    window: int = 0  # 0: follows from measurements


@dataclass(frozen=True, slots=True)
class Output:
    folder: str = ""  # where each rank's final state goes; "": nowhere


@dataclass(frozen=True, slots=True)
class JobConfig:
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    fault: Fault = field(default_factory=Fault)
    output: Output = field(default_factory=Output)


def parse_config(argv: Sequence[str] | None = None) -> JobConfig:
    """The configuration with what the command line changes in it."""
    default = JobConfig()
    parser = argparse.ArgumentParser()
    for section in fields(default):
        part: Any = getattr(default, section.name)
        for option in fields(part):
            value = getattr(part, option.name)
            parser.add_argument(f"--{section.name}.{option.name}", type=type(value), default=value)
    given = vars(parser.parse_args(argv))
    sections = {
        section.name: replace(
            getattr(default, section.name),
            **{
                option.name: given[f"{section.name}.{option.name}"]
                for option in fields(getattr(default, section.name))
            },
        )
        for section in fields(default)
    }
    return JobConfig(**sections)
