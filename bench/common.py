"""What all benchmarks share: the machine's description, the output format, a model, interleaved rounds.

Output contract: a readable table, and under `--json` one JSON object as the last line, with the keys
`bench`, `machine`, `commit` and `metrics` (flat: name to number or string).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptd.demo.lab import SHARED_CORES, DemoDaemon, daemon_folders, in_shared_environment
from ckptd.transport.messages import Done, Forget
from ckptd.transport.wire import ControlClient

__all__ = [
    "MoEStack",
    "build_stack",
    "clock_ms",
    "commit",
    "copy_gb_per_s",
    "emit",
    "forget",
    "in_shared_environment",
    "interleave",
    "machine",
    "median",
    "own_daemon",
    "parser",
    "percentile",
    "scratch_folder",
    "state_bytes",
    "table",
]

REPOSITORY = Path(__file__).resolve().parents[1]
MIB = 1 << 20
GB = 1e9
Metric = float | int | str


# --- describing the run --------------------------------------------------------------------------------


def machine() -> dict[str, object]:
    """What a reader needs in order to judge a number: processor, memory, versions, threads."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "pyzmq": _version("pyzmq"),
        "ckptd": _version("ckptd"),
        **{name.lower(): os.environ.get(name, "") for name in SHARED_CORES},
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The commit that was measured; `+` when tracked files were changed since, `unknown` without git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(*args: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), *args],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.stdout.strip()


def parser(text: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    out = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    out.add_argument("--json", action="store_true", help="end with one line of JSON")
    out.add_argument("--rounds", type=int, default=5, help="how often each variant is measured")
    return out


def emit(bench: str, metrics: Mapping[str, Metric], *, as_json: bool) -> None:
    """Print the metrics as a table, and as the last line of the output if `as_json`."""
    print()
    print(table(["metric", "value"], [[name, _short(value)] for name, value in metrics.items()]))
    if as_json:
        clean = {
            name: value if not isinstance(value, float) or math.isfinite(value) else None
            for name, value in metrics.items()
        }
        record = {"bench": bench, "machine": machine(), "commit": commit(), "metrics": clean}
        sys.stdout.flush()
        print(json.dumps(record), flush=True)


def _short(value: Metric) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain text table, first column to the left, the others to the right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


# --- measuring -----------------------------------------------------------------------------------------


def clock_ms(work: Callable[[], object]) -> float:
    """Wall time of one call, garbage collection kept out of it."""
    gc.disable()
    try:
        begun = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - begun)
    finally:
        gc.enable()


