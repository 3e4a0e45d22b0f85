"""Jobs that forget what they must not: their first replay is not exact, and that must be noticed."""

from __future__ import annotations

from tests.e2e.cases import Job
from tests.e2e.parallel import pipeline
from tests.e2e.parallel.registry import Family

__all__ = ["CASES"]

CASES = Family("forgotten")


@CASES.case()
def record(seed: int) -> Job:
    """A norm over all stages' gradients, not passed through ``ckpt.record``, with ``freeze="inputs"``."""
    job = pipeline.recorded_norm(seed)
    job.on_start = None
    return job
