"""Ways to get a snapshot's bytes across the link, each alone and while a model trains, in one run.

The load is a synthetic iteration: matrix products, and after some of them the size of a `nonzero` comes to
the host, as in a mixture of experts. The ways take turns, round by round:

* `burst`: one copy;
* `chunks_<n>m`: chunks of n MiB with a kernel between, which makes the copy engine look at other streams;
* `paced_<n>m`: these with pauses on the device, so that they end with the load; `host_paced_<n>m`: a thread
  issues a chunk when the one before has arrived and a pause has passed;
* `store_<n>`: the engine's kernel with n blocks stores into pinned memory, past the copy engine;
* `batch_<n>m`: `cudaMemcpyBatchAsync` (cuda-python), source order *stream*; `..._overlap` with the driver's hint
  to prefer overlap with kernels.

What this machine lacks is named as skipped. For each: `gb_per_s` alone and `beside` the load, `vs_link` (one
large pinned copy), `slowdown` of the load, `small_copy_delay_us` of an 8-byte copy of another stream,
`overrun_ms`, which the copies need after the load's end, and `host_ms` of the thread that issues them. At the end the best one under a bound on the slowdown,
and the plan that `ckptd.cuda.copy_plan` makes of this device's points. `--device cpu` runs the same rounds
with copies in host memory; its numbers say nothing about a device.
"""

from __future__ import annotations

import argparse
import json
import mmap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from bench import gpu
from bench.common import GB, MIB, Metric, emit, in_shared_environment, median, parser, percentile, table
from bench.gpu import Capture
from bench.gpu_candidates import Candidate, DevicePlace, HostPlace, Load, Place, Sample, device_candidates
from ckptd.cuda.copy_plan import (
    DEFAULT_PLAN,
    ChunkPoint,
    CopyCurve,
    CopyPlan,
    SizePoint,
    choose_copy_plan,
)
from ckptd.cuda.cuda_engine import make_engine
from ckptd.cuda.engine import CopyItem, CopyList, HostMemory

__all__ = ["Measured", "Result", "Rounds", "best_of", "chunk_points", "main", "measure", "summarize"]

SLOWDOWN_MAX = 0.01
POINT_SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
POINT_BYTES = 256 << 20
POINT_TENSORS = 2048
ALL_PACKED, ALL_DIRECT = 1 << 40, 1


# --- statistics, and the choice ----------------------------------------------------------------------------


@dataclass(slots=True)
class Rounds:
    """What was measured of one candidate, round by round."""

    alone_ms: list[float] = field(default_factory=list)
    beside: list[Sample] = field(default_factory=list)
    delays_us: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    """One candidate: medians over its rounds.

    Args:
        slowdown: what the load takes longer than without copies, as a fraction; each round by itself.
        overrun_ms: what the copies take longer than the load.
        host_ms: of the training thread, to issue the copies; not in the slowdown.
        small_copy_delay_us: None where no small copy was clocked.
    """

    name: str
    gb_per_s: float
    vs_link: float
    beside_gb_per_s: float
    slowdown: float
    slowdown_p99: float
    overrun_ms: float
    host_ms: float
    small_copy_delay_us: float | None
    small_copy_delay_p99_us: float | None


def summarize(
    name: str,
    rounds: Rounds,
    *,
    total_bytes: int,
    link_gb_per_s: float,
    load_ms: Sequence[float],
    idle_us: Sequence[float] = (),
) -> Result:
    """
    Args:
        load_ms: of the load without copies, in the same rounds.
        idle_us: small copies on an idle device.
    """
    rate = total_bytes / GB / (median(rounds.alone_ms) / 1e3)
    slowdowns = [s.load_ms / plain - 1.0 for s, plain in zip(rounds.beside, load_ms, strict=True)]
    delay = p99 = None
    if rounds.delays_us and idle_us:
        base = median(idle_us)
        delay, p99 = median(rounds.delays_us) - base, percentile(rounds.delays_us, 0.99) - base
    return Result(
        name=name,
        gb_per_s=rate,
        vs_link=rate / link_gb_per_s,
        beside_gb_per_s=total_bytes / GB / (median([s.copy_ms for s in rounds.beside]) / 1e3),
        slowdown=median(slowdowns),
        slowdown_p99=percentile(slowdowns, 0.99),
        overrun_ms=max(0.0, median([s.copy_ms - s.load_ms for s in rounds.beside])),
        host_ms=median([s.host_ms for s in rounds.beside]),
        small_copy_delay_us=delay,
        small_copy_delay_p99_us=p99,
    )


