"""The stages of a benchmark's pipeline, each a process of the same module as the benchmark.

Such a module has a function for one stage: it says that it is ready, answers each line on stdin, a number of
iterations, with a line of JSON, and the end of stdin with what it has counted, as JSON, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["StageProcesses", "stage_options"]

# Options of a stage that `stage_options` adds: they are passed on to its process.
_PASSED = ("width", "layers", "experts", "tokens", "micro_batches", "window", "settle")


def stage_options(
    parser: argparse.ArgumentParser,
    variants: Sequence[str],
    *,
    block: int,
    layers: int,
    tokens: int,
    micro_batches: int,
    window: int,
) -> None:
    """Add the options of a pipeline's stages, with these defaults, and those for a stage's process."""
    parser.add_argument("--block", type=int, default=block, help="iterations between two changes")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=layers, help="of each stage")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=tokens, help="of each micro-batch")
    parser.add_argument("--micro-batches", type=int, default=micro_batches)
    parser.add_argument("--window", type=int, default=window)
    parser.add_argument("--settle", type=int, default=16, help="iterations before measuring")
    parser.add_argument("--variant", choices=variants, help=argparse.SUPPRESS)
    for name in ("--endpoint", "--meet"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)


class StageProcesses:
    """All stages of one variant; the constructor returns when each is ready.

    Args:
        module: the benchmark, as for ``python -m``.
        endpoint: of the daemon.
        meet: a file by which the stages find each other; it must not exist yet.
        args: the benchmark's own arguments.
        names: of those to pass on, besides the ones of `stage_options`.
        ranks: the number of stages.
    Raises:
        RuntimeError: a stage ended; also by every method.
    """

    def __init__(
        self,
        module: str,
        variant: str,
        endpoint: str,
        meet: Path,
        args: argparse.Namespace,
        names: Iterable[str],
        ranks: int,
    ) -> None:
        command = [sys.executable, "-m", module, "--variant", variant]
        command += ["--endpoint", endpoint, "--meet", str(meet)]
        for name in (*_PASSED, *names):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        self._stages = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(ranks)
        ]
        for stage in self._stages:
            _read(stage)

    def ask(self, iterations: int) -> list[Any]:
        """Let all stages run so many iterations; what each answers."""
        for stage in self._stages:
            assert stage.stdin is not None
            stage.stdin.write(f"{iterations}\n")
        return [json.loads(_read(stage)) for stage in self._stages]

    def close(self) -> list[dict[str, float]]:
        """End all stages; what each has counted."""
        for stage in self._stages:
            assert stage.stdin is not None
            stage.stdin.close()
        found = [json.loads(_read(stage)) for stage in self._stages]
        for stage in self._stages:
            stage.wait(60)
        return found


def _read(stage: subprocess.Popen[str]) -> str:
    assert stage.stdout is not None
    line = stage.stdout.readline()
    if not line:
        raise RuntimeError(f"a stage ended with code {stage.wait()}")
    return line
