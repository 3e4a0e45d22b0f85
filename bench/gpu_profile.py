"""Where an iteration's time goes on a device, without ckptd and with it: every millisecond by kind.

Two runs of `bench.gpu`'s model, one after the other, each a process of its own; some iterations of each are
profiled (torch.profiler) and exported as a chrome trace. The table follows the stream that computes: at each
moment it runs a kernel, copies, or is idle, and then for a reason: while copies of another stream run, while the
training thread (or that of backward) waits for the device, or while it has not come so far. These parts sum up
to the iteration. Below them is what happens at the same time: copies of other streams, waits of the training
thread.

Profiling slows small kernels; the difference of two profiled runs is what to read.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.common import Metric, emit, in_shared_environment, own_daemon, parser, table
from bench.gpu import add_model_options, config_of, model_options, settle, use_chunks
from bench.overhead import Job
from ckptd.demo.data import load_corpus

__all__ = ["Accounting", "account", "difference", "main", "subtract", "union"]

MARK = "iteration"
SMALL_BYTES, MIDDLE_BYTES = 4 << 10, 1 << 20
# Calls in which a thread waits for the device; a copy to memory that is not pinned does, whatever its name.
WAITS = ("Synchronize", "Memcpy")
BEHIND = "idle, the training thread has not come so far"
BACKWARD = "autograd::engine::"
WORKER_TIMEOUT_S = 420

Interval = tuple[float, float]
Event = Mapping[str, Any]


# --- intervals, in microseconds --------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals in order; empty ones are left out."""
    found: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[1] > i[0]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def subtract(whole: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """The moments of ``whole`` that are not in ``taken``; both disjoint and in order."""
    found: list[Interval] = []
    at = 0
    for begin, end in whole:
        while at < len(taken) and taken[at][1] <= begin:
            at += 1
        each = at
        while each < len(taken) and taken[each][0] < end:
            if taken[each][0] > begin:
                found.append((begin, taken[each][0]))
            begin = max(begin, taken[each][1])
            each += 1
        if begin < end:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


# --- accounting ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accounting:
    """Milliseconds of an iteration, as a mean over those that were profiled.

    Args:
        parts: what the computing stream does; their sum is ``iteration_ms``.
        meanwhile: what happens at the same time elsewhere, and how often.
    """

    iterations: int
    iteration_ms: float
    parts: Mapping[str, float]
    meanwhile: Mapping[str, float]


def account(trace: Mapping[str, Any]) -> Accounting:
    """Of a chrome trace in which each iteration is marked.

    Raises:
        ValueError: no iteration is marked.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    marks = [e for e in events if e.get("cat") == "user_annotation" and e.get("name") == MARK]
    if not marks:
        raise ValueError(f"no iteration is marked in this trace: wrap each in record_function({MARK!r})")
    begin = min(_interval(e)[0] for e in marks)
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    device = [e for e in device if _interval(e)[0] >= begin]
    end = max(_interval(e)[1] for e in (*marks, *device))
    # Backward runs in threads of autograd's.
    training = [*marks, *(e for e in events if str(e.get("name")).startswith(BACKWARD))]
    threads = {e.get("tid") for e in training}
    waits = [e for e in events if e.get("tid") in threads and is_wait(e)]
    scale = 1e3 * len(marks)
    parts: dict[str, float] = {}
    left = [(begin, end)]
    for name, intervals in _in_order(device, waits):
        rest = subtract(left, union(intervals))
        parts[name] = parts.get(name, 0.0) + (length(left) - length(rest)) / scale
        left = rest
    parts[BEHIND] = length(left) / scale
    return Accounting(len(marks), (end - begin) / scale, parts, _meanwhile(device, waits, len(marks)))


def is_wait(event: Event) -> bool:
    """Whether this is a call in which a thread waits for the device."""
    name = str(event.get("name"))
    called = event.get("cat") in ("cuda_runtime", "cuda_driver")
    return called and any(each in name for each in WAITS)


def _interval(event: Event) -> Interval:
    begin = float(event["ts"])
    return begin, begin + float(event.get("dur", 0.0))


def _in_order(device: Sequence[Event], waits: Sequence[Event]) -> list[tuple[str, list[Interval]]]:
    """What the computing stream does, and its reasons to be idle; a moment counts for the first that it is
    in.
    """
    computing = computing_stream(device)
    own: dict[str, list[Interval]] = defaultdict(list)
    others: dict[str, list[Interval]] = defaultdict(list)
    for event in device:
        here = _stream(event) == computing
        (own if here else others)[kind_of(event)].append(_interval(event))
    found = [("kernels", own.pop("kernels", []))]
    found += sorted(own.items())
    # The longest first: it is the likeliest reason.
    ordered = sorted(others.items(), key=lambda item: (item[0] == "kernels", -length(union(item[1]))))
    found += [(f"idle during {name} of another stream", intervals) for name, intervals in ordered]
    calls: dict[str, list[Interval]] = defaultdict(list)
    for event in waits:
        calls[str(event["name"])].append(_interval(event))
    return found + [(f"idle, the training thread in {name}", each) for name, each in sorted(calls.items())]


def _stream(event: Event) -> object:
    arguments = event.get("args", {})
    return arguments.get("device"), arguments.get("stream", event.get("tid"))


def computing_stream(device: Sequence[Event]) -> object:
    """The stream whose kernels take longest; None without kernels."""
    kernels: dict[object, list[Interval]] = defaultdict(list)
    for event in device:
        if event["cat"] == "kernel":
            kernels[_stream(event)].append(_interval(event))
    return max(kernels, key=lambda each: length(union(kernels[each])), default=None)


def kind_of(event: Event) -> str:
    """Kernels, memsets, or copies by their direction and the class of their size."""
    if event["cat"] == "kernel":
        return "kernels"
    if event["cat"] == "gpu_memset":
        return "memsets"
    direction = re.match(r"Memcpy (\w+)", str(event.get("name")))
    return f"copies {direction[1] if direction else '?'} {size_class(event.get('args', {}).get('bytes'))}"


def size_class(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "of unknown size"
    if num_bytes <= SMALL_BYTES:
        return "<= 4 KiB"
    return "<= 1 MiB" if num_bytes <= MIDDLE_BYTES else "> 1 MiB"


def _meanwhile(device: Sequence[Event], waits: Sequence[Event], iterations: int) -> dict[str, float]:
    computing = computing_stream(device)
    times: dict[str, list[Interval]] = defaultdict(list)
    for event in device:
        if _stream(event) != computing:
            times[f"{kind_of(event)} of other streams"].append(_interval(event))
    for event in waits:
        times[f"the training thread in {event['name']}"].append(_interval(event))
    found = {name: length(union(each)) / 1e3 / iterations for name, each in sorted(times.items())}
    for name, each in sorted(times.items()):
        found[f"{name}, how many"] = len(each) / iterations
    return found


def difference(plain: Accounting, ours: Accounting) -> str:
    """A table of both, and of what the second takes longer; what takes longest by comparison comes first."""

    def rows(left: Mapping[str, float], right: Mapping[str, float]) -> list[list[str]]:
        names = sorted(left.keys() | right.keys(), key=lambda n: (left.get(n, 0.0) - right.get(n, 0.0), n))
        pairs = [(name, left.get(name, 0.0), right.get(name, 0.0)) for name in names]
        return [[name, f"{a:.3f}", f"{b:.3f}", f"{b - a:+.3f}"] for name, a, b in pairs]

    sums = {"an iteration": plain.iteration_ms}, {"an iteration": ours.iteration_ms}
    header = ["ms of an iteration", "without", "with ckptd", "difference"]
    meanwhile = ["at the same time", *header[1:]]
    return "\n".join(
        (
            table(header, [*rows(plain.parts, ours.parts), *rows(*sums)]),
            "",
            table(meanwhile, rows(plain.meanwhile, ours.meanwhile)),
        )
    )


def read_trace(path: Path) -> dict[str, Any]:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return dict(json.loads(raw))


# --- recording -------------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    """One run: settles, then profiles some iterations into the trace's file."""
    torch.set_num_threads(1)
    use_chunks(args.chunk_mib)
    job = Job(device=args.device, batch_size=args.batch_size, corpus=load_corpus(), config=config_of(args))
    if args.worker != "plain":
        job.attach(run="profile", daemon=args.worker, window=args.window)
    settle(job, args.settle)
    record(job, 1, None)  # what the profiler loads and sets up at first
    record(job, args.iterations, args.trace)
    if job.ckpt is not None:
        job.ckpt.close()


def record(job: Job, iterations: int, path: Path | None) -> None:
    cuda = job.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    if cuda:
        torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        for _ in range(iterations):
            with record_function(MARK):
                job.iterate()
        if cuda:
            torch.cuda.synchronize()
    if path is not None:
        profiler.export_chrome_trace(str(path))


def recorded(args: argparse.Namespace, role: str, name: str) -> Accounting:
    trace = args.out / f"trace_{name}.json.gz"
    command = [sys.executable, "-m", "bench.gpu_profile", "--worker", role, "--trace", str(trace)]
    command += ["--device", args.device, "--iterations", str(args.iterations), *model_options(args)]
    if args.window is not None:
        command += ["--window", str(args.window)]
    subprocess.run(command, check=True, timeout=WORKER_TIMEOUT_S)
    print(f"{name}: {trace.name}, {trace.stat().st_size / 1e6:.1f} MB", flush=True)
    return account(read_trace(trace))


def metrics_of(found: Accounting, name: str) -> dict[str, Metric]:
    def label(part: str) -> str:
        return re.sub(r"[^a-z0-9]+", "_", part.lower().replace("<=", "upto").replace(">", "over")).strip("_")

    metrics: dict[str, Metric] = {f"profiled_iteration_ms_{name}": found.iteration_ms}
    return metrics | {f"profiled_ms_{label(part)}_{name}": ms for part, ms in found.parts.items()}


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    add_model_options(options)
    options.add_argument("--iterations", type=int, default=6, help="that are profiled")
    options.add_argument("--window", type=int, default=None, help="default: measured by ckptd")
    options.add_argument("--out", type=Path, default=Path("out", "gpu"), help="folder for the traces")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    options.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing is profiled (--device cpu profiles on the host)")
        return
    if args.worker is not None:
        work(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    plain = recorded(args, "plain", "plain")
    with own_daemon(memory_mib=args.memory_gib << 10) as endpoint:
        ours = recorded(args, endpoint, "ckptd")
    print(difference(plain, ours), flush=True)
    metrics = metrics_of(plain, "plain") | metrics_of(ours, "ckptd")
    emit("gpu_profile", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