def best_of(results: Sequence[Result], *, slowdown_max: float) -> tuple[Result, str]:
    """The candidate to take, and why.

    Of those that slow the load by at most ``slowdown_max`` the one that keeps training waiting least after the
    load's end, then the fastest beside it; if there is none, the one that slows it least.

    Raises:
        ValueError: there is no result.
    """
    if not results:
        raise ValueError("nothing was measured: there is no candidate to choose")
    kept = [r for r in results if r.slowdown <= slowdown_max]
    if not kept:
        least = min(results, key=lambda r: (r.slowdown, r.overrun_ms))
        text = f"none keeps the slowdown within {slowdown_max:.1%}; {least.name} has the least, {least.slowdown:.1%}"
        return least, text
    best = min(kept, key=lambda r: (r.overrun_ms, -r.beside_gb_per_s))
    text = (
        f"{best.name}: slowdown {best.slowdown:.1%} within {slowdown_max:.1%}, {best.beside_gb_per_s:.1f} GB/s beside "
        f"the load, {best.overrun_ms:.1f} ms after its end; {len(kept)} of {len(results)} keep the bound"
    )
    return best, text


def chunk_points(results: Sequence[Result]) -> tuple[ChunkPoint, ...]:
    """Of the candidates with a kernel between their chunks: what a plan is made of."""
    found = []
    for result in results:
        head, _, size = result.name.partition("_")
        if head == "chunks" and result.small_copy_delay_us is not None:
            delay = max(0.0, result.small_copy_delay_us)
            found.append(ChunkPoint(int(size.removesuffix("m")) * MIB, result.gb_per_s, delay))
    return tuple(sorted(found, key=lambda point: point.chunk_bytes))


# --- rounds ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Measured:
    rounds: dict[str, Rounds]
    load_ms: list[float] = field(default_factory=list)
    idle_us: list[float] = field(default_factory=list)

    def results(self, total_bytes: int, *, link: str = "burst") -> list[Result]:
        """One large pinned copy, the candidate ``link``, is what the others are compared with."""
        rate = total_bytes / GB / (median(self.rounds[link].alone_ms) / 1e3)
        return [
            summarize(
                name,
                rounds,
                total_bytes=total_bytes,
                link_gb_per_s=rate,
                load_ms=self.load_ms,
                idle_us=self.idle_us,
            )
            for name, rounds in self.rounds.items()
        ]


def measure(place: Place, candidates: Sequence[Candidate], *, rounds: int, warmup: int = 1) -> Measured:
    """All candidates in turn, in alternating order, so that drift hits each of them alike."""
    found = Measured({c.name: Rounds() for c in candidates})
    for candidate in candidates:
        place.check(candidate)  # raises: nothing is measured where bytes do not arrive
    found.idle_us = place.idle_us()
    for number in range(-warmup, rounds):
        ordered = list(candidates) if number % 2 == 0 else list(reversed(candidates))
        plain = place.beside(None).load_ms
        for candidate in ordered:
            alone, beside = place.alone_ms(candidate), place.beside(candidate)
            delays = place.delays_us(candidate)
            if number >= 0:
                kept = found.rounds[candidate.name]
                kept.alone_ms.append(alone)
                kept.beside.append(beside)
                kept.delays_us += delays
        if number >= 0:
            # Before and after the others: the load's own drift within the round.
            found.load_ms.append((plain + place.beside(None).load_ms) / 2)
    return found


# --- the device's curve --------------------------------------------------------------------------------------


