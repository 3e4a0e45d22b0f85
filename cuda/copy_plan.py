"""How a device's snapshots cross the link, from what was measured on such a device.

A copy is *packed* (a kernel gathers small tensors, one copy sends them together) or *direct* (one copy for
each tensor). ``choose_copy_plan`` weighs both and limits the bytes that cross at a stretch. It makes no CUDA
call and needs no torch; ``CudaEngine`` takes its result.

Between two measured sizes a copy's time grows linearly with the size. Below the smallest one it takes as long
as that one; above the largest one the rate stays as it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

# Thresholds and chunks that are looked at: powers of two.
_SIZES = tuple(1 << shift for shift in range(12, 27))  # 4 KiB to 64 MiB
_CHUNKS = tuple(1 << shift for shift in range(20, 27))  # 1 MiB to 64 MiB
_NEVER = 1 << 40
# A small copy of the model's may wait for a third of a millisecond or so.
DELAY_US_MAX = 350.0
# Rates that differ by less are the same: then the chunk that others wait for less is better.
_SAME_RATE = 0.99


@dataclass(frozen=True, slots=True)
class SizePoint:
    """Measured copies of many tensors of one size.

    Args:
        size_bytes: of each tensor.
        host_us: microseconds of the training thread for each tensor.
        gb_per_s: the rate of all of them together, 1e9 bytes a second.
    """

    size_bytes: int
    host_us: float
    gb_per_s: float

    def __post_init__(self) -> None:
        if self.size_bytes <= 0 or not self.gb_per_s > 0 or not self.host_us >= 0:
            raise ValueError(f"{self}: pass a size and a rate above 0, and no negative time")

    @property
    def copy_us(self) -> float:
        """Microseconds of the link for each tensor."""
        return self.size_bytes / self.gb_per_s / 1e3


@dataclass(frozen=True, slots=True)
class ChunkPoint:
    """Measured copies in chunks with a kernel between: their rate, and what an 8-byte copy of another stream
    waits.
    """

    chunk_bytes: int
    gb_per_s: float
    delay_us: float

    def __post_init__(self) -> None:
        if self.chunk_bytes <= 0 or not self.gb_per_s > 0 or not self.delay_us >= 0:
            raise ValueError(f"{self}: pass a size and a rate above 0, and no negative delay")


@dataclass(frozen=True, slots=True)
class CopyCurve:
    """What was measured on one device; points in the order of their sizes.

    Args:
        link_gb_per_s: one large pinned copy, the device idle.
        chunks: none if delays were not measured; then a small copy is taken to wait for a whole chunk.
    """

    device: str
    link_gb_per_s: float
    direct: tuple[SizePoint, ...]
    packed: tuple[SizePoint, ...]
    chunks: tuple[ChunkPoint, ...] = ()

    def __post_init__(self) -> None:
        for name, points in (("direct", self.direct), ("packed", self.packed)):
            if not points:
                raise ValueError(f"{self.device}: there is no point of {name} copies")
            if any(a.size_bytes >= b.size_bytes for a, b in pairwise(points)):
                raise ValueError(f"{self.device}: the points of {name} copies are not in the order of size")
        if not self.link_gb_per_s > 0:
            raise ValueError(f"{self.device}: the link's rate is {self.link_gb_per_s} GB/s")

    def direct_us(self, size_bytes: int) -> float:
        """Microseconds of the link for a direct copy."""
        return _between(self.direct, size_bytes, lambda point: point.copy_us, rate_beyond=True)

    def packed_us(self, size_bytes: int) -> float:
        """Microseconds of the link for a tensor in a pack, the gathering included."""
        return _between(self.packed, size_bytes, lambda point: point.copy_us, rate_beyond=True)

    def direct_host_us(self, size_bytes: int) -> float:
        return _between(self.direct, size_bytes, lambda point: point.host_us)

    def packed_host_us(self, size_bytes: int) -> float:
        return _between(self.packed, size_bytes, lambda point: point.host_us)


def _between(
    points: Sequence[SizePoint],
    size_bytes: int,
    value: Callable[[SizePoint], float],
    *,
    rate_beyond: bool = False,
) -> float:
    """Linear in the size between two points; the first point's value below it.

    Args:
        rate_beyond: above the last point the value grows with the size (else it stays).
    """
    at = bisect_left(points, size_bytes, key=lambda point: point.size_bytes)
    if at == 0:
        return value(points[0])
    low = points[at - 1]
    if at == len(points):
        return value(low) * (size_bytes / low.size_bytes if rate_beyond else 1.0)
    high = points[at]
    part = (size_bytes - low.size_bytes) / (high.size_bytes - low.size_bytes)
    return value(low) + part * (value(high) - value(low))


@dataclass(frozen=True, slots=True)
class CopyPrediction:
    """What a snapshot should take: seconds of the link, and of the training thread to hand it over."""

    copy_s: float
    host_s: float


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """How tensors cross the link.

    Args:
        small_bytes: dense tensors from this size on are copied directly.
        chunk_bytes: at most so many bytes cross at a stretch; also the length of the pack on the device.
        delay_us: what an 8-byte copy of the model's waits for at most.
        within_bound: whether that is within what was asked for.
        reason: of this choice, for logs.
    """

    small_bytes: int
    chunk_bytes: int
    curve: CopyCurve
    delay_us: float
    within_bound: bool
    reason: str

    def predict(self, sizes: Iterable[int]) -> CopyPrediction:
        """For a snapshot of dense tensors of ``sizes`` bytes."""
        curve = self.curve
        copy_us = host_us = 0.0
        for size in sizes:
            direct = size >= self.small_bytes
            copy_us += curve.direct_us(size) if direct else curve.packed_us(size)
            host_us += curve.direct_host_us(size) if direct else curve.packed_host_us(size)
        return CopyPrediction(copy_us / 1e6, host_us / 1e6)


def choose_copy_plan(
    curve: CopyCurve,
    *,
    sizes: Sequence[int] = (),
    host_weight: float = 0.0,
    delay_us_max: float = DELAY_US_MAX,
) -> CopyPlan:
    """The crossover at which all copies cost least, and the fastest chunk that a small copy may wait for.

    Args:
        sizes: of the tensors, in bytes; none: as many bytes of each power of two.
        host_weight: the worth of a microsecond of the training thread in microseconds of the link: 0 where
            it runs ahead of the device, 1 where the device waits for it.
        delay_us_max: what a small copy of the model's may wait.
    Raises:
        ValueError: a size is not above 0.
    """
    if any(size <= 0 for size in sizes):
        raise ValueError("the size of a tensor is not above 0")
    weights: Mapping[int, float] = Counter(sizes) if sizes else {size: 1.0 / size for size in _SIZES}

    def cost(small_bytes: int) -> float:
        total = 0.0
        for size, weight in weights.items():
            if size >= small_bytes:
                total += weight * (curve.direct_us(size) + host_weight * curve.direct_host_us(size))
            else:
                total += weight * (curve.packed_us(size) + host_weight * curve.packed_host_us(size))
        return total

    # Of equal ones the largest: a pack costs the training thread less.
    small_bytes = min(reversed((*_SIZES, _NEVER)), key=cost)
    chunk = _choose_chunk(curve, delay_us_max)
    within = chunk.delay_us <= delay_us_max
    return CopyPlan(
        small_bytes=small_bytes,
        chunk_bytes=chunk.chunk_bytes,
        curve=curve,
        delay_us=chunk.delay_us,
        within_bound=within,
        reason=_reason(curve, small_bytes, chunk, delay_us_max, within),
    )


def _choose_chunk(curve: CopyCurve, delay_us_max: float) -> ChunkPoint:
    """The fastest one that keeps the bound, of about equal ones that with the least delay; if none does, that
    with the least delay.
    """
    points = curve.chunks or tuple(
        ChunkPoint(size, curve.link_gb_per_s, size / curve.link_gb_per_s / 1e3) for size in _CHUNKS
    )
    kept = [point for point in points if point.delay_us <= delay_us_max]
    if not kept:
        return min(points, key=lambda point: (point.delay_us, -point.gb_per_s))
    if not curve.chunks:
        # All have the rate of the link as far as is known; in truth each chunk costs a launch.
        return max(kept, key=lambda point: point.chunk_bytes)
    fastest = max(point.gb_per_s for point in kept)
    equal = [point for point in kept if point.gb_per_s >= _SAME_RATE * fastest]
    return min(equal, key=lambda point: (point.delay_us, point.chunk_bytes))


def _reason(curve: CopyCurve, small_bytes: int, chunk: ChunkPoint, delay_us_max: float, within: bool) -> str:
    direct = "packed whatever their size"
    if small_bytes < _NEVER:
        direct = f"direct from {small_bytes >> 10} KiB on"
    source = "measured" if curve.chunks else "not measured, taken for a whole chunk"
    bound = "within" if within else "no chunk is within"
    return (
        f"{curve.device}: tensors are {direct}; chunks of {chunk.chunk_bytes >> 20} MiB, for which a small "
        f"copy waits {chunk.delay_us:.0f} us ({source}), {bound} {delay_us_max:.0f} us"
    )


# bench/results/one_gpu_h100_202611.md. The direct copies of 4 and 256 KiB are those of before packs (the
# middle of the range that is given there; the rate of 4 KiB follows from the time to launch one). Delays were
# not measured.
H100_CURVE = CopyCurve(
    device="NVIDIA H100 80GB HBM3",
    link_gb_per_s=55.0,
    direct=(
        SizePoint(4 << 10, host_us=10.5, gb_per_s=0.39),
        SizePoint(256 << 10, host_us=17.0, gb_per_s=17.0),
        SizePoint(4 << 20, host_us=9.04, gb_per_s=52.1),
    ),
    packed=(
        SizePoint(4 << 10, host_us=0.82, gb_per_s=5.0),
        SizePoint(256 << 10, host_us=1.15, gb_per_s=49.9),
    ),
)
# For every device, until one measures its own.
DEFAULT_PLAN = choose_copy_plan(H100_CURVE)