def interleave(
    variants: Mapping[str, Callable[[], float]], *, rounds: int, warmup: int = 1, limit_s: float = math.inf
) -> dict[str, list[float]]:
    """Measure all variants in turn, in alternating order, so that drift hits each of them alike.

    Args:
        limit_s: no round begins later, but the first: what is measured by then counts.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    end_s = time.monotonic() + limit_s
    for number in range(-warmup, rounds):
        if number > 0 and time.monotonic() > end_s:
            break
        names = list(variants)
        if number % 2:
            names.reverse()
        for name in names:
            value = variants[name]()
            if number >= 0:
                samples[name].append(value)
    return samples


def copy_gb_per_s(size_bytes: int, *, threads: int, source: Tensor | None = None) -> float:
    """The memory-copy limit: large contiguous copies into warm memory over `threads` threads.

    Args:
        source: uint8, at least `size_bytes` long (a mapped segment, say); default: anonymous memory.
    """
    origin = torch.ones(size_bytes, dtype=torch.uint8) if source is None else source
    target = np.ones(size_bytes, dtype=np.uint8)
    origin_np = origin[:size_bytes].numpy()
    bounds = [size_bytes * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:

        def once() -> None:
            list(
                pool.map(
                    lambda pair: np.copyto(target[pair[0] : pair[1]], origin_np[pair[0] : pair[1]]),
                    itertools.pairwise(bounds),
                )
            )

        once()
        times_ms = [clock_ms(once) for _ in range(5)]
    return size_bytes / GB / (min(times_ms) / 1e3)


# --- the model -----------------------------------------------------------------------------------------


class _Expert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x_ND: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x_ND)))
        return out


class _FusedExperts(nn.Module):
    """All experts of a layer as two `[E, ...]` parameters, as Hugging Face models keep them."""

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(num_experts, width, hidden) * width**-0.5)
        self.down_proj = nn.Parameter(torch.randn(num_experts, hidden, width) * hidden**-0.5)

    def forward(self, x_END: Tensor) -> Tensor:
        return torch.bmm(F.gelu(torch.bmm(x_END, self.up_proj)), self.down_proj)


class _Layer(nn.Module):
    """Two dense matrices, a gate, and experts that share the tokens evenly.

    The even share keeps every iteration's work the same, so that two variants can be compared; the
    gate's weight still takes part, and still learns.
    """

    def __init__(self, width: int, hidden: int, num_experts: int, *, fused: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.num_experts = num_experts
        self.fused = fused
        self.experts: nn.Module = (
            _FusedExperts(num_experts, width, hidden)
            if fused
            else nn.ModuleList(_Expert(width, hidden) for _ in range(num_experts))
        )

    def forward(self, x_ND: Tensor) -> Tensor:
        x_ND = x_ND + self.mix(self.norm(x_ND))
        weight_NE = self.gate(x_ND).softmax(dim=-1)
        share_END = x_ND.view(self.num_experts, -1, x_ND.shape[-1])
        if self.fused:
            out_END = self.experts(share_END)
        else:
            assert isinstance(self.experts, nn.ModuleList)
            out_END = torch.stack(
                [expert(part) for expert, part in zip(self.experts, share_END, strict=True)]
            )
        scaled_ND: Tensor = out_END.reshape_as(x_ND) * weight_NE.amax(dim=-1, keepdim=True)
        return x_ND + scaled_ND


class MoEStack(nn.Module):
    """A stack of mixture layers; `forward` returns a scalar loss."""

    def __init__(
        self, *, width: int, hidden: int, num_experts: int, num_layers: int, fused: bool = False
    ) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(
            _Layer(width, hidden, num_experts, fused=fused) for _ in range(num_layers)
        )

    def forward(self, x_ND: Tensor) -> Tensor:
        for layer in self.layers:
            x_ND = layer(x_ND)
        loss: Tensor = x_ND.square().mean()
        return loss


def build_stack(state_mib: int, *, num_experts: int = 8, fused: bool = False) -> MoEStack:
    """A stack whose fp32 weights and AdamW state together take at least `state_mib`.

    It is 512 wide, or narrower where a single layer of that width would be much more than was asked for.
    """
    width = 512
    while width > 16 and _layer_bytes(width, num_experts) > state_mib * MIB:
        width //= 2
    num_layers = -(-state_mib * MIB // _layer_bytes(width, num_experts))
    return MoEStack(
        width=width, hidden=2 * width, num_experts=num_experts, num_layers=num_layers, fused=fused
    )


def _layer_bytes(width: int, num_experts: int) -> int:
    """A lower bound: matrices only, at twelve bytes per parameter."""
    return 12 * (width * width + width * num_experts + num_experts * 4 * width * width)


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters and optimizer state as they are now."""
    tensors = [param.detach() for param in model.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


# --- a daemon of the benchmark's own -------------------------------------------------------------------


@contextmanager
def own_daemon(memory_mib: int) -> Iterator[str]:
    """A daemon in folders of its own; yields its endpoint and ends it afterwards."""
    with daemon_folders() as (runtime, segments):
        daemon = DemoDaemon(runtime, segments, memory=f"{memory_mib}MiB")
        try:
            daemon.start()
            yield daemon.endpoint
        finally:
            daemon.stop()


def forget(endpoint: str, job: str, run: str) -> None:
    """Give back a finished run's memory, so that the next one fits the quota."""
    with ControlClient(endpoint) as client:
        client.ask(Forget(job, run), Done)


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ckptd-bench-")


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def percentile(samples: Sequence[float], fraction: float) -> float:
    """The smallest sample that at least ``fraction`` of all do not exceed (nearest rank)."""
    if not samples:
        raise ValueError("there is no sample")
    return sorted(samples)[max(0, math.ceil(fraction * len(samples)) - 1)]
