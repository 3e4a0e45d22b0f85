"""Why a replay may not have reproduced what was recorded: what usually does it in a job like this
one, the likeliest first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from ckptd.client.capture.step_state import Stateful

__all__ = ["likely_causes"]

_FIND_OUT = (
    "To find out, call ckpt.verify(run_step) after a few steps of a run that was never "
    "interrupted: if that fails, too, the step is not "
    "deterministic; if not, it is the restart that differs. docs/troubleshooting.md goes through it"
)


def likely_causes(what: str, *, changed: str, stateful: Mapping[str, Stateful], device: torch.device) -> str:
    """In one sentence each, numbered.

    Args:
        what: differed, as the message says it.
        changed: how this process differs from the one that recorded; "" if not in what is known to
            change bits.
        stateful: the user's objects.
    """
    causes = []
    if changed:
        causes.append(f"this process does not run as the one that recorded: {changed}")
    if "state[" in what:
        causes.append("an object in state= does not give back all that it needs to go on")
    if not any(_is_loader(item) for item in stateful.values()):
        causes.append(
            "the batches are others: the position of a loader that is neither in state= nor read "
            "through ckpt.batches(loader) is not restored"
        )
    elif any(getattr(item, "num_workers", 0) for item in stateful.values()):
        causes.append("the batches are others: samples are made with random numbers in loader workers")
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        causes.append(
            "kernels that are not deterministic: torch.use_deterministic_algorithms(True) names them"
            + ("" if workspace else ", with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment")
        )
    causes += [
        (
            "something random or timed that no snapshot has (a generator of your own, the clock, an "
            "order of a set)"
        ),
        "the step computes something from all gradients by hand: pass it through ckpt.record(name, value)",
        (
            "memory was corrupted: `ckptctl snapshots` shows what was quarantined, and the machine's "
            "log has its memory errors"
        ),
    ]
    listed = "; ".join(f"({number}) {cause}" for number, cause in enumerate(causes, 1))
    return f"Likely causes, the likeliest first: {listed}. {_FIND_OUT}"


def _is_loader(item: Stateful) -> bool:
    return any(hasattr(item, name) for name in ("dataset", "sampler", "batch_size"))