def size_point(size_bytes: int, *, direct: bool, rounds: int, plan: CopyPlan) -> SizePoint:
    """The engine's copies of tensors of one size, all direct or all packed."""
    count = max(4, min(POINT_TENSORS, POINT_BYTES // size_bytes))
    threshold = ALL_DIRECT if direct else ALL_PACKED
    engine = make_engine(
        torch.device(gpu.DEVICE), plan=CopyPlan(threshold, plan.chunk_bytes, plan.curve, 0.0, True, "")
    )
    memory = HostMemory(memoryview(mmap.mmap(-1, count * size_bytes)))
    memory.tensor.fill_(1)
    engine.register(memory, [(0, count * size_bytes)])
    tensors = [torch.empty(size_bytes, dtype=torch.uint8, device=gpu.DEVICE) for _ in range(count)]
    items = CopyList(
        CopyItem(t, None, None, torch.uint8, i * size_bytes, size_bytes) for i, t in enumerate(tensors)
    )
    host_us, rates = [], []
    try:
        for number in range(rounds + 2):
            torch.cuda.synchronize()
            capture = Capture()
            begun = time.perf_counter()
            engine.begin(items, memory, 0, capture.done)
            took_s = time.perf_counter() - begun
            engine.wait()
            capture.wait()
            if number >= 2:
                host_us.append(1e6 * took_s / count)
                rates.append(count * size_bytes / GB / engine.last_copy_s)
    finally:
        engine.release(memory)
        engine.close()
    return SizePoint(size_bytes, median(host_us), median(rates))


def curve_of(results: Sequence[Result], link_gb_per_s: float, *, rounds: int, plan: CopyPlan) -> CopyCurve:
    def points(*, direct: bool) -> tuple[SizePoint, ...]:
        return tuple(size_point(size, direct=direct, rounds=rounds, plan=plan) for size in POINT_SIZES)

    return CopyCurve(
        device=torch.cuda.get_device_name(0),
        link_gb_per_s=link_gb_per_s,
        direct=points(direct=True),
        packed=points(direct=False),
        chunks=chunk_points(results),
    )


def plan_metrics(plan: CopyPlan) -> dict[str, Metric]:
    return {"plan_small_bytes": plan.small_bytes, "plan_chunk_bytes": plan.chunk_bytes, "plan": plan.reason}


# --- all of it -----------------------------------------------------------------------------------------------


def metrics_of(results: Sequence[Result]) -> dict[str, Metric]:
    return {
        f"{key}_{result.name}": value
        for result in results
        for key, value in asdict(result).items()
        if key != "name" and value is not None
    }


def show(results: Sequence[Result]) -> str:
    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    header = [
        "way",
        "GB/s",
        "of link",
        "beside",
        "slowdown",
        "p99",
        "overrun ms",
        "host ms",
        "small copy us",
        "p99",
    ]
    rows = [
        [
            r.name,
            f"{r.gb_per_s:.1f}",
            f"{r.vs_link:.3f}",
            f"{r.beside_gb_per_s:.1f}",
            f"{r.slowdown:+.2%}",
            f"{r.slowdown_p99:+.2%}",
            f"{r.overrun_ms:.1f}",
            f"{r.host_ms:.2f}",
            text(r.small_copy_delay_us, ".1f"),
            text(r.small_copy_delay_p99_us, ".1f"),
        ]
        for r in results
    ]
    return table(header, rows)


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.set_defaults(rounds=20)
    options.add_argument("--size-mib", type=int, default=1024, help="of a snapshot")
    options.add_argument("--products", type=int, default=64, help="of the load, each with a small copy")
    options.add_argument("--width", type=int, default=4096, help="of the load's matrices")
    options.add_argument("--pace-ms", type=float, help="of paced copies (default: 0.9 of the load's time)")
    options.add_argument("--only", nargs="+", default=[], metavar="WAY", help="`burst` and these ways")
    options.add_argument("--slowdown-max", type=float, default=SLOWDOWN_MAX)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--curve", type=Path, help="write the device's measured curve here, as JSON")
    args = options.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing is measured (--device cpu copies in host memory)")
        return
    emit("gpu_copies", run(args), as_json=args.json)


def run(args: argparse.Namespace) -> dict[str, Metric]:
    total = args.size_mib * MIB
    place: Place
    if args.device == "cpu":
        host = place = HostPlace(total, args.products, args.width)
        candidates, skipped = host.candidates(), {"paced, store, batch": "only on a device"}
    else:
        device = place = DevicePlace(total, Load(args.products, args.width))
        candidates, skipped = device_candidates(device, pace_ms=args.pace_ms)
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}", flush=True)
    if args.only:
        candidates = [c for c in candidates if c.name in {"burst", *args.only}]
    measured = measure(place, candidates, rounds=args.rounds)
    results = measured.results(total)
    print(show(results), flush=True)
    best, why = best_of(results, slowdown_max=args.slowdown_max)
    print(f"best: {why}", flush=True)
    metrics = metrics_of(results) | {"load_ms": median(measured.load_ms), "best": best.name, "why": why}
    metrics |= {f"skipped_{name.split(',')[0]}": reason for name, reason in skipped.items()}
    if args.device == "cuda":
        emit("gpu_copies", metrics, as_json=args.json)  # what is known by now
        metrics |= measured_plan(results, args)
    return metrics


def measured_plan(results: Sequence[Result], args: argparse.Namespace) -> dict[str, Metric]:
    """The plan of this device's own points, beside the one that the engine has now."""
    link = next(r.gb_per_s for r in results if r.name == "burst")
    curve = curve_of(results, link, rounds=min(10, args.rounds), plan=DEFAULT_PLAN)
    if args.curve is not None:
        args.curve.parent.mkdir(parents=True, exist_ok=True)
        args.curve.write_text(json.dumps(asdict(curve), indent=1) + "\n")
    plan = choose_copy_plan(curve)
    print(plan.reason, flush=True)
    found = plan_metrics(plan)
    for kind, points in (("direct", curve.direct), ("packed", curve.packed)):
        for point in points:
            label = f"{kind}_{point.size_bytes >> 10}k"
            found |= {f"host_us_{label}": point.host_us, f"gb_per_s_{label}": point.gb_per_s}
    return found


if __name__ == "__main__":
    main()
