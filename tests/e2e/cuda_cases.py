"""Training jobs that only a CUDA device can run; they need ``--device cuda``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.e2e.cases import Job, make, plain_body

__all__ = ["CUDA_CASES"]


def side_stream_body(job: Job, step: int, at: Callable[[str], None]) -> None:
    """The whole step runs on a stream of the user's own, as graph captures and some pipelines do."""
    stream = job.extra.setdefault("stream", torch.cuda.Stream())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plain_body(job, step, at)
    torch.cuda.current_stream().wait_stream(stream)


def behind_body(job: Job, step: int, at: Callable[[str], None]) -> None:
    """The device is far behind the host: what a snapshot reads is written long after it was asked for."""
    torch.cuda._sleep(20_000_000)
    plain_body(job, step, at)


def compiled_case(seed: int) -> Job:
    job = make(fused=True, sched=False)(seed)
    job.model.compile()
    return job


CUDA_CASES: dict[str, Callable[[int], Job]] = {
    "cuda_capturable": make(
        lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(3e-3, device="cuda"), capturable=True, foreach=True),
        sched=False,
    ),
    "cuda_fused_tensor_lr": make(
        lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(3e-3, device="cuda"), fused=True),
        sched=False,
    ),
    "cuda_side_stream": make(body=side_stream_body),
    "cuda_behind": make(body=behind_body),
    "cuda_compiled": compiled_case,
}
